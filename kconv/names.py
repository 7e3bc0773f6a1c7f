"""Tensor names: exact templates with named indices, and folded lists of names for people.

`Template("model.layers.{layer}.mlp.gate.weight").format(layer=3)` is a name. There are no regular expressions: an index
ranges over a finite domain that the rule gives, so a template can only make names, never match one by accident.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Sequence


def indices(template: str) -> tuple[str, ...]:
    """The named indices of a template, in order: `("layer", "expert")`."""
    return tuple(field for _, field, _, _ in string.Formatter().parse(template) if field)


def number(part: str) -> int | None:
    """The index that a part of a name is, None when it is a word (or no number that anyone counts to)."""
    return int(part) if part.isascii() and part.isdigit() and len(part) < 10 else None


def fold(name: str) -> str:
    """A name with every number between dots replaced by `*`: `layers.3.mlp` -> `layers.*.mlp`."""
    return ".".join("*" if number(part) is not None else part for part in name.split("."))


def ranges(numbers: Sequence[int]) -> str:
    """Integers as ranges: `[0, 1, 2, 5]` -> `0-2,5`."""
    text: list[str] = []
    ordered = sorted(set(numbers))
    start = 0
    for i in range(len(ordered)):
        if i + 1 == len(ordered) or ordered[i + 1] != ordered[i] + 1:
            text.append(str(ordered[i]) if i == start else f"{ordered[start]}-{ordered[i]}")
            start = i + 1
    return ",".join(text)


def folded(names: Iterable[str], most: int = 12, file_of: Callable[[str], str] | None = None) -> list[str]:
    """Names folded over their numbers, one line a pattern with the ranges seen and the count; at most `most` lines.

    `file_of` says in which file a name lies; the line then ends with the files, or their number.
    """
    groups: dict[str, list[list[int]]] = {}
    members: dict[str, list[str]] = {}
    for name in names:
        key = fold(name)
        numbers = [n for n in map(number, name.split(".")) if n is not None]
        seen = groups.setdefault(key, [[] for _ in numbers])
        for column, index in zip(seen, numbers, strict=True):
            column.append(index)
        members.setdefault(key, []).append(name)
    lines = []
    for key, columns in groups.items():
        text = key
        for column in columns:
            values = ranges(column)
            text = text.replace("*", values if len(set(column)) == 1 else "{" + values + "}", 1)
        count = len(members[key])
        text = text if count == 1 else f"{text} ({count} tensors)"
        lines.append(text + (_in_files({file_of(n) for n in members[key]}) if file_of else ""))
    return lines if len(lines) <= most else [*lines[:most], f"... and {len(lines) - most} more patterns"]


def _in_files(files: set[str]) -> str:
    known = sorted(files - {""})
    if not known:
        return ""
    return f" in {', '.join(known)}" if len(known) <= 2 else f" in {len(known)} files from {known[0]} to {known[-1]}"
