"""What folders hold, read by the safetensors library and by `json` alone: the second opinion on every answer."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, deserialize

MOST_READ = 64 << 20
REWRITTEN = ("transformers_version", "_name_or_path", "_commit_hash")
INDEX = "model.safetensors.index.json"
Tensors = dict[str, tuple[str, tuple[int, ...], str]]


def digest(data: bytes) -> str:
    """A short digest of some bytes."""
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def contents(folder: Path) -> dict[str, str]:
    """Digest of every file's bytes, links followed; folders and what cannot be read are named as such."""
    found: dict[str, str] = {}
    for base, _, files in os.walk(folder):
        for path in (Path(base, f) for f in files):
            name = os.fsencode(path.relative_to(folder)).decode("utf-8", "backslashreplace")
            found[name] = _content(path)
    return found


def _content(path: Path) -> str:
    try:
        if not path.is_file():
            return "special"
        return digest(path.read_bytes()) if path.stat().st_size < MOST_READ else "giant"
    except OSError as e:
        return f"unreadable: {e.errno}"


def tensors(folder: Path) -> Tensors | None:
    """dtype, shape and digest of every tensor that the index names (of every file, without one); None if unreadable."""
    index = folder / INDEX
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"] if index.is_file() else None
        plain = folder / "model.safetensors"
        files = [plain] if plain.exists() else sorted(folder.glob("*.safetensors"))
        files = files if weight_map is None else [folder / f for f in sorted(set(weight_map.values()))]
        found: Tensors = {}
        if any(not file.is_file() or file.stat().st_size > MOST_READ for file in files):
            return None
        for file in files:
            for name, row in deserialize(file.read_bytes()):
                if weight_map is None or weight_map.get(name) == file.name:
                    found[name] = (row["dtype"], tuple(row["shape"]), digest(bytes(row["data"])))
        return found
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def parsed(path: Path) -> Any:
    """A JSON file's value, as text so that NaN equals itself; None if it is none."""
    try:
        readable = path.is_file() and path.stat().st_size < MOST_READ
        return json.dumps(json.loads(path.read_bytes()), sort_keys=True) if readable else None
    except (OSError, ValueError, RecursionError):
        return None


def steady(text: str | None) -> Any:
    """A parsed config without what every save rewrites, which no digest of it holds."""
    kept = json.loads(text or "null", object_hook=lambda d: {k: v for k, v in d.items() if k not in REWRITTEN})
    return json.dumps(kept, sort_keys=True)


def different(expected: Tensors, found: Tensors) -> list[str]:
    """In which tensors two folders differ."""
    return sorted(n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n))
