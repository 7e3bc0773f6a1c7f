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
import sys

import click

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

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The command table, from `COMMANDS`."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="kconv", prog_name="kconv")
def cli() -> None:
    """Checkpoint conversion and model zoo for the Kimi K3 family: bit-exact, at disk speed, with proof."""


def main(argv: list[str] | None = None) -> None:
    """Console entry point."""
    sys.exit(cli.main(args=argv, prog_name="kconv", standalone_mode=True))
