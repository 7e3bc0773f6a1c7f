"""`kconv plan`: what a conversion would do, from the headers alone."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console

from kconv.cli.common import Outcome, command
from kconv.cli.options import conversion_options


@command(epilog="Example:  kconv plan moonshotai/Kimi-K3 --experts bf16")
@click.argument("source")
@conversion_options
def command(source: str, to: str, **options: Any) -> Outcome:
    """Show what converting SOURCE would do: coverage, table, sizes, memory, grade. Reads headers only."""
    from kconv.conversion import default_workers, plan
    from kconv.preflight import peak_bytes
    from kconv.report import human, print_plan

    made = plan(source, to, **options)
    peak = peak_bytes(made, default_workers())
    data = {**made.summary(), "peak_bytes": peak, "problems": made.findings.lines(), "notes": made.layouts.notes}

    def show(console: Console) -> None:
        print_plan(made, console, {"in flight": f"{human(peak)} at most", "digest": made.digest})

    if data["problems"]:
        made.check()
    return Outcome(data, show=show)
