"""Does the memory of a conversion depend on the checkpoint? Peak RSS of conversions of 1, 2 and 4 times the bytes.

    python tests/bench/memory.py [--megabytes 256] [--folder /scratch] [--workers N]

Each conversion is `kconv convert` in a process of its own, from a made-up Kimi K3 whose layers are alike, so that only
their number differs. Exit code 1 when one needs over 10% more than another.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import kconv
from kconv.console import human
from kconv.synthesis.families import synthesize
from tests.bench.probe import run_kconv

SHAPE = {
    "hidden": 1024, "dense_width": 1024, "experts": 16, "expert_width": 2048, "latent": 2048, "heads": 4, "kda_heads": 4,
    "kda_head_dim": 128, "dense_layers": 0, "vocab": 4096, "vision": False,
}  # fmt: skip
ALLOWED = 1.10
TIMES = (1, 2, 4)


def layers_of(nbytes: int) -> int:
    """How many layers make so many bytes."""
    one, two = (synthesize("k3", layers=n, **SHAPE).nbytes for n in (1, 2))
    return max(2, round((nbytes - one) / (two - one)))


def measure(folder: Path, experts: str, workers: int) -> bool:
    """Convert the sources and print a line each; whether the hungriest stays within what is allowed."""
    peaks = []
    for source in sorted(folder.glob("source-*")):
        out = folder / "out"
        peaks.append(run_kconv("convert", str(source), str(out), "--experts", experts, "--workers", str(workers)).peak)
        read, written = (sum(p.stat().st_size for p in d.iterdir()) for d in (source, out))
        shutil.rmtree(out)
        print(f"{experts:>8}  {human(read):>10} -> {human(written):>10}  peak RSS {human(peaks[-1]):>10}", flush=True)
    ratio = max(peaks) / min(peaks)
    print(f"{experts:>8}  {max(TIMES)} times the bytes, {ratio:.3f} times the memory (allowed {ALLOWED})", flush=True)
    return ratio <= ALLOWED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256, help="size of the smaller checkpoint")
    parser.add_argument("--folder", help="where to work; needs about 20 times the smaller size")
    parser.add_argument("--workers", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        layers = layers_of(asked.megabytes * 10**6)
        for times in TIMES:
            kconv.tiny("k3", Path(folder) / f"source-{times}", layers=times * layers, **SHAPE)
        floor = run_kconv("plan", str(Path(folder) / "source-1")).peak
        print(f"  floor   `kconv plan` alone needs {human(floor)}", flush=True)
        fine = [measure(Path(folder), experts, asked.workers) for experts in ("packed", "bf16")]
    sys.exit(0 if all(fine) else 1)


if __name__ == "__main__":
    main()
