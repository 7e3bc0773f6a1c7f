"""What is doubtful about a draft: things that load, run, raise nothing, and cost acceptance.

| looked at | said when |
|---|---|
| mask id | it is the pad, bos or eos id, or the target's media placeholder (163605 on Kimi K3) |
| taps | prefix stream at the first layer of a residual block; the last layer; not ascending (some runtimes sort them) |
| what the checkpoint leaves open | block size, meaning of the layer ids, capture stream on Kimi K3 |
| YaRN | the amplitude recorded differs from what runtimes without `attention_factor` support take |
| causality | sliding layers whose causality differs between runtimes when unstated |
| order | neither positions nor causality: all mask positions of a block are the same to the draft |
| copied tables | embedding or head in the file; equal to the target's or not, by value |
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kconv.modeling.drafts.config import DraftConfig
from kconv.modeling.drafts.rope import mscale
from kconv.speculative.capture import tap_findings

PLAIN = ("dflash", "dflash_kimi_k25", "kimi_k3_dflash")  # nothing but attention tells their positions apart
PLACEHOLDER = "media_placeholder_token_id"


def review(config: DraftConfig, target_config: Any = None) -> list[str]:
    """Findings on a draft's config, and on its fit to a target's config where one is given (object or dict, wrapper or text)."""
    return [*_open(config, target_config), *doubts(config, target_config)]


def doubts(config: DraftConfig, target_config: Any = None) -> list[str]:
    """As `review`, without what the config leaves open: reading a published config says that already."""
    return [
        *_mask(config, target_config),
        *_taps(config, target_config),
        *_rope(config),
        *_causality(config),
        *_order(config),
    ]


def _value(config: Any, key: str) -> Any:
    return config.get(key) if isinstance(config, dict) else getattr(config, key, None)


def _text(config: Any) -> Any:
    return (_value(config, "text_config") or config) if config is not None else None


def _ids(value: Any) -> list[int]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _mask(config: DraftConfig, target: Any) -> list[str]:
    mask = config.mask_token_id
    if mask is None:
        return []
    roles = {key: _ids(getattr(config, key)) for key in ("pad_token_id", "bos_token_id", "eos_token_id")}
    for source in (target, _text(target)):
        for key in (*roles, PLACEHOLDER):
            roles[key] = roles.get(key, []) + _ids(_value(source, key) if source is not None else None)
    return [
        f"mask_token_id {mask} is the target's {key}: right only if the draft was trained with it"
        for key, ids in roles.items()
        if mask in ids
    ]


def _taps(config: DraftConfig, target: Any) -> list[str]:
    taps = config.target_layer_ids
    if taps is None:
        return []
    text = _text(target)
    depth = config.target_num_hidden_layers or _value(text, "num_hidden_layers")
    block = _value(text, "attn_res_block_size") if text is not None else (12 if depth == 93 else None)
    said = tap_findings(taps, depth or max(taps) + 2, block, config.capture_stream)
    if sorted(taps) != taps:
        said.append(
            f"taps {taps} are not ascending: MAX appends in layer order and TokenSpeed refuses; `fc` was trained on this order"
        )
    return said


def _open(config: DraftConfig, target: Any) -> list[str]:
    said = []
    if config.block_size is None and config.model_type != "eagle3":
        said.append("block_size is not stated: a serving flag has to give the number of drafted tokens")
    if config.target_layer_ids is None:
        said.append(f"layer ids {config.aux_layer_ids} are stated without saying whether they are outputs or boundaries")
    depth = config.target_num_hidden_layers
    on_k3 = _value(_text(target), "attn_res_block_size") is not None if target is not None else depth in (None, 93)
    if config.capture_stream is None and on_k3:
        said.append("the capture stream is not stated: on Kimi K3 the wrong one costs acceptance without an error")
    return said


def _rope(config: DraftConfig) -> list[str]:
    rope = config.rope_parameters or {}
    if rope.get("rope_type") != "yarn":
        return []
    used, plain = rope["attention_factor"], mscale(float(rope["factor"]))
    if abs(used - plain) < 1e-9:
        return []
    return [
        f"YaRN attention_factor {used:g}: a runtime that ignores mscale and mscale_all_dim takes {plain!r}; state it when serving"
    ]


def _causality(config: DraftConfig) -> list[str]:
    sliding = "sliding_attention" in (config.layer_types or [])
    if not sliding or any(config.causal_layers):
        return []
    return ["sliding layers are bidirectional in the block: write is_causal false, or vLLM and SGLang run them causally"]


def _order(config: DraftConfig) -> list[str]:
    alike = config.model_type in PLAIN and config.rope is None and not any(config.causal_layers)
    if not alike or config.block_size is None or config.num_draft_tokens < 2:
        return []
    return [
        f"without positions and without causality the {config.num_draft_tokens} mask positions of a block get the same hidden "
        "state, so that the draft can only propose one token for all of them"
    ]


def copied_tables(draft: Any, target: Any) -> dict[str, bool]:
    """For each table the draft's file holds of its own, whether it equals the target's bit for bit."""
    own: dict[str, tuple[Tensor, Any]] = {}
    if hasattr(draft, "embed_tokens"):
        own["embed_tokens"] = (draft.embed_tokens.weight, target.get_input_embeddings())
    if hasattr(draft, "lm_head"):
        own["lm_head"] = (draft.lm_head.weight, target.get_output_embeddings())
    return {name: _same(mine, theirs.weight) for name, (mine, theirs) in own.items()}


def _same(mine: Tensor, theirs: Tensor) -> bool:
    return mine.shape == theirs.shape and bool((mine.to(theirs.device, theirs.dtype) == theirs).all())
