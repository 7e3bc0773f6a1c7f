"""MXFP4 codes to numbers for packed experts: E2M1 values, low nibble first, times 2^(scale - 127) per 32 of them."""

from __future__ import annotations

import torch

from kconv.modeling.dtypes import wide

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
GROUP, BIAS = 32, 127


def decode(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes U8 [..., columns / 2] and scales U8 [..., columns / 32] -> [..., columns] in `dtype`; exact in bf16 and wider."""
    table = torch.tensor(E2M1, dtype=wide(dtype), device=packed.device)
    pairs = torch.stack([table[(packed & 15).int()], table[(packed >> 4).int()]], dim=-1)
    values = torch.ldexp(pairs.flatten(-2).unflatten(-1, (-1, GROUP)), scale[..., None].int() - BIAS)
    return values.flatten(-2).to(dtype)
