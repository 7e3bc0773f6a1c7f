"""Can it succeed: everything that can be known before the first byte is written; `kconv plan --out` shows it.

| checked | against |
|---|---|
| the target folder | writable, empty or absent or all of it kconv's own, no mount point, not inside the source nor around it |
| the files beside the weights | readable |
| bytes to write, less what an earlier run wrote | free space of the target's file system |
| number of files | free inodes |
| the largest file | the file-size limit of the process |
| bytes in flight | memory that is free, of the machine, the control group and the process |
| the device | a GPU that torch can use |
| padding that would be trimmed | zero in the data itself (a few kB, so that a long run does not fail in its last layer) |
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kconv.checkpoint.folder import check_own, manifest_of
from kconv.checkpoint.reading import MANIFEST
from kconv.console import human
from kconv.engine.out_files import OutFile
from kconv.engine.slabs import part_bytes
from kconv.errors import BadData, EnvironmentLacks, KconvError, Problems
from kconv.planning.plan import Edge, Plan
from kconv.spec import torch_dtype
from kconv.storage.files import LocalFiles
from kconv.transforms.shape import TrimZeros

SLACK = 1 << 20
STAGED = 4
SPARE_INODES = 64


def peak_bytes(plan: Plan, workers: int, device: str = "cpu") -> int:
    """Bytes that the workers hold at most: the largest part's inputs and outputs, for each worker."""
    largest: dict[tuple, int] = {}
    for edge in plan.edges:
        for lefts, rights in zip(edge.lefts, edge.rights, strict=True):
            key = (edge.rule.iso, lefts, rights)
            if key in largest:
                continue
            total = sum(s.nbytes for s in (*lefts, *rights))
            tiled = edge.rule.iso.tiles(lefts, rights) is not None
            largest[key] = min(total, 2 * part_bytes(device)) if tiled else total
    return workers * max(largest.values(), default=0)


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


def needed_bytes(plan: Plan, files: Sequence[OutFile]) -> int:
    """Bytes that a conversion writes: tensors, headers, the index and manifest (about as much again), side files."""
    side = sum(plan.source.files.size(name) for name in plan.source.other_files())
    tensors = sum(f.size - len(f.header) for f in files)
    return stored_bytes(plan, tensors) + 2 * sum(len(f.header) for f in files) + side + staged_bytes(plan)


def staged_bytes(plan: Plan) -> int:
    """Bytes of downloaded shards that lie on disk at a time when the source is on the Hub."""
    files = plan.source.files
    if isinstance(files, LocalFiles):
        return 0
    return sum(sorted((files.size(s) for s in plan.source.shards), reverse=True)[:STAGED])


def stored_bytes(plan: Plan, nbytes: int) -> int:
    """Bytes on disk of `nbytes` of the output's tensors: all of them, unless the source is mostly holes (a rehearsal)."""
    files = plan.source.files
    if not isinstance(files, LocalFiles):
        return nbytes
    shards = [files.path(s).stat() for s in plan.source.shards]
    apparent, stored = sum(s.st_size for s in shards), sum(s.st_blocks * 512 for s in shards)
    return nbytes if stored >= apparent // 2 else int(nbytes * (stored / max(1, apparent)))


def check_beside(plan: Plan) -> None:
    """Refuse files beside the weights that cannot be read, before anything is written."""
    files = plan.source.files
    for name in plan.source.other_files() if isinstance(files, LocalFiles) else ():
        try:
            files.read(name, 0, min(1, files.size(name)))
        except OSError as e:
            raise KconvError(f"cannot read {files.where}/{name}: {e.strerror}", hint="check its permissions and the disk") from e


def check_memory(peak: int) -> None:
    """Refuse when the buffers alone take more than there is."""
    free = free_memory()
    if peak > free:
        raise EnvironmentLacks(
            f"{human(peak)} of buffers are needed, {human(free)} of memory are free",
            hint="give fewer --workers or a smaller --memory",
        )


def free_memory() -> int:
    """Bytes of memory that this process can still have: the machine's, its control group's and its own limit."""
    found = [_meminfo("MemAvailable")]
    for limit, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        most, now = (_number(Path("/sys/fs/cgroup") / name) for name in (limit, used))
        if most is not None and now is not None:
            found.append(max(0, most - now))
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    return min([*found, *([space] if space not in (resource.RLIM_INFINITY, -1) else [])])


def total_memory() -> int:
    """Bytes of memory of the machine."""
    return _meminfo("MemTotal")


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def _number(path: Path) -> int | None:
    """The number in a control group's file, None where there is no file or no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def check_device(device: str) -> None:
    """Refuse a GPU that torch cannot use."""
    if device == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        raise EnvironmentLacks(f"--device {device}: torch {torch.__version__} can use no GPU here", hint="leave --device out")


def check_padding(plan: Plan) -> None:
    """Refuse padding that is not zero where a conversion would trim it: the data of those few small tensors is read."""
    problems = []
    for edge in plan.edges:
        if isinstance(edge.rule.iso, TrimZeros) and not plan.backward:
            problems += _filled_padding(plan, edge)
    if problems:
        raise Problems(
            f"{plan.source.where}: padding that would be trimmed holds data:", problems,
            hint="the tensors are not padded as this layout is: ask their publisher; nothing was written",
        )  # fmt: skip


def _filled_padding(plan: Plan, edge: Edge) -> list[str]:
    problems = []
    for value in edge.rule.domain:
        for (name, *_), (spec, *_) in zip(edge.rule.left_names(edge.binding, value), edge.lefts, strict=True):
            entry = plan.entry(name)
            data = bytearray(plan.source.files.read(entry.file, entry.start, spec.nbytes))
            if edge.rule.iso.on_bytes([np.frombuffer(data, np.uint8)], (spec,), False) is not None:
                continue
            import torch

            try:
                edge.rule.iso.forward([torch.frombuffer(data, dtype=torch_dtype(spec.dtype)).view(spec.shape)])
            except BadData as e:
                problems.append(f"{name} in {entry.file}, position {list(e.position)}: {e.message}")
    return problems
