"""`kconv verify-parity CONVERTED --reference REF`: does it compute what the reference computes, and if not, where not."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console

from kconv.cli.capture import DTYPES, reference_options
from kconv.cli.common import Outcome, outcome_command

EXAMPLE = """Example:
  kconv verify-parity out/ --reference golden.safetensors --dtype float64"""


@outcome_command(epilog=EXAMPLE)
@click.argument("converted", type=str)
@click.option("--reference", required=True, type=click.Path(exists=True), help="A golden file, or a checkpoint to run.")
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True, help="Precision that ours runs in.")
@click.option("--device", default="cpu", show_default=True, help="Where both run.")
@click.option("--attention", type=click.Choice(["eager", "sdpa"]), default="eager", show_default=True, help="Of ours.")
@click.option("--source", type=click.Path(exists=True, file_okay=False), help="What CONVERTED was made from: names the fault.")
@click.option("--noise", type=click.Path(exists=True, dir_okay=False), help="The reference's own noise: golden file or JSON.")
@click.option("--noise-factor", "factor", type=float, default=1.5, show_default=True, help="How much of it is allowed.")
@click.option("--cached", is_flag=True, help="Decode the last tokens from a cache as well.")
@click.option("--streamed", is_flag=True, help="One layer in memory at a time, for models larger than it.")
@click.option("--reference-dtype", type=click.Choice(DTYPES), default="float64", show_default=True, help="Of a live reference.")
@reference_options
def command(converted: str, reference: str, streamed: bool, reference_python: str | None, **how: Any) -> Outcome:
    """Compare CONVERTED with a reference: logits, hidden states, routing, module by module.

    Exit code 0 when it passes, 1 when it does not, 2 for bad input, 3 when the reference cannot run here.
    """
    from kconv import parity
    from kconv.checkpoint.evidence import subject

    report = (parity.streamed if streamed else parity.check)(converted, reference, python=reference_python, **how)

    def show(console: Console) -> None:
        for line in report.lines():
            console.print(line, markup=False, style="bold" if line.startswith("verdict") else None)

    # `subject` ties the result to the folder's files: `kconv publish --require verified` reads it.
    return Outcome({**report.data(), "subject": subject(converted)}, ok=report.passed, show=show)
