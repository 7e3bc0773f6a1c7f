"""An iso turned around, for a table whose left side is what is to be made of its right side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kconv.transforms.base import Grade, Iso, Same, Specs, Tiles, stated
from kconv.transforms.dtype import Cast

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Inverse(Iso):
    """`iso` read from its right side (left) to its left side (right)."""

    iso: Iso

    def identity(self) -> str:
        return stated("Inverse", iso=self.iso)

    @property
    def grade(self) -> Grade:
        return self.iso.grade

    def forward_specs(self, specs: Specs) -> Specs:
        return self.iso.backward_specs(specs)

    def backward_specs(self, specs: Specs) -> Specs:
        return self.iso.forward_specs(specs)

    def forward(self, tensors: Sequence[Tensor], out: Sequence[Tensor] | None = None) -> list[Tensor]:
        return self.iso.backward(tensors, out)

    def backward(self, tensors: Sequence[Tensor], out: Sequence[Tensor] | None = None) -> list[Tensor]:
        return self.iso.forward(tensors, out)

    def tiles(self, left: Specs, right: Specs) -> Tiles | None:
        tiles = self.iso.tiles(right, left)
        return tiles and Tiles(tiles.right, tiles.left)

    def moves_bytes(self) -> bool:
        return self.iso.moves_bytes()


def inverse(iso: Iso) -> Iso:
    """`iso` turned around, in its simplest form."""
    if isinstance(iso, Inverse):
        return iso.iso
    if isinstance(iso, Cast):
        return Cast(iso.right, iso.left, iso.lossy)
    return iso if isinstance(iso, Same) else Inverse(iso)
