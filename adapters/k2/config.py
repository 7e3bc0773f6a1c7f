"""config.json of a Kimi K2 checkpoint, lifted for each target.

| target | config |
|---|---|
| native, text | the text config as `DeepseekV3ForCausalLM`, without remote code, generation or quantisation keys |
| native, with vision | `Kimi_K25ForConditionalGeneration`: the same under `text_config`, the tower's keys in its words |
| hf-text | the text config as published, `kimi_k2` |
| hf | the source's own config, kept word for word in the manifest |

Transformers reads the published `vt_*` keys of the tower nowhere: it would take its defaults, which are K2.5's own sizes.
"""

from __future__ import annotations

import copy
from typing import Any

from kconv.adapters.tables.config import GENERATION_DEFAULTS, HINT, TOKEN_IDS, quantization, without_prefix
from kconv.adapters.tables.edits import edited
from kconv.adapters.tables.values import above_zero, counts, flags, is_count
from kconv.errors import KconvError
from kconv.spec import FLOATS, SAFETENSORS_NAMES

Config = dict[str, Any]
TEXT_TYPES = ("kimi_k2", "deepseek_v3")
VISION_KEYS = {
    "vt_hidden_size": "hidden_size", "vt_intermediate_size": "intermediate_size", "vt_num_attention_heads": "num_attention_heads",
    "vt_num_hidden_layers": "num_hidden_layers", "init_pos_emb_height": "pos_emb_height", "init_pos_emb_width": "pos_emb_width",
    "init_pos_emb_time": "pos_emb_time", "patch_size": "patch_size", "merge_kernel_size": "merge_kernel_size",
}  # fmt: skip
# Transformers' defaults, for a published tower that leaves a key out.
VISION_DEFAULTS: Config = {
    "patch_size": 14, "pos_emb_height": 64, "pos_emb_width": 64, "pos_emb_time": 4, "num_attention_heads": 16,
    "num_hidden_layers": 27, "hidden_size": 1152, "intermediate_size": 4304, "merge_kernel_size": [2, 2],
}  # fmt: skip
NOT_LIFTED = frozenset({
    "quantization_config", "auto_map", "architectures", "model_type", "scoring_func", "topk_method", "ep_size", "aux_loss_alpha",
    "seq_aux", "num_experts",
})  # fmt: skip


def text_config(config: Config) -> Config:
    """The text model's config; raises KconvError where it is another family's, or not what Transformers' class computes."""
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else config
    found = text.get("model_type")
    if found not in TEXT_TYPES:
        where = "text_config.model_type" if text is nested else "model_type"
        raise KconvError(f"config.json: {where} is {found!r}", hint=f"a Kimi K2 text model has one of {', '.join(TEXT_TYPES)}")
    merged = {**text, **{k: config[k] for k in TOKEN_IDS if config.get(k) is not None}}
    merged["tie_word_embeddings"] = bool(text.get("tie_word_embeddings") or config.get("tie_word_embeddings"))
    merged["dtype"] = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    dtype = merged["dtype"]
    if dtype is not None and SAFETENSORS_NAMES.get(str(dtype).removeprefix("torch.")) not in FLOATS:
        raise KconvError(f"config.json: dtype is {dtype!r}, which is no format of weights", hint="write for example bfloat16")
    _computes(merged)
    return merged


def value_faults(text: Config) -> list[str]:
    """What keeps a text config from being a model, whatever the target; keys left out have the published class's defaults."""
    c = {"rms_norm_eps": 1e-6, "routed_scaling_factor": 2.5, "num_experts_per_tok": 8, "norm_topk_prob": True,
         "n_group": 8, "topk_group": 4} | text  # fmt: skip
    found = [*above_zero(c, ("rms_norm_eps",))]
    if c.get("n_routed_experts"):
        sizes = ("num_experts_per_tok", "n_group", "topk_group")
        found += [*above_zero(c, ("routed_scaling_factor",)), *flags(c, ("norm_topk_prob",)), *counts(c, sizes)]
        if all(is_count(c[key]) for key in sizes):
            found += _chosen(c)
    return [f"config.json: {line}; correct it, or give the checkpoint's own config.json" for line in found]


def _chosen(c: Config) -> list[str]:
    """Experts against top-k and groups."""
    top, groups, of, experts = (c[k] for k in ("num_experts_per_tok", "n_group", "topk_group", "n_routed_experts"))
    found = [f"num_experts_per_tok = {top} exceeds the {experts} experts"] * (top > experts)
    found += [f"{experts} experts do not divide into n_group = {groups} groups"] * bool(experts % groups)
    return found + [f"topk_group = {of} exceeds n_group = {groups}"] * (of > groups)


def absent_note(text: Config) -> list[str]:
    """One note that names the computing keys that a config leaves out."""
    experts = ("routed_scaling_factor", "num_experts_per_tok", "norm_topk_prob", "n_group", "topk_group")
    keys = ("rms_norm_eps", *(experts if text.get("n_routed_experts") else ()))
    absent = [key for key in keys if key not in text]
    return [f"config.json leaves out {', '.join(absent)}: the published class's defaults are taken"] if absent else []


def _computes(text: Config) -> None:
    """The router that DeepSeek-V3 has in Transformers is the only one."""
    for key, only in {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}.items():
        if text.get(key, only) != only:
            raise KconvError(f"config.json: {key} is {text[key]!r}", hint=f"DeepSeek-V3's router knows {only!r} alone; " + HINT)


def vision_config(config: Config) -> Config:
    """The tower's config in Transformers' words, from either naming."""
    vision = config.get("vision_config") or {}
    own = {k: v for k, v in vision.items() if k in VISION_DEFAULTS}
    return VISION_DEFAULTS | own | {own_key: vision[key] for key, own_key in VISION_KEYS.items() if key in vision}


def native_config(original: Config, text: Config, *, vision: bool) -> Config:
    """The config with which Transformers' own class loads the native layout."""
    drop = GENERATION_DEFAULTS | NOT_LIFTED
    lifted = {k: copy.deepcopy(v) for k, v in text.items() if k not in drop} | {"model_type": "deepseek_v3"}
    if not vision:
        return lifted | {"architectures": ["DeepseekV3ForCausalLM"]}
    tower = original.get("vision_config") or {}
    made = {
        "architectures": ["Kimi_K25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": lifted["dtype"],
        "tie_word_embeddings": lifted["tie_word_embeddings"], **{k: lifted[k] for k in TOKEN_IDS if k in lifted},
        "text_config": lifted, "vision_config": vision_config(original),
    }  # fmt: skip
    sources = {
        "projection_hidden_size": (tower, "mm_hidden_size"), "projection_layer_norm_eps": (tower, "projector_ln_eps"),
        "image_token_id": (original, "media_placeholder_token_id"),
    }  # fmt: skip
    for key, (holder, name) in sources.items():
        value = original.get(key, holder.get(name))
        made |= {} if value is None else {key: value}
    return made


def hf_text_config(original: Config, text: Config, root: str, *, quantized: bool) -> Config:
    """The text config as published, flat; the quantisation block's names without the root's prefix."""
    lifted = {k: copy.deepcopy(v) for k, v in text.items() if k != "quantization_config"}
    lifted |= {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    block = quantization(original, [])
    return lifted | ({"quantization_config": without_prefix(block, root.removesuffix("model."))} if quantized and block else {})


def published_config(original: Config, text: Config, *, quantized: bool) -> Config:
    """The published config word for word, but for depth and dtype, and without a quantisation block where nothing is."""
    config, before = copy.deepcopy(original), text_config(original)
    holders = [h for h in (config, config.get("text_config")) if isinstance(h, dict)]
    for key in ("num_hidden_layers", "dtype", "tie_word_embeddings"):
        if text.get(key) != before.get(key):
            holders[-1][key] = text[key]
            for holder in holders:
                holder.update({k: text[key] for k in (key, "torch_" + key) if k in holder})
    for holder in holders if not quantized else ():
        holder.pop("quantization_config", None)
    return config


def config_edits(native: Config, manifest: Config | None) -> Config:
    """What a native config says otherwise than the conversion that the manifest records wrote it; {} without one.

    Keys that the conversion did not write are Transformers' own defaults, which saving adds; its `rope_parameters` hold theta.
    """
    original = (manifest or {}).get("source", {}).get("config")
    if not original:
        return {}
    wrote = native_config(original, text_config(original), vision=False)
    text = native.get("text_config") or native
    found = {**text, **{k: native[k] for k in TOKEN_IDS if native.get(k) is not None}}
    theta = (found.get("rope_parameters") or {}).get("rope_theta")
    found |= {} if theta is None else {"rope_theta": theta}
    return edited(wrote, {k: v for k, v in found.items() if k in wrote}, GENERATION_DEFAULTS | NOT_LIFTED)
