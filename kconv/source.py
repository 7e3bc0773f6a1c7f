"""A checkpoint as its headers describe it: every tensor's name, spec, file and offset, and everything wrong with them.

| checked before any data is read | refused when |
|---|---|
| index | not JSON, names a missing file, an unsafe path, a pickle file, a tensor its shard lacks |
| header | longer than 100 MB or than the file, not JSON, unknown dtype, a name twice |
| data | offsets overlap, leave holes, overrun or fall short of the file, differ from dtype x shape |
| names | in a shard but not in the index; in two shards |

All problems are collected and raised once. A folder may hold several groups of shards, each with its own index:
`model` (what Transformers reads), `vision` and `sidecar` (what kconv carries so that the way back is exact).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from kconv.errors import KconvError, Problems
from kconv.files import Files, open_files
from kconv.names import folded
from kconv.spec import BITS, Spec

GROUPS = ("model", "vision", "sidecar")
MAX_HEADER = 100_000_000
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
MANIFEST = "kconv.json"


@dataclass(slots=True)
class Entry:
    """One stored tensor: its spec, its file, and the absolute offset of its first byte there."""

    spec: Spec
    file: str
    start: int


@dataclass
class Checkpoint:
    """What the headers, the config and the manifest of a checkpoint say; no tensor data."""

    files: Files
    config: dict[str, Any]
    entries: dict[str, Entry]
    shards: list[str]
    index_metadata: dict[str, Any]
    manifest: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def where(self) -> str:
        """The path or address it was opened from."""
        return self.files.where

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.spec.nbytes for entry in self.entries.values())

    def other_files(self) -> list[str]:
        """Names of the files that are neither weights, index, config nor manifest."""
        skip = {*self.shards, "config.json", MANIFEST, *(index_name(g) for g in GROUPS)}
        return [n for n in self.files.names() if n not in skip and not n.endswith((".safetensors", ".safetensors.index.json"))]


def index_name(group: str) -> str:
    """File name of a group's index."""
    return f"{group}.safetensors.index.json"


def open_checkpoint(source: Any, *, follow_index: bool = False) -> Checkpoint:
    """Read the headers of a checkpoint; raises `Problems` with everything that is wrong with them.

    `follow_index` reads a tensor that lies in two shards from the one its index names, instead of refusing.
    """
    files = source if isinstance(source, Files) else open_files(source)
    names = files.names()
    config = _json(files, "config.json") if "config.json" in names else {}
    problems: list[str] = []
    indexed, metadata = _indexed(files, names, problems)
    shards = sorted(set(indexed.values())) if indexed else _unindexed(names)
    if not problems:
        _refuse_pickles_only(files, names, shards)
    _raise(files, problems)
    entries: dict[str, Entry] = {}
    notes: list[str] = []
    extra: list[tuple[str, str]] = []
    for shard in shards:
        for name, spec, start in _shard(files, shard, problems):
            if indexed and indexed.get(name) != shard:
                extra.append((name, shard))
            elif name in entries:
                problems.append(f"{name} lies in two files: {entries[name].file} and {shard}")
            else:
                entries[name] = Entry(spec, shard, start)
    _extras(extra, indexed, follow_index, problems, notes)
    problems += [f"the index names {n} in {indexed[n]}, which lacks it" for n in folded_missing(indexed, entries)]
    stray = [n for n in names if _is_weights(n) and n not in shards]
    problems += [f"no index names the shard {n}; remove it or rebuild the index" for n in stray if n.startswith("model")]
    notes += [f"{n} is no part of the checkpoint (no index names it) and is left out" for n in stray if not n.startswith("model")]
    _raise(files, problems)
    if not entries:
        raise KconvError(f"{files.where} holds no tensors", hint="give the folder that holds the .safetensors files")
    manifest = _json(files, MANIFEST) if MANIFEST in names else None
    return Checkpoint(files, config, entries, shards, metadata, manifest, notes)


def folded_missing(indexed: dict[str, str], entries: dict[str, Entry]) -> list[str]:
    """Names that the index has and the shards lack (the first 20)."""
    return [n for n in indexed if n not in entries][:20]


def _unindexed(names: list[str]) -> list[str]:
    """Without an index: `model.safetensors` alone, as Transformers reads a folder, otherwise every weight file."""
    weights = [n for n in names if _is_weights(n)]
    return ["model.safetensors"] if "model.safetensors" in weights else weights


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors") and "/" not in name


def _raise(files: Files, problems: list[str]) -> None:
    if problems:
        raise Problems(f"{files.where} is not a sound checkpoint:", problems, hint="nothing was written; fetch or repair it")


def _refuse_pickles_only(files: Files, names: list[str], shards: list[str]) -> None:
    if shards:
        return
    pickles = [n for n in names if n.endswith(PICKLES)]
    if pickles:
        raise KconvError(
            f"{files.where} holds only pickle files ({', '.join(pickles[:4])}), which are never opened",
            hint="a pickle can run code; convert it to safetensors in an environment you trust",
        )
    raise KconvError(f"{files.where} holds no .safetensors file", hint="give the folder that holds the weights")


def _json(files: Files, name: str) -> dict[str, Any]:
    try:
        value = json.loads(files.read(name))
    except OSError as e:
        raise KconvError(f"cannot read {files.where}/{name}: {e.strerror}", hint="check its permissions") from e
    except ValueError as e:
        raise KconvError(f"{files.where}/{name} is not JSON: {e}", hint="fetch the file again") from e
    if not isinstance(value, dict):
        raise KconvError(f"{files.where}/{name} is not a JSON object")
    return value


def _indexed(files: Files, names: list[str], problems: list[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """The union of the groups' weight maps, checked, and the metadata of the main index."""
    merged: dict[str, str] = {}
    metadata: dict[str, Any] = {}
    for group in GROUPS:
        if index_name(group) not in names:
            continue
        index = _json(files, index_name(group))
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            problems.append(f"{index_name(group)} has no weight_map from tensor names to file names")
            continue
        if group == "model":
            metadata = index.get("metadata") or {}
        both = [n for n in weight_map if n in merged]
        problems += [f"{n} is named by two indexes" for n in both[:20]]
        problems += _bad_shards(files, names, index_name(group), set(weight_map.values()))
        merged.update(weight_map)
    return merged, metadata


def _bad_shards(files: Files, names: list[str], index: str, shards: Iterable[str]) -> list[str]:
    problems, missing = [], []
    for shard in sorted(shards):
        path = PurePosixPath(shard)
        if path.is_absolute() or "\\" in shard or len(path.parts) != 1 or shard in (".", ".."):
            problems.append(f"{index} names the file {shard!r}: only plain names inside the folder are allowed")
        elif not shard.endswith(".safetensors"):
            problems.append(f"{index} names {shard}, which is not a .safetensors file; pickle files are never opened")
        elif shard not in names:
            missing.append(shard)
        elif _leaves(files, shard):
            problems.append(f"{index} names {shard}, a link that leads out of the folder")
    if missing:
        present = sum(n.endswith(".safetensors") for n in names)
        stale = f" ({present} other .safetensors files are there: the index looks stale)" if present else ""
        problems.append(f"{index} names missing files: {', '.join(missing[:8])}{', ...' if len(missing) > 8 else ''}{stale}")
    return problems


def _leaves(files: Files, shard: str) -> bool:
    """Whether a local shard is a link out of its folder that is no content store's (the Hub cache links to blobs)."""
    path = getattr(files, "path", None)
    if path is None or not path(shard).is_symlink():
        return False
    target = path(shard).resolve()
    root = path(shard).parent.resolve()
    return not (target.is_relative_to(root) or (target.parent.name == "blobs" and target.parent.parent in root.parents))


def _shard(files: Files, shard: str, problems: list[str]) -> list[tuple[str, Spec, int]]:
    """Name, spec and absolute start of each tensor of a shard; appends what is wrong to `problems`."""
    size = files.size(shard)
    try:
        header, base = read_header(files, shard, size)
        found, at = [], 0
        rows = sorted((v["data_offsets"], n) for n, v in header.items() if n != "__metadata__")
        specs: dict[tuple, Spec] = {}
        for (start, end), name in rows:
            info = header[name]
            key = (info["dtype"], *info["shape"])
            spec = specs.setdefault(key, Spec(info["dtype"], tuple(info["shape"])))
            if spec.dtype not in BITS:
                raise ValueError(f"{name} has the unknown dtype {spec.dtype}")
            if start != at or end - start != spec.nbytes:
                raise ValueError(_offset_problem(name, spec, start, end, at))
            at = end
            found.append((name, spec, base + start))
    except (ValueError, TypeError, KeyError) as e:
        problems.append(f"{shard}: {e}")
        return []
    if base + at != size:
        what = "truncated" if base + at > size else "longer than its header says"
        problems.append(f"{shard} is {what}: {size:,} bytes on disk, {base + at:,} by its header")
    return found


def _offset_problem(name: str, spec: Spec, start: int, end: int, at: int) -> str:
    if end - start != spec.nbytes:
        return f"{name} ({spec}) needs {spec.nbytes:,} bytes, its header gives it {end - start:,}"
    return f"{name} {'overlaps its neighbour' if start < at else 'leaves a hole'} at data offset {min(start, at):,}"


def read_header(files: Files, shard: str, size: int) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file and the offset of its data; raises ValueError saying what is wrong."""
    if size < 8:
        raise ValueError(f"is {size} bytes, too short for a safetensors header")
    (length,) = struct.unpack("<Q", files.read(shard, 0, 8))
    if length > MAX_HEADER or length > size - 8:
        raise ValueError(f"declares a header of {length:,} bytes in a file of {size:,}: truncated or not safetensors")
    blob = files.read(shard, 8, length)
    try:
        header = json.loads(blob)
    except ValueError as e:
        raise ValueError(f"header is not JSON: {e}") from None
    if not isinstance(header, dict):
        raise ValueError("header is not a JSON object")
    if blob.count(b'"data_offsets"') > len(header) - ("__metadata__" in header):
        json.loads(blob, object_pairs_hook=_no_twins)
    return header, 8 + length


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"header names {key} twice")
        result[key] = value
    return result


def _extras(extra: list[tuple[str, str]], indexed: dict[str, str], follow: bool, problems: list[str], notes: list[str]) -> None:
    """Tensors that a shard holds and the index does not place there."""
    twins = [(n, s) for n, s in extra if n in indexed]
    unknown = [n for n, _ in extra if n not in indexed]
    problems += [f"the index does not name {line}" for line in folded(unknown)]
    if twins and follow:
        notes.append(f"{len(twins)} unindexed copies of tensors ignored, the index followed")
    elif twins:
        some = [f"{n} lies in two files: {indexed[n]} (by the index) and {s}" for n, s in twins[:20]]
        problems += [*some, "--follow-index reads each tensor from the file its index names"]
