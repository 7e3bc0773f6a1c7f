"""Mutations of a safetensors file: its header as JSON, its data as bytes.

| edit | what |
|---|---|
| a row of the header | dtype, shape, offsets; removed, renamed, given another row's place |
| the header as a JSON text | whatever `edits_json` does; metadata that is no map of texts |
| the data | a byte, a run of 0xff, a cut, bytes behind the end, a tensor more |
| the length | one that is not the header's |
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.edits_json import dumped, edit_text, strange

DTYPES = ("BF16", "F16", "F32", "F64", "U8", "I8", "I16", "I32", "I64", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "C64",
          "X9", "")  # fmt: skip


def split(path: Path) -> tuple[bytes, bytes]:
    """The header's text and the data of a safetensors file; short files give what there is."""
    blob = path.read_bytes()
    length = struct.unpack("<Q", blob[:8])[0] if len(blob) >= 8 else 0
    return blob[8 : 8 + length], blob[8 + length :]


def join(path: Path, header: bytes, data: bytes, length: int | None = None) -> None:
    """Write such a file, with the length it should declare."""
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)


def edit_shard(path: Path, rng: Random, decoy: Path) -> str:
    """Mutate one safetensors file in place; what was done."""
    header, data = split(path)
    try:
        rows = json.loads(header)
        name = rng.choice([n for n in rows if n != "__metadata__"])
        said, data = rng.choice(EDITS)(rows, name, data, rng, decoy)
    except (ValueError, IndexError, KeyError, TypeError, RecursionError):  # an earlier edit left no header to edit
        path.write_bytes(path.read_bytes()[: rng.randrange(64)])
        return "cut"
    text = dumped(rows)
    if said == "header":
        text, said = edit_text(header, rng, decoy)
    if rng.random() < 0.8:
        text += b" " * (-len(text) % 8)
    length = rng.choice([0, 1, 2**63, 2**64 - 1, len(text) - 1, len(text) + 8, 10**9]) if said == "length" else None
    join(path, text, data, length)
    return f"{name}: {said}"


def _dtype(rows: Any, name: str, data: bytes, rng: Random, decoy: Path) -> tuple[str, bytes]:
    rows[name]["dtype"] = rng.choice([*DTYPES, rng.choice(strange(decoy))])
    return f"dtype {rows[name]['dtype']!r:.40}", data


def _shape(rows: Any, name: str, data: bytes, rng: Random, decoy: Path) -> tuple[str, bytes]:
    old = list(rows[name]["shape"])
    made: list[Any] = [old[::-1], [*old, 1], [1, *old], old[:-1], [2**62, 4], [0], [], [-1, -1], [1] * 40_000, [2**64],
                       [1.0, 2], rng.choice(strange(decoy)), [old[0] * 2, *old[1:]] if old else [2]]  # fmt: skip
    rows[name]["shape"] = rng.choice(made)
    return f"shape {rows[name]['shape']!r:.40}", data


def _offsets(rows: Any, name: str, data: bytes, rng: Random, decoy: Path) -> tuple[str, bytes]:
    start, end = rows[name]["data_offsets"]
    made: list[Any] = [[start + 1, end + 1], [start, end - 1], [end, start], [start, end + len(data)], [-8, end], [start],
                       [2**63, 2**64], [0, end - start], [start, end, end], rng.choice(strange(decoy))]  # fmt: skip
    rows[name]["data_offsets"] = rng.choice(made)
    return f"offsets {rows[name]['data_offsets']!r:.40}", data


def _remove(rows: Any, name: str, data: bytes, rng: Random, _decoy: Path) -> tuple[str, bytes]:
    """A tensor and, mostly, its bytes are gone."""
    start, end = rows.pop(name)["data_offsets"]
    if rng.random() < 0.8:
        for row in (r for n, r in rows.items() if n != "__metadata__"):
            row["data_offsets"] = [at - (end - start) if at >= end else at for at in row["data_offsets"]]
        data = data[:start] + data[end:]
    return "removed", data


def _rename(rows: Any, name: str, data: bytes, rng: Random, decoy: Path) -> tuple[str, bytes]:
    other = rng.choice(list(rows))
    new = rng.choice([name + "x", name.upper(), name.replace("model", "modle"), "\ud800", "\x1b[31mred\n", "", str(decoy), other])
    rows[new] = rows.pop(name)
    return f"called {new!r:.60}", data


def _extra(rows: Any, name: str, data: bytes, rng: Random, _decoy: Path) -> tuple[str, bytes]:
    new = rng.choice(["extra.weight", name + "_scale", name.replace(".", "_"), "model.layers.999.x", "\x07bell"])
    rows[new] = {"dtype": "F32", "shape": [2, 2], "data_offsets": [len(data), len(data) + 16]}
    return f"a tensor more: {new!r}", data + bytes(16)


def _values(rows: Any, name: str, data: bytes, rng: Random, _decoy: Path) -> tuple[str, bytes]:
    start, end = rows[name]["data_offsets"]
    run = min(end - start, rng.choice([1, 1, 2, 64, 10_000]))
    at = rng.randrange(start, max(start + 1, end - run + 1))
    fill = rng.choice([b"\xff", b"\0", b"\x7f", b"\x80", bytes([rng.randrange(256)])])
    return f"{run} bytes at {at - start} become {fill!r}", data[:at] + fill * run + data[at + run :]


def _cut(_rows: Any, _name: str, data: bytes, rng: Random, _decoy: Path) -> tuple[str, bytes]:
    return "data cut", data[: rng.randrange(len(data))] if rng.random() < 0.5 else data[:-1]


def _longer(_rows: Any, _name: str, data: bytes, rng: Random, _decoy: Path) -> tuple[str, bytes]:
    return "bytes behind the end", data + bytes(rng.choice([1, 8, 4096]))


def _metadata(rows: Any, _name: str, data: bytes, rng: Random, decoy: Path) -> tuple[str, bytes]:
    rows["__metadata__"] = rng.choice([{"format": rng.choice(strange(decoy))}, rng.choice(strange(decoy)), {"format": "tf"}])
    return f"metadata {rows['__metadata__']!r:.40}", data


def _header(_rows: Any, _name: str, data: bytes, _rng: Random, _decoy: Path) -> tuple[str, bytes]:
    return "header", data


def _length(_rows: Any, _name: str, data: bytes, _rng: Random, _decoy: Path) -> tuple[str, bytes]:
    return "length", data


Edit = Callable[[Any, str, bytes, Random, Path], tuple[str, bytes]]
EDITS: list[Edit] = [_dtype, _shape, _offsets, _remove, _rename, _extra, _values, _values, _values, _cut, _longer, _metadata,
                     _header, _header, _length]  # fmt: skip
