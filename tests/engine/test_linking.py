"""`--link`: unchanged files are the source's own, changed ones are written, and the source is never touched."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import kconv
from kconv.engine import linking
from kconv.engine.job import Job, Settings
from kconv.engine.linking import MADE, link
from kconv.errors import EnvironmentLacks, KconvError

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    kconv.tiny("k3", tmp_path / "src")
    return tmp_path / "src"


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def linked(one: Path, other: Path) -> list[str]:
    """Names of the files that are one and the same in both folders."""
    return sorted(p.name for p in one.iterdir() if (other / p.name).exists() and p.samefile(other / p.name))


def shards(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("*.safetensors"))


def test_an_unchanged_checkpoint_is_linked_whole(source: Path, tmp_path: Path) -> None:
    before, out = contents(source), tmp_path / "out"
    done = kconv.convert(source, out, to="hf", link=True)
    side = ["generation_config.json", "tiktoken.model", "tokenizer_config.json"]
    assert linked(out, source) == sorted([*shards(source), *side])
    assert done["links"] == {"hard link": len(shards(source)) + len(side)}
    assert done["bytes_written"] == 0
    found = kconv.verify(out, source)
    assert (found["compared"], found["different"], found["files"]) == (done["target_tensors"], 0, [])
    assert contents(source) == before


def test_changed_shards_are_written_beside_linked_ones(source: Path, tmp_path: Path) -> None:
    plain, out = tmp_path / "plain", tmp_path / "out"
    kconv.convert(source, plain, to="hf", weights="fp8-block")
    done = kconv.convert(source, out, to="hf", weights="fp8-block", link=True)
    made = [n for n in shards(out) if MADE in n]
    kept = [n for n in linked(out, source) if n.endswith(".safetensors")]
    assert made
    assert kept
    assert sorted(made + kept) == shards(out)
    assert done["bytes_written"] < kconv.plan(plain).source.nbytes
    found, reference = (kconv.plan(folder, "native").check() for folder in (out, plain))
    assert {n: t.spec for n, t in found.targets.items()} == {n: t.spec for n, t in reference.targets.items()}
    for name, entry in found.source.entries.items():
        other = reference.source.entries[name]
        stored = found.source.files.read(entry.file, entry.start, entry.spec.nbytes)
        assert stored == reference.source.files.read(other.file, other.start, other.spec.nbytes), name


def test_a_layout_of_other_names_links_only_what_stands_beside(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = kconv.convert(source, out, link=True)
    assert not [n for n in linked(out, source) if n.endswith(".safetensors")]
    assert done["links"]["hard link"] == len(linked(out, source))
    assert kconv.verify(out, source)["different"] == 0


def test_a_second_finish_does_not_write_through_the_links_of_the_first(source: Path, tmp_path: Path) -> None:
    before, partial = contents(source), tmp_path / "partial"
    partial.mkdir()
    for links in (True, False):
        job = Job(kconv.plan(source, "hf"), partial, [], Settings(1 << 30, 1, link=links))
        for name in (shards(source)[0], "tiktoken.model"):
            job._take_over(name)
            assert (partial / name).samefile(source / name) == links
            assert (partial / name).read_bytes() == before[name]
    assert contents(source) == before


def test_what_cannot_be_linked_is_copied(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(linking.os, "link", refuse)
    out = tmp_path / "out"
    job = Job(kconv.plan(source, "hf"), out, [], Settings(1 << 30, 1, link=True))
    out.mkdir()
    job._take_over("tiktoken.model")
    assert not job.links
    assert (out / "tiktoken.model").read_bytes() == (source / "tiktoken.model").read_bytes()
    assert not (out / "tiktoken.model").samefile(source / "tiktoken.model")


def test_a_reflink_is_preferred(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def clone(new: int, request: int, old: int) -> None:
        asked.append(request)
        os.pwrite(new, os.pread(old, 1 << 20, 0), 0)

    monkeypatch.setattr(linking.fcntl, "ioctl", clone)
    assert link(source / "tiktoken.model", tmp_path / "copy") == "reflink"
    assert asked == [linking.FICLONE]
    assert not (tmp_path / "copy").samefile(source / "tiktoken.model")


def test_a_link_of_the_hub_cache_leads_to_the_blob(source: Path, tmp_path: Path) -> None:
    blob = source / "tiktoken.model"
    (tmp_path / "snapshot").symlink_to(blob)
    link(tmp_path / "snapshot", tmp_path / "out")
    assert not (tmp_path / "out").is_symlink()
    assert (tmp_path / "out").samefile(blob)


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no second file system here")
def test_another_file_system_is_refused_before_anything_is_written(source: Path) -> None:
    out = SHARED_MEMORY / f"kconv-link-{os.getpid()}"
    with pytest.raises(EnvironmentLacks, match="another file system"):
        kconv.convert(source, out, to="hf", link=True)
    assert not [p for p in SHARED_MEMORY.iterdir() if out.name in p.name]


def test_a_remote_source_is_refused(source: Path, tmp_path: Path) -> None:
    made = kconv.plan(source, "hf")
    made.source.files = type("Remote", (), {"where": "hf://a/b"})()  # type: ignore[assignment]
    with pytest.raises(KconvError, match="--link needs a local source"):
        linking.linked_shards(made, tmp_path / "out")
