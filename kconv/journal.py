"""The journal of a conversion: which slabs are finished, with checksums, and since when they are safely on disk.

| line | meaning |
|---|---|
| `{"plan": ..., "layout": ..., "source": ...}` | the run's identity; another identity refuses to resume |
| `N CHECKSUM` | slab N was handed to the file system |
| `sync` | everything above was followed by fdatasync of every output file |

A process that is killed loses nothing that it wrote; a machine that loses power may. So on resume, slabs above the
last `sync` are trusted and later ones are read back and held against their checksums.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from kconv.errors import KconvError


class Journal:
    """An append-only file of finished slabs."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path = path
        self.identity = json.loads(json.dumps(identity))
        self.durable: dict[str, str] = {}
        self.claimed: dict[str, str] = {}
        self._lock = threading.Lock()
        self._fd = -1

    def open(self) -> None:
        """Start a new journal, or read the one that is there; refuses one of another run."""
        exists = self.path.exists()
        if exists:
            self._load()
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if not exists:
            os.write(self._fd, json.dumps(self.identity).encode() + b"\n")

    def _load(self) -> None:
        head, _, body = self.path.read_bytes().partition(b"\n")
        try:
            found = json.loads(head)
        except ValueError:
            self.path.unlink()
            return
        if found != self.identity:
            differing = sorted(k for k in {*found, *self.identity} if found.get(k) != self.identity.get(k))
            raise KconvError(
                f"{self.path.parent} was begun by another run: {', '.join(differing)} differ",
                hint="run with the same source and options to resume, or with --overwrite to start again",
            )
        whole, _, torn = body.rpartition(b"\n")
        for line in whole.decode().splitlines():
            if line == "sync":
                self.durable.update(self.claimed)
                self.claimed.clear()
            else:
                number, checksum = line.split()
                self.claimed[number] = checksum
        if torn:
            os.truncate(self.path, len(head) + 1 + len(whole) + (1 if whole else 0))

    def finished(self, number: str, checksum: str) -> None:
        """Record a slab whose bytes were all written."""
        with self._lock:
            os.write(self._fd, f"{number} {checksum}\n".encode())

    def synced(self) -> None:
        """Record that the output files were synced after every slab recorded so far."""
        with self._lock:
            os.write(self._fd, b"sync\n")
            os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
