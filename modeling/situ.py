"""Gated activations of the family: SiTU (Kimi K3) and SiLU (Kimi-Linear).

SiTU bounds both factors: `b * tanh(g/b) * sigmoid(g) * l * tanh(u/l)` with `b` = `activation_situ_beta` (4.0) and `l` =
`activation_situ_linear_beta` (25.0), in at least fp32. A falsy `b` means 1.0; `l` None leaves the up projection as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kconv.errors import KconvError
from kconv.modeling.dtypes import widen
from kconv.modeling.expert_paths import compiles_for

ACTIVATIONS = ("situ", "silu")


def situ(gate: torch.Tensor, up: torch.Tensor, beta: float | None, linear_beta: float | None) -> torch.Tensor:
    """SiTU of `gate` times the bounded `up`, both [..., width]; returns `gate`'s dtype."""
    g, u = widen(gate), widen(up)
    b = beta or 1.0
    bounded = u if linear_beta is None else linear_beta * torch.tanh(u / linear_beta)
    return (b * torch.tanh(g / b) * torch.sigmoid(g) * bounded).to(gate.dtype)


@dataclass(frozen=True)
class GatedActivation:
    """The activation a config names, called as `act(gate, up)`; raises KconvError for a name that it does not know."""

    name: str
    beta: float | None = None
    linear_beta: float | None = None

    def __post_init__(self) -> None:
        if self.name not in ACTIVATIONS:
            raise KconvError(
                f"hidden_act {self.name!r} is not an activation of this family", hint=f"one of {', '.join(ACTIVATIONS)}"
            )

    def in_kernels(self) -> tuple[str, float, float]:
        """What the kernels call it, and its two bounds; `half` is SiTU with an unbounded up projection."""
        if self.name == "silu":
            return "silu", 1.0, 1.0
        return ("half" if self.linear_beta is None else "situ"), self.beta or 1.0, self.linear_beta or 1.0

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Apply to `gate` and `up`, both [..., width]."""
        if _fuses(gate, up):
            from kconv.modeling import pointwise_kernels

            return pointwise_kernels.activate(gate, up, *self.in_kernels())
        if self.name == "situ":
            return situ(gate, up, self.beta, self.linear_beta)
        return F.silu(gate) * up


def _fuses(gate: torch.Tensor, up: torch.Tensor) -> bool:
    """Whether one kernel takes these: bf16 on CUDA, laid out alike, without gradients."""
    if not gate.is_cuda or gate.dtype != torch.bfloat16 or up.dtype != gate.dtype or not gate.numel():
        return False
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return False
    return gate.is_contiguous() and up.is_contiguous() and compiles_for(gate.device)
