"""A sign of life from what takes minutes and has no bar of its own."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from kconv.console import clock

EVERY = 30.0


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
