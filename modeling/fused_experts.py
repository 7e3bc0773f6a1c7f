"""Routed experts as five Triton launches, forward and backward to their input; see `kconv.modeling.expert_kernels`.

| rows of an expert, on average | rows of a tile | order |
|---|---|---|
| at most 128 pairs in all | 16, one of them used | none: each pair reads its own expert's matrix |
| up to 12 | 16 | sorted by expert |
| up to 24 | 32 | sorted |
| up to 48 | 64 | sorted |
| up to 84 | 64 + 32; 128 where the gradient follows | sorted |
| more | 128 | sorted |

The choice reads shapes only, so the host never waits and the pass can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

import torch
import triton

from kconv.modeling import expert_kernels as kernels
from kconv.modeling.situ import GatedActivation

PAIRS_UNSORTED = 128
BLOCK = 1024
TILES = ((12, 16), (24, 32), (48, 64), (84, 96))  # average rows of an expert up to which a tile of so many rows serves
MOST_ROWS = 128
# Rows of a tile: outputs of a tile, warps, stages. The fastest of some forty on an H200 at K3's widths.
PACKED_LAUNCH = {16: (128, 4, 4), 32: (128, 4, 3), 64: (128, 8, 3), 96: (128, 4, 3), 128: (128, 4, 3)}
PLAIN_LAUNCH = {16: (64, 4, 4), 32: (64, 4, 4), 64: (128, 4, 3), 96: (128, 8, 4), 128: (256, 8, 3)}


@dataclass(frozen=True)
class Matrices:
    """What the kernels read: words int16 [E, out, in / 4] and scales int32 [E, out, in / 128], or bf16 [E, out, in] alone."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None

    @classmethod
    def of(cls, stored: tuple[torch.Tensor, ...]) -> Matrices:
        """Views of gate_up and down; or of codes U8 [E, out, in / 2] and scales U8 [E, out, in / 32] of each."""
        if len(stored) == 2:
            return cls(*stored)
        gate_up, gate_up_scale, down, down_scale = stored
        words = (gate_up.view(torch.int16), down.view(torch.int16))
        return cls(*words, gate_up_scale.view(torch.int32), down_scale.view(torch.int32))

    @property
    def is_packed(self) -> bool:
        """Whether these are codes."""
        return self.gate_up_scale is not None


@dataclass(frozen=True)
class Order:
    """Rows sorted by expert: where each pair went, whose token each row is, and the tiles; all on the device."""

    per: int
    size: int
    tiles: int
    tile_expert: torch.Tensor
    tile_row: torch.Tensor | None = None
    ends: torch.Tensor | None = None
    bases: torch.Tensor | None = None
    places: torch.Tensor | None = None
    tokens: torch.Tensor | None = None

    @property
    def unsorted(self) -> bool:
        """Whether each pair is a tile."""
        return self.places is None


def tile_size(pairs: int, experts: int, keep: bool) -> int:
    """Rows of a tile for `pairs` rows spread over `experts`; a power of 2 where the gradient's product follows."""
    size = next((size for most, size in TILES if pairs <= most * experts), MOST_ROWS)
    return MOST_ROWS if keep and size & (size - 1) else size


def order_of(indices: torch.Tensor, experts: int, size: int) -> Order:
    """Sort the pairs of `indices` [tokens, k] by expert, in tiles of `size` rows."""
    pairs, per = indices.numel(), indices.shape[1]
    most = min(pairs, experts + pairs // size)
    counts = torch.zeros(experts, dtype=torch.int32, device=indices.device)
    space = torch.empty(3 * pairs + 2 * most + 2 * experts + 1, dtype=torch.int32, device=indices.device)
    ranks, places, tokens, ends, bases, tile_expert, tile_row = space.split(
        (pairs, pairs, pairs, experts, experts + 1, most, most)
    )
    grid, flat = (triton.cdiv(pairs, BLOCK),), indices.reshape(-1)
    kernels.rank[grid](flat, counts, ranks, pairs, BLOCK=BLOCK)
    kernels.plan[(1,)](counts, ends, bases, E=triton.next_power_of_2(experts), EXPERTS=experts, N=size)
    kernels.spread[grid](
        flat, counts, ranks, ends, bases, places, tokens, tile_expert, tile_row, pairs, PER=per, N=size, BLOCK=BLOCK
    )
    return Order(per, size, most, tile_expert, tile_row, ends, bases, places, tokens)


def quarters(x: torch.Tensor) -> torch.Tensor:
    """Channels [..., C] with, of every 128, channel 4q + j at place 32j + q."""
    return x.unflatten(-1, (-1, 32, 4)).transpose(-1, -2).flatten(-3)


def from_quarters(x: torch.Tensor) -> torch.Tensor:
    """The inverse of `quarters`."""
    return x.unflatten(-1, (-1, 4, 32)).transpose(-1, -2).flatten(-3)


@functools.cache
def selectors(device: torch.device) -> torch.Tensor:
    """Which byte of a word of four scales belongs to each of the 32 code words that it covers, for `prmt`."""
    return (0x4440 + torch.arange(32, device=device) // 8).to(torch.int32)


def on_gpu() -> bool:
    """Whether kernels are compiled; Triton's interpreter knows no inline assembly."""
    return os.environ.get("TRITON_INTERPRET") != "1"


def product(
    x: torch.Tensor, matrix: torch.Tensor, scales: torch.Tensor | None, out: torch.Tensor, order: Order, experts: int,
    act: GatedActivation | None = None, pre: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Rows through their experts' matrices [experts, out, in] into `out`; with `act`, gathered by token and activated."""
    outputs, width = matrix.shape[1], x.shape[-1]
    m, warps, stages = (PLAIN_LAUNCH if scales is None else PACKED_LAUNCH)[order.size]
    m, n = min(m, outputs & -outputs), 1 << (order.size.bit_length() - 1)
    name, beta, linear = ("none", 1.0, 1.0) if act is None else act.in_kernels()
    kernels.product[(order.tiles * (outputs // m),)](
        x, matrix, scales, selectors(x.device), out, pre, order.tokens, order.tile_expert, order.tile_row, order.ends,
        order.bases, beta, linear, ACT=name, PER=order.per, EXPERTS=experts, K=width, OUT=outputs, PACKED=scales is not None,
        FUSED=act is not None, KEEP=pre is not None, PAIRS=order.unsorted, GPU=on_gpu(),
        M=m, N=n, MORE=order.size - n, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return out


def _combine(rows: torch.Tensor, order: Order, tokens: int, weights: torch.Tensor | None) -> torch.Tensor:
    out = torch.empty(tokens, rows.shape[-1], dtype=torch.float32, device=rows.device)
    grid = (tokens, triton.cdiv(rows.shape[-1], BLOCK))
    kernels.combine[grid](
        rows, order.places, weights, out, PER=order.per, WIDTH=rows.shape[-1], PAIRS=order.unsorted,
        WEIGH=weights is not None, BLOCK=BLOCK,
    )  # fmt: skip
    return out


def forward(
    x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, matrices: Matrices, act: GatedActivation, keep: bool = False
) -> tuple[torch.Tensor, Order, torch.Tensor | None]:
    """x bf16 [tokens, width] through experts `indices` [tokens, k]; fp32 [tokens, width], the order, and what `through` keeps."""
    pairs, experts = indices.numel(), matrices.gate_up.shape[0]
    if pairs <= PAIRS_UNSORTED and not keep:
        order = Order(indices.shape[1], 16, pairs, indices.reshape(-1))
    else:
        order = order_of(indices, experts, tile_size(pairs, experts, keep))
    out, pre = through(x, order, weights, matrices, act, keep)
    return out, order, pre


def through(
    x: torch.Tensor, order: Order, weights: torch.Tensor, matrices: Matrices, act: GatedActivation, keep: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x in the given order; fp32 [tokens, width], and gates and ups [pairs, 2 * inter] where they are to be kept."""
    pairs, experts, inter = weights.numel(), matrices.gate_up.shape[0], matrices.gate_up.shape[1] // 2
    rows = quarters(x) if matrices.is_packed else x.contiguous()
    pre = x.new_empty(pairs, 2 * inter) if keep else None
    h = product(rows, matrices.gate_up, matrices.gate_up_scale, x.new_empty(pairs, inter), order, experts, act, pre)
    y = product(h, matrices.down, matrices.down_scale, x.new_empty(pairs, x.shape[-1]), order, experts)
    return _combine(y, order, x.shape[0], weights.contiguous()), pre


def run(x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, matrices: Matrices, act: GatedActivation) -> torch.Tensor:
    """x bf16 [tokens, width] through experts `indices` [tokens, k] with `weights` [tokens, k]: fp32 [tokens, width]."""
    with torch.cuda.device_of(x):
        if torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad):
            return FusedExperts.apply(x, weights, indices, matrices, act)
        return forward(x, indices, weights, matrices, act)[0]


class FusedExperts(torch.autograd.Function):
    """`forward` over packed experts, with gradients of the input and of the weights; codes have none."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor, matrices: Matrices, act: GatedActivation
    ) -> torch.Tensor:
        """See `forward`."""
        out, ctx.order, pre = forward(x, indices, weights, matrices, act, keep=True)
        ctx.matrices, ctx.act, ctx.dtype = matrices, act, x.dtype
        ctx.save_for_backward(pre, weights)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x and of the weights."""
        pre, weights = ctx.saved_tensors
        matrices, order = ctx.matrices, ctx.order
        tokens, pairs = weights.shape[0], weights.numel()
        inter, width = matrices.gate_up.shape[1] // 2, grads[0].shape[-1]
        grad = grads[0].to(ctx.dtype).contiguous()
        back = product_back(grad, matrices.down, matrices.down_scale, grad.new_empty(pairs, inter), order, gather=True)
        grad_weights = torch.empty(pairs, dtype=torch.float32, device=grad.device)
        grads_pre = torch.empty_like(pre)
        name, beta, linear = ctx.act.in_kernels()
        kernels.activate_back[(pairs,)](
            back,
            pre,
            weights.contiguous(),
            order.places,
            grads_pre,
            grad_weights,
            beta,
            linear,
            ACT=name,
            INTER=inter,
            GPU=on_gpu(),
            BLOCK=BLOCK,
        )
        rows = product_back(
            grads_pre, matrices.gate_up, matrices.gate_up_scale, grad.new_empty(pairs, width), order, gather=False
        )
        grad_x = from_quarters(_combine(rows, order, tokens, None)).to(ctx.dtype)
        return grad_x, grad_weights.view_as(weights).to(weights.dtype), None, None, None


def product_back(
    x: torch.Tensor, matrix: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, order: Order, gather: bool
) -> torch.Tensor:
    """Rows [., out] through the transposed packed matrices [experts, out, in] into `out` [., in]; `gather`ed by token or not."""
    experts, inner, outputs = matrix.shape[0], matrix.shape[1], out.shape[-1]
    kernels.product_back[(order.tiles * (outputs // 128),)](
        x, matrix, scales, selectors(x.device), out, order.tokens, order.tile_expert, order.tile_row, order.ends, order.bases,
        PER=order.per, EXPERTS=experts, K=inner, OUT=outputs, GATHER=gather, HALVES=not gather, GPU=on_gpu(),
        N=order.size, STAGES=2, num_warps=4,
    )  # fmt: skip
    return out
