"""config.json of a K3 checkpoint, read at both levels and lifted for each target.

| target | config |
|---|---|
| native | the text config, `model_type kimi_k3_text`, without generation defaults, vision, remote code or quantisation keys |
| hf-text | the text config as `KimiLinearForCausalLM`, for clients that run the checkpoint's own code |
| hf | the source's own config, kept word for word in the manifest |

The quantisation block may stand at the top level or in `text_config`; where both exist the top one counts, because a
tool that re-quantises a checkpoint writes only that and leaves the other behind.
"""

from __future__ import annotations

import copy

from kconv.adapters.k3.dialects import OWN_KEYS, in_published_words
from kconv.adapters.k3.values import faults
from kconv.adapters.tables.config import GENERATION_DEFAULTS, HINT, TOKEN_IDS, Config, quantization, without_prefix
from kconv.adapters.tables.edits import edited
from kconv.errors import KconvError
from kconv.spec import FLOATS, SAFETENSORS_NAMES

# What leaving a key out means in a published config (Kimi-Linear's do): the published class's own default. The native config
# says it, since its defaults are Kimi K3's.
ABSENT: Config = {
    "hidden_act": "silu", "activation_situ_beta": None, "activation_situ_linear_beta": None, "attn_res_block_size": None,
    "routed_expert_hidden_size": None, "latent_moe_use_norm": False, "mla_use_output_gate": False, "q_lora_rank": None,
    "num_experts": None, "num_shared_experts": None, "num_key_value_heads": None, "first_k_dense_replace": 0,
    "rms_norm_eps": 1e-6, "num_experts_per_token": None, "mla_use_nope": False, "moe_layer_freq": 1, "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 1.0, "num_expert_group": 1, "topk_group": 1,
}  # fmt: skip
# What leaving a key out means in a native config: the defaults of `kconv.modeling.KimiK3TextConfig`, of what is computed.
NATIVE_ABSENT: Config = {
    "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "attn_res_block_size": 12,
    "routed_expert_hidden_size": 3584, "latent_moe_use_norm": True, "mla_use_output_gate": True, "q_lora_rank": 1536,
    "num_shared_experts": 2, "num_key_value_heads": None, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5,
    "num_experts_per_token": 16, "mla_use_nope": True, "moe_layer_freq": 1, "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 1.0, "num_expert_group": 1, "topk_group": 1,
    "mla_norm_eps": 1e-6, "residual_in_fp32": True, "initializer_range": 0.02, "max_position_embeddings": 1048576,
    "use_cache": True,
}  # fmt: skip
NATIVE_ONLY = ("experts_format", "num_experts_per_layer", "mla_norm_eps", "residual_in_fp32")
DSA = "dsa_config"
NATIVE_TYPE = "kimi_k3_text"
TEXT_TYPES = ("kimi_linear", NATIVE_TYPE, "kimi_k31", "kimi_k31_text")


def text_config(config: Config, *, trusted: bool = False) -> Config:
    """The text model's config, from a multimodal or a flat one; raises KconvError saying which value was found where.

    `trusted` takes another model_type too: the tensors say what it is.
    """
    nested = config.get("text_config")
    if nested is not None and not isinstance(nested, dict):
        raise KconvError(f"config.json: text_config is {nested!r}, which is no object", hint=HINT)
    text = nested or config
    found = text.get("model_type")
    if found not in TEXT_TYPES and not trusted:
        where = "text_config.model_type" if text is nested else "model_type"
        raise KconvError(f"config.json: {where} is {found!r}", hint=f"a K3 text model has one of {', '.join(TEXT_TYPES)}")
    merged = (NATIVE_ABSENT if found == NATIVE_TYPE else {}) | in_published_words(text)
    for key in TOKEN_IDS:
        if config.get(key) is not None:
            merged[key] = config[key]
    merged["tie_word_embeddings"] = bool(text.get("tie_word_embeddings") or config.get("tie_word_embeddings"))
    merged["dtype"] = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    dtype = merged["dtype"]
    if dtype is not None and SAFETENSORS_NAMES.get(str(dtype).removeprefix("torch.")) not in FLOATS:
        raise KconvError(f"config.json: dtype is {dtype!r}, which is no format of weights", hint="write for example bfloat16")
    return merged


def native_config(text: Config, *, experts_format: str, counts: dict[int, int], layers: int) -> Config:
    """The config of a native checkpoint: what computes, nothing else."""
    drop = GENERATION_DEFAULTS | OWN_KEYS | {"quantization_config", "auto_map", "architectures", "model_type", DSA}
    lifted = ABSENT | {k: copy.deepcopy(v) for k, v in text.items() if k not in drop}
    lifted |= {"model_type": NATIVE_TYPE, "architectures": ["KimiK3ForCausalLM"]}
    if text.get("use_grouped_topk") is False:
        lifted |= {"num_expert_group": 1, "topk_group": 1}
    lifted["experts_format"] = "packed" if experts_format == "packed" else "bf16"
    found = set(counts.values())
    if len(found) > 1:
        lifted["num_experts_per_layer"] = [counts.get(i, 0) for i in range(layers)]
    elif found:
        lifted["num_experts"] = found.pop()  # a pruned checkpoint's config may still say the old number
    return lifted


def value_faults(text: Config, counts: dict[int, int]) -> list[str]:
    """What keeps a text config from being a model, whatever the target; `counts` are the experts that the tensors hold."""
    native = native_config(text, experts_format="", counts=counts, layers=text["num_hidden_layers"])
    filled = {"num_experts_per_layer": None, **native, "indexer_config": None}
    return [f"config.json: {line}; correct it, or give the checkpoint's own config.json" for line in faults(filled)]


def absent_note(text: Config, native: Config) -> list[str]:
    """One note that names the computing keys which a published config leaves out, and what they then are."""
    experts = {"num_experts_per_token", "moe_renormalize", "moe_router_activation_func", "routed_scaling_factor"}
    keys = ("rms_norm_eps", "mla_use_nope", "hidden_act", *(sorted(experts) if text.get("num_experts") else ()))
    absent = [k for k in keys if k not in text]
    said = ", ".join(f"{k} ({native.get(k)!r})" for k in absent)
    return [f"config.json leaves out {said}: the published class's defaults are taken"] if absent else []


def hf_text_config(config: Config, text: Config, root: str, *, quantized: bool) -> Config:
    """The text config as the checkpoint's own remote code reads it: names without the root's prefix."""
    lifted = {k: copy.deepcopy(v) for k, v in text.items() if k not in ("quantization_config", *NATIVE_ONLY)}
    lifted |= {"model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"]}
    if lifted.pop("indexer_config", None):  # Kimi K3.1's classes are not known: its own words stay
        own = config.get("text_config") or config
        lifted |= {k: copy.deepcopy(h[k]) for h in (config, own) for k in h if k.startswith((DSA, "index_"))}
        lifted |= {k: own[k] for k in ("model_type", "architectures") if k in own}
    block = quantization(config, [])
    if quantized and block:
        lifted["quantization_config"] = without_prefix(block, root.removesuffix("model."))
    return lifted


def published_config(original: Config, text: Config, *, quantized: bool) -> Config:
    """The published config word for word, but for what the tensors no longer agree with.

    `text` is the text config that describes the tensors; where its depth, dtype or tie differs from the original's, that
    is written, and the quantisation blocks go where no expert is `quantized`.
    """
    config, before = copy.deepcopy(original), text_config(original, trusted=True)
    holders = [h for h in (config, config.get("text_config")) if isinstance(h, dict)]
    for key in ("num_hidden_layers", "linear_attn_config", "tie_word_embeddings", "dtype"):
        if text.get(key) != before.get(key):
            holders[-1][key] = text[key]
            for holder in holders:
                holder.update({k: text[key] for k in (key, "torch_" + key) if k in holder})
    for holder in holders if not quantized else ():
        holder.pop("quantization_config", None)
    return config


def config_edits(native: Config, manifest: Config | None) -> Config:
    """What a native config says otherwise than the conversion that the manifest records wrote it; {} without one."""
    original = (manifest or {}).get("source", {}).get("config")
    if native.get("model_type") != NATIVE_TYPE or not original:
        return {}
    wrote = NATIVE_ABSENT | native_config(text_config(original, trusted=True), experts_format="", counts={}, layers=0)
    found = {**NATIVE_ABSENT, **native}
    for config in (wrote, found):
        config["num_key_value_heads"] = config["num_key_value_heads"] or config.get("num_attention_heads")
    return edited(wrote, found, GENERATION_DEFAULTS | OWN_KEYS | {"quantization_config", "auto_map", DSA, "residual_in_fp32"})


def cut_layers(text: Config, first: int, last: int) -> Config:
    """The config of layers 0..last, when the cut starts at 0; otherwise the config is left as it is."""
    if first != 0:
        return text
    cut = copy.deepcopy(text)
    cut["num_hidden_layers"] = last + 1
    if cut.get("indexer_config"):
        cut["indexer_config"]["layers"] = [i for i in cut["indexer_config"]["layers"] if i <= last + 1]
    for key in ("kda_layers", "full_attn_layers"):
        cut["linear_attn_config"][key] = [i for i in cut["linear_attn_config"][key] if i <= last + 1]
    return cut
