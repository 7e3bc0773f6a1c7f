"""`kconv tiny`: a small random checkpoint in a published layout, or the full-size one without its data.

Each family is a subcommand whose options are the fields of its shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import click
from rich.console import Console

from kconv.cli.common import Outcome, outcome_command
from kconv.synthesis.families import FAMILIES, family, tiny
from kconv.synthesis.family import Family


class Numbers(click.ParamType):
    """Whole numbers, with ranges: `4,8,9` or `1-3,5`."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        from kconv.zoo.cards import numbers

        if isinstance(value, tuple):
            return value
        try:
            return numbers(value)
        except ValueError:
            self.fail(f"{value!r} is no list of numbers; write for example 4,8,9", param, ctx)


class Families(click.Group):
    """One subcommand a family, made when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the families."""
        return list(FAMILIES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a family, or None."""
        return family_command(cmd_name, family(cmd_name)) if cmd_name in FAMILIES else None


def family_command(name: str, chosen: Family) -> click.Command:
    """`kconv tiny NAME OUT` with the options of the family's shape."""

    def run(out: str, seed: int, full_size: bool = False, **options: Any) -> Outcome:
        given = {k: v for k, v in options.items() if v is not None}
        data = tiny(name, out, seed=seed, full_size=full_size, **given)
        return Outcome(data, show=lambda console: _show(console, chosen, data))

    run.__doc__ = f"{chosen.title}. Writes the new folder OUT."
    for option in reversed([*_general(chosen), *map(_option, dataclasses.fields(chosen.shape))]):
        run = option(run)
    run = click.argument("out", type=click.Path(file_okay=False))(run)
    example = f"Example:  kconv tiny {name} {name}-tiny/ --layers 5 --seed 1"
    return outcome_command(name, epilog=example, short_help=chosen.title)(run)


def _general(chosen: Family) -> list[Callable[[Any], Any]]:
    said = "The same seed, the same bytes."
    options = [click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help=said)]
    if chosen.card:
        text = "The published checkpoint at its full size, its data holes that take no disk; no other option applies."
        options.append(click.option("--full-size", is_flag=True, help=text))
    return options


def _option(field: dataclasses.Field) -> Callable[[Any], Any]:
    """The click option of a knob; not given is None, so that the shape's own default holds."""
    flag, text, default = "--" + field.name.replace("_", "-"), field.metadata["help"], field.default
    if field.metadata["choices"]:
        return click.option(flag, type=click.Choice(field.metadata["choices"]), help=f"{text}  [default: {default}]")
    if isinstance(default, bool):
        name, said = (f"--no-{flag[2:]}", f"Leave out: {text[0].lower()}{text[1:]}") if default else (flag, text)
        return click.option(name, field.name, is_flag=True, flag_value=not default, default=None, help=said)
    if isinstance(default, tuple):
        return click.option(flag, type=Numbers(), help=text)
    return click.option(flag, type=click.IntRange(field.metadata["least"]), help=f"{text}  [default: {default}]")


def _show(console: Console, chosen: Family, data: dict[str, Any]) -> None:
    from kconv.console import human

    made = f"{data['tensors']:,} tensors, {human(data['bytes'])} in {data['shards']} files"
    how = "headers only, the data are holes" if data["full_size"] else f"seed {data['seed']}"
    console.print(f"{data['out']}: {chosen.title}", markup=False)
    console.print(f"{made} ({how})", markup=False)
    console.print(f"look at it: kconv inspect {data['out']}", markup=False)


command = Families("tiny", help="Make a small random checkpoint in a family's published layout.", no_args_is_help=True)
