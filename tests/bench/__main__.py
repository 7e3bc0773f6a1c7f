"""`make bench`: every benchmark that runs on a CPU, one after the other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
RUNS = (
    ("kernels against memcpy", ["kernels.py"]),
    ("planning at full size", ["planning.py"]),
    ("memory at 1, 2 and 4 times the bytes", ["memory.py", "--megabytes", "256"]),
    ("full rehearsal", ["rehearsal.py"]),
    ("conversion against the disk and other libraries", ["conversion.py", "--others"]),
    ("loading", ["load.py", "--device", "cpu", "--workers", "2", "--experts", "32"]),
)


def main() -> int:
    failed = []
    for title, (script, *arguments) in RUNS:
        print(f"== {title}: python tests/bench/{script} {' '.join(arguments)}", flush=True)
        if subprocess.run([sys.executable, str(HERE / script), *arguments], cwd=HERE.parents[1], check=False).returncode:
            failed.append(script)
    print(f"failed: {', '.join(failed)}" if failed else "all benchmarks ran", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
