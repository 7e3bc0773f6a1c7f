"""What one value of a config may be; every check says what it found wrong, in words that name the key."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

Config = Mapping[str, Any]


def is_count(value: object) -> bool:
    """Whether a value is a whole number above 0."""
    return type(value) is int and value > 0


def is_number(value: object) -> bool:
    """Whether a value is a finite number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def counts(c: Config, keys: Collection[str], prefix: str = "") -> Iterator[str]:
    """Keys that must be whole numbers above 0."""
    yield from (f"{prefix}{k} = {c.get(k)!r} must be a positive whole number" for k in keys if not is_count(c.get(k)))


def counts_or_null(c: Config, keys: Collection[str]) -> Iterator[str]:
    """Keys that may be null."""
    wrong = (k for k in keys if c.get(k) is not None and not is_count(c[k]))
    yield from (f"{k} = {c[k]!r} must be null or a positive whole number" for k in wrong)


def above_zero(c: Config, keys: Collection[str]) -> Iterator[str]:
    """Keys that must be numbers above 0."""
    wrong = (k for k in keys if not (is_number(c.get(k)) and c[k] > 0))
    yield from (f"{k} = {c.get(k)!r} must be above 0, a number" for k in wrong)


def numbers_or_null(c: Config, keys: Collection[str]) -> Iterator[str]:
    """Keys that must be numbers, or null."""
    wrong = (k for k in keys if c.get(k) is not None and not is_number(c[k]))
    yield from (f"{k} = {c[k]!r} must be null or a number" for k in wrong)


def flags(c: Config, keys: Collection[str]) -> Iterator[str]:
    """Keys that must be true or false."""
    yield from (f"{k} = {c.get(k)!r} must be true or false" for k in keys if not isinstance(c.get(k), bool))
