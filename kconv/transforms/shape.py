"""Transforms that move bytes: nothing is computed, every bit survives.

| transform | left side | right side |
|---|---|---|
| `Fuse(axis, sizes)` | n tensors | one, the n side by side along `axis` |
| `Transpose(axes)` | a tensor | the same with its axes in this order |
| `Reshape(left, right)` | a tensor of shape `left` | the same bytes as shape `right` |
| `TrimZeros(size, padded)` | `padded` entries along `axis`, those after `size` all +0 | the first `size` of them |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kconv.errors import BadData, KconvError
from kconv.spec import Spec
from kconv.transforms import expect
from kconv.transforms.base import Grade, SpecError, Specs, Tiles, Transform, stated

if TYPE_CHECKING:
    from torch import Tensor

    Outs = Sequence[Tensor] | None


@dataclass(frozen=True)
class Fuse(Transform):
    """Tensors side by side along one axis (left) as one tensor (right).

    `sizes` are the left tensors' lengths along `axis`; `parts` says instead that they are this many equal ones.
    """

    axis: int
    sizes: tuple[int, ...] = ()
    parts: int = 0
    grade: ClassVar[Grade] = Grade.EXACT

    def identity(self) -> str:
        return stated("Fuse", axis=self.axis, sizes=self.sizes, parts=self.parts)

    def __post_init__(self) -> None:
        if bool(self.sizes) == bool(self.parts) or self.axis < 0:
            raise KconvError("Fuse wants an axis counted from the front, and either sizes or parts")

    def _lengths(self, whole: int) -> tuple[int, ...]:
        return self.sizes or (whole // self.parts,) * self.parts

    def forward_specs(self, specs: Specs) -> Specs:
        expect.count("fusing", specs, len(self.sizes) or self.parts)
        first = specs[0]
        if self.axis >= len(first.shape):
            raise SpecError(f"{first} has no axis {self.axis} to fuse along")
        lengths = self.sizes or (first.shape[self.axis],) * self.parts
        for spec, length in zip(specs, lengths, strict=True):
            wanted = (*first.shape[: self.axis], length, *first.shape[self.axis + 1 :])
            if spec != Spec(first.dtype, wanted):
                wish = Spec(first.dtype, wanted)
                raise SpecError(f"parts to fuse along axis {self.axis} disagree: {spec}, expected {wish}")
        return (Spec(first.dtype, (*first.shape[: self.axis], sum(lengths), *first.shape[self.axis + 1 :])),)

    def backward_specs(self, specs: Specs) -> Specs:
        expect.count("splitting", specs, 1)
        spec = specs[0]
        length = spec.shape[self.axis] if self.axis < len(spec.shape) else -1
        if sum(self._lengths(length)) != length:
            parts = f"sizes {list(self.sizes)}" if self.sizes else f"{self.parts} equal parts"
            raise SpecError(f"{spec} does not split along axis {self.axis} into {parts}")
        before, after = spec.shape[: self.axis], spec.shape[self.axis + 1 :]
        return tuple(Spec(spec.dtype, (*before, n, *after)) for n in self._lengths(length))

    def forward(self, tensors: Sequence[Tensor], out: Outs = None) -> list[Tensor]:
        import torch

        joined = _adjacent(tensors) if self.axis == 0 else None
        if joined is not None:
            return [joined]
        return [torch.cat(list(tensors), self.axis, out=out[0] if out else None)]

    def backward(self, tensors: Sequence[Tensor], out: Outs = None) -> list[Tensor]:
        parts = tensors[0].split(self._lengths(tensors[0].shape[self.axis]), self.axis)
        return list(parts) if self.axis == 0 else _settle(parts, out)

    def tiles(self, left: Specs, right: Specs) -> Tiles | None:
        return Tiles((1,) * len(left), (1,)) if self.axis else None

    def moves_bytes(self) -> bool:
        return self.axis == 0


@dataclass(frozen=True)
class Transpose(Transform):
    """A tensor (left) with its axes in the order `axes` (right)."""

    axes: tuple[int, ...]
    grade: ClassVar[Grade] = Grade.EXACT

    def identity(self) -> str:
        return stated("Transpose", axes=self.axes)

    def __post_init__(self) -> None:
        if sorted(self.axes) != list(range(len(self.axes))):
            raise KconvError(f"{self.axes} is not an order of axes")

    def _inverse(self) -> tuple[int, ...]:
        return tuple(self.axes.index(i) for i in range(len(self.axes)))

    def _permuted(self, specs: Specs, axes: tuple[int, ...]) -> Specs:
        expect.count("transposing", specs, 1)
        if len(specs[0].shape) != len(axes):
            raise SpecError(f"{specs[0]} does not have the {len(axes)} axes to transpose")
        return (Spec(specs[0].dtype, tuple(specs[0].shape[i] for i in axes)),)

    def forward_specs(self, specs: Specs) -> Specs:
        return self._permuted(specs, self.axes)

    def backward_specs(self, specs: Specs) -> Specs:
        return self._permuted(specs, self._inverse())

    def forward(self, tensors: Sequence[Tensor], out: Outs = None) -> list[Tensor]:
        return _settle([tensors[0].permute(self.axes)], out)

    def backward(self, tensors: Sequence[Tensor], out: Outs = None) -> list[Tensor]:
        return _settle([tensors[0].permute(self._inverse())], out)

    def tiles(self, left: Specs, right: Specs) -> Tiles | None:
        return Tiles((1,), (1,)) if self.axes and self.axes[0] == 0 else None


@dataclass(frozen=True)
class Reshape(Transform):
    """A tensor of shape `left` as one of shape `right`: the same bytes."""

    left: tuple[int, ...]
    right: tuple[int, ...]
    grade: ClassVar[Grade] = Grade.EXACT

    def identity(self) -> str:
        return stated("Reshape", left=self.left, right=self.right)

    def __post_init__(self) -> None:
        if math.prod(self.left) != math.prod(self.right):
            raise KconvError(f"shapes {list(self.left)} and {list(self.right)} hold different numbers of elements")

    def _to(self, specs: Specs, source: tuple[int, ...], target: tuple[int, ...]) -> Specs:
        expect.count("reshaping", specs, 1)
        expect.shape("the tensor", specs[0], source, f"to reshape it to {list(target)}")
        return (Spec(specs[0].dtype, target),)

    def forward_specs(self, specs: Specs) -> Specs:
        return self._to(specs, self.left, self.right)

    def backward_specs(self, specs: Specs) -> Specs:
        return self._to(specs, self.right, self.left)

    def forward(self, tensors: Sequence[Tensor], out: Outs = None) -> list[Tensor]:
        return [tensors[0].reshape(self.right)]

    def backward(self, tensors: Sequence[Tensor], out: Outs = None) -> list[Tensor]:
        return [tensors[0].reshape(self.left)]

    def moves_bytes(self) -> bool:
        return True


@dataclass(frozen=True)
class TrimZeros(Transform):
    """`padded` entries along `axis`, of which those after `size` are exactly +0 (left), without that tail (right)."""

    size: int
    padded: int
    axis: int = 0
    grade: ClassVar[Grade] = Grade.EXACT

    def identity(self) -> str:
        return stated("TrimZeros", size=self.size, padded=self.padded, axis=self.axis)

    def __post_init__(self) -> None:
        if not 0 <= self.size <= self.padded or self.axis < 0:
            raise KconvError(f"cannot trim {self.padded} entries to {self.size} along axis {self.axis}")

    def _resized(self, specs: Specs, source: int, target: int) -> Specs:
        expect.count("trimming", specs, 1)
        shape = list(specs[0].shape)
        if self.axis >= len(shape) or shape[self.axis] != source:
            raise SpecError(f"{specs[0]} does not have {source} entries along axis {self.axis}")
        shape[self.axis] = target
        return (Spec(specs[0].dtype, tuple(shape)),)

    def forward_specs(self, specs: Specs) -> Specs:
        return self._resized(specs, self.padded, self.size)

    def backward_specs(self, specs: Specs) -> Specs:
        return self._resized(specs, self.size, self.padded)

    def on_bytes(
        self, data: Sequence[np.ndarray], specs: Specs, backward: bool, out: Sequence[np.ndarray] | None = None
    ) -> list[np.ndarray] | None:
        """Along axis 0 the padding is the end of the bytes; padding that is not zero is left to `forward` to refuse."""
        if self.axis:
            return None
        kept = specs[0].nbytes // specs[0].shape[0] * self.size
        if not backward:
            return None if data[0][kept:].any() else [data[0][:kept]]
        padded = np.zeros(kept // max(1, self.size) * self.padded, np.uint8)
        padded[:kept] = data[0]
        return [padded]

    def forward(self, tensors: Sequence[Tensor], out: Outs = None) -> list[Tensor]:
        from kconv.kernels.common import bits, first

        tail = tensors[0].narrow(self.axis, self.size, self.padded - self.size)
        filled = bits(tail) != 0
        if bool(filled.any()):
            at = first(filled)
            position = (*at[: self.axis], at[self.axis] + self.size, *at[self.axis + 1 :])
            raise BadData(
                f"the padding after {self.size} of {self.padded} entries holds {tail[at].item()}, expected +0",
                operand=0, position=position, hint="not padded as its layout says: trimming would lose data",
            )  # fmt: skip
        kept = tensors[0].narrow(self.axis, 0, self.size)
        return [kept] if kept.is_contiguous() else _settle([kept], out)

    def backward(self, tensors: Sequence[Tensor], out: Outs = None) -> list[Tensor]:
        import torch

        shape = list(tensors[0].shape)
        shape[self.axis] = self.padded
        padded = out[0] if out else torch.empty(shape, dtype=tensors[0].dtype, device=tensors[0].device)
        padded.narrow(self.axis, 0, self.size).copy_(tensors[0])
        padded.narrow(self.axis, self.size, self.padded - self.size).zero_()
        return [padded]


def _adjacent(tensors: Sequence[Tensor]) -> Tensor | None:
    """One view over tensors that lie one after the other in one storage, None when they do not."""
    first, end = tensors[0], tensors[0].storage_offset()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and tensor.is_contiguous() and tensor.storage_offset() == end):
            return None
        end += tensor.numel()
    rows = sum(tensor.shape[0] for tensor in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def _settle(views: Sequence[Tensor], out: Outs) -> list[Tensor]:
    """The views as tensors without gaps, in the lent storage if there is any."""
    if out is None:
        return [view.contiguous() for view in views]
    return [target.copy_(view) for target, view in zip(out, views, strict=True)]
