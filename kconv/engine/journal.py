"""The journal of a part of a conversion: which slabs are finished, with checksums, and since when they are safely on disk.

| line | meaning |
|---|---|
| `F.K CHECKSUM` | slab K of file F was handed to the file system |
| `sync` | every output file was synced after the slabs above |
| `done` | all slabs of this part are written and synced |

A process that is killed loses nothing that it wrote; a machine that loses power may. So on resume, slabs above the
last `sync` are trusted and later ones are read back and held against their checksums.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path

from kconv.errors import KconvError

DONE = "done"
SYNC = "sync"
MOST = 256 << 20  # a slab takes a line of 30 bytes, the published checkpoint has 40,779


class Journal:
    """An append-only file of finished slabs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.durable: dict[str, str] = {}
        self.claimed: dict[str, str] = {}
        self._lock = threading.Lock()
        self._fd = -1

    def open(self) -> None:
        """Read what an earlier run left, cut off a torn last line, and open for appending; refuses while another writes it."""
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise KconvError("another process is doing the same part", hint="give each process its own --part I/N") from None
        if os.fstat(self._fd).st_size > MOST:
            os.truncate(self.path, 0)  # no journal: what it may claim is done again
        whole, _, torn = self.path.read_bytes().rpartition(b"\n")
        self._load(whole.decode(errors="replace").splitlines())
        if torn:
            os.truncate(self.path, len(whole) + 1 if whole else 0)

    def _load(self, lines: list[str]) -> None:
        for line in lines:
            if line in (SYNC, DONE):
                self.durable.update(self.claimed)
                self.claimed.clear()
            elif line.count(" ") == 1:
                number, checksum = line.split(" ")
                self.claimed[number] = checksum

    def is_done(self) -> bool:
        """Whether the file ends with `done` (read afresh: another process may write it)."""
        end = f"{DONE}\n".encode()
        try:
            with open(self.path, "rb") as handle:
                handle.seek(max(0, self.path.stat().st_size - len(end)))
                return handle.read(len(end)) == end
        except FileNotFoundError:
            return False

    def holds_work(self) -> bool:
        """Whether anything was finished, in this run or an earlier one."""
        return self.path.exists() and self.path.stat().st_size > 0

    def finished(self, number: str, checksum: str) -> None:
        """Record a slab whose bytes were all written."""
        with self._lock:
            os.write(self._fd, f"{number} {checksum}\n".encode())

    def synced_by(self, sync: Callable[[], None]) -> None:
        """Sync the outputs, then record it; slabs that finish meanwhile are recorded after it."""
        with self._lock:
            sync()
            self._mark(SYNC)

    def synced(self, *, last: bool = False) -> None:
        """Record that the output files were synced after every slab recorded so far."""
        with self._lock:
            self._mark(DONE if last else SYNC)

    def _mark(self, line: str) -> None:
        os.write(self._fd, f"{line}\n".encode())
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
