"""Which mutations a trial makes: of which file, of which kind, and whether the manifest is sealed anew over them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.edits_files import edit_bytes, edit_file
from tests.fuzz.edits_json import edit_text
from tests.fuzz.edits_tensors import edit_shard

MANIFEST = "kconv.json"
MOST_READ = 64 << 20


def mutate(folder: Path, rng: Random, decoy: Path, *, favour: str = "", hidden: bool = False) -> list[str]:
    """Mutate a folder once to three times; what was done. `favour` is part of names that are taken more often."""
    said = []
    for _ in range(rng.choice([1, 1, 1, 1, 2, 3])):
        path = _chosen(folder, rng, favour, hidden)
        if path is not None:
            said.append(f"{path.relative_to(folder)}: {_tried(path, rng, decoy)}")
    if rng.random() < 0.5 and _small(folder / MANIFEST):
        said += _resealed(folder / MANIFEST)
    return said


def _small(path: Path) -> bool:
    """Whether it is a regular file that may be read whole."""
    return not path.is_symlink() and path.is_file() and path.stat().st_size < MOST_READ


def _chosen(folder: Path, rng: Random, favour: str, hidden: bool) -> Path | None:
    """A regular file, each of the small ones as likely as all shards together."""
    files = [p for p in sorted(folder.rglob("*")) if _small(p)]
    files = [p for p in files if hidden or not p.name.startswith(".")]
    shards = [p for p in files if p.suffix == ".safetensors"]
    liked = [p for p in files if favour and favour in p.name]
    if liked and rng.random() < 0.5:
        return rng.choice(liked)
    if shards and rng.random() < 0.4:
        return rng.choice(shards)
    return rng.choice(files) if files else None


def _tried(path: Path, rng: Random, decoy: Path) -> str:
    """One mutation; an earlier one may have left a folder where this one would put a file."""
    try:
        return _once(path, rng, decoy)
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as e:
        return f"nothing: {e.strerror}"


def _once(path: Path, rng: Random, decoy: Path) -> str:
    way = rng.random()
    if way < 0.2:
        return edit_file(path, rng, decoy)
    if way < 0.4:
        return edit_bytes(path, rng)
    if path.suffix == ".safetensors":
        return edit_shard(path, rng, decoy)
    if path.suffix == ".json":
        text, said = edit_text(path.read_bytes(), rng, decoy)
        path.write_bytes(text)
        return said
    return edit_bytes(path, rng)


def _resealed(path: Path) -> list[str]:
    """Let the manifest state what the files now are, under a seal that fits; none where it is no JSON any more."""
    from kconv.checkpoint.manifest import dump

    try:
        manifest: Any = json.loads(path.read_bytes())
        for name, known in manifest["files"].items():
            if _small(file := path.parent / name):
                known |= _stated(file, known)
        path.write_bytes(dump(manifest))
    except (ValueError, RecursionError, KeyError, AttributeError, TypeError, OSError):
        return []
    return ["resealed"]


def _stated(file: Path, known: dict[str, Any]) -> dict[str, Any]:
    import xxhash

    blob = file.read_bytes()
    digests = {"sha256": hashlib.sha256(blob).hexdigest(), "xxh3-128": xxhash.xxh3_128_hexdigest(blob)}
    return {"size": len(blob)} | {k: v for k, v in digests.items() if k in known}
