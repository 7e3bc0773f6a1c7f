"""Planning and converting straight from a Hub: the real huggingface_hub client, a local server, a connection that is cut."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

import kconv
from kconv.errors import KconvError
from kconv.storage.hub import HubFiles
from kconv.synthesis.families import tiny
from tests.engine.faults import tree
from tests.hubserver.faults import Fault
from tests.hubserver.fixtures import hub
from tests.hubserver.server import HubServer

__all__ = ["hub"]

OPTIONS = {"experts": "bf16", "vision": "keep", "shard_size": 400_000}
REPO = "lab/Kimi-K3-tiny"


@pytest.fixture
def published(hub: HubServer, tmp_path: Path) -> Path:
    """A tiny K3 whose layers lie in shards of their own, on the Hub; returns the local copy."""
    folder = tmp_path / "published"
    tiny("k3", folder, seed=5, kda_heads=4)
    hub.seed_folder(REPO, folder)
    return folder


def without_source(found: dict[str, str]) -> dict[str, str]:
    return {n: h for n, h in found.items() if not n.startswith("kconv.")}


def test_plan_reads_headers_by_ranges(published: Path, hub: HubServer) -> None:
    """A plan over the Hub equals the local one and fetches a small part of the bytes."""
    made, local = kconv.plan(f"hf://{REPO}", "native"), kconv.plan(published, "native")
    assert made.check().digest == local.digest
    assert made.summary() == local.summary()
    shards = list(published.glob("*.safetensors"))
    headers = sum(8 + int.from_bytes(p.read_bytes()[:8], "little") for p in shards)
    assert hub.served() == headers


@pytest.mark.parametrize("cuts", [0, 6])
def test_conversion_from_the_hub_equals_the_local_one(published: Path, hub: HubServer, tmp_path: Path, cuts: int) -> None:
    for k in range(cuts):
        hub.faults.add(Fault(r"\.safetensors", method="GET", cut_response=3_000 + 5_000 * k, skip=30 + 4 * k))
    kconv.convert(published, tmp_path / "local", **OPTIONS)
    result = kconv.convert(f"hf://{REPO}", tmp_path / "remote", **OPTIONS)
    assert result["finished"]
    assert without_source(tree(tmp_path / "remote")) == without_source(tree(tmp_path / "local"))
    revision = HubFiles(f"hf://{REPO}").revision
    source = json.loads((tmp_path / "remote" / "kconv.json").read_text())["source"]
    assert source["revision"] == revision
    assert source["name"] == f"hf://{REPO}"
    assert not list(tmp_path.glob(".remote*"))


def test_few_shards_lie_on_disk_and_each_is_fetched_once(published: Path, hub: HubServer, tmp_path: Path) -> None:
    from kconv.storage.staging import StagedFiles

    most = 0
    real = StagedFiles.read_into

    def watched(self: StagedFiles, name: str, offset: int, buffer: memoryview) -> None:
        nonlocal most
        real(self, name, offset, buffer)
        most = max(most, len(list(self.folder.glob("*.safetensors"))))
        watched.files = self  # type: ignore[attr-defined]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StagedFiles, "read_into", watched)
        kconv.convert(f"hf://{REPO}", tmp_path / "out", workers=1, **OPTIONS)
    read = {e.file for n, e in kconv.plan(published).source.entries.items()}
    assert 1 < most <= 3 < len(read)
    assert watched.files.downloaded == sum((published / s).stat().st_size for s in read)  # type: ignore[attr-defined]


def test_resumes_with_what_was_downloaded(published: Path, hub: HubServer, tmp_path: Path) -> None:
    """A server that fails for good ends the run with an error; the next one goes on."""
    shard = next(published.glob("model-00007-*"))
    stored = hashlib.sha256(shard.read_bytes()).hexdigest()
    fault = hub.faults.add(Fault(stored, method="GET", status=404, skip=3, times=None))
    with pytest.raises(KconvError, match="the same command with --resume goes on") as raised:
        kconv.convert(f"hf://{REPO}", tmp_path / "out", **OPTIONS)
    assert raised.value.exit_code == 3
    assert fault.hits
    assert not (tmp_path / "out").exists()
    hub.faults.clear()
    result = kconv.convert(f"hf://{REPO}", tmp_path / "out", resume=True, **OPTIONS)
    assert result["resumed_slabs"] > 0
    kconv.convert(published, tmp_path / "local", **OPTIONS)
    assert without_source(tree(tmp_path / "out")) == without_source(tree(tmp_path / "local"))


def test_verify_against_the_hub(published: Path, hub: HubServer, tmp_path: Path) -> None:
    kconv.convert(f"hf://{REPO}", tmp_path / "out", **OPTIONS)
    assert kconv.verify(tmp_path / "out", f"hf://{REPO}")["ok"]
    assert kconv.verify(tmp_path / "out")["ok"], "the manifest says which commit of which repository"
    shard = sorted((tmp_path / "out").glob("model-*.safetensors"))[-1]
    data = bytearray(shard.read_bytes())
    data[-3] ^= 4
    shard.write_bytes(bytes(data))
    found = kconv.verify(tmp_path / "out", f"hf://{REPO}")
    assert not found["ok"]
    assert found["different"] in (1, 2)  # a damaged decoded value spoils the pair it came from
    shutil.rmtree(tmp_path / "out")
