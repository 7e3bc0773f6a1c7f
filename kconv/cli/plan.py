"""`kconv plan`: what a conversion would do, from the headers alone; with `--out`, whether it would succeed there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kconv.cli.common import Outcome, announce, outcome_command
from kconv.cli.options import Size, conversion_options
from kconv.console import clock, human

if TYPE_CHECKING:
    from rich.console import Console

    from kconv.planning.plan import Plan


@outcome_command(epilog="Example:  kconv plan hf://moonshotai/Kimi-K3 --experts bf16 --out out/")
@click.argument("source")
@conversion_options
@click.option("--out", type=click.Path(), help="Also check room, rights and memory there; estimate the time.")
@click.option("--shard-size", type=Size(), help="Tensor bytes a file holds at most, for --out.  [default: 5GB]")
def command(source: str, to: str, out: str | None, shard_size: int | None, **options: Any) -> Outcome:
    """Show what converting SOURCE would do: coverage, table, sizes, memory, grade. Reads headers only."""
    from kconv.conversion import SHARD_SIZE, default_workers, plan
    from kconv.engine.preflight import peak_bytes

    if shard_size and out is None:
        raise click.UsageError("--shard-size has no effect without --out")
    announce(f"plan: reading the headers of {source}")
    made = plan(source, to, **options)
    peak = peak_bytes(made, default_workers())
    data = {**made.summary(), "peak_bytes": peak, "problems": made.findings.lines(), "notes": made.layouts.notes}
    if data["problems"]:
        made.check()
    extra = {"in flight": f"{human(peak)} at most", "digest": made.digest}
    if out is not None:
        from kconv.engine.probe import preflight

        data["preflight"] = preflight(made, out, shard_size=shard_size or SHARD_SIZE, workers=default_workers())
        extra |= _lines(out, data["preflight"])
    return Outcome(data, show=lambda console: print_plan(made, console, extra))


def _lines(out: str, found: dict[str, Any]) -> dict[str, str]:
    read = f"read {human(found['read_rate'])}/s, " if found["read_rate"] else "source not probed, "
    return {
        out: f"{human(found['needed_bytes'])} in {found['files']:,} files of at most {human(found['largest_file'])}, "
        f"{human(found['free_bytes'])} free",
        "memory": f"{human(found['free_memory'])} free",
        "time": f"about {clock(found['estimated_seconds'])} ({read}write {human(found['write_rate'])}/s)",
    }


def print_plan(plan: Plan, console: Console, extra: dict[str, str]) -> None:
    """The folded table, the totals, the notes."""
    layouts = plan.layouts
    rows = plan.table()
    widths = [max((len(r[i]) for r in rows), default=0) for i in range(3)]
    console.print(f"{layouts.family}: {layouts.source_layout} -> {layouts.target_layout}, from {plan.source.where}", markup=False)
    for count, target, spec, how in rows:
        console.print(f"{count:>{widths[0]}}  {target:<{widths[1]}}  {spec:<{widths[2]}}  {how}", markup=False)
    for drop in layouts.drops:
        console.print(f"{len(drop.names):>{widths[0]},}  dropped: {drop.reason}", markup=False)
    for note in layouts.notes:
        console.print(f"note: {note}", markup=False)
    totals = {
        "source": f"{len(plan.source.entries):,} tensors, {human(plan.source.nbytes)}; "
        f"{plan.claimed:,} claimed, {len(plan.dropped):,} dropped",
        "target": f"{len(plan.targets):,} tensors, {human(plan.output_bytes)}",
        "grade": str(plan.grade),
        **extra,
    }
    for key, value in totals.items():
        console.print(f"{key:>10}: {value}", markup=False)
