"""Folders that hold no checkpoint, one that may not be opened, or files that cannot be read."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kconv.errors import KconvError
from tests.builders import load_all, shard_name, small_k3
from tests.cli.refusing import done, error_of, refused, run

CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, PR_CAPBSET_DROP = 1, 2, 24


@pytest.fixture
def src(tmp_path: Path) -> Path:
    return small_k3().write(tmp_path / "src")


class Marks:
    """A pickle of this creates a file when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self.path), "w")


def test_only_pickle_files(tmp_path: Path) -> None:
    src, marker = tmp_path / "src", tmp_path / "marker"
    src.mkdir()
    (src / "config.json").write_text(json.dumps(small_k3().config))
    for name in ("pytorch_model.bin", "model.pt", "model.ckpt"):
        (src / name).write_bytes(pickle.dumps(Marks(marker)))
    message = refused(src, tmp_path / "out")
    assert "holds only pickle files (model.ckpt, model.pt, pytorch_model.bin), which are never opened" in message
    assert "convert it to safetensors in an environment you trust" in message
    assert "is not a .safetensors file" in refused(src / "pytorch_model.bin", tmp_path / "out")
    assert not marker.exists()


def test_pickles_beside_the_weights_are_left_out_and_named(src: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (src / "training_args.bin").write_bytes(pickle.dumps(Marks(marker)))
    result = done("convert", src, tmp_path / "out")
    assert "pickle files are never opened and are left out: training_args.bin" in result["notes"]
    assert not marker.exists()
    assert not (tmp_path / "out" / "training_args.bin").exists()


def test_no_such_source(tmp_path: Path) -> None:
    message = refused(tmp_path / "nowhere", tmp_path / "out")
    assert "nowhere: no such file or folder" in message
    assert "hf://owner/name" in message


def test_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    message = refused(tmp_path / "src", tmp_path / "out")
    assert "src is empty" in message
    assert "give the folder that holds the weights" in message


def test_folder_called_like_a_shard(tmp_path: Path) -> None:
    (tmp_path / "src" / "model.safetensors").mkdir(parents=True)
    message = refused(tmp_path / "src", tmp_path / "out")
    assert "holds no .safetensors file: model.safetensors is a folder" in message


def test_file_of_no_bytes(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "model.safetensors").write_bytes(b"")
    assert "model.safetensors: 0 bytes are too short" in refused(tmp_path / "src", tmp_path / "out")


def test_shard_without_a_tensor(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    save_file({}, tmp_path / "src" / "model.safetensors")
    assert "holds no tensors" in refused(tmp_path / "src", tmp_path / "out")


def test_unfinished_conversion_is_no_source(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", killed)
    assert run("convert", src, tmp_path / "out").exit_code == 3
    monkeypatch.undo()
    partial = tmp_path / ".out.partial"
    assert partial.is_dir()
    assert "is an unfinished conversion, not a checkpoint" in refused(partial, tmp_path / "other")


def test_link_to_a_file_that_is_not_there(src: Path, tmp_path: Path) -> None:
    os.symlink("../blobs/gone", src / "tokenizer.json")
    assert "tokenizer.json is a link to ../blobs/gone, which is not there" in refused(src, tmp_path / "out")


def test_side_file_that_is_a_link_out_of_the_folder(src: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("not to be published")
    (src / "sub").mkdir()
    os.symlink(tmp_path / "secret", src / "sub" / "notes.txt")
    assert "sub/notes.txt is a link that leads out of the folder" in refused(src, tmp_path / "out")


def test_links_into_a_content_store_are_followed(tmp_path: Path) -> None:
    store = tmp_path / "models--a--b"
    snapshot, blobs = store / "snapshots" / "c0ffee", store / "blobs"
    small_k3().write(snapshot)
    blobs.mkdir()
    for i, path in enumerate(sorted(snapshot.iterdir())):
        os.rename(path, blobs / str(i))
        os.symlink(f"../../blobs/{i}", path)
    done("convert", snapshot, tmp_path / "out")
    assert len(load_all(tmp_path / "out")) > 100


def test_tensors_without_a_config(src: Path, tmp_path: Path) -> None:
    (src / "config.json").unlink()
    message = refused(src, tmp_path / "out")
    assert "src has no config.json" in message
    assert "put the checkpoint's config.json beside the weights" in message


def bound_by_permissions() -> None:
    """Take root's right to read and write anything from the child process."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
        if os.geteuid() == 0 and libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0):
            os._exit(77)


def run_bound(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    """The command line in a process that file permissions hold for, also when the tests run as root."""
    result = subprocess.run(
        [sys.executable, "-m", "kconv", *map(str, argv)], capture_output=True, text=True, preexec_fn=bound_by_permissions
    )
    if result.returncode == 77:
        pytest.skip("root cannot give its rights away here")
    return result


@pytest.mark.parametrize("name", ["config.json", shard_name(1, 2), "model.safetensors.index.json"])
def test_file_that_may_not_be_read(name: str, src: Path, tmp_path: Path) -> None:
    (src / name).chmod(0)
    result = run_bound("convert", src, tmp_path / "out", "--json")
    assert result.returncode == 2, result.stderr
    assert json.loads(result.stdout)["error"]["message"].startswith(f"cannot read {src}/{name}: Permission denied")
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_side_file_that_may_not_be_read(src: Path, tmp_path: Path) -> None:
    (src / "LICENSE").write_text("words")
    (src / "LICENSE").chmod(0)
    result = run_bound("convert", src, tmp_path / "out", "--json")
    assert result.returncode == 2, result.stderr
    assert "LICENSE" in json.loads(result.stdout)["error"]["message"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("mode", [0o000, 0o300])
def test_folder_that_may_not_be_listed(mode: int, src: Path, tmp_path: Path) -> None:
    (src / "assets").mkdir()
    (src / "assets" / "x.png").write_bytes(b"x")
    (src / "assets").chmod(mode)
    result = run_bound("convert", src, tmp_path / "out", "--json")
    (src / "assets").chmod(0o755)
    assert result.returncode == 2, result.stderr
    assert f"cannot read {src}/assets: Permission denied" in json.loads(result.stdout)["error"]["message"]


def test_unreadable_is_not_taken_for_absent(src: Path, tmp_path: Path) -> None:
    for closed in (src, src.parent):
        closed.chmod(0)
        result = run_bound("inspect", src, "--json")
        closed.chmod(0o755)
        assert result.returncode == 2
        assert json.loads(result.stdout)["error"]["message"].startswith(f"cannot read {src}: Permission denied")


def test_shard_that_shrinks_while_it_is_read(src: Path, tmp_path: Path) -> None:
    """The header was believed; the bytes are gone when they are wanted."""
    import kconv

    plan = kconv.plan(src)
    with open(src / shard_name(2, 2), "r+b") as handle:
        handle.truncate(10_000)
    said = r"model-00002-of-00002.safetensors ends at byte [0-9]+, [0-9]+ bytes before its header says"
    with pytest.raises(KconvError, match=said) as raised:
        kconv.convert(plan, tmp_path / "out")
    assert raised.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_inspect_of_an_unknown_family_goes_as_far_as_the_headers(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    save_file({"w": torch.zeros(3)}, tmp_path / "src" / "model.safetensors")
    found = done("inspect", tmp_path / "src")
    assert found["family"] == "unknown"
    assert found["tensors"] == 1
    assert "has no config.json" in found["problems"][0]
    assert "has no config.json" in error_of(run("plan", tmp_path / "src", "--json"), 2)


def test_name_of_a_repository_is_not_taken_for_a_folder(tmp_path: Path) -> None:
    assert "hf://moonshotai/Kimi-K3 for the one on the Hub" in refused("moonshotai/Kimi-K3", tmp_path / "out")
