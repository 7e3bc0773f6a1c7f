"""Runs a kconv command in a process of its own and says what it took.

The peak is VmHWM of that process: `ru_maxrss` starts at what the parent held when it started the child.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any, NamedTuple

PROGRAM = """
import atexit, sys
from kconv.cli import main
atexit.register(lambda: print(*(x for x in open("/proc/self/status") if "VmHWM" in x), file=sys.stderr))
main(sys.argv[1:])
"""


class Taken(NamedTuple):
    """Wall seconds, peak resident bytes, and the command's JSON."""

    seconds: float
    peak: int
    data: dict[str, Any]


def run_kconv(*arguments: str) -> Taken:
    """Run `kconv ARGUMENTS --json`, which must succeed."""
    started = time.monotonic()
    command = [sys.executable, "-c", PROGRAM, *arguments, "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        sys.exit(f"kconv {' '.join(arguments)} ended with {ran.returncode}:\n{ran.stderr}")
    peak = int(ran.stderr.split("VmHWM:")[1].split()[0]) * 1024
    return Taken(time.monotonic() - started, peak, json.loads(ran.stdout))
