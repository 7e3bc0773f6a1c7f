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

Json = dict[str, Any]

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
        from kconv.adapters.k3.values import experts_of

        return experts_of(vars(self), layer)

    @property
    def qk_head_dim(self) -> int:
        """Width of an MLA query or key head: 192 in Kimi K3."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


def check(config: KimiK3TextConfig) -> None:
    """Raise Problems naming everything that is wrong with `config`."""
    from kconv.adapters.k3.values import faults

    if found := faults(vars(config)):
        raise Problems(
            "the config does not describe a model of this family:",
            found,
            hint="correct config.json, or use from_k3 on the published one",
        )
