"""`kconv check`: does this draft belong to exactly this target?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from kconv.cli.common import Outcome, outcome_command


@outcome_command(epilog="Example:  kconv check draft/ --target hf://moonshotai/Kimi-K3@f831ab66814297da540d832a5235f8e904f29d06")
@click.argument("draft")
@click.option("--target", required=True, help="The target: a folder, or hf://owner/name[@revision] (ranges only).")
@click.option("--content", is_flag=True, help="Accept another repository or revision if all contents agree.")
@click.option("--no-tables", "tables", is_flag=True, flag_value=False, default=True, help="Do not read embed_tokens and lm_head.")
@click.option("--quick", is_flag=True, help="Do not read a local target's weights in full; the answer is then never `exact`.")
@click.option("--target-repo", metavar="OWNER/NAME", help="What a local target folder is a copy of.")
@click.option("--target-revision", metavar="COMMIT", help="The commit of that copy.")
@click.option("--write", is_flag=True, help="Put the result into the draft's folder, for publish --require verified.")
def command(draft: str, target: str, write: bool, **options: Any) -> Outcome:
    """Say whether DRAFT was made for exactly this target; exit 1 names what differs.

    `exact` needs the target's repository and revision and all of its weights: a local folder is read whole once, after which
    the digests of its files are remembered until they change.
    """
    from kconv.checkpoint import evidence
    from kconv.console import alive
    from kconv.packaging.check import check, lines

    with alive(f"check: reading {target}"):
        data = check(draft, target, quiet=False, **options)
    if write:
        evidence.write(Path(draft), "kconv.check.json", data)

    def show(console: Console) -> None:
        for note in data["notes"]:
            console.print(f"note: {note}", markup=False)
        for line in lines(data):
            console.print(line, markup=False)

    return Outcome(data, ok=data["fits"], show=show)
