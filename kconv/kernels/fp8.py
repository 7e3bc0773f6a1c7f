"""FP8 in four codes, with scales of every layout of `geometry`: decode, its inverse, and quantisation.

| scale dtype | factor |
|---|---|
| F32, BF16, F16 | the number, in fp32 |
| F8_E8M0 | 2^(byte-127); 255 is NaN and refused |
| U8 | the same, in a block layout only: elsewhere a byte could mean anything, and is refused |

MXFP8 is F8_E4M3 in blocks of 1 x 32 with E8M0 scales. The rule of the product is that of `scaled`; libraries that first
round an F32 scale to bf16 (Transformers' backward pass of FP8 linear layers does) differ in the last bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kconv.errors import BadData, KconvError
from kconv.kernels import e2m1, geometry, scaled
from kconv.kernels.codes import CODES, Code
from kconv.kernels.common import chunk_rows, first, lend, refuse_not_finite, unravel
from kconv.kernels.scaled import Scales
from kconv.spec import SAFETENSORS_NAMES, torch_dtype

NAMES = ("F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ")
Block = tuple[int, int]


def decode(
    codes: Tensor,
    scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    *,
    block: Block | None = None,
    code: str | None = None,
    finite: bool = True,
    reversible: bool = False,
) -> Tensor:
    """Values [..., O, I] of codes [..., O, I] and their scales, written to `out` if lent.

    `code` names the format of codes stored as U8, or overrules the dtype. `finite=False` lets codes that are NaN or
    infinite through; `reversible` also refuses what `encode_with_scale` could not turn back into the same codes.
    Raises `BadData` with the position, `KconvError` for a scale shape or dtype that is not understood.
    """
    form = code_of(codes, code)
    values = lend(out, tuple(codes.shape), dtype, codes.device)
    scales = scales_of(tuple(codes.shape), scale, block)
    matrices = _stacked(codes.view(torch.uint8)), _stacked(values)
    scaled.decode(matrices[0], scales, form, matrices[1], finite=finite, reversible=reversible)
    return values


def encode_with_scale(
    values: Tensor,
    scale: Tensor,
    code: str = "F8_E4M3",
    out: Tensor | None = None,
    *,
    block: Block | None = None,
) -> Tensor:
    """Codes such that `decode(codes, scale)` has the very bits of values [..., O, I]; `BadData` where there are none."""
    codes = lend(out, tuple(values.shape), torch_dtype(code), values.device)
    target = codes if codes.is_contiguous() else torch.empty_like(codes, memory_format=torch.contiguous_format)
    scales = scales_of(tuple(values.shape), scale, block)
    scaled.encode(_stacked(values), scales, CODES[code], _stacked(target.view(torch.uint8)))
    return codes if target is codes else codes.copy_(target)


def quantize(
    values: Tensor, code: str = "F8_E4M3", *, layout: str = "block", block: Block | None = None, scale_dtype: str = "F32"
) -> tuple[Tensor, Tensor]:
    """Codes and scales nearest to values [..., O, I]; without loss where a power of two as scale allows it.

    Otherwise the scale is max |value| / the code's largest, rounded to its dtype; an all-zero tile has scale 1. Raises
    `BadData` for NaN and infinity, and for a scale that its dtype cannot hold.
    """
    shape = geometry.scale_shape(layout, tuple(values.shape), block)
    grid = geometry.grid(layout, tuple(values.shape), block)
    refuse_not_finite(values)
    codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    bands = []
    height = grid.height * (chunk_rows(values.shape[-1] * grid.height, values.device) * 8)
    for n, (matrix, target) in enumerate(zip(_stacked(values), _stacked(codes), strict=True)):
        for i in range(0, matrix.shape[0], height):
            factor, band = _quantize(matrix[i : i + height].float(), grid, CODES[code], scale_dtype)
            if not bool((factor.isfinite() & (factor != 0)).all()):
                tile = first(~factor.isfinite() | (factor == 0))
                at = (*unravel(n, tuple(values.shape[:-2])), i + tile[0] * grid.height, tile[1] * grid.width)
                raise BadData(f"the scale of a tile is beyond {scale_dtype}", operand=0, position=at, hint="choose F32 scales")
            target[i : i + height].copy_(band)
            bands.append(factor)
    factors_ = torch.cat(bands) if bands else values.new_empty(0)
    return codes.view(torch_dtype(code)), _stored(factors_, scale_dtype).view(shape)


def _quantize(band: Tensor, grid: geometry.Grid, form: Code, scale_dtype: str) -> tuple[Tensor, Tensor]:
    """Factors [rows, columns] and codes of whole tiles [R, I]."""
    top = _tile_max(band, grid)
    power = torch.where(top > 0, torch.exp2(torch.frexp(top / form.largest).exponent.float()), 1.0)
    power = torch.where(top == power / 2 * form.largest, power / 2, power)
    factor = power
    if scale_dtype not in ("U8", "F8_E8M0"):
        lost = _nearest(band, power, grid, form).float() * _spread(power, band, grid) != band
        kept = (_tile_max(lost.float(), grid) == 0) | (top == 0)
        factor = torch.where(kept, power, top / form.largest).to(torch_dtype(scale_dtype)).float()
    return factor, _nearest(band, factor, grid, form).view(torch.uint8)


def code_of(codes: Tensor, name: str | None) -> Code:
    """The format of a tensor of codes, by its dtype or by name; raises `KconvError` for one that is unknown."""
    known = name or SAFETENSORS_NAMES.get(str(codes.dtype).removeprefix("torch."), str(codes.dtype))
    if known not in NAMES or codes.element_size() != 1:
        raise KconvError(f"no FP8 format is called {known}", hint=f"there are {', '.join(NAMES)}")
    return CODES[known]


def scales_of(weight: geometry.Shape, scale: Tensor, block: Block | None) -> Scales:
    """The scales of a weight shape in fp32 on their grid; raises for a shape or dtype that is not understood."""
    layout = geometry.layout_of(weight, tuple(scale.shape), block)
    if block and tuple(scale.shape) == geometry.scale_shape("block", weight, block):
        layout = "block"  # one block a row looks like a scale a channel, and is the same numbers; bytes must be in blocks
    if scale.dtype == torch.uint8 and not layout.startswith("block"):
        raise KconvError(
            f"a U8 scale {list(scale.shape)} of a weight {list(weight)} is no block scale: its bytes could mean anything",
            hint="E8M0 exponents are stored as F8_E8M0, or as U8 in the block layout that the config names",
        )
    grid = geometry.grid(layout, weight, block)
    factor = factors(scale).reshape(math.prod(weight[:-2]), grid.rows, grid.columns)
    return Scales(factor, grid, tuple(scale.shape), weight)


def factors(scale: Tensor, operand: int = 1) -> Tensor:
    """Scales in fp32: numbers as they are, E8M0 bytes as powers of two; raises `BadData` for byte 255."""
    if scale.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return scale.float()
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise KconvError(f"scales of dtype {scale.dtype} are not understood", hint="F32, BF16, F16, F8_E8M0 and U8 are")
    byte = scale.view(torch.uint8)
    if byte.numel() and int(byte.max()) == e2m1.NAN_SCALE:
        raise BadData(
            "scale byte 255 is NaN", operand=operand, position=first(byte == e2m1.NAN_SCALE),
            hint="the checkpoint is damaged here: fetch the file again, or ask its publisher",
        )  # fmt: skip
    return e2m1.e8m0().float().to(scale.device)[byte.long()]


def _stored(factor: Tensor, scale_dtype: str) -> Tensor:
    if scale_dtype not in ("U8", "F8_E8M0"):
        return factor.to(torch_dtype(scale_dtype))
    byte = torch.frexp(factor).exponent - 1 + e2m1.NEUTRAL_SCALE
    return byte.clamp(0, 254).to(torch.uint8).view(torch_dtype(scale_dtype))


def _stacked(tensor: Tensor) -> Tensor:
    return tensor.reshape(math.prod(tensor.shape[:-2]), *tensor.shape[-2:])  # a view wherever there can be one


def _tile_max(band: Tensor, grid: geometry.Grid) -> Tensor:
    """Largest magnitude of every tile of [R, I], [rows, columns]."""
    down, across = -band.shape[0] % grid.height, grid.columns * grid.width - band.shape[1]
    padded = torch.nn.functional.pad(band.abs(), (0, across, 0, down))
    return padded.view(-1, grid.height, grid.columns, grid.width).amax((1, 3))


def _spread(factor: Tensor, band: Tensor, grid: geometry.Grid) -> Tensor:
    """Factors [rows, columns] repeated over their tiles, [R, I]."""
    tall = factor.repeat_interleave(grid.height, 0)[: band.shape[0]]
    return tall.repeat_interleave(grid.width, 1)[:, : band.shape[1]]


def _nearest(band: Tensor, factor: Tensor, grid: geometry.Grid, code: Code) -> Tensor:
    """Codes nearest to value / factor, saturating."""
    quotient = (band / _spread(factor, band, grid)).clamp(-code.largest, code.largest)
    return quotient.to(torch_dtype(code.name))
