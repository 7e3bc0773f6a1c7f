"""JSON from outside, read as what it says it is: UTF-8, one object, each key once, text that can be written again.

| refused | because |
|---|---|
| more bytes than `most` | it is not read at all, so a hole of 2 GiB costs no memory |
| not UTF-8, a byte order mark, UTF-16, UTF-32 | the standard's encoding is one; others are read differently by others |
| a key twice | readers disagree about which counts |
| nested deeper than 100 | no config is, and what walks it later must not run out of stack |
| half of a surrogate pair (`\\ud800`) | it is no character, and no file or terminal takes it |
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kconv.errors import KconvError
from kconv.text.printable import printable

DEEPEST = 100
MOST = 64 << 20
"""Bytes of a JSON file that is no index."""
MOST_INDEX = 512 << 20
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse(blob: bytes, what: str, *, unique: bool = True) -> dict[str, Any]:
    """A JSON object; raises ValueError saying what is wrong where it is none. Only with `unique` are all keys looked at."""
    try:
        text = blob.decode("utf-8")
        value = json.loads(text)
        if unique and blob.count(b":") != _keys(value):  # a colon follows every key: with as many keys, none is there twice
            value = json.loads(text, object_pairs_hook=_no_twins)
    except UnicodeDecodeError as e:
        raise ValueError(f"{what} is not JSON: it is no UTF-8 text at byte {e.start:,}") from None
    except RecursionError:
        raise ValueError(f"{what} is not JSON: it is nested without end") from None
    except _Twice as e:
        raise ValueError(f"{what} names {e} twice") from None
    except ValueError as e:
        raise ValueError(f"{what} is not JSON: {e}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not a JSON object")
    if b"\\u" in blob and SURROGATE.search(blob):
        _refuse_halves(value, what)
    if unique and blob.count(b"{") + blob.count(b"[") > DEEPEST:
        _refuse_depth(value, what)
    return value


def read_path(path: Path, what: str, *, hint: str, most: int = MOST) -> dict[str, Any]:
    """The object in a JSON file of this machine; raises KconvError where it cannot be read, is too large, or is none."""
    try:
        size = path.stat().st_size
        if size > most:
            raise KconvError(f"{what} {path} has {size:,} bytes; no such file has more than {most:,}", hint=hint)
        return parse(path.read_bytes(), f"{what} {path}")
    except OSError as e:
        raise KconvError(f"cannot read {what} {path}: {e.strerror}", hint=hint) from e
    except ValueError as e:
        raise KconvError(str(e), hint=hint) from None


def _keys(value: Any) -> int:
    """How many keys all objects in a JSON value have, those in lists apart."""
    if not isinstance(value, dict):
        return 0
    return len(value) + sum(_keys(inner) for inner in value.values() if type(inner) is dict)


class _Twice(ValueError):
    """A key that an object has twice."""


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Twice(printable(key))
            seen.add(key)
    return result


def _refuse_halves(value: Mapping[str, Any], what: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as e:
        raise ValueError(f"{what} holds {e.object[e.start]!a}, half of a surrogate pair, which is no text") from None
    except RecursionError:
        raise ValueError(f"{what} is not JSON: it is nested without end") from None


def _refuse_depth(value: Mapping[str, Any], what: str) -> None:
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        inside = (child for parent in level for child in (parent.values() if isinstance(parent, dict) else parent))
        level = [child for child in inside if isinstance(child, dict | list)]
        if not level:
            return
    raise ValueError(f"{what} is nested deeper than {DEEPEST}")
