"""The command line: one file a command, loaded only when it is used.

| command | answers |
|---|---|
| plan | what would be converted, at which sizes and grade |
| convert, verify | do it; prove bit for bit that nothing was lost |
| verify-parity, capture | does it compute what the reference computes |
| inspect, tiny | what is this checkpoint; make a small one |
| package, check, publish, zoo | drafts that say whose they are, the Hub, the model zoo |
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import Any

import click

from kconv.cli import streams
from kconv.errors import EnvironmentLacks
from kconv.text.printable import printable

COMMANDS: dict[str, str] = {
    "plan": "Headers only: coverage, folded table, sizes, peak memory, grade.",
    "convert": "Convert a checkpoint.",
    "verify": "Run the plan backwards over the written files, bit for bit.",
    "verify-parity": "Compare logits and hidden states with a reference.",
    "capture": "Write a golden file from a reference.",
    "inspect": "Say what a checkpoint is: family, formats, sizes, oddities.",
    "tiny": "Make a faithful small random checkpoint in the published layout.",
    "package": "Make a publishable draft with its target's provenance.",
    "check": "Is this draft made for exactly this target?",
    "publish": "Upload a folder to the Hub, preflighted and resumable.",
    "zoo": "The cards of known checkpoints.",
}


class LazyGroup(click.Group):
    """A group whose commands are imported when called; help needs no import."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Command names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command called `cmd_name`, or None."""
        if cmd_name not in COMMANDS:
            return None
        return importlib.import_module(f"kconv.cli.{cmd_name.replace('-', '_')}").command

    def main(self, args: Any = None, prog_name: str | None = None, complete_var: str | None = None,
             standalone_mode: bool = True, **extra: Any) -> Any:  # fmt: skip
        """Run as click does, but say usage errors as JSON too when `--json` is there, and exit 130 when interrupted."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        given = list(sys.argv[1:] if args is None else args)
        try:
            code = super().main(given, prog_name, complete_var, standalone_mode=False, **extra)
        except click.Abort:
            code = _fail("interrupted", 130, given)
        except click.ClickException as e:
            if "--json" not in given:
                e.show()
            code = e.exit_code if "--json" not in given else _fail(e.format_message(), e.exit_code, given)
        except Exception as e:
            code = _failed(e, given)
        sys.exit(code if isinstance(code, int) else 0)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The command table, from `COMMANDS`."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _fail(message: str, code: int, given: list[str]) -> int:
    from kconv.cli.common import fail

    return fail(message, code, "--json" in given)


def _failed(error: Exception, given: list[str]) -> int:
    from kconv.cli.common import failed

    return failed(error, "--json" in given)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="kconv", prog_name="kconv")
def cli() -> None:
    """Checkpoint conversion and model zoo for the Kimi K3 family: bit-exact, at disk speed, with proof."""


def main(argv: list[str] | None = None) -> None:
    """Console entry point."""
    streams.prepare()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores one of them, and means it
            signal.signal(number, signal.default_int_handler)
    stdout = sys.stdout
    try:
        cli.main(args=argv, prog_name="kconv", standalone_mode=True)
    except SystemExit as e:
        if sys.stdout is not stdout:  # click found that nobody reads: it hides the pipe and exits 1, which is an answer here
            sys.exit(EnvironmentLacks.exit_code)
        sys.exit(streams.flush(e.code if isinstance(e.code, int) else 0))
    except BaseException as e:  # while an error was being said: without open files, or interrupted again
        os.write(2, f"error: {type(e).__name__}: {printable(e)}\n".encode())
        os._exit(130 if isinstance(e, KeyboardInterrupt) else 3)
