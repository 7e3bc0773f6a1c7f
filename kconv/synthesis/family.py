"""What a family of `kconv tiny` is: its options and what makes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kconv.synthesis.writing import Synthetic


@dataclass(frozen=True)
class Family:
    """One kind of checkpoint.

    Args:
        title: what it is, in a line.
        shape: its options, a frozen dataclass of `knob`s.
        make: a shape and a seed -> the checkpoint.
        card: the card whose layout `--full-size` lays out.
        frame: a shape -> config and small files without tensors, for `--full-size`.
    """

    title: str
    shape: type
    make: Callable[[Any, int], Synthetic]
    card: str | None = None
    frame: Callable[[Any], Synthetic] | None = None


def knob(default: Any, text: str, *, choices: tuple[str, ...] = (), least: int = 1) -> Any:
    """A field of a shape: its default, its help, and the values it may take."""
    return dataclasses.field(default=default, metadata={"help": text, "choices": choices, "least": least})
