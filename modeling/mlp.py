"""The gated MLP: dense layers, shared experts and drafts use the same one."""

from __future__ import annotations

import torch
from torch import nn

from kconv.modeling.situ import GatedActivation


class KimiMLP(nn.Module):
    """`down_proj(act(gate_proj(x), up_proj(x)))` over [..., hidden_size]."""

    def __init__(self, hidden_size: int, intermediate_size: int, act: GatedActivation) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] -> [..., hidden_size]."""
        return self.down_proj(self.act(self.gate_proj(x), self.up_proj(x)))
