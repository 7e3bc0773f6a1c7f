"""Is there room: checked before the first byte is written.

| checked | against |
|---|---|
| bytes to write, less what an earlier run wrote | free space of the target's file system |
| number of files | free inodes |
| the largest file | the file-size limit of the process |
| bytes in flight | `--memory` |
| the target folder | writable, empty or absent, not inside the source nor around it |
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from pathlib import Path

from kconv.errors import EnvironmentLacks, KconvError
from kconv.files import LocalFiles
from kconv.layout import OutFile
from kconv.plans import Plan
from kconv.report import human
from kconv.slabs import PART_BYTES

SLACK = 64 << 20


def peak_bytes(plan: Plan, workers: int) -> int:
    """Bytes that the workers hold at most: the largest part's inputs and outputs, for each worker."""
    largest: dict[tuple, int] = {}
    for edge in plan.edges:
        for lefts, rights in zip(edge.lefts, edge.rights, strict=True):
            key = (edge.rule.iso, lefts, rights)
            if key in largest:
                continue
            total = sum(s.nbytes for s in (*lefts, *rights))
            tiled = edge.rule.iso.tiles(lefts, rights) is not None
            largest[key] = min(total, 2 * PART_BYTES) if tiled else total
    return workers * max(largest.values(), default=0)


def check_folders(source: object, out: Path, *, overwrite: bool, resume: bool) -> None:
    """Refuse an output that is, holds, or lies inside the source, and one that is not empty."""
    out = out.resolve()
    if isinstance(source, LocalFiles):
        root = source.root.resolve()
        if out == root or out.is_relative_to(root) or root.is_relative_to(out):
            relation = "is" if out == root else "lies inside" if out.is_relative_to(root) else "holds"
            raise KconvError(f"the output {out.name} {relation} the source", hint="give another output folder: convert SOURCE OUT")
    if out.exists() and not out.is_dir():
        raise KconvError(f"{out} is a file", hint="give a folder that does not exist yet")
    if out.exists() and any(out.iterdir()):
        if not overwrite:
            hint = "it is finished: remove it, or say --overwrite" if resume else "give a new folder, or say --overwrite"
            raise KconvError(f"the output folder {out} is not empty", hint=hint)
        if not (out / "kconv.json").exists():
            raise KconvError(f"{out} was not made by kconv, so --overwrite does not touch it", hint="remove it yourself")
    parent = out.parent
    while not parent.exists():
        parent = parent.parent
    if not os.access(parent, os.W_OK):
        raise EnvironmentLacks(f"{parent} is not writable", hint="choose another folder or change its permissions")


def check_room(out: Path, files: Sequence[OutFile], partial: Path, expected_bytes: int) -> None:
    """Refuse before writing when disk, inodes or the file-size limit do not suffice."""
    where = out.parent
    while not where.exists():
        where = where.parent
    stat = os.statvfs(where)
    there = sum(p.stat().st_blocks * 512 for p in partial.iterdir()) if partial.exists() else 0
    need, free = max(0, expected_bytes - there) + SLACK, stat.f_bavail * stat.f_frsize
    if need > free:
        raise EnvironmentLacks(
            f"{where} has {human(free)} free, the output takes {human(need)}",
            hint="free space, choose another disk, or split the work with --layers",
        )
    if stat.f_files and len(files) + 64 > stat.f_favail:
        raise EnvironmentLacks(f"{where} has {stat.f_favail} inodes left, {len(files) + 64} are needed")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    largest = max((f.size for f in files), default=0)
    if limit not in (resource.RLIM_INFINITY, -1) and largest > limit:
        raise EnvironmentLacks(
            f"the file-size limit of this process is {human(limit)}, the largest file takes {human(largest)}",
            hint="raise it with `ulimit -f unlimited`",
        )


def stored_bytes(plan: Plan) -> int:
    """Bytes the output can take on disk: everything, unless the source is mostly holes (a rehearsal)."""
    files = plan.source.files
    if not isinstance(files, LocalFiles):
        return plan.output_bytes
    shards = [files.path(s).stat() for s in plan.source.shards]
    apparent, stored = sum(s.st_size for s in shards), sum(s.st_blocks * 512 for s in shards)
    return plan.output_bytes if stored >= apparent // 2 else int(plan.output_bytes * (stored / max(1, apparent)))

