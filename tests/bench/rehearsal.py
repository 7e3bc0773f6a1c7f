"""The whole published checkpoint, 497,220 tensors and 1.56 TB, planned and converted end to end on an ordinary disk.

    python tests/bench/rehearsal.py [--experts packed|bf16] [--folder /scratch]

The source is laid out at its full size from its card, its data holes; zero bytes are not written, so the output is holes
too, but every header, offset, index entry and slab is the real one. Prints time, peak memory and slabs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import kconv
from kconv.console import clock, human
from tests.bench.probe import run_kconv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", default="packed", choices=("packed", "bf16"))
    parser.add_argument("--folder", help="where to work; takes about 1 GB")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        source, out = Path(name) / "Kimi-K3", Path(name) / "out"
        kconv.tiny("k3", source, full_size=True)
        planned = run_kconv("plan", str(source), "--experts", asked.experts)
        tensors = planned.data["source_tensors"]
        print(f"plan     {tensors:,} tensors in {planned.seconds:.1f} s, peak RSS {human(planned.peak)}", flush=True)
        done = run_kconv("convert", str(source), str(out), "--experts", asked.experts, "--digest", "none")
        slabs, size = done.data["slabs"], done.data["output_bytes"]
        print(f"convert  {human(size)} in {slabs:,} slabs, {clock(done.seconds)}, peak RSS {human(done.peak)}", flush=True)
        check(out, done.data)


def check(out: Path, data: dict) -> None:
    """Sizes, headers and index of the output: read again as a checkpoint, which refuses anything that does not add up."""
    made = kconv.plan(out, "native").check()
    index = json.loads((out / "model.safetensors.index.json").read_text())
    stored = sum(p.stat().st_blocks * 512 for p in out.iterdir())
    assert made.source.nbytes == data["output_bytes"], (made.source.nbytes, data["output_bytes"])
    assert len(made.source.entries) == data["target_tensors"]
    files = len(made.source.shards)
    print(f"output   {files:,} files, {len(index['weight_map']):,} tensors in the index, {human(stored)} on disk", flush=True)


if __name__ == "__main__":
    main()
