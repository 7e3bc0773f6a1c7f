"""Shards whose header or size cannot be: refused with the file, the tensor and the numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.builders import data_of, header_of, raw_shard, shard_name, small_k3
from tests.cli.refusing import refused

FIRST = shard_name(1, 2)
Header = dict[str, Any]


@pytest.fixture
def src(tmp_path: Path) -> Path:
    return small_k3().write(tmp_path / "src")


def in_order(header: Header) -> list[str]:
    """Tensor names by their place in the file."""
    return sorted((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"])


def rewrite(src: Path, change: Callable[[Header, list[str]], object], data: bytes = b"") -> str:
    """Change a header in place, put `data` before the tensors' bytes; returns the first tensor's name."""
    header, body = header_of(src / FIRST), data_of(src / FIRST)
    names = in_order(header)
    change(header, names)
    raw_shard(src / FIRST, header, data + body)
    return names[0]


def refusal(src: Path) -> str:
    message = refused(src, src.parent / "out")
    assert FIRST in message
    assert "fetch the named files again" in message
    return message


def test_truncated_shard(src: Path) -> None:
    whole = (src / FIRST).read_bytes()
    (src / FIRST).write_bytes(whole[:-100])
    message = refusal(src)
    assert f"{FIRST} is truncated: {len(whole) - 100:,} bytes on disk, {len(whole):,} by its header" in message
    assert f"the first is {in_order(header_of(src / FIRST))[-1]}" in message


def test_shard_cut_inside_its_header(src: Path) -> None:
    (src / FIRST).write_bytes((src / FIRST).read_bytes()[:1000])
    assert "in a file of 1,000: truncated, or no safetensors file" in refusal(src)


def test_bytes_appended_to_a_shard(src: Path) -> None:
    whole = (src / FIRST).read_bytes()
    (src / FIRST).write_bytes(whole + b"x" * 100)
    message = refusal(src)
    assert f"{FIRST} is longer than its header says" in message
    assert f"{len(whole) + 100:,} bytes on disk, {len(whole):,} by its header" in message


@pytest.mark.parametrize("size", [0, 7])
def test_file_too_short_for_a_header(size: int, src: Path) -> None:
    (src / FIRST).write_bytes(b"x" * size)
    assert f"{FIRST}: {size} bytes are too short for a safetensors header" in refusal(src)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001, 11])
def test_absurd_header_length(length: int, src: Path) -> None:
    raw_shard(src / FIRST, b"{}", b"12345678", length=length)
    assert f"declares a header of {length:,} bytes in a file of 18" in refusal(src)


def test_overlapping_tensors(src: Path) -> None:
    def overlap(header: Header, names: list[str]) -> None:
        first, second = (header[n]["data_offsets"] for n in names[:2])
        header[names[1]]["data_offsets"] = [first[1] - 4, second[1] - 4]

    second = in_order(header_of(src / FIRST))[1]
    rewrite(src, overlap)
    assert f"tensor {second} overlaps its neighbour at data offset 508" in refusal(src)


def test_hole_between_tensors(src: Path) -> None:
    def shift(header: Header, names: list[str]) -> None:
        for name in names:
            header[name]["data_offsets"] = [x + 8 for x in header[name]["data_offsets"]]

    name = rewrite(src, shift, data=b"12345678")
    assert f"tensor {name} leaves a hole before it at data offset 0" in refusal(src)


def test_last_tensor_overruns_the_file(src: Path) -> None:
    def lengthen(header: Header, names: list[str]) -> None:
        last = header[names[-1]]
        row = last["data_offsets"][1] - last["data_offsets"][0]
        last["shape"] = [2 * last["shape"][0], *last["shape"][1:]]
        last["data_offsets"][1] += row

    rewrite(src, lengthen)
    assert f"{FIRST} is truncated" in refusal(src)


def test_bytes_that_disagree_with_dtype_and_shape(src: Path) -> None:
    name = rewrite(src, lambda header, names: header[names[0]].update(dtype="F64"))
    assert f"tensor {name} (F64 [128]) needs 1,024 bytes, its header gives it 512" in refusal(src)


def test_name_twice_in_a_header(src: Path) -> None:
    header, data = header_of(src / FIRST), data_of(src / FIRST)
    name = in_order(header)[0]
    twice = json.dumps(header)[:-1] + ", " + json.dumps({name: header[name]})[1:]
    raw_shard(src / FIRST, twice.encode(), data)
    assert f"{FIRST}: header names {name} twice" in refusal(src)


@pytest.mark.parametrize("change, said", [
    ({"dtype": "F6_E2M3"}, "has the unknown dtype 'F6_E2M3'"),
    ({"dtype": None}, "has the unknown dtype None"),
    ({"dtype": ["F32"]}, "has the unknown dtype ['F32']"),
    ({"shape": [-128, -1]}, "has the impossible shape [-128, -1]"),
    ({"shape": [2**70]}, "has the impossible shape"),
    ({"shape": [127.5]}, "has the shape [127.5], which is no list of counts"),
    ({"shape": "128"}, "has the shape '128', which is no list of counts"),
    ({"shape": [[128]]}, "which is no list of counts"),
    ({"dtype": "F4", "shape": [32, 31]}, "its last axis holds an odd number of 4-bit codes"),
    ({"data_offsets": [0]}, "has no pair of data_offsets"),
    ({"data_offsets": None}, "has no pair of data_offsets"),
    ({"data_offsets": [0.0, 512.0]}, "has data_offsets that are no byte counts: 0.0, 512.0"),
    ({"data_offsets": ["0", "512"]}, "has data_offsets that are no byte counts"),
])  # fmt: skip
def test_entry_that_describes_no_tensor(change: Header, said: str, src: Path) -> None:
    name = rewrite(src, lambda header, names: header[names[0]].update(change))
    message = refusal(src)
    assert f"{FIRST}: tensor {name}" in message
    assert said in message


@pytest.mark.parametrize("entry", [7, None, [], "x", {}])
def test_entry_that_is_no_object(entry: Any, src: Path) -> None:
    name = rewrite(src, lambda header, names: header.__setitem__(names[0], entry))
    assert f"tensor {name} has no pair of data_offsets" in refusal(src)


@pytest.mark.parametrize("header", [b"[1]", b"{x", b"\xff\xfe{}", b"[" * 100_000, b'{"a":' * 100_000, b"", b"null"])
def test_header_that_is_no_json_object(header: bytes, src: Path) -> None:
    raw_shard(src / FIRST, header, b"")
    assert f"{FIRST}: header is not" in refusal(src)


def test_all_shards_are_reported_at_once(src: Path) -> None:
    for i in (1, 2):
        path = src / shard_name(i, 2)
        path.write_bytes(path.read_bytes()[:-1])
    message = refused(src, src.parent / "out")
    assert f"{shard_name(1, 2)} is truncated" in message
    assert f"{shard_name(2, 2)} is truncated" in message
