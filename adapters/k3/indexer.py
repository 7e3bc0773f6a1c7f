"""Kimi K3.1: the sparse-attention indexer, from tensors where they say it, from the config or the user where they do not.

| of the indexer | comes from |
|---|---|
| heads, key width, layers, whether `k_norm` has a bias | the tensors `self_attn.indexer.*` |
| top-k | the one key of `dsa_config` (or `index_*` key) that names it, or `--dsa-topk` |
| eps of `k_norm` | the one key of `dsa_config` (or `index_*` key) that names it, or `--indexer-eps` |

The official config was not seen, so the key names are unknown: a value is taken only where exactly one key can mean it,
and the note says which. Where none does, nothing is guessed: `native` is refused until it is given, other targets need
neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kconv.checkpoint.reading import Checkpoint
from kconv.errors import KconvError
from kconv.names import number, ranges
from kconv.options import Options

Config = dict[str, Any]
MODEL_TYPES = ("kimi_k31", "kimi_k31_text")
PART = ".self_attn.indexer."
BLOCK = "dsa_config"
KEYS = ("index_", "indexer_", "dsa_")
UNVERIFIED = "Kimi K3.1 is unverified: its config and code were not seen; the indexer follows DeepSeek-V3.2's rule, unrotated"


@dataclass(frozen=True)
class Asked:
    """A number that only the config or the user can say: the option, what it is, its flag's example, words in a key's name."""

    option: str
    what: str
    example: str
    words: tuple[str, ...]

    @property
    def flag(self) -> str:
        """The option on the command line."""
        return "--" + self.option.replace("_", "-")


ASKED = (
    Asked("dsa_topk", "top-k", "2048", ("topk", "top_k")),
    Asked("indexer_eps", "eps of k_norm", "1e-6", ("eps",)),
)


def recognised(checkpoint: Checkpoint) -> bool:
    """Whether it is a K3.1 by its model type, its config block or its tensors."""
    config = checkpoint.config
    holders = [h for h in (config, config.get("text_config")) if isinstance(h, dict)]
    said = any(h.get("model_type") in MODEL_TYPES or BLOCK in h for h in holders)
    return (said and any("linear_attn_config" in h for h in holders)) or has_indexer(checkpoint)


def has_indexer(checkpoint: Checkpoint) -> bool:
    """Whether any tensor is an indexer's."""
    return any(PART in a.name for a in checkpoint.alike)


def indexer(checkpoint: Checkpoint, text: Config, root: str, options: Options,
            notes: list[str], problems: list[str]) -> Config | None:  # fmt: skip
    """The native `indexer_config`; None where there is no indexer. What is missing or contradictory goes to `problems`."""
    if isinstance(text.get("indexer_config"), dict):
        return text["indexer_config"]
    names = [n for a in checkpoint.alike if PART in a.name for n in a.names]
    if not names:
        _refuse_without(checkpoint, options, problems)
        return None
    said = _said(checkpoint.config)
    layers = sorted({i for n in names if n.startswith(root) and (i := _layer(n, root)) is not None})
    bias = any(n.endswith("indexer.k_norm.bias") for n in names)
    base = f"{root}layers.{layers[0] if layers else 0}{PART}"
    heads, width = (_rows(checkpoint, f"{base}{part}.weight", problems) for part in ("weights_proj", "wk"))
    notes.append(UNVERIFIED)
    _compare_layers(said, layers, text, problems)
    values = [_value(said, asked, getattr(options, asked.option), options.to == "native", notes, problems) for asked in ASKED]
    numbers = [i + 1 for i in layers]
    sizes = {"num_heads": heads, "head_dim": width, "topk": values[0], "norm_eps": values[1]}
    return {**sizes, "norm_bias": bias, "layers": numbers}


def _refuse_without(checkpoint: Checkpoint, options: Options, problems: list[str]) -> None:
    if recognised(checkpoint):
        problems.append(
            f"config.json is a Kimi K3.1's (model_type {checkpoint.config.get('model_type')!r}), but no tensor is an indexer's: "
            "without them attention would be dense; fetch what is missing, or the config.json that belongs to these weights"
        )
        return
    given = [asked.flag for asked in ASKED if getattr(options, asked.option) is not None]
    if given:
        raise KconvError(f"{', '.join(given)}: the checkpoint has no indexer", hint="leave the option out")


def _said(config: Config) -> Config:
    """What the config says of the indexer: its block's keys, and keys beside it that begin as DeepSeek's do."""
    found: Config = {}
    for holder in (config, config.get("text_config")):
        if not isinstance(holder, dict):
            continue
        found |= {k: v for k, v in holder.items() if k.startswith(KEYS) and k not in (BLOCK, "indexer_config")}
        block = holder.get(BLOCK)
        if block is not None and not isinstance(block, dict):
            hint = "give the checkpoint's own config.json"
            raise KconvError(f"config.json: {BLOCK} is {block!r}, which is no object", hint=hint)
        found |= {f"{BLOCK}.{k}": v for k, v in (block or {}).items()}
    return found


def _value(said: Config, asked: Asked, given: Any, needed: bool, notes: list[str], problems: list[str]) -> Any:
    """A number that the config names under exactly one key, or that the user gives; both must agree."""
    named = [k for k in said if any(w in k.rpartition(".")[2].lower() for w in asked.words)]
    keys, flag = [k for k in named if _is_number(said[k])], asked.flag
    if given is not None:
        other = [f"{k} {said[k]!r}" for k in keys if said[k] != given]
        if other:
            problems.append(f"{flag} {given} contradicts config.json: {', '.join(other)}; leave the option out")
        return given
    if len(keys) == 1:
        notes.append(f"the indexer's {asked.what} is {said[keys[0]]}, read from {keys[0]}")
        return said[keys[0]]
    if needed and keys:
        which = f"which of them is the indexer's {asked.what} cannot be known"
        problems.append(f"config.json names {', '.join(keys)}: {which}; give {flag}, for example {flag} {asked.example}")
    elif needed:
        text = f"neither the tensors nor config.json say the indexer's {asked.what}"
        problems.append(f"{text}: give it with {flag}, for example {flag} {asked.example}, as the publisher's code has it")
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _layer(name: str, root: str) -> int | None:
    return number(name.removeprefix(root + "layers.").partition(".")[0])


def _rows(checkpoint: Checkpoint, name: str, problems: list[str]) -> int:
    entry = checkpoint.entries.get(name)
    if entry is not None and entry.spec.shape:
        return entry.spec.shape[0]
    problems.append(f"the indexer's size is not known: {name} is missing or has no rows")
    return 1


def _compare_layers(said: Config, layers: list[int], text: Config, problems: list[str]) -> None:
    """The config's layer list, and the full-attention layers, against the layers that have an indexer."""
    numbers = [i + 1 for i in layers]
    mla = sorted((text.get("linear_attn_config") or {}).get("full_attn_layers") or [])
    if set(numbers) - set(mla):
        outside = sorted(set(numbers) - set(mla))
        problems.append(f"layers {ranges(outside)} (from 1) have an indexer but no full attention by full_attn_layers")
    for key, value in said.items():
        if isinstance(value, list) and value and all(type(i) is int for i in value) and sorted(value) != numbers:
            there = f"an indexer is in layers {ranges(numbers)} (from 1)"
            problems.append(f"config.json: {key} names layers {ranges(value)}, {there}")
    if not text.get("q_lora_rank"):
        problems.append("an indexer reads compressed queries, and config.json has no q_lora_rank")
