"""`kconv convert`: execute a plan into a new folder."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console

from kconv.cli.common import Outcome, announce, outcome_command
from kconv.cli.options import GRADES, Share, Size, conversion_options


@outcome_command(epilog="Example:  kconv convert Kimi-K3/ out/ --experts packed --vision drop")
@click.argument("source")
@click.argument("out", type=click.Path())
@conversion_options
@click.option("--shard-size", type=Size(), default="5GB", show_default=True, help="Tensor bytes a file holds at most.")
@click.option("--workers", type=click.IntRange(1), help="Threads; by default half as many again as cores.")
@click.option("--device", type=click.Choice(("cpu", "cuda")), default="cpu", show_default=True, help="Where formats are decoded.")
@click.option("--memory", type=Size(), default="1GB", show_default=True, help="What the workers' buffers may take together.")
@click.option("--part", type=Share(), help="Do the I-th of N shares beside other processes; the last one finishes the folder.")
@click.option("--mmap", is_flag=True, help="Read through memory maps; for local NVMe, slow on network disks.")
@click.option("--resume", is_flag=True, help="Go on with what an interrupted run left.")
@click.option("--overwrite", is_flag=True, help="Replace a folder that kconv made.")
@click.option("--require", type=click.Choice(GRADES), help="Refuse a plan of a worse grade.")
@click.option("--digest", type=click.Choice(("xxh3-128", "sha256", "none")), default="xxh3-128", show_default=True,
              help="What the manifest records of the weight files; sha256 is what the Hub states, and takes longer.")
@click.option("--link", is_flag=True, help="Link unchanged shards and side files to the source's instead of copying them.")
@click.option("--direct/--no-direct", default=None, help="Write past the page cache; by default on local ext4 and xfs.")
def command(source: str, out: str, **options: Any) -> Outcome:
    """Convert SOURCE into the new folder OUT; the folder appears only when it is complete."""
    from kconv.console import clock, human
    from kconv.conversion import convert

    announce(f"convert: reading the headers of {source}")
    options["digest"] = None if options["digest"] == "none" else options["digest"]
    data = convert(source, out, quiet=False, **options)

    def show(console: Console) -> None:
        if not data["finished"]:
            console.print(f"part {data['part'][0]} of {data['part'][1]} is done; the last part finishes {out}", markup=False)
            return
        rate = human(data["bytes_written"] / max(data["seconds"], 1e-9))
        console.print(
            f"{out}: {data['target_tensors']:,} tensors, {human(data['output_bytes'])} in {clock(data['seconds'])} ({rate}/s), "
            f"grade {data['grade']}",
            markup=False,
        )
        for way, count in data.get("links", {}).items():
            shared = ": what is written into one changes the source" if way == "hard link" else ""
            console.print(f"{count} files are each a {way} of the source's{shared}", markup=False)
        for note in data["notes"]:
            console.print(f"note: {note}", markup=False)
        console.print(f"verify: kconv verify {out} --source {source}", markup=False)

    return Outcome(data, show=show)
