"""Direct I/O: large writes go past the page cache, from buffers that lie as the file's pages do.

| part of a region | is written |
|---|---|
| its whole pages, where they are `LEAST` bytes or more | directly: no copy, no dirty pages, no memory taken from others |
| what is left of its first and last page, and small regions | through the page cache, as neighbours share those pages |

No page is ever written both ways, so the two never disagree. Only file systems whose direct writes are known to be as
fast as the device (`SYSTEMS`) are written so; where one refuses nevertheless, everything goes through the page cache.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from kconv.storage.files import Descriptors, pwrite_full

if TYPE_CHECKING:
    import numpy as np

PAGE = 4096
LEAST = 256 << 10
SYSTEMS = frozenset({"ext4", "xfs"})
REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT})
"""The last is said of memory that belongs to a device driver."""


def phase(offset: int, align: int) -> int:
    """Where in a page a buffer should begin whose bytes go to `offset`: as in the file, if that keeps it aligned."""
    return offset % PAGE if offset % align == 0 else 0


def whole_pages(data: np.ndarray, offset: int) -> tuple[int, int]:
    """Start and end, in `data`, of the pages that a direct write to `offset` can cover; an empty range where none can."""
    start, end = -offset % PAGE, (offset + data.nbytes) // PAGE * PAGE - offset
    if end - start < LEAST or (data.ctypes.data + start) % PAGE:
        return 0, 0
    return start, end


def file_system(path: Path) -> str:
    """Type of the file system that holds a path, by the longest mount point above it; empty where the system does not say."""
    best, kind, path = -1, "", path.resolve()
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        mount, found = (part.replace("\\040", " ") for part in line.split(" ")[1:3])
        if path.is_relative_to(mount) and len(mount) >= best:
            best, kind = len(mount), found
    return kind


class DirectWriter:
    """Writes the whole pages of large regions of a folder's files, as long as the file system takes them."""

    def __init__(self, folder: Path, wanted: bool | None, limit: int) -> None:
        self.on = wanted if wanted is not None else file_system(folder.parent) in SYSTEMS
        self._fds = Descriptors(lambda name: os.open(folder / name, os.O_RDWR | os.O_DIRECT), limit)

    def write(self, name: str, data: np.ndarray, offset: int) -> tuple[int, int]:
        """Write what can be written directly; returns its start and end in `data`, the rest is the caller's."""
        start, end = whole_pages(data, offset) if self.on else (0, 0)
        if not end:
            return 0, 0
        try:
            with self._fds.use(name) as fd:
                pwrite_full(fd, data.data[start:end], offset + start)
        except OSError as e:
            if e.errno not in REFUSALS:
                raise
            self.on = False
            return 0, 0
        return start, end

    def close(self) -> None:
        """Close every descriptor."""
        self._fds.close()
