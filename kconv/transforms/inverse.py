"""A transform turned around, for a table whose left side is what is to be made of its right side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kconv.transforms.base import Grade, Same, Specs, Tiles, Transform, stated
from kconv.transforms.dtype import Cast

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Inverse(Transform):
    """`transform` read from its right side (left) to its left side (right)."""

    transform: Transform

    def identity(self) -> str:
        return stated("Inverse", iso=self.transform)

    @property
    def grade(self) -> Grade:
        return self.transform.grade

    def forward_specs(self, specs: Specs) -> Specs:
        return self.transform.backward_specs(specs)

    def backward_specs(self, specs: Specs) -> Specs:
        return self.transform.forward_specs(specs)

    def forward(self, tensors: Sequence[Tensor], out: Sequence[Tensor] | None = None) -> list[Tensor]:
        return self.transform.backward(tensors, out)

    def backward(self, tensors: Sequence[Tensor], out: Sequence[Tensor] | None = None) -> list[Tensor]:
        return self.transform.forward(tensors, out)

    def tiles(self, left: Specs, right: Specs) -> Tiles | None:
        tiles = self.transform.tiles(right, left)
        return tiles and Tiles(tiles.right, tiles.left)

    def moves_bytes(self) -> bool:
        return self.transform.moves_bytes()


def inverse(transform: Transform) -> Transform:
    """`transform` turned around, in its simplest form."""
    if isinstance(transform, Inverse):
        return transform.transform
    if isinstance(transform, Cast):
        return Cast(transform.right, transform.left, transform.lossy)
    return transform if isinstance(transform, Same) else Inverse(transform)
