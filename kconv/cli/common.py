"""What every command shares: `--json`, exit codes, errors without tracebacks, the consoles.

| exit code | meaning |
|---|---|
| 0 | done and true |
| 1 | the answer is no (`AnswerIsNo`, or an `Outcome` with `ok=False`) |
| 2 | bad input or usage, nothing written |
| 3 | the environment lacks something |
| 130 | interrupted, resumable |
"""

from __future__ import annotations

import errno
import functools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import click
from rich.console import Console

from kconv.errors import EnvironmentLacks, KconvError

FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EMFILE, errno.EIO}


@dataclass
class Outcome:
    """What a command found: `data` is its JSON object, `ok` whether the answer is yes, `show` prints it for people."""

    data: dict[str, Any] = field(default_factory=dict)
    ok: bool = True
    show: Callable[[Console], None] | None = None


def announce(text: str) -> None:
    """A line on stderr at once, before the first slow step."""
    click.echo(text, err=True)


def err_console() -> Console:
    """The console for progress and errors (stderr)."""
    return Console(stderr=True, soft_wrap=True, highlight=False)


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
    except KconvError as e:
        return fail(str(e), e.exit_code, as_json, problems=getattr(e, "problems", None))
    except OSError as e:
        code = EnvironmentLacks.exit_code if e.errno in FULL_DISK else KconvError.exit_code
        where = f" ({e.filename})" if e.filename else ""
        return fail(f"{e.strerror or e}{where}", code, as_json)
    if as_json:
        click.echo(json.dumps(outcome.data))
    elif outcome.show:
        outcome.show(Console(soft_wrap=True, highlight=False))
    return 0 if outcome.ok else 1


def fail(message: str, code: int, as_json: bool, problems: list[str] | None = None) -> int:
    """Say an error on stderr, and as JSON on stdout when asked; returns the exit code."""
    console = err_console()
    console.print("[bold red]error:[/] ", end="")
    console.print(message, markup=False)
    if as_json:
        error = {"message": message, "exit_code": code}
        click.echo(json.dumps({"error": error | ({"problems": problems} if problems else {})}))
    return code
