"""Configuration of the native text models: Kimi K3, Kimi-Linear, pruned and dense relatives.

The keys are those of the published `text_config`: a native `config.json` is that block, lifted and cleaned, with five of ours.


| key | meaning |
|---|---|
| `experts_format` | `packed`: routed experts are MXFP4 codes and scales; `bf16`: plain matrices in the model's dtype |
| `num_experts_per_layer` | experts of each layer where pruning left unequal counts (null for dense layers), else null |
| `residual_in_fp32` | embedding, prefix and blocks are kept in at least fp32 between layers, whatever the model's dtype |
| `indexer_config` | Kimi K3.1's sparse attention: `num_heads`, `head_dim`, `topk`, `norm_eps`, `norm_bias`, `layers` (1-based) |
| `mla_norm_eps` | eps of MLA's q_a and kv_a norms; the reference takes its class default, 1e-6, not `rms_norm_eps` |

Layer numbers in `linear_attn_config` are 1-based, as published; `layer_kinds` is the 0-based form everything else uses.
"""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PretrainedConfig

from kconv.errors import Problems
from kconv.modeling.situ import ACTIVATIONS

Json = dict[str, Any]

POSITIVE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "moe_layer_freq", "num_expert_group", "topk_group",
)  # fmt: skip
POSITIVE_OR_NONE = ("q_lora_rank", "routed_expert_hidden_size", "attn_res_block_size")
LINEAR_POSITIVE = ("num_heads", "head_dim", "short_conv_kernel_size")
FORMATS = ("packed", "bf16")
ROUTERS = ("sigmoid", "softmax")
GROUP = 32  # weights that share one MXFP4 scale


def default_linear_attn_config(num_layers: int) -> Json:
    """Kimi K3's linear attention block for `num_layers`: MLA at every fourth layer and at the last one."""
    mla = sorted({*range(4, num_layers + 1, 4), num_layers})
    return {
        "full_attn_layers": mla, "kda_layers": [n for n in range(1, num_layers + 1) if n not in mla],
        "num_heads": 96, "head_dim": 128, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
    }  # fmt: skip


class KimiK3TextConfig(PretrainedConfig):
    """Config of `KimiK3ForCausalLM`; the defaults are Kimi K3's. Raises KconvError for what the model cannot be."""

    model_type: ClassVar[str] = "kimi_k3_text"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values"]

    vocab_size: int = 163840
    hidden_size: int = 7168
    intermediate_size: int = 33792
    num_hidden_layers: int = 93
    num_attention_heads: int = 96
    num_key_value_heads: int | None = None
    linear_attn_config: Json | None = None
    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    mla_use_nope: bool = True
    mla_use_output_gate: bool = True
    mla_norm_eps: float = 1e-6
    indexer_config: Json | None = None
    hidden_act: str = "situ"
    activation_situ_beta: float | None = 4.0
    activation_situ_linear_beta: float | None = 25.0
    num_experts: int | None = 896
    num_experts_per_layer: list[int | None] | None = None
    num_experts_per_token: int = 16
    num_shared_experts: int | None = 2
    moe_intermediate_size: int = 3072
    routed_expert_hidden_size: int | None = 3584
    latent_moe_use_norm: bool = True
    routed_scaling_factor: float = 1.0
    moe_renormalize: bool = True
    moe_router_activation_func: str = "sigmoid"
    num_expert_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    experts_format: str = "bf16"
    attn_res_block_size: int | None = 12
    residual_in_fp32: bool = True
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    max_position_embeddings: int = 1048576
    tie_word_embeddings: bool = False
    use_cache: bool = True
    bos_token_id: int | None = 163584
    eos_token_id: int | list[int] | None = 163586
    pad_token_id: int | None = 163839

    def __post_init__(self, **kwargs: Any) -> None:
        if self.linear_attn_config is None:
            self.linear_attn_config = default_linear_attn_config(self.num_hidden_layers)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**kwargs)
        check(self)

    @classmethod
    def from_k3(cls, config: Any, *, experts_format: str | None = None) -> KimiK3TextConfig:
        """Native config of a published one: multimodal, text or Kimi-Linear, as a dict or a PretrainedConfig.

        `experts_format` overrides what the source's quantisation says (`packed` for MXFP4, otherwise `bf16`).
        """
        from kconv.adapters.k3.native_keys import native_keys

        return cls(**native_keys(config, experts_format))

    @property
    def linear(self) -> Json:
        """`linear_attn_config`, which is never None after construction."""
        assert self.linear_attn_config is not None
        return self.linear_attn_config

    @property
    def layer_kinds(self) -> list[str]:
        """`kda` or `mla` for each layer, 0-based."""
        mla = set(self.linear["full_attn_layers"])
        return ["mla" if n in mla else "kda" for n in range(1, self.num_hidden_layers + 1)]

    def indexer_of(self, layer: int) -> Json | None:
        """The indexer's config of a 0-based layer, None where it reads all keys."""
        block = self.indexer_config
        return block if block is not None and layer + 1 in block["layers"] else None

    def experts_of(self, layer: int) -> int:
        """Number of routed experts of a 0-based layer; 0 where its MLP is dense."""
        if not self.num_experts or layer < self.first_k_dense_replace or layer % self.moe_layer_freq:
            return 0
        if self.num_experts_per_layer is not None:
            return self.num_experts_per_layer[layer] or 0
        return self.num_experts

    @property
    def qk_head_dim(self) -> int:
        """Width of an MLA query or key head: 192 in Kimi K3."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


def check(config: KimiK3TextConfig) -> None:
    """Raise Problems naming everything that is wrong with `config`."""
    found = [*_ranges(config), *_layers(config), *_attention(config)]
    if config.indexer_config is not None:
        found += _indexer(config, config.indexer_config)
    if config.num_experts:
        found += _experts(config)
    if found:
        raise Problems(
            "the config does not describe a model of this family:",
            found,
            hint="correct config.json, or use from_k3 on the published one",
        )


def _ranges(c: KimiK3TextConfig) -> list[str]:
    found = [f"{n} = {getattr(c, n)!r} must be a positive whole number" for n in POSITIVE if not _positive(getattr(c, n))]
    found += [
        f"{n} = {v!r} must be null or a positive whole number"
        for n in POSITIVE_OR_NONE if (v := getattr(c, n)) is not None and not _positive(v)
    ]  # fmt: skip
    found += [
        f"linear_attn_config.{n} = {c.linear.get(n)!r} must be a positive whole number"
        for n in LINEAR_POSITIVE
        if not _positive(c.linear.get(n))
    ]
    found += [f"{n} = {getattr(c, n)!r} must be above 0" for n in ("rms_norm_eps", "mla_norm_eps") if not getattr(c, n) > 0]
    if c.hidden_act not in ACTIVATIONS:
        found.append(f"hidden_act = {c.hidden_act!r} must be one of {', '.join(ACTIVATIONS)}")
    bound = c.linear.get("gate_lower_bound")
    if bound is not None and not bound < 0:
        found.append(f"linear_attn_config.gate_lower_bound = {bound!r} must be null or below 0: it bounds a log decay")
    return found


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _layers(c: KimiK3TextConfig) -> list[str]:
    """The two 1-based lists must cover every layer exactly once."""
    lists = {n: c.linear.get(n) for n in ("full_attn_layers", "kda_layers")}
    bad = [f"linear_attn_config.{n} is missing" for n, v in lists.items() if not isinstance(v, list | tuple)]
    if bad:
        return bad
    numbers = [n for v in lists.values() for n in v or ()]
    count = c.num_hidden_layers
    outside = sorted({n for n in numbers if not (isinstance(n, int) and 1 <= n <= count)}, key=str)
    twice = sorted({n for n in numbers if numbers.count(n) > 1}, key=str)
    missing = sorted(set(range(1, count + 1)) - set(numbers))
    text = "linear_attn_config.full_attn_layers and .kda_layers (1-based)"
    found = [f"{text} name layers outside 1..{count}: {outside}"] if outside else []
    found += [f"{text} name layers twice: {twice}"] if twice else []
    return found + ([f"{text} leave out layers {missing}"] if missing else [])


def _attention(c: KimiK3TextConfig) -> list[str]:
    found = []
    if not c.mla_use_nope:
        found.append(
            "mla_use_nope is false: this family never rotates its shared key dimensions; rotary MLA is another architecture"
        )
    heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
    if kv_heads is not None and _positive(heads) and _positive(kv_heads) and heads % kv_heads:
        found.append(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if c.qk_rope_head_dim < 0:
        found.append(f"qk_rope_head_dim = {c.qk_rope_head_dim} must not be negative")
    return found


def _indexer(c: KimiK3TextConfig, block: dict) -> list[str]:
    """Every number of the indexer is there, and its layers are MLA layers that compress their queries."""
    found = [
        f"indexer_config.{n} = {block.get(n)!r} must be a positive whole number"
        for n in ("num_heads", "head_dim", "topk")
        if not _positive(block.get(n))
    ]
    eps, bias, layers = block.get("norm_eps"), block.get("norm_bias"), block.get("layers")
    if not (isinstance(eps, float) and eps > 0):
        found.append(f"indexer_config.norm_eps = {eps!r} must be a number above 0")
    if not isinstance(bias, bool):
        found.append(f"indexer_config.norm_bias = {bias!r} must be true or false")
    if not isinstance(layers, list) or set(layers) - set(c.linear.get("full_attn_layers") or ()):
        found.append(f"indexer_config.layers = {layers!r} must be full_attn_layers (1-based)")
    if c.q_lora_rank is None:
        found.append("indexer_config needs q_lora_rank: an indexer reads compressed queries")
    return found


def _experts(c: KimiK3TextConfig) -> list[str]:
    found = []
    per_layer = c.num_experts_per_layer
    if per_layer is not None and len(per_layer) != c.num_hidden_layers:
        return [f"num_experts_per_layer has {len(per_layer)} entries for {c.num_hidden_layers} layers"]
    sparse = [layer for layer in range(c.num_hidden_layers) if layer >= c.first_k_dense_replace and layer % c.moe_layer_freq == 0]
    counts = {layer: c.experts_of(layer) for layer in sparse}
    if few := {layer: n for layer, n in counts.items() if n < c.num_experts_per_token}:
        found.append(f"layers with fewer experts than num_experts_per_token {c.num_experts_per_token} (layer: experts): {few}")
    if uneven := {layer: n for layer, n in counts.items() if n % c.num_expert_group}:
        found.append(f"layers whose experts do not divide into {c.num_expert_group} groups (layer: experts): {uneven}")
    if c.topk_group > c.num_expert_group:
        found.append(f"topk_group {c.topk_group} exceeds num_expert_group {c.num_expert_group}")
    if c.moe_router_activation_func not in ROUTERS:
        found.append(f"moe_router_activation_func = {c.moe_router_activation_func!r} must be one of {', '.join(ROUTERS)}")
    if c.experts_format not in FORMATS:
        found.append(f"experts_format = {c.experts_format!r} must be one of {', '.join(FORMATS)}")
    widths = {
        "moe_intermediate_size": c.moe_intermediate_size,
        "expert width": c.routed_expert_hidden_size or c.hidden_size,
    }
    if c.experts_format == "packed":
        found += [f"{n} {w} is no multiple of {GROUP}, which packed MXFP4 needs" for n, w in widths.items() if w % GROUP]
    return found
