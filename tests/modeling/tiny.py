"""Small random models of every kind of layer."""

from __future__ import annotations

from typing import Any

import torch

from kconv.modeling import KimiK3ForCausalLM, KimiK3TextConfig

LINEAR = {
    "num_heads": 3, "head_dim": 16, "kda_layers": [1, 2, 4], "full_attn_layers": [3, 5], "short_conv_kernel_size": 4,
    "gate_lower_bound": -5.0, "use_full_rank_gate": True,
}  # fmt: skip
K3: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4,
    "linear_attn_config": LINEAR, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "num_experts": 6, "num_experts_per_token": 2, "num_shared_experts": 1, "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 32, "attn_res_block_size": 2, "initializer_range": 0.1, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
# As Kimi-Linear is published: no latent, no residual mixing, no output gate, low-rank KDA gate, softplus decay.
LINEAR_48B: dict[str, Any] = {
    "model_type": "kimi_linear", "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "mla_use_nope": True, "hidden_act": "silu", "num_experts": 6,
    "num_experts_per_token": 2, "num_shared_experts": 1, "moe_intermediate_size": 32, "routed_scaling_factor": 2.446,
    "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "topk_group": 1,
    "use_grouped_topk": True, "first_k_dense_replace": 1, "moe_layer_freq": 1, "rms_norm_eps": 1e-5, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False, "initializer_range": 0.1,
    "linear_attn_config": {
        "num_heads": 3, "head_dim": 16, "kda_layers": [1, 2, 4], "full_attn_layers": [3, 5], "short_conv_kernel_size": 4,
    },
}  # fmt: skip


def model(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A tiny Kimi K3 in evaluation mode."""
    return of(KimiK3TextConfig(**{**K3, **changes}), seed, dtype)


def of(config: KimiK3TextConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seed)
    made: Any = KimiK3ForCausalLM(config)
    with torch.no_grad():
        for name, p in made.state_dict().items():
            if name.endswith(("e_score_correction_bias", "A_log")):
                p.add_(0.2 * torch.randn_like(p))
    return made.to(dtype).eval()


def ids(*shape: int, seed: int = 1, vocab: int = 97) -> torch.Tensor:
    return torch.randint(3, vocab, shape, generator=torch.Generator().manual_seed(seed))
