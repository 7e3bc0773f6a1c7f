"""`kconv verify`: the plan run backwards over the written files, bit for bit."""

from __future__ import annotations

import click
from rich.console import Console

from kconv.cli.common import Outcome, announce, outcome_command


@outcome_command(epilog="Example:  kconv verify out/ --source Kimi-K3/")
@click.argument("out", type=click.Path(exists=True, file_okay=False))
@click.option("--source", help="What OUT was converted from; may be left out when that was the Hub.")
@click.option("--sample", type=click.IntRange(1), help="Compare so many random slabs of about 32 MB.")
@click.option("--all", "everything", is_flag=True, help="Compare every byte and every file's sha256 (the default).")
@click.option("--workers", type=click.IntRange(1), help="Threads; the machine's cores by default.")
def command(out: str, source: str, sample: int | None, everything: bool, workers: int | None) -> Outcome:
    """Compare the converted folder OUT with its source, bit for bit; exit 1 names every difference."""
    from kconv.verification import lines, verify

    if sample and everything:
        raise click.UsageError("--sample and --all exclude each other")
    announce(f"verify: reading the headers of {out}")
    data = verify(out, source, sample=sample, workers=workers, quiet=False)

    def show(console: Console) -> None:
        for line in lines(data):
            console.print(line, markup=False)
        for line in data.get("dropped", []):
            console.print(f"left out: {line}", markup=False)
        verdict = "identical" if data["ok"] else "DIFFERENT"
        console.print(f"{verdict}: {data['compared']:,} tensors compared, {data['different']:,} different", markup=False)

    return Outcome(data, ok=data["ok"], show=show)
