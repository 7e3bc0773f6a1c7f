"""How long planning Kimi K3 at its full size takes, and in how much memory: 497,220 tensors, headers only.

    python tests/bench/planning.py [FOLDER]

FOLDER is a checkpoint in the published layout; without it the full-size one is laid out first, without its data.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from kconv.console import human
from tests.bench.probe import Taken, run_kconv


def line(what: str, taken: Taken) -> None:
    print(f"{what:<42} {taken.seconds:6.1f} s  peak RSS {human(taken.peak):>10}", flush=True)


def parsing(folder: str, runs: int = 3) -> float:
    """Seconds that reading all headers and parsing them with `json` takes, the median of some runs."""
    taken = []
    for _ in range(runs):
        started = time.monotonic()
        for shard in sorted(Path(folder).glob("*.safetensors")):
            with shard.open("rb") as file:
                json.loads(file.read(int.from_bytes(file.read(8), "little")))
        taken.append(time.monotonic() - started)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?")
    asked = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked or str(Path(scratch) / "Kimi-K3")
        if not asked:
            line("tiny k3 --full-size", run_kconv("tiny", "k3", "--full-size", folder))
        bare = parsing(folder)
        print(f"{'json alone, the same headers':<42} {bare:6.1f} s", flush=True)
        for options in ((), ("--experts", "bf16"), ("--vision", "keep"), ("--to", "hf-text")):
            taken = run_kconv("plan", folder, *options)
            line(" ".join(("plan", *options)), taken)
            print(f"    {taken.seconds / bare:.1f} times json alone")
            keys = ("source_tensors", "claimed", "dropped", "target_tensors", "output_bytes", "grade")
            print("    " + ", ".join(f"{k} {taken.data[k]:,}" if isinstance(taken.data[k], int) else taken.data[k] for k in keys))


if __name__ == "__main__":
    main()
