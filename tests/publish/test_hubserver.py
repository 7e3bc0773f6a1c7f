"""The test Hub against the real huggingface_hub client: what the other tests stand on."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import CommitOperationDelete, HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tests.hubserver import OTHER_TOKEN, READ_TOKEN, Fault, HubServer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"a": 1}')
    (path / "README.md").write_text("---\nlicense: mit\n---\n# x\n")
    (path / "model.safetensors").write_bytes(bytes(range(256)) * 1000)
    return path


def test_upload_and_download(hub: HubServer, hub_token: str, folder: Path, tmp_path: Path) -> None:
    api = HfApi()
    assert api.create_repo("me/m", private=True).repo_id == "me/m"
    done = api.upload_folder(repo_id="me/m", folder_path=folder)
    assert hub.files("me/m").keys() - {".gitattributes"} == {p.name for p in folder.iterdir()}
    assert api.model_info("me/m").sha == done.oid
    tree = {f.path: f for f in api.list_repo_tree("me/m")}
    assert tree["model.safetensors"].lfs.sha256  # type: ignore[union-attr]
    assert tree["config.json"].lfs is None  # type: ignore[union-attr]
    got = Path(snapshot_download("me/m", local_dir=tmp_path / "got"))
    for path in folder.iterdir():
        assert (got / path.name).read_bytes() == path.read_bytes()
    assert not any(r.authorization for r in hub.log if r.origin == "store"), "the token leaked to the content store"
    moved = hub.moved("PUT")
    api.upload_folder(repo_id="me/m", folder_path=folder)
    assert hub.moved("PUT") == moved


def test_multipart(hub: HubServer, hub_token: str, folder: Path) -> None:
    hub.part_size = 100_000
    api = HfApi()
    api.create_repo("me/m")
    api.upload_folder(repo_id="me/m", folder_path=folder)
    assert len(hub.requests("PUT", "/parts/")) == 3
    assert hub.files("me/m")["model.safetensors"] == (folder / "model.safetensors").read_bytes()


def test_pages_branches_and_pull_requests(hub: HubServer, hub_token: str, folder: Path) -> None:
    api = HfApi()
    api.create_repo("me/m")
    hub.seed("me/m", {f"f{i}.txt": b"%d" % i for i in range(25)})
    hub.page_size = 10
    assert len(list(api.list_repo_tree("me/m", recursive=True))) == 26
    api.create_branch("me/m", branch="v2")
    api.upload_file(path_or_fileobj=b"x", path_in_repo="x", repo_id="me/m", revision="v2")
    assert "x" in hub.files("me/m", "v2")
    assert "x" not in hub.files("me/m")
    info = api.create_commit("me/m", [CommitOperationDelete("f1.txt")], commit_message="del", create_pr=True)
    assert info.pr_revision == "refs/pr/1"
    assert "f1.txt" not in hub.files("me/m", "refs/pr/1")
    pr = api.create_pull_request("me/m", title="more")
    assert pr.git_reference == "refs/pr/2"
    assert [d.title for d in api.get_repo_discussions("me/m", author="me")] == ["del", "more"]
    assert {b.name for b in api.list_repo_refs("me/m").branches} == {"main", "v2"}
    api.create_tag("me/m", tag="t1")
    with pytest.raises(HfHubHTTPError, match="not a branch"):
        api.upload_file(path_or_fileobj=b"y", path_in_repo="y", repo_id="me/m", revision="t1")


def test_access(hub: HubServer, folder: Path) -> None:
    hub.seed("me/private", {"a": b"1"}, private=True)
    hub.seed("lab/gated", {"a": b"1"}, gated=True)
    hub.seed("lab/open", {"a": b"1"})
    for token in (None, OTHER_TOKEN):
        with pytest.raises(RepositoryNotFoundError):
            HfApi(token=token).model_info("me/private")
        with pytest.raises(GatedRepoError):
            hf_hub_download("lab/gated", "a", token=token)
    with pytest.raises(RevisionNotFoundError):
        HfApi().model_info("lab/open", revision="nope")
    with pytest.raises(RemoteEntryNotFoundError):
        hf_hub_download("lab/open", "b")
    for token in (READ_TOKEN, OTHER_TOKEN):
        with pytest.raises(HfHubHTTPError, match="403"):
            HfApi(token=token).upload_file(path_or_fileobj=b"x", path_in_repo="x", repo_id="lab/open")


def test_faults(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    content = bytes(range(256)) * 4000
    hub.seed("lab/open", {"w.safetensors": content})
    hub.faults.add(Fault(r"/objects/", method="GET", cut_response=300_000, times=2))
    hub.faults.add(Fault(r"/resolve/", method="HEAD", status=503, times=1))
    assert Path(hf_hub_download("lab/open", "w.safetensors", local_dir=tmp_path / "x")).read_bytes() == content
    assert len(hub.requests("GET", "/objects/")) == 3
