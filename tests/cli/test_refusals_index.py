"""Indexes that do not belong to their shards, or lead out of the folder: refused before a shard is opened."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.builders import load_all, read_index, shard_name, small_k3, write_index
from tests.cli.refusing import done, error_of, refused, run

HEAD = "language_model.lm_head.weight"
FIRST, SECOND = shard_name(1, 2), shard_name(2, 2)
INDEX = "model.safetensors.index.json"


@pytest.fixture
def src(tmp_path: Path) -> Path:
    return small_k3().write(tmp_path / "src")


def edit(src: Path, change: Callable[[dict[str, str]], object]) -> None:
    files = read_index(src)
    change(files)
    write_index(src, files)


def move(src: Path, name: str, source: str, target: str, *, keep: bool = False) -> None:
    """Move (or copy) a tensor from one shard to another, leaving the index as it is."""
    there, here = load_file(src / source), load_file(src / target)
    here[name] = there[name] if keep else there.pop(name)
    for file, tensors in ((source, there), (target, here)):
        save_file(tensors, src / file)


def test_index_names_a_missing_file(src: Path, tmp_path: Path) -> None:
    edit(src, lambda files: files.__setitem__(HEAD, "gone.safetensors"))
    message = refused(src, tmp_path / "out")
    assert f"{INDEX} names a file that is not there: gone.safetensors" in message
    assert "fetch the named files again" in message


def test_shard_was_not_fetched(src: Path, tmp_path: Path) -> None:
    (src / SECOND).unlink()
    assert f"{INDEX} names a file that is not there: {SECOND}" in refused(src, tmp_path / "out")


def test_index_of_shards_under_other_names_looks_stale(src: Path, tmp_path: Path) -> None:
    edit(src, lambda files: files.update({n: f"old-{f}" for n, f in files.items()}))
    message = refused(src, tmp_path / "out")
    assert f"{INDEX} names 2 files that are not there: old-{FIRST}, old-{SECOND}" in message
    assert f"other .safetensors files are ({FIRST}, {SECOND}): the index looks stale" in message
    assert "or remove it: the shards are then read by their own headers" in message


def test_removing_a_stale_index_reads_the_headers(src: Path, tmp_path: Path) -> None:
    done("convert", src, tmp_path / "right")
    (src / INDEX).unlink()
    done("convert", src, tmp_path / "rebuilt")
    assert read_index(tmp_path / "rebuilt") == read_index(tmp_path / "right")
    done("verify", tmp_path / "rebuilt", "--source", src)


def test_index_names_a_tensor_that_its_shard_lacks(src: Path, tmp_path: Path) -> None:
    edit(src, lambda files: files.__setitem__("nowhere", FIRST))
    assert f"the index names nowhere in {FIRST}, which lacks it" in refused(src, tmp_path / "out")


def test_index_places_a_tensor_in_another_shard(src: Path, tmp_path: Path) -> None:
    edit(src, lambda files: files.update({HEAD: SECOND, "nowhere": SECOND}))
    message = refused(src, tmp_path / "out")
    assert f"the index places {HEAD} in {SECOND}, but it lies in {FIRST}" in message
    assert f"the index names nowhere in {SECOND}, which lacks it" in message


def test_shard_holds_a_tensor_that_the_index_does_not_name(src: Path, tmp_path: Path) -> None:
    edit(src, lambda files: files.pop(HEAD))
    assert f"the index does not name {HEAD}, which lies in {FIRST}" in refused(src, tmp_path / "out")


def test_shard_that_no_index_names(src: Path, tmp_path: Path) -> None:
    save_file({"stray": torch.zeros(2)}, src / "model-00003-of-00003.safetensors")
    message = refused(src, tmp_path / "out")
    assert f"model-00003-of-00003.safetensors lies beside {FIRST}, {SECOND}, but no index names it" in message


@pytest.mark.parametrize("unsafe", [
    "../other/model.safetensors", "/tmp/x.safetensors", "sub/../../x.safetensors", "sub/x.safetensors", "..", "", ".",
    "..\\x.safetensors", "x\0.safetensors", "https://example.com/x.safetensors",
])  # fmt: skip
def test_index_entry_outside_the_folder(unsafe: str, src: Path, tmp_path: Path) -> None:
    outside = tmp_path / "other"
    outside.mkdir()
    save_file({HEAD: torch.zeros(2)}, outside / "model.safetensors")
    edit(src, lambda files: files.__setitem__(HEAD, unsafe))
    message = refused(src, tmp_path / "out")
    assert f"{INDEX} names the file {unsafe!r}: only plain names inside the folder are allowed" in message
    assert "do not trust" in message


def test_index_entry_that_is_a_pickle(src: Path, tmp_path: Path) -> None:
    (src / "pytorch_model.bin").write_bytes(b"never read")
    edit(src, lambda files: files.__setitem__(HEAD, "pytorch_model.bin"))
    message = refused(src, tmp_path / "out")
    assert "names pytorch_model.bin, which is no .safetensors file; pickle files are never opened" in message


def test_index_entry_that_is_a_folder(src: Path, tmp_path: Path) -> None:
    (src / SECOND).unlink()
    (src / SECOND).mkdir()
    assert f"{INDEX} names {SECOND}, which is a folder" in refused(src, tmp_path / "out")


def test_shard_that_is_a_link_out_of_the_folder(src: Path, tmp_path: Path) -> None:
    outside = tmp_path / "elsewhere.safetensors"
    os.rename(src / FIRST, outside)
    os.symlink(outside, src / FIRST)
    message = refused(src, tmp_path / "out")
    assert f"{FIRST} is a link that leads out of the folder, to {outside}" in message
    assert "copy the file into the folder" in message
    (src / INDEX).unlink()
    assert f"{FIRST} is a link that leads out of the folder" in refused(src, tmp_path / "out")


@pytest.mark.parametrize("content", [
    "{", "[]", "3", '{"weight_map": []}', '{"weight_map": {}}', "{}", '{"weight_map": {"a": 3}}',
])  # fmt: skip
def test_index_that_is_none(content: str, src: Path, tmp_path: Path) -> None:
    (src / INDEX).write_text(content)
    assert INDEX in refused(src, tmp_path / "out")


def test_index_that_names_a_tensor_twice(src: Path, tmp_path: Path) -> None:
    text = json.dumps({"weight_map": read_index(src)})
    (src / INDEX).write_text(text.replace('"weight_map": {', f'"weight_map": {{"{HEAD}": "{SECOND}", '))
    assert f"{INDEX} names {HEAD} twice" in refused(src, tmp_path / "out")


def test_same_name_in_two_shards_without_an_index(src: Path, tmp_path: Path) -> None:
    move(src, HEAD, FIRST, SECOND, keep=True)
    (src / INDEX).unlink()
    message = refused(src, tmp_path / "out")
    assert f"{HEAD} lies in two files: {FIRST} and {SECOND}" in message
    assert "remove the file that does not belong" in message
    assert f"{HEAD} lies in two files" in refused(src, tmp_path / "out", "--follow-index")


def test_same_name_in_two_shards_with_an_index(src: Path, tmp_path: Path) -> None:
    move(src, HEAD, FIRST, SECOND, keep=True)
    message = refused(src, tmp_path / "out")
    assert f"{HEAD} lies in two files: {FIRST}, where the index places it, and {SECOND}" in message
    assert "--follow-index reads each tensor from the file its index names" in message


def test_follow_index_reads_the_shard_that_the_index_names(src: Path, tmp_path: Path) -> None:
    right = load_all(src)[HEAD]
    stale = load_file(src / SECOND)
    stale[HEAD] = torch.zeros_like(right)
    save_file(stale, src / SECOND)
    result = done("convert", src, tmp_path / "out", "--follow-index")
    assert torch.equal(load_all(tmp_path / "out")["lm_head.weight"], right)
    assert any(note.startswith("1 unindexed tensor ignored") and f"{HEAD} in {SECOND}" in note for note in result["notes"])


def test_overlay_wins_where_the_index_redirects_to_it(src: Path, tmp_path: Path) -> None:
    overlay = torch.full_like(load_all(src)[HEAD], 2.0)
    save_file({HEAD: overlay}, src / "overlay.safetensors")
    edit(src, lambda files: files.__setitem__(HEAD, "overlay.safetensors"))
    assert f"{HEAD} lies in two files: overlay.safetensors" in refused(src, tmp_path / "out")
    done("convert", src, tmp_path / "out", "--follow-index")
    assert torch.equal(load_all(tmp_path / "out")["lm_head.weight"], overlay)


def test_follow_index_does_not_hide_tensors_that_the_index_lacks(src: Path, tmp_path: Path) -> None:
    edit(src, lambda files: files.pop(HEAD))
    assert f"the index does not name {HEAD}" in refused(src, tmp_path / "out", "--follow-index")


def test_verify_and_inspect_refuse_alike(src: Path, tmp_path: Path) -> None:
    done("convert", src, tmp_path / "out")
    edit(src, lambda files: files.__setitem__(HEAD, "../x.safetensors"))
    commands: list[list[str | Path]] = [["inspect", src], ["plan", src], ["verify", tmp_path / "out", "--source", src]]
    for argv in commands:
        assert "only plain names inside the folder" in error_of(run(*argv, "--json"), 2)
