"""Checks that transforms make on specs: each says what disagrees, in the words of a checkpoint.

| function | refuses |
|---|---|
| `count` | another number of tensors than the step takes |
| `dtype` | a tensor of another dtype |
| `shape` | a tensor of another shape |
"""

from __future__ import annotations

from collections.abc import Iterable

from kconv.spec import Spec
from kconv.transforms.base import SpecError, Specs


def count(what: str, specs: Specs, n: int) -> None:
    """Raises `SpecError` unless there are `n` specs."""
    if len(specs) != n:
        raise SpecError(f"{what} takes {n} tensor{'s' * (n != 1)}, not {len(specs)}: {', '.join(map(str, specs))}")


def dtype(what: str, spec: Spec, names: Iterable[str]) -> None:
    """Raises `SpecError` unless the spec has one of these dtypes."""
    allowed = tuple(names)
    if spec.dtype not in allowed:
        raise SpecError(f"{what} is {spec}, expected {' or '.join(allowed)}")


def shape(what: str, spec: Spec, wanted: tuple[int, ...], why: str) -> None:
    """Raises `SpecError` unless the spec has the shape `wanted`; `why` says what it follows from."""
    if spec.shape != wanted:
        raise SpecError(f"{what} is {spec}, expected shape {list(wanted)} {why}")
