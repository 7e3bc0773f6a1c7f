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

from kconv.adapters.k3_dialects import OWN_KEYS, in_published_words
from kconv.errors import KconvError

Json = dict[str, Any]

# Generation settings that old Transformers wrote into every config; keys that describe another file, class or format.
STALE = frozenset({
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
    "output_scores", "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id",
    "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
    "quantization_config", "auto_map", "architectures", "model_type", "_name_or_path", "transformers_version",
    "torch_dtype", "head_dim", "return_dict", "output_attentions", "output_hidden_states", "use_return_dict",
    "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "add_cross_attention",
    "cross_attention_hidden_size", "decoder_start_token_id", "tie_encoder_decoder", "finetuning_task",
    "problem_type", "id2label", "label2id", "prefix", "pruned_heads", "sep_token_id", "task_specific_params",
    "tf_legacy_loss", "torchscript", "use_bfloat16", "tokenizer_class", "num_nextn_predict_layers",
    "rope_theta", "rope_scaling", "rope_parameters", "rope_interleave", "topk_method", "use_grouped_topk",
    "pretraining_tp", "attention_dropout", "attention_bias", "text_config", "vision_config", "qk_head_dim",
    "output_router_logits",
})  # fmt: skip
LINEAR_DEFAULTS: Json = {"gate_lower_bound": None, "use_full_rank_gate": False}
# What a published config that leaves these out means: the plain Kimi-Linear layer, not Kimi K3's.
ABSENT: Json = {
    "hidden_act": "silu", "activation_situ_beta": None, "activation_situ_linear_beta": None, "attn_res_block_size": None,
    "routed_expert_hidden_size": None, "latent_moe_use_norm": False, "mla_use_output_gate": False, "q_lora_rank": None,
    "num_experts": None, "num_shared_experts": None, "num_key_value_heads": None, "first_k_dense_replace": 0,
}  # fmt: skip
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
