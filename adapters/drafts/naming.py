"""What published drafts call the native names, found from the names present.

| trait | native -> published | seen in |
|---|---|---|
| `context` | `fc`, `hidden_norm`, `norm` -> `context_proj`, `context_norm`, `final_norm` | K3DSparkModel of Inferact, lightseek |
| `midlayer` | `layers.0.` -> `midlayer.` | SpecForge and TorchSpec Eagle3 heads |
| `model` | everything but the head and the vocabulary maps below `model.` | NeMo's Eagle3 heads, vLLM-style files |
| `logit_head` | `markov_head.` -> `logit_head.markov_head.` | old SpecForge DSpark exports |
| `flat` | `markov_head.markov_w1` -> `markov_w1`, `confidence_head.proj` -> `confidence_proj` | NVIDIA's DSpark |
| `codebook` | `*_codebook` -> `*_codebook.weight` | DFlash2 as z-lab's code saves it |
"""

from __future__ import annotations

from collections.abc import Iterable

PREFIXES: dict[str, tuple[tuple[str, str], ...]] = {
    "context": (("fc.weight", "context_proj.weight"), ("hidden_norm.", "context_norm."), ("norm.", "final_norm.")),
    "midlayer": (("layers.{layer}.", "midlayer."), ("layers.0.", "midlayer.")),
    "logit_head": (("markov_head.", "logit_head.markov_head."),),
    "flat": (("markov_head.", ""), ("confidence_head.proj.", "confidence_proj.")),
    "codebook": (
        ("candidate_selector.predecessor_codebook", "candidate_selector.predecessor_codebook.weight"),
        ("candidate_selector.successor_codebook", "candidate_selector.successor_codebook.weight"),
    ),
}
OUTSIDE_MODEL = ("lm_head.", "d2t", "t2d")
MARKS = {
    "context": "context_proj.weight", "midlayer": "midlayer.", "logit_head": "logit_head.", "flat": "markov_w1.weight",
    "codebook": "candidate_selector.predecessor_codebook.weight",
}  # fmt: skip


def traits_of(names: Iterable[str]) -> list[str]:
    """The traits of a published checkpoint's naming."""
    every = list(names)
    inside = [n for n in every if not n.startswith(OUTSIDE_MODEL)]
    traits = ["model"] if inside and all(n.startswith("model.") for n in inside) else []
    bare = [n.removeprefix("model.") for n in every]
    return traits + [trait for trait, mark in MARKS.items() if any(n.startswith(mark) for n in bare)]


def published_name(name: str, traits: Iterable[str]) -> str:
    """The published name of a native one (or name template)."""
    prefixed = False
    for trait in traits:
        prefixed = prefixed or trait == "model"
        for native, published in PREFIXES.get(trait, ()):
            if name.startswith(native):
                name = published + name[len(native) :]
                break
    return f"model.{name}" if prefixed and not name.startswith(OUTSIDE_MODEL) else name
