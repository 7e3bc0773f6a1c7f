"""MXFP4 on CUDA, in Triton: a thread reads four bytes and writes their eight values.

The magnitude bits of a code, put at bit 22, are an fp32 (subnormal for 0.5) of value code * 2^-126; times 2^(scale-1) it
is the value, exactly. That is half the integer work of the CPU's way, which would not keep up with the memory of an
H200. Addresses are 64-bit: a stacked expert tensor of K3 has 9.9e9 packed bytes. Under `TRITON_INTERPRET=1` the same
kernels run on CPU tensors, which is how their bits are tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kconv.kernels import e2m1
from kconv.kernels.common import viewable

_HIGHEST = 128
"""Scales above it take the table, since 2^(scale-1) is no fp32; so do those that the target dtype holds in part only."""
_BLOCK = 512
_WARPS = 4
_ENCODE_BLOCK = 1024
_MENDERS = 1024


def decode(packed: Tensor, scale: Tensor, out: Tensor, check: Callable[[], None] | None) -> bool:
    """Packed [G, g/2] and scale [G] into out [G, g]; false for a dtype that only plain torch knows.

    The first kernel takes every scale for a usual one and notes whether that was so; the second ends at once unless some
    were not, and takes those from a table. With `check` the note is read, which waits for the device, and `check` may refuse.
    """
    if out.dtype == torch.float64:
        return False
    low, high = e2m1.safe_scales(out.dtype)
    table = e2m1.pair_table(out.dtype, out.device)
    lanes = 4 if packed.shape[1] % 4 == 0 and viewable(packed, 4) else 1
    source, target = packed.view(torch.int32) if lanes == 4 else packed, out.view(table.dtype)
    unusual = torch.zeros(1, dtype=torch.int32, device=out.device)
    sizes = {"LOW": low, "HIGH": min(high, _HIGHEST), "WIDTH": packed.shape[1] // lanes, "LANES": lanes, "BLOCK": _BLOCK}
    blocks = triton.cdiv(source.numel(), _BLOCK)
    _decode[(blocks,)](
        source, scale, target, unusual, source.numel(),
        **sizes, WIDE=out.dtype == torch.float32, HALF=out.dtype == torch.float16, num_warps=_WARPS,
    )  # fmt: skip
    programs = min(blocks, _MENDERS)
    _mend[(programs,)](source, scale, target, table, unusual, source.numel(), programs, **sizes, num_warps=_WARPS)
    if check and int(unusual):
        check()
    return True


def encode(values: Tensor, scale: Tensor, out: Tensor) -> bool:
    """bf16 values [G, g] and scale [G] into packed out [G, g/2]; false when a value has no code. Waits for the device."""
    wrong = torch.zeros(1, dtype=torch.int32, device=out.device)
    table = e2m1.code_table(out.device)
    _encode[(triton.cdiv(out.numel(), _ENCODE_BLOCK),)](
        values.view(torch.int32), scale, out, table, wrong, out.numel(),
        WIDTH=out.shape[1], BLOCK=_ENCODE_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    return int(wrong) == 0


@triton.jit
def _scales_of(scale, start, k, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Where the scales of elements start + k lie; whole groups in a program let the compiler see which of them are one."""
    if BLOCK % WIDTH == 0:
        return scale + start // WIDTH + k // WIDTH
    return scale + start // WIDTH + ((start % WIDTH).to(tl.int32) + k) // WIDTH


@triton.jit
def _decode(
    packed, scale, out, unusual, n,
    LOW: tl.constexpr, HIGH: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    # Only the program's start is 64-bit: with 64-bit offsets in every thread the kernel is bound by integer arithmetic.
    start = tl.program_id(0).to(tl.int64) * BLOCK
    k = tl.arange(0, BLOCK)
    live = k < (n - start)
    lane = tl.arange(0, LANES)[None, :]
    b = (tl.load(packed + start + k, live, other=0).to(tl.int32)[:, None] >> (8 * lane)) & 255
    s = tl.load(_scales_of(scale, start, k, WIDTH, BLOCK), live, other=LOW).to(tl.int32)
    factor = ((s + 126) << 23).to(tl.float32, bitcast=True)[:, None]
    spread = b * 0x40040  # magnitude of the even code at bit 6, of the odd one at bit 22; signs at bits 9 and 25
    even = (((spread << 16) & 0x01C00000).to(tl.float32, bitcast=True) * factor).to(tl.int32, bitcast=True)
    odd = ((spread & 0x01C00000).to(tl.float32, bitcast=True) * factor).to(tl.int32, bitcast=True)
    if WIDE:
        even ^= (spread << 22) & -0x80000000
        odd ^= (spread << 6) & -0x80000000
        word = (even.to(tl.int64) & 0xFFFFFFFF) | (odd.to(tl.int64) << 32)
    elif HALF:
        low = even.to(tl.float32, bitcast=True).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        high = odd.to(tl.float32, bitcast=True).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16
        word = (low | high) ^ ((spread << 6) & -0x7FFF8000)
    else:
        word = (((even >> 16) & 0xFFFF) | (odd & -0x10000)) ^ ((spread << 6) & -0x7FFF8000)
    tl.store(unusual + k * 0, 1, (s < LOW) | (s > HIGH))
    tl.store(out + start * LANES + (k[:, None] * LANES + lane), word, live[:, None])


@triton.jit
def _mend(
    packed, scale, out, table, unusual, n, programs,
    LOW: tl.constexpr, HIGH: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(unusual) != 0:
        k = tl.arange(0, BLOCK)
        lane = tl.arange(0, LANES)[None, :]
        start = tl.program_id(0).to(tl.int64) * BLOCK
        while start < n:
            live = k < (n - start)
            s = tl.load(_scales_of(scale, start, k, WIDTH, BLOCK), live, other=LOW).to(tl.int32)
            rare = (s < LOW) | (s > HIGH)
            if tl.max(rare.to(tl.int32)) > 0:
                b = (tl.load(packed + start + k, rare, other=0).to(tl.int32)[:, None] >> (8 * lane)) & 255
                word = tl.load(table + (s[:, None] << 8 | b), rare[:, None], other=0)
                tl.store(out + start * LANES + (k[:, None] * LANES + lane), word, rare[:, None])
            start += programs * BLOCK


@triton.jit
def _encode(pairs, scale, out, table, wrong, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    j = tl.arange(0, BLOCK)
    live = j < (n - start)
    w = tl.load(pairs + start + j, live, other=0)
    s = tl.load(_scales_of(scale, start, j, WIDTH, BLOCK), live, other=127).to(tl.int32)
    base = (s - 1) << 7
    m = w & 0x7FFF
    k = (w >> 16) & 0x7FFF
    p = tl.where(m == 0, 0, tl.where(m == base, 1, ((m - base) >> 6) & 7))
    q = tl.where(k == 0, 0, tl.where(k == base, 1, ((k - base) >> 6) & 7))
    back_m = tl.where(p == 0, 0, tl.where(p == 1, base, base + (p << 6)))
    back_k = tl.where(q == 0, 0, tl.where(q == 1, base, base + (q << 6)))
    code = p | (q << 4) | ((w >> 12) & 8) | ((w >> 24) & 0x80)
    lost = (m ^ back_m) | (k ^ back_k)
    rare = (s < 2) | (s > 252)
    row = s << 11
    even = tl.load(table + (row | ((w & 0xFFFF) >> 5)), live & rare, other=0).to(tl.int32)
    odd = tl.load(table + (row | ((w >> 21) & 0x7FF)), live & rare, other=0).to(tl.int32)
    code = tl.where(rare, (even & 15) | ((odd & 15) << 4), code)
    lost = tl.where(rare, (w & 0x001F001F) | ((even | odd) & 0x40), lost)
    tl.store(out + start + j, code.to(tl.uint8), live)
    tl.store(wrong + j * 0, 1, live & (lost != 0))
