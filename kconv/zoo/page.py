"""The zoo as one static page: no server, no external resource, readable without JavaScript, on a phone and in the dark.

JavaScript only filters. Every card has an anchor (its id), and the index at the top links to each.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from kconv.checkpoint.folder import write_file
from kconv.errors import KconvError, Problems
from kconv.zoo import UNKNOWN, card_problems, cards, size
from kconv.zoo.cards import Card
from kconv.zoo.style import SCRIPT, STYLE

MARKS = {"verified": "\u2713", "unverified": "\u25cb", "unsupported": "\u2715", "not_applicable": "\u2013"}
HEAD = '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>kconv model zoo</title>'
WORDS = {"not_applicable": "not applicable"}


def write_page(out: str | Path) -> dict[str, Any]:
    """Write the page to OUT (a `.html` file, or a folder that gets `index.html`); returns `path`, `cards`, `bytes`.

    Replaces an earlier page of the zoo and no other file.
    """
    if not str(out):
        raise KconvError("the output is an empty name", hint="give a folder or a .html file")
    path = Path(out)
    if path.suffix != ".html":
        path = path / "index.html"
    shown = cards()
    wrong = {c.where: found for c in shown if (found := card_problems(c))}
    if wrong:
        raise Problems("the cards are not sound:", [f"{where}: {p}" for where, found in wrong.items() for p in found])
    html = page(shown)
    try:
        if path.exists() and not path.read_bytes().startswith(HEAD.encode()):
            raise KconvError(f"{path} is there and no page of the zoo, so it is not replaced", hint="give another name")
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        write_file(draft, html.encode())
        os.replace(draft, path)
    except OSError as e:
        raise KconvError(f"cannot write {path}: {e.strerror}", hint="give a folder you may write to") from e
    return {"path": str(path), "cards": len(shown), "bytes": len(html.encode())}


def page(shown: list[Card]) -> str:
    """The whole document."""
    checkpoints = [c for c in shown if c.data["kind"] == "checkpoint"]
    drafts = [c for c in shown if c.data["kind"] == "draft"]
    families = sorted({c.data["family"] for c in shown})
    chips = '<button type="button" data-filter="" class="on">all</button>'
    chips += "".join(f'<button type="button" data-filter="{escape(f)}">{escape(f)}</button>' for f in families)
    done = Counter(item["status"] for c in shown for item in c.data["verification"])
    body = (
        '<header class="top"><h1>Model zoo of kconv</h1>'
        "<p>What is known of the published Kimi K3 family and its drafts: where each checkpoint lies, how it is stored, "
        "what goes wrong with it, and what has been verified, with the command that shows it.</p>"
        f'<p class="totals"><b>{len(checkpoints)}</b> checkpoints <b>{len(drafts)}</b> drafts '
        f"<b>{done['verified']}</b> statements verified <b>{done['unverified']}</b> not yet</p></header>"
        '<div class="tools" hidden><label for="search">Find</label>'
        '<input id="search" type="search" placeholder="name, format, trap" autocomplete="off">'
        f'<div class="chips" role="group" aria-label="Family">{chips}</div>'
        '<p id="none" hidden>No card matches.</p></div>'
        + index(checkpoints, drafts)
        + "<main>"
        + section("checkpoints", "Checkpoints", checkpoints)
        + section("drafts", "Drafts", drafts)
        + "</main>"
        + "<footer><p>Made by <code>kconv zoo page</code> from the cards in <code>cards/</code>. "
        "Sizes are decimal. Unverified means that nobody ran the command shown there yet.</p></footer>"
    )
    return (
        f"{HEAD}"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<style>{STYLE}</style></head><body>{body}<script>{SCRIPT}</script></body></html>\n"
    )


def index(checkpoints: list[Card], drafts: list[Card]) -> str:
    """Links to every card."""
    rows = "".join(
        f"<li><span>{title}</span> {' '.join(_link(c) for c in group)}</li>"
        for title, group in (("Checkpoints", checkpoints), *_by_target(drafts))
    )
    return f'<nav aria-label="All cards"><details open><summary>All cards</summary><ul>{rows}</ul></details></nav>'


def section(anchor: str, title: str, shown: Iterable[Card]) -> str:
    """One kind of card."""
    return f'<section id="{anchor}"><h2>{title}</h2><div class="grid">{"".join(article(c) for c in shown)}</div></section>'


def article(card: Card) -> str:
    """One card."""
    data = card.data
    counts = Counter(item["status"] for item in data["verification"])
    badges = "".join(
        f'<span class="badge {status}">{MARKS[status]} {counts[status]} {WORDS.get(status, status)}</span>'
        for status in MARKS
        if counts[status]
    )
    words = " ".join(
        [data["id"], data["title"], data["repo"], data["family"], data["summary"], *data["traps"], *data["formats"].values()]
    )
    return (
        f'<article id="{escape(data["id"])}" data-family="{escape(data["family"])}" data-words="{escape(words.lower())}">'
        f'<header><h3><a href="#{escape(data["id"])}">{escape(data["title"])}</a></h3>'
        f'<p class="repo">{_repo(data)}</p></header>'
        f'<p>{escape(data["summary"])}</p><p class="badges">{badges}</p>{facts(data)}{traps(data)}{verification(data)}'
        f"{commands(data)}</article>"
    )


def facts(data: dict[str, Any]) -> str:
    """Size, formats, draft geometry, licence as a definition list."""
    rows = [("Size", escape(size(data)))]
    if "target" in data:
        target = data["target"]
        inside = f'<a href="#{escape(target["card"])}">{escape(target["card"])}</a> ' if target["card"] != UNKNOWN else ""
        at = f" at {target['revision'][:12]}" if target["revision"] != UNKNOWN else ", revision not recorded"
        rows.append(("Drafts for", inside + escape(target["repo"] + at if not inside else at.strip(" ,"))))
        draft = data["draft"]
        taps = ", ".join(map(str, draft["taps"])) if isinstance(draft["taps"], list) else draft["taps"]
        rows += [
            ("Taps", escape(f"{taps} ({draft['tap_convention']} of layer, stream {draft['stream']})")),
            ("Block", escape(f"{draft['block_size']}, drafts {draft['drafted']}; mask token {draft['mask_token_id']}")),
            ("Network", escape(f"{draft['layers']} layers, {draft['attention']}; tables: {draft['tables']}")),
        ]
    stored = "".join(f"<li>{escape(part)}: {escape(form)}</li>" for part, form in data["formats"].items())
    rows.append(("Stored as", f"<ul>{stored}</ul>"))
    base = data["base"]
    if base != "none":
        rows.append(("Made from", f'<a href="#{escape(base)}">{escape(base)}</a>'))
    grades = "; ".join(f"{options}: {grade}" for options, grade in data["adapter"].get("grades", {}).items())
    converts = ", ".join(data["adapter"]["to"]) or "no adapter"
    rows.append(("Converts to", escape(converts + (f" ({grades})" if grades else ""))))
    rows.append(("Licence", escape(data["licence"])))
    return "<dl>" + "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in rows) + "</dl>"


def traps(data: dict[str, Any]) -> str:
    """What goes wrong with it."""
    rows = "".join(f"<li>{escape(trap)}</li>" for trap in data["traps"])
    return f"<details><summary>Traps ({len(data['traps'])})</summary><ul>{rows}</ul></details>" if rows else ""


def verification(data: dict[str, Any]) -> str:
    """What was verified, and what would verify the rest."""
    rows = []
    for item in data["verification"]:
        status = item["status"]
        text = f'<b class="{status}">{MARKS[status]} {WORDS.get(status, status)}</b> {escape(item["what"])}'
        if "command" in item:
            text += f"<code>{escape(item['command'])}</code><span>{escape(item['observed'])} ({escape(item['date'])})</span>"
        if "would_verify" in item:
            text += f"<span>would be verified by</span><code>{escape(item['would_verify'])}</code>"
        if "why" in item:
            text += f"<span>{escape(item['why'])}</span>"
        rows.append(f"<li>{text}</li>")
    return f'<details class="proof"><summary>Verification ({len(rows)})</summary><ul>{"".join(rows)}</ul></details>'


def commands(data: dict[str, Any]) -> str:
    """How to get it."""
    source = f"hf://{data['repo']}" + (f"@{data['revision']}" if data["revision"] != UNKNOWN else "")
    if data["repo"] == UNKNOWN:
        return ""
    rows = [f"kconv zoo check {source} --card {data['id']}"]
    if data["adapter"]["to"]:
        rows += [f"kconv plan {source}", f"kconv convert {source} {data['id']}/"]
    text = "".join(f"<code>{escape(row)}</code>" for row in rows)
    sources = "".join(f"<li>{escape(s)}</li>" for s in data["sources"])
    return f"<details><summary>Commands and sources</summary>{text}<ul>{sources}</ul></details>"


def _by_target(drafts: list[Card]) -> list[tuple[str, list[Card]]]:
    groups: dict[str, list[Card]] = {}
    for card in drafts:
        groups.setdefault(card.data["target"]["card"], []).append(card)
    return [(f"Drafts for {escape(name) if name != UNKNOWN else 'other targets'}", group) for name, group in groups.items()]


def _link(card: Card) -> str:
    return f'<a href="#{escape(card.data["id"])}">{escape(card.data["title"])}</a>'


def _repo(data: dict[str, Any]) -> str:
    if data["repo"] == UNKNOWN:
        return "repository not recorded"
    known = data["revision"] != UNKNOWN
    tree = f"/tree/{escape(data['revision'])}" if known else ""
    note = data["revision"][:12] if known else data.get("revision_note", "revision not recorded")
    return f'<a href="https://huggingface.co/{escape(data["repo"])}{tree}">{escape(data["repo"])}</a> <span>{escape(note)}</span>'
