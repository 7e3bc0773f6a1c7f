"""Hashes of local files as the Hub states them, remembered between runs so that a resumed upload does not read 1.56 TB again.

sha256 is what the Hub states for LFS files, git's blob id (sha1 over a short header and the content) for all others.
The memory is keyed by path, size, modification time and inode, as git's index is, and lies in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kconv.errors import KconvError
from kconv.storage import json_text
from kconv.storage.files import LocalFiles
from kconv.storage.hashing import DIGESTS, digests_of

SMALL = 10 * 1000**2


@dataclass(frozen=True)
class Hashes:
    """A file's size and digests by algorithm; `git_sha1` only for files that git may hold itself (up to 10 MB)."""

    size: int
    digests: dict[str, str]
    git_sha1: str | None

    @property
    def sha256(self) -> str:
        """What the Hub states for LFS files."""
        return self.digests["sha256"]


def cache_folder() -> Path:
    """Where kconv remembers things (XDG_CACHE_HOME or ~/.cache)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kconv"


def _is_row(row: Any) -> bool:
    """Whether a remembered row is as `HashMemory` writes it."""
    if not isinstance(row, dict) or not isinstance(row.get("state"), list) or not isinstance(row.get("digests"), dict):
        return False
    return set(DIGESTS) <= set(row["digests"]) and isinstance(row.get("git_sha1", 0), str | None)


class HashMemory:
    """Hashes of the files of one folder."""

    def __init__(self, folder: Path) -> None:
        name = hashlib.sha1(str(folder.resolve()).encode()).hexdigest()[:16]
        self.path = cache_folder() / f"digests-{name}.json"
        try:
            found = json_text.read_path(self.path, "the memory", hint="remove it")
        except KconvError:
            found = {}
        self.known: dict[str, dict] = {name: row for name, row in found.items() if _is_row(row)}

    def of(self, path: Path, *, reading: Callable[[int], None] | None = None) -> Hashes:
        """The hashes of a file, from memory if it did not change; `reading` hears the size of a file that is read."""
        stat = path.stat()
        key, state = str(path.resolve()), [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        row = self.known.get(key)
        if row is None or row["state"] != state:
            if reading:
                reading(stat.st_size)
            small = path.read_bytes() if stat.st_size <= SMALL else None
            git = hashlib.sha1(b"blob %d\0" % len(small) + small).hexdigest() if small is not None else None
            digests = digests_of(LocalFiles(path.parent), path.name, *DIGESTS)
            row = self.known[key] = {"state": state, "git_sha1": git, "digests": digests}
            self._save()
        return Hashes(stat.st_size, row["digests"], row["git_sha1"])

    def _save(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.path.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(self.known))
            os.replace(temporary, self.path)
        except OSError:
            pass  # a read-only home costs reading the files again, nothing else
