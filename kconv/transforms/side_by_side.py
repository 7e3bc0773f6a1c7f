"""Weights [O, I] that lie side by side, transposed, in one matrix [I, n*O]: how grouped products want gate and up.

| left side | right side |
|---|---|
| n times the left of `transform`, whose first right tensor is values [O, I] | values [I, n*O], the others below one another |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kconv.spec import Spec
from kconv.transforms.base import Grade, SpecError, Specs, Transform, stated

if TYPE_CHECKING:
    from torch import Tensor

    Outs = Sequence[Tensor] | None


@dataclass(frozen=True)
class SideBySide(Transform):
    """`parts` weights through `transform` each (left); values transposed side by side, the rest joined along axis 0 (right)."""

    transform: Transform
    parts: int = 1

    def identity(self) -> str:
        return stated("Abreast", iso=self.transform, parts=self.parts)

    @property
    def grade(self) -> Grade:
        return self.transform.grade

    def _split(self, items: Sequence[Any]) -> list[Sequence[Any]]:
        if len(items) % self.parts:
            raise SpecError(f"{len(items)} tensors are no {self.parts} equal groups")
        n = len(items) // self.parts
        return [items[i * n : (i + 1) * n] for i in range(self.parts)]

    def forward_specs(self, specs: Specs) -> Specs:
        groups = self._split(specs)
        values, *rest = self.transform.forward_specs(tuple(groups[0]))
        if any(tuple(g) != tuple(groups[0]) for g in groups):
            raise SpecError(f"weights to lie side by side differ: {', '.join(str(g[0]) for g in groups)}")
        if len(values.shape) != 2:
            raise SpecError(f"{values} is no matrix to transpose")
        rows, columns = values.shape
        return Spec(values.dtype, (columns, self.parts * rows)), *(s.rows(self.parts * s.shape[0]) for s in rest)

    def backward_specs(self, specs: Specs) -> Specs:
        values, *rest = specs
        if len(values.shape) != 2 or values.shape[1] % self.parts or any(not s.shape or s.shape[0] % self.parts for s in rest):
            raise SpecError(f"{', '.join(map(str, specs))} do not hold {self.parts} equal weights side by side")
        columns, rows = values.shape
        one = (Spec(values.dtype, (rows // self.parts, columns)), *(s.rows(s.shape[0] // self.parts) for s in rest))
        return self.transform.backward_specs(one) * self.parts

    def forward(self, tensors: Sequence[Tensor], out: Outs = None) -> list[Tensor]:
        import torch

        made = [self.transform.forward(group) for group in self._split(tensors)]
        values = torch.cat([m[0].T for m in made], dim=1, out=out[0] if out else None)
        return [values, *(torch.cat([m[i] for m in made]) for i in range(1, len(made[0])))]

    def backward(self, tensors: Sequence[Tensor], out: Outs = None) -> list[Tensor]:
        columns = [t.T.contiguous() for t in tensors[0].chunk(self.parts, dim=1)]
        rest = [t.chunk(self.parts) for t in tensors[1:]]
        lent = self._split(out) if out else [None] * self.parts
        made = [self.transform.backward([columns[i], *(r[i] for r in rest)], lent[i]) for i in range(self.parts)]
        return [tensor for group in made for tensor in group]
