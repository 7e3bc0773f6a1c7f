"""Codes times scales on the CPU, compiled by numba without the GIL; the numbers are built by arithmetic, not looked up.

A magnitude m of a small float becomes an fp32 by shifting it under a new exponent, or, when subnormal, by converting
the integer; both are vector code. Nothing depends on how the processor treats fp32 subnormals.
"""

from __future__ import annotations

from typing import Any

import numba.extending
import numpy as np
import torch
from llvmlite import ir
from numba import types
from torch import Tensor

from kconv.kernels.backend import jit
from kconv.kernels.codes import Code, nearest
from kconv.kernels.common import viewable
from kconv.kernels.scaled import Scales

_VIEW = {torch.bfloat16: (torch.int16, np.uint16), torch.float32: (torch.int32, np.uint32)}
_PAIR = {torch.bfloat16: (torch.int32, np.uint32), torch.float32: (torch.int64, np.uint64)}


def decode(codes: Tensor, scales: Scales, code: Code, out: Tensor) -> bool | None:
    """Codes [R, W], scales [rows, columns] into out [R, I]; whether a code was not finite. None: left to plain torch."""
    if out.dtype not in _VIEW:
        return None
    source, scale, wide = codes.numpy(), scales.factor.numpy(), out.dtype == torch.float32
    grid, offset = scales.grid, scales.offset
    if code.bits == 8:
        signed, unsigned = _VIEW[out.dtype]
        form = code.mantissa, np.uint32((127 - code.bias) << 23), np.float32(code.step), code.limit, code.hole
        target = out.view(signed).numpy().view(unsigned)
        return bool(_bytes(source, scale, target, *form, grid.height, grid.width, wide))
    if out.shape[1] % 2 or grid.width % 2 or not viewable(out, 2 * out.element_size()):
        return None
    signed, unsigned = _PAIR[out.dtype]
    target = out.view(signed).numpy().view(unsigned)
    if code.integer:
        shift = scale if offset is None else offset.numpy()
        _integers(source, scale, shift, offset is not None, target, grid.height, grid.width // 2, wide)
    else:
        _e2m1(source, scale, target, grid.height, grid.width // 2, wide)
    return False


def encode(tensor: Tensor, scales: Scales, code: Code, out: Tensor) -> bool:
    """Values [R, I] into the nearest codes out [R, W]; false: left to plain torch."""
    if tensor.dtype not in _VIEW or not out.is_contiguous():
        return False
    signed, unsigned = _VIEW[tensor.dtype]
    grid, shift = scales.grid, scales.factor if scales.offset is None else scales.offset
    out.zero_()
    _encode(
        tensor.view(signed).numpy().view(unsigned), scales.factor.numpy(), shift.numpy(), scales.offset is not None, out.numpy(),
        nearest(code).numpy(), grid.height, grid.width, tensor.dtype == torch.float32, code.per_byte,
    )  # fmt: skip
    return True


_intrinsic: Any = numba.extending.intrinsic


@_intrinsic
def _as_bits(typing_context, number):
    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@_intrinsic
def _as_float(typing_context, number):
    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@jit
def _bf16(x):
    """The bits of a finite fp32 rounded to bf16, to nearest even."""
    return np.uint16((x + np.uint32(0x7FFF) + ((x >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@jit
def _bytes(codes, scale, out, mantissa, exponent, step, limit, hole, height, width, wide):
    rows, columns = codes.shape
    shift, least = np.uint32(23 - mantissa), np.uint32(1 << mantissa)
    special = np.uint32(0)
    for r in range(rows):
        for g in range(scale.shape[1]):
            f = scale[r // height, g]
            source = codes[r, g * width : min(columns, (g + 1) * width)]
            target = out[r, g * width : min(columns, (g + 1) * width)]
            for j in range(source.size):
                b = np.uint32(source[j])
                m = b & np.uint32(127)
                number = _as_float((m << shift) + exponent)
                number = np.float32(np.int32(m)) * step if m < least else number
                x = _as_bits(number * f) ^ ((b & np.uint32(128)) << np.uint32(24))
                special |= np.uint32(m >= limit) | np.uint32(b == hole)
                target[j] = x if wide else _bf16(x)
    return special


@jit
def _e2m1(codes, scale, out, height, width, wide):
    rows, columns = out.shape
    half = np.uint32(0x3F000000)  # the bits of 0.5, code 1
    factor = np.empty(columns, np.float32)  # one for every byte: groups of 8 bytes are too short for a vector loop
    for r in range(rows):
        source, target, scales = codes[r], out[r], scale[r // height]
        for g in range(scales.size):
            factor[g * width : min(columns, (g + 1) * width)] = scales[g]
        for j in range(columns):
            b = np.uint32(source[j])
            m = b & np.uint32(7)
            n = (b >> np.uint32(4)) & np.uint32(7)
            low = np.uint32(0) if m == 0 else (half if m == 1 else half + (m << np.uint32(22)))
            high = np.uint32(0) if n == 0 else (half if n == 1 else half + (n << np.uint32(22)))
            x = _as_bits(_as_float(low) * factor[j]) ^ ((b & np.uint32(8)) << np.uint32(28))
            y = _as_bits(_as_float(high) * factor[j]) ^ ((b & np.uint32(128)) << np.uint32(24))
            if wide:
                target[j] = np.uint64(x) | (np.uint64(y) << np.uint64(32))
            else:
                target[j] = np.uint32(_bf16(x)) | (np.uint32(_bf16(y)) << np.uint32(16))


@jit
def _integers(codes, scale, offset, shifted, out, height, width, wide):
    rows, columns = out.shape
    for r in range(rows):
        for g in range(scale.shape[1]):
            f = scale[r // height, g]
            zero = np.int32(8) + (np.int32(offset[r // height, g]) if shifted else np.int32(0))
            source = codes[r, g * width : min(columns, (g + 1) * width)]
            target = out[r, g * width : min(columns, (g + 1) * width)]
            for j in range(target.size):
                b = np.int32(source[j])
                x = _as_bits(np.float32((b & np.int32(15)) - zero) * f)
                y = _as_bits(np.float32((b >> np.int32(4)) - zero) * f)
                if wide:
                    target[j] = np.uint64(x) | (np.uint64(y) << np.uint64(32))
                else:
                    target[j] = np.uint32(_bf16(x)) | (np.uint32(_bf16(y)) << np.uint32(16))


@jit
def _encode(tensor, scale, offset, shifted, out, nearest_code, height, width, wide, per_byte):
    rows, columns = tensor.shape
    for r in range(rows):
        for g in range(scale.shape[1]):
            f = scale[r // height, g]
            f = np.float32(1.0) if f == np.float32(0.0) else f
            zero = offset[r // height, g] if shifted else np.float32(0.0)
            source = tensor[r, g * width : min(columns, (g + 1) * width)]
            target = out[r, g * width // per_byte :]
            for j in range(source.size):
                x = np.uint32(source[j])
                number = _as_float(x if wide else x << np.uint32(16))
                quotient = number / f + zero if shifted else number / f  # adding 0 would lose the sign of -0
                code = nearest_code[_bf16(_as_bits(quotient))]
                if per_byte == 1:
                    target[j] = code
                else:
                    target[j >> 1] |= np.uint8(code << ((j & 1) << 2))
