"""Root-mean-square norms of the Kimi family.

| norm | arithmetic | eps |
|---|---|---|
| `KimiRMSNorm` | normalise and weigh in at least fp32, round once, to the weight's dtype | config (1e-5); in MLA 1e-6 |
| `KimiGatedRMSNorm` (KDA `o_norm`) | normalise, weight and sigmoid gate in at least fp32, then cast | config (1e-5) |

The reference rounds bf16 twice, before and after the weight; rounding once is nearer to the exact norm.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from kconv.modeling.dtypes import Fp32Parameters, wide_parameter, widen


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps)` over the last axis, computed and returned in at least fp32."""
    x = widen(x)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class KimiRMSNorm(nn.Module):
    """RMSNorm over the last axis; [..., size] of any dtype -> [..., size] in the weight's dtype."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor, wide: bool = False, both: bool = False) -> Any:
        """Normalise [..., size]; `wide` leaves the result in at least fp32, `both` gives it rounded and as it was before."""
        y = F.rms_norm(widen(x), x.shape[-1:], widen(self.weight), self.eps)
        return (y.to(self.weight.dtype), y) if both else y if wide else y.to(self.weight.dtype)

    def extra_repr(self) -> str:
        """Size and eps, for `print(model)`."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


class KimiGatedRMSNorm(Fp32Parameters):
    """KDA's output norm: `rms(x) * weight * sigmoid(gate)`, weight held in at least fp32."""

    fp32_names = ("weight",)

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = wide_parameter(size)
        self.eps = eps

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Normalise and gate [..., size] with `gate` of the same shape; returns `x`'s dtype."""
        return (rms(x, self.eps) * self.weight * widen(gate).sigmoid()).to(x.dtype)
