"""The mixture-of-experts MLP, in a latent space where the config has one.

`down to latent -> routed experts, weighted, summed -> norm -> up to hidden`, plus the shared experts on the full width.
The router reads the full hidden state. Without `routed_expert_hidden_size` (Kimi-Linear) so do the experts.
"""

from __future__ import annotations

import torch
from torch import nn

from kconv.modeling.config import KimiK3TextConfig
from kconv.modeling.dtypes import widen
from kconv.modeling.experts import KimiExperts
from kconv.modeling.mlp import KimiMLP
from kconv.modeling.norm import KimiRMSNorm
from kconv.modeling.router import KimiRouter
from kconv.modeling.situ import GatedActivation


class KimiMoE(nn.Module):
    """Router, routed experts and shared experts of one layer."""

    def __init__(self, config: KimiK3TextConfig, experts: int) -> None:
        super().__init__()
        hidden, latent = config.hidden_size, config.routed_expert_hidden_size
        self.gate = KimiRouter(config, experts)
        self.experts = KimiExperts(config, experts)
        self.latent = latent is not None
        if latent is not None:
            self.routed_expert_down_proj = nn.Linear(hidden, latent, bias=False)
            self.routed_expert_up_proj = nn.Linear(latent, hidden, bias=False)
        self.normed = self.latent and config.latent_moe_use_norm
        if latent is not None and self.normed:
            self.routed_expert_norm = KimiRMSNorm(latent, eps=config.rms_norm_eps)
        self.shared = bool(config.num_shared_experts)
        if config.num_shared_experts:
            act = GatedActivation(config.hidden_act, config.activation_situ_beta, config.activation_situ_linear_beta)
            self.shared_experts = KimiMLP(hidden, config.moe_intermediate_size * config.num_shared_experts, act)

    def forward(self, x: torch.Tensor, wide: torch.Tensor | None = None) -> torch.Tensor:
        """[batch, length, hidden] -> the same, in at least fp32; `wide` is x before it was rounded, for the router."""
        flat = x.flatten(0, -2)
        indices, weights = self.gate(flat if wide is None else wide.flatten(0, -2))
        y = self.experts(self.routed_expert_down_proj(flat) if self.latent else flat, indices, weights)
        if self.normed:
            y = self.routed_expert_norm(y)
        if self.latent:
            y = self.routed_expert_up_proj(y.to(x.dtype))
        y = widen(y).view_as(x)
        return y + widen(self.shared_experts(x)) if self.shared else y
