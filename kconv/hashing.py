"""sha256 of the output files while they are written: the hash trails behind the finished front of each file.

A worker that writes a file in order hashes its bytes while they are in the cache. What lands out of order is hashed
later, read back from the page cache by whoever finishes a slab, once everything before it is written; so nothing is
left to do at the end.
"""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

from kconv.files import Descriptors, pread_full

BLOCK = 4 << 20
WORTH = 16 << 20


class TrailingHash:
    """sha256 of one growing file of known final size."""

    def __init__(self, fds: Descriptors, name: str, size: int, header: bytes) -> None:
        front = len(header)
        self._fds, self._name, self.size, self._front = fds, name, size, front
        self._gaps: dict[int, int] = {}
        self._hashed = front
        self._sha = hashlib.sha256(header)
        self._lock = threading.Lock()
        self._busy = threading.Lock()

    def offer(self, offset: int, data: memoryview) -> None:
        """Hash bytes that are being written, if it is their turn and no other thread is at it."""
        if offset != self._hashed or not self._busy.acquire(blocking=False):
            return
        try:
            if offset == self._hashed:
                self._sha.update(data)
                self._hashed += len(data)
        finally:
            self._busy.release()

    def written(self, offset: int, nbytes: int) -> None:
        """Note that a range holds its final bytes."""
        if not nbytes:
            return
        with self._lock:
            self._gaps[offset] = max(nbytes, self._gaps.get(offset, 0))
            while self._front in self._gaps:
                self._front += self._gaps.pop(self._front)

    def advance(self, *, everything: bool = False) -> None:
        """Hash what lies between the hashed part and the front, unless little or another thread is at it."""
        if not everything and (self._front - self._hashed < WORTH):
            return
        if not self._busy.acquire(blocking=everything):
            return
        try:
            buffer = bytearray(BLOCK)
            with self._fds.use(self._name) as fd:
                while self._hashed < self._front:
                    view = memoryview(buffer)[: min(BLOCK, self._front - self._hashed)]
                    pread_full(fd, view, self._hashed, self._name)
                    self._sha.update(view)
                    self._hashed += len(view)
        finally:
            self._busy.release()

    def hexdigest(self) -> str:
        """The digest; every byte must have been written."""
        self.advance(everything=True)
        if self._hashed != self.size:
            raise AssertionError(f"{self.size - self._hashed} bytes were never written")
        return self._sha.hexdigest()


def sha256_file(path: Path) -> str:
    """sha256 of a file, read once."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
