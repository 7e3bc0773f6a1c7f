"""`kconv inspect`: what a checkpoint is."""

from __future__ import annotations

import click
from rich.console import Console

from kconv.cli.common import Outcome, announce, outcome_command


@outcome_command(epilog="Example:  kconv inspect hf://moonshotai/Kimi-K3")
@click.argument("path")
def command(path: str) -> Outcome:
    """Say what the checkpoint at PATH is: family, formats with counts and bytes, oddities, what it converts to."""
    from kconv.console import human
    from kconv.inspection import inspect

    announce(f"inspect: reading the headers of {path}")
    data = inspect(path)

    def show(console: Console) -> None:
        console.print(f"{data['source']}: {data['family']}", markup=False)
        console.print(f"{data['tensors']:,} tensors, {human(data['bytes'])} in {data['shards']} files", markup=False)
        for dtype, row in data["dtypes"].items():
            console.print(f"  {dtype:<8} {row['tensors']:>9,} tensors  {human(row['bytes']):>10}", markup=False)
        for key in ("layout", "root", "layers", "experts", "experts_format", "vision_tensors", "quantization"):
            if data.get(key) not in (None, {}, []):
                console.print(f"{key.replace('_', ' ')}: {_plain(data[key])}", markup=False)
        for label, row in data.get("formats", {}).items():
            held = f" in {', '.join(row['in'][:4])}{', ...' if len(row['in']) > 4 else ''}" if row["in"] else ""
            count = f"{row['weights']:,} weights, {row['tensors']:,} tensors, {human(row['bytes'])}"
            console.print(f"stored as {label}: {count}{held}", markup=False)
        for target, grade in data["converts_to"].items():
            console.print(f"converts to {target}: {grade}", markup=False)
        for line in [*data.get("notes", []), *(f"PROBLEM {p}" for p in data.get("problems", []))]:
            console.print(f"note: {line}", markup=False)

    return Outcome(data, show=show)


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
