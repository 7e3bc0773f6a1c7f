"""NVFP4: E2M1 codes, two in a byte, a scale F8_E4M3 per 16 along the last axis, and one fp32 scale for the tensor.

| naming | tensors | factor of a group |
|---|---|---|
| compressed-tensors (`divides`) | `weight_packed`, `weight_scale`, `weight_global_scale` [1] | fp32(scale) / global |
| ModelOpt (`multiplies`) | `weight`, `weight_scale`, `weight_scale_2` [] | fp32(scale) * global |

The factor is rounded to fp32, then multiplied with the code and rounded as in `scaled`. Without loss from MXFP4 when the
exponents of a tensor's groups span at most 17: then all factors are powers of two that F8_E4M3 holds.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kconv.errors import BadData, KconvError
from kconv.kernels import scaled
from kconv.kernels.codes import CODES, Code, values
from kconv.kernels.common import chunk_rows, lend, refuse_not_finite
from kconv.kernels.geometry import Grid
from kconv.kernels.mxfp4 import nearest_code
from kconv.kernels.scaled import Scales

GROUP = 16
_SPAN = 17
"""Powers of two that F8_E4M3 holds: 2^-9 to 2^8."""


def decode(
    packed: Tensor,
    scale: Tensor,
    whole: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    *,
    divides: bool,
    reversible: bool = False,
) -> Tensor:
    """Values [..., I] of packed U8 [..., I/2], scale F8_E4M3 [..., I/16] and `whole` F32 of one element.

    Raises `BadData` with operand and position for a NaN code among the scales, for a `whole` that is 0 or not finite.
    """
    result = lend(out, (*packed.shape[:-1], packed.shape[-1] * 2), dtype, packed.device)
    scales = scales_of(tuple(result.shape), scale, whole, divides)
    scaled.decode(_matrix(packed), scales, E2M1, _matrix(result), reversible=reversible)
    return result


def encode_with_scale(tensor: Tensor, scale: Tensor, whole: Tensor, out: Tensor | None = None, *, divides: bool) -> Tensor:
    """Packed codes such that decoding has the very bits of values [..., I]; `BadData` where there are none."""
    packed = lend(out, (*tensor.shape[:-1], tensor.shape[-1] // 2), torch.uint8, tensor.device)
    target = packed if packed.is_contiguous() else torch.empty_like(packed, memory_format=torch.contiguous_format)
    scaled.encode(_matrix(tensor), scales_of(tuple(tensor.shape), scale, whole, divides), E2M1, _matrix(target))
    return packed if target is packed else packed.copy_(target)


def quantize(tensor: Tensor, *, divides: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Packed codes, scales and the global scale [] nearest to values [..., I]; without loss where powers of two allow it.

    Otherwise: global scale from max |value| / (6 * 448), group scales from max |value| / 6 in F8_E4M3, codes to nearest.
    """
    refuse_not_finite(tensor)
    grouped = tensor.reshape(math.prod(tensor.shape[:-1]) * (tensor.shape[-1] // GROUP), GROUP)
    top = grouped.abs().amax(-1).float()
    packed = torch.empty((*tensor.shape[:-1], tensor.shape[-1] // 2), dtype=torch.uint8, device=tensor.device)
    for make in (_powers_of_two, _by_maximum):
        scale, unit = make(top)
        whole = 1 / unit if divides else unit
        number = scaled.e4m3_numbers(scale)
        factor = number / whole if divides else number * whole
        if _quantize(grouped, factor, packed.view(-1, GROUP // 2)):
            break
    return packed, scale.view(*tensor.shape[:-1], -1), whole


def _quantize(grouped: Tensor, factor: Tensor, packed: Tensor) -> bool:
    """Nearest codes of [G, 16]; whether they lose nothing."""
    lossless, table = True, values(E2M1, grouped.device)
    step = 4 * chunk_rows(GROUP, grouped.device)
    for i in range(0, grouped.shape[0], step):
        chunk, scale = grouped[i : i + step].float(), factor[i : i + step, None]
        quotient = chunk / scale
        code = nearest_code(quotient.abs()) | torch.signbit(quotient).to(torch.uint8) << 3
        packed[i : i + step] = scaled.pack(code, E2M1, GROUP // 2)
        lossless = lossless and torch.equal(table[code.long()] * scale, chunk)
    return lossless


def scales_of(weight: tuple[int, ...], scale: Tensor, whole: Tensor, divides: bool) -> Scales:
    """Factors of all groups on their grid; raises for shapes that do not belong together and values that cannot be."""
    if not weight or weight[-1] % GROUP or tuple(scale.shape) != (*weight[:-1], weight[-1] // GROUP):
        raise KconvError(f"scale {list(scale.shape)} does not belong to NVFP4 values {list(weight)}: one per {GROUP}")
    if scale.dtype != torch.float8_e4m3fn or whole.numel() != 1:
        raise KconvError(f"NVFP4 wants F8_E4M3 scales and one global scale, not {scale.dtype} and {list(whole.shape)}")
    unit = float(whole)
    if not abs(unit) < float("inf") or unit == 0:
        raise BadData(f"the global scale is {unit:g}", operand=2, position=(0,) * whole.dim())
    grid = Grid(math.prod(weight[:-1]), scale.shape[-1], 1, GROUP)
    stored = scale.reshape(1, grid.rows, grid.columns)
    return Scales(stored, grid, tuple(scale.shape), weight, unit=whole.float().reshape(()), divides=divides)


E2M1: Code = CODES["E2M1"]


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(1, math.prod(tensor.shape[:-1]), tensor.shape[-1])  # a view wherever there can be one


def _powers_of_two(top: Tensor) -> tuple[Tensor, Tensor]:
    """Scales 2^(exponent of the maximum - 2) over the least unit that F8_E4M3 can reach from the largest of them."""
    exponent = torch.where(top > 0, torch.frexp(top).exponent - 3, -1000)
    highest = exponent.max() if bool((top > 0).any()) else exponent.new_tensor(0)
    offset = (exponent - (highest - 8)).clamp(8 - _SPAN, 8)
    unit = torch.ldexp(torch.ones((), device=top.device), highest - 8)
    return torch.ldexp(torch.ones_like(top), offset).to(torch.float8_e4m3fn), unit


def _by_maximum(top: Tensor) -> tuple[Tensor, Tensor]:
    largest = top.max() if top.numel() else top.new_tensor(0.0)
    unit = torch.where(largest > 0, largest / (6.0 * 448.0), 1.0)
    return (top / 6.0 / unit).clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn), unit
