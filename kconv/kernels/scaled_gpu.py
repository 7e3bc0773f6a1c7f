"""Codes times scales on CUDA, in Triton: a program a stretch of consecutive codes, a thread words of eight of them.

The magnitude bits of a small float, shifted under the exponent of an fp32, times a power of two are its value; then the
product with the scale is rounded once, to nearest even. Scales are read as they are stored. Under `TRITON_INTERPRET=1`
the same kernels run on CPU tensors, where bf16 is rounded by integer arithmetic, as the interpreter does not round it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kconv.kernels.codes import Code, nearest
from kconv.kernels.common import INTS, viewable
from kconv.kernels.scaled import Scales

_WORD = 8
"""Codes that a thread reads at once: it writes as many bf16 in one store of 16 bytes."""
_VALUES = 2048
_WARPS = 4
_ENCODE_BLOCK = 4096
_ENCODE_WARPS = 8


def decode(codes: Tensor, scales: Scales, code: Code, out: Tensor) -> Tensor | bool:
    """Codes [R, W], scales [rows, columns] into out [R, I]; not zero, in an int32 [1], when a code was not finite."""
    special = torch.zeros(1, dtype=torch.int32, device=out.device)
    columns, pitch, lanes = out.shape[1], codes.shape[1], _WORD // code.per_byte
    if pitch % lanes or not viewable(codes, lanes):
        lanes = 1
    words, per = codes.view(INTS[lanes]), lanes * code.per_byte
    block, grid, unit, stored = _VALUES // per, scales.grid, scales.unit, scales.stored
    _decode[(triton.cdiv(words.numel(), block),)](
        words, stored if unit is None else stored.view(torch.uint8), stored if unit is None else unit,
        stored if scales.offset is None else scales.offset, out, special, words.numel(), columns, stored.shape[1],
        PITCH=pitch // lanes, PER=per, PADDED=pitch * code.per_byte != columns, BITS=code.bits, HEIGHT=grid.height,
        WIDTH=grid.width, INTEGER=code.integer, SHIFTED=scales.offset is not None, UNIT=_unit(scales), MANTISSA=code.mantissa,
        ONE=2.0 ** (127 - code.bias), LIMIT=code.limit, HOLE=code.hole < 256, ONES=int.from_bytes(b"\x01" * lanes, "little"),
        TOPS=int.from_bytes(b"\x80" * lanes, "little", signed=True), BLOCK=block, num_warps=_WARPS,
        BY_HAND=out.dtype == torch.bfloat16 and not out.is_cuda,
    )  # fmt: skip
    return special if code.bits == 8 else False


def encode(tensor: Tensor, scales: Scales, code: Code, out: Tensor) -> bool:
    """Values [R, I] into the nearest codes out [R, W]."""
    rows, width = out.shape
    block, factor = min(_ENCODE_BLOCK, triton.next_power_of_2(width)), scales.factor
    _encode[(rows, triton.cdiv(width, block))](
        tensor, factor, factor if scales.offset is None else scales.offset, out, nearest(code, out.device), tensor.shape[1],
        width, factor.shape[1], HEIGHT=scales.grid.height, WIDTH=scales.grid.width, NIBBLES=code.bits == 4,
        SHIFTED=scales.offset is not None, BLOCK=block, num_warps=_ENCODE_WARPS,
    )  # fmt: skip
    return True


def _unit(scales: Scales) -> str:
    """What the kernel does with the unit of the scales."""
    return "none" if scales.unit is None else "divides" if scales.divides else "multiplies"


@triton.jit
def _to_bf16_bits(x):
    """The bits of a finite fp32, given as int32, rounded to bf16."""
    return ((x + 0x7FFF + ((x >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def _number(b, BITS: tl.constexpr, MANTISSA: tl.constexpr, ONE: tl.constexpr):
    """The fp32 of finite codes b, given as int32."""
    sign = (b << (32 - BITS)) & -0x80000000
    return (sign | ((b & ((1 << (BITS - 1)) - 1)) << (23 - MANTISSA))).to(tl.float32, bitcast=True) * ONE


@triton.jit
def _factor(scale, where, live, unit, UNIT: tl.constexpr):
    """The fp32 factors of scales as they are stored."""
    if UNIT == "none":
        return tl.load(scale + where, live, other=1.0).to(tl.float32)
    number = _number(tl.load(scale + where, live, other=0).to(tl.int32), 8, 3, 2.0**120)
    if UNIT == "divides":
        return tl.div_rn(number, tl.zeros_like(number) + tl.load(unit))
    return number * tl.load(unit)


@triton.jit
def _decode(
    words, scale, unit, offset, out, special, n, columns, groups,
    PITCH: tl.constexpr, PER: tl.constexpr, PADDED: tl.constexpr, BITS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    INTEGER: tl.constexpr, SHIFTED: tl.constexpr, UNIT: tl.constexpr, MANTISSA: tl.constexpr, ONE: tl.constexpr,
    LIMIT: tl.constexpr, HOLE: tl.constexpr, ONES: tl.constexpr, TOPS: tl.constexpr, BY_HAND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Only what all threads of a program share is 64-bit: 64-bit offsets in every thread cost more than the memory does.
    start = tl.program_id(0).to(tl.int64) * BLOCK
    top = start // PITCH
    k = tl.arange(0, BLOCK)
    live = k < (n - start)
    w = tl.load(words + start + k, live, other=0)
    if w.dtype == tl.uint8:
        w = w.to(tl.int8, bitcast=True).to(tl.int32)
    at = (start % PITCH).to(tl.int32) + k
    down = at // PITCH
    lane = tl.arange(0, PER)[None, :]
    band = scale + (top // HEIGHT) * groups
    row = ((top % HEIGHT).to(tl.int32) + down) // HEIGHT
    along = at - down * PITCH
    column = along[:, None] * PER + lane
    held = live[:, None] & (column < columns) if PADDED else live[:, None]
    if WIDTH % PER == 0 and not PADDED:
        where = (row * groups + along // (WIDTH // PER))[:, None]
    else:
        where = (row * groups)[:, None] + column // WIDTH
    f = _factor(band, where, held, unit, UNIT)
    b = (w[:, None] >> (BITS * lane)).to(tl.int32) & ((1 << BITS) - 1)
    if INTEGER:
        number = (b - 8).to(tl.float32)
        if SHIFTED:
            number = number - tl.load(offset + (top // HEIGHT) * groups + where, held, other=0.0)
    else:
        number = _number(b, BITS, MANTISSA, ONE)
    x = number * f
    if BY_HAND:
        result = _to_bf16_bits(x.to(tl.int32, bitcast=True)).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        result = x.to(out.dtype.element_ty)
    if PADDED:
        tl.store(out + top * columns + (down * columns)[:, None] + column, result, held)
    else:
        tl.store(out + start * PER + (k[:, None] * PER + lane), result, live[:, None])
    if BITS == 8:
        if HOLE:  # is a byte 0 after the xor
            rest = w ^ TOPS
            lost = (rest - ONES) & ~rest
        else:  # does a byte reach its top bit
            lost = (w & (ONES * 127)) + ONES * (128 - LIMIT)
        lost &= TOPS
        tl.store(special + k * 0, 1, live & (lost != 0))


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
