"""config.json of a draft as each runtime reads it, written from the native config that means one thing a key.

| file | read by | taps are |
|---|---|---|
| `dflash`, `dflash2`, `dspark` (GQA): `architectures` [DFlashDraftModel, ...], `model_type` qwen3, `dflash_config` | vLLM, SGLang, TensorRT-LLM, z-lab's Transformers code, MLX | outputs; vLLM adds 1 itself |
| `dspark` (MLA): `K3DSparkModel`, flat keys; `num_target_layers` counts the taps | vLLM, TokenSpeed | outputs |
| `kimi_k3_dflash`: `KimiK3DFlashDraftModel`, `model_type` kimi_linear | NeMo AutoModel | outputs |
| `eagle3`: `eagle_config` | vLLM, SGLang | boundaries (output + 1): vLLM takes them as they are, SGLang too unless the first is 1 |
| `vllm`, for GQA DSpark alone: `Qwen3DSparkModel`, flat keys | vLLM | outputs; it adds 1 itself |
| `max` | MAX, which taps one layer earlier than it is told and in layer order | outputs + 1, ascending |
| `speculators` | speculators, vLLM and TensorRT-LLM through it | boundaries (output + 1) |

Written in every file: `block_size` at the top and in `dflash_config`; RoPE as `rope_parameters` and as `rope_scaling` with
`rope_theta`, the attention factor explicit; `layer_types` with the window; the capture stream. Not written: `auto_map`,
`quantization_config`, MoE keys, RoPE keys and `head_dim` where they mean nothing.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kconv.errors import KconvError

Native = Mapping[str, Any]
MLA = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
GEOMETRY = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "hidden_act", "rms_norm_eps", "initializer_range", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
LOGITS = ("output_multiplier", "final_logit_softcapping", "input_embedding_scale")
DFLASH = ("residual_multiplier", "attention_multiplier", "clip_qkv", "stacked_qkv", "use_qk_norm")
DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
DSPARK = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
EAGLE = ("norm_output", "norm_before_residual", "norm_before_fc", "fc_norm")
ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel"}
SPARK_DEFAULTS = {
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
DFLASH2_DEFAULTS = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}


def shared(c: Native) -> dict[str, Any]:
    """The config that most runtimes of a family read.

    Raises KconvError for a family that no writer is known for, and for causality that no published key can say.
    """
    key = (c["model_type"].removesuffix("_kimi_k25"), c["attention_mode"])
    if key not in SHARED:
        raise KconvError(f"no runtime is known to read a {key[0]} draft with {key[1].upper()} attention")
    return {k: v for k, v in SHARED[key](c).items() if v is not None} | conventions(c)


def for_max(c: Native) -> dict[str, Any]:
    """MAX's `dflash_kimi_k25`: its taps are told one later than they are, since it reads the layer before."""
    config = shared(c)
    config["dflash_config"] = {**config["dflash_config"], "target_layer_ids": [i + 1 for i in taps_of(c)]}
    return config | {"tap_convention": "boundary"}


def for_vllm(c: Native) -> dict[str, Any]:
    """vLLM's own name for a GQA DSpark draft, `Qwen3DSparkModel`, with flat keys; the shared config otherwise."""
    config = shared(c)
    if config["architectures"] != ["DSparkDraftModel"]:
        return config
    nested = {k: v for k, v in dict(config.pop("dflash_config")).items() if k not in ("projector_type", "attention_mode")}
    return {**config, **nested, "architectures": ["Qwen3DSparkModel"]}


def for_speculators(c: Native, target: Mapping[str, Any]) -> dict[str, Any]:
    """speculators' schema, with the target as the verifier."""
    algorithm = c["model_type"].removesuffix("_kimi_k25")
    layer = {k: c.get(k) for k in GEOMETRY if c.get(k) is not None} | {"model_type": "qwen3", "head_dim": c.get("head_dim")}
    layer |= {"attention_bias": bool(c.get("attention_bias")), "tie_word_embeddings": False, **windows(c), **rope(c)}
    drafted = c["block_size"] if c.get("sample_from_anchor") else c["block_size"] - 1
    method = {"proposal_type": "greedy", "speculative_tokens": drafted, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    verifier = {"name_or_path": _known(target["repo"]), "architectures": [target["architecture"]]}
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[algorithm]],
        "speculators_model_type": algorithm,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": algorithm, "proposal_methods": [method], "default_proposal_method": "greedy", "verifier": verifier,
        },
        "transformer_layer_config": layer,
        "aux_hidden_state_layer_ids": [i + 1 for i in taps_of(c)],
        "mask_token_id": c.get("mask_token_id"),
        "block_size": c["block_size"],
        "sample_from_anchor": bool(c.get("sample_from_anchor")),
        "draft_vocab_size": c.get("draft_vocab_size") or c["vocab_size"],
        "target_hidden_size": c.get("target_hidden_size") or c["hidden_size"],
        "target_num_hidden_layers": c.get("target_num_hidden_layers"),
        "sliding_window_non_causal": not causal_layers(c)[0] if c.get("sliding_window") else False,
        "tie_word_embeddings": False,
        "dtype": c.get("dtype"),
    }  # fmt: skip
    own: dict[str, dict[str, Any]] = {"dspark": SPARK_DEFAULTS, "dflash2": DFLASH2_DEFAULTS}
    extra = own.get(algorithm, {})
    config |= {k: c.get(k, default) for k, default in extra.items()}
    return {k: v for k, v in config.items() if v is not None} | stream(c) | conventions(c)


def taps_of(c: Native) -> list[int]:
    """The tapped layers' outputs; raises KconvError when the draft does not say them."""
    if c.get("target_layer_ids") is None:
        raise KconvError(
            "the draft does not say which layers it taps", hint="--declare target_layer_ids=2,23,47 (0-based outputs)"
        )
    return list(c["target_layer_ids"])


def causal_layers(c: Native) -> list[bool]:
    """Per layer, whether a block position sees only earlier ones."""
    return list(c.get("layer_is_causal") or [bool(c.get("is_causal"))] * c["num_hidden_layers"])


def windows(c: Native) -> dict[str, Any]:
    """Layer types and the window."""
    kinds = list(c.get("layer_types") or ["full_attention"] * c["num_hidden_layers"])
    sliding = "sliding_attention" in kinds
    return {"layer_types": kinds, "use_sliding_window": sliding, "sliding_window": c.get("sliding_window") if sliding else None}


def rope(c: Native) -> dict[str, Any]:
    """RoPE in the forms before and after Transformers 5, the amplitude written out; nothing without RoPE."""
    block: dict[str, Any] | None = c.get("rope_parameters")
    if c.get("mla_use_nope") or not block:
        return {}
    block = dict(block)
    if block.get("rope_type") == "yarn" and block.get("attention_factor") is None:
        from kconv.modeling.drafts.rope import default_attention_factor

        block["attention_factor"] = default_attention_factor(block)
    found: dict[str, Any] = {"rope_parameters": block, "rope_theta": block.get("rope_theta", 10000.0)}
    if block.get("rope_type") != "default":
        found["rope_scaling"] = {k: v for k, v in block.items() if k != "rope_theta"} | {"type": block["rope_type"]}
    return found


def stream(c: Native) -> dict[str, Any]:
    """The capture stream under the key that TokenSpeed and TorchSpec read, where it is more than a layer's output."""
    return {"aux_hidden_stream": c["capture_stream"]} if c.get("capture_stream") in ("prefix", "attn_res") else {}


def conventions(c: Native) -> dict[str, Any]:
    """What each runtime settles by its own code and no key of its config says, so that every file reads back to one draft."""
    said: dict[str, Any] = {"last_tap_normed": True} if c.get("last_tap_normed") else {}
    if "sliding_attention" in windows(c)["layer_types"]:
        said |= {"window_rule": c.get("window_rule") or "query", "layer_is_causal": causal_layers(c)}
    return {"last_tap_normed": False, **said}


def _known(value: Any) -> Any:
    return None if value == "unknown" else value


def _causality(c: Native) -> dict[str, Any]:
    """`is_causal` where all layers agree; left out where sliding layers are causal, which is what readers then assume."""
    causal = causal_layers(c)
    if len(set(causal)) == 1:
        return {"is_causal": causal[0]}
    if causal == [kind == "sliding_attention" for kind in windows(c)["layer_types"]]:
        return {}
    raise KconvError(
        f"causality by layer {causal}: no published key says it", hint="all layers alike, or causal where they slide"
    )


def _base(c: Native, architecture: str, model_type: str) -> dict[str, Any]:
    base = {"architectures": [architecture], "model_type": model_type} | {k: c.get(k) for k in GEOMETRY}
    base |= {"target_hidden_size": c.get("target_hidden_size") or c["hidden_size"], "tie_word_embeddings": False}
    return base | {"dtype": c.get("dtype"), "attention_bias": bool(c.get("attention_bias")), **stream(c)}


def _nested(c: Native, *names: str) -> dict[str, Any]:
    keys = {"mask_token_id": c.get("mask_token_id"), "target_layer_ids": taps_of(c), "block_size": c.get("block_size")}
    return {k: v for k, v in (keys | {n: c.get(n) for n in names}).items() if v is not None}


def _mla(c: Native) -> dict[str, Any]:
    return {k: c.get(k) for k in MLA} | {
        "mla_use_nope": bool(c.get("mla_use_nope")), "mla_use_output_gate": bool(c.get("mla_use_output_gate")),
        "mla_norm_eps": c.get("mla_norm_eps"),
    } | ({} if c.get("mla_use_nope") else {"rope_interleave": bool(c.get("rope_interleave"))})  # fmt: skip


def _block(c: Native) -> dict[str, Any]:
    return {
        "block_size": c.get("block_size"), "num_target_layers": c.get("target_num_hidden_layers"),
        "sample_from_anchor": bool(c.get("sample_from_anchor")), "fc_norm": True if c.get("fc_norm") else None,
    }  # fmt: skip


def _dflash(c: Native) -> dict[str, Any]:
    own = {"head_dim": c.get("head_dim"), **windows(c), **rope(c), **_causality(c), **_block(c)}
    own["dflash_config"] = _nested(c, *LOGITS) | {k: c[k] for k in DFLASH if c.get(k) is not None and k != "use_qk_norm"}
    return _base(c, "DFlashDraftModel", "qwen3") | own


def _dflash2(c: Native) -> dict[str, Any]:
    mla = c["attention_mode"] == "mla"
    own = _mla(c) if mla else {"head_dim": c.get("head_dim")}
    own |= {**windows(c), **rope(c), **_causality(c), **_block(c)}
    nested = _nested(c, *LOGITS) | {k: c.get(k, default) for k, default in DFLASH2_DEFAULTS.items()}
    own["dflash_config"] = nested | {"attention_mode": c["attention_mode"]}
    return _base(c, "DFlash2DraftModel", "qwen3") | own


def _dspark_gqa(c: Native) -> dict[str, Any]:
    own = {"head_dim": c.get("head_dim"), **windows(c), **rope(c), **_causality(c), **_block(c)}
    nested = _nested(c, *LOGITS) | {k: c.get(k, default) for k, default in SPARK_DEFAULTS.items()}
    own["dflash_config"] = nested | {"projector_type": "dspark", "attention_mode": "gqa"}
    return _base(c, "DSparkDraftModel", "qwen3") | own | {"draft_vocab_size": c.get("draft_vocab_size")}


def _dspark_mla(c: Native) -> dict[str, Any]:
    own = {**_mla(c), **windows(c), **rope(c), **_causality(c), **_block(c)}
    own |= {k: c.get(k, default) for k, default in SPARK_DEFAULTS.items()} | {k: c.get(k) for k in LOGITS}
    own |= {"mask_token_id": c.get("mask_token_id"), "target_layer_ids": taps_of(c), "num_target_layers": len(taps_of(c))}
    own |= {"target_num_hidden_layers": c.get("target_num_hidden_layers"), "draft_vocab_size": c.get("draft_vocab_size")}
    return _base(c, "K3DSparkModel", "k3_dspark") | own


def _k3_dflash(c: Native) -> dict[str, Any]:
    depth = c["num_hidden_layers"]
    own = {
        **_mla(c),
        **_causality(c),
        **_block(c),
        **{k: c.get(k) for k in ("activation_situ_beta", "activation_situ_linear_beta")},
    }
    own |= {
        "dflash_config": _nested(c, *LOGITS),
        "attn_res_block_size": 0,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 0,
    }
    own |= {"linear_attn_config": {"kda_layers": [], "full_attn_layers": list(range(1, depth + 1))}}
    return _base(c, "KimiK3DFlashDraftModel", "kimi_linear") | own


def _eagle3(c: Native) -> dict[str, Any]:
    mla = c["attention_mode"] == "mla"
    architecture = "Eagle3DeepseekV2ForCausalLM" if mla else "LlamaForCausalLMEagle3"
    own = _mla(c) if mla else {"head_dim": c.get("head_dim")}
    own |= {**rope(c), **{k: True for k in EAGLE if c.get(k)}, "draft_vocab_size": c.get("draft_vocab_size") or c["vocab_size"]}
    ids = [i + 1 for i in taps_of(c)]
    own |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}, "tap_convention": "boundary"}
    own |= {"target_num_hidden_layers": c.get("target_num_hidden_layers")}
    return _base(c, architecture, "kimi_k2" if mla else "llama") | own


SHARED: dict[tuple[str, str], Callable[[Native], dict[str, Any]]] = {
    ("dflash", "gqa"): _dflash, ("dflash2", "gqa"): _dflash2, ("dflash2", "mla"): _dflash2, ("dspark", "gqa"): _dspark_gqa,
    ("dspark", "mla"): _dspark_mla, ("kimi_k3_dflash", "mla"): _k3_dflash, ("eagle3", "mla"): _eagle3, ("eagle3", "gqa"): _eagle3,
}  # fmt: skip
