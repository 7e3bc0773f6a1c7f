"""Routed experts in Triton: one grouped product over rows sorted by expert, straight from the stored bytes.

| kernel | does | reads | writes |
|---|---|---|---|
| `rank`, `plan`, `spread` | counting sort of (token, slot) pairs by expert, and each expert's tiles | indices | places, tiles |
| `product` | rows of an expert times its matrix, the gated activation fused behind `gate_up` | codes or bf16, rows | rows |
| `product_back` | the same with the matrix transposed, for the gradient of the input | codes, rows | rows |
| `activate_back` | gradient of the activation, and of the routing weights | gate, up, rows | rows |
| `combine` | weighs and sums the rows of a token in fp32 | rows | tokens |

Packed matrices stay as the checkpoint has them. A register holds two 16-bit words, and pairs of their four codes each are
what the tensor cores read, so rows come in quarters: of 128 channels, channel 4q + j at place 32j + q. A code's magnitude
bits at the foot of a bf16's exponent are its value * 2^-126; times 2^(scale - 65) they are the weight times 2^-64, exactly;
sums are multiplied by 2^64 at the end. Scale bytes above 192 (2^65) come out as infinity.
Nothing here waits for the device: grids are as large as the worst case, and programs without work end at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

_DECODE = tl.constexpr("""
{
.reg .b32 f, n;
prmt.b32 f, $5, 0, $7;
min.u32 f, f, 193;
mad.lo.u32 f, f, 0x00800080, 0x1F001F00;
and.b32 n, $4, 0x000F000F;
mul.lo.u32 n, n, 0x1040;
and.b32 n, n, 0x81C081C0;
mul.bf16x2 $0, n, f;
and.b32 n, $4, 0x00F000F0;
mul.lo.u32 n, n, 0x0104;
and.b32 n, n, 0x81C081C0;
mul.bf16x2 $1, n, f;
shr.u32 $3, $4, 8;
and.b32 n, $3, 0x000F000F;
mul.lo.u32 n, n, 0x1040;
and.b32 n, n, 0x81C081C0;
mul.bf16x2 $2, n, f;
and.b32 n, $3, 0x00F000F0;
mul.lo.u32 n, n, 0x0104;
and.b32 n, n, 0x81C081C0;
mul.bf16x2 $3, n, f;
}
""")
"""Two words in one register to their four pairs of codes: the product puts the sign of a code at bit 15, the rest at 8 to 6."""


@triton.jit
def _code(words, factor, J: tl.constexpr):
    bits = ((words << (28 - 4 * J)) >> 6).to(tl.uint32, bitcast=True) & 0x81C00000
    return (bits.to(tl.float32, bitcast=True) * factor).to(tl.bfloat16)


@triton.jit
def _decoded(words, scales, byte, ROWS: tl.constexpr, GPU: tl.constexpr):
    """Codes [ROWS, 128 in quarters] of 16-bit words [ROWS, 32], times 2^(scale - 191): 64 binary places are put back later.

    `scales` [ROWS] holds the four scale bytes of a row's 32 words, and `byte` [32] selects a word's, as `prmt` wants it.
    """
    scales = tl.broadcast_to(scales[:, None], (ROWS, 32))
    byte = tl.broadcast_to(byte[None, :], (ROWS, 32))
    if GPU:
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            _DECODE, "=&r,=&r,=&r,=&r,r,r,r,r,r", [words, scales, byte],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        wide = words.to(tl.int32)
        scale = tl.minimum((scales >> (8 * (byte & 3))) & 255, 193)
        factor = ((scale + 62) << 23).to(tl.float32, bitcast=True)
        w0, w1, w2, w3 = _code(wide, factor, 0), _code(wide, factor, 1), _code(wide, factor, 2), _code(wide, factor, 3)
    w = tl.permute(tl.join(tl.join(w0, w1), tl.join(w2, w3)), (0, 3, 2, 1))
    return tl.reshape(w, (ROWS, 128))


@triton.jit
def _channel(place):
    """The channel at a place of rows in quarters."""
    return place - place % 128 + 4 * (place % 32) + place % 128 // 32


@triton.jit
def _dot(a, b, acc, GPU: tl.constexpr):
    """`a @ b + acc`; Triton's interpreter multiplies the bits of bf16 as integers, so there they are widened."""
    return tl.dot(a, b, acc) if GPU else tl.dot(a.to(tl.float32), b.to(tl.float32), acc)


@triton.jit
def _exp(x, GPU: tl.constexpr):
    """exp; on a GPU without the steps that keep results below 2^-126."""
    x *= 1.4426950408889634
    if GPU:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def _inverse(x, GPU: tl.constexpr):
    if GPU:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = 1.0 / x
    return y


@triton.jit
def sigmoid(x, GPU: tl.constexpr):
    """1 / (1 + e^-x)."""
    return _inverse(1.0 + _exp(-x, GPU), GPU)


@triton.jit
def tanh(x, GPU: tl.constexpr):
    """tanh, by its series where a difference from 1 would lose digits."""
    a = tl.abs(x)
    e = _exp(-2.0 * a, GPU)
    q = x * x
    near = x * (1.0 - q * (1.0 / 3 - q * (2.0 / 15 - q * (17.0 / 315))))
    far = (1.0 - e) * _inverse(1.0 + e, GPU)
    return tl.where(a < 0.2, near, tl.where(x < 0, -far, far))


@triton.jit
def bounded(up, linear, ACT: tl.constexpr, GPU: tl.constexpr):
    """The factor made of the up projection: bounded by `linear` where ACT is `situ`."""
    return linear * tanh(up * (1.0 / linear), GPU) if ACT == "situ" else up


@triton.jit
def gated(gate, beta, ACT: tl.constexpr, GPU: tl.constexpr):
    """The factor made of the gate: SiLU, or SiTU's with bound `beta`."""
    return (gate if ACT == "silu" else beta * tanh(gate * (1.0 / beta), GPU)) * sigmoid(gate, GPU)


@triton.jit
def rank(indices, counts, ranks, pairs, BLOCK: tl.constexpr):
    """Number the pairs of each expert in any order; the order changes no result, since rows do not meet."""
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(indices + p, mask=p < pairs, other=0)
    tl.store(ranks + p, tl.atomic_add(counts + expert, 1, mask=p < pairs), mask=p < pairs)


@triton.jit
def plan(counts, ends, bases, E: tl.constexpr, EXPERTS: tl.constexpr, N: tl.constexpr):
    """Where each expert's rows end and its tiles of N rows begin; the number of tiles stands behind the last expert."""
    e = tl.arange(0, E)
    count = tl.load(counts + e, mask=e < EXPERTS, other=0)
    tiles = (count + N - 1) // N
    last = tl.cumsum(tiles)
    tl.store(ends + e, tl.cumsum(count), mask=e < EXPERTS)
    tl.store(bases + e, last - tiles, mask=e < EXPERTS)
    tl.store(bases + EXPERTS + tl.arange(0, 1), tl.sum(tiles, keep_dims=True))


@triton.jit
def spread(
    indices, counts, ranks, ends, bases, places, tokens, tile_expert, tile_row,
    pairs, PER: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The place of each pair among the sorted rows, the token of each row, and each tile's expert and first row."""
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = p < pairs
    expert = tl.load(indices + p, mask=inside, other=0)
    nth = tl.load(ranks + p, mask=inside, other=0)
    place = tl.load(ends + expert, mask=inside, other=0) - tl.load(counts + expert, mask=inside, other=0) + nth
    tl.store(places + p, place, mask=inside)
    tl.store(tokens + place, p // PER, mask=inside)
    first = inside & (nth % N == 0)
    tile = tl.load(bases + expert, mask=first, other=0) + nth // N
    tl.store(tile_expert + tile, expert, mask=first)
    tl.store(tile_row + tile, place, mask=first)


@triton.jit
def _tile(tile, tile_expert, tile_row, ends, PAIRS: tl.constexpr):
    """Expert, first row and end of a tile; without a sort every pair is a tile of one row."""
    expert = tl.load(tile_expert + tile).to(tl.int64)
    first = tile if PAIRS else tl.load(tile_row + tile)
    return expert, first, first + 1 if PAIRS else tl.load(ends + expert)


@triton.jit
def _rows(first, end, tokens, PER: tl.constexpr, PAIRS: tl.constexpr, GATHER: tl.constexpr, N: tl.constexpr):
    """Rows [N] from `first`, which of them are before `end`, and the row of x that each is made of: its token's, or itself."""
    rows = (first + tl.arange(0, N)).to(tl.int64)
    valid = rows < end
    source = rows
    if GATHER:
        source = rows // PER if PAIRS else tl.load(tokens + rows, mask=valid, other=0).to(tl.int64)
    return rows, valid, source


@triton.jit
def _store(
    acc, rows, valid, out, pre, block, output, beta, linear, ACT: tl.constexpr, OUT: tl.constexpr, FUSED: tl.constexpr,
    KEEP: tl.constexpr, GPU: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write a tile [M, N]: its outputs, or where FUSED the activation of its M / 2 gates and ups, and those if KEEP."""
    HALF: tl.constexpr = M // 2
    if FUSED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, HALF, N)), (1, 2, 0)))
        at = (block * HALF + tl.arange(0, HALF))[:, None]
        if KEEP:
            kept = pre + rows[None, :] * OUT + at
            tl.store(kept, gate.to(tl.bfloat16), mask=valid[None, :])
            tl.store(kept + OUT // 2, up.to(tl.bfloat16), mask=valid[None, :])
        y = gated(gate, beta, ACT, GPU) * bounded(up, linear, ACT, GPU)
        tl.store(out + rows[None, :] * (OUT // 2) + at, y.to(tl.bfloat16), mask=valid[None, :])
    else:
        tl.store(out + rows[None, :] * OUT + output[:, None], acc.to(tl.bfloat16), mask=valid[None, :])


@triton.jit
def product(
    x, matrix, scales, selectors, out, pre, tokens, tile_expert, tile_row, ends, bases,
    beta, linear, ACT: tl.constexpr, PER: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr, OUT: tl.constexpr,
    PACKED: tl.constexpr, FUSED: tl.constexpr, KEEP: tl.constexpr, PAIRS: tl.constexpr, GPU: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, MORE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows x [., K] times the matrix [OUT, K] of their expert: [., OUT], or [., OUT / 2] behind the activation where FUSED.

    The matrix is the left operand: decoded codes go from registers to the tensor cores. Tiles are M outputs of N + MORE rows,
    two products of each piece of the matrix where MORE is not 0, since a size is a power of 2.
    FUSED rows are gathered by token, and a tile holds M / 2 gates and their ups; KEEP stores those too, in `pre`.
    """
    BLOCKS: tl.constexpr = OUT // M
    tile = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    if not PAIRS:  # noqa: SIM102 (compiled away)
        if tile >= tl.load(bases + EXPERTS):
            return
    expert, first, end = _tile(tile, tile_expert, tile_row, ends, PAIRS)
    rows, valid, source = _rows(first, end, tokens, PER, PAIRS, FUSED, N)
    m = tl.arange(0, M)
    HALF: tl.constexpr = M // 2
    if FUSED:
        place = block * HALF + m % HALF
        output = (m // HALF) * (OUT // 2) + (_channel(place) if PACKED else place)
    else:
        output = block * M + m
    line = expert * OUT + output
    STEP: tl.constexpr = 128 if PACKED else 64
    k = tl.arange(0, STEP)
    right = x + source[None, :] * K + k[:, None]
    acc = tl.zeros((M, N), tl.float32)
    if MORE:
        other_rows, other_valid, other_source = _rows(first + N, end, tokens, PER, PAIRS, FUSED, MORE)
        other_right = x + other_source[None, :] * K + k[:, None]
        other = tl.zeros((M, MORE), tl.float32)
    if PACKED:
        word = tl.arange(0, 32)
        byte = tl.load(selectors + word)  # a range would keep Triton from decoding in the registers of the product
        left = matrix + line[:, None] * (K // 4) + word[None, :]
        groups = scales + line * (K // 128)
    else:
        left = matrix + line[:, None] * K + k[None, :]
    for i in tl.range(0, K // STEP, num_stages=STAGES):
        w = _decoded(tl.load(left + i * 32), tl.load(groups + i), byte, M, GPU) if PACKED else tl.load(left + i * STEP)
        acc = _dot(w, tl.load(right + i * STEP, mask=valid[None, :], other=0.0), acc, GPU)
        if MORE:
            other = _dot(w, tl.load(other_right + i * STEP, mask=other_valid[None, :], other=0.0), other, GPU)
    scale: tl.constexpr = 2.0**64 if PACKED else 1.0
    _store(acc * scale, rows, valid, out, pre, block, output, beta, linear, ACT, OUT, FUSED, KEEP, GPU, M, N)
    if MORE:
        _store(
            other * scale, other_rows, other_valid, out, pre, block, output, beta, linear, ACT, OUT, FUSED, KEEP, GPU, M, MORE
        )


@triton.jit
def product_back(
    x, matrix, scales, selectors, out, tokens, tile_expert, tile_row, ends, bases,
    PER: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr, OUT: tl.constexpr, GATHER: tl.constexpr, HALVES: tl.constexpr,
    GPU: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows x [., K] times the packed matrix [K, OUT] of their expert: [., OUT] in quarters.

    HALVES: x holds gates in quarters, then ups in quarters, as `product` keeps them. A program makes N rows of 128 channels.
    """
    BLOCKS: tl.constexpr = OUT // 128
    tile = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    if tile >= tl.load(bases + EXPERTS):
        return
    expert, first, end = _tile(tile, tile_expert, tile_row, ends, False)
    rows, valid, source = _rows(first, end, tokens, PER, False, GATHER, N)
    k = tl.arange(0, 64)
    word = block * 32 + tl.arange(0, 32)
    byte = tl.load(selectors + tl.arange(0, 32))
    acc = tl.zeros((N, 128), tl.float32)
    for i in tl.range(0, K // 64, num_stages=STAGES):
        place = i * 64 + k
        line = expert * K + (place // (K // 2) * (K // 2) + _channel(place % (K // 2)) if HALVES else place)
        codes = tl.load(matrix + line[:, None] * (OUT // 4) + word[None, :])
        w = _decoded(codes, tl.load(scales + line * BLOCKS + block), byte, 64, GPU)
        acc = _dot(tl.load(x + source[:, None] * K + place[None, :], mask=valid[:, None], other=0.0), w, acc, GPU)
    at = out + rows[:, None] * OUT + (block * 128 + tl.arange(0, 128))[None, :]
    tl.store(at, (acc * 2.0**64).to(tl.bfloat16), mask=valid[:, None])


@triton.jit
def activate_back(
    back, pre, weights, places, grads, grad_weights, beta, linear, ACT: tl.constexpr,
    INTER: tl.constexpr, GPU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One pair: gradient `grads` of its gates and ups `pre`, from `back`, that of the activation before the weight.

    The gradient of its weight is the product of the activation and `back`.
    """
    pair = tl.program_id(0)
    row = tl.load(places + pair).to(tl.int64)
    weight = tl.load(weights + pair).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, INTER, BLOCK):
        c = i + tl.arange(0, BLOCK)
        inside = c < INTER
        at = pre + row * (2 * INTER) + c
        gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(at + INTER, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(back + row * INTER + c, mask=inside, other=0.0).to(tl.float32)
        slope = sigmoid(gate, GPU)
        a, b = gated(gate, beta, ACT, GPU), bounded(up, linear, ACT, GPU)
        total += d * a * b
        if ACT == "silu":
            slope *= 1.0 + gate * (1.0 - slope)
        else:
            t = tanh(gate * (1.0 / beta), GPU)
            slope *= (1.0 - t * t) + beta * t * (1.0 - slope)
        if ACT == "situ":
            u = b / linear
            bend = 1.0 - u * u
        else:
            bend = tl.full((BLOCK,), 1.0, tl.float32)
        to = grads + row * (2 * INTER) + c
        tl.store(to, (weight * d * b * slope).to(tl.bfloat16), mask=inside)
        tl.store(to + INTER, (weight * d * a * bend).to(tl.bfloat16), mask=inside)
    tl.store(grad_weights + pair, tl.sum(total))


@triton.jit
def combine(
    rows, places, weights, out, PER: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
    WEIGH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum over a token's pairs of its rows [., WIDTH], each times the pair's weight where WEIGH, in fp32."""
    token = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(PER):
        pair = token * PER + j
        row = (pair if PAIRS else tl.load(places + pair)).to(tl.int64)
        y = tl.load(rows + row * WIDTH + c, mask=c < WIDTH, other=0.0).to(tl.float32)
        total += y * tl.load(weights + pair).to(tl.float32) if WEIGH else y
    tl.store(out + token.to(tl.int64) * WIDTH + c, total, mask=c < WIDTH)
