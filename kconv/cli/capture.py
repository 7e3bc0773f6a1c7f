"""`kconv capture REF OUT`: a golden file from a reference, run in its own process and, if need be, its own environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from kconv.cli.common import Outcome, outcome_command

DTYPES = ("float64", "float32", "bfloat16", "float16")
EXAMPLE = """Example:
  kconv capture tiny-k3/ tiny-k3/golden.safetensors --trust-remote-code --code official/ \\
      --reference-python official-venv/bin/python"""


def reference_options(function: Any) -> Any:
    """Options that say how a reference is run and on which inputs; `capture` and `verify-parity` share them."""
    options = (
        click.option("--reference-python", type=click.Path(dir_okay=False), help="Interpreter of the reference's environment."),
        click.option("--trust-remote-code", is_flag=True, help="Run the code that comes with the reference."),
        click.option("--code", type=click.Path(exists=True, file_okay=False), help="Folder with that code, if not in REF."),
        click.option("--operators", type=click.Choice(["torch", "fla"]), help="fla's kernels, or plain forms of them."),
        click.option("--ids", type=click.Path(exists=True, dir_okay=False), help="Inputs: JSON rows of ids, or safetensors."),
        click.option("--text", type=click.Path(exists=True, dir_okay=False), help="Inputs: prompts, one a paragraph."),
        click.option("--tokens", type=click.IntRange(1), default=512, show_default=True, help="Length of random inputs."),
        click.option("--batch", type=click.IntRange(1), default=2, show_default=True, help="Rows of random inputs."),
        click.option("--seed", type=int, default=0, show_default=True, help="Seed of random inputs."),
        click.option("--modules", default="sketch:4", show_default=True, help="Module outputs: none, full or sketch:K."),
    )
    for option in reversed(options):
        function = option(function)
    return function


@outcome_command(epilog=EXAMPLE)
@click.argument("ref", type=click.Path(exists=True, file_okay=False))
@click.argument("out", type=click.Path())
@click.option("--dtype", type=click.Choice(DTYPES), default="float64", show_default=True, help="Precision of the answers.")
@click.option("--also", default="float32", show_default=True, help="Lower precisions to run as well, by commas.")
@click.option("--device", default="cpu", show_default=True, help="Where the reference runs.")
@click.option("--overwrite", is_flag=True, help="Replace a golden file that is there.")
@reference_options
def command(ref: str, out: str, also: str, reference_python: str | None, **how: Any) -> Outcome:
    """Run the reference in REF and write what it computed to the golden file OUT."""
    from kconv.parity.capturing import capture

    done = capture(ref, out, also=[d for d in also.split(",") if d], python=reference_python, **how)

    def show(console: Console) -> None:
        console.print(f"{Path(done['golden'])}: {done['reference']} in {done['dtype']}, {done['tokens']} tokens, "
                      f"{done['points']} module outputs (transformers {done['transformers']})")  # fmt: skip

    return Outcome(done, show=show)
