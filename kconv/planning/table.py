"""A plan as people read it: one row a rule, its numbers folded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kconv.names import ranges

if TYPE_CHECKING:
    from kconv.planning.edges import Edge
    from kconv.spec import Spec
    from kconv.transforms.base import Transform


def few(numbers: Sequence[int]) -> str:
    """Ranges of integers, the middle left out when there are many: `0-2,4-6,..,88-90`."""
    parts = ranges(numbers).split(",")
    return ",".join(parts if len(parts) <= 4 else [*parts[:2], "..", parts[-1]])


def plan_rows(edges: Sequence[Edge], backward: bool) -> list[tuple[str, str, str, str]]:
    """One row a rule and kind of spec: tensors made, target template, spec, and where they come from and how."""
    groups: dict[tuple[Any, ...], list[Edge]] = {}
    for edge in edges:
        key = (*_templates(edge, backward), edge.right, tuple(edge.lefts))
        groups.setdefault(key, []).append(edge)
    rows = []
    for (source, target, *_), alike in groups.items():
        for name, spec, count in _outputs(alike, backward, target):
            rows.append((f"{count:,}", _filled(name, alike), str(spec), _how(alike[0], backward, source, target)))
    return rows


def _templates(edge: Edge, backward: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    left = tuple(name for piece in edge.rule.left for name in piece)
    return (edge.rule.right, left) if backward else (left, edge.rule.right)


def _outputs(edges: list[Edge], backward: bool, target: tuple[str, ...]) -> list[tuple[str, Spec, int]]:
    """Each target template of a group of edges, with its spec and how many tensors it makes."""
    if backward:
        specs = [s for piece in edges[0].lefts for s in piece]
        return [(n, s, len(edges) * len(edges[0].rule.domain)) for n, s in zip(target, specs, strict=True)]
    return [(n, s, len(edges)) for n, s in zip(target, edges[0].right_full(), strict=True)]


def _filled(template: str, edges: list[Edge]) -> str:
    """A template with the ranges of its indices."""
    rule = edges[0].rule
    domains = dict(rule.over) | (dict([rule.stack]) if rule.stack else {})
    for name in domains:
        seen = {e.binding[name] for e in edges} if name in edges[0].binding else set(domains[name])
        text = few(sorted(seen))
        template = template.replace("{" + name + "}", text if len(seen) == 1 else "{" + text + "}")
    return template


def _how(edge: Edge, backward: bool, source: tuple[str, ...], target: tuple[str, ...]) -> str:
    rule = edge.rule
    steps = [] if type(rule.transform).__name__ == "Same" else [brief(rule.transform)]
    if rule.stack:
        steps.append(("split over " if backward else "stack over ") + f"{len(rule.domain)} {rule.stack[0]}s")
    if len(rule.left) > 1:
        steps.append(("split into " if backward else "join ") + f"{len(rule.left)} parts")
    if steps:
        return ", ".join(steps)
    return "same" if source[0].split("layer}")[-1] == target[0].split("layer}")[-1] else "renamed"


def brief(transform: Transform) -> str:
    """A transform with the arguments that are not its defaults: `Mxfp4(BF16)`; steps one after the other, or side by side."""
    steps = getattr(transform, "steps", None)
    if steps:
        return (" | " if type(transform).__name__ == "Par" else ", then ").join(map(brief, steps))
    fields = {f.name: (getattr(transform, f.name), f.default) for f in dataclasses.fields(transform)}  # type: ignore[arg-type]
    shown = [value for name, (value, default) in fields.items() if default != value or name == "dtype"]
    words = [brief(v) if dataclasses.is_dataclass(v) else str(v) for v in shown]  # type: ignore[arg-type]
    return f"{type(transform).__name__}({', '.join(words)})" if words else type(transform).__name__
