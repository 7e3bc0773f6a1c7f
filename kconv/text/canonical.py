"""Digests of JSON values in a named canonical form, and what differs between two of them.

| form | digest of |
|---|---|
| `json-1` | JSON with sorted keys, no white space, UTF-8, without `transformers_version`, `_name_or_path`, `_commit_hash` |
| `keys-1` | an object: `json-1` of it, and the first 16 hex digits of `json-1` of each of its parts, two levels deep |
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

VOLATILE = ("transformers_version", "_name_or_path", "_commit_hash")


def canonical_json(value: Any) -> bytes:
    """The `json-1` bytes of a value."""
    return json.dumps(_steady(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def json_digest(value: Any) -> str:
    """The `json-1` digest of a value."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def keys_digest(value: Mapping[str, Any]) -> dict[str, Any]:
    """The `keys-1` digest of an object: it tells not only that something was changed, but what."""
    parts: dict[str, str] = {}
    for key, part in value.items():
        if key in VOLATILE:
            continue
        nested = isinstance(part, Mapping) and part
        below = {f"{key}.{k}": v for k, v in part.items() if k not in VOLATILE} if nested else {key: part}
        parts |= {path: json_digest(v)[:16] for path, v in below.items()}
    return {"form": "keys-1", "sha256": json_digest(value), "keys": parts}


def changed_keys(was: Mapping[str, Any], value: Mapping[str, Any], name: str) -> list[tuple[str, str | None, str | None]]:
    """Part, recorded and found digest of what differs between a `keys-1` digest and an object; empty when nothing does.

    `name` stands for the part when no part differs, but the digest of the whole.
    """
    now = keys_digest(value)
    if now == was:
        return []
    old, new = was["keys"], now["keys"]
    rows = [(k, old.get(k), new.get(k)) for k in sorted(old.keys() | new.keys()) if old.get(k) != new.get(k)]
    return rows or [(name, was["sha256"], now["sha256"])]


def _steady(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _steady(v) for k, v in value.items() if k not in VOLATILE}
    return [_steady(v) for v in value] if isinstance(value, list) else value
