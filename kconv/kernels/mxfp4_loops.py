"""MXFP4 in loops compiled by numba without the GIL, on arrays and without torch: exponent arithmetic that becomes vector code.

For a scale whose products are normal numbers, code magnitude m > 1 has the bits base + (m << mantissa - 1), code 1 has
the bits base, code 0 none, with base the exponent field of half the scale. Other scales take a table, which the callers
with tensors (`mxfp4_cpu`) have; `decode_bytes` and `encode_bytes` leave them, and everything to refuse, to those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kconv.kernels.backend import jit


@jit
def decode16(packed, scale, out, table, width, low, high, offset, mantissa):
    """Codes [n] and scales [n / width] into pairs of 16-bit values [n], `table` for scales outside `low` to `high`."""
    step = np.uint32(mantissa - 1)
    for g in range(scale.size):
        s = scale[g]
        source = packed[g * width : (g + 1) * width]
        target = out[g * width : (g + 1) * width]
        if s < low or s > high:
            row = np.uint32(s) << np.uint32(8)
            for j in range(width):
                target[j] = table[row | np.uint32(source[j])]
        else:
            base = (np.uint32(s) - np.uint32(offset)) << np.uint32(mantissa)
            for j in range(width):
                b = np.uint32(source[j])
                m = b & np.uint32(7)
                n = (b >> np.uint32(4)) & np.uint32(7)
                even = np.uint32(0) if m == 0 else (base if m == 1 else base + (m << step))
                odd = np.uint32(0) if n == 0 else (base if n == 1 else base + (n << step))
                even |= (b & np.uint32(8)) << np.uint32(12)
                odd |= (b & np.uint32(128)) << np.uint32(8)
                target[j] = even | (odd << np.uint32(16))


@jit
def decode32(packed, scale, out, table, width, low, high, offset, mantissa):
    """The same into pairs of 32-bit values."""
    step = np.uint64(mantissa - 1)
    for g in range(scale.size):
        s = scale[g]
        source = packed[g * width : (g + 1) * width]
        target = out[g * width : (g + 1) * width]
        if s < low or s > high:
            row = np.uint32(s) << np.uint32(8)
            for j in range(width):
                target[j] = table[row | np.uint32(source[j])]
        else:
            base = (np.uint64(s) - np.uint64(offset)) << np.uint64(mantissa)
            for j in range(width):
                b = np.uint64(source[j])
                m = b & np.uint64(7)
                n = (b >> np.uint64(4)) & np.uint64(7)
                even = np.uint64(0) if m == 0 else (base if m == 1 else base + (m << step))
                odd = np.uint64(0) if n == 0 else (base if n == 1 else base + (n << step))
                even |= (b & np.uint64(8)) << np.uint64(28)
                odd |= (b & np.uint64(128)) << np.uint64(24)
                target[j] = even | (odd << np.uint64(32))


@jit
def encode16(pairs, scale, out, table, width):
    """Pairs of bf16 values [n] and scales [n / width] into codes [n]; whether every value had one."""
    wrong = np.uint32(0)
    for g in range(scale.size):
        s = scale[g]
        source = pairs[g * width : (g + 1) * width]
        target = out[g * width : (g + 1) * width]
        if s < 2 or s > 252:
            row = np.uint32(s) << np.uint32(11)
            for j in range(width):
                w = source[j]
                even = np.uint32(table[row | ((w & np.uint32(0xFFFF)) >> np.uint32(5))])
                odd = np.uint32(table[row | (w >> np.uint32(21))])
                wrong |= (w & np.uint32(0x001F001F)) | ((even | odd) & np.uint32(0x40))
                target[j] = np.uint8(even | (odd << np.uint32(4)))
        else:
            base = (np.uint32(s) - np.uint32(1)) << np.uint32(7)
            for j in range(width):
                w = source[j]
                m = (w & np.uint32(0x7FFF)) - base
                n = ((w >> np.uint32(16)) & np.uint32(0x7FFF)) - base
                even = np.uint32(1) if m == 0 else m >> np.uint32(6)
                odd = np.uint32(1) if n == 0 else n >> np.uint32(6)
                lost = (m & np.uint32(0xFFFFFE3F)) | np.uint32(m == 64)
                lost_odd = (n & np.uint32(0xFFFFFE3F)) | np.uint32(n == 64)
                even = np.uint32(0) if m + base == 0 else even
                odd = np.uint32(0) if n + base == 0 else odd
                wrong |= (np.uint32(0) if m + base == 0 else lost) | (np.uint32(0) if n + base == 0 else lost_odd)
                signs = ((w >> np.uint32(12)) & np.uint32(8)) | ((w >> np.uint32(24)) & np.uint32(0x80))
                target[j] = np.uint8(even | (odd << np.uint32(4)) | signs)
    return wrong == 0


@dataclass(frozen=True)
class Form:
    """A float format that the loops write: mantissa bits, bias, largest exponent field of a finite number."""

    mantissa: int
    bias: int
    top: int
    decode: Callable[..., None]
    word: Any
    low: int = field(init=False)
    """First scale byte whose products are all normal numbers."""
    high: int = field(init=False)
    offset: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "low", 129 - self.bias)
        object.__setattr__(self, "high", self.top - 3 + 128 - self.bias)
        object.__setattr__(self, "offset", 128 - self.bias)


FORMS = {
    "BF16": Form(7, 127, 254, decode16, np.uint32),
    "F16": Form(10, 15, 30, decode16, np.uint32),
    "F32": Form(23, 127, 254, decode32, np.uint64),
}
_TABLES = {np.uint32: np.zeros(1, np.uint32), np.uint64: np.zeros(1, np.uint64)}


def decode_bytes(dtype: str, packed: np.ndarray, scale: np.ndarray, out: np.ndarray, group: int) -> bool:
    """Codes (uint8, two a byte) and scales (uint8, one for `group` codes), 1-D, into the bytes of `dtype` values.

    False, with nothing written, where a scale is not of the ordinary ones or the form is not known here.
    """
    form = FORMS.get(dtype)
    if form is None or not scale.size or scale.min() < form.low or scale.max() > form.high:
        return False
    form.decode(
        packed, scale, out.view(form.word), _TABLES[form.word], group // 2, form.low, form.high, form.offset, form.mantissa
    )
    return True


def encode_bytes(values: np.ndarray, scale: np.ndarray, out: np.ndarray, group: int) -> bool:
    """The bytes of bf16 values and their scales, 1-D, into codes; false where a scale is not ordinary or a value has no code."""
    form = FORMS["BF16"]
    if not scale.size or scale.min() < form.low or scale.max() > form.high:
        return False
    return bool(encode16(values.view(np.uint32), scale, out, _NO_CODES, group // 2))


_NO_CODES = np.zeros(1, np.uint8)
