"""MXFP4: E2M1 codes, two in a byte (low nibble = even column), one E8M0 scale byte per group of 32 along the last axis.

| function | result | refused, with the position |
|---|---|---|
| `decode` | code * 2^(scale-127), exact | scale byte 255 (NaN); a product that the dtype cannot hold |
| `encode_with_scale` | the codes, given the scales: the inverse of `decode`, also of -0 | a value without a code |
| `encode` | codes and scales, canonical, equal in value | a group that no scale fits |
| `quantize` | codes and scales nearest to the values | NaN and infinity |

bf16 holds all products of scale bytes 0 to 252 (0.5 * 2^-127 is a bf16 subnormal), fp16 those of 104 to 140.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kconv.errors import BadData, KconvError
from kconv.kernels import backend, e2m1
from kconv.kernels.common import CHUNK, bits, chunk_rows, first, lend, refuse_not_finite, same_bits, unravel, viewable

GROUP = 32
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def decode(
    packed: Tensor,
    scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    *,
    check: bool = True,
) -> Tensor:
    """Values [..., C] of packed U8 [..., C/2] and scale U8 or F8_E8M0 [..., C/group], written to `out` if lent.

    Raises `BadData` (operand 1) for a NaN scale and for a product that `dtype` cannot hold. `check=False` skips that
    for data already checked: on CUDA the check waits for the device.
    """
    scale = scale.view(torch.uint8)
    group = group_of(packed, scale)
    if dtype not in DTYPES:
        raise KconvError(f"MXFP4 decodes to bf16, fp16, fp32 or fp64, not {dtype}")
    values = lend(out, (*packed.shape[:-1], packed.shape[-1] * 2), dtype, packed.device)
    if not values.numel():
        return values
    refuse = partial(check_scales, packed, scale, dtype) if check else None
    target = values if viewable(values, 2 * dtype.itemsize) else torch.empty_like(values, memory_format=_DENSE)
    flat = target.view(-1, group)
    codes, scales = packed.reshape(-1, group // 2), scale.reshape(-1)
    compiled = backend.compiled("mxfp4", packed.device.type)
    if compiled is None or not compiled.decode(codes, scales, flat, refuse):
        if refuse:
            refuse()
        _decode(codes, scales, flat)
    return values if target is values else values.copy_(target)


def encode_with_scale(values: Tensor, scale: Tensor, out: Tensor | None = None) -> Tensor:
    """Packed U8 [..., C/2] such that `decode(packed, scale)` has the very bits of values [..., C].

    Raises `BadData` for a NaN scale (operand 1) and at the first value that has no code at its scale (operand 0).
    """
    values, scale = values.detach(), scale.view(torch.uint8)
    _refuse_nan(scale, 1)
    packed = lend(out, (*values.shape[:-1], values.shape[-1] // 2), torch.uint8, values.device)
    group = group_of(packed, scale)
    if not values.numel():
        return packed
    target = packed if packed.is_contiguous() else torch.empty_like(packed, memory_format=_DENSE)
    groups, flat, scales = values.reshape(-1, group), target.view(-1, group // 2), scale.reshape(-1)
    compiled = backend.compiled("mxfp4", values.device.type)
    run = _encode if compiled is None else compiled.encode
    # What is not bf16 passes through it, in pieces that stay in the cache.
    step = groups.shape[0] if groups.dtype == torch.bfloat16 else 4 * chunk_rows(group, groups.device)
    for i in range(0, groups.shape[0], step):
        narrow, exponents = _as_bf16(groups[i : i + step], scales[i : i + step])
        if narrow is None or not run(narrow, exponents, flat[i : i + step]):
            _raise_no_code(groups, scales, values.shape, i)
    return packed if target is packed else packed.copy_(target)


def encode(values: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """Packed codes and scales equal in value to values [..., C], in one canonical form.

    The largest value of a group is 4 or 6 times its scale, an all-zero group has scale 127, -0 stays -0. Exact whenever
    any choice of scales is; raises `BadData` (operand 0) at the first value lost.
    """
    packed, scale = quantize(values, group)
    try:
        again = decode(packed, scale, values.dtype)
    except BadData as e:
        raise BadData(f"no MXFP4 scale fits this group in {values.dtype}", operand=0, position=_column(e, group)) from e
    if not same_bits(again, values.contiguous()):
        at = first(bits(again) != bits(values.contiguous()))
        raise BadData(
            f"{float(values[at]):g} has no MXFP4 code at the scale of its group",
            operand=0, position=at, hint="quantise instead (lossy), or keep the scales in a sidecar",
        )  # fmt: skip
    return packed, scale


def quantize(values: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """Packed codes and scales nearest to values [..., C]: scale 2^(floor(log2(max))-2), codes to nearest, ties to even.

    The rule of the OCP MX specification, section 6.3; beyond 6 the code saturates. Raises `BadData` for NaN and inf.
    """
    if values.shape[-1] % group:
        raise KconvError(f"{list(values.shape)} does not divide into groups of {group}")
    refuse_not_finite(values)
    packed = torch.empty((*values.shape[:-1], values.shape[-1] // 2), dtype=torch.uint8, device=values.device)
    scale = torch.empty((*values.shape[:-1], values.shape[-1] // group), dtype=torch.uint8, device=values.device)
    rows = chunk_rows(group, values.device)
    pieces = (t.split(rows) for t in (values.reshape(-1, group), packed.view(-1, group // 2), scale.view(-1)))
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    space = torch.empty((3, rows, group), dtype=wide, device=values.device)
    for chunk, codes, exponents in zip(*pieces, strict=True):
        _quantize(chunk, codes, exponents, space[:, : chunk.shape[0]])
    return packed, scale


def _quantize(values: Tensor, packed: Tensor, scale: Tensor, space: Tensor) -> None:
    """One chunk; `space` holds three numbers for every value, so that no chunk asks for memory."""
    size = space[0].copy_(values)
    sign = torch.signbit(size).to(torch.uint8)
    top = size.abs_().amax(1)
    byte = torch.where(top > 0, torch.frexp(top).exponent + 124, e2m1.NEUTRAL_SCALE).clamp(0, 254)
    scale.copy_(byte)
    size *= e2m1.e8m0().to(size)[254 - byte.long()].unsqueeze(1)
    # The code as a function of its value is concave and linear between 0, 2, 4 and 6: the least of the three lines.
    code = torch.add(size, 2, out=space[1])
    torch.minimum(torch.mul(size, 2, out=space[2]), code, out=code)
    torch.minimum(size.mul_(0.5).add_(4), code, out=code)
    pairs = code.clamp_(max=7).round_().to(torch.uint8).bitwise_or_(sign << 3).view(torch.int16)
    packed.view(-1).copy_((pairs | pairs >> 4).view(-1))


def nearest_code(magnitude: Tensor) -> Tensor:
    """The E2M1 code (uint8, 0..7) nearest to a non-negative magnitude, ties to even, saturating at 6."""
    step = torch.minimum(torch.minimum(magnitude * 2, magnitude + 2), magnitude * 0.5 + 4)
    return step.clamp_(max=7).round_().to(torch.uint8)


def group_of(packed: Tensor, scale: Tensor) -> int:
    """Values that share a scale, from the shapes; raises `KconvError` when they disagree."""
    width, groups = packed.shape[-1] * 2, scale.shape[-1]
    if packed.dtype != torch.uint8 or packed.shape[:-1] != scale.shape[:-1] or (width % max(groups, 1)):
        raise KconvError(
            f"packed {packed.dtype} {list(packed.shape)} and scale {list(scale.shape)} do not belong together: "
            f"MXFP4 wants U8 [..., C/2] and [..., C/{GROUP}]"
        )
    group = width // groups if groups else GROUP
    if group % 2:
        raise KconvError(f"a group of {group} MXFP4 codes splits a byte")
    return group


def check_scales(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    """Raises `BadData` (operand 1) unless `dtype` holds every product; looks at codes only where a scale is unusual."""
    if not scale.numel():
        return
    low, high = e2m1.safe_scales(dtype)
    lowest, highest = (int(x) for x in torch.aminmax(scale))
    if low <= lowest and highest <= high:
        return
    _refuse_nan(scale, 1)
    odd = ((scale < low) | (scale > high)).nonzero()
    codes = packed.reshape(*scale.shape, -1)
    holds = e2m1.holds(dtype).to(scale.device)
    for at in odd.split(CHUNK):
        where = tuple(at.unbind(1))
        columns = e2m1.unpacked().to(scale.device)[codes[where].long()].flatten(1)
        bad = ~holds[scale[where].long().unsqueeze(1), columns]
        if bool(bad.any()):
            row, column = first(bad)
            _raise_not_held(scale, tuple(at[row].tolist()), int(columns[row, column]), column, dtype)


_DENSE = torch.contiguous_format


def _refuse_nan(scale: Tensor, operand: int) -> None:
    if scale.numel() and int(scale.max()) == e2m1.NAN_SCALE:
        raise BadData(
            "scale byte 255 is NaN", operand=operand, position=first(scale == e2m1.NAN_SCALE),
            hint="the checkpoint is damaged here: fetch the file again, or ask its publisher",
        )  # fmt: skip


def _raise_not_held(scale: Tensor, at: tuple[int, ...], code: int, column: int, dtype: torch.dtype) -> None:
    byte = int(scale[at])
    raise BadData(
        f"scale byte {byte} (2^{byte - 127}) times {e2m1.E2M1[code]:g} (code {code}, column {column} of the group) "
        f"is not representable in {str(dtype).removeprefix('torch.')}",
        operand=1, position=at, hint="keep the tensor packed, or choose a wider dtype",
    )  # fmt: skip


def _decode(packed: Tensor, scale: Tensor, out: Tensor) -> None:
    """Plain torch: one look-up of two values by (scale, byte)."""
    table = e2m1.pair_table(out.dtype, out.device)
    pairs = out.view(table.dtype)
    rows = chunk_rows(packed.shape[1], packed.device)
    rows_of_scale = scale.to(torch.int32) << 8
    scratch = torch.empty((rows, packed.shape[1]), dtype=torch.int32, device=out.device)
    for i in range(0, packed.shape[0], rows):
        index = scratch[: min(rows, packed.shape[0] - i)]
        index.copy_(packed[i : i + rows])
        index |= rows_of_scale[i : i + rows, None]
        torch.index_select(table, 0, index.view(-1), out=pairs[i : i + rows].view(-1))


def _encode(values: Tensor, scale: Tensor, out: Tensor) -> bool:
    """Plain torch: one look-up of a code by (scale, top bits of the bf16); false when a value has no code."""
    table = e2m1.code_table(values.device)
    rows = chunk_rows(values.shape[1], values.device)
    rows_of_scale = scale.to(torch.int32) << 11
    index_space = torch.empty((rows, values.shape[1]), dtype=torch.int32, device=values.device)
    code_space = torch.empty(rows * values.shape[1], dtype=torch.uint8, device=values.device)
    for i in range(0, values.shape[0], rows):
        chunk = values[i : i + rows]
        index = index_space[: chunk.shape[0]]
        index.copy_(chunk.view(torch.uint16)).bitwise_right_shift_(5).bitwise_or_(rows_of_scale[i : i + rows, None])
        codes = torch.index_select(table, 0, index.view(-1), out=code_space[: chunk.numel()])
        low_bits = torch.bitwise_and(chunk.view(torch.int32), 0x001F001F, out=index.view(2, -1)[0].view(chunk.shape[0], -1))
        if int(codes.max()) > 15 or int(low_bits.max()) > 0:
            return False
        pairs = codes.view(torch.int16)
        out[i : i + rows].view(-1).copy_(pairs | pairs >> 4)
    return True


def _as_bf16(values: Tensor, scale: Tensor) -> tuple[Tensor | None, Tensor]:
    """Values [G, g] in bf16, which holds every product (None if it does not hold one), and the scales that go with them.

    fp64 at the two top scales is brought into the range of bf16 first.
    """
    if values.dtype == torch.bfloat16:
        return values if viewable(values, 4) else values.clone(), scale
    if values.dtype == torch.float64 and bool((scale > 252).any()):
        high = scale > 252
        values = torch.where(high.unsqueeze(-1), values * 2.0**-8, values)
        scale = torch.where(high, scale - 8, scale)
    narrow = values.to(torch.bfloat16)
    return narrow if same_bits(narrow.to(values.dtype), values.contiguous()) else None, scale


def _raise_no_code(groups: Tensor, scales: Tensor, shape: torch.Size, start: int) -> None:
    """Finds the first value without a code, by definition, from group `start` on."""
    step = chunk_rows(16 * groups.shape[1], groups.device)
    for i in range(start, groups.shape[0], step):
        byte = scales[i : i + step].long()
        known = e2m1.products().to(scales.device)[byte].unsqueeze(1)
        wrong = ~(groups[i : i + step].double().unsqueeze(-1) == known).any(-1)
        if bool(wrong.any()):
            row, column = first(wrong)
            at = unravel((i + row) * groups.shape[1] + column, tuple(shape))
            raise _no_code(float(groups[i + row, column]), int(byte[row]), at)


def _no_code(value: float, byte: int, at: tuple[int, ...]) -> BadData:
    return BadData(
        f"{value:g} has no MXFP4 code at scale byte {byte} (2^{byte - 127})", operand=0, position=at,
        hint="the weights were changed after decoding: re-encode them (lossy) instead of using the kept scales",
    )  # fmt: skip


def _column(error: BadData, group: int) -> tuple[int, ...]:
    return (*error.position[:-1], error.position[-1] * group)
