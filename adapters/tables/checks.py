"""What a K3-family checkpoint says twice, or differently in its config and its tensors; each finding names the remedy.

| found | answer |
|---|---|
| layers under two roots; residual tensors in two spellings | problem: which files hold which |
| a head that is missing although untied, or stored although tied | problem with the two remedies, one of them `--tie` |
| tensors of layers that the config does not have, next-token layers among them | problem |
| `num_nextn_predict_layers` without such tensors | note, and the written config says 0 |
| the names of Transformers' own modules | refused: saved again, it has the published ones |
| a quantisation block beside plain experts, or packed experts without one | note: the tensors count |
| `auto_map` entries whose file is not there | note, and they are removed from a lifted config |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kconv.checkpoint.reading import Checkpoint
from kconv.checkpoint.side_files import absent_modules
from kconv.errors import KconvError
from kconv.names import folded
from kconv.spec import SAFETENSORS_NAMES

Config = dict[str, Any]
HEAD = "lm_head.weight"
MOST_PADDED = 1 << 20


def published_dtype(config: Config) -> set[str]:
    """The dtype of the config that a native checkpoint was made from, by its safetensors name; empty where it says none."""
    nested = config.get("text_config")
    parts = [part for part in (nested, config) if isinstance(part, dict)]
    said = [part.get(key) for part in parts for key in ("dtype", "torch_dtype")]
    return {SAFETENSORS_NAMES[name] for name in map(str, said) if name in SAFETENSORS_NAMES}


def example(checkpoint: Checkpoint, names: Sequence[str]) -> str:
    """How many tensors, one of them, and its file."""
    first = names[0]
    return f"{len(names)} tensor{'s' * (len(names) > 1)}, {first} in {checkpoint.entries[first].file}"


def two_roots(checkpoint: Checkpoint, roots: Sequence[str]) -> str:
    """The problem of layers under several roots."""
    found = (f"{r} ({example(checkpoint, [n for n in checkpoint.entries if n.startswith(r + 'layers.')])})" for r in roots)
    return f"layers under two roots: {' and '.join(found)}; the root must be one: remove the tensors that do not belong"


def two_spellings(checkpoint: Checkpoint, plain: Sequence[str], dotted: Sequence[str]) -> str:
    """The problem of attention-residual tensors in two spellings."""
    return (
        f"attention-residual tensors in two spellings: {example(checkpoint, plain)}; and {example(checkpoint, dotted)}; "
        "which of them count cannot be known: remove one set"
    )


def own_names(checkpoint: Checkpoint) -> None:
    """Refuses names of Transformers' own modules, which `save_pretrained` writes only when it is told to."""
    if any(".self_attn.forget_gate." in a.name for a in checkpoint.alike):
        own = [n for n in checkpoint.entries if ".self_attn.forget_gate." in n]
        raise KconvError(
            f"{checkpoint.where} has the names of Transformers' own modules ({example(checkpoint, own)}), not the published ones",
            hint="load it with Transformers and save it again: save_pretrained(folder) without save_original_format=False",
        )


def manifest_facts(facts: Config, heads: int, where: str) -> Config:
    """What the manifest of a native checkpoint says of its published form; raises KconvError where it cannot be."""
    kinds = {"root": str, "head": str, "dotted_res": bool, "dense_as_moe": bool, "a_log_shape": list, "experts": list,
             "formats": list, "hf_quant_config": str}  # fmt: skip
    wrong = next((key for key, kind in kinds.items() if key in facts and not isinstance(facts[key], kind)), None)
    shape = facts.get("a_log_shape", [heads])
    if wrong is None and not (all(type(n) is int for n in shape) and a_log_form(tuple(shape), heads)):
        wrong = "a_log_shape"
    if wrong:
        raise KconvError(
            f"{where}/kconv.json: facts.{wrong} is {facts[wrong]!r}, which no published checkpoint of this config has",
            hint="copy kconv.json again from the conversion it came from",
        )
    return dict(facts)


def a_log_form(shape: tuple[int, ...], heads: int) -> bool:
    """Whether a shape is one of A_log's: [H], H padded to a multiple of 8, or [1, 1, H, 1]."""
    return shape in ((heads,), (1, 1, heads, 1)) or (len(shape) == 1 and heads < shape[0] < MOST_PADDED and shape[0] % 8 == 0)


def tied_head(checkpoint: Checkpoint, head: str, *, config_ties: bool, asked: bool, problems: list[str]) -> bool:
    """Whether the head is the embedding; appends a problem where config, tensors and `--tie` contradict each other."""
    stored = checkpoint.entries.get(head)
    if stored is None:
        if not (config_ties or asked):
            problems.append(
                f"{head} is missing and config.json says tie_word_embeddings false: "
                "--tie if the embedding is the head, or fetch the file that holds the head"
            )
        return True
    if config_ties and not asked:
        problems.append(
            f"{head} is stored in {stored.file} although config.json says tie_word_embeddings true: "
            "--tie leaves it out (the embedding is the head), or set tie_word_embeddings to false if the stored head counts"
        )
    elif asked and not config_ties:
        problems.append(f"--tie: {head} is stored in {stored.file} and config.json says untied; leave the option out")
    return config_ties


def beyond(checkpoint: Checkpoint, names: Sequence[str], depth: int, problems: list[str]) -> None:
    """Tensors of layers after the last one."""
    if not names:
        return
    some = "; ".join(folded(names, most=2))
    problems.append(
        f"config.json has {depth} layers (0-{depth - 1}), but {example(checkpoint, names)} lie beyond ({some}): "
        "num_hidden_layers is wrong, or they are next-token prediction layers, which kconv does not convert"
    )


def next_tokens(text: Config, stored: bool, notes: list[str]) -> None:
    """Next-token layers that the config promises and the tensors lack; the written config says what is there."""
    promised = text.get("num_nextn_predict_layers")
    if promised and not stored:
        notes.append(f"config.json promises num_nextn_predict_layers {promised}, the weights hold none; written as 0")
        text["num_nextn_predict_layers"] = 0


def quantized(block: Config | None, stored: bool, notes: list[str]) -> None:
    """A quantisation block without quantised tensors, or the reverse."""
    if block and not stored:
        notes.append("config.json has a quantization_config, but no weight is quantised: the tensors count")
    elif not block and stored:
        notes.append("config.json has no quantization_config, but weights are quantised: the tensors count")


def auto_map(config: Config, present: Iterable[str], notes: list[str]) -> Config:
    """The config without `auto_map` entries whose files are not there; says so in `notes`."""
    absent = absent_modules(config.get("auto_map"), present)
    if not absent:
        return config
    files = sorted({f for lacking in absent.values() for f in lacking})
    notes.append(f"auto_map entries removed ({', '.join(sorted(absent))}): {', '.join(files)} not there")
    kept = {k: v for k, v in config["auto_map"].items() if k not in absent}
    return {k: v for k, v in config.items() if k != "auto_map"} | ({"auto_map": kept} if kept else {})
