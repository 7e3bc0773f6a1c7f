"""`kconv publish`: a folder to the Hub."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console

from kconv.cli.common import Outcome, outcome_command
from kconv.cli.options import Size


@outcome_command(epilog="Example:  kconv publish out/ lab/Kimi-K3-native --private --dry-run")
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False))
@click.argument("repo_id")
@click.option("--private", is_flag=True, help="Create the repository private; refused if it exists and is public.")
@click.option("--revision", help="Branch, or refs/pr/N, to commit to.  [default: main]")
@click.option("--create-branch", is_flag=True, help="Create that branch from main if it is missing.")
@click.option("--create-pr", is_flag=True, help="Commit to a pull request; goes on with an unfinished one.")
@click.option("--message", help="Message of the commits and title of the pull request.")
@click.option("--dry-run", is_flag=True, help="Check everything and say what would be sent; writes nothing.")
@click.option("--require", type=click.Choice(("verified",)), help="Refuse without passing evidence about exactly these files.")
@click.option("--evidence", multiple=True, type=click.Path(exists=True, dir_okay=False), help="A result's JSON.")
@click.option("--card", is_flag=True, help="Write README.md from the manifest if there is none.")
@click.option("--ignore", multiple=True, metavar="PATTERN", help="Leave out what matches, beyond what is never uploaded.")
@click.option("--allow", multiple=True, metavar="KIND", help="Accept one kind of problem, e.g. no-tokenizer.")
@click.option("--max-file-size", type=Size(), default="50GB", show_default=True, help="Bytes one file may have.")
def command(folder: str, repo_id: str, **options: Any) -> Outcome:
    """Upload the folder DIR to the model repository REPO_ID; resumable, and a second run uploads nothing."""
    from kconv.console import human
    from kconv.publishing.publish import publish

    data = publish(folder, repo_id, quiet=False, **options)

    def show(console: Console) -> None:
        for name in data["sent_files"]:
            console.print(f"{'would send' if data['dry_run'] else 'sent'}  {name}", markup=False)
        for name in data["left_out"]:
            console.print(f"left out    {name}", markup=False)
        for note in data["notes"]:
            console.print(f"note: {note}", markup=False)
        if data["kept_on_hub"]:
            console.print(f"kept on the Hub, not in the folder: {', '.join(data['kept_on_hub'])}", markup=False)
        moved = f"{len(data['sent_files'])} of {data['files']} files, {human(data['sent_bytes'])} of {human(data['bytes'])}"
        console.print(f"{'to send' if data['dry_run'] else 'sent'}: {moved}, to {repo_id} {data['revision']}", markup=False)
        if data["commit"]:
            console.print(f"published and verified: hf://{repo_id}@{data['commit']}", markup=False)
        if data["pull_request"]:
            console.print(f"pull request: {data['pull_request']}", markup=False)

    return Outcome(data, show=show)
