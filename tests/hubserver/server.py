"""The test Hub: start it, seed it, break it, ask it what happened.

with HubServer(tmp_path) as hub:
    hub.seed("moonshotai/Tiny", {"config.json": b"{}", "model.safetensors": Path("...")})
    hub.faults.add(Fault(r"/objects/", method="GET", cut_response=1000, times=3))
    HfApi(endpoint=hub.url).model_info("moonshotai/Tiny")
    hub.moved("PUT")          # body bytes that clients sent by PUT
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.hubserver import api, transfer, xet
from tests.hubserver.faults import Faults
from tests.hubserver.store import Store
from tests.hubserver.wire import Origin, Record, Request, Response

WRITE_TOKEN, READ_TOKEN, OTHER_TOKEN = "hf_test_write", "hf_test_read", "hf_test_other"


def _guard(function: Any) -> Any:
    def answer(app: HubServer, request: Request) -> Response:
        try:
            return function(app, request)
        except api.Refused as e:
            return e.response

    return answer


class HubServer:
    """A Hub and its content store on two local addresses; `me/*` and `lab/*` belong to the write token's user."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder)
        self.faults = Faults()
        self.log: list[Record] = []
        self.errors: list[str] = []
        self.parts: dict[str, dict[int, Path]] = {}
        self.tokens: dict[str, dict[str, Any]] = {
            WRITE_TOKEN: {"name": "me", "orgs": ["lab"], "role": "write"},
            READ_TOKEN: {"name": "me", "orgs": ["lab"], "role": "read"},
            OTHER_TOKEN: {"name": "stranger", "orgs": [], "role": "write"},
        }
        self.xet: xet.XetStore | None = None
        self.max_file_size = 50 * 1000**3
        self.part_size = 20 * 1000**2
        self.page_size = 1000
        self.ignore_ranges = False
        self.links = self.expired = 0

    def __enter__(self) -> HubServer:
        guarded = [(m, p, _guard(f)) for m, p, f in [*api.ROUTES, *transfer.HUB_ROUTES, *xet.ROUTES]]
        self.hub = Origin(self, "hub", guarded)
        self.cdn = Origin(self, "store", [(m, p, _guard(f)) for m, p, f in transfer.STORE_ROUTES])
        for origin in (self.hub, self.cdn):
            threading.Thread(target=origin.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        for origin in (self.hub, self.cdn):
            origin.shutdown()
            origin.server_close()

    @property
    def url(self) -> str:
        """The Hub's address (HF_ENDPOINT)."""
        return self.hub.url

    def enable_xet(self) -> xet.XetStore:
        """Offer xet: clients with hf_xet then upload and download through a content store on disk."""
        self.xet = xet.XetStore(self.store.folder / "xet")
        return self.xet

    def sign(self, sha256: str) -> str:
        """The signature of links to an object."""
        return hashlib.sha256(b"secret" + sha256.encode()).hexdigest()[:16]

    def expire_links(self) -> None:
        """Let every signed download link handed out so far run out."""
        self.expired = self.links

    def seed(self, repo_id: str, files: Mapping[str, bytes | Path], *, revision: str = "main", **repo: bool) -> str:
        """Commit files (bytes, or paths served without a copy) to a repository, created if missing; the commit id."""
        target = self.store.repos.get(repo_id) or self.store.create(repo_id, **repo)
        ref = revision if revision.startswith("refs/") else f"refs/heads/{revision}"
        target.refs.setdefault(ref, target.refs["refs/heads/main"])
        entries = {}
        for path, content in files.items():
            sha = self.store.link(content) if isinstance(content, Path) else self.store.put(content)
            entries[path] = self.store.entry(path, sha)
        return target.commit(ref, "seed", entries).oid

    def seed_folder(self, repo_id: str, folder: Path, *, revision: str = "main", **repo: bool) -> str:
        """Commit every file below `folder`, served from where it lies."""
        files = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}
        return self.seed(repo_id, files, revision=revision, **repo)

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """The contents of a revision."""
        commit = self.store.repos[repo_id].resolve(revision)
        assert commit is not None, revision
        return {p: self.store.path(e.sha256).read_bytes() for p, e in commit.tree.items()}

    def requests(self, method: str = "", path: str = "") -> list[Record]:
        """The logged requests of a method whose path contains `path`."""
        return [r for r in self.log if method in ("", r.method) and path in r.path]

    def moved(self, method: str) -> int:
        """Body bytes received by requests of `method`."""
        return sum(r.received for r in self.requests(method))

    def served(self) -> int:
        """Body bytes that the content store sent."""
        return sum(r.sent for r in self.log if r.origin == "store")
