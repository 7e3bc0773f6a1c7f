"""MXFP4 on the CPU, compiled by numba without the GIL: exponent arithmetic that the compiler turns into vector code.

For a scale whose products are normal numbers, code magnitude m > 1 has the bits base + (m << mantissa - 1), code 1 has
the bits base, code 0 none, with base the exponent field of half the scale. Other scales take the table.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kconv.kernels import e2m1
from kconv.kernels.backend import jit

_FORM = {torch.bfloat16: (7, 127, 254), torch.float16: (10, 15, 30), torch.float32: (23, 127, 254)}
"""Mantissa bits, bias and largest exponent field of a finite number."""


def decode(packed: Tensor, scale: Tensor, out: Tensor, check: Callable[[], None] | None) -> bool:
    """Packed [G, g/2] and scale [G] into out [G, g], once `check` let the scales pass; false for a dtype not known here."""
    if out.dtype not in _FORM:
        return False
    if check:
        check()
    mantissa, bias, top = _FORM[out.dtype]
    low, high = 129 - bias, top - 3 + 128 - bias
    table = e2m1.pair_table(out.dtype, out.device)
    word, run = (np.uint32, _decode16) if out.dtype.itemsize == 2 else (np.uint64, _decode32)
    run(
        packed.numpy().reshape(-1), scale.numpy(), out.view(table.dtype).numpy().view(word).reshape(-1),
        table.numpy().view(word), packed.shape[1], low, high, 128 - bias, mantissa,
    )  # fmt: skip
    return True


def encode(values: Tensor, scale: Tensor, out: Tensor) -> bool:
    """bf16 values [G, g] and scale [G] into packed out [G, g/2]; false when a value has no code."""
    pairs = values.view(torch.int32).numpy().view(np.uint32).reshape(-1)
    table = e2m1.code_table(values.device).numpy()
    return bool(_encode16(pairs, scale.numpy(), out.numpy().reshape(-1), table, out.shape[1]))


@jit
def _decode16(packed, scale, out, table, width, low, high, offset, mantissa):
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
def _decode32(packed, scale, out, table, width, low, high, offset, mantissa):
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
def _encode16(pairs, scale, out, table, width):
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
