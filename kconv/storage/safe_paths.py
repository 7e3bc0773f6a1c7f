"""Which names from outside (Hub listings, indexes, manifests, side files, cards) may be joined to a folder; the one place.

| a name is refused when | as in |
|---|---|
| it is empty, or a part of it is | `""`, `a//b`, `a/` |
| it is absolute, or names a drive | `/etc/x`, `C:x` |
| a part leads up or nowhere | `../x`, `a/../../x`, `a/./x` |
| it holds a NUL, a backslash, or what UTF-8 cannot write | `a\\\\b` |
| a part is longer than file systems take | 256 bytes |
| it lies below a name that is a file | `config.json/x` |
| a link stands on the way (`inside`) | `side/x` where `side` leads elsewhere |

Nothing that is hidden or in `LEFTOVERS` is part of a checkpoint: it is neither copied nor published.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from pathlib import Path

from kconv.errors import KconvError
from kconv.text.printable import printable

LONGEST_PART, LONGEST = 255, 4000
MOST_SHOWN = 20
LEFTOVERS = (
    ".git", ".cache", "__pycache__", ".ipynb_checkpoints", ".venv", "wandb", "*.pyc", "*.tmp", "*.temp", "*.part", "*.partial",
    "*.incomplete", "*.lock", "*.log", "*.swp", "*~", ".env", ".env.*", ".DS_Store", "Thumbs.db", ".kconv-*", "nohup.out",
)  # fmt: skip
WRITTEN = ("config.json", "kconv.json", "*.safetensors", "*.safetensors.index.json")
"""What a conversion writes itself: nothing may lie below such a name."""


def fault(name: object) -> str | None:
    """Why a relative name must not be joined to any folder; None when it may."""
    if not isinstance(name, str):
        return "is no text"
    parts = name.split("/")
    checks = {
        "is empty": not name,
        "holds a NUL": "\0" in name,
        "holds a backslash": "\\" in name,
        "is absolute": name.startswith("/"),
        "names a drive": re.match(r"[A-Za-z]:", name) is not None,
        "has an empty part": "" in parts,
        "leads out of the folder": ".." in parts,
        "has a part that is only a dot": "." in parts,
        "is no UTF-8 text": _undecodable(name),
    }
    found = next((why for why, wrong in checks.items() if wrong), None)
    if found is None and (len(name) > LONGEST or max(len(p.encode()) for p in parts) > LONGEST_PART):
        return "is longer than file systems take"
    return found


def _undecodable(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return True
    return False


def faults(names: Iterable[object]) -> list[str]:
    """A line for each name that must not be joined, or lies below another that is a file or will be one."""
    names = list(names)
    files = set(map(str, names))
    return [f"the file name {shown(n)} {why}" for n in names if (why := fault(n) or _below_a_file(str(n), files))]


def _below_a_file(name: str, files: set[str]) -> str | None:
    parts = name.split("/")
    for i in range(1, len(parts)):
        above = "/".join(parts[:i])
        if above in files or (i == 1 and any(fnmatch.fnmatch(above, pattern) for pattern in WRITTEN)):
            return f"lies below {shown(above)}, which is a file"
    return None


def shown(name: object) -> str:
    """A name as an error shows it, cut short."""
    text = printable(repr(name) if not isinstance(name, str) else name)
    return f"'{text if len(text) <= 200 else text[:200] + '...'}'"


def checked(name: object, where: str) -> str:
    """The name itself; raises KconvError when it must not be joined to a folder. `where` says who gave it."""
    why = fault(name)
    if why is None:
        return str(name)
    raise KconvError(f"{where}: the file name {shown(name)} {why}", hint="do not trust where it came from; nothing was written")


def inside(folder: Path, name: str) -> Path:
    """`folder / name`, for writing; raises KconvError when the name is unsafe or a link stands on the way."""
    path = folder
    for part in checked(name, str(folder)).split("/"):
        path = path / part
        if path.is_symlink():
            raise KconvError(f"{path} is a link: nothing is written through it", hint="remove it, then run again")
    if not path.resolve().is_relative_to(folder.resolve()):
        raise KconvError(f"{path} leads out of {folder}", hint="do not trust where the name came from")
    return path


def is_left_out(name: str, patterns: Iterable[str]) -> bool:
    """Whether a path, or any part of it, matches a pattern."""
    parts = [name, *name.split("/")]
    return any(fnmatch.fnmatch(part, pattern.rstrip("/")) for pattern in patterns for part in parts)


def is_leftover(name: str) -> bool:
    """Whether a file is no part of a checkpoint: hidden, a cache, a temporary or partial file, a lock, a log."""
    return any(part.startswith(".") for part in name.split("/")) or is_left_out(name, LEFTOVERS)
