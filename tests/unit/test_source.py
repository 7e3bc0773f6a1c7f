"""Headers: what is read, what is kept, and how little of a file it takes; locally and over the Hub's protocol."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import kconv
from kconv.checkpoint.reading import open_checkpoint
from kconv.errors import KconvError
from kconv.spec import Spec
from kconv.storage.files import LocalFiles
from tests.builders import ROOT, header_of, raw_shard, read_index, rows, shard_name, small_k3, write_index
from tests.hubserver.fixtures import hub
from tests.hubserver.server import HubServer

__all__ = ["hub"]

STRANGE_NAMES = (
    "layers.²", "layers.٣.x", "layers." + "9" * 5000, "layers.007.x", "layers..x", "layers.1.block_sparse_moe.experts",
)  # fmt: skip
PADDED = (99_993, 99_994, 99_999, 100_000, 100_001)


class Recorder(LocalFiles):
    """Local files that note every range that is read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.reads: list[tuple[str, int, int]] = []

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        data = super().read(name, offset, length)
        self.reads.append((name, offset, len(data)))
        return data


def padded_file(path: Path, length: int) -> None:
    """A file of one tensor whose header is padded with spaces to `length` bytes."""
    header = json.dumps(rows([("x", "F32", [2], 0, 8)])).encode()
    raw_shard(path, header + b" " * (length - len(header)), struct.pack("<2f", 1.0, 2.0))


@pytest.mark.parametrize("length", PADDED)
def test_header_padded_to_an_awkward_length(length: int, tmp_path: Path) -> None:
    padded_file(tmp_path / "model.safetensors", length)
    entry = open_checkpoint(tmp_path).entries["x"]
    assert entry.spec == Spec("F32", (2,))
    assert entry.start == 8 + length


def test_headers_padded_to_awkward_lengths_over_the_hub(tmp_path: Path, hub: HubServer) -> None:
    for length in PADDED:
        padded_file(tmp_path / "model.safetensors", length)
        hub.seed(f"lab/padded-{length}", {"model.safetensors": (tmp_path / "model.safetensors").read_bytes()})
        entry = open_checkpoint(f"hf://lab/padded-{length}").entries["x"]
        assert (entry.spec, entry.start) == (Spec("F32", (2,)), 8 + length)


def test_index_that_leads_to_another_repository_asks_for_nothing(hub: HubServer) -> None:
    """'..' in a file name must never become part of an address."""
    unsafe = "../../../org/private/resolve/main/model.safetensors"
    index = {"weight_map": {"a": unsafe}}
    hub.seed("lab/crafted", {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode()})
    with pytest.raises(KconvError, match="only plain names inside the folder are allowed"):
        open_checkpoint("hf://lab/crafted")
    assert not [r for r in hub.log if "private" in r.path or ".." in r.path]


def test_plan_reads_headers_only(tmp_path: Path) -> None:
    src = small_k3().write(tmp_path / "src")
    files = Recorder(src)
    kconv.plan(open_checkpoint(files)).check()
    for name in (shard_name(1, 2), shard_name(2, 2)):
        whole = 8 + struct.unpack("<Q", (src / name).read_bytes()[:8])[0]
        mine = [(offset, length) for file, offset, length in files.reads if file == name]
        assert mine == [(0, 8), (8, whole - 8)]


def test_nothing_is_opened_when_the_index_is_unsafe(tmp_path: Path) -> None:
    src = small_k3().write(tmp_path / "src")
    index = read_index(src)
    write_index(src, {**index, "a": "../x.safetensors"})
    files = Recorder(src)
    with pytest.raises(KconvError):
        open_checkpoint(files)
    assert {name for name, *_ in files.reads} == {"config.json", "model.safetensors.index.json"}


def test_every_dtype_and_a_scalar_are_read(tmp_path: Path) -> None:
    specs = [
        ("i64", "I64", [], 8), ("f64", "F64", [2], 16), ("f32", "F32", [], 4), ("c64", "C64", [1], 8),
        ("empty", "BF16", [3, 0], 0),
        ("e8m0", "F8_E8M0", [2, 2], 4), ("e4m3", "F8_E4M3", [4], 4), ("fnuz", "F8_E4M3FNUZ", [4], 4), ("f4", "F4", [2, 32], 32),
        ("bool", "BOOL", [3], 3), ("u16", "U16", [1], 2),
    ]  # fmt: skip
    header, at = [], 0
    for name, dtype, shape, nbytes in specs:
        header.append((name, dtype, shape, at, at + nbytes))
        at += nbytes
    raw_shard(tmp_path / "model.safetensors", {**rows(header), "__metadata__": {"format": "pt"}}, b"\0" * at)
    found = open_checkpoint(tmp_path).entries
    assert {n: (e.spec.dtype, list(e.spec.shape), e.spec.nbytes) for n, e in found.items()} == {
        name: (dtype, shape, nbytes) for name, dtype, shape, nbytes in specs
    }


def test_library_and_we_agree_on_every_tensor(tmp_path: Path) -> None:
    from safetensors import safe_open

    src = small_k3(vision=True).write(tmp_path / "src", shards=3)
    checkpoint = open_checkpoint(src)
    seen = 0
    for shard in checkpoint.shards:
        with safe_open(src / shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                entry, tensor = checkpoint.entries[name], file.get_tensor(name)
                raw = checkpoint.files.read(entry.file, entry.start, entry.spec.nbytes)
                assert raw == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                assert entry.spec.shape == tuple(tensor.shape)
                seen += 1
    assert seen == len(checkpoint.entries)


def test_single_file_with_its_config(tmp_path: Path) -> None:
    src = small_k3().write(tmp_path / "src", shards=1, index=False)
    (src / "model-00001-of-00001.safetensors").rename(src / "weights.safetensors")
    checkpoint = open_checkpoint(src / "weights.safetensors")
    assert checkpoint.shards == ["weights.safetensors"]
    assert checkpoint.config["model_type"] == "kimi_k3"
    assert checkpoint.other_files() == []


def test_folder_without_an_index_is_read_whole(tmp_path: Path) -> None:
    with_index = open_checkpoint(small_k3().write(tmp_path / "a"))
    without = open_checkpoint(small_k3().write(tmp_path / "b", index=False))
    assert with_index.entries == without.entries
    assert with_index.shards == without.shards


def test_index_metadata_of_any_form_is_carried_or_ignored(tmp_path: Path) -> None:
    src = small_k3().write(tmp_path / "src")
    for metadata, kept in (({"total_size": 7, "note": "x"}, {"total_size": 7, "note": "x"}), ([1], {}), (None, {})):
        path = src / "model.safetensors.index.json"
        path.write_text(json.dumps({"metadata": metadata, "weight_map": read_index(src)}))
        assert open_checkpoint(src).index_metadata == kept


def test_weights_in_folders_below_are_named_as_left_out(tmp_path: Path) -> None:
    src = small_k3().write(tmp_path / "src")
    (src / "draft").mkdir()
    save_file({"x": torch.zeros(1)}, src / "draft" / "model.safetensors")
    save_file({"x": torch.zeros(1)}, src / "adapter.safetensors")
    notes = open_checkpoint(src).notes
    assert [n.split(" is ")[0] for n in notes] == ["adapter.safetensors", "draft/model.safetensors"]


def test_what_is_hidden_is_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    src = small_k3().write(tmp_path / "src")
    for name in (".git/config", ".cache/huggingface/x", "assets/.hidden/y", "assets/z.png", ".gitattributes"):
        (src / name).parent.mkdir(parents=True, exist_ok=True)
        (src / name).write_text("x")
    assert open_checkpoint(src).other_files() == ["assets/z.png"]


def test_link_to_a_folder_inside_is_not_followed(tmp_path: Path) -> None:
    src = small_k3().write(tmp_path / "src")
    (src / "assets").mkdir()
    (src / "assets" / "z.png").write_text("x")
    os.symlink("assets", src / "pictures")
    os.symlink(".", src / "loop")
    assert open_checkpoint(src).other_files() == ["assets/z.png"]


def test_garbage_collection_is_as_it_was(tmp_path: Path) -> None:
    import gc

    src = small_k3().write(tmp_path / "src")
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        open_checkpoint(src)
        assert gc.isenabled() is enabled
    gc.enable()


def test_faults_of_all_kinds_are_raised_at_once(tmp_path: Path) -> None:
    draft = small_k3()
    src = draft.write(tmp_path / "src", shards=3)
    index = read_index(src)
    index["nowhere"] = shard_name(1, 3)
    index.pop("language_model.lm_head.weight")
    write_index(src, index)
    (src / shard_name(2, 3)).write_bytes((src / shard_name(2, 3)).read_bytes()[:-1])
    with pytest.raises(KconvError) as raised:
        open_checkpoint(src)
    for said in ("is truncated", "the index names nowhere", "the index does not name language_model.lm_head.weight"):
        assert said in str(raised.value)
    assert "fetch the named files again; fetch the index that belongs to these shards" in str(raised.value)


def test_names_with_strange_numbers_are_folded_not_parsed(tmp_path: Path) -> None:
    names = [ROOT + n for n in STRANGE_NAMES]
    draft = small_k3()
    draft.tensors |= {n: torch.zeros(1) for n in names}
    with pytest.raises(KconvError) as raised:
        kconv.plan(draft.write(tmp_path / "src")).check()
    assert f"no rule claims: {ROOT}layers.² in" in str(raised.value)
    assert f"no rule claims: {ROOT}layers.1.block_sparse_moe.experts in" in str(raised.value)


def test_header_metadata_is_no_tensor(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(2)}, tmp_path / "model.safetensors", metadata={"data_offsets": '"data_offsets"', "note": "x"})
    assert header_of(tmp_path / "model.safetensors")["__metadata__"]["note"] == "x"
    assert list(open_checkpoint(tmp_path).entries) == ["x"]
