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

import resource
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kconv.checkpoint.headers import OutFile
from kconv.console import human
from kconv.engine.slabs import part_bytes
from kconv.errors import BadData, EnvironmentLacks, KconvError, Problems
from kconv.planning.edges import Edge
from kconv.planning.plan import Plan
from kconv.spec import torch_dtype
from kconv.storage.files import LocalFiles
from kconv.transforms.shape import TrimZeros

STAGED = 4


def peak_bytes(plan: Plan, workers: int, device: str = "cpu") -> int:
    """Bytes that the workers hold at most: the largest part's inputs and outputs, for each worker."""
    largest: dict[tuple[object, ...], int] = {}
    for edge in plan.edges:
        for lefts, rights in zip(edge.lefts, edge.rights, strict=True):
            key = (edge.rule.transform, lefts, rights)
            if key in largest:
                continue
            total = sum(s.nbytes for s in (*lefts, *rights))
            tiled = edge.rule.transform.tiles(lefts, rights) is not None
            largest[key] = min(total, 2 * part_bytes(device)) if tiled else total
    return workers * max(largest.values(), default=0)


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
        if isinstance(edge.rule.transform, TrimZeros) and not plan.backward:
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
            if edge.rule.transform.on_bytes([np.frombuffer(data, np.uint8)], (spec,), False) is not None:
                continue
            import torch

            try:
                edge.rule.transform.forward([torch.frombuffer(data, dtype=torch_dtype(spec.dtype)).view(spec.shape)])
            except BadData as e:
                problems.append(f"{name} in {entry.file}, position {list(e.position)}: {e.message}")
    return problems
