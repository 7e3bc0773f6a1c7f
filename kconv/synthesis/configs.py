"""config.json and the small files of a made-up checkpoint, in the published form.

| family | form |
|---|---|
| Kimi K3 | two levels; the quantisation block lies in `text_config`, beside defaults that Transformers 4.56 wrote there |
| Kimi K3 under the root `model.` | the text config alone |
| Kimi-Linear | flat, no quantisation block |

Layer lists count from 1. Special tokens keep their distance from the first special id, and the last two ids.
"""

from __future__ import annotations

import base64
import itertools
from typing import Any

from kconv.synthesis.shapes import BYTES, GROUP, K3Shape, LinearShape, TextShape
from kconv.synthesis.writing import dump_json

Json = dict[str, Any]
BOS, EOS, END_OF_MESSAGE, MEDIA = 0, 1, 2, 21  # distance from the first special id
FORMAT = "mxfp4-pack-quantized"
NOT_QUANTISED = ("self_attn", "shared_experts", r"mlp\.(gate|up|gate_up|down)_proj", "lm_head", "vision_tower", "mm_projector")

# Generation and encoder-decoder defaults of old releases, by value; a converter must not take them for the model's.
_NONE = """bad_words_ids begin_suppress_tokens cross_attention_hidden_size decoder_start_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id prefix problem_type
    sep_token_id suppress_tokens task_specific_params tokenizer_class"""
_FALSE = """add_cross_attention do_sample early_stopping is_decoder is_encoder_decoder output_attentions
    output_hidden_states output_scores remove_invalid_values return_dict_in_generate tf_legacy_loss
    tie_encoder_decoder torchscript use_bfloat16"""
_ZERO = "chunk_size_feed_forward encoder_no_repeat_ngram_size min_length no_repeat_ngram_size"
_ONE = "length_penalty repetition_penalty temperature top_p typical_p"
OLD_DEFAULTS: Json = {
    **dict.fromkeys(_NONE.split()),
    **dict.fromkeys(_FALSE.split(), False),
    **dict.fromkeys(_ZERO.split(), 0),
    **dict.fromkeys(_ONE.split(), 1.0),
    "diversity_penalty": 0.0, "num_beam_groups": 1, "num_beams": 1, "num_return_sequences": 1, "max_length": 20, "top_k": 50,
    "return_dict": True, "pruned_heads": {}, "_name_or_path": "", "transformers_version": "4.56.2",
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1},
}  # fmt: skip


def token_ids(s: TextShape) -> Json:
    """bos, eos and pad of a config."""
    first = s.first_special
    return {"bos_token_id": first + BOS, "eos_token_id": first + END_OF_MESSAGE, "pad_token_id": s.vocab - 1}


def linear_attention(s: TextShape) -> Json:
    """KDA's block of a config, with the layer lists."""
    return {
        "full_attn_layers": s.mla,
        "head_dim": s.kda_head_dim,
        "kda_layers": s.kda,
        "num_heads": s.kda_heads,
        "short_conv_kernel_size": s.conv_kernel,
    }


def shared_text_config(s: TextShape) -> Json:
    """The keys that Kimi K3 and Kimi-Linear share."""
    return {
        **token_ids(s),
        "architectures": ["KimiLinearForCausalLM"],
        "dtype": s.dtype,
        "first_k_dense_replace": s.dense_layers,
        "hidden_size": s.hidden,
        "initializer_range": 0.02,
        "intermediate_size": s.dense_width,
        "kv_lora_rank": s.kv_lora,
        "linear_attn_config": linear_attention(s),
        "max_position_embeddings": 1048576,
        "mla_use_nope": True,
        "model_type": "kimi_linear",
        "moe_intermediate_size": s.expert_width,
        "moe_layer_freq": s.moe_every,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": s.heads,
        "num_expert_group": s.expert_groups,
        "num_experts": s.most_experts,
        "num_experts_per_token": s.top_k,
        "num_hidden_layers": s.layers,
        "num_key_value_heads": s.heads,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": s.shared_experts,
        "q_lora_rank": s.q_lora or None,
        "qk_nope_head_dim": s.nope_dim,
        "qk_rope_head_dim": s.rope_dim,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": s.tied,
        "topk_group": s.topk_groups,
        "use_cache": True,
        "use_grouped_topk": True,
        "v_head_dim": s.v_dim,
        "vocab_size": s.vocab,
    }


def k3_text_config(s: K3Shape) -> Json:
    """Kimi K3's `text_config`, quantisation block included."""
    text = OLD_DEFAULTS | shared_text_config(s)
    text["linear_attn_config"] |= {"gate_lower_bound": -5.0, "use_full_rank_gate": True}
    text |= {
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": s.block,
        "auto_map": {
            "AutoConfig": "configuration_kimi_k3.KimiLinearConfig",
            "AutoModel": "modeling_kimi_linear.KimiLinearModel",
            "AutoModelForCausalLM": "modeling_kimi_linear.KimiLinearForCausalLM",
        },
        "hidden_act": "situ",
        "latent_moe_use_norm": bool(s.latent),
        "mla_use_output_gate": True,
        "routed_expert_hidden_size": s.latent or None,
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
    }
    if s.moe and not s.plain_experts:
        text["quantization_config"] = mxfp4_block()
    return text


def mxfp4_block() -> Json:
    """compressed-tensors' description of MXFP4 experts; its ignore list leaves out some plain tensors, as published."""
    weights: Json = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": GROUP, "num_bits": 4, "observer": "minmax",
        "observer_kwargs": {}, "scale_dtype": "torch.uint8", "strategy": "group", "symmetric": True, "type": "float",
        "zp_dtype": None,
    }  # fmt: skip
    group = {"format": FORMAT, "input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "config_groups": {"group_0": group},
        "format": FORMAT,
        "global_compression_ratio": None,
        "ignore": [f"re:.*{name}.*" for name in NOT_QUANTISED],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def k3_config(s: K3Shape) -> Json:
    """Kimi K3's config.json; the text config alone where the names have no multimodal root."""
    text = k3_text_config(s)
    if s.root == "model.":
        return text
    model = "modeling_kimi_k3.KimiK3ForConditionalGeneration"
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "auto_map": {"AutoConfig": "configuration_kimi_k3.KimiK3Config", "AutoModel": model, "AutoModelForCausalLM": model},
        **token_ids(s),
        "dtype": s.dtype,
        "ignore_index": -100,
        "image_placeholder": "<|kimi_image_placeholder|>",
        "media_placeholder_token_id": s.first_special + MEDIA,
        "model_type": "kimi_k3",
        "text_config": text,
        "tie_word_embeddings": s.tied,
        "vision_config": vision_config(s),
    }


def vision_config(s: K3Shape) -> Json:
    """Kimi K3's `vision_config`."""
    return {
        "_attn_implementation": "flash_attention_2", "activation_func": "gelu_pytorch_tanh", "attn_bias": False,
        "init_pos_emb_height": s.vision_grid, "init_pos_emb_time": 4, "init_pos_emb_width": s.vision_grid, "linear_bias": False,
        "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool", "mlp_type": "mlp2", "mm_hidden_size": s.vision_hidden,
        "mm_projector_type": "patchmergerv2", "norm_type": "rmsnorm", "patch_embed_proj_bias": False, "patch_size": 14,
        "pos_emb_interpolation_mode": "bilinear", "pos_emb_type": "divided_fixed", "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-05, "qkv_hidden_size": s.vision_qkv, "text_hidden_size": s.hidden,
        "vt_hidden_size": s.vision_hidden, "vt_intermediate_size": s.vision_width, "vt_num_attention_heads": s.vision_heads,
        "vt_num_hidden_layers": s.vision_layers,
    }  # fmt: skip


def linear_config(s: LinearShape) -> Json:
    """Kimi-Linear's config.json."""
    return shared_text_config(s) | {
        "auto_map": {
            "AutoConfig": "configuration_kimi.KimiLinearConfig",
            "AutoModel": "modeling_kimi.KimiLinearModel",
            "AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM",
        },
        "hidden_act": "silu",
        "routed_scaling_factor": 2.446,
    }


def generation_config(s: TextShape) -> dict[str, bytes]:
    """generation_config.json."""
    return {"generation_config.json": dump_json({"max_length": 1048576, "eos_token_id": token_ids(s)["eos_token_id"]})}


def tokenizer_files(s: TextShape) -> dict[str, bytes]:
    """A byte-level tokenizer whose ids fill the vocabulary."""
    first = s.first_special
    specials = {first + BOS: "[BOS]", first + EOS: "[EOS]", first + END_OF_MESSAGE: "<|end_of_msg|>"}
    specials |= {s.vocab - 2: "[UNK]", s.vocab - 1: "[PAD]"}
    tokenizer = {
        "added_tokens_decoder": {str(i): {"content": text, "special": True} for i, text in specials.items()},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "tokenizer_class": "TikTokenTokenizer",
    }
    return {"tokenizer_config.json": dump_json(tokenizer), "tiktoken.model": ranks(first)}


def ranks(count: int) -> bytes:
    """A tiktoken file of `count` ranks: all bytes, then pairs, then triples of them."""
    words = (bytes(w) for n in itertools.count(1) for w in itertools.product(range(BYTES), repeat=n))
    lines = (base64.b64encode(word) + b" %d" % i for i, word in enumerate(itertools.islice(words, count)))
    return b"\n".join(lines) + b"\n"
