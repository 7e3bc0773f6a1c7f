"""The standard cache of huggingface_hub (`HF_HUB_CACHE`): its form, its snapshots, and `hf://` without a network.

| in the cache | made by | is |
|---|---|---|
| `models--O--N/snapshots/COMMIT/FILE` | all clients | a link to the next, or a copy where links cannot be made |
| `models--O--N/blobs/HASH` | all clients | the content, or (over xet, huggingface_hub 2) a link to the next |
| `blobs/HA/HASH` | huggingface_hub 2 over xet | the content, shared by all repositories of the cache |
| `models--O--N/refs/REVISION` | all clients | the commit that a branch or tag was when it was fetched |

A link that ends anywhere else leads out of the folder. `KCONV_FOLLOW_LINKS=1` reads it all the same.
"""

from __future__ import annotations

import re
from pathlib import Path

from kconv.errors import EnvironmentLacks
from kconv.storage.files import LocalFiles
from kconv.storage.safe_paths import fault

COMMIT = re.compile(r"[0-9a-f]{40}")


class Snapshot(LocalFiles):
    """A snapshot of the cache under the address that it was asked for by; `revision` is its commit."""

    def __init__(self, folder: Path, source: str, repo_id: str) -> None:
        super().__init__(folder)
        self.where, self.repo_id, self.revision = source, repo_id, folder.name
        self.notes = [f"{source} is read from the cache: {folder}"]


def cached_snapshot(repo_id: str, revision: str | None) -> Path | None:
    """The folder of a revision that the cache holds, in part or whole; None where it holds none."""
    from huggingface_hub import constants

    repo = Path(constants.HF_HUB_CACHE) / f"models--{repo_id.replace('/', '--')}"
    commit = revision or "main"
    if not COMMIT.fullmatch(commit):
        ref = repo / "refs" / commit
        if fault(commit) or not ref.is_file():
            return None
        commit = ref.read_bytes()[:41].decode("ascii", "replace").strip()
    folder = repo / "snapshots" / commit
    return folder if COMMIT.fullmatch(commit) and folder.is_dir() else None


def is_offline() -> bool:
    """Whether huggingface_hub is told to stay away from the network."""
    from huggingface_hub import constants

    asked = getattr(constants, "is_offline_mode", None)
    return bool(asked() if asked else constants.HF_HUB_OFFLINE)


def offline(source: str, repo_id: str, revision: str | None) -> Snapshot:
    """The files of an `hf://` source from the cache alone; raises EnvironmentLacks where the cache does not hold it."""
    folder = cached_snapshot(repo_id, revision)
    if folder is None:
        raise EnvironmentLacks(
            f"{source}: HF_HUB_OFFLINE is set, and the cache holds no snapshot of it",
            hint="unset it, fetch it with `hf download`, or give a local folder",
        )
    return Snapshot(folder, source, repo_id)
