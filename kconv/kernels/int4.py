"""INT4 pack-quantized (compressed-tensors): I32 words of eight codes, code i at bits 4i, value = (code - 8 - zero) * scale.

| tensor | dtype and shape | |
|---|---|---|
| packed | I32 [O, ceil(I/8)] | surplus nibbles of the last word are 0 |
| scale | BF16, F16 or F32 [O, I/group] | [O, 1] for one group a row |
| zero point | I32 [ceil(O/8), I/group], packed along the rows | asymmetric only |
| shape | I64 or I32 [2] | O and I |
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from kconv.errors import BadData, KconvError
from kconv.kernels import scaled
from kconv.kernels.codes import CODES, Code
from kconv.kernels.common import bits, first, lend, refuse_not_finite
from kconv.kernels.geometry import Grid
from kconv.kernels.scaled import Scales

INT4: Code = CODES["INT4"]


def decode(
    packed: Tensor,
    scale: Tensor,
    columns: int,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    *,
    zero: Tensor | None = None,
    reversible: bool = False,
) -> Tensor:
    """Values [O, columns]; with `reversible` surplus nibbles must be 0. Raises `BadData` with the position."""
    rows = packed.shape[0]
    if packed.dtype != torch.int32 or packed.dim() != 2 or packed.shape[1] != -(-columns // 8):
        raise KconvError(f"packed {packed.dtype} {list(packed.shape)} is not I32 [O, {-(-columns // 8)}] for {columns} columns")
    result = lend(out, (rows, columns), dtype, packed.device)
    codes = packed.contiguous().view(torch.uint8)
    if reversible and columns % 8:
        _refuse_surplus(codes, columns)
    scales = scales_of((rows, columns), scale, zero)
    scaled.decode(codes.unsqueeze(0), scales, INT4, result.unsqueeze(0), reversible=reversible)
    return result


def encode_with_scale(tensor: Tensor, scale: Tensor, out: Tensor | None = None, *, zero: Tensor | None = None) -> Tensor:
    """Packed I32 words such that decoding has the very bits of values [O, I]; `BadData` where there are none."""
    rows, columns = tensor.shape
    packed = lend(out, (rows, -(-columns // 8)), torch.int32, tensor.device)
    target = packed if packed.is_contiguous() else torch.empty_like(packed, memory_format=torch.contiguous_format)
    scales = scales_of((rows, columns), scale, zero)
    scaled.encode(tensor.unsqueeze(0), scales, INT4, target.view(torch.uint8).unsqueeze(0))
    return packed if target is packed else packed.copy_(target)


def quantize(tensor: Tensor, group: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Packed words and scales nearest to values [O, I]; without loss where a scale near max |value| / k allows it.

    k is tried from 7 down to 1, then 8, each with the two neighbours of the quotient in `scale_dtype`. Otherwise the
    scale is max |value| / 7. Raises `BadData` for NaN and infinity.
    """
    refuse_not_finite(tensor)
    rows, columns = tensor.shape
    grouped = tensor.float().reshape(rows, -1, group or columns)
    top = grouped.abs().amax(-1)
    scale = torch.where(top > 0, top / 7, 1.0).to(scale_dtype)
    lossless = torch.zeros_like(top, dtype=torch.bool)
    for k, step in itertools.product((7, 6, 5, 4, 3, 2, 1, 8), (0, 1, -1)):
        trial = torch.where(top > 0, top / k, 1.0).to(scale_dtype)
        trial = (bits(trial) + step).view(scale_dtype)
        number = (grouped / trial.float().unsqueeze(-1)).round().clamp(-8, 7)
        fits = ((number * trial.float().unsqueeze(-1)).to(tensor.dtype) == grouped.to(tensor.dtype)).all(-1)
        scale = torch.where(fits & ~lossless, trial, scale)
        lossless |= fits
    number = (grouped / scale.float().unsqueeze(-1)).round().clamp(-8, 7)
    codes = (number + 8).to(torch.uint8).view(rows, columns)
    return scaled.pack(codes, INT4, 4 * -(-columns // 8)).contiguous().view(torch.int32), scale


def scales_of(weight: tuple[int, int], scale: Tensor, zero: Tensor | None) -> Scales:
    """Scales of a weight on their grid, one group a row or several; raises `KconvError` for shapes that do not fit."""
    rows, columns = weight
    groups = scale.shape[-1] if scale.dim() == 2 else 0
    if scale.dim() != 2 or scale.shape[0] != rows or not groups or columns % groups:
        raise KconvError(f"scale {list(scale.shape)} does not divide a weight {list(weight)} into groups")
    grid = Grid(rows, groups, 1, columns // groups)
    offset = None if zero is None else unpack_zero(zero, rows, groups).float().unsqueeze(0)
    return Scales(scale.unsqueeze(0), grid, tuple(scale.shape), weight, offset)


def unpack_zero(zero: Tensor, rows: int, groups: int) -> Tensor:
    """Zero points -8..7 of every row and group, int8 [rows, groups], from I32 [ceil(rows/8), groups]."""
    if zero.dtype != torch.int32 or tuple(zero.shape) != (-(-rows // 8), groups):
        raise KconvError(f"zero points {zero.dtype} {list(zero.shape)} are not I32 {[-(-rows // 8), groups]}")
    byte = zero.t().clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return (scaled.unpack(byte, INT4, rows).to(torch.int8) - 8).t().contiguous()


def _refuse_surplus(codes: Tensor, columns: int) -> None:
    nibbles = scaled.unpack(codes, INT4, 2 * codes.shape[1])[:, columns:]
    if bool(nibbles.any()):
        row = first(nibbles)[0]
        raise BadData(
            f"nibbles after column {columns} are not 0", operand=0, position=(row, codes.shape[1] // 4 - 1),
            hint="they would be lost: convert without sidecar, or keep the tensor as stored",
        )  # fmt: skip
