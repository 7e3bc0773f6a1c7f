"""What transforms have to say besides their results: errors of lossy steps, and data that is legal but suspicious.

`with collect() as notes:` around a call gathers them in that thread; without a collector they cost nothing. The transforms
stay free of state, and a step inside a `Seq` or `Par` is measured as well as one alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from kconv.kernels.measure import Error


@dataclass
class Notes:
    """Errors by the name of the step, and warnings in the order they came; `merge` adds another thread's."""

    errors: dict[str, Error] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def merge(self, other: Notes) -> None:
        """Takes over what another collector noted."""
        for step, error in other.errors.items():
            self.errors[step] = self.errors[step] + error if step in self.errors else error
        self.warnings += [w for w in other.warnings if w not in self.warnings]


_current: ContextVar[Notes | None] = ContextVar("notes", default=None)


@contextmanager
def collect() -> Iterator[Notes]:
    """Gathers what the transforms called inside the block, in this thread, have to say."""
    notes = Notes()
    token = _current.set(notes)
    try:
        yield notes
    finally:
        _current.reset(token)


def warn(message: str) -> None:
    """Something suspicious about the data of the tensor at hand."""
    notes = _current.get()
    if notes is not None:
        notes.merge(Notes(warnings=[message]))


def measure(step: str, values: Tensor, decode: Callable[[], Tensor]) -> None:
    """The error of a lossy step; `decode` is called only when someone listens."""
    notes = _current.get()
    if notes is not None:
        from kconv.kernels.measure import error_of

        notes.merge(Notes(errors={step: error_of(values, decode())}))
