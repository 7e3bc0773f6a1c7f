"""stdin, stdout and stderr as a command finds them: closed, full, read by nobody, in an encoding that lacks characters.

| stream | what is done |
|---|---|
| any of them closed | `/dev/null` takes its number, so that no file of a conversion is ever opened as stderr and written into |
| stderr full or without a reader | the line is lost and the work goes on: progress is no reason to stop |
| stdout full | exit 3 and a line on stderr: the answer was found and could not be said |
| stdout without a reader (`| head`) | exit 3 without a word, as nobody listens |
| latin-1, ASCII | what the encoding lacks is written as an escape |
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

from kconv.errors import EnvironmentLacks

if TYPE_CHECKING:
    from typing_extensions import Buffer


class _Deaf(io.FileIO):
    """A descriptor whose failing writes are as good as done."""

    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def prepare() -> None:
    """Give the process three open streams that take any text; to be called before anything is opened or printed."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    sys.stderr = _text(_Deaf(2, "w", closefd=False), encoding)
    if sys.stdout is None:
        sys.stdout = _text(_Deaf(1, "w", closefd=False), "utf-8")
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _text(raw: io.FileIO, encoding: str) -> TextIO:
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=encoding, errors="backslashreplace", line_buffering=True)


def flush(code: int) -> int:
    """The exit code of a process whose stdout has to be out: `code`, or 3 where it cannot be written."""
    try:
        sys.stdout.flush()
    except OSError as e:
        return unheard(e)
    return code


def unheard(error: OSError) -> int:
    """stdout takes nothing: say so where anybody reads, let go of it, exit 3."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered must not fail again when Python ends
    if error.errno != errno.EPIPE:
        print(f"error: cannot write to stdout: {error.strerror}", file=sys.stderr)
    return EnvironmentLacks.exit_code
