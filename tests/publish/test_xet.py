"""The same publishing and reading with xet on, through the real hf_xet client."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import snapshot_download

from kconv.publishing.publish import publish
from kconv.storage import hub_http
from kconv.storage.hub import HubFiles
from tests.hubserver import Fault, HubServer
from tests.publish.test_publish import SHARDS, local, remote

pytest.importorskip("hf_xet")


def test_publish_and_download(xet_hub: HubServer, hub_token: str, model: Path, tmp_path: Path) -> None:
    data = publish(model, "me/m")
    assert remote(xet_hub, "me/m") == local(model)
    assert xet_hub.requests("PUT") == []
    assert xet_hub.xet is not None
    moved = xet_hub.xet.stored()
    assert moved > 100_000
    assert publish(model, "me/m")["commit"] == data["commit"]
    assert xet_hub.xet.stored() == moved
    got = Path(snapshot_download("me/m", local_dir=tmp_path / "got"))
    assert {p.name: p.read_bytes() for p in got.iterdir() if p.is_file() and p.name != ".gitattributes"} == local(model)
    assert xet_hub.served() == 0, "the files came through xet"
    files = HubFiles("hf://me/m")
    assert files.read(SHARDS[0], 100, 50) == (model / SHARDS[0]).read_bytes()[100:150]
    assert xet_hub.served() == 50


def test_interrupted_before_the_commit(xet_hub: HubServer, hub_token: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_http, "sleep", lambda s: None)
    xet_hub.faults.add(Fault("/commit/", status=403, error="no"))
    with pytest.raises(Exception, match="the Hub refused"):
        publish(model, "me/m")
    assert xet_hub.xet is not None
    moved = xet_hub.xet.stored()
    xet_hub.faults.add(Fault("/commit/", cut_response=0, before=False))
    publish(model, "me/m", create_pr=False)
    assert remote(xet_hub, "me/m") == local(model)
    assert xet_hub.xet.stored() == moved, "nothing was sent twice"
    assert len(xet_hub.store.repos["me/m"].commits) == 2


def test_pull_request(xet_hub: HubServer, hub_token: str, model: Path) -> None:
    xet_hub.seed("lab/m", {"old.txt": b"1"})
    data = publish(model, "lab/m", create_pr=True)
    assert set(local(model)) <= set(remote(xet_hub, "lab/m", "refs/pr/1"))
    assert data["revision"] == "refs/pr/1"
