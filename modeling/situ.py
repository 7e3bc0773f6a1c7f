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

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Apply to `gate` and `up`, both [..., width]."""
        if self.name == "situ":
            return situ(gate, up, self.beta, self.linear_beta)
        return F.silu(gate) * up
