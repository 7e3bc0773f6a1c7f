"""Whether a new folder can be made where it is asked for: its place, and room for it."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from pathlib import Path

from kconv.checkpoint.folder import check_own, manifest_of
from kconv.checkpoint.headers import OutFile
from kconv.checkpoint.reading import MANIFEST
from kconv.console import human
from kconv.errors import EnvironmentLacks, KconvError
from kconv.storage.files import LocalFiles

SLACK = 1 << 20
SPARE_INODES = 64


def check_folders(source: object, out: Path, *, overwrite: bool, resume: bool) -> None:
    """`check_place` and `check_filled`, where nobody else makes the folder."""
    check_place(source, out.resolve(), os.path.ismount(out))
    check_filled(out.resolve(), overwrite=overwrite, resume=resume)


def check_place(source: object, out: Path, is_mount: bool = False, what: str = "source") -> None:
    """Refuse an output that is, holds, or lies inside what is read, and one that cannot be made."""
    if isinstance(source, LocalFiles):
        _refuse_overlap(source, out, what)
    if out.exists() and not out.is_dir():
        raise KconvError(f"the output {out} is a file", hint="give a folder that does not exist yet: convert SOURCE OUT")
    if is_mount:
        raise KconvError(
            f"the output {out} is a mount point, and a finished folder is put in place by a rename",
            hint=f"give a folder in it: {out}/NAME",
        )
    parent = existing(out.parent)
    if not parent.is_dir():
        raise KconvError(f"the output {out} cannot be made: {parent} is a file", hint="give a folder that does not exist yet")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise EnvironmentLacks(
            f"{parent} is not writable, so {out.name} cannot be made there",
            hint="choose another folder or change its permissions",
        )


def _refuse_overlap(source: LocalFiles, out: Path, what: str) -> None:
    root = source.root.resolve()
    if out == root or root.is_relative_to(out) or (out.is_relative_to(root) and not source.single):
        relation = "is" if out == root else "lies inside" if out.is_relative_to(root) else "holds"
        raise KconvError(
            f"the output {out} {relation} the {what} {source.where}",
            hint=f"the {what} is never written to; give a folder beside it: convert SOURCE OUT",
        )


def check_filled(out: Path, *, overwrite: bool, resume: bool) -> None:
    """Refuse an output that is not empty, unless kconv made all of it and it may be replaced."""
    if not out.exists() or not any(out.iterdir()):
        return
    found = manifest_of(out)
    if not overwrite:
        hint = "--overwrite replaces it" if found else "give a new folder; --overwrite replaces only what kconv made"
        raise KconvError(
            f"the output folder {out} is not empty: {'it holds a finished conversion' if found else _some(out)}",
            hint=("nothing is left to resume; " if resume and found else "") + hint,
        )
    if found is None:
        raise KconvError(
            f"{out} was not made by kconv ({_some(out)}), so --overwrite does not touch it",
            hint="remove it yourself, or give another folder",
        )
    check_own(out, found["files"].keys() | {MANIFEST})


def _some(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir())
    return f"it holds {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"


def existing(path: Path) -> Path:
    """The path itself, or its nearest ancestor that is there."""
    while not path.exists():
        path = path.parent
    return path


def check_room(out: Path, files: Sequence[OutFile], partial: Path, expected_bytes: int) -> None:
    """Refuse before writing when disk, inodes or the file-size limit do not suffice."""
    where = existing(out.parent)
    stat = os.statvfs(where)
    there = sum(p.stat().st_blocks * 512 for p in partial.iterdir()) if partial.exists() else 0
    need, free = max(0, expected_bytes - there) + SLACK, stat.f_bavail * stat.f_frsize
    if need > free:
        raise EnvironmentLacks(
            f"{where} has {human(free)} free, the output {out.name} takes {human(need)}",
            hint="free space, choose another disk, or split the work with --layers",
        )
    if stat.f_files and len(files) + SPARE_INODES > stat.f_favail:
        raise EnvironmentLacks(
            f"{where} has {stat.f_favail} inodes left, {len(files) + SPARE_INODES} are needed",
            hint="remove files, choose another disk, or a larger --shard-size",
        )
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    largest = max(files, key=lambda f: f.size, default=None)
    if largest and limit not in (resource.RLIM_INFINITY, -1) and largest.size > limit:
        raise EnvironmentLacks(
            f"the file-size limit of this process is {human(limit)}, {largest.name} takes {human(largest.size)}",
            hint="raise it with `ulimit -f unlimited`, or give a smaller --shard-size",
        )
