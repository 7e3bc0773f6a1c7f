"""The model zoo: the cards listed, shown, checked against their schema, and held against a checkpoint's headers.

| held against a checkpoint | how |
|---|---|
| `model_type`, `architecture` | its config (the source's own for a converted one) |
| `tensors`, `bytes`, `shards`, `dtypes` | its headers |
| names, dtypes, shapes, shards, where the card has a layout | its headers, name by name |
| `revision` | the commit that was read: another one is a note, since names seldom change with it |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kconv.checkpoint.reading import Checkpoint, open_checkpoint
from kconv.console import human
from kconv.errors import KconvError, Problems
from kconv.names import folded
from kconv.zoo.cards import Card, card_ids, load_card, schema_problems

UNKNOWN = "unknown"
STATUSES = ("verified", "unverified", "unsupported", "not_applicable")
MOST_SHOWN = 20


def cards(kind: str | None = None, family: str | None = None) -> list[Card]:
    """All cards: checkpoints, Kimi K3 and what was made from it first; then drafts, by target."""
    loaded = [load_card(i) for i in card_ids()]
    kept = [c for c in loaded if kind in (None, c.data["kind"]) and family in (None, c.data["family"])]
    return sorted(kept, key=_order)


def _order(card: Card) -> tuple[Any, ...]:
    data = card.data
    if data["kind"] == "draft":
        target = data["target"]["card"]
        return (1, target == UNKNOWN, target != "kimi-k3", target, data["id"])
    return (0, data["family"] != "k3", data["family"], data["base"] != "none", data["id"])


def card_problems(card: Card, known: set[str] | None = None) -> list[str]:
    """What is wrong with a card: its schema, its id, the cards it refers to, its layout's totals."""
    if found := schema_problems(card.data):
        return found
    known = known if known is not None else set(card_ids())
    if not card.where.endswith(".yaml") and card.data["id"] != card.where:
        found.append(f"id: {card.data['id']} in the file {card.where}.yaml")
    for key, value in (("base", card.data["base"]), ("target.card", card.data.get("target", {}).get("card", "none"))):
        if value not in known | {"none", UNKNOWN}:
            found.append(f"{key}: no card is called {value}")
    return found + (card.problems() if "layout" in card.data else [])


def summary(card: Card) -> dict[str, Any]:
    """What `zoo list` says of a card."""
    data = card.data
    counts = Counter(item["status"] for item in data["verification"])
    keys = ("id", "kind", "repo", "revision", "family", "tensors", "bytes", "licence")
    return {**{k: data[k] for k in keys}, "verification": {s: counts.get(s, 0) for s in STATUSES}}


def find_card(checkpoint: Checkpoint) -> Card:
    """The card of a checkpoint: by its repository and revision, else by model type and number of tensors."""
    source = (checkpoint.manifest or {}).get("source", {})
    repo = checkpoint.files.repo_id or str(source.get("name", "")).removeprefix("hf://").split("@")[0]
    revision = checkpoint.files.revision
    same_repo = [c for c in cards() if c.data["repo"] == repo]
    pinned = [c for c in same_repo if c.data["revision"] == revision]
    if len(pinned or same_repo) == 1:
        return (pinned or same_repo)[0]
    config = source.get("config") or checkpoint.config
    alike = [
        c
        for c in same_repo or cards()
        if c.data["model_type"] == config.get("model_type") and c.data["tensors"] == len(checkpoint.entries)
    ]
    if len(alike) == 1:
        return alike[0]
    hint = f"name it: --card {' or '.join(c.data['id'] for c in alike or same_repo) or 'ID'}"
    raise KconvError(
        f"{checkpoint.where}: {'several cards fit' if alike or same_repo else 'no card fits'} "
        f"({config.get('model_type')}, {len(checkpoint.entries):,} tensors)",
        hint=hint,
    )


def check(source: Any, card: str | None = None) -> dict[str, Any]:
    """Hold a checkpoint against its card, from headers alone.

    Args:
        source: a published checkpoint's folder, or `hf://owner/name[@revision]`.
        card: id of the card, or a `.yaml` file; found by repository or by type and count if left out.

    Returns `card`, `ok`, `compared`, `differences`, `not_compared`, `notes`.
    """
    checkpoint = open_checkpoint(source)
    if (checkpoint.manifest or {}).get("source", {}).get("config") and (checkpoint.manifest or {}).get("to") != "hf":
        raise KconvError(f"{checkpoint.where} was converted; cards describe published checkpoints", hint="check its source")
    chosen = load_card(card) if card else find_card(checkpoint)
    if wrong := card_problems(chosen):
        raise Problems(f"the card {chosen.where} is not sound:", wrong)
    data, notes = chosen.data, list(checkpoint.notes)
    facts = {
        "model_type": checkpoint.config.get("model_type") or UNKNOWN,
        "architecture": (checkpoint.config.get("architectures") or [UNKNOWN])[0],
        "tensors": len(checkpoint.entries),
        "bytes": checkpoint.nbytes,
        "shards": len(checkpoint.shards),
        "dtypes": dict(Counter(e.spec.dtype for e in checkpoint.entries.values())),
    }
    compared = [k for k in facts if data.get(k, UNKNOWN) != UNKNOWN]
    differences = [f"{k}: {_short(data[k])} by the card, {_short(facts[k])} here" for k in compared if data[k] != facts[k]]
    if "layout" in data:
        compared.append("names, dtypes, shapes")
        differences += layout_differences(chosen, checkpoint)
    revision = checkpoint.files.revision
    if revision and data["revision"] not in (UNKNOWN, revision):
        notes.append(f"the card describes revision {data['revision']}, this is {revision}")
    if data["figures"] == "derived":
        notes.append("the card's counts are derived, not published: a difference may be the card's")
    return {
        "card": data["id"], "source": checkpoint.where, "revision": revision, "ok": not differences, "compared": compared,
        "differences": differences, "not_compared": [k for k in facts if k not in compared], "notes": notes,
    }  # fmt: skip


def layout_differences(card: Card, checkpoint: Checkpoint) -> list[str]:
    """Names, specs and shards in which a checkpoint departs from a card's layout, folded."""
    expected = {t.name: t for t in card.placed()}
    there = checkpoint.entries
    missing = [n for n in expected if n not in there]
    extra = [n for n in there if n not in expected]
    found = [f"missing: {line}" for line in folded(missing)[:MOST_SHOWN]] + [
        f"not on the card: {line}" for line in folded(extra)[:MOST_SHOWN]
    ]
    both = [n for n in expected if n in there]
    wrong = [n for n in both if there[n].spec != expected[n].spec]
    found += [f"{n} is {there[n].spec}, {expected[n].spec} by the card" for n in wrong[:MOST_SHOWN]]
    moved = [n for n in both if expected[n].file and there[n].file != expected[n].file]
    found += [f"{n} lies in {there[n].file}, in {expected[n].file} by the card" for n in moved[:MOST_SHOWN]]
    more = sum(max(0, len(rows) - MOST_SHOWN) for rows in (wrong, moved))
    return found + ([f"and {more:,} more tensors"] if more else [])


def lines(card: Card) -> list[str]:
    """A card for people, line by line."""
    data = card.data
    rows = [
        f"{data['title']}  ({data['id']})",
        data["summary"],
        f"repository  hf://{data['repo']}" + (f"@{data['revision']}" if data["revision"] != UNKNOWN else ""),
        f"licence     {data['licence']}",
        f"config      {data['model_type']}, {data['architecture']}",
        f"size        {size(data)}",
    ]
    if "target" in data:
        target = data["target"]
        rows.append(f"target      hf://{target['repo']}" + (f"@{target['revision']}" if target["revision"] != UNKNOWN else ""))
        rows += [f"            {k.replace('_', ' ')}: {v}" for k, v in data["draft"].items()]
    rows += [f"stored      {part}: {form}" for part, form in data["formats"].items()]
    rows.append(f"converts    {', '.join(data['adapter']['to']) or 'no adapter'}")
    rows += [f"            {options}: {grade}" for options, grade in data["adapter"].get("grades", {}).items()]
    rows += [f"trap        {trap}" for trap in data["traps"]]
    for item in data["verification"]:
        rows.append(f"{item['status']:<11} {item['what']}")
        rows += [f"            {item[k]}" for k in ("command", "observed", "would_verify", "why") if k in item]
    return rows


def size(data: Mapping[str, Any]) -> str:
    """Tensors, bytes and parameters in words."""
    known = [
        f"{data['tensors']:,} tensors" if data["tensors"] != UNKNOWN else None,
        human(data["bytes"]) if data["bytes"] != UNKNOWN else None,
        f"{_count(data['parameters'])} parameters" if data["parameters"] != UNKNOWN else None,
        f"{data['shards']} file{'' if data['shards'] == 1 else 's'}" if data["shards"] != UNKNOWN else None,
    ]
    text = ", ".join(k for k in known if k) or "not recorded"
    return text + (" (derived)" if data["figures"] == "derived" else "")


def _count(number: float) -> str:
    """A count with three digits: `2.78 T`."""
    for unit in ("", " K", " M", " B"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} T"


def _short(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
