"""What a plan is made of: edges and targets, what expansion found wrong, and what an adapter says of a conversion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kconv.names import folded
from kconv.planning.rules import Binding, Drop, Rule, concat_specs
from kconv.spec import Spec
from kconv.transforms.base import Specs


@dataclass(slots=True)
class Edge:
    """One rule at one binding: specs of each piece's left and right operands, for one element of the stack."""

    rule: Rule
    binding: Binding
    lefts: list[Specs]
    rights: list[Specs]

    @property
    def right(self) -> Specs:
        """Specs of one stack element's right operands."""
        return concat_specs(self.rights)

    def right_full(self) -> Specs:
        """Specs of the right tensors, stacked."""
        if not self.rule.stack:
            return self.right
        return tuple(Spec(s.dtype, (len(self.rule.domain), *s.shape)) for s in self.right)


@dataclass(slots=True)
class Target:
    """One tensor to be produced."""

    spec: Spec
    group: str
    edge: int


NEXT = {
    "missing": "fetch what is missing, or the config.json that belongs to these weights",
    "unclaimed": "nothing is left out silently: give the config.json that belongs to these weights, "
    "or a kconv that knows this release",
    "twice": "two rules of the adapter overlap: please report it",
    "surplus": "two rules of the adapter overlap: please report it",
    "wrong": "fetch the named files again, or the config.json that belongs to them",
}


@dataclass
class Findings:
    """What expansion found wrong; `wrong` pairs a tensor with what is wrong with it."""

    missing: list[str] = field(default_factory=list)
    unclaimed: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    surplus: list[str] = field(default_factory=list)
    wrong: list[tuple[str, str]] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    file_of: Callable[[str], str] = field(default=lambda name: "", repr=False)

    def lines(self) -> list[str]:
        """One line a problem, names folded, with the files they lie in."""
        kinds = (
            ("missing from the source: ", self.missing),
            ("no rule claims: ", self.unclaimed),
            ("claimed by two rules: ", self.twice),
            ("produced by two rules: ", self.surplus),
        )
        wrong: dict[str, list[str]] = {}
        for name, what in self.wrong:
            wrong.setdefault(what, []).append(name)
        lines = [f"{line} {what}" for what, names in wrong.items() for line in folded(names, file_of=self.file_of)]
        return self.other + lines + [head + line for head, names in kinds for line in folded(names, file_of=self.file_of)]

    def next_steps(self) -> str:
        """What to do about it."""
        steps = [NEXT[kind] for kind in NEXT if getattr(self, kind)]
        return "; ".join([*dict.fromkeys(steps), "`kconv inspect` shows what the checkpoint holds; nothing was written"])


@dataclass
class Layouts:
    """What an adapter says of one conversion: the table, its direction, and what goes beside the tensors."""

    family: str
    source_layout: str
    target_layout: str
    rules: list[Rule]
    backward: bool
    drops: list[Drop]
    config: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    model: str = ""
    files: dict[str, bytes | None] = field(default_factory=dict)
    """Files beside the weights that are not copied: other bytes, or None to leave the source's out."""
