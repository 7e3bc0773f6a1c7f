"""MXFP4 on CUDA, in Triton: the bit arithmetic of `mxfp4_cpu`, one lane a byte of two codes.

Offsets are 64-bit, since a stacked expert tensor of K3 has 9.9e9 packed bytes. Under `TRITON_INTERPRET=1` the same
kernels run on CPU tensors, which is how their bits are tested without a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kconv.kernels import e2m1

_FORM = {torch.bfloat16: (7, 127, 254), torch.float16: (10, 15, 30), torch.float32: (23, 127, 254)}
"""Mantissa bits, bias and largest exponent field of a finite number."""
_BLOCK = 4096
_WARPS = 8


def decode(packed: Tensor, scale: Tensor, out: Tensor) -> bool:
    """Packed [G, g/2] and scale [G] into out [G, g]; false for a dtype that only plain torch knows."""
    if out.dtype not in _FORM:
        return False
    mantissa, bias, top = _FORM[out.dtype]
    table = e2m1.pair_table(out.dtype, out.device)
    _decode[(triton.cdiv(packed.numel(), _BLOCK),)](
        packed, scale, out.view(table.dtype), table, packed.numel(),
        LOW=129 - bias, HIGH=top - 3 + 128 - bias, OFFSET=128 - bias, MANTISSA=mantissa, WIDTH=packed.shape[1],
        WIDE=out.dtype.itemsize == 4, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    return True


def encode(values: Tensor, scale: Tensor, out: Tensor) -> bool:
    """bf16 values [G, g] and scale [G] into packed out [G, g/2]; false when a value has no code. Waits for the device."""
    wrong = torch.zeros(1, dtype=torch.int32, device=out.device)
    table = e2m1.code_table(out.device)
    _encode[(triton.cdiv(out.numel(), _BLOCK),)](
        values.view(torch.int32), scale, out, table, wrong, out.numel(),
        WIDTH=out.shape[1], BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    return int(wrong) == 0


@triton.jit
def _decode(
    packed, scale, out, table, n,
    LOW: tl.constexpr, HIGH: tl.constexpr, OFFSET: tl.constexpr, MANTISSA: tl.constexpr, WIDTH: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = j < n
    b = tl.load(packed + j, live, other=0).to(tl.int32)
    s = tl.load(scale + j // WIDTH, live, other=LOW).to(tl.int32)
    base = (s - OFFSET) << MANTISSA
    m = b & 7
    k = (b >> 4) & 7
    even = tl.where(m == 0, 0, tl.where(m == 1, base, base + (m << (MANTISSA - 1))))
    odd = tl.where(k == 0, 0, tl.where(k == 1, base, base + (k << (MANTISSA - 1))))
    if WIDE:
        even |= (b & 8) << 28
        odd |= (b & 128) << 24
        word = (even.to(tl.int64) & 0xFFFFFFFF) | (odd.to(tl.int64) << 32)
    else:
        even |= (b & 8) << 12
        odd |= (b & 128) << 8
        word = even | (odd << 16)
    rare = (s < LOW) | (s > HIGH)
    word = tl.where(rare, tl.load(table + (s << 8 | b), live & rare, other=0), word)
    tl.store(out + j, word, live)


@triton.jit
def _encode(pairs, scale, out, table, wrong, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = j < n
    w = tl.load(pairs + j, live, other=0)
    s = tl.load(scale + j // WIDTH, live, other=127).to(tl.int32)
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
    tl.store(out + j, code.to(tl.uint8), live)
    any_lost = tl.max(tl.where(live & (lost != 0), 1, 0))
    if any_lost > 0:
        tl.store(wrong, 1)
