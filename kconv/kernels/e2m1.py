"""The 4-bit code E2M1 and the 8-bit power of two E8M0, as tables.

| code | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8..15 |
|---|---|---|---|---|---|---|---|---|---|
| value | 0 | 0.5 | 1 | 1.5 | 2 | 3 | 4 | 6 | the same, negative; code 8 is -0 |

E8M0 byte b is 2^(b-127); 255 is NaN. Two codes lie in a byte, the even column in the low nibble. Source: OCP
Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 5.4.1.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
NAN_SCALE = 255
NEUTRAL_SCALE = 127
PAIR = {1: torch.int16, 2: torch.int32, 4: torch.int64, 8: torch.complex128}
"""For an element of n bytes, a dtype that moves two of them at once."""


@functools.cache
def e8m0() -> Tensor:
    """The 256 scales in fp64, [256]; the last is NaN."""
    scales = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 127)
    scales[NAN_SCALE] = float("nan")
    return scales


@functools.cache
def products() -> Tensor:
    """Scale times code in fp64, exact, [256, 16]."""
    return e8m0()[:, None] * torch.tensor(E2M1, dtype=torch.float64)


@functools.cache
def holds(dtype: torch.dtype) -> Tensor:
    """Whether `dtype` holds scale times code exactly, bool [256, 16]; false for the NaN scale."""
    return products().to(dtype).to(torch.float64) == products()


@functools.cache
def safe_scales(dtype: torch.dtype) -> tuple[int, int]:
    """First and last scale byte of the range in which `dtype` holds every code exactly."""
    good = holds(dtype).all(1).nonzero()
    return int(good[0]), int(good[-1])


@functools.cache
def unpacked() -> Tensor:
    """Codes of each byte, low nibble first, int64 [256, 2]."""
    byte = torch.arange(256)
    return torch.stack((byte & 15, byte >> 4), 1)


@functools.cache
def pair_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The two values of (scale, byte), one element of `PAIR` each, [65536]; index scale << 8 | byte."""
    values = products().to(dtype)[:, unpacked()]
    return values.contiguous().view(PAIR[dtype.itemsize]).reshape(-1).to(device)


@functools.cache
def code_table(device: torch.device) -> Tensor:
    """The code of (scale, top 11 bits of a bf16), uint8 [256 << 11]; index scale << 11 | bits >> 5, 0xFF for none.

    Eleven bits (sign, exponent, two of the mantissa) tell all products apart: 1.5 * 2^-127 is subnormal and needs both.
    """
    ok = holds(torch.bfloat16)
    scale, code = ok.nonzero(as_tuple=True)
    top = (products().to(torch.bfloat16)[ok].view(torch.int16).to(torch.int64) & 0xFFFF) >> 5
    table = torch.full((256 << 11,), 0xFF, dtype=torch.uint8)
    table[scale << 11 | top] = code.to(torch.uint8)
    return table.to(device)
