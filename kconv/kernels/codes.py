"""Codes of 4 and 8 bits that a scale multiplies, by definition: (-1)^s * 2^(e-bias) * (1 + m / 2^mantissa), e = 0 subnormal.

| code | bits | mantissa | bias | largest | not finite |
|---|---|---|---|---|---|
| E2M1 | 4 | 1 | 1 | 6 | none |
| INT4 | 4 | integer, code - 8 | | 7, least -8 | none |
| F8_E4M3 | 8 | 3 | 7 | 448 | 0x7F and 0xFF are NaN |
| F8_E4M3FNUZ | 8 | 3 | 8 | 240 | 0x80 is NaN (there is no -0) |
| F8_E5M2 | 8 | 2 | 15 | 57344 | 0x7C and 0xFC are infinite, the three above each NaN |
| F8_E5M2FNUZ | 8 | 2 | 16 | 57344 | 0x80 is NaN |

Sources: OCP 8-bit Floating Point Specification 1.0; OCP Microscaling 1.0; ONNX's float8 page for the FNUZ forms.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Code:
    """A code format; `limit` is the first magnitude that is not finite, `hole` the one code that is NaN in FNUZ forms."""

    name: str
    bits: int
    mantissa: int
    bias: int
    limit: int = 128
    hole: int = 256
    integer: bool = False

    @property
    def per_byte(self) -> int:
        """Codes in a byte."""
        return 8 // self.bits

    def value(self, code: int) -> float:
        """The number a code stands for."""
        if self.integer:
            return float(code - 8)
        sign, magnitude = divmod(code, 1 << (self.bits - 1))
        if code == self.hole or magnitude >= self.limit:
            infinite = code != self.hole and self.mantissa == 2 and magnitude == self.limit
            return math.copysign(math.inf if infinite else math.nan, -sign or 1)
        exponent, fraction = divmod(magnitude, 1 << self.mantissa)
        number = math.ldexp(fraction + (bool(exponent) << self.mantissa), max(exponent, 1) - self.bias - self.mantissa)
        return math.copysign(number, -sign or 1)

    @property
    def largest(self) -> float:
        """The largest magnitude that is finite."""
        return max(abs(v) for v in map(self.value, range(1 << self.bits)) if math.isfinite(v))

    @property
    def step(self) -> float:
        """The least distance between two values: the smallest magnitude above zero."""
        return 1.0 if self.integer else math.ldexp(1.0, 1 - self.bias - self.mantissa)


CODES: dict[str, Code] = {
    code.name: code
    for code in (
        Code("E2M1", 4, 1, 1),
        Code("INT4", 4, 0, 0, integer=True),
        Code("F8_E4M3", 8, 3, 7, limit=0x7F),
        Code("F8_E4M3FNUZ", 8, 3, 8, hole=0x80),
        Code("F8_E5M2", 8, 2, 15, limit=0x7C),
        Code("F8_E5M2FNUZ", 8, 2, 16, hole=0x80),
    )
}


@functools.cache
def values(code: Code, device: torch.device = CPU) -> Tensor:
    """The number of every code, fp32 [16 or 256]; NaN and infinity included."""
    return torch.tensor([code.value(i) for i in range(1 << code.bits)]).to(device)


@functools.cache
def pair_values(code: Code, device: torch.device = CPU) -> Tensor:
    """Two fp32 numbers in one int64: by byte for codes of 4 bits [256], by two bytes for those of 8 [65536]."""
    count = 1 << code.bits
    low, high = torch.arange(count * count) % count, torch.arange(count * count) // count
    table = values(code)
    return torch.stack((table[low], table[high]), 1).view(torch.int64).reshape(-1).to(device)


@functools.cache
def nearest(code: Code, device: torch.device = CPU) -> Tensor:
    """The code nearest to every bf16, uint8 [65536], by its bits; sign of zero kept, beyond the largest saturating."""
    number = torch.arange(65536).to(torch.uint16).view(torch.bfloat16).double()
    table = values(code).double()
    finite = table.isfinite().nonzero().flatten()
    order = finite[torch.argsort(table[finite], stable=True)]
    sorted_values, first = torch.unique_consecutive(table[order], return_inverse=True)
    place = torch.searchsorted((sorted_values[:-1] + sorted_values[1:]) / 2, torch.nan_to_num(number))
    representative = order[torch.searchsorted(first, place)]
    minus = 1 << (code.bits - 1)
    if not code.integer and code.value(minus) == 0.0:  # the code has a -0
        zero = table[representative] == 0.0
        representative = torch.where(zero, torch.signbit(number) * minus, representative)
    return representative.to(torch.uint8).to(device)
