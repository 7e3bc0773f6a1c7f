"""A product in fp32 with a bf16 matrix, on tensor cores.

| operands | computed as |
|---|---|
| over 64 rows of fp32, bf16 matrix, CUDA, no gradient | the sum of three products of bf16, into which rows part exactly |
| all else | `F.linear` in at least fp32 |

Products of bf16 are exact in fp32, so both differ from the real sum by fp32 rounding alone. The first is several times faster,
where there is more to do than to launch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kconv.modeling.dtypes import no_autocast, widen

FEW = 64


def wide_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [tokens, in] times weight [out, in] transposed, in at least fp32 whatever autocast says."""
    with no_autocast(x):
        if not _splits(x, weight):
            return F.linear(widen(x), widen(weight))
        high = x.to(torch.bfloat16)
        middle = (rest := x - high).to(torch.bfloat16)
        low = (rest - middle).to(torch.bfloat16)
        parts = [torch.mm(part, weight.T, out_dtype=torch.float32) for part in (low, middle, high)]
        return parts[0].add_(parts[1]).add_(parts[2])


def _splits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    types = (x.dtype, weight.dtype) == (torch.float32, torch.bfloat16)
    trained = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return (
        x.is_cuda
        and x.shape[0] > FEW
        and types
        and not trained
        and torch.version.hip is None
        and hasattr(torch.ops.aten.mm, "dtype")
    )
