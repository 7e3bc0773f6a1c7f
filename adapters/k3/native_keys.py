"""From a published config to the native one: lift `text_config`, translate Transformers' names, drop what is stale.

| source | recognised by |
|---|---|
| multimodal Kimi K3 | `text_config` |
| Kimi K3 text, Kimi-Linear as published | `linear_attn_config` |
| Transformers' own `KimiLinearConfig` | `layer_types` with `linear_num_heads` |
"""

from __future__ import annotations

import copy
from typing import Any

from kconv.adapters.k3.config import ABSENT
from kconv.adapters.k3.dialects import OWN_KEYS, in_published_words
from kconv.adapters.tables.config import GENERATION_DEFAULTS
from kconv.errors import KconvError

Json = dict[str, Any]

# Beside generation defaults: keys that describe another file, class or format, or that this model has no use for.
STALE = GENERATION_DEFAULTS | {
    "architectures", "attention_bias", "attention_dropout", "auto_map", "head_dim", "model_type",
    "num_nextn_predict_layers", "output_router_logits", "pretraining_tp", "qk_head_dim", "quantization_config",
    "rope_interleave", "rope_parameters", "rope_scaling", "rope_theta", "text_config", "topk_method", "use_grouped_topk",
    "use_return_dict", "vision_config",
}  # fmt: skip
LINEAR_DEFAULTS: Json = {"gate_lower_bound": None, "use_full_rank_gate": False}
FROM_TOP = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "dtype")


def native_keys(config: Any, experts_format: str | None = None) -> Json:
    """Keyword arguments of `KimiK3TextConfig` for a published config; raises KconvError when it is none of those."""
    top = copy.deepcopy(config if isinstance(config, dict) else config.to_dict())
    text = top.get("text_config") or top
    text = text if isinstance(text, dict) else text.to_dict()
    text = {k: v for k, v in in_published_words(text).items() if k not in OWN_KEYS}
    if not isinstance(text.get("linear_attn_config"), dict):
        raise KconvError(
            f"config of model_type {top.get('model_type')!r} has no linear_attn_config: neither Kimi K3 nor Kimi-Linear",
            hint="give the config.json of the checkpoint, with its text_config",
        )
    keys = {**ABSENT, **{k: v for k, v in text.items() if k not in STALE}}
    keys["linear_attn_config"] = {**LINEAR_DEFAULTS, **text["linear_attn_config"]}
    if text.get("use_grouped_topk") is False:
        keys |= {"num_expert_group": 1, "topk_group": 1}
    for name in FROM_TOP:
        if keys.get(name) is None and top.get(name) is not None:
            keys[name] = top[name]
    if experts_format is not None or "experts_format" not in keys:
        keys["experts_format"] = experts_format or ("packed" if _is_mxfp4(top, text) else "bf16")
    return keys


def _is_mxfp4(top: Json, text: Json) -> bool:
    """The top block wins over a stale nested one, as in the reference's config class."""
    quantization = top.get("quantization_config") or text.get("quantization_config") or {}
    return quantization.get("format") == "mxfp4-pack-quantized"
