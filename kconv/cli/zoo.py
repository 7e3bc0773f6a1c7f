"""`kconv zoo`: the cards of known checkpoints."""

from __future__ import annotations

from collections import Counter
from typing import Any

import click
from rich.console import Console

from kconv.cli.common import Outcome, outcome_command
from kconv.console import human
from kconv.zoo.cards import Card

UNKNOWN = "unknown"


@click.group(epilog="\b\nExample:  kconv zoo list --kind draft")
def command() -> None:
    """The cards of known checkpoints: what they are, what goes wrong with them, what has been verified."""


@outcome_command("list", epilog="Example:  kconv zoo list --kind draft")
@click.option("--kind", type=click.Choice(("checkpoint", "draft")), help="Only these.")
@click.option("--family", help="Only this family.")
def list_command(kind: str | None, family: str | None) -> Outcome:
    """List the cards."""
    from kconv.zoo import cards, summary

    shown = cards(kind, family)

    def show(console: Console) -> None:
        rows = [("id", "tensors", "size", "verified", "repository"), *map(_row, shown)]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        for row in rows:
            cells = [row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in (1, 2, 3)), row[4]]
            console.print("  ".join(cells), markup=False)

    return Outcome({"cards": [summary(c) for c in shown]}, show=show)


def _row(card: Card) -> tuple[str, str, str, str, str]:
    data = card.data
    counts = Counter(item["status"] for item in data["verification"])
    tensors = f"{data['tensors']:,}" if data["tensors"] != UNKNOWN else "?"
    nbytes = human(data["bytes"]) if data["bytes"] != UNKNOWN else "?"
    pinned = f"@{data['revision'][:12]}" if data["revision"] != UNKNOWN else ""
    return data["id"], tensors, nbytes, f"{counts['verified']} of {sum(counts.values())}", data["repo"] + pinned


@outcome_command("show", epilog="Example:  kconv zoo show kimi-k3")
@click.argument("card")
def show_command(card: str) -> Outcome:
    """Show one CARD, by its id or from a .yaml file."""
    from kconv.zoo import lines
    from kconv.zoo.cards import load_card

    loaded = load_card(card)

    def show(console: Console) -> None:
        for line in lines(loaded):
            console.print(line, markup=False)

    return Outcome({k: v for k, v in loaded.data.items() if k != "layout"}, show=show)


@outcome_command("check", epilog="Example:  kconv zoo check hf://moonshotai/Kimi-K3")
@click.argument("source", required=False)
@click.option("--card", help="Id of the card, or a .yaml file; found by repository or by type and count if left out.")
def check_command(source: str | None, card: str | None) -> Outcome:
    """Hold a checkpoint's headers against its card; without SOURCE, check the cards themselves."""
    from kconv import zoo
    from kconv.zoo.cards import load_card

    if source is None:
        chosen = [load_card(card)] if card else zoo.cards()
        found = {c.data.get("id", c.where): zoo.card_problems(c) for c in chosen}
        wrong = [f"{name}: {p}" for name, problems in found.items() for p in problems]
        data: dict[str, Any] = {"ok": not wrong, "cards": len(found), "differences": wrong}
    else:
        data = zoo.check(source, card)

    def show(console: Console) -> None:
        for line in data["differences"]:
            console.print(line, markup=False)
        for note in data.get("notes", []):
            console.print(f"note: {note}", markup=False)
        if source is None:
            console.print(f"{data['cards']} cards, {len(data['differences'])} problems")
        else:
            said = "as its card says" if data["ok"] else "NOT as its card says"
            left = f"; not on the card: {', '.join(data['not_compared'])}" if data["not_compared"] else ""
            console.print(f"{said} ({data['card']}): compared {', '.join(data['compared'])}{left}", markup=False)

    return Outcome(data, ok=data["ok"], show=show)


@outcome_command("page", epilog="Example:  kconv zoo page site/")
@click.argument("out", type=click.Path())
def page_command(out: str) -> Outcome:
    """Write the zoo as one static page to OUT."""
    from kconv.zoo.page import write_page

    data = write_page(out)
    return Outcome(data, show=lambda console: console.print(f"{data['path']}: {data['cards']} cards", markup=False))


for _each in (list_command, show_command, check_command, page_command):
    command.add_command(_each)
