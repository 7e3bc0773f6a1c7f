"""Digests of what a draft depends on, each in a named canonical form, computed from ranges.

| form | digest of |
|---|---|
| `rows-1` | a tensor: its rows in 16 runs of ceil(rows/16), sha256 of each run's bytes as stored; then sha256 over the line `rows-1 DTYPE d0xd1` and the 16 digests in hex, one a line |
| `weight-map-1` | an index: `json-1` of its `weight_map` |
| `files-1` | files: the lines `SHA256  PATH`, sorted by path |
| `tensors-1` | a checkpoint's tensors whatever files they lie in: the lines `SHA256  DTYPE d0xd1  NAME` sorted by NAME, the native one of a draft's tensor; SHA256 over the bytes |
| `spot-1` | up to 64 KiB from the middle of a tensor (offset a multiple of 64 bytes) |

The forms of JSON values, `json-1` and `keys-1`, are those of `kconv.text.canonical`. Sixteen runs make it possible to say where two tables differ: an edited token changes one run, another training all.
"""  # noqa: E501

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kconv.checkpoint.reading import Checkpoint, Entry
from kconv.storage.files import Files

RUNS = 16
SPOT = 64 * 1024
WORKERS = 4


def sha256_range(files: Files, name: str, offset: int, length: int) -> str:
    """sha256 of a range of a file, read in pieces."""
    digest = hashlib.sha256()
    for piece in files.stream(name, offset, length):
        digest.update(piece)
    return digest.hexdigest()


def row_runs(rows: int) -> list[tuple[int, int]]:
    """(first row, rows) of each run of `rows-1`; fewer than 16 for fewer rows."""
    step = -(-rows // RUNS) if rows else 1
    return [(first, min(step, rows - first)) for first in range(0, rows, step)]


def rows_digest(files: Files, entry: Entry) -> dict[str, Any]:
    """The `rows-1` digest of a stored tensor: dtype, shape, sha256, runs."""
    spec, shape = entry.spec, entry.spec.shape or (1,)
    runs = row_runs(shape[0])

    def one(run: tuple[int, int]) -> str:
        return sha256_range(files, entry.file, entry.start + run[0] * spec.row_bytes, run[1] * spec.row_bytes)

    with ThreadPoolExecutor(WORKERS) as pool:
        digests = list(pool.map(one, runs))
    made = {"form": "rows-1", "dtype": spec.dtype, "shape": list(spec.shape)}
    return made | {"sha256": runs_digest(spec.dtype, spec.shape, digests), "runs": digests}


def runs_digest(dtype: str, shape: Sequence[int], runs: Sequence[str]) -> str:
    """The sha256 of `rows-1` from the digests of its runs."""
    head = f"rows-1 {dtype} {'x'.join(map(str, shape))}"
    return hashlib.sha256("\n".join([head, *runs, ""]).encode()).hexdigest()


def row_digest(files: Files, entry: Entry, row: int) -> str:
    """sha256 of one row's bytes."""
    return sha256_range(files, entry.file, entry.start + row * entry.spec.row_bytes, entry.spec.row_bytes)


def spot_digest(files: Files, entry: Entry) -> str:
    """The `spot-1` digest of a stored tensor."""
    middle = entry.spec.nbytes // 2 // 64 * 64
    return sha256_range(files, entry.file, entry.start + middle, min(SPOT, entry.spec.nbytes - middle))


def tensors_digest(checkpoint: Checkpoint, names: Mapping[str, str]) -> str:
    """The `tensors-1` digest of a (small) checkpoint; `names` maps its tensors' names to native ones, if they differ."""

    def line(name: str) -> str:
        entry = checkpoint.entries[name]
        digest = sha256_range(checkpoint.files, entry.file, entry.start, entry.spec.nbytes)
        return f"{digest}  {entry.spec.dtype} {'x'.join(map(str, entry.spec.shape))}  {names.get(name, name)}\n"

    with ThreadPoolExecutor(WORKERS) as pool:
        lines = list(pool.map(line, sorted(checkpoint.entries, key=lambda n: names.get(n, n))))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def files_digest(hashes: Mapping[str, str]) -> str:
    """The `files-1` digest of path -> sha256."""
    return hashlib.sha256("".join(f"{hashes[p]}  {p}\n" for p in sorted(hashes)).encode()).hexdigest()


def differing_runs(a: Iterable[str], b: Iterable[str], rows: int) -> list[str]:
    """The row ranges in which two `rows-1` digests differ, in words."""
    spans = row_runs(rows)
    return [f"{first}-{first + n - 1}" for (first, n), x, y in zip(spans, a, b, strict=False) if x != y]
