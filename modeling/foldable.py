"""A Linear that gives its weight to whoever folds it into another product, by being called: `module(None)`.

A call brings whatever acts on a module: parametrisations, Accelerate's offloading, gathered shards. `weight_of` says None
where the matrix is not all that a call computes, and the caller takes the way through calls alone:

| in the module's place | why |
|---|---|
| an adapter, a quantised Linear, any other class | computes something else, or holds no such matrix |
| the Linear with hooks | they may read or change what goes in and comes out |
| the Linear with a weight of a tensor subclass (DTensor, quantised tensors) or with a bias | the matrix alone is not it |
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")


class FoldableLinear(nn.Linear):
    """A Linear without bias that answers None with its weight."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: torch.Tensor | None) -> torch.Tensor:  # type: ignore[override]
        """[..., in] -> [..., out]; the weight [out, in] for None."""
        return self.weight if x is None else F.linear(x, self.weight, self.bias)


def weight_of(module: nn.Module) -> torch.Tensor | None:
    """The weight [out, in] that stands for everything `module` computes; None where only calling it does."""
    if not isinstance(module, FoldableLinear) or module.bias is not None or any(getattr(module, name) for name in HOOKS):
        return None
    weight = module(None)
    return weight if type(weight) in (nn.Parameter, torch.Tensor) else None
