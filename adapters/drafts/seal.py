"""What a package's own config means and says, recorded so that every later edit of config or provenance is found and named.

| part of the block | holds | an edit of |
|---|---|---|
| `contract` | the native config that the file reads back to, the same for every runtime's file | any value a runtime reads |
| `config` | `keys-1` digest of the config.json beside the block | any other key of that file |
| `seal` | `keys-1` digest of the block itself | what was recorded |

Equal digests prove that nothing was edited by somebody who did not seal it again; who sealed it is a question for signatures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kconv.adapters.drafts.adapter import NATIVE, DraftSource
from kconv.adapters.drafts.reading import PROVENANCE as KEY
from kconv.errors import Problems
from kconv.text.canonical import canonical_json, changed_keys, keys_digest

FORMAT = 2
INHERITED = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "dtype")
SPOKEN = ("dialect", "aux_layer_ids", "is_causal")
PARTS = ("contract", "config", "seal")
Row = dict[str, Any]


def contract(native: Mapping[str, Any]) -> dict[str, Any]:
    """A native config with one spelling for everything that means the same: defaults written out, names of dialects left out.

    Raises KconvError for a config that its class refuses.
    """
    from kconv.modeling.drafts import config_class

    family = config_class(native["model_type"])
    config = family(**native)
    names = {*family.kinds(), *INHERITED} - set(SPOKEN)
    values = {name: _plain(getattr(config, name, None)) for name in names}
    values |= {
        "model_type": native["model_type"].removesuffix("_kimi_k25"),
        "layer_is_causal": list(config.causal_layers),
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "target_hidden_size": config.target_hidden_size or config.hidden_size,
        "window_rule": config.window_rule if "sliding_attention" in (config.layer_types or []) else "query",
    }
    return {name: values[name] for name in sorted(values)}


def sealed(block: Mapping[str, Any], config: Mapping[str, Any], native: Mapping[str, Any]) -> dict[str, Any]:
    """The block with its three parts.

    Args:
        block: what `provenance.build` made.
        config: the config.json that the block is for, which may hold one already.
        native: the native config that this file is read back to.
    """
    rest = {k: v for k, v in block.items() if k not in PARTS}
    about = {"contract": contract(native), "config": keys_digest(_without_block(config))}
    whole = {**rest, "format": FORMAT, **about}
    return {**whole, "seal": keys_digest(whole)}


def edits(block: Mapping[str, Any], source: DraftSource) -> list[Row]:
    """What of a draft's config and of its block is not as it was sealed; empty for a block without a seal."""
    if "seal" not in block:
        stated = (source.checkpoint.manifest or {}).get("provenance")
        row = {"field": f"{KEY}.seal", "recorded": stated, "found": None, "detail": "the seal was removed"}
        return [row] if stated else []
    rows = _contract_edits(block["contract"], contract(source.config))
    if source.layout != NATIVE:
        meant = {row["field"].removeprefix("draft.config.") for row in rows}
        changed = changed_keys(block["config"], _without_block(source.checkpoint.config), "sha256")
        rows += [_row(f"config.{key}", was, now, "config.json") for key, was, now in changed if key not in meant]
    rest = {k: v for k, v in block.items() if k != "seal"}
    changed = changed_keys(block["seal"], rest, "seal")
    stated = ((source.checkpoint.manifest or {}).get("provenance") or {}).values()
    if not changed and stated and block["seal"]["sha256"] not in stated:
        rows.append({"field": f"{KEY}.seal", "recorded": " or ".join(stated), "found": block["seal"]["sha256"],
                     "detail": "the block is not the one that kconv.json states"})  # fmt: skip
    return rows + [_row(f"{KEY}.{key}", was, now, "the block") for key, was, now in changed]


def refuse_edits(source: DraftSource) -> None:
    """Raise Problems when a draft's config contradicts the provenance that lies in it, or that was edited."""
    where = f"{source.checkpoint.where}/config.json"
    block = source.checkpoint.config.get(KEY)
    if block is None or source.problems:
        return
    if not _sound(block):
        raise Problems(f"{where}: {KEY} is damaged:", ["its seal is no digest"], hint="fetch the package again")
    lines = [f"{row['field']} is {row['found']!r}, {row['recorded']!r} was recorded" for row in edits(block, source)]
    if lines:
        hint = f"fetch the package again; a draft that is meant to differ is packaged anew, without {KEY}"
        raise Problems(f"{where} contradicts its own {KEY}:", lines, hint=hint)


def _sound(block: Any) -> bool:
    """Whether a block has the parts that are compared, each of its own kind, or none of them."""
    if not isinstance(block, dict) or not any(part in block for part in PARTS):
        return isinstance(block, dict)
    held = [block.get(part) for part in PARTS]
    return all(isinstance(part, dict) for part in held) and all(isinstance(part.get("keys"), dict) for part in held[1:] if part)


def _contract_edits(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[Row]:
    keys = sorted(was.keys() | now.keys())
    return [
        _row(f"draft.config.{key}", was.get(key), now.get(key), "the draft's config")
        for key in keys
        if canonical_json(was.get(key)) != canonical_json(now.get(key))
    ]


def _row(field: str, was: Any, now: Any, where: str) -> Row:
    kind = "edited" if was is not None and now is not None else "removed" if now is None else "added"
    return {"field": field, "recorded": was, "found": now, "detail": f"{where} was edited after packaging: {kind}"}


def _without_block(config: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k != KEY}


def _plain(value: Any) -> Any:
    """A value as JSON holds it."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value).removeprefix("torch.")
