"""Faults at the boundary of the operating system, run in child processes that are really killed.

`die` counts the calls that change files and sends SIGKILL to itself at the n-th: before it, after it, or after half of
its bytes. `fail` raises an errno there instead. Both run the real command line in a process of a fork server, so that
a hundred of them take seconds.
"""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGE = 4096
CHANGES = ("pwrite", "write", "link", "rename", "unlink", "fdatasync", "fsync", "truncate")
WHEN = ("before", "half", "after")

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch", "kconv.cli.convert", "kconv.conversion", "kconv.kernels.mxfp4", "kconv.adapters.k3"])


def tree(folder: Path) -> dict[str, str]:
    """sha256 of every file below a folder."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def convert_in_child(arguments: list[str], fault: Callable[..., None] | None = None, *details: Any) -> int:
    """Run `kconv convert ARGUMENTS` in a child, with a fault installed first; returns its exit code (negative: signal)."""
    process = context.Process(target=_child, args=(arguments, fault, details))
    process.start()
    process.join(120)
    assert process.exitcode is not None, "the child hangs"
    return process.exitcode


def _child(arguments: list[str], fault: Callable[..., None] | None, details: tuple) -> None:
    from kconv.cli.convert import command
    from kconv.storage import direct

    direct.LEAST = PAGE  # small tensors are written as large ones are
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
    if fault:
        fault(*details)
    sys.exit(command.main(args=arguments, standalone_mode=False))


def die(at: int, when: str) -> None:
    """SIGKILL this process at its `at`-th change of a file."""

    def strike(real: Callable, args: tuple, kwargs: dict) -> Any:
        if when == "half" and real is originals["pwrite"]:
            half = len(args[1]) // 2
            real(args[0], memoryview(args[1])[: half // PAGE * PAGE or half], args[2])  # direct writes take whole pages
        elif when == "after":
            real(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    originals = _intercept(at, strike)


def fail(at: int, code: int) -> None:
    """Raise OSError(`code`) at this process's `at`-th change of a file and at all later ones."""

    def strike(real: Callable, args: tuple, kwargs: dict) -> Any:
        raise OSError(code, os.strerror(code))

    _intercept(at, strike, names=("pwrite", "fdatasync") if code == errno.EIO else ("pwrite",))


def _intercept(at: int, strike: Callable, names: tuple[str, ...] = CHANGES) -> dict[str, Callable]:
    count = [0]
    originals = {name: getattr(os, name) for name in names}

    def wrap(real: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            return strike(real, args, kwargs) if count[0] >= at else real(*args, **kwargs)

        return call

    for name, real in originals.items():
        setattr(os, name, wrap(real))
    return originals
