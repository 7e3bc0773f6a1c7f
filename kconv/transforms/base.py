"""A transform is a reversible step between the tensors of two layouts: specs first, then data, graded by what is kept.

| part | meaning |
|---|---|
| `forward_specs`, `backward_specs` | the other side's specs, or `SpecError`; pure, memoised by the plan |
| `forward`, `backward` | the other side's tensors; no I/O, any device, no hidden state |
| `grade` | what survives forward then backward (and, for a decode, what survives at all) |
| `tiles` | how many axis-0 rows of each tensor make one independent piece, so that a large tensor streams in pieces |

`out` lets the caller lend storage: a transform that makes new bytes writes them there, one that only moves bytes ignores it
and returns views of its inputs.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kconv.errors import KconvError
from kconv.spec import Spec

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

Specs = tuple[Spec, ...]


class Grade(enum.IntEnum):
    """What a conversion keeps; the order is from best to worst, and a plan has the worst of its rules."""

    EXACT = 0
    EXACT_WITH_SIDECAR = 1
    VALUE_EXACT = 2
    LOSSY = 3

    def __str__(self) -> str:
        return self.name.lower().replace("_", "-")

    @classmethod
    def parse(cls, text: str) -> Grade:
        """The grade called `text` (`exact`, `exact-with-sidecar`, `value-exact`, `lossy`)."""
        return cls[text.upper().replace("-", "_")]


class SpecError(KconvError):
    """A transform cannot take tensors of these specs."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows along axis 0 that make one independent tile, per tensor of the left and of the right side.

    Tensor i's tile t is rows [t*rows[i], min((t+1)*rows[i], shape[0])): the last one may be partial.
    """

    left: tuple[int, ...]
    right: tuple[int, ...]


def stated(step: str, version: int = 1, /, **values: object) -> str:
    """A step's identity: its lasting name, its version, and the values that decide what it does.

    Digests of stored plans are made of it: a name, a key or a version given once stays. A step that comes to mean something
    else for the same values raises its version.
    """
    name = step if version == 1 else f"{step}.{version}"
    return f"{name}({', '.join(f'{key}={_stated(value)}' for key, value in values.items())})"


def _stated(value: object) -> str:
    if isinstance(value, Transform):
        return value.identity()
    if isinstance(value, tuple):
        return f"({', '.join(map(_stated, value))}{',' * (len(value) == 1)})"
    if value is None or isinstance(value, str | int):
        return repr(value)
    raise TypeError(f"no lasting form of {value!r}")


class Transform(ABC):
    """A reversible step; subclasses are frozen dataclasses, compared by their fields."""

    @abstractmethod
    def identity(self) -> str:
        """What the digest of a plan says of this step (`stated`); it outlives the names of classes and fields."""

    @property
    @abstractmethod
    def grade(self) -> Grade:
        """What survives; a class attribute where it is always the same."""

    @abstractmethod
    def forward_specs(self, specs: Specs) -> Specs:
        """Specs of the right side, from those of the left."""

    @abstractmethod
    def backward_specs(self, specs: Specs) -> Specs:
        """Specs of the left side, from those of the right."""

    @abstractmethod
    def forward(self, tensors: Sequence[Tensor], out: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Tensors of the right side; raises `BadData` (operand, position) for a value that cannot be converted."""

    @abstractmethod
    def backward(self, tensors: Sequence[Tensor], out: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Tensors of the left side."""

    def tiles(self, left: Specs, right: Specs) -> Tiles | None:
        """Independent pieces along axis 0, or None when the step needs its tensors whole."""
        return None

    def on_bytes(
        self, data: Sequence[np.ndarray], specs: Specs, backward: bool, out: Sequence[np.ndarray] | None = None
    ) -> list[np.ndarray] | None:
        """The same step on raw bytes (1-D uint8), into `out` if that serves; None where tensors, and so torch, are needed."""
        return None

    def moves_bytes(self) -> bool:
        """Whether the step only moves whole tensors' bytes (then the executor copies without looking at them)."""
        return False


@dataclass(frozen=True)
class Same(Transform):
    """The same bytes under another name."""

    grade: ClassVar[Grade] = Grade.EXACT

    def identity(self) -> str:
        return stated("Same")

    def forward_specs(self, specs: Specs) -> Specs:
        return specs

    backward_specs = forward_specs

    def forward(self, tensors: Sequence[Tensor], out: Sequence[Tensor] | None = None) -> list[Tensor]:
        return list(tensors)

    backward = forward

    def tiles(self, left: Specs, right: Specs) -> Tiles | None:
        return Tiles((1,) * len(left), (1,) * len(right)) if all(s.shape for s in left) else None

    def moves_bytes(self) -> bool:
        return True


@dataclass(frozen=True)
class Seq(Transform):
    """Steps one after the other."""

    steps: tuple[Transform, ...]

    def identity(self) -> str:
        return stated("Seq", steps=self.steps)

    @property
    def grade(self) -> Grade:
        return max(step.grade for step in self.steps)

    def forward_specs(self, specs: Specs) -> Specs:
        for step in self.steps:
            specs = step.forward_specs(specs)
        return specs

    def backward_specs(self, specs: Specs) -> Specs:
        for step in reversed(self.steps):
            specs = step.backward_specs(specs)
        return specs

    def forward(self, tensors: Sequence[Tensor], out: Sequence[Tensor] | None = None) -> list[Tensor]:
        result = list(tensors)
        for i, step in enumerate(self.steps):
            result = step.forward(result, out if i == len(self.steps) - 1 else None)
        return result

    def backward(self, tensors: Sequence[Tensor], out: Sequence[Tensor] | None = None) -> list[Tensor]:
        result = list(tensors)
        for i, step in reversed(list(enumerate(self.steps))):
            result = step.backward(result, out if i == 0 else None)
        return result

    def tiles(self, left: Specs, right: Specs) -> Tiles | None:
        whole: Tiles | None = None
        for step in self.steps:
            after = step.forward_specs(left)
            tiles = step.tiles(left, after)
            if tiles is None:
                return None
            whole = tiles if whole is None else _joined(whole, tiles)
            if whole is None:
                return None
            left = after
        return whole

    def moves_bytes(self) -> bool:
        return all(step.moves_bytes() for step in self.steps)


def _joined(first: Tiles, second: Tiles) -> Tiles | None:
    """Tiles of two steps in a row: as many of each as make the same rows in between, None where that cannot be."""
    times = {(math.lcm(a, b) // a, math.lcm(a, b) // b) for a, b in zip(first.right, second.left, strict=True)}
    if len(times) != 1:
        return None
    m, n = times.pop()
    return Tiles(tuple(m * rows for rows in first.left), tuple(n * rows for rows in second.right))


@dataclass(frozen=True)
class Par(Transform):
    """Steps side by side: step i takes the next `lefts[i]` tensors of the left and makes `rights[i]` of the right."""

    steps: tuple[Transform, ...]
    lefts: tuple[int, ...]
    rights: tuple[int, ...]

    def identity(self) -> str:
        return stated("Par", steps=self.steps, lefts=self.lefts, rights=self.rights)

    @property
    def grade(self) -> Grade:
        return max(step.grade for step in self.steps)

    def _each(self, method: str, counts: tuple[int, ...], items: Sequence[Any], outs: Sequence[Any] | None,
              out_counts: tuple[int, ...]) -> list[Any]:  # fmt: skip
        result: list[Any] = []
        at = 0
        for step, n, m in zip(self.steps, counts, out_counts, strict=True):
            lent = () if outs is None else (outs[len(result) : len(result) + m],)
            result.extend(getattr(step, method)(items[at : at + n], *lent))
            at += n
        return result

    def forward_specs(self, specs: Specs) -> Specs:
        return tuple(self._each("forward_specs", self.lefts, specs, None, self.rights))

    def backward_specs(self, specs: Specs) -> Specs:
        return tuple(self._each("backward_specs", self.rights, specs, None, self.lefts))

    def forward(self, tensors: Sequence[Tensor], out: Sequence[Tensor] | None = None) -> list[Tensor]:
        return self._each("forward", self.lefts, tensors, out, self.rights)

    def backward(self, tensors: Sequence[Tensor], out: Sequence[Tensor] | None = None) -> list[Tensor]:
        return self._each("backward", self.rights, tensors, out, self.lefts)

    def moves_bytes(self) -> bool:
        return all(step.moves_bytes() for step in self.steps)
