"""What a JSON value may be, by annotation, so that a strange one is named before it is used; results with JSON keys.

| kind | values |
|---|---|
| `int`, `float`, `bool`, `str`, `dict`, `None` | as in Python; a bool is no number, a float is finite or an integer |
| `size`, `count`, `layers` | whole numbers: from 1, from 0, from 1 to 4096 |
| `list[kind]`, `a | b` | a list or tuple of one kind; either |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

LARGEST = 2**31
NUMBERS = {"int": (-LARGEST, LARGEST), "size": (1, LARGEST), "count": (0, LARGEST), "layers": (1, 4096)}
TYPES = {"bool": bool, "str": str, "dict": dict, "None": type(None)}
WORDS = {
    "int": "a whole number", "size": "a positive whole number", "count": "a whole number from 0",
    "layers": "a number of layers", "float": "a finite number", "bool": "true or false", "str": "a string",
    "dict": "an object", "None": "null",
}  # fmt: skip


def fits(value: Any, kind: str) -> bool:
    """Whether a value is of a kind."""
    return any(_fits(value, one) for one in kind.split(" | "))


def _fits(value: Any, kind: str) -> bool:
    if kind.startswith("list["):
        return isinstance(value, list | tuple) and all(fits(v, kind[5:-1]) for v in value)
    if kind in TYPES:
        return isinstance(value, TYPES[kind])
    if isinstance(value, bool):
        return False
    if kind == "float":
        return isinstance(value, int | float) and abs(value) <= 1e300 and math.isfinite(value)
    least, most = NUMBERS[kind]
    return isinstance(value, int) and least <= value <= most


def misfits(values: Mapping[str, Any], kinds: Mapping[str, str], where: str = "") -> list[str]:
    """One line for each value that is not of its kind; keys without a kind may hold anything."""
    return [
        f"{where}{name} is {value!r}, it should be {words(kinds[name])}"
        for name, value in values.items()
        if name in kinds and not fits(value, kinds[name])
    ]


def words(kind: str) -> str:
    """A kind for people."""
    return " or ".join(f"a list, each {WORDS[k[5:-1]]}" if k.startswith("list[") else WORDS[k] for k in kind.split(" | "))


OPTIONAL = {"optional": True}
"""Metadata of a field of a `Result` that is left out where it is None."""


class Result(Mapping[str, Any]):
    """What a public call found: the base of frozen dataclasses whose fields can be read by their JSON keys too, `found["ok"]`.

    A field's key is its name, or `key` of its metadata; one whose metadata are `OPTIONAL` is left out where it is None.
    """

    def to_json(self) -> dict[str, Any]:
        """What the command prints with `--json`."""
        found: dict[str, Any] = {}
        for f in fields(self):  # type: ignore[arg-type]  # the classes that derive from this one are dataclasses
            value = getattr(self, f.name)
            if value is not None or not f.metadata.get("optional"):
                found[f.metadata.get("key", f.name)] = value
        return found

    def __getitem__(self, key: str) -> Any:
        return self.to_json()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_json())

    def __len__(self) -> int:
        return len(self.to_json())
