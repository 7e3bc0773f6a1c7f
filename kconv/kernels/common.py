"""What all kernels share: bit views, lent outputs, the first bad position, the work of one chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from kconv.errors import BadData, KconvError

CHUNK = 1 << 18
"""Elements handled at once by the plain torch kernels, few enough that index, table and output stay near a core."""

INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def chunk_rows(width: int, device: torch.device) -> int:
    """Rows of `width` elements that plain torch handles at once; many more where each step is a kernel launch."""
    return max(1, (CHUNK if device.type == "cpu" else CHUNK << 10) // max(width, 1))


def bits(tensor: Tensor) -> Tensor:
    """The same bytes as integers of the same width."""
    return tensor.view(INTS[tensor.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one dtype and shape hold the same bits (NaN equals NaN, -0 differs from 0)."""
    return torch.equal(bits(a), bits(b))


def first(mask: Tensor) -> tuple[int, ...]:
    """Index of the first true element of a mask that has one."""
    return unravel(int(torch.argmax(mask.reshape(-1).to(torch.uint8))), tuple(mask.shape))


def unravel(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index in a tensor of this shape of its element number `flat`."""
    position = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        position.append(at)
    return tuple(reversed(position))


def all_finite(values: Tensor) -> bool:
    """Whether there is no NaN and no infinity, in one pass without a mask."""
    return not values.numel() or all(bool(edge.isfinite()) for edge in torch.aminmax(values))


def refuse_not_finite(values: Tensor) -> None:
    """Raises `BadData` (operand 0) at the first NaN or infinity, which no quantised format here holds."""
    if not all_finite(values):
        at = first(~values.isfinite())
        raise BadData(
            f"{float(values[at])} cannot be quantised", operand=0, position=at,
            hint="the weights are damaged here: check where they come from",
        )  # fmt: skip


def lend(out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Storage for a result: `out` if it was lent and fits (else `KconvError`), a new tensor otherwise."""
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if tuple(out.shape) != tuple(shape) or out.dtype != dtype or out.device != device:
        raise KconvError(
            f"the lent output is {out.dtype} {list(out.shape)} on {out.device}, the result is {dtype} {list(shape)} on {device}"
        )
    return out


def viewable(tensor: Tensor, width: int) -> bool:
    """Whether a contiguous view in elements of `width` bytes exists: no gaps, and the start is on such a boundary."""
    return tensor.is_contiguous() and tensor.data_ptr() % width == 0 and _starts_on(tensor, width)


def _starts_on(tensor: Tensor, width: int) -> bool:
    return tensor.storage_offset() * tensor.element_size() % width == 0
