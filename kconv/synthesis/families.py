"""The families that `kconv tiny` can make, and the call itself.

| family | what | made by |
|---|---|---|
| k3 | Kimi K3: MXFP4 experts, vision tower, two-level config | `kconv.synthesis.k3` |
| k31 | Kimi K3.1: Kimi K3 with a sparse-attention indexer, unverified | `kconv.synthesis.k31` |
| k2, k25 | Kimi K2 and K2.5: FP8 blocks or INT4 experts, with a vision tower or without | `kconv.synthesis.k2` |
| kimi-linear | Kimi-Linear: plain experts, no vision, flat config | `kconv.synthesis.k3` |
| k3-dflash, k25-dflash, k3-dflash2, k3-dspark, ... | drafts as published | `kconv.synthesis.drafts` |

A family is a row here and, in its module, a `Family`: a frozen dataclass of options and a function that makes a
`Synthetic` of it. The command line's options are the fields of that dataclass.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from typing import Any

from kconv.errors import KconvError
from kconv.synthesis.family import Family
from kconv.synthesis.writing import Synthetic, write_checkpoint

FAMILIES: dict[str, str] = {
    "k3": "kconv.synthesis.k3:K3",
    "k31": "kconv.synthesis.k31:K31",
    "k2": "kconv.synthesis.k2:K2",
    "k25": "kconv.synthesis.k2:K25",
    "kimi-linear": "kconv.synthesis.k3:KIMI_LINEAR",
    "k3-dflash": "kconv.synthesis.drafts:K3_DFLASH",
    "k25-dflash": "kconv.synthesis.drafts:K25_DFLASH",
    "k3-dflash2": "kconv.synthesis.drafts:K3_DFLASH2",
    "k3-dspark": "kconv.synthesis.drafts:K3_DSPARK",
    "k3-dspark-gqa": "kconv.synthesis.drafts:K3_DSPARK_GQA",
    "speculators-dspark": "kconv.synthesis.drafts:SPECULATORS_DSPARK",
    "k3-eagle3": "kconv.synthesis.drafts:K3_EAGLE3",
}


def family(name: str) -> Family:
    """The family called `name`; raises KconvError with the known ones."""
    if name not in FAMILIES:
        raise KconvError(f"no family is called {name!r}", hint=f"families are {', '.join(FAMILIES)}")
    module, _, attribute = FAMILIES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def tiny(name: str, out: str | os.PathLike[str], *, seed: int = 0, full_size: bool = False, **options: Any) -> dict[str, Any]:
    """Make a checkpoint in a family's published layout; returns what `kconv tiny --json` prints.

    Args:
        name: `k3`, `kimi-linear`, ... (`FAMILIES`).
        out: the folder to make; must be absent or empty.
        seed: every tensor depends on the seed and its own name alone, whatever the naming or the shards.
        full_size: the published checkpoint's size, its data a hole that takes no disk.
        options: fields of the family's shape, for example `layers=5, experts=4`.

    Raises KconvError for an unknown option or a shape that cannot be.
    """
    chosen = family(name)
    made = _full_size(name, chosen, options) if full_size else synthesize(name, seed=seed, **options)
    facts = write_checkpoint(made, out)
    return {"family": name, "out": str(out), "seed": None if full_size else seed, "full_size": full_size, **facts}


def synthesize(name: str, *, seed: int = 0, **options: Any) -> Synthetic:
    """A checkpoint of a family, not written yet."""
    chosen = family(name)
    return chosen.make(_shape(name, chosen, options), seed)


def _shape(name: str, chosen: Family, options: dict[str, Any]) -> Any:
    known = {f.name: f for f in dataclasses.fields(chosen.shape)}
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise KconvError(f"{name} has no option {', '.join(unknown)}", hint=f"options are {', '.join(known)}")
    wrong = [p for key, value in options.items() for p in _value_problems(key, value, known[key])]
    if wrong:
        raise KconvError("; ".join(wrong))
    return chosen.shape(**{k: tuple(v) if isinstance(v, list) else v for k, v in options.items()})


def _value_problems(key: str, value: Any, field: dataclasses.Field) -> list[str]:
    choices, least = field.metadata["choices"], field.metadata["least"]
    if choices:
        return [] if value in choices else [f"{key} is {value!r}, not one of {', '.join(choices)}"]
    if isinstance(field.default, bool):
        return [] if isinstance(value, bool) else [f"{key} is {value!r}, not true or false"]
    values = value if isinstance(field.default, tuple) else (value,)
    if not isinstance(values, tuple | list) or any(not isinstance(v, int) or isinstance(v, bool) or v < least for v in values):
        return [f"{key} is {value!r}; whole numbers of at least {least} are expected"]
    return []


def _full_size(name: str, chosen: Family, options: dict[str, Any]) -> Synthetic:
    """The checkpoint of the family's card, without data: names, specs and shards are the card's, the config its shape's."""
    from kconv.zoo.cards import load_card

    if chosen.card is None or chosen.frame is None:
        raise KconvError(f"{name} has no card to take its full size from", hint="leave --full-size out")
    if options:
        raise KconvError(f"--full-size takes no other option, {', '.join(options)} given", hint="leave one of them out")
    card = load_card(chosen.card)
    placed = list(card.placed())
    if problems := card.problems(placed):
        raise KconvError(f"the card {card.where} contradicts itself: {'; '.join(problems)}")
    frame = chosen.frame(chosen.shape(**card.data["shape"]))
    return dataclasses.replace(frame, specs={t.name: t.spec for t in placed}, shards={t.name: t.file for t in placed})
