"""`kconv publish` killed at every request it makes, before the request is carried out and after, then run again.

The second run must end with the same bytes as an undisturbed one, every object must have been received whole exactly
once, and there must be one commit and one pull request.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.hubserver import WRITE_TOKEN, Fault, HubServer

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [__name__, "kconv.publishing.publish", "kconv.checkpoint.reading", "kconv.adapters.drafts.dialects", "huggingface_hub.hf_api",
     "huggingface_hub.repocard"]
)  # fmt: skip


def _publish(url: str, cache: str, folder: Path, options: dict) -> None:
    """In the child: the real command's function against the test Hub."""
    os.environ.update(HF_TOKEN=WRITE_TOKEN, HF_HOME=cache, XDG_CACHE_HOME=cache, HF_HUB_DISABLE_XET="1")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    constants.ENDPOINT = url
    constants.HF_HUB_DISABLE_XET = True  # type: ignore[misc]
    from kconv.publishing.publish import publish

    publish(folder, "me/m", **options)


def run(hub: HubServer, folder: Path, cache: Path, at: int | None, before: bool, options: dict, how: int) -> bool:
    """One run, killed at its request number `at`; whether it came to its end."""
    child = CONTEXT.Process(target=_publish, args=(hub.url, str(cache), folder, options))

    def kill() -> None:
        assert child.pid is not None
        os.kill(child.pid, how)

    hub.faults.clear()
    if at is not None:
        hub.faults.add(Fault(skip=at, call=kill, before=before, delay=0.0))
    child.start()
    child.join(60)
    assert child.exitcode is not None, "the run hangs"
    hub.faults.clear()
    return child.exitcode == 0


def whole(hub: HubServer) -> Counter[str]:
    """How often each object or part was received whole."""
    return Counter(r.path.split("?")[0] for r in hub.requests("PUT") if r.status == 200)


@pytest.mark.parametrize(
    "options, how, before",
    [
        ({}, signal.SIGKILL, True),
        ({}, signal.SIGKILL, False),
        ({"create_pr": True, "message": "New weights"}, signal.SIGKILL, False),
        ({"revision": "dev", "create_branch": True}, signal.SIGKILL, True),
        ({}, signal.SIGINT, False),
    ],
    ids=["before", "after", "pull-request", "branch", "ctrl-c"],
)
def test_killed_at_every_request(hub: HubServer, model: Path, tmp_path: Path, options: dict, how: int, before: bool) -> None:
    hub.part_size = 200_000
    stage, seeded = 0, {"old.txt": b"1"} if options else {}
    while True:
        hub.store.repos.clear()
        hub.log.clear()
        for path in hub.store.folder.iterdir():
            path.unlink()
        hub.parts.clear()
        if seeded:
            hub.seed("me/m", seeded)
        finished = run(hub, model, tmp_path / f"cache{stage}", stage, before, options, how)
        if finished and stage >= len(hub.log):
            break
        assert finished or run(hub, model, tmp_path / f"cache{stage}", None, before, options, how), f"stage {stage}"
        repo = hub.store.repos["me/m"]
        ref = "refs/pr/1" if options.get("create_pr") else options.get("revision", "main")
        expected = {p.name: p.read_bytes() for p in model.iterdir()} | seeded
        got = {n: b for n, b in hub.files("me/m", ref).items() if n != ".gitattributes"}
        assert got == expected, f"stage {stage}"
        assert {n for path, n in whole(hub).items() if "/objects/" in path} == {1}, f"stage {stage}: sent twice"
        assert sum(r.status == 200 for r in hub.requests("POST", "/lfs/complete/")) == 1, f"stage {stage}"
        assert len(repo.commits) == 2 + bool(seeded), f"stage {stage}: more commits than needed"
        assert len(repo.discussions) == bool(options.get("create_pr"))
        stage += 1
    assert stage >= 15
