"""JSON from outside is refused where readers would disagree about it, and before it costs memory or time."""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kconv.checkpoint.headers import MAX_HEADER, read_tensors
from kconv.checkpoint.reading import open_checkpoint
from kconv.engine.out_files import lay_out
from kconv.errors import KconvError, Problems
from kconv.planning.edges import Target
from kconv.spec import Spec
from kconv.storage import json_text
from kconv.storage.files import LocalFiles
from tests.builders import small_k3

ROW = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def shard(folder: Path, blob: bytes, data: bytes = bytes(4)) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(blob)) + blob + data)
    return folder


def header(folder: Path, blob: bytes) -> Any:
    return read_tensors(LocalFiles(shard(folder, blob)), "model.safetensors")


def table(**changes: Any) -> bytes:
    return json.dumps({"a": ROW | changes}).encode()


@pytest.mark.parametrize(("blob", "said"), [
    (b'{"a": 1, "a": 2}', "names a twice"),
    (b'{"x": [{"a": ":", "b": 1, "a": 2}]}', "names a twice"),
    (b'{"x": {"a\\u001b": 1, "a\\u001b": 2}}', "names a\\x1b twice"),
    ('{"a": 1}'.encode("utf-16"), "no UTF-8 text"),
    (b"\xef\xbb\xbf{}", "not JSON"),
    (b'{"a": "\xff"}', "no UTF-8 text at byte 7"),
    (b'{"a": "\\ud800"}', r"half of a surrogate pair"),
    (b'{"\\udfff": 1}', r"half of a surrogate pair"),
    (b'{"a":' + b"[" * 200 + b"]" * 200 + b"}", "nested deeper than 100"),
    (b'{"a":' + b"[" * 100_000, "nested without end"),
    (b"[]", "not a JSON object"),
    (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
])  # fmt: skip
def test_what_is_no_plain_object_is_refused_with_its_reason(blob: bytes, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        json_text.parse(blob, "x.json")
    assert said in str(caught.value)


def test_whole_pairs_and_ordinary_depth_are_read() -> None:
    text = '{"a": "\\ud83d\\ude00é", "b": ' + "[" * 90 + "]" * 90 + "}"
    assert json_text.parse(text.encode(), "x.json")["a"] == "\U0001f600é"


def test_a_key_twice_among_many_is_found_in_linear_time() -> None:
    """Half a million names: the pairwise comparison would take hours, and this test is then never done."""
    names = ",".join(f'"n{i}":0' for i in range(500_000))
    with pytest.raises(ValueError, match="names n499999 twice"):
        json_text.parse(f'{{{names},"n499999":0}}'.encode(), "x.json")


@pytest.mark.parametrize(("blob", "said"), [
    (table().decode().encode("utf-32-le"), "header is not JSON"),
    (table().decode().encode("utf-16"), "header is not JSON"),
    (b" " + table(), "header is not JSON that begins with {"),
    (b'{"__metadata__": {"format": 1}, ' + table()[1:], "__metadata__"),
    (b'{"__metadata__": "pt", ' + table()[1:], "__metadata__"),
    (table()[:-2] + b', "dtype": "I32"}}', "names dtype twice"),
    (table()[:-2] + b', "sh\\u0061pe": [1]}}', "names shape twice"),
    (table().replace(b'"a"', b'"a\\u001b]0;x\\u0007"'), "a\\x1b]0;x\\x07 holds control characters"),
    (table().replace(b'"a"', b'"a\\nerror: b"'), "a\\nerror: b holds control characters"),
    (table().replace(b'"a"', b'"\\ud800"'), "half of a surrogate pair"),
    (table(shape=[1] * 40_000), "has 40,000 axes, more than 64"),
    (table(shape=[2**61] * 40_000), "has 40,000 axes, more than 64"),
])  # fmt: skip
def test_a_header_that_the_safetensors_library_would_not_read_is_refused(tmp_path: Path, blob: bytes, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        header(tmp_path / "src", blob)
    assert said in str(caught.value)
    with pytest.raises(Problems):
        open_checkpoint(tmp_path / "src")


@pytest.mark.parametrize("shape", [[True], [1.0], "", {}], ids=str)
def test_a_shape_that_equals_one_before_it_and_is_no_list_of_counts_is_refused(tmp_path: Path, shape: Any) -> None:
    before = {"a": ROW, "b": ROW | {"shape": [], "data_offsets": [4, 8]}}
    blob = json.dumps(before | {"c": ROW | {"shape": shape, "data_offsets": [8, 12]}}).encode()
    source = LocalFiles(shard(tmp_path / "src", blob, bytes(12)))
    with pytest.raises(ValueError, match=r"tensor c has the shape .*, which is no list of counts"):
        read_tensors(source, "model.safetensors")


def test_a_header_over_the_limit_is_called_too_long_and_not_truncated(tmp_path: Path) -> None:
    file = shard(tmp_path / "src", b"") / "model.safetensors"
    file.write_bytes(struct.pack("<Q", MAX_HEADER + 1))
    os.truncate(file, MAX_HEADER + 100)
    with pytest.raises(Problems) as caught:
        open_checkpoint(tmp_path / "src")
    assert "has a header of 100,000,001 bytes; safetensors allows 100,000,000" in str(caught.value)
    assert "truncated" not in str(caught.value)


def test_a_header_of_lists_is_refused_before_it_is_built(tmp_path: Path) -> None:
    listed = b'{"a": ' + json.dumps(ROW).encode() + b', "b": [' + b"[]," * 13_000_000 + b"[]]}"
    source = shard(tmp_path / "src", listed)

    def bound() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (800 << 20, 800 << 20))

    code = "import sys; from kconv.checkpoint.headers import read_tensors; from kconv.storage.files import LocalFiles; "
    code += "read_tensors(LocalFiles(sys.argv[1]), 'model.safetensors')"
    command = [sys.executable, "-c", code, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=bound, timeout=120)
    assert "holds other structures than a table of tensors" in done.stderr


def test_no_output_is_planned_whose_header_nobody_could_read() -> None:
    targets = {f"{i:03}" + "n" * 1_000_000: Target(Spec("F32", (1,)), "model", 0) for i in range(101)}
    with pytest.raises(KconvError, match=r"would have a header of 101,\d+,\d+ bytes .*\n  next: a smaller --shard-size"):
        lay_out(targets, 1 << 30)
    assert len(lay_out(targets, 4 * 60)) == 2


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "kconv.json"])
def test_a_json_file_of_gigabytes_is_refused_without_being_read(tmp_path: Path, name: str) -> None:
    small_k3().write(tmp_path / "src")
    (tmp_path / "src" / name).touch()
    os.truncate(tmp_path / "src" / name, 2 << 30)
    limit = 1 << 30

    def bound() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    command = [sys.executable, "-m", "kconv", "plan", str(tmp_path / "src"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=bound, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "has 2,147,483,648 bytes" in json.loads(done.stdout)["error"]["message"]


@pytest.mark.parametrize("name", [b"a\xff.txt", b"a\n.txt", b"a\x1b[2J.txt"])
def test_a_file_whose_name_no_manifest_can_hold_is_named_and_refused(tmp_path: Path, name: bytes) -> None:
    source = small_k3().write(tmp_path / "src")
    (Path(os.fsdecode(os.fsencode(source) + b"/" + name))).write_text("x")
    done = subprocess.run([sys.executable, "-m", "kconv", "plan", str(source)], capture_output=True, timeout=120)
    assert done.returncode == 2
    assert b"rename or remove" in done.stderr
    assert b"\x1b[2J" not in done.stderr
