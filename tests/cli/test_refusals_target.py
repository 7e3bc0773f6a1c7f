"""Outputs that must not, or cannot, be written: refused before the first byte, the source and the old output untouched."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import kconv
from kconv.errors import EnvironmentLacks
from tests.builders import shard_name, small_k3
from tests.cli.refusing import done, error_of, refused, run, snapshot
from tests.cli.test_refusals_folder import run_bound


@pytest.fixture
def src(tmp_path: Path) -> Path:
    return small_k3().write(tmp_path / "src")


def test_output_is_the_source(src: Path) -> None:
    message = refused(src, src)
    assert f"the output {src} is the source" in message
    assert "give a folder beside it: convert SOURCE OUT" in message


def test_output_is_the_source_by_another_name(src: Path, tmp_path: Path) -> None:
    os.symlink(src, tmp_path / "alias")
    assert "is the source" in refused(src, tmp_path / "alias")
    assert "is the source" in refused(tmp_path / "alias", src / ".." / "src")


@pytest.mark.parametrize("inside", ["out", "a/b/out"])
def test_output_inside_the_source(inside: str, src: Path) -> None:
    assert f"the output {src / inside} lies inside the source" in refused(src, src / inside, around=src)


def test_output_around_the_source(tmp_path: Path) -> None:
    src = small_k3().write(tmp_path / "out" / "deep" / "src")
    assert f"the output {tmp_path / 'out'} holds the source" in refused(src, tmp_path / "out")
    assert "holds the source" in refused(src, tmp_path / "out", "--overwrite")


def test_output_beside_a_single_file_is_allowed(tmp_path: Path) -> None:
    src = small_k3().write(tmp_path / "src", shards=1)
    result = done("convert", src / shard_name(1, 1), src / "out")
    assert result["source_tensors"] == len(small_k3().tensors)
    assert "is the source" in refused(src / shard_name(1, 1), src)


def test_output_folder_that_holds_other_things(src: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years")
    message = refused(src, out)
    assert f"the output folder {out} is not empty: it holds thesis.tex" in message
    assert "--overwrite replaces only what kconv made" in message
    assert "was not made by kconv (it holds thesis.tex), so --overwrite does not touch it" in refused(src, out, "--overwrite")


def test_output_folder_that_holds_another_model(src: Path, tmp_path: Path) -> None:
    other = small_k3(vision=True).write(tmp_path / "other")
    assert "is not empty: it holds config.json, model-00001-of-00002.safetensors" in refused(src, other)
    assert "so --overwrite does not touch it" in refused(src, other, "--overwrite")


def test_second_run_into_a_finished_folder(src: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done("convert", src, out)
    before = snapshot(out)
    message = refused(src, out, "--experts", "bf16")
    assert f"the output folder {out} is not empty: it holds a finished conversion" in message
    assert "--overwrite replaces it" in message
    assert snapshot(out) == before
    done("convert", src, out, "--experts", "bf16", "--overwrite")
    assert snapshot(out) != before


def test_output_that_is_a_file(src: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("words")
    assert f"the output {tmp_path / 'out'} is a file" in refused(src, tmp_path / "out")
    message = refused(src, tmp_path / "out" / "below")
    assert f"cannot be made: {tmp_path / 'out'} is a file" in message


def test_swapped_arguments(src: Path, tmp_path: Path) -> None:
    message = refused(tmp_path / "nowhere", src, around=tmp_path)
    assert f"{tmp_path / 'nowhere'} does not exist, and {src} holds weights: are the two swapped?" in message
    assert f"the source comes first: kconv convert {src} {tmp_path / 'nowhere'}" in message
    (tmp_path / "empty").mkdir()
    assert f"{tmp_path / 'empty'} is empty, and {src} holds weights" in refused(tmp_path / "empty", src, around=tmp_path)


def test_unfinished_conversion_is_in_the_way(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", full)
        assert "No space left on device" in error_of(run("convert", src, tmp_path / "out", "--json"), 3)
    assert not (tmp_path / "out").exists()
    message = refused(src, tmp_path / "out")
    assert "an unfinished conversion to" in message
    assert "--resume goes on, --overwrite starts again" in message
    done("convert", src, tmp_path / "out", "--resume")
    done("verify", tmp_path / "out", "--source", src)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "src"]


def test_resume_with_other_options_or_another_source(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", full)
        run("convert", src, tmp_path / "out")
    message = refused(src, tmp_path / "out", "--resume", "--experts", "bf16")
    assert ".out.partial was begun by another run: options differ (experts: not given then, bf16 now)" in message
    assert "shard_size differ" in refused(src, tmp_path / "out", "--resume", "--shard-size", "1MB")
    os.utime(src / shard_name(1, 2), (1, 1))
    assert "was begun by another run: source differ" in refused(src, tmp_path / "out", "--resume")


def test_output_through_a_link_is_made_where_it_leads(src: Path, tmp_path: Path) -> None:
    (tmp_path / "disk" / "real").mkdir(parents=True)
    os.symlink(tmp_path / "disk" / "real", tmp_path / "out")
    done("convert", src, tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk" / "real" / "kconv.json").exists()


def test_target_that_may_not_be_written(src: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o555)
    result = run_bound("convert", src, tmp_path / "locked" / "out", "--json")
    assert result.returncode == 3, result.stderr
    message = json.loads(result.stdout)["error"]["message"]
    assert f"{tmp_path / 'locked'} is not writable, so out cannot be made there" in message
    assert "choose another folder or change its permissions" in message
    assert list((tmp_path / "locked").iterdir()) == []


def test_disk_that_is_too_small(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operating system's answer is replaced, nothing of ours."""
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=100, f_frsize=4096, f_files=10**6, f_favail=10**6))
    message = refused(src, tmp_path / "out", code=3)
    assert f"{tmp_path} has 409.60 kB free, the output out takes" in message
    assert "free space, choose another disk, or split the work with --layers" in message
    assert "has 409.60 kB free" in error_of(run("plan", src, "--out", tmp_path / "out", "--json"), 3)


def test_disk_without_inodes(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=10**9, f_frsize=4096, f_files=10**6, f_favail=3))
    message = refused(src, tmp_path / "out", code=3)
    assert f"{tmp_path} has 3 inodes left, 65 are needed" in message


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MB (1,000 files), where mounting is allowed."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=1000", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting is not allowed here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_real_disk_that_is_too_small(src: Path, small_disk: Path) -> None:
    message = refused(src, small_disk / "out", code=3)
    assert f"{small_disk} has 1.05 MB free, the output out takes 2." in message


def test_output_that_is_a_mount_point(src: Path, small_disk: Path) -> None:
    message = refused(src, small_disk)
    assert f"the output {small_disk} is a mount point" in message
    assert f"give a folder in it: {small_disk}/NAME" in message


def limited(source: Path, out: Path, kind: int, value: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kconv", "convert", str(source), str(out), "--json"], capture_output=True, text=True,
        preexec_fn=lambda: resource.setrlimit(kind, (value, value)),
    )  # fmt: skip


def test_file_size_limit(src: Path, tmp_path: Path) -> None:
    result = limited(src, tmp_path / "out", resource.RLIMIT_FSIZE, 500_000)
    assert result.returncode == 3, result.stderr
    message = json.loads(result.stdout)["error"]["message"]
    assert "the file-size limit of this process is 500.00 kB, model-00001-of-00001.safetensors takes 1." in message
    assert "raise it with `ulimit -f unlimited`, or give a smaller --shard-size" in message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]


def test_few_open_files_suffice(tmp_path: Path) -> None:
    """Two hundred shards in, about a hundred out, with 64 descriptors."""
    src = small_k3().write(tmp_path / "src", shards=200)
    result = subprocess.run(
        [sys.executable, "-m", "kconv", "convert", str(src), str(tmp_path / "out"), "--shard-size", "1kB", "--json"],
        capture_output=True, text=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 90
    done("verify", tmp_path / "out", "--source", src)


def test_buffers_that_exceed_the_memory(src: Path, tmp_path: Path) -> None:
    """Not through `refused`: the memory that is free differs from one moment to the next, and with it the message."""
    message = error_of(run("convert", src, tmp_path / "out", "--memory", "1000TB", "--workers", "1000000000", "--json"), 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]
    assert "of buffers are needed" in message
    assert "give fewer --workers or a smaller --memory" in message


def test_python_raises_what_the_exit_code_says(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=4096, f_files=0, f_favail=0))
    with pytest.raises(EnvironmentLacks) as raised:
        kconv.convert(src, tmp_path / "out")
    assert raised.value.exit_code == 3


def test_refused_overwrite_keeps_what_an_earlier_run_left(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", full)
        run("convert", src, tmp_path / "out")
    left = snapshot(tmp_path / ".out.partial")
    small = SimpleNamespace(f_bavail=1, f_frsize=4096, f_files=0, f_favail=0)
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda path: small)
        assert "free, the output out takes" in refused(src, tmp_path / "out", "--overwrite", "--experts", "bf16", code=3)
    assert snapshot(tmp_path / ".out.partial") == left
    done("convert", src, tmp_path / "out", "--overwrite", "--experts", "bf16")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "src"]
