"""sha256 of large local files: read once by several threads, then remembered for as long as the file stays as it is.

| a digest is remembered | because |
|---|---|
| under path, device, inode, size, time of change and of content (nanoseconds) | a file that was written, replaced or touched has others |
| in `$XDG_CACHE_HOME/kconv/sha256` (`~/.cache` without it), one small file each | two processes never share a file that is written |
| only when the file rested for two seconds before it was read | a later write within the clock's tick would go unseen |

A folder that cannot be written remembers nothing and is no error. `KCONV_NO_HASH_CACHE=1` reads every file again.
"""  # noqa: E501

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kconv.console import Meter
from kconv.errors import KconvError
from kconv.storage.files import LocalFiles

PIECE = 8 << 20
MOST_THREADS = 8
RESTED = 2.0
SHOWN = 256 << 20
"""Bytes from which on progress is shown."""


def cache_folder() -> Path:
    """Where digests are remembered."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kconv" / "sha256"


def sha256_of_files(files: LocalFiles, names: Sequence[str], what: str, *, quiet: bool = True) -> dict[str, str]:
    """Name -> sha256 of local files.

    Args:
        files: the folder.
        names: the files in it.
        what: what they are, for the progress line.
        quiet: show no progress on stderr.

    Raises KconvError when a file is not there or changes while it is read.
    """
    paths = {name: files.path(name) for name in names}
    found = {name: known for name, path in paths.items() if (known := _recall(path))}
    rest = {name: path for name, path in paths.items() if name not in found}
    total = sum(path.stat().st_size for path in rest.values() if path.is_file())
    with Meter(f"reading the {what}", total, quiet=quiet or total < SHOWN) as meter:
        read = _Count(meter)
        with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
            digests = pool.map(lambda path: _hash(path, read), rest.values())
            return found | dict(zip(rest, digests, strict=True))


class _Count:
    """Bytes read by all threads, told to a meter."""

    def __init__(self, meter: Callable[[int], None]) -> None:
        self._meter, self._done, self._lock = meter, 0, threading.Lock()

    def __call__(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            self._meter(self._done)


def _hash(path: Path, read: _Count) -> str:
    if path.exists() and not path.is_file():
        raise KconvError(f"{path} is no regular file", hint="fetch the checkpoint again")
    try:
        before, digest, piece = _identity(path), hashlib.sha256(), bytearray(PIECE)
        with path.open("rb", buffering=0) as f:
            while n := f.readinto(piece):
                digest.update(memoryview(piece)[:n])
                read(n)
    except FileNotFoundError as e:
        raise KconvError(f"{path} is not there, though the index names it", hint="fetch the checkpoint again") from e
    if _identity(path) != before:
        raise KconvError(f"{path} was written while it was read", hint="wait until nothing writes to the folder")
    _remember(before, digest.hexdigest())
    return digest.hexdigest()


def _identity(path: Path) -> dict[str, int | str]:
    s, real = path.stat(), str(path.resolve())
    times = {"mtime_ns": s.st_mtime_ns, "ctime_ns": s.st_ctime_ns}
    return {"path": real, "device": s.st_dev, "inode": s.st_ino, "size": s.st_size, **times}


def _place(identity: dict[str, int | str]) -> Path:
    return cache_folder() / f"{hashlib.sha256(str(identity['path']).encode()).hexdigest()}.json"


def _recall(path: Path) -> str | None:
    if os.environ.get("KCONV_NO_HASH_CACHE") or not path.is_file():
        return None
    identity = _identity(path)
    try:
        kept = json.loads(_place(identity).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    known = kept.get("sha256") if isinstance(kept, dict) and kept.get("file") == identity else None
    return known if isinstance(known, str) and len(known) == 64 else None


def _remember(identity: dict[str, int | str], sha256: str) -> None:
    latest = max(int(identity["mtime_ns"]), int(identity["ctime_ns"])) / 1e9
    if time.time() - latest < RESTED:
        return
    place = _place(identity)
    partial = place.with_name(f".{place.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"file": identity, "sha256": sha256}), encoding="utf-8")
        partial.replace(place)
    except OSError:
        partial.unlink(missing_ok=True)
