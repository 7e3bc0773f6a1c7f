"""Converting straight from the Hub with bounded disk: whole shards are downloaded one by one, read, and deleted.

| what | where |
|---|---|
| headers, config, indexes | byte ranges, nothing stored |
| a shard whose slabs are due | `.OUT.partial/.kconv-stage/`, resumable, its hash checked against the Hub's |
| shards not used any more | deleted, least recently used first, so that about two more than workers lie there |

A published K3 shard holds one layer, and output goes layer by layer, so each shard is downloaded once. Whatever order a
plan asks for is right all the same: a shard that was deleted too early is fetched again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

from kconv.storage.files import Files, LocalFiles, RemoteFiles
from kconv.storage.safe_paths import inside


class StagedFiles(Files):
    """A Hub repository whose shards are read from downloaded copies; the other calls go to the Hub."""

    def __init__(self, hub: RemoteFiles, folder: Path, keep: int) -> None:
        self.hub, self.folder, self.keep = hub, folder, keep
        self.where, self.revision = hub.where, hub.revision
        self.downloaded = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._local = LocalFiles(folder)
        self._users: OrderedDict[str, int] = OrderedDict()
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        return self.hub.names()

    def size(self, name: str) -> int:
        return self.hub.size(name)

    def fingerprint(self, name: str) -> str:
        return self.hub.fingerprint(name)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        return self.hub.read(name, offset, length)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from a shard, which is downloaded first when it is not there."""
        with self._lock:
            lock = self._locks.setdefault(name, threading.Lock())
            self._users[name] = self._users.get(name, 0) + 1
            self._users.move_to_end(name)
        try:
            with lock:
                path = inside(self.folder, name)
                if not path.exists():
                    self._make_room()
                    self.hub.download(name, path, progress=self._count, link=True)
            self._local.read_into(name, offset, buffer)
        finally:
            with self._lock:
                self._users[name] -= 1

    def _count(self, nbytes: int) -> None:
        self.downloaded += nbytes

    def _make_room(self) -> None:
        """Delete copies that nobody reads, oldest first, so that one more makes at most `keep`."""
        with self._lock:
            here = [n for n in self._users if (self.folder / n).exists()]
            here += [p.name for p in self.folder.iterdir() if p.name not in self._users and p.suffix == ".safetensors"]
            idle = [n for n in here if not self._users.get(n)]
            for name in idle[: max(0, len(here) + 1 - self.keep)]:
                self._local.fds.forget(name)
                (self.folder / name).unlink()

    def clear(self) -> None:
        """Delete every copy."""
        self._local.close()
        for path in self.folder.iterdir():
            path.unlink()
        self.folder.rmdir()
