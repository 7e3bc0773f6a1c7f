"""Digests of files: the output's while they are written, a finished file's in one pass.

| digest | speed a core | for |
|---|---|---|
| `xxh3-128` | tens of GB/s | whether a file is what was written; the default |
| `sha256` | 1 to 2 GB/s | that, and whether somebody changed it; what the Hub states |

Workers hash what they write while it is in the cache, in turn. Bytes whose turn does not come are kept, a few MB at most;
what finds no room, or was written by an earlier run, is read back from the file once everything before it is written. So
nothing is left to do at the end.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from kconv.storage.files import Descriptors, Files, pread_full

DIGESTS: dict[str, Callable[..., Any]] = {"xxh3-128": xxhash.xxh3_128, "sha256": hashlib.sha256}
DEFAULT_DIGEST = "xxh3-128"
BLOCK = 4 << 20
WORTH = 16 << 20
KEPT = 64 << 20
SPARE = 8
PATIENCE = 0.1
"""Seconds that a worker waits for the one before it, which is many times what that one takes to read and convert a part."""
_ZEROS = bytes(1 << 20)


class TrailingHash:
    """The digest of one growing file of known final size."""

    def __init__(self, fds: Descriptors, name: str, size: int, header: bytes, algorithm: str, spare: Spare) -> None:
        front = len(header)
        self._fds, self._name, self.size, self._front = fds, name, size, front
        self._gaps: dict[int, int] = {}
        self._kept: dict[int, np.ndarray | int] = {}  # offset -> bytes, or how many zero bytes
        self._begun: dict[int, tuple[int, int]] = {}  # offset -> the thread that works on it, bytes
        self._room = KEPT
        self._hashed = front
        self._digest = DIGESTS[algorithm](header)
        self._spare = spare
        self._lock = threading.Condition()
        self._busy = False

    def begin(self, offset: int, nbytes: int) -> None:
        """Note that the calling thread works on what will be written at `offset`."""
        with self._lock:
            self._begun[offset] = threading.get_ident(), nbytes

    def take(self, offset: int, data: memoryview | int) -> bool:
        """Hash bytes (or so many zero bytes) if it is their turn, or will be when others are done; false if it is not."""
        with self._lock:
            self._lock.wait_for(lambda: not self._coming(offset), PATIENCE)
            mine = not self._busy and offset == self._hashed
            if mine:
                self._busy = True
            else:
                self._begun.pop(offset, None)
        if mine:
            self._update(data)
            self._begun.pop(offset, None)
            self._go_on(reading=False)
        return mine

    def _coming(self, offset: int) -> bool:
        """Whether all that is missing before `offset` is being worked on by other threads."""
        at = self._hashed
        while at < offset:
            thread, nbytes = self._begun.get(at, (0, 0))
            if not nbytes or thread == threading.get_ident():
                return False
            at += nbytes
        return at == offset and (self._busy or at != self._hashed)

    def keep(self, offset: int, data: memoryview | int) -> None:
        """Keep bytes until it is their turn, a copy of them, if there is room."""
        need = 0 if isinstance(data, int) else len(data)
        with self._lock:
            if offset < self._hashed or need > self._room:
                return
            self._room -= need
        kept = data if isinstance(data, int) else self._spare.copy(data)
        with self._lock:
            self._kept[offset] = kept
            if self._busy or offset != self._hashed:
                return
            self._busy = True
        self._go_on(reading=False)

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
        with self._lock:
            if self._busy or (not everything and self._front - self._hashed < WORTH):
                return
            self._busy = True
        self._go_on(reading=True)

    def hexdigest(self) -> str:
        """The digest; every byte must have been written, and nobody be at it any more."""
        self.advance(everything=True)
        if self._hashed != self.size:
            raise AssertionError(f"{self.size - self._hashed} bytes were never written")
        return self._digest.hexdigest()

    def _go_on(self, *, reading: bool) -> None:
        """Hash what is next and was kept, or (`reading`) can be read back; gives up the turn when there is nothing."""
        while True:
            with self._lock:
                for offset in [o for o in self._kept if o < self._hashed]:
                    self._release(self._kept.pop(offset))
                data = self._kept.pop(self._hashed, None)
                behind = self._front - self._hashed if reading and data is None else 0
                if data is None and behind <= 0:
                    self._busy = False
                    self._lock.notify_all()
                    return
            if data is None:
                self._update(self._read(min(BLOCK, behind)))
            else:
                self._update(data)
                with self._lock:
                    self._release(data)

    def _release(self, data: np.ndarray | int) -> None:
        if not isinstance(data, int):
            self._room += data.nbytes
            self._spare.give(data)

    def _read(self, nbytes: int) -> memoryview:
        view = memoryview(bytearray(nbytes))
        with self._fds.use(self._name) as fd:
            pread_full(fd, view, self._hashed, self._name)
        return view

    def _update(self, data: memoryview | np.ndarray | int) -> None:
        """Hash the next bytes; only the thread whose turn it is calls this."""
        if isinstance(data, int):
            for at in range(0, data, len(_ZEROS)):
                self._digest.update(memoryview(_ZEROS)[: data - at])
            self._hashed += data
        else:
            self._digest.update(data)
            self._hashed += data.nbytes


class Spare:
    """Buffers for copies, used again: fresh memory costs more than the copy."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []

    def copy(self, data: memoryview) -> np.ndarray:
        """The bytes in a buffer of their own."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = np.empty(0, np.uint8)
        if buffer.size < data.nbytes:
            buffer = np.empty(max(data.nbytes, BLOCK), np.uint8)
        kept = buffer[: data.nbytes]
        np.copyto(kept, np.frombuffer(data, np.uint8))
        return kept

    def give(self, kept: np.ndarray) -> None:
        """Take back what `copy` gave."""
        if isinstance(kept.base, np.ndarray) and len(self._free) < SPARE:
            self._free.append(kept.base)


def digests_of(files: Files, name: str, *algorithms: str) -> dict[str, str]:
    """Algorithm -> hex digest of a file, read once."""
    digests, size = {a: DIGESTS[a]() for a in algorithms}, files.size(name)
    for at in range(0, size, BLOCK):
        block = files.read(name, at, min(BLOCK, size - at))
        for digest in digests.values():
            digest.update(block)
    return {a: d.hexdigest() for a, d in digests.items()}


def sha256_file(path: Path) -> str:
    """sha256 of a local file, read once."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def stated(entry: Mapping[str, Any]) -> tuple[str, str] | None:
    """Algorithm and digest that a manifest's entry states, None where it states none that is known here."""
    return next(((a, entry[a]) for a in DIGESTS if a in entry), None)
