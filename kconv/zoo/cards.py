"""The model zoo's cards: YAML files that say what a published checkpoint is, and the tensors they expand to.

| key | meaning |
|---|---|
| `id`, `title`, `repo`, `revision`, `licence`, `family`, `model_type` | which checkpoint |
| `tensors`, `bytes`, `shards`, `dtypes` | totals; `Card.problems` holds the expansion against them |
| `layout` | groups of names with dtype, shape and (if known) shard; one row stands for a tensor in every copy of its group |
| `shape` | options of `kconv tiny FAMILY` that make a config of this size |
"""

from __future__ import annotations

import itertools
import json
import math
import re
import string
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from kconv.errors import KconvError, Problems
from kconv.spec import BITS, Spec
from kconv.storage import yaml_text

FOLDER = Path(__file__).parents[1] / "cards"
SCHEMA = Path(__file__).with_name("card.schema.json")
MOST_NUMBERS = 100_000
MOST_TENSORS = 5_000_000
RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
SPEC = re.compile(r"([A-Z0-9_]+) \[([0-9, ]*)\]")


@dataclass(frozen=True)
class Placed:
    """One tensor of an expanded layout."""

    name: str
    spec: Spec
    file: str
    layer: int | None


@dataclass(frozen=True)
class Card:
    """One card: its data word for word, and the layout it describes."""

    data: dict[str, Any]
    where: str

    @cached_property
    def domains(self) -> dict[str, tuple[int, ...]]:
        """Placeholder -> its values."""
        return {name: numbers(str(text)) for name, text in self.data["layout"]["domains"].items()}

    def placed(self) -> Iterator[Placed]:
        """Every tensor of the layout, group by group."""
        self._check_count()
        for group in self.data["layout"]["groups"]:
            indices = [field for _, field, _, _ in string.Formatter().parse(group["prefix"]) if field]
            rows = [(name, self._spec(text)) for name, text in group["tensors"].items()]
            for values in itertools.product(*(self._domain(i) for i in indices)):
                prefix = group["prefix"].format_map(dict(zip(indices, values, strict=True)))
                layer = values[0] if group.get("per_layer") else None
                file = self.file_name(group["file"] + (layer or 0)) if "file" in group else ""
                for name, spec in rows:
                    yield Placed(prefix + name, spec, file, layer)

    def file_name(self, number: int) -> str:
        """Name of the shard with this number."""
        return self.data["layout"]["file_name"].format(file=number, files=self.data["layout"]["files"])

    def problems(self, tensors: list[Placed] | None = None) -> list[str]:
        """Where the card (`tensors`: its expansion, if made already) contradicts itself: copies, names, totals, shards."""
        found = []
        for group in self.data["layout"]["groups"]:
            fields = [f for _, f, _, _ in string.Formatter().parse(group["prefix"]) if f]
            copies = 1
            for field in fields:
                copies *= len(self._domain(field))
            if copies != group["copies"]:
                found.append(f"{group['prefix']}: {group['copies']} copies, its domains make {copies}")
        tensors = tensors or list(self.placed())
        names = Counter(t.name for t in tensors)
        found += [f"{name} is placed {n} times" for name, n in names.items() if n > 1][:10]
        made = {
            "tensors": len(tensors),
            "bytes": sum(t.spec.nbytes for t in tensors),
            "shards": len({t.file for t in tensors}),
            "dtypes": dict(Counter(t.spec.dtype for t in tensors)),
        }
        if any(not t.file for t in tensors):
            del made["shards"]  # which tensor lies in which shard is not recorded
        return found + [f"{k}: {self.data[k]}, its layout makes {v}" for k, v in made.items() if self.data[k] != v]

    def _check_count(self) -> None:
        """Raises KconvError where the layout makes more tensors than any checkpoint has, before they are made."""
        count = 0
        for group in self.data["layout"]["groups"]:
            fields = [f for _, f, _, _ in string.Formatter().parse(group["prefix"]) if f]
            count += len(group["tensors"]) * math.prod(len(self._domain(f)) for f in fields)
        if count > MOST_TENSORS:
            raise KconvError(f"{self.where}: its layout makes {count:,} tensors", hint=f"a card has at most {MOST_TENSORS:,}")

    def _domain(self, name: str) -> tuple[int, ...]:
        if name not in self.domains:
            raise KconvError(f"{self.where}: no domain is called {name}", hint=f"domains are {', '.join(self.domains)}")
        return self.domains[name]

    def _spec(self, text: str) -> Spec:
        match = SPEC.fullmatch(str(text))
        if not match or match[1] not in BITS:
            raise KconvError(f"{self.where}: {text!r} is no tensor", hint="write a dtype and a shape: BF16 [7168, 512]")
        return Spec(match[1], tuple(int(n) for n in match[2].split(",") if n.strip()))


def numbers(text: str) -> tuple[int, ...]:
    """The integers of `0-2,5`."""
    found: list[int] = []
    for part in text.split(","):
        match = RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not match or last - first >= MOST_NUMBERS or len(found) > MOST_NUMBERS:
            raise KconvError(f"{text[:80]!r} is no range of at most {MOST_NUMBERS:,} numbers", hint="write for example 0-2,5")
        found += range(first, last + 1)
    return tuple(found)


def card_ids() -> list[str]:
    """Names of the cards that come with kconv."""
    return sorted(p.stem for p in FOLDER.glob("*.yaml"))


def load_card(card: str | Path) -> Card:
    """A card by its id, or from a `.yaml` file; raises KconvError when there is none."""
    given = str(card).endswith(".yaml")
    path = Path(card) if given else FOLDER / f"{card}.yaml"
    if not path.is_file() or not (given or card in card_ids()):
        raise KconvError(f"no card is called {card}", hint=f"cards are {', '.join(card_ids())}, or give a .yaml file")
    data = yaml_text.read_path(path, "the card", hint="kconv zoo show kimi-k3 is one that is sound")
    if given and (found := schema_problems(data)):
        raise Problems(f"{path} is no card:", found[:20], hint="the schema is kconv/card.schema.json")
    return Card(data, str(card))


@cache
def schema() -> dict[str, Any]:
    """The JSON schema of cards."""
    return json.loads(SCHEMA.read_text(encoding="utf-8"))


def schema_problems(data: dict[str, Any]) -> list[str]:
    """Where a card departs from its schema, as `path: what`."""
    from jsonschema import Draft202012Validator

    found = Draft202012Validator(schema()).iter_errors(data)
    return [f"{'.'.join(map(str, e.absolute_path)) or 'card'}: {e.message[:200]}" for e in found]
