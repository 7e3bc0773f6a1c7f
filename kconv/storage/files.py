"""Where bytes come from: a folder of files, read by `pread`, or anything that derives from `Files`.

| class | its files |
|---|---|
| `Files` | what the engine asks of a source: names, sizes, ranges, a fingerprint; the rest has defaults |
| `RemoteFiles` | can be brought here whole and have stated hashes (`kconv.storage.hub`) |
| `LocalFiles` | of a folder, by `pread` |
| `MappedFiles` | of a folder, as memory maps |
"""

from __future__ import annotations

import errno
import os
import re
import threading
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kconv.errors import KconvError, Unreadable
from kconv.storage.safe_paths import checked

if TYPE_CHECKING:
    import numpy as np

OPEN_FILES = 8
PIECE = 8 << 20


class Files(ABC):
    """A read-only set of files; a source of another kind derives from it and says more where it knows more.

    `where` is its address in messages, `root` its folder where it has one; `repo_id` and `revision` are the Hub's; `notes`
    are for the reader of a plan.
    """

    where: str
    root: Path | None = None
    repo_id: str | None = None
    revision: str | None = None
    notes: Sequence[str] = ()

    @abstractmethod
    def names(self) -> list[str]:
        """Relative names of all regular files, sorted."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Bytes of one file."""

    @abstractmethod
    def fingerprint(self, name: str) -> str:
        """A short text that differs when the file was changed."""

    @abstractmethod
    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """`length` bytes from `offset` (to the end by default); raises KconvError when they are not there."""

    @abstractmethod
    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`."""

    def stream(self, name: str, offset: int, n: int) -> Iterator[bytes]:
        """Exactly `n` bytes from `offset`, in pieces."""
        for at in range(0, n, PIECE):
            yield self.read(name, offset + at, min(PIECE, n - at))

    def view(self, name: str, offset: int, length: int) -> np.ndarray | None:
        """Bytes of a file in memory, 1-D uint8, where they need not be read; else None."""
        return None

    def advise(self, ranges: list[tuple[str, int, int]], *, needed: bool) -> None:
        """Hear which ranges (name, offset, bytes) will be read soon, or not again."""

    def is_hole(self, name: str, offset: int, length: int) -> bool:
        """Whether a range is known to be zeros that are not stored."""
        return False

    def folders(self) -> list[str]:
        """Relative names of the visible folders inside, sorted."""
        return []

    def unsafe_links(self) -> list[str]:
        """Lines about symbolic links that lead nowhere or out of the folder."""
        return []

    def sha256(self, name: str) -> str | None:
        """The sha256 that the place states for a file; None where it states none."""
        return None

    def close(self) -> None:
        """Give back what is open; it is opened again when it is used again."""


class RemoteFiles(Files):
    """Files that lie elsewhere: brought here whole, and held against the hashes that the place states."""

    repo_id: str
    revision: str

    @abstractmethod
    def download(
        self, name: str, dest: Path, *, progress: Callable[[int], None] | None = None, link: bool = False
    ) -> Path:
        """Bring a file to `dest` and hold it against its hash; `progress` is called with the bytes of each piece."""

    @abstractmethod
    def holds(self, name: str, path: Path) -> bool:
        """Whether a local file has the hash that is stated for `name`."""

    @abstractmethod
    def states(self, name: str, files: Files, theirs: str | None = None) -> bool:
        """Whether a file of other files, `theirs` or of the same name, has the hash that is stated for `name`."""


class Descriptors:
    """Open file descriptors by name, shared by threads; closes the least recently used beyond `limit`."""

    def __init__(self, opener: Callable[[str], int], limit: int = OPEN_FILES) -> None:
        self._opener, self._limit = opener, limit
        self._open: OrderedDict[str, list[int]] = OrderedDict()  # name -> [descriptor, users]
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._open)

    @contextmanager
    def use(self, name: str) -> Iterator[int]:
        """A descriptor of the file that stays open inside the block."""
        with self._lock:
            slot = self._open.get(name)
            if slot is None:
                slot = self._open[name] = [self._opener(name), 0]
            self._open.move_to_end(name)
            slot[1] += 1
            self._close_idle(keep=self._limit)
        try:
            yield slot[0]
        finally:
            with self._lock:
                slot[1] -= 1

    def _close_idle(self, keep: int) -> None:
        idle = [n for n, (_, users) in self._open.items() if users == 0]
        for name in idle[: max(0, len(self._open) - keep)]:
            os.close(self._open.pop(name)[0])

    def close(self) -> None:
        """Close every descriptor that nobody uses."""
        with self._lock:
            self._close_idle(keep=0)

    def forget(self, name: str) -> None:
        """Close a file's descriptor, because the file goes away."""
        with self._lock:
            if name in self._open and self._open[name][1] == 0:
                os.close(self._open.pop(name)[0])


def _close_all(slots: dict[str, list[int]]) -> None:
    for fd, _ in slots.values():
        os.close(fd)
    slots.clear()


@contextmanager
def released(*sources: Files) -> Iterator[None]:
    """Close the descriptors of these files when the block ends; they are opened again when they are used again."""
    try:
        yield
    finally:
        for files in sources:
            files.close()


def pread_full(fd: int, buffer: memoryview, offset: int, path: object) -> None:
    """Fill `buffer` from `offset`; raises KconvError when the file ends before."""
    done = 0
    while done < len(buffer):
        got = os.preadv(fd, [buffer[done:]], offset + done)
        if got == 0:
            raise KconvError(
                f"{path} ends at byte {offset + done}, {len(buffer) - done} bytes before its header says",
                hint="the file was cut or changed while it was read; fetch it again",
            )
        done += got


def pwrite_full(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`."""
    while data:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


def _cannot_list(error: OSError) -> None:
    raise Unreadable(str(error.filename), error) from error


def _in_store(target: Path, root: Path) -> bool:
    """Whether a link ends at a blob of the repository that `root` is a snapshot of, or of its cache (`hub_cache`)."""
    if target.parent.name == "blobs":
        return target.parent.parent in root.parents
    shared = target.parent.parent
    hashed = re.fullmatch(r"[0-9a-f]{64}", target.name) and target.parent.name == target.name[:2]
    repo = next((p.parent for p in root.parents if p.name == "snapshots"), None)
    return bool(hashed and shared.name == "blobs" and repo and repo.name.startswith("models--") and shared.parent == repo.parent)


def resolved(path: Path) -> Path | None:
    """Where a path leads in the end; None for links in a circle."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # Python before 3.13 says RuntimeError
        return None


class LocalFiles(Files):
    """Files of a folder (or one single file), read with `pread`; keeps at most `OPEN_FILES` descriptors."""

    root: Path

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.root = Path(path)
        self.where = str(path)
        self.single = self.root.name if self.root.is_file() else None
        if self.single:
            self.root = self.root.parent
        self.fds = Descriptors(lambda name: os.open(self.path(name), os.O_RDONLY))
        self._sparse: dict[str, bool] = {}
        self.drop_pages = False

    def names(self) -> list[str]:
        if self.single:
            beside = [n for n in ("config.json",) if (self.root / n).is_file()]
            return sorted([self.single, *beside])
        return sorted(str(path.relative_to(self.root)) for path, _ in self._walk() if path.is_file())

    def folders(self) -> list[str]:
        """Relative names of the visible folders inside."""
        return sorted(str(path.relative_to(self.root)) for path, is_folder in self._walk() if is_folder)

    def unsafe_links(self) -> list[str]:
        """Symbolic links that lead nowhere, or out of the folder and not into a content store (as the Hub cache's do)."""
        root, found = self.root.resolve(), []
        links = [p for p, _ in self._walk() if p.is_symlink()] if not self.single else []
        for path in sorted(links):
            name, target = path.relative_to(self.root), resolved(path)
            if target is None:
                found.append(f"{name} is a link in a circle, to {os.readlink(path)}")
            elif not target.exists():
                found.append(f"{name} is a link to {os.readlink(path)}, which is not there")
            elif not target.is_relative_to(root) and not _in_store(target, root) and not os.environ.get("KCONV_FOLLOW_LINKS"):
                found.append(f"{name} is a link that leads out of the folder, to {os.readlink(path)}")
        return found

    def _walk(self) -> Iterator[tuple[Path, bool]]:
        """Every visible folder and every file, with whether it is a folder; links to folders are not followed."""
        for base, folders, files in os.walk(self.root, onerror=_cannot_list):
            folders[:] = [f for f in folders if not f.startswith(".")]
            yield from ((Path(base, f), True) for f in folders)
            yield from ((Path(base, f), False) for f in files)

    def path(self, name: str) -> Path:
        """The local path of a file."""
        return self.root / checked(name, self.where)

    def size(self, name: str) -> int:
        return self.path(name).stat().st_size

    def fingerprint(self, name: str) -> str:
        s = self.path(name).stat()
        return f"{s.st_size}-{s.st_mtime_ns}-{s.st_ino}"

    def stamp(self, name: str) -> str:
        """As `fingerprint`, but the same for a copy that kept its times."""
        s = self.path(name).stat()
        return f"{s.st_size}-{s.st_mtime_ns}"

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        fd = os.open(self.path(name), os.O_RDONLY)  # small and rare: nothing stays open after a plan
        try:
            data = bytearray(os.fstat(fd).st_size - offset if length is None else length)
            pread_full(fd, memoryview(data), offset, self.path(name))
            return bytes(data)
        finally:
            os.close(fd)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        with self.fds.use(name) as fd:
            pread_full(fd, buffer, offset, self.path(name))

    def advise(self, ranges: list[tuple[str, int, int]], *, needed: bool) -> None:
        """Tell the kernel that ranges will be read soon, or (when the source is larger than memory) not again."""
        if not needed and not self.drop_pages:
            return
        advice = os.POSIX_FADV_WILLNEED if needed else os.POSIX_FADV_DONTNEED
        for name, offset, length in ranges:
            if self.is_hole(name, offset, length):
                continue  # reading ahead would fill the page cache with zeros
            with self.fds.use(name) as fd:
                os.posix_fadvise(fd, offset, length, advice)

    def is_hole(self, name: str, offset: int, length: int) -> bool:
        """Whether a range is a hole of a sparse file, that is, reads as zeros without being stored."""
        with self.fds.use(name) as fd:
            if name not in self._sparse:
                s = os.fstat(fd)
                self._sparse[name] = s.st_blocks * 512 < s.st_size
            if not self._sparse[name]:
                return False
            try:
                return os.lseek(fd, offset, os.SEEK_DATA) >= offset + length
            except OSError as e:
                return e.errno == errno.ENXIO

    def close(self) -> None:
        """Close every descriptor that nobody uses."""
        self.fds.close()


class MappedFiles(LocalFiles):
    """Files of a folder as memory maps: no copy out of the page cache, for local NVMe; slow on network disks."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._maps: dict[str, np.ndarray] = {}

    def view(self, name: str, offset: int, length: int) -> np.ndarray:
        """Bytes of a file, 1-D uint8; writes stay private."""
        if name not in self._maps:
            import numpy as np

            self._maps[name] = np.memmap(self.path(name), np.uint8, "c")
        return self._maps[name][offset : offset + length]
