"""Errors that a user can act on; each carries the exit code of the command line (design: 1 no, 2 bad input, 3 environment)."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from kconv.text.redaction import redacted

LACKING = {
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOMEM, errno.EAGAIN,
}  # fmt: skip
"""Errors of the operating system that speak of the machine, not of what was asked."""


class KconvError(Exception):
    """Bad input or usage; nothing was written. Says what, where, the likely cause and the next step."""

    exit_code = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        message, hint = redacted(message), redacted(hint) if hint else None
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  next: {self.hint}" if self.hint else self.message


class EnvironmentLacks(KconvError):
    """The machine lacks something: disk space, memory, a package, a reference that cannot be imported."""

    exit_code = 3


class Unreadable(KconvError):
    """The operating system refuses to read what is there; no answer about its content can be given."""

    def __init__(self, what: str, error: OSError) -> None:
        super().__init__(f"cannot read {what}: {error.strerror}", hint="check its permissions and the disk")
        if error.errno in LACKING:
            self.exit_code = EnvironmentLacks.exit_code


class AnswerIsNo(KconvError):
    """The question was answered, and the answer is no: parity failed, a difference was found, a draft does not fit."""

    exit_code = 1


class Altered(KconvError):
    """The source gives other bytes than it states: going on with what was begun cannot help, so nothing of it is kept."""


class Problems(KconvError):
    """Several problems at once, collected before a byte of data is read."""

    def __init__(self, title: str, problems: Sequence[str], *, hint: str | None = None) -> None:
        self.problems = [redacted(p) for p in problems]
        lines = "\n".join(f"  - {p}" for p in self.problems)
        super().__init__(f"{title}\n{lines}", hint=hint)


class BadData(KconvError):
    """A value inside a tensor is not convertible; `operand` is the index of the transform's input, `position` its element.

    The executor turns it into a message that names the tensor and the file.
    """

    def __init__(self, message: str, *, operand: int, position: tuple[int, ...], hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.operand = operand
        self.position = position
