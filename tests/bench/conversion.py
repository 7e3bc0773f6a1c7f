"""Conversion of a checkpoint of real widths against what the disk can do, in one run.

    python tests/bench/conversion.py [--experts 64] [--layers 2] [--folder /scratch] [--repeats 3] [--others]

| line | is | against |
|---|---|---|
| bf16, fast / plain | the process of `kconv convert --experts bf16`, numba or not | a bare write of as many bytes, fsync |
| packed | the whole process of `kconv convert` | `cp` of the source, sync |
| nemo-automodel, compressed-tensors | (`--others`) reading, decoding and writing as the library does it | the same bare write |

Each repeat measures the yardstick right before and right after; the ratio is to their mean, and the median of the
repeats is reported. Every yardstick is the faster of two runs in a row: a virtual machine gives memory that lies free for
two seconds back to its host, and pays several times the cost of a write for each page that it takes again, which our
direct writes do not and buffered ones do. Peak memory is VmHWM of the process.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import kconv
from kconv.console import human
from tests.bench.probe import run_kconv

REAL = {
    "hidden": 7168, "dense_width": 33792, "expert_width": 3072, "latent": 3584, "heads": 96, "kda_heads": 96, "kda_head_dim": 128,
    "q_lora": 1536, "kv_lora": 512, "nope_dim": 128, "rope_dim": 64, "v_dim": 128, "vocab": 4096, "top_k": 16, "block": 12,
    "vision": False,
}  # fmt: skip
BLOCK = 4 << 20
OTHERS = Path(__file__).with_name("other_libraries.py")


def bare_write(folder: Path, nbytes: int) -> float:
    """Seconds to write so many bytes front to back and fsync them."""
    path, block, done = folder / "bare.bin", os.urandom(BLOCK), 0
    os.sync()
    started = time.monotonic()
    with open(path, "wb", buffering=0) as handle:
        while done < nbytes:
            done += handle.write(block[: nbytes - done])
        os.fsync(handle.fileno())
    seconds = time.monotonic() - started
    path.unlink()
    return seconds


def settled() -> None:
    """Let the disk finish what it was given, the freeing of removed files included."""
    os.sync()
    time.sleep(1)


def copied(folder: Path, source: Path) -> float:
    """Seconds of `cp -r` and sync."""
    os.sync()
    started = time.monotonic()
    subprocess.run(["cp", "-r", str(source), str(folder / "copy")], check=True)
    os.sync()
    seconds = time.monotonic() - started
    shutil.rmtree(folder / "copy")
    return seconds


def convert(folder: Path, source: Path, *arguments: str, fast: bool = True) -> tuple[float, int]:
    """Seconds and peak memory of one conversion in a process of its own, its output removed."""
    os.environ["KCONV_FAST"] = "1" if fast else "0"
    settled()
    taken = run_kconv("convert", str(source), str(folder / "out"), *arguments)
    shutil.rmtree(folder / "out")
    return taken.seconds, taken.peak


def compare(label: str, repeats: int, size: int, run: Callable[[], tuple[float, int]], yardstick: Callable[[], float]) -> float:
    """Print and return the median ratio of `run` to the mean of the yardstick before and after it."""

    def best() -> float:
        return min(yardstick(), yardstick())

    times, peaks, before = [], [], best()
    for _ in range(repeats):
        seconds, peak = run()
        after = best()
        times.append((seconds, (before + after) / 2))
        peaks.append(peak)
        before = after
    ratio = statistics.median(a / b for a, b in times)
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
    small, large = (kconv.plan(source, experts=e).output_bytes for e in (None, "bf16"))
    write, copy = partial(bare_write, folder, large), partial(copied, folder, source)
    bf16 = partial(convert, folder, source, "--experts", "bf16")
    size = sum(p.stat().st_size for p in source.iterdir())
    print(f"source {human(size)}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    fast = compare("bf16, fast", repeats, large, bf16, write)
    compare("bf16, plain", repeats, large, partial(bf16, fast=False), write)
    compare("packed", repeats, small, partial(convert, folder, source), copy)
    for library in ("nemo-automodel", "compressed-tensors") if others else ():
        ratio = compare(library, 1, large, partial(other, library, source, folder), write)
        print(f"{library} takes {ratio / fast:.1f} times as long as kconv", flush=True)


def other(library: str, source: Path, folder: Path) -> tuple[float, int]:
    """Seconds and peak memory of another library's conversion, its output removed."""
    settled()
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
