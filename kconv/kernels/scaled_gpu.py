"""Codes times scales on CUDA, in Triton: one program a row (or a stretch of it).

The magnitude bits of a small float, shifted under the exponent of an fp32, times a power of two are its value; then the
product with the scale is rounded once, to nearest even. Under `TRITON_INTERPRET=1` the same kernels run on CPU tensors,
where bf16 is rounded by integer arithmetic, as the interpreter does not round it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kconv.kernels.codes import Code, nearest
from kconv.kernels.geometry import Grid

_BLOCK = 4096
_WARPS = 8


def decode(codes: Tensor, factor: Tensor, grid: Grid, code: Code, out: Tensor, offset: Tensor | None) -> bool:
    """Codes [R, W], factor [rows, columns] into out [R, I]; whether a code was not finite. Waits for the device."""
    special = torch.zeros(1, dtype=torch.int32, device=out.device)
    rows, columns = out.shape
    block = min(_BLOCK, triton.next_power_of_2(columns))
    _decode[(rows, triton.cdiv(columns, block))](
        codes, factor, factor if offset is None else offset, out, special, columns, codes.shape[1], factor.shape[1],
        HEIGHT=grid.height, WIDTH=grid.width, NIBBLES=code.bits == 4, INTEGER=code.integer, SHIFTED=offset is not None,
        MANTISSA=code.mantissa, UNIT=2.0 ** (127 - code.bias), LIMIT=code.limit, HOLE=code.hole,
        BY_HAND=out.dtype == torch.bfloat16 and not out.is_cuda, BLOCK=block, num_warps=_WARPS,
    )  # fmt: skip
    return code.bits == 8 and bool(int(special))


def encode(tensor: Tensor, factor: Tensor, grid: Grid, code: Code, out: Tensor, offset: Tensor | None) -> bool:
    """Values [R, I] into the nearest codes out [R, W]."""
    rows, width = out.shape
    block = min(_BLOCK, triton.next_power_of_2(width))
    _encode[(rows, triton.cdiv(width, block))](
        tensor, factor, factor if offset is None else offset, out, nearest(code, out.device), tensor.shape[1], width,
        factor.shape[1], HEIGHT=grid.height, WIDTH=grid.width, NIBBLES=code.bits == 4, SHIFTED=offset is not None,
        BLOCK=block, num_warps=_WARPS,
    )  # fmt: skip
    return True


@triton.jit
def _to_bf16_bits(x):
    """The bits of a finite fp32, given as int32, rounded to bf16."""
    return ((x + 0x7FFF + ((x >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def _decode(
    codes, factor, offset, out, special, columns, stride, groups,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, NIBBLES: tl.constexpr, INTEGER: tl.constexpr, SHIFTED: tl.constexpr,
    MANTISSA: tl.constexpr, UNIT: tl.constexpr, LIMIT: tl.constexpr, HOLE: tl.constexpr, BY_HAND: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = j < columns
    where = (row // HEIGHT) * groups + j // WIDTH
    f = tl.load(factor + where, live, other=1.0)
    if NIBBLES:
        b = (tl.load(codes + row * stride + (j >> 1), live, other=0).to(tl.int32) >> ((j & 1) << 2)) & 15
    else:
        b = tl.load(codes + row * stride + j, live, other=0).to(tl.int32)
    if INTEGER:
        number = (b - 8).to(tl.float32)
        if SHIFTED:
            number = number - tl.load(offset + where, live, other=0.0)
        x = (number * f).to(tl.int32, bitcast=True)
    else:
        size = ((b & (7 if NIBBLES else 127)) << (23 - MANTISSA)).to(tl.float32, bitcast=True) * UNIT
        sign = (b & (8 if NIBBLES else 128)) << (28 if NIBBLES else 24)
        x = (size * f).to(tl.int32, bitcast=True) ^ sign
    if BY_HAND:
        result = _to_bf16_bits(x).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        result = x.to(tl.float32, bitcast=True).to(out.dtype.element_ty)
    tl.store(out + row * columns + j, result, live)
    if not NIBBLES:
        lost = live & (((b & 127) >= LIMIT) | (b == HOLE))
        if tl.max(lost.to(tl.int32)) > 0:
            tl.store(special, 1)


@triton.jit
def _code(tensor, factor, offset, table, row, j, columns, groups,
          HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SHIFTED: tl.constexpr):  # fmt: skip
    live = j < columns
    where = (row // HEIGHT) * groups + j // WIDTH
    f = tl.load(factor + where, live, other=1.0)
    number = tl.load(tensor + row * columns + j, live, other=0.0).to(tl.float32)
    quotient = tl.div_rn(number, tl.where(f == 0.0, 1.0, f))
    if SHIFTED:
        quotient = quotient + tl.load(offset + where, live, other=0.0)
    index = _to_bf16_bits(quotient.to(tl.int32, bitcast=True))
    return tl.where(live, tl.load(table + index).to(tl.int32), 0)


@triton.jit
def _encode(
    tensor, factor, offset, out, table, columns, width, groups,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, NIBBLES: tl.constexpr, SHIFTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if NIBBLES:
        low = _code(tensor, factor, offset, table, row, 2 * k, columns, groups, HEIGHT, WIDTH, SHIFTED)
        high = _code(tensor, factor, offset, table, row, 2 * k + 1, columns, groups, HEIGHT, WIDTH, SHIFTED)
        byte = low | (high << 4)
    else:
        byte = _code(tensor, factor, offset, table, row, k, columns, groups, HEIGHT, WIDTH, SHIFTED)
    tl.store(out + row * width + k, byte.to(tl.uint8), k < width)
