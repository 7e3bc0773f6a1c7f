"""What a conversion to a given folder will take: room, files, memory, and the time by a short probe of both disks.

| probed for a quarter of a second | how |
|---|---|
| reading | 4 MB pieces spread over the source's files, past the page cache where the system allows it |
| writing | a file of noise beside the output, past the page cache where `convert` writes so, with fdatasync, removed afterwards |

The estimate is reading plus writing where both are on one disk, the slower of the two otherwise. A source on the Hub is
not probed: its time is the network's.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from kconv.checkpoint.claim import out_path
from kconv.checkpoint.folder import partial_path
from kconv.checkpoint.place import check_folders, check_room, existing
from kconv.checkpoint.reading import Checkpoint
from kconv.engine.out_files import lay_out
from kconv.engine.preflight import check_memory, check_padding, free_memory, needed_bytes, peak_bytes, stored_bytes
from kconv.planning.plan import Plan
from kconv.storage.direct import SYSTEMS, file_system
from kconv.storage.files import LocalFiles

PROBE_SECONDS = 0.25
PROBE_BLOCK = 4 << 20
PROBE_MOST = 256 << 20


def preflight(plan: Plan, out: str | os.PathLike[str], *, shard_size: int, workers: int) -> dict[str, Any]:
    """Refuse what `convert` to this folder would refuse; otherwise its needs, what there is, and the estimated seconds."""
    target = out_path(out)
    check_folders(plan.source.files, Path(out), overwrite=False, resume=False)
    files = lay_out(plan.targets, shard_size)
    need, peak = needed_bytes(plan, files), peak_bytes(plan, workers)
    check_room(target, files, partial_path(target), need)
    check_memory(peak)
    check_padding(plan)
    where = existing(target.parent)
    disk = os.statvfs(where)
    return {
        "files": len(files),
        "largest_file": max((f.size for f in files), default=0),
        "needed_bytes": need,
        "free_bytes": disk.f_bavail * disk.f_frsize,
        "free_memory": free_memory(),
        **estimate(plan, where),
    }


def estimate(plan: Plan, where: Path) -> dict[str, Any]:
    """`read_rate`, `write_rate` in bytes a second and `seconds`; a rate that was not probed is None."""
    read, write = read_rate(plan.source), write_rate(where)
    files = plan.source.files
    shared = isinstance(files, LocalFiles) and os.stat(files.root).st_dev == os.stat(where).st_dev
    seconds = seconds_for(plan, read, write, one_disk=shared)
    return {"read_rate": read and int(read), "write_rate": int(write), "estimated_seconds": round(seconds, 1)}


def seconds_for(plan: Plan, read: float | None, write: float, *, one_disk: bool) -> float:
    """Seconds of a plan at these rates in bytes a second; reading and writing add up on one disk."""
    dropped = sum(plan.entry(n).spec.nbytes for n in plan.dropped if n in plan.source.entries)
    reading = (plan.source.nbytes - dropped) / read if read else 0.0
    writing = stored_bytes(plan, plan.output_bytes) / write
    return reading + writing if one_disk else max(reading, writing)


def read_rate(source: Checkpoint) -> float | None:
    """Bytes a second of reading a local source, None for one on the Hub."""
    files = source.files
    if not isinstance(files, LocalFiles):
        return None
    shards = sorted(source.shards, key=files.size, reverse=True)
    spots = [(s, at) for at in range(0, files.size(shards[0]), 8 * PROBE_BLOCK) for s in shards if at < files.size(s)]
    started, done = time.monotonic(), 0
    for shard, at in spots:
        length = min(PROBE_BLOCK, files.size(shard) - at)
        with files.fds.use(shard) as fd:
            os.posix_fadvise(fd, at, length, os.POSIX_FADV_DONTNEED)
            done += len(os.pread(fd, length, at))
        if time.monotonic() - started > PROBE_SECONDS:
            break
    return done / max(time.monotonic() - started, 1e-9)


def write_rate(folder: Path) -> float:
    """Bytes a second of writing to a folder's disk."""
    noise, done = mmap.mmap(-1, PROBE_BLOCK), 0
    noise.write(os.urandom(PROBE_BLOCK))
    with tempfile.TemporaryFile(dir=folder) as handle:
        if file_system(folder) in SYSTEMS:
            with contextlib.suppress(OSError):
                fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | os.O_DIRECT)
        started = time.monotonic()
        while time.monotonic() - started < PROBE_SECONDS and done < PROBE_MOST:
            done += os.write(handle.fileno(), noise)
        os.fdatasync(handle.fileno())
    return done / max(time.monotonic() - started, 1e-9)
