"""`kconv.load` of a packed checkpoint of real widths: how fast the weights reach the device, and what limits that.

    PYTHONPATH=. python tests/bench/load.py [--device cuda] [--experts 64] [--layers 6] [--workers 8] [--tune]

| line | is |
|---|---|
| pinned copy | host to device from page-locked memory: the bus |
| page cache, n threads | the same files read by as many threads as the load has, into as much memory as it reads into |
| disk, n threads | the same past the page cache (O_DIRECT), where the file system has that |
| load packed | packed experts stay packed, so the bytes over the bus are the bytes in the files; from the page cache |
| ... fixed, marginal | a second, smaller checkpoint tells time that does not grow from rate |
| load packed from disk | the page cache dropped before |
| load bf16 | decoded on the device: the packed bytes cross the bus |
| convert bf16 | decoded on the device and written; of its output |

The loaded model's tensors are held against the CPU's, bit for bit. `--checkpoints FOLDER` keeps the two checkpoints for
another run; `--tune` tries other sizes of the pinned batches.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import kconv
from kconv.console import human
from kconv.engine import worker_cuda
from kconv.engine.worker_cuda import BATCH, BATCHES
from kconv.storage.files import pread_full
from tests.bench.conversion import REAL

BLOCK = 4 << 20


def timed(run: Callable[[], object], device: str, repeats: int = 3, before: Callable[[], None] = lambda: None) -> float:
    """Best seconds of a few runs, the device idle before and after."""
    best = float("inf")
    for _ in range(repeats):
        before()
        sync(device)
        started = time.monotonic()
        result = run()
        sync(device)
        best = min(best, time.monotonic() - started)
        del result
    return best


def sync(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        torch.cuda.synchronize()


def pinned_copy(nbytes: int = 2 << 30) -> float:
    """Bytes a second from page-locked memory to the device."""
    host, there = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    return nbytes / timed(lambda: there.copy_(host, non_blocking=True), "cuda", 5)


def shards(folder: Path) -> list[Path]:
    """The files with the weights."""
    return sorted(folder.glob("*.safetensors"))


def weight_bytes(folder: Path) -> int:
    """Size of the shards."""
    return sum(path.stat().st_size for path in shards(folder))


@contextmanager
def opened(folder: Path, flags: int) -> Iterator[list[tuple[int, int]]]:
    """Descriptor and size of every shard."""
    fds = [os.open(path, os.O_RDONLY | flags) for path in shards(folder)]
    try:
        yield [(fd, os.fstat(fd).st_size) for fd in fds]
    finally:
        for fd in fds:
            os.close(fd)


def read_all(folder: Path, workers: int, flags: int = 0) -> None:
    """Read every shard with so many threads, each into as much memory as a loading worker has pinned.

    `O_DIRECT` leaves out the last, incomplete page of each shard.
    """
    with opened(folder, flags) as files:
        jobs = [(fd, at, min(BLOCK, size - at)) for fd, size in files for at in range(0, size, BLOCK)]
        lock = threading.Lock()

        def work() -> None:
            buffers = memoryview(mmap.mmap(-1, BATCH * BATCHES))
            for turn in itertools.count():
                with lock:
                    if not jobs:
                        return
                    fd, at, size = jobs.pop(0)
                start = turn * BLOCK % len(buffers)
                pread_full(fd, buffers[start : start + (size // 4096 * 4096 if flags else size)], at, folder)

        threads = [threading.Thread(target=work) for _ in range(workers)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()


def forget(folder: Path) -> None:
    """Drop the shards from the page cache."""
    with opened(folder, 0) as files:
        for fd, _ in files:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    """Whether two models' tensors have the same bits."""
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(
        torch.equal(left[n].cpu().contiguous().view(torch.uint8), right[n].cpu().contiguous().view(torch.uint8)) for n in left
    )


def make(folder: Path, layers: int, experts: int) -> None:
    """A checkpoint, unless it is there already."""
    if not folder.exists():
        kconv.tiny("k3", folder, layers=layers, experts=experts, **REAL)
    read_all(folder, 8)


class Bench:
    """Checkpoints of two sizes, what is measured on them, and the figures found."""

    def __init__(self, folder: Path, device: str, layers: int, experts: int) -> None:
        self.folder, self.device, self.found = folder, device, dict[str, float | bool]()
        self.small, self.large = folder / "small", folder / "large"
        make(self.small, 2, 16)
        make(self.large, layers, experts)
        print(f"checkpoints of {human(weight_bytes(self.small))} and {human(weight_bytes(self.large))}", flush=True)

    def say(self, key: str, value: float | bool, unit: str = "bytes/s") -> None:
        """Keep and print one figure: bytes a second, seconds (`unit` s), a share (no `unit`), or an answer."""
        self.found[key] = value
        if isinstance(value, bool):
            shown = str(value)
        else:
            shown = f"{human(value)}/s" if unit == "bytes/s" else f"{value:.2f} {unit}".rstrip()
        print(f"{key:<40} {shown}", flush=True)

    def limits(self, workers: int) -> dict[str, float]:
        """Bytes a second of each thing the load passes through."""
        size, rates = weight_bytes(self.large), {}
        if self.device != "cpu":
            rates["pinned copy"] = pinned_copy()
        rates["page cache"] = size / timed(partial(read_all, self.large, workers), "cpu")
        forget(self.large)
        try:
            rates["disk"] = size / timed(partial(read_all, self.large, workers, os.O_DIRECT), "cpu", 1)
        except OSError:
            print("this file system has no O_DIRECT", flush=True)
        for name, rate in rates.items():
            self.say(name if name == "pinned copy" else f"{name}, {workers} threads", rate)
        read_all(self.large, workers)
        return rates

    def load(self, workers: int) -> None:
        """The packed checkpoint from the page cache and from the disk, each against its slowest link."""
        rates, size = self.limits(workers), weight_bytes(self.large)
        disk = rates.pop("disk", None)
        large, small = (
            timed(partial(kconv.load, path, device=self.device, workers=workers), self.device)
            for path in (self.large, self.small)
        )
        marginal = (size - weight_bytes(self.small)) / (large - small)
        self.compare(f"load packed, {workers} workers", size / large, rates)
        self.say("  ... fixed", large - size / marginal, "s")
        self.compare("  ... marginal", marginal, rates)
        if disk:
            seconds = timed(
                partial(kconv.load, self.large, device=self.device, workers=workers), self.device, 1, partial(forget, self.large)
            )
            self.compare(f"load packed from disk, {workers} workers", size / seconds, {**rates, "disk": disk})
            read_all(self.large, workers)

    def compare(self, key: str, rate: float, rates: dict[str, float]) -> None:
        """A rate, and what share it is of the slowest link."""
        self.say(key, rate)
        slowest = min(rates, key=lambda name: rates[name])
        self.say(f"{key}, of {slowest}", rate / rates[slowest], "")

    def tune(self, workers: int) -> None:
        """The packed load with pinned batches of other sizes."""
        kept = worker_cuda.BATCH, worker_cuda.BATCHES
        for batch, count in itertools.product((2, 4, 8, 16, 32, 64), (2, 4)):
            worker_cuda.BATCH, worker_cuda.BATCHES = batch << 20, count
            seconds = timed(partial(kconv.load, self.large, device=self.device, workers=workers), self.device, 2)
            self.say(f"{count} batches of {batch} MiB, {workers} workers", weight_bytes(self.large) / seconds)
        worker_cuda.BATCH, worker_cuda.BATCHES = kept

    def bf16(self, workers: int) -> None:
        """Decoding on the device, into the model and into files, on the small checkpoint; the bits against the CPU's."""
        source, out = self.small, self.folder / "out"
        seconds = timed(partial(kconv.load, source, device=self.device, workers=workers, experts="bf16"), self.device)
        self.say(f"load bf16, {workers} workers", weight_bytes(source) / seconds)
        on_device = kconv.load(source, device=self.device, experts="bf16")
        self.say("same bits as on the CPU", same(on_device, kconv.load(source, experts="bf16")))
        packed = kconv.load(source, device=self.device)
        self.say("same bits, packed", same(packed, kconv.load(source)))
        del on_device, packed

        def convert() -> None:
            shutil.rmtree(out, ignore_errors=True)
            kconv.convert(source, out, experts="bf16", device=self.device, workers=workers, digest=None)

        self.say("convert bf16", kconv.plan(source, experts="bf16").output_bytes / timed(convert, self.device, 1))
        self.say("converted as on the CPU", bool(kconv.verify(out, source, workers=workers)["ok"]))
        shutil.rmtree(out)


def main() -> None:
    """Parses the command line, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--workers", type=int, nargs="+", default=[8])
    parser.add_argument("--checkpoints", type=Path, help="a folder that keeps them; one that is removed by default")
    parser.add_argument("--tune", action="store_true", help="other sizes of the pinned batches")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(asked.checkpoints or Path(name), asked.device, asked.layers, asked.experts)
        for workers in asked.workers:
            if asked.tune:
                bench.tune(workers)
            bench.load(workers)
        bench.bf16(max(asked.workers))
    if asked.json:
        asked.json.write_text(json.dumps(bench.found, indent=1))


if __name__ == "__main__":
    main()
