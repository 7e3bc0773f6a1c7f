"""The router: which experts a token goes to, and with what weight, in at least fp32.

`scores = sigmoid(W x)` of the full hidden state. The correction bias takes part in the choice only; weights are the
unbiased scores of the chosen experts, renormalised (`/ (sum + 1e-20)`) and scaled by `routed_scaling_factor`. No gradient
reaches the bias: it is a buffer, moved by whoever balances the experts' load.
"""

from __future__ import annotations

import torch
from torch import nn

from kconv.modeling.config import KimiK3TextConfig
from kconv.modeling.dtypes import Fp32Parameters, wide
from kconv.modeling.wide_linear import wide_linear

GROUP_VOTERS = 2  # a group is judged by the sum of its two best biased scores


class KimiRouter(Fp32Parameters):
    """Top-k router with a correction bias; weight [experts, hidden], bias [experts] (a buffer) held in at least fp32."""

    e_score_correction_bias: torch.Tensor
    fp32_names = ("e_score_correction_bias",)

    def __init__(self, config: KimiK3TextConfig, experts: int) -> None:
        super().__init__()
        self.top_k, self.groups, self.topk_group = (
            config.num_experts_per_token,
            config.num_expert_group,
            config.topk_group,
        )
        self.renormalize, self.scaling = config.moe_renormalize, config.routed_scaling_factor
        self.softmax = config.moe_router_activation_func == "softmax"
        self.weight = nn.Parameter(torch.empty(experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(experts, dtype=wide(torch.get_default_dtype())))
        self.forced: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Chosen experts [tokens, top_k] (int64, in no particular order) and their weights, for x [tokens, hidden].

        While `forced` holds indices [tokens, top_k], those replace the router's own choice (parity checks).
        """
        logits = wide_linear(x, self.weight)
        scores = logits.softmax(-1) if self.softmax else logits.sigmoid()
        indices = self.choose(scores) if self.forced is None else self.forced.to(scores.device)
        weights = scores.gather(1, indices)
        if self.renormalize and self.top_k > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return indices, weights * self.scaling

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """Indices [tokens, top_k] of the best biased scores; where groups are limited, of those in the best groups."""
        biased = scores + self.e_score_correction_bias
        if self.groups > 1 and self.groups > self.topk_group:
            grouped = biased.unflatten(-1, (self.groups, -1))
            votes = grouped.topk(min(GROUP_VOTERS, grouped.shape[-1]), dim=-1).values.sum(-1)
            kept = torch.zeros_like(votes, dtype=torch.bool).scatter(
                1, votes.topk(self.topk_group, dim=-1, sorted=False).indices, True
            )
            biased = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
        return biased.topk(self.top_k, dim=-1, sorted=False).indices
