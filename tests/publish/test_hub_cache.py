"""The standard cache as the installed client writes it, over xet and without, moved, copied, read-only, offline."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants, snapshot_download

import kconv
from kconv.checkpoint.reading import open_checkpoint
from kconv.errors import EnvironmentLacks, KconvError
from tests.builders import small_k3
from tests.hubserver import HubServer

REPO = "lab/k3"


@pytest.fixture
def published(hub: HubServer, tmp_path: Path) -> Path:
    folder = small_k3().write(tmp_path / "k3")
    (folder / "tiktoken.model").write_bytes(b"IQ== 0\n")
    hub.seed_folder(REPO, folder)
    return folder


def test_a_snapshot_that_came_over_xet_is_a_sound_checkpoint(
    xet_hub: HubServer, hub_token: str, model: Path, tmp_path: Path
) -> None:
    """A file of it leads to a blob of the repository, which leads to one that all repositories share."""
    pytest.importorskip("huggingface_hub", minversion="2.0")
    kconv.publish(model, "me/m")
    snapshot = Path(snapshot_download("me/m"))
    hops = [p for p in snapshot.glob("*.safetensors") if (p.parent / os.readlink(p)).is_symlink()]
    assert hops, "the client shares what came over xet"
    assert open_checkpoint(snapshot).entries == open_checkpoint(model).entries
    cache = Path(constants.HF_HUB_CACHE)
    moved = tmp_path / "elsewhere" / "hub"
    moved.parent.mkdir()
    shutil.move(cache, moved)
    assert open_checkpoint(moved / snapshot.relative_to(cache)).entries == open_checkpoint(model).entries
    (tmp_path / "link").symlink_to(moved / snapshot.relative_to(cache))
    assert open_checkpoint(tmp_path / "link").entries == open_checkpoint(model).entries


def test_a_snapshot_of_copies_or_that_cannot_be_written_is_read(published: Path, tmp_path: Path) -> None:
    snapshot = Path(snapshot_download(REPO))
    copied = shutil.copytree(snapshot, tmp_path / "copied")
    for path in [snapshot, *snapshot.iterdir()]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        for folder in (snapshot, copied):
            assert kconv.convert(folder, tmp_path / f"out-{folder.name}", quiet=True)["finished"]
    finally:
        snapshot.chmod(0o755)


@pytest.mark.parametrize("revision", ["", "@main", "@COMMIT"])
def test_without_a_network_the_cached_snapshot_is_used(
    published: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, revision: str
) -> None:
    snapshot = Path(snapshot_download(REPO, revision="main"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    before = len(hub.log)
    source = f"hf://{REPO}{revision.replace('COMMIT', snapshot.name)}"
    plan = kconv.plan(source)
    assert f"{source} is read from the cache: {snapshot}" in plan.source.notes
    out = tmp_path / "out"
    kconv.convert(plan, out, mmap=True)
    assert kconv.verify(out)["ok"], "the recorded address is found in the cache as well"
    assert kconv.verify(out, published)["ok"]
    assert len(hub.log) == before


@pytest.mark.parametrize("source", ["hf://lab/other", f"hf://{REPO}@v9", f"hf://{REPO}@../../main", f"hf://{REPO}@{'0' * 40}"])
def test_without_a_network_what_the_cache_lacks_is_said(
    published: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    snapshot_download(REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(EnvironmentLacks, match="the cache holds no snapshot"):
        kconv.plan(source)


def test_a_link_to_elsewhere_is_read_only_when_asked_for(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    secret = tmp_path / "elsewhere" / ("a" * 64)
    shutil.move(published / "tiktoken.model", secret)
    (published / "tiktoken.model").symlink_to(secret)
    with pytest.raises(KconvError, match=r"leads out of the folder.*(\n.*)*KCONV_FOLLOW_LINKS=1"):
        kconv.plan(published)
    monkeypatch.setenv("KCONV_FOLLOW_LINKS", "1")
    kconv.convert(published, tmp_path / "out")
    assert (tmp_path / "out" / "tiktoken.model").read_bytes() == secret.read_bytes()
    assert not (tmp_path / "out" / "tiktoken.model").is_symlink()


def test_a_shared_blob_of_another_cache_is_elsewhere(published: Path, tmp_path: Path) -> None:
    """Only the cache that a snapshot lies in is its own, whatever the link's end is called."""
    snapshot = Path(snapshot_download(REPO))
    name = "ab" + "0" * 62
    foreign = tmp_path / "foreign" / "blobs" / "ab" / name
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(b"x")
    (snapshot / "LICENSE").symlink_to(foreign)
    with pytest.raises(KconvError, match="LICENSE is a link that leads out of the folder"):
        open_checkpoint(snapshot)


def test_what_the_cache_holds_is_not_downloaded_again(published: Path, hub: HubServer, tmp_path: Path) -> None:
    snapshot = Path(snapshot_download(REPO))
    before = {p: p.read_bytes() for p in snapshot.iterdir()}
    served = hub.served()
    kconv.convert(f"hf://{REPO}", tmp_path / "out")
    assert kconv.verify(tmp_path / "out")["ok"]
    assert hub.served() == served
    made = tmp_path / "out" / "tiktoken.model"
    made.write_bytes(b"mine")
    assert {p: p.read_bytes() for p in snapshot.iterdir()} == before, "nothing of the output is a link into the cache"


@pytest.mark.parametrize("name", ["config.json", "tiktoken.model", "model-00001-of-00002.safetensors"])
def test_a_cached_file_that_was_altered_is_fetched_from_the_hub(
    published: Path, hub: HubServer, tmp_path: Path, name: str
) -> None:
    snapshot = Path(snapshot_download(REPO))
    blob = (snapshot / name).resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(bytes(data))
    before = len(hub.requests("GET", "/resolve/"))
    kconv.convert(f"hf://{REPO}", tmp_path / "out")
    assert len(hub.requests("GET", "/resolve/")) > before
    assert kconv.verify(tmp_path / "out", published)["ok"]
