"""Writing weights: pre-sized output files in the unfinished folder, slabs landing by `pwrite`.

| moment | what is on disk |
|---|---|
| prepare | `.OUT.partial/` with every file at its full size and header, and the journal |
| while running | slabs in any order, large ones past the page cache; zero bytes are not written, the file is a hole there |
| finish | all files synced, side files, index, manifest; then `kconv.checkpoint.folder` puts it in place |
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from kconv.checkpoint.headers import OutFile
from kconv.engine.sink import Sink
from kconv.engine.slabs import Part, Region, Slab
from kconv.storage.direct import DirectWriter
from kconv.storage.files import Descriptors, pread_full, pwrite_full
from kconv.storage.hashing import Spare, TrailingHash

if TYPE_CHECKING:
    import numpy as np

SYNC_FILE_RANGE_WRITE = 2
OPEN_FILES = 32
_libc = ctypes.CDLL(None, use_errno=True)
ZEROS: dict[int, str] = {}


def digest_of(data: np.ndarray) -> str:
    """xxh3-64 of bytes, in hex."""
    return xxhash.xxh3_64_hexdigest(data.data)


def zero_digest(nbytes: int) -> str:
    """`digest_of` so many zero bytes."""
    if nbytes not in ZEROS:
        h, block = xxhash.xxh3_64(), bytes(min(nbytes, 1 << 20))
        for at in range(0, nbytes, 1 << 20):
            h.update(block[: nbytes - at])
        ZEROS[nbytes] = h.hexdigest()
    return ZEROS[nbytes]


class FileSink(Sink):
    """Output files in a folder, written by any number of threads."""

    def __init__(self, folder: Path, files: list[OutFile], algorithm: str | None, direct: bool | None = None) -> None:
        self.folder = folder
        self.files = {f.name: f for f in files}
        self.bytes_written = 0
        self._fds = Descriptors(lambda name: os.open(folder / name, os.O_RDWR), OPEN_FILES)
        self._direct = DirectWriter(folder, direct, OPEN_FILES)
        self._dirty: set[str] = set()
        self._places = {n: (f.name, at) for f in files for n, at in f.starts.items()}
        self.hashes: dict[str, TrailingHash] = {}
        if algorithm:
            spare = Spare()
            self.hashes = {f.name: TrailingHash(self._fds, f.name, f.size, f.header, algorithm, spare) for f in files}

    def prepare(self) -> None:
        """Give every file its header and its full size; safe beside other processes that do the same."""
        for f in self.files.values():
            fd = os.open(self.folder / f.name, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                if os.fstat(fd).st_size != f.size:
                    os.truncate(fd, f.size)
                if os.pread(fd, len(f.header), 0) != f.header:
                    os.pwrite(fd, f.header, 0)
            finally:
                os.close(fd)

    def place(self, name: str) -> tuple[str, int]:
        """File and absolute offset of a target tensor."""
        return self._places[name]

    def begin(self, part: Part) -> None:
        """Note that the calling thread works on a part."""
        for region in part.writes if self.hashes else ():
            self.hashes[region.file].begin(region.offset, region.spec.nbytes)

    def put(self, region: Region, data: np.ndarray) -> str:
        """Write a region's bytes (uint8, 1-D) and return their digest."""
        if not data[:4096].any() and not data.any():
            return self.put_zeros(region)
        digest = self.hashes.get(region.file)
        hashed = digest is None or digest.take(region.offset, data.data)
        self._dirty.add(region.file)
        start, end = self._direct.write(region.file, data, region.offset)
        with self._fds.use(region.file) as fd:
            pwrite_full(fd, data.data[:start], region.offset)
            pwrite_full(fd, data.data[end:], region.offset + end)
            if not end:
                _libc.sync_file_range(fd, ctypes.c_int64(region.offset), ctypes.c_int64(data.nbytes), SYNC_FILE_RANGE_WRITE)
        if digest and not hashed:
            digest.keep(region.offset, data.data)
        self.bytes_written += data.nbytes
        return digest_of(data)

    def put_zeros(self, region: Region) -> str:
        """A region of zero bytes: nothing to write, the files are made as holes and only ever hold their final bytes."""
        digest = self.hashes.get(region.file)
        if digest and not digest.take(region.offset, region.spec.nbytes):
            digest.keep(region.offset, region.spec.nbytes)
        return zero_digest(region.spec.nbytes)

    def finished(self, slab: Slab) -> None:
        """Tell the hashes that a slab's regions hold their final bytes."""
        touched = set()
        for part in slab.parts:
            for region in part.writes:
                if self.hashes:
                    self.hashes[region.file].written(region.offset, region.spec.nbytes)
                    touched.add(region.file)
        for name in touched:
            self.hashes[name].advance()

    def reread(self, region: Region) -> str:
        """Digest of what a region holds on disk."""
        import numpy as np

        data = np.empty(region.spec.nbytes, np.uint8)
        with self._fds.use(region.file) as fd:
            pread_full(fd, data.data, region.offset, self.folder / region.file)
        return digest_of(data)

    def sync(self) -> None:
        """fdatasync of every file written since the last call."""
        dirty, self._dirty = self._dirty, set()
        for name in dirty:
            with self._fds.use(name) as fd:
                os.fdatasync(fd)

    def close(self) -> None:
        """Close every descriptor."""
        self._direct.close()
        self._fds.close()
