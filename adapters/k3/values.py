"""What the values of a native config may be: the one check before a conversion writes and before a model is made.

| looked at | against |
|---|---|
| sizes, counts, eps, factors, switches | the type and range that computing needs |
| `kda_layers` and `full_attn_layers` (1-based) | each layer named once |
| experts of each layer | top-k, groups, the width of packed groups |
| the indexer's block | numbers, and MLA layers that compress their queries |

Needs neither torch nor transformers. The mapping has every key of the native config, defaults filled in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kconv.adapters.tables.values import above_zero, counts, counts_or_null, flags, is_count, numbers_or_null

Config = Mapping[str, Any]

POSITIVE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank",
    "qk_nope_head_dim", "v_head_dim", "moe_layer_freq", "num_expert_group", "topk_group",
)  # fmt: skip
POSITIVE_OR_NONE = ("num_key_value_heads", "q_lora_rank", "routed_expert_hidden_size", "attn_res_block_size")
LINEAR_POSITIVE = ("num_heads", "head_dim", "short_conv_kernel_size")
NUMBERS_OR_NONE = ("activation_situ_beta", "activation_situ_linear_beta")
FLAGS = ("moe_renormalize", "mla_use_output_gate", "latent_moe_use_norm", "mla_use_nope")
FORMATS = ("packed", "bf16")
ROUTERS = ("sigmoid", "softmax")
HIDDEN_ACTS = ("situ", "silu")
GROUP = 32  # weights that share one MXFP4 scale


def faults(c: Config) -> list[str]:
    """Everything that keeps a config from being a model of this family, a line each."""
    found = [*_ranges(c), *_layers(c), *_attention(c)]
    if c.get("indexer_config") is not None:
        found += _indexer(c, c["indexer_config"])
    if c.get("num_experts"):
        found += _experts(c)
    return found


def experts_of(c: Config, layer: int) -> int:
    """Number of routed experts of a 0-based layer; 0 where its MLP is dense."""
    if not c["num_experts"] or layer < (c["first_k_dense_replace"] or 0) or layer % c["moe_layer_freq"]:
        return 0
    per_layer = c.get("num_experts_per_layer")
    return (per_layer[layer] or 0) if per_layer is not None else c["num_experts"]


def _ranges(c: Config) -> list[str]:
    linear = c["linear_attn_config"]
    eps = [k for k in ("rms_norm_eps", "mla_norm_eps") if k in c]
    found = [
        *counts(c, POSITIVE), *counts_or_null(c, POSITIVE_OR_NONE), *counts(linear, LINEAR_POSITIVE, "linear_attn_config."),
        *above_zero(c, eps), *above_zero(c, ["routed_scaling_factor"]), *numbers_or_null(c, NUMBERS_OR_NONE), *flags(c, FLAGS),
    ]  # fmt: skip
    if c["hidden_act"] not in HIDDEN_ACTS:
        found.append(f"hidden_act = {c['hidden_act']!r} must be one of {', '.join(HIDDEN_ACTS)}")
    bound = linear.get("gate_lower_bound")
    if list(numbers_or_null(linear, ["gate_lower_bound"])) or (bound is not None and not bound < 0):
        found.append(f"linear_attn_config.gate_lower_bound = {bound!r} must be null or below 0: it bounds a log decay")
    return found


def _layers(c: Config) -> list[str]:
    """The two 1-based lists must cover every layer exactly once."""
    lists = {n: c["linear_attn_config"].get(n) for n in ("full_attn_layers", "kda_layers")}
    bad = [f"linear_attn_config.{n} is missing" for n, v in lists.items() if not isinstance(v, list | tuple)]
    if bad:
        return bad
    numbers = [n for v in lists.values() for n in v or ()]
    count = c["num_hidden_layers"]
    if not is_count(count):
        return []
    outside = sorted({n for n in numbers if not (isinstance(n, int) and 1 <= n <= count)}, key=str)
    twice = sorted({n for n in numbers if numbers.count(n) > 1}, key=str)
    missing = sorted(set(range(1, count + 1)) - set(numbers))
    text = "linear_attn_config.full_attn_layers and .kda_layers (1-based)"
    found = [f"{text} name layers outside 1..{count}: {outside}"] if outside else []
    found += [f"{text} name layers twice: {twice}"] if twice else []
    return found + ([f"{text} leave out layers {missing}"] if missing else [])


def _attention(c: Config) -> list[str]:
    found = []
    if c["mla_use_nope"] is False:
        found.append(
            "mla_use_nope is false: this family never rotates its shared key dimensions; rotary MLA is another architecture"
        )
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    if kv_heads is not None and is_count(heads) and is_count(kv_heads) and heads % kv_heads:
        found.append(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    rope = c["qk_rope_head_dim"]
    if type(rope) is not int or rope < 0:
        found.append(f"qk_rope_head_dim = {rope!r} must be a whole number, not negative")
    return found


def _indexer(c: Config, block: dict) -> list[str]:
    """Every number of the indexer is there, and its layers are MLA layers that compress their queries."""
    found = [
        f"indexer_config.{n} = {block.get(n)!r} must be a positive whole number"
        for n in ("num_heads", "head_dim", "topk")
        if not is_count(block.get(n))
    ]
    eps, bias, layers = block.get("norm_eps"), block.get("norm_bias"), block.get("layers")
    if not (isinstance(eps, float) and eps > 0):
        found.append(f"indexer_config.norm_eps = {eps!r} must be a number above 0")
    if not isinstance(bias, bool):
        found.append(f"indexer_config.norm_bias = {bias!r} must be true or false")
    if not isinstance(layers, list) or set(layers) - set(c["linear_attn_config"].get("full_attn_layers") or ()):
        found.append(f"indexer_config.layers = {layers!r} must be full_attn_layers (1-based)")
    if c["q_lora_rank"] is None:
        found.append("indexer_config needs q_lora_rank: an indexer reads compressed queries")
    return found


def _experts(c: Config) -> list[str]:
    """Experts of each layer against top-k and groups; needs those numbers to be ones."""
    top, groups, chosen, per_layer = (c[k] for k in ("num_experts_per_token", "num_expert_group", "topk_group",
                                                     "num_experts_per_layer"))  # fmt: skip
    found = list(counts(c, ("num_experts_per_token", "moe_intermediate_size")))
    if c["moe_router_activation_func"] not in ROUTERS:
        found.append(f"moe_router_activation_func = {c['moe_router_activation_func']!r} must be one of {', '.join(ROUTERS)}")
    if c["experts_format"] not in FORMATS:
        found.append(f"experts_format = {c['experts_format']!r} must be one of {', '.join(FORMATS)}")
    if not all(map(is_count, (top, groups, chosen, c["num_hidden_layers"], c["moe_layer_freq"]))):
        return found
    if per_layer is not None and not _per_layer(per_layer):
        return [*found, f"num_experts_per_layer = {per_layer!r} must be a list of whole numbers and nulls"]
    if per_layer is not None and len(per_layer) != c["num_hidden_layers"]:
        return [*found, f"num_experts_per_layer has {len(per_layer)} entries for {c['num_hidden_layers']} layers"]
    first, every = c["first_k_dense_replace"] or 0, c["moe_layer_freq"]
    if type(first) is not int:
        return [*found, f"first_k_dense_replace = {first!r} must be a whole number"]
    held = {layer: experts_of(c, layer) for layer in range(c["num_hidden_layers"]) if layer >= first and layer % every == 0}
    if few := {layer: n for layer, n in held.items() if n < top}:
        found.append(f"layers with fewer experts than num_experts_per_token {top} (layer: experts): {few}")
    if uneven := {layer: n for layer, n in held.items() if n % groups}:
        found.append(f"layers whose experts do not divide into {groups} groups (num_expert_group; layer: experts): {uneven}")
    if chosen > groups:
        found.append(f"topk_group {chosen} exceeds num_expert_group {groups}")
    return found + _packing(c)


def _per_layer(value: object) -> bool:
    return isinstance(value, list | tuple) and all(n is None or type(n) is int for n in value)


def _packing(c: Config) -> list[str]:
    widths = {
        "moe_intermediate_size": c["moe_intermediate_size"],
        "expert width": c["routed_expert_hidden_size"] or c["hidden_size"],
    }
    if c["experts_format"] != "packed":
        return []
    return [
        f"{n} {w} is no multiple of {GROUP}, which packed MXFP4 needs" for n, w in widths.items() if is_count(w) and w % GROUP
    ]
