"""A conversion as a value: rules expanded against a checkpoint's headers, checked, and cited by digest.

| step | what it settles, before a byte of data is read |
|---|---|
| expand | every rule's names on both sides, the spec of every output |
| check | each source tensor claimed exactly once, each target produced exactly once, every spec as the config says |
| digest | sha256 of rules, direction and the source's names and specs: the same plan, the same digest |
| inverse | the same rules read the other way |

A plan of 497,220 tensors takes seconds because specs are memoised by transform and input spec.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

from kconv.checkpoint.reading import Checkpoint, Entry
from kconv.errors import Problems
from kconv.planning.edges import Edge, Findings, Layouts, Target
from kconv.planning.rules import Binding, Rule
from kconv.planning.summary import Summary
from kconv.spec import Spec
from kconv.transforms.base import Grade, SpecError, Specs, Transform

SPEC = attrgetter("spec")


class Plan:
    """A checkpoint, an adapter's table and a direction, expanded and checked; see `kconv.plan`."""

    def __init__(self, source: Checkpoint, layouts: Layouts, options: dict[str, Any] | None = None) -> None:
        self.source = source
        self.layouts = layouts
        self.options = dict(options or {})
        self.edges: list[Edge] = []
        self.targets: dict[str, Target] = {}
        self.findings = Findings(other=list(layouts.problems), file_of=self._file_of)
        self.dropped = [n for d in layouts.drops for n in d.names]
        self._claimed: set[int] = set()  # ids of entries: the checkpoint keeps them alive
        self._memo: dict[tuple[Transform, Specs, bool], Specs | str] = {}
        self._expand()

    @property
    def backward(self) -> bool:
        """Whether the source is the rules' right side."""
        return self.layouts.backward

    @property
    def claimed(self) -> int:
        """Number of source tensors that a rule reads."""
        return len(self._claimed)

    @property
    def output_bytes(self) -> int:
        """Bytes of all target tensors."""
        return sum(t.spec.nbytes for t in self.targets.values())

    @property
    def grade(self) -> Grade:
        """The worst of the rules' grades."""
        return max((edge.rule.transform.grade for edge in self.edges), default=Grade.EXACT)

    def check(self) -> Plan:
        """Raise `Problems` with everything that is wrong; returns the plan itself."""
        lines = self.findings.lines()
        if lines:
            what = f"{self.layouts.family} checkpoint in the {self.layouts.source_layout} layout"
            title = f"{self.source.where}: not a complete {what}:"
            raise Problems(title, lines, hint=self.findings.next_steps())
        return self

    @cached_property
    def digest(self) -> str:
        """sha256 of what decides the output's tensors: rules, direction, drops, and the source's names and specs."""
        body = {
            "format": 1,
            "family": self.layouts.family,
            "from": self.layouts.source_layout,
            "to": self.layouts.target_layout,
            "rules": [r.identity() for r in self.layouts.rules],
            "drops": [[list(d.names), d.reason] for d in self.layouts.drops],
        }
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode())
        entries = self.source.entries
        said = {id(s): f" {s.dtype} {s.shape}" for s in {id(e.spec): e.spec for e in entries.values()}.values()}
        digest.update("\n".join([name + said[id(entries[name].spec)] for name in sorted(entries)]).encode())
        return digest.hexdigest()

    def summary(self) -> Summary:
        """The keys of `plan --json` that other programs rely on."""
        return Summary(
            family=self.layouts.family,
            source_layout=self.layouts.source_layout,
            target_layout=self.layouts.target_layout,
            source_tensors=len(self.source.entries),
            claimed=self.claimed,
            unclaimed=self.findings.unclaimed,
            missing=self.findings.missing,
            dropped=len(self.dropped),
            target_tensors=len(self.targets),
            output_bytes=self.output_bytes,
            grade=str(self.grade),
            plan_digest=self.digest,
        )

    def _expand(self) -> None:
        # What belongs to no layer comes first and together: published checkpoints keep it in one shard.
        order = [(binding.get("layer", -1), i, binding) for i, r in enumerate(self.layouts.rules) for binding in r.bindings()]
        for _, position, binding in sorted(order, key=lambda item: item[:2]):
            rule = self.layouts.rules[position]
            (self._expand_backward if self.backward else self._expand_forward)(rule, binding)
        entries, dropped = self.source.entries, set(self.dropped)
        self.findings.twice += [n for n in self.dropped if id(entries.get(n)) in self._claimed]
        settled = len(self._claimed) + sum(n in entries and id(entries[n]) not in self._claimed for n in dropped)
        if settled < len(entries):
            self.findings.unclaimed += [n for n, e in entries.items() if id(e) not in self._claimed and n not in dropped]

    def _expand_forward(self, rule: Rule, binding: Binding) -> None:
        lefts = self._claim_alike(rule, binding) or self._claim_each(rule, binding)
        names = rule.left_names(binding, rule.domain[0])
        if lefts is None or not self._expected(rule, lefts, names):
            return
        rights = [self._specs(rule.transform, piece, False, names[i]) for i, piece in enumerate(lefts)]
        if any(r is None for r in rights):
            return
        self._add(Edge(rule, binding, lefts, rights), rule.right_names(binding))  # type: ignore[arg-type]

    def _claim_each(self, rule: Rule, binding: Binding) -> list[Specs] | None:
        """Claim the left operands element by element, saying what is wrong; the first element's specs if all are there."""
        found: list[list[Specs]] = []
        for value in rule.domain:
            names = rule.left_names(binding, value)
            pieces = [p for p in [self._claim(piece) for piece in names] if p is not None]
            if len(pieces) < len(names):
                continue
            found.append(pieces)
            if pieces != found[0]:
                self._differs(names, found[0], pieces)
        return found[0] if len(found) == len(rule.domain) else None

    def _claim_alike(self, rule: Rule, binding: Binding) -> list[Specs] | None:
        """Claim a whole stack at once; None, and nothing claimed, unless all are there, unclaimed, and of one spec an operand."""
        if not rule.stack:
            return None
        get, mine, lefts = self.source.entries.get, list[int](), list[Specs]()
        for piece in rule.left_columns(binding):
            specs = []
            for column in piece:
                entries = list(map(get, column))
                if not all(entries) or len({*map(id, map(SPEC, entries))}) != 1:
                    return None
                specs.append(SPEC(entries[0]))
                mine += map(id, entries)
            lefts.append(tuple(specs))
        claimed = set(mine)
        if len(claimed) < len(mine) or not self._claimed.isdisjoint(claimed):
            return None
        self._claimed |= claimed
        return lefts

    def _expand_backward(self, rule: Rule, binding: Binding) -> None:
        names = rule.right_names(binding)
        specs = self._claim(names)
        if specs is None:
            return
        elements = self._unstack(rule, names, specs)
        if elements is None:
            return
        n = len(rule.left)
        if any(s.shape and s.shape[0] % n for s in elements) and n > 1:
            self.findings.wrong.append((names[0], f"is {specs[0]}, which does not divide into {n} equal parts"))
            return
        pieces = [tuple(s.rows(s.shape[0] // n) if n > 1 else s for s in elements)] * n
        lefts = [self._specs(rule.transform, piece, True, names) for piece in pieces]
        if any(left is None for left in lefts):
            return
        if not self._expected(rule, lefts, [names] * len(lefts)):  # type: ignore[arg-type]
            return
        for value in rule.domain:
            self._add(None, [n for piece in rule.left_names(binding, value) for n in piece])
        self.edges.append(Edge(rule, binding, lefts, pieces))  # type: ignore[arg-type]
        for value in rule.domain:
            for piece, piece_specs in zip(rule.left_names(binding, value), lefts, strict=True):
                for name, spec in zip(piece, piece_specs, strict=True):  # type: ignore[arg-type]
                    self.targets[name] = Target(spec, rule.left_group, len(self.edges) - 1)

    def _unstack(self, rule: Rule, names: list[str], specs: Specs) -> Specs | None:
        if not rule.stack:
            return specs
        n = len(rule.domain)
        for name, spec in zip(names, specs, strict=True):
            if not spec.shape or spec.shape[0] != n:
                self.findings.wrong.append((name, f"is {spec}, but should hold {n} {rule.stack[0]}s along its first axis"))
                return None
        return tuple(Spec(s.dtype, s.shape[1:]) for s in specs)

    def _add(self, edge: Edge | None, names: list[str]) -> None:
        self.findings.surplus += [n for n in names if n in self.targets]
        if edge is None:
            return
        self.edges.append(edge)
        for i, (name, spec) in enumerate(zip(names, edge.right_full(), strict=True)):
            self.targets[name] = Target(spec, edge.rule.group_of(i), len(self.edges) - 1)

    def _claim(self, names: Sequence[str]) -> Specs | None:
        entries = [self.source.entries.get(n) for n in names]
        for name, entry in zip(names, entries, strict=True):
            if entry is None:
                self.findings.missing.append(name)
            elif id(entry) in self._claimed:
                self.findings.twice.append(name)
            else:
                self._claimed.add(id(entry))
        return None if None in entries else tuple(e.spec for e in entries if e is not None)

    def _specs(self, transform: Transform, specs: Specs, backward: bool, names: Sequence[str]) -> Specs | None:
        key = (transform, specs, backward)
        if key not in self._memo:
            try:
                self._memo[key] = transform.backward_specs(specs) if backward else transform.forward_specs(specs)
            except SpecError as e:
                self._memo[key] = e.message
        result = self._memo[key]
        if isinstance(result, str):
            self.findings.wrong.append((names[0], f"does not fit: {result}"))
            return None
        return result

    def _differs(self, names: list[list[str]], first: list[Specs], here: list[Specs]) -> None:
        for piece_names, a, b in zip(names, first, here, strict=True):
            for name, one, other in zip(piece_names, a, b, strict=True):
                if one != other:
                    self.findings.wrong.append((name, f"is {other}, the first expert's is {one}"))

    def _expected(self, rule: Rule, pieces: Sequence[Specs], names: Sequence[Sequence[str]]) -> bool:
        """Hold the left specs against the config's; `names` are the source's tensors to be named."""
        agreed = True
        for piece_names, allowed, specs in zip(names, rule.expect or (), pieces, strict=False):
            for name, choices, spec in zip(piece_names, allowed, specs, strict=False):
                if choices and spec not in choices:
                    wanted = " or ".join(str(c) for c in choices)
                    self.findings.wrong.append((name, f"is {spec}, the config asks for {wanted}{rule.why and f': {rule.why}'}"))
                    agreed = False
        return agreed

    def _file_of(self, name: str) -> str:
        entry = self.source.entries.get(name)
        return entry.file if entry else ""

    def entry(self, name: str) -> Entry:
        """Where a source tensor lies."""
        return self.source.entries[name]

    def table(self) -> list[tuple[str, str, str, str]]:
        """One row a rule: how many tensors come out, the target with its spec, where it comes from, and how."""
        from kconv.planning.table import plan_rows

        return plan_rows(self.edges, self.backward)
