"""Mutations of a JSON text: a value, a key or the text itself becomes what no writer would write.

| edit | example |
|---|---|
| a value replaced | another type, null, huge, negative, NaN, nested 100,000 deep, a lone surrogate, a path out of the folder |
| a value off by one, doubled, or exchanged with another of the document | 9 layers become 10 |
| a key removed, renamed, given twice | |
| the text encoded otherwise, cut, padded | UTF-16, a byte order mark |
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

DEEP, TWICE = "@deep@", "@twice"
DEPTH = 100_000


def paths_out(decoy: Path) -> list[str]:
    """Names that lead out of a folder, to a decoy among others."""
    return ["../decoy/new", "../../decoy/new", str(decoy / "new"), f"/{decoy}/new", "sub/../../decoy/new", "..", ".",
            "", "a//b", "./config.json", "C:\\new", "..\\decoy\\new", "a\0b", "~/new", "\udcff", "x" * 300,
            "con\x1b[31m\n"]  # fmt: skip


def strange(decoy: Path) -> list[Any]:
    """Values that no writer writes where they are put."""
    return [None, True, False, "", "x", -1, 0, 1, 7, 2**31, 2**63, 10**400, -(2**70), 0.5, 1e308, float("nan"), float("inf"),
            [], {}, [[]], [None], {"a": {"b": []}}, "\ud800", DEEP, "y" * 100_000, "\x1b]0;x\x07", *paths_out(decoy)]  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside, parents first."""
    if at:
        yield at
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, held in inside:
        yield from places(held, (*at, key))


def edit_text(text: bytes, rng: Random, decoy: Path) -> tuple[bytes, str]:
    """A mutated JSON text, and what was done to it; bytes that are no JSON are cut."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text[: rng.randrange(len(text) + 1)], "cut"
    if rng.random() < 0.12:
        return _encoded(text, rng)
    changed, said = edit(value, rng, decoy)
    return dumped(changed), said


def edit(value: Any, rng: Random, decoy: Path) -> tuple[Any, str]:
    """A mutated copy of a JSON value, and what was done to it."""
    value = copy.deepcopy(value)
    found = list(places(value))
    if not found or rng.random() < 0.03:
        new = rng.choice(strange(decoy))
        return new, f"the whole is {new!r:.40}"
    shallow = [p for p in found if len(p) <= 2]
    at = rng.choice(shallow if rng.random() < 0.4 else found)
    holder = held_at(value, at[:-1])
    said = rng.choice(EDITS)(holder, at[-1], value, found, rng, decoy)
    return value, f"{'.'.join(map(str, at))[:80]}: {said}"


def held_at(value: Any, path: tuple[Any, ...]) -> Any:
    """The value at a path."""
    for key in path:
        value = value[key]
    return value


def dumped(value: Any) -> bytes:
    """The text of a mutated value, with the marks for depth and doubled keys carried out."""
    text = json.dumps(value, indent=1)
    return text.replace(f'"{DEEP}"', "[" * DEPTH + "]" * DEPTH).replace(f'{TWICE}"', '"').encode()


def _replace(holder: Any, key: Any, _whole: Any, _found: list, rng: Random, decoy: Path) -> str:
    holder[key] = rng.choice(strange(decoy))
    return f"becomes {holder[key]!r:.40}"


def _nudge(holder: Any, key: Any, _whole: Any, _found: list, rng: Random, _decoy: Path) -> str:
    old = holder[key]
    if isinstance(old, bool):
        holder[key] = not old
    elif isinstance(old, int | float):
        holder[key] = rng.choice([old + 1, old - 1, old * 2, -old, float(old), str(old)])
    elif isinstance(old, str) and old:
        i = rng.randrange(len(old))
        holder[key] = rng.choice([old[:i] + chr(ord(old[i]) ^ 1) + old[i + 1 :], old + "x", old[:i], old.upper()])
    elif isinstance(old, list) and old:
        holder[key] = rng.choice([old[:-1], [*old, old[0]], old[::-1], old * 2])
    else:
        holder[key] = [old]
    return f"becomes {holder[key]!r:.40}"


def _swap(holder: Any, key: Any, whole: Any, found: list, rng: Random, _decoy: Path) -> str:
    holder[key] = copy.deepcopy(held_at(whole, rng.choice(found)))
    return f"becomes another value of the document, {holder[key]!r:.40}"


def _remove(holder: Any, key: Any, *_: Any) -> str:
    del holder[key]
    return "removed"


def _rename(holder: Any, key: Any, _whole: Any, _found: list, rng: Random, decoy: Path) -> str:
    if not isinstance(holder, dict):
        return _remove(holder, key)
    new = rng.choice([*paths_out(decoy), "\ud800", key + "x", key.upper(), "__class__", "\x1b[2J"])
    holder[new] = holder.pop(key)
    return f"called {new!r:.60}"


def _twice(holder: Any, key: Any, _whole: Any, _found: list, rng: Random, decoy: Path) -> str:
    if not isinstance(holder, dict):
        holder.append(copy.deepcopy(holder[key]))
        return "given twice"
    holder[key + TWICE] = rng.choice([holder[key], *strange(decoy)])
    return "its key given twice"


Edit = Callable[[Any, Any, Any, list, Random, Path], str]
EDITS: list[Edit] = [_replace, _replace, _replace, _nudge, _nudge, _swap, _remove, _remove, _rename, _twice]


def _encoded(text: bytes, rng: Random) -> tuple[bytes, str]:
    plain = text.decode("utf-8", "replace")
    way = rng.choice(["utf-16", "utf-32", "utf-8-sig", "cut", "tail", "NUL", "spaces"])
    if way == "cut":
        return text[: rng.randrange(len(text) + 1)], "cut"
    extra = {"tail": text + b"}", "NUL": text + b"\0", "spaces": b"\n " * 500 + text}
    return extra.get(way) or plain.encode(way), f"written as {way}"
