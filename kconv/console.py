"""What people read while something runs: sizes, times, the progress line, a sign of life.

A terminal gets a live bar; a pipe or a file gets a plain line at once and then every few seconds, without carriage
returns.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

PLAIN_EVERY = 5.0
EVERY = 30.0


def human(nbytes: float) -> str:
    """Bytes in decimal units: `1.56 TB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(nbytes) < 1000 or unit == "TB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    raise AssertionError


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss."""
    m, s = divmod(int(seconds), 60)
    h, m = divmod(m, 60)
    return f"{h}:{m:02}:{s:02}" if h else f"{m}:{s:02}"


def rss() -> int:
    """Resident memory of this process at its peak, bytes."""
    try:  # `ru_maxrss` begins at what the parent held
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Meter:
    """Shows the progress of a run on stderr; call it with the bytes made so far."""

    def __init__(self, label: str, total_bytes: int, *, quiet: bool = False) -> None:
        self._label, self._total, self._quiet = label, max(1, total_bytes), quiet
        self._start = self._last = 0.0
        self._update: Callable[[int], None] = lambda done: None
        self._bar: Any = None

    def __enter__(self) -> Meter:
        self._start = time.monotonic()
        if self._quiet:
            return self
        if sys.stderr.isatty():
            self._begin_bar()
        else:
            self._plain(0)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, done: int) -> None:
        if self._quiet:
            return
        if self._bar:
            self._bar.update(self._task, completed=done, memory=human(rss()))
        elif time.monotonic() - self._last >= PLAIN_EVERY:
            self._plain(done)

    def _begin_bar(self) -> None:
        from rich import progress as p
        from rich.console import Console

        columns = (
            p.TextColumn("{task.description}"), p.BarColumn(), p.DownloadColumn(), p.TransferSpeedColumn(),
            p.TimeRemainingColumn(), p.TextColumn("{task.fields[memory]}"),
        )  # fmt: skip
        self._bar = p.Progress(*columns, console=Console(stderr=True), refresh_per_second=4)
        self._task = self._bar.add_task(self._label, total=self._total, memory="")
        self._bar.start()

    def _plain(self, done: int) -> None:
        self._last = time.monotonic()
        elapsed = self._last - self._start
        rate = done / elapsed if elapsed > 0 else 0.0
        eta = clock((self._total - done) / rate) if rate else "?"
        line = f"{self._label}: {human(done)} of {human(self._total)}, {human(rate)}/s, {eta} left, memory {human(rss())}"
        print(line, file=sys.stderr, flush=True)


def to_stderr(text: str) -> None:
    """A plain line."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def alive(what: str, tell: Callable[[str], None] = to_stderr) -> Iterator[None]:
    """A line every half minute while something runs."""
    done, started = threading.Event(), time.monotonic()

    def beat() -> None:
        while not done.wait(EVERY):
            tell(f"{what}: running for {clock(time.monotonic() - started)}")

    threading.Thread(target=beat, daemon=True).start()
    try:
        yield
    finally:
        done.set()
