"""`kconv.load` of a packed checkpoint of real widths: how fast the weights reach the device, against the bus and the disk.

    PYTHONPATH=. python tests/bench/load.py [--device cuda] [--experts 64] [--workers 4 8 16] [--folder /dev/shm]

| line | is |
|---|---|
| pinned copy | host to device from page-locked memory, the limit of the bus |
| read | the same files read into memory by as many threads (from the page cache, after a first pass) |
| load packed | packed experts stay packed: bytes over the bus are bytes in the files |
| load bf16 | decoded on the device: the packed bytes cross the bus |
| convert --device | decoded on the device and written to `--folder` |

The loaded model's tensors are held against the CPU's, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import kconv
from kconv.files import LocalFiles
from kconv.report import human
from tests.bench.conversion import REAL

BLOCK = 8 << 20


def timed(run: Callable[[], object], device: str, repeats: int = 3) -> float:
    """Best seconds of a few runs, the device idle before and after."""
    best = float("inf")
    for _ in range(repeats):
        sync(device)
        started = time.monotonic()
        result = run()
        sync(device)
        best = min(best, time.monotonic() - started)
        del result
    return best


def sync(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def pinned_copy(nbytes: int = 2 << 30) -> float:
    """Bytes a second from page-locked memory to the device."""
    host, there = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    return nbytes / timed(lambda: there.copy_(host, non_blocking=True), "cuda", 5)


def read_all(folder: Path, workers: int) -> int:
    """Read every shard with so many threads; returns the bytes."""
    files = LocalFiles(folder)
    jobs = [(f.name, at) for f in sorted(folder.glob("*.safetensors")) for at in range(0, f.stat().st_size, BLOCK)]
    lock = threading.Lock()

    def work() -> None:
        buffer = bytearray(BLOCK)
        while True:
            with lock:
                if not jobs:
                    return
                name, at = jobs.pop()
            size = files.size(name)
            files.read_into(name, at, memoryview(buffer)[: min(BLOCK, size - at)])

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return sum(f.stat().st_size for f in folder.glob("*.safetensors"))


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    """Whether two models' tensors have the same bits."""
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(
        torch.equal(left[n].cpu().contiguous().view(torch.uint8), right[n].cpu().contiguous().view(torch.uint8)) for n in left
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--folder")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found: dict[str, float | bool] = {}

    def say(key: str, value: float | bool) -> None:
        found[key] = value
        print(f"{key:<28} {value if isinstance(value, bool) else human(value) + '/s'}", flush=True)

    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        source, device = Path(name) / "source", asked.device
        kconv.tiny("k3", source, layers=asked.layers, experts=asked.experts, **REAL)
        size = read_all(source, 8)
        print(f"source {human(size)}", flush=True)
        if device != "cpu":
            say("pinned copy", pinned_copy())
        for workers in asked.workers:
            say(f"read, {workers} threads", size / timed(partial(read_all, source, workers), "cpu"))
            for label, options in (("packed", {}), ("bf16", {"experts": "bf16"})):
                seconds = timed(partial(kconv.load, source, device=device, workers=workers, **options), device)
                say(f"load {label}, {workers} workers", size / seconds)
        on_device = kconv.load(source, device=device, experts="bf16")
        say("same bits as on the CPU", same(on_device, kconv.load(source, experts="bf16")))
        del on_device
        out = Path(name) / "out"

        def convert() -> None:
            shutil.rmtree(out, ignore_errors=True)
            kconv.convert(source, out, experts="bf16", device=device, workers=8, digest=None)

        say("convert bf16, output", kconv.plan(source, experts="bf16").output_bytes / timed(convert, device, 1))
        say("converted as on the CPU", bool(kconv.verify(out, source, workers=8)["ok"]))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
