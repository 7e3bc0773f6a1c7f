"""What every command shares: `--json`, exit codes, errors without tracebacks, the consoles.

| exit code | meaning |
|---|---|
| 0 | done and true |
| 1 | the answer is no (`AnswerIsNo`, or an `Outcome` with `ok=False`), and nothing else |
| 2 | bad input or usage, nothing written |
| 3 | the environment lacks something, the answer could not be written, or an error that kconv did not foresee |
| 130 | interrupted, resumable |

`KCONV_TRACEBACK=1` in the environment adds the traceback of an error that was not foreseen.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import click
from rich.console import Console

from kconv.cli import streams
from kconv.errors import LACKING, AnswerIsNo, EnvironmentLacks, KconvError
from kconv.text.printable import printable, shown
from kconv.text.redaction import redacted

TRACEBACK = "KCONV_TRACEBACK"


@dataclass
class Outcome:
    """What a command found: `data` is its JSON object, `ok` whether the answer is yes, `show` prints it for people."""

    data: Mapping[str, Any] = field(default_factory=dict)
    ok: bool = True
    show: Callable[[Console], None] | None = None


class SafeConsole(Console):
    """A console on which text from outside is shown, and never obeyed by the terminal."""

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich prints, every string's control characters escaped."""
        super().print(*(shown(o) if isinstance(o, str) else o for o in objects), **options)

    def on_broken_pipe(self) -> None:
        """Nobody reads: rich would exit 1, which is an answer here."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def announce(text: str) -> None:
    """A line on stderr at once, before the first slow step."""
    click.echo(printable(text), err=True)


def err_console() -> Console:
    """The console for progress and errors (stderr)."""
    return SafeConsole(stderr=True, soft_wrap=True, highlight=False)


def outcome_command(*args: Any, epilog: str, **kwargs: Any) -> Callable[[Callable[..., Outcome]], click.Command]:
    """A click command whose function returns an `Outcome`; adds `--json`. `epilog` is the example in `--help`."""

    def wrap(function: Callable[..., Outcome]) -> click.Command:
        @click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, everything else on stderr.")
        @functools.wraps(function)
        def run(*a: Any, as_json: bool, **k: Any) -> None:
            sys.exit(execute(functools.partial(function, *a, **k), as_json, resumable="resume" in k))

        return click.command(*args, epilog=f"\b\n{epilog}", **kwargs)(run)

    return wrap


def execute(function: Callable[[], Outcome], as_json: bool, *, resumable: bool = False) -> int:
    """Run a command's function, print its outcome or its error, and return the exit code."""
    try:
        outcome = function()
    except KeyboardInterrupt:
        return fail("interrupted" + ("; run the same command with --resume to go on" if resumable else ""), 130, as_json)
    except click.ClickException:
        raise
    except Exception as e:
        return failed(e, as_json)
    return tell(outcome, as_json)


def tell(outcome: Outcome, as_json: bool) -> int:
    """Print what a command found; returns its exit code, which is 3 where stdout does not take it."""
    try:
        if as_json:
            click.echo(json.dumps(dict(outcome.data)))
        elif outcome.show:
            outcome.show(SafeConsole(soft_wrap=True, highlight=False))
    except OSError as e:
        return streams.unheard(e)
    except Exception as e:
        return failed(e, as_json)
    return 0 if outcome.ok else AnswerIsNo.exit_code


def failed(error: Exception, as_json: bool) -> int:
    """Say any exception; returns its exit code, which is never that of an answer unless the error is one."""
    if isinstance(error, KconvError):
        return fail(str(error), error.exit_code, as_json, problems=getattr(error, "problems", None))
    if isinstance(error, OSError) and error.errno is not None:
        code = EnvironmentLacks.exit_code if error.errno in LACKING else KconvError.exit_code
        where = f" ({error.filename})" if error.filename else ""
        return fail(f"{error.strerror or error}{where}", code, as_json)
    if isinstance(error, MemoryError):
        return fail("out of memory\n  next: free some, or use a machine with more", EnvironmentLacks.exit_code, as_json)
    return fail(_unforeseen(error), EnvironmentLacks.exit_code, as_json)


def _unforeseen(error: Exception) -> str:
    if os.environ.get(TRACEBACK, "0") not in ("", "0"):
        traceback.print_exception(error, file=sys.stderr)
    frames = traceback.extract_tb(error.__traceback__)
    at = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    what = f"{type(error).__name__}: {printable(redacted(str(error)))}"[:300]
    said = f"kconv did not foresee this: {what}{at}; please report it, with the traceback that {TRACEBACK}=1 shows"
    return "; ".join([said, *getattr(error, "__notes__", [])])


def fail(message: str, code: int, as_json: bool, problems: list[str] | None = None) -> int:
    """Say an error on stderr, and as JSON on stdout when asked; returns the exit code."""
    console = err_console()
    console.print("[bold red]error:[/] ", end="", emoji=False)
    console.print(message, markup=False)
    if as_json:
        error = {"message": message, "exit_code": code}
        try:
            click.echo(json.dumps({"error": error | ({"problems": problems} if problems else {})}))
        except OSError as e:
            return streams.unheard(e)
    return code
