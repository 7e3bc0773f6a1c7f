"""Conversion of a checkpoint of real widths against what the disk can do, in one run.

    python tests/bench/conversion.py [--experts 64] [--layers 2] [--folder /scratch] [--repeats 3] [--others]

| line | is | against |
|---|---|---|
| bf16, fast / torch | the process of `kconv convert --experts bf16`, numba or not | a bare write of as many bytes, fsync |
| packed | the whole process of `kconv convert` | `cp` of the source, sync |
| nemo-automodel, compressed-tensors | (`--others`) reading, decoding and writing as the library does it | the same bare write |

Each repeat measures the yardstick right before and right after; the ratio is to their mean, and the median of the
repeats is reported. Peak memory is VmHWM of the process.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import kconv
from kconv.report import human
from tests.bench.probe import Taken, run_kconv

REAL = {
    "hidden": 7168, "dense_width": 33792, "expert_width": 3072, "latent": 3584, "heads": 96, "kda_heads": 96, "kda_head_dim": 128,
    "q_lora": 1536, "kv_lora": 512, "nope_dim": 128, "rope_dim": 64, "v_dim": 128, "vocab": 4096, "top_k": 16, "block": 12,
    "vision": False,
}  # fmt: skip
BLOCK = 4 << 20
BARE = "bare.bin"
OTHERS = Path(__file__).with_name("other_libraries.py")


def bare_write(folder: Path, nbytes: int, *, keep: bool = False) -> float:
    """Seconds to write so many bytes front to back and fsync them; `keep` leaves the file for `convert` to remove."""
    path, block, done = folder / BARE, os.urandom(BLOCK), 0
    os.sync()
    started = time.monotonic()
    with open(path, "wb", buffering=0) as handle:
        while done < nbytes:
            done += handle.write(block[: nbytes - done])
        os.fsync(handle.fileno())
    seconds = time.monotonic() - started
    if not keep:
        path.unlink()
    return seconds


def release(folder: Path, done: threading.Event) -> None:
    """Remove the kept file when the conversion begins to write.

    A virtual machine gives memory that lies free for two seconds back to its host, and pays for every page it takes
    again: several times the cost of writing it. So the yardstick and the run both find memory that was freed just now.
    """
    while not (folder / ".out.partial").exists() and not done.wait(0.002):
        pass
    (folder / BARE).unlink(missing_ok=True)


def copied(folder: Path, source: Path) -> float:
    """Seconds of `cp -r` and sync."""
    os.sync()
    started = time.monotonic()
    subprocess.run(["cp", "-r", str(source), str(folder / "copy")], check=True)
    os.sync()
    seconds = time.monotonic() - started
    shutil.rmtree(folder / "copy")
    return seconds


def convert(folder: Path, source: Path, *arguments: str, fast: bool = True) -> Taken:
    """One conversion in a process of its own, its output removed."""
    os.environ["KCONV_FAST"] = "1" if fast else "0"
    os.sync()
    done = threading.Event()
    watcher = threading.Thread(target=release, args=(folder, done))
    watcher.start()
    try:
        taken = run_kconv("convert", str(source), str(folder / "out"), *arguments)
    finally:
        done.set()
        watcher.join()
    shutil.rmtree(folder / "out")
    return taken


def compare(
    label: str, repeats: int, size: int, run: Callable[[], tuple[float, int]], yardstick: Callable[[bool], float]
) -> float:
    """Print and return the median ratio of `run` to the mean of the yardstick before and after it."""
    ratios, times, peaks = [], [], []
    for _ in range(repeats):
        before = yardstick(True)
        seconds, peak = run()
        mean = (before + yardstick(False)) / 2
        ratios.append(seconds / mean)
        times.append((seconds, mean))
        peaks.append(peak)
    ratio = statistics.median(ratios)
    shown = ", ".join(f"{a:.2f}/{b:.2f} s" for a, b in times)
    print(f"{label:<22} {human(size):>8}  ratio {ratio:.2f}  ({shown})  peak RSS {human(max(peaks))}", flush=True)
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="a checkpoint to convert instead of a made-up one")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--folder", help="where to work; needs about five times the checkpoint")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--others", action="store_true", help="also the other libraries (14 GB of memory)")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        folder = Path(name)
        source = asked.source or folder / "source"
        if not asked.source:
            kconv.tiny("k3", source, layers=asked.layers, experts=asked.experts, **REAL)
        for shard in source.glob("*.safetensors"):
            shard.read_bytes()
        measure(folder, source, asked.repeats, asked.others)


def measure(folder: Path, source: Path, repeats: int, others: bool) -> None:
    """Every line of the table."""

    def kconv_run(*arguments: str, fast: bool = True) -> Callable[[], tuple[float, int]]:
        def run() -> tuple[float, int]:
            taken = convert(folder, source, *arguments, fast=fast)
            return taken.seconds, taken.peak

        return run

    def write(keep: bool) -> float:
        return bare_write(folder, large, keep=keep)

    def copy(keep: bool) -> float:
        seconds = copied(folder, source)
        if keep:
            bare_write(folder, small, keep=True)
        return seconds

    small, large = (kconv.plan(source, experts=e).output_bytes for e in (None, "bf16"))
    size = sum(p.stat().st_size for p in source.iterdir())
    print(f"source {human(size)}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    fast = compare("bf16, fast", repeats, large, kconv_run("--experts", "bf16"), write)
    compare("bf16, torch", repeats, large, kconv_run("--experts", "bf16", fast=False), write)
    compare("packed", repeats, small, kconv_run(), copy)
    for library in ("nemo-automodel", "compressed-tensors") if others else ():
        ratio = compare(library, 1, large, partial(other, library, source, folder), lambda keep: bare_write(folder, large))
        print(f"{library} takes {ratio / fast:.1f} times as long as kconv", flush=True)


def other(library: str, source: Path, folder: Path) -> tuple[float, int]:
    """Seconds and peak memory of another library's conversion, its output removed."""
    os.sync()
    started = time.monotonic()
    command = [sys.executable, str(OTHERS), library, str(source), str(folder / "other")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - started
    if ran.returncode:
        sys.exit(f"{library} failed:\n{ran.stderr[-2000:]}")
    shutil.rmtree(folder / "other")
    return seconds, int(ran.stdout.split()[-1]) * 1024


if __name__ == "__main__":
    main()
