"""The header of a safetensors file, read with two reads and believed in nothing.

| checked | refused when |
|---|---|
| length | longer than 100 MB or than the file |
| JSON | not an object, not UTF-8, nested without end, a name twice, `__metadata__` that is no map of texts |
| each name | it holds control characters |
| each tensor | unknown dtype, a shape that is no list of counts, odd 4-bit codes, bytes that differ from dtype x shape |
| all of them | they overlap, leave holes, or do not end where the file ends |
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kconv.spec import BITS, Spec
from kconv.storage import json_text
from kconv.storage.direct import PAGE
from kconv.storage.files import Files
from kconv.text.printable import hidden, printable

MAX_HEADER = 100_000_000
COUNTED = 16 << 20  # a longer header is counted before it is parsed: empty lists take thirty times their text as objects
SPARE = 100_000
MAX_DIMENSION = 1 << 62
MAX_AXES = 64
Seen = dict[tuple[Any, ...], Spec]
KEYS = (b"dtype", b"shape", b"data_offsets")

PAGED = 64 << 10
"""Bytes of tensors from which the first begins on a page of the file, for direct writes."""


@dataclass
class Header:
    """A file's tensors in the order of their data: (name, spec, absolute start); `problem` when the file's size is wrong."""

    tensors: list[tuple[str, Spec, int]] = field(default_factory=list)
    problem: str = ""


def read_tensors(files: Files, shard: str, seen: Seen | None = None) -> Header:
    """The tensors of a file; raises ValueError saying what is wrong where its header cannot be trusted.

    `seen` holds the specs of the files before, so that equal specs of a checkpoint are one object.
    """
    size = files.size(shard)
    header, base = read_header(files, shard, size)
    _check_names(header)
    header.pop("__metadata__", None)
    found, at = Header(), 0
    specs = {} if seen is None else seen
    sizes: dict[int, int] = {}
    for start, end, name in _rows(header):
        spec = _spec(name, header[name], specs)
        size_of = sizes.get(id(spec))
        if size_of is None:
            size_of = sizes[id(spec)] = spec.nbytes
        if start != at or end - start != size_of:
            raise ValueError(_offset_problem(name, spec, start, end, at))
        at = end
        found.tensors.append((name, spec, base + start))
    if base + at != size:
        found.problem = _size_problem(found.tensors, size, base + at)
    return found


def _check_names(header: dict[str, Any]) -> None:
    for name in hidden(header)[:1]:
        raise ValueError(f"the name of tensor {printable(name)} holds control characters")


def _rows(header: dict[str, Any]) -> list[tuple[int, int, str]]:
    """(start, end, name) of every tensor, in the order of their data."""
    rows = []
    for name, info in header.items():
        try:
            start, end = info["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise ValueError(f"tensor {name} has no pair of data_offsets") from None
        if type(start) is not int or type(end) is not int:
            raise ValueError(f"tensor {name} has data_offsets that are no byte counts: {start!r}, {end!r}")
        rows.append((start, end, name))
    rows.sort()
    return rows


def _spec(name: str, info: dict[str, Any], seen: Seen) -> Spec:
    shape = info.get("shape")
    if type(shape) is not list or len(shape) > MAX_AXES:
        return _checked_spec(name, info.get("dtype"), shape)
    key = (info.get("dtype"), *shape, *map(type, shape))  # True and 1.0 equal 1, and are no counts
    try:
        return seen[key]
    except (KeyError, TypeError):
        spec = seen[key] = _checked_spec(name, info.get("dtype"), shape)
    return spec


def _checked_spec(name: str, dtype: Any, shape: Any) -> Spec:
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"tensor {name} has the unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(type(n) is int for n in shape[:MAX_AXES]):
        raise ValueError(f"tensor {name} has the shape {repr(shape)[:200]}, which is no list of counts")
    if len(shape) > MAX_AXES:
        raise ValueError(f"tensor {name} has {len(shape):,} axes, more than {MAX_AXES}")
    if not all(0 <= n < MAX_DIMENSION for n in shape):
        raise ValueError(f"tensor {name} has the impossible shape {shape}")
    if dtype == "F4" and (not shape or shape[-1] % 2):
        raise ValueError(f"tensor {name} is F4 {shape}: its last axis holds an odd number of 4-bit codes")
    return Spec(dtype, tuple(shape))


def _offset_problem(name: str, spec: Spec, start: int, end: int, at: int) -> str:
    if end - start != spec.nbytes:
        return f"tensor {name} ({spec}) needs {spec.nbytes:,} bytes, its header gives it {end - start:,}"
    what = "overlaps its neighbour" if start < at else "leaves a hole before it"
    return f"tensor {name} {what} at data offset {min(start, at):,}"


def _size_problem(tensors: list[tuple[str, Spec, int]], size: int, wanted: int) -> str:
    if wanted < size:
        return f"is longer than its header says: {size:,} bytes on disk, {wanted:,} by its header"
    cut = [name for name, spec, start in tensors if start + spec.nbytes > size]
    return (
        f"is truncated: {size:,} bytes on disk, {wanted:,} by its header; "
        f"{len(cut)} of its {len(tensors)} tensors are cut off, the first is {cut[0]}"
    )


def read_header(files: Files, shard: str, size: int) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file and the offset of its data; raises ValueError saying what is wrong."""
    if size < 8:
        raise ValueError(f"{size} bytes are too short for a safetensors header")
    (length,) = struct.unpack("<Q", files.read(shard, 0, 8))
    if length > size - 8:
        raise ValueError(f"declares a header of {length:,} bytes in a file of {size:,}: truncated, or no safetensors file")
    if length > MAX_HEADER:
        raise ValueError(f"has a header of {length:,} bytes; safetensors allows {MAX_HEADER:,}, and no reader takes more")
    blob = files.read(shard, 8, length)
    if blob[:1] != b"{":
        raise ValueError("header is not JSON that begins with {")
    if length > COUNTED and _is_no_table(blob):
        raise ValueError(f"has a header of {length:,} bytes that holds other structures than a table of tensors")
    header = json_text.parse(blob, "header", unique=False)
    tensors = len(header) - ("__metadata__" in header)
    if b"\\u" in blob or any(blob.count(b'"%b"' % key) != tensors for key in KEYS):
        json_text.parse(blob, "header")  # a name or a key may be there twice, which this says
    _check_metadata(header.get("__metadata__", {}))
    return header, 8 + length


def _is_no_table(blob: bytes) -> bool:
    """Whether a header has more objects or lists than its tensors account for; text in metadata may hold a few."""
    tensors = blob.count(b'"data_offsets"')
    return blob.count(b"{") > tensors + SPARE or blob.count(b"[") > 2 * tensors + SPARE


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("header has a __metadata__ that does not lead from texts to texts")


@dataclass(frozen=True, slots=True)
class OutFile:
    """One output file: its header bytes, its whole size, and where each tensor starts (absolute)."""

    name: str
    group: str
    header: bytes
    size: int
    starts: dict[str, int]


def safetensors_header(specs: Mapping[str, Spec], metadata: Mapping[str, str] | None = None) -> tuple[bytes, dict[str, int]]:
    """The header of a safetensors file that holds `specs` in this order, and each tensor's absolute start."""
    table: dict[str, object] = {"__metadata__": dict(metadata or {"format": "pt"})}
    at = 0
    for name, spec in specs.items():
        table[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [at, at + spec.nbytes]}
        at += spec.nbytes
    blob = json.dumps(table, separators=(",", ":")).encode()
    blob += b" " * ((-len(blob) - 8) % (PAGE if at >= PAGED else 8))
    base = 8 + len(blob)
    starts, at = {}, base
    for name, spec in specs.items():
        starts[name] = at
        at += spec.nbytes
    return struct.pack("<Q", len(blob)) + blob, starts
