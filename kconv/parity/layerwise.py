"""Which module diverges first: every layer of ours runs on the reference's inputs, and its parts are compared in order.

| what a point names | where it is seen |
|---|---|
| a module (`layers.3.self_attn.g_proj`) | its output |
| `layers.3.self_attention_res`, `.mlp_res`, `output_attn_res` | the mixture of blocks, as the norm behind it reads it |
| `layers.3.self_attn.kda`, `.attention` -> `layers.3.self_attn` | the recurrence (`A_log`, `dt_bias`); the softmax attention |
| `layers.3.mlp.gate` | weights of the reference's experts; a choice that differs by more than a near-tie |
| `layers.3` | the layer's output when all its recorded parts agree, or none were recorded |

Because inputs are the reference's, a point that differs is at fault itself or is fed by the first one that differs in its layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from kconv.errors import KconvError
from kconv.parity.golden import Golden
from kconv.parity.limits import Limits
from kconv.parity.measures import StateError, compare_states, plain
from kconv.parity.trace import Trace

MOST = 0.5
OWNERS = ((".self_attn.kda", ".self_attn"), (".self_attn.attention", ".self_attn"))
HELD = {
    "self_attn.kda": ("self_attn.A_log", "self_attn.dt_bias"),
    "self_attention_res": ("self_attention_res_norm.weight", "self_attention_res_proj.weight"),
    "mlp_res": ("mlp_res_norm.weight", "mlp_res_proj.weight"),
    "output_attn_res": ("output_attn_res_norm.weight", "output_attn_res_proj.weight"),
}


@dataclass(frozen=True)
class Point:
    """One compared place: its errors, whether they are beyond the limits, and from which position on."""

    name: str
    state: StateError
    beyond: bool
    row: int
    position: int
    first_position: int

    def data(self) -> dict[str, Any]:
        """As the report holds it."""
        return {
            "module": self.module, "error": plain(self.state.error), "median": plain(self.state.median),
            "worst_token": {"row": self.row, "position": self.position}, "first_position": self.first_position,
        }  # fmt: skip

    @property
    def module(self) -> str:
        """The module that owns the place."""
        for suffix, owner in OWNERS:
            if self.name.endswith(suffix):
                return self.name.removesuffix(suffix) + owner
        return self.name


@dataclass
class Expected:
    """What the reference computed at each place.

    `order` of points, `get` one of them ([tokens, width or k]), `routing` of a layer: expert ids and weights [tokens, top_k].
    """

    order: list[str]
    get: Callable[[str], torch.Tensor | None]
    routing: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=dict)


@dataclass
class Layers:
    """All compared places in order of execution.

    `missing` are recorded places that our side has none of; `flips` says by layer which tokens [tokens] go elsewhere although
    that was no near-tie.
    """

    points: list[Point] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    flips: dict[int, torch.Tensor] = field(default_factory=dict)

    def first(self) -> Point | None:
        """The first place beyond its limits."""
        return next((p for p in self.points if p.beyond), None)


def expected_of(golden: Golden) -> Expected:
    """The module outputs that a golden file holds."""
    held = set(golden.points)
    routing = {i: (ids, golden.weights(i)) for i, ids in golden.routing.items()}
    return Expected(golden.points, lambda name: golden.point(name) if name in held else None, routing)


def compare_layers(taught: Trace, golden: Golden, expected: Expected, limits: Limits) -> Layers:
    """Compare a taught pass with the reference, place by place; `taught.gaps` tells near-ties from wrong choices."""
    found = Layers()
    length = golden.ids.shape[1]
    for layer, gap in taught.gaps.items():
        found.flips[layer] = gap.cpu() > limits.tie
    found.missing = [n for n in expected.order if n not in taught.points]
    for name, ours, theirs in _places(taught, golden, expected):
        if ours.shape != theirs.shape:
            raise KconvError(
                f"{name} is {list(ours.shape)} here and {list(theirs.shape)} in the reference",
                hint="is this the reference of the same model?",
            )
        keep = _clear(name, taught, expected, limits)
        found.points.append(_point(name, compare_states(ours, theirs, keep), limits, length, found.flips))
    return found


def _places(taught: Trace, golden: Golden, expected: Expected) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, ours, theirs) of every place both sides hold, in order of execution."""
    last = golden.layers
    yield from _state("embed_tokens", 0, taught, golden)
    by_layer: dict[int, list[str]] = {}
    for name in expected.order:
        found = re.match(r"layers\.(\d+)", name)
        by_layer.setdefault(int(found[1]) if found else last, []).append(name)
    for layer in range(last):
        names = by_layer.get(layer, [])
        before, gate, after = _around_gate(names, layer)
        yield from _recorded(before, taught, expected)
        yield from _gate(gate, layer, taught, expected)
        yield from _recorded([n for n in after if n != f"layers.{layer}" or layer + 1 == last], taught, expected)
        if layer + 1 < last:
            yield from _state(f"layers.{layer}", layer + 1, taught, golden)
    yield from _recorded(by_layer.get(last, []), taught, expected)
    yield from _state("norm", last, taught, golden)
    if last in taught.hidden:
        yield "lm_head", taught.logits.flatten(0, 1), golden.logits.flatten(0, 1)


def _around_gate(names: list[str], layer: int) -> tuple[list[str], str, list[str]]:
    """A layer's points before its router runs (up to the norm in front of it), the router, and those after."""
    norm = f"layers.{layer}.post_attention_layernorm"
    cut = names.index(norm) + 1 if norm in names else 0
    return names[:cut], f"layers.{layer}.mlp.gate", names[cut:]


def _state(name: str, i: int, taught: Trace, golden: Golden) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    theirs = golden.hidden(i)
    if theirs is not None and i in taught.hidden:
        yield name, taught.hidden[i].flatten(0, 1), theirs.flatten(0, 1)


def _recorded(names: list[str], taught: Trace, expected: Expected) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    for name in names:
        theirs = expected.get(name)
        if theirs is not None and name in taught.points:
            yield name, taught.points[name], theirs


def _gate(name: str, layer: int, taught: Trace, expected: Expected) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    chosen, theirs = expected.routing.get(layer, (None, None))
    if chosen is None or theirs is None or layer not in taught.routing:
        return
    ids, weights = taught.routing[layer]
    # Tokens whose choice differs are judged by their gap; their weights belong to other experts.
    same = (ids.cpu() == chosen.cpu()).all(-1, keepdim=True)
    yield name, torch.where(same, weights.cpu().double(), theirs.cpu().double()), theirs


def _clear(name: str, taught: Trace, expected: Expected, limits: Limits) -> torch.Tensor | None:
    """Where the reference's routing is unknown, the tokens whose choice in this layer was no near-tie; else all (None)."""
    layer = int(name.split(".")[1]) if name.startswith("layers.") else max(taught.margins, default=-1)
    if layer in expected.routing or layer not in taught.margins or name == "embed_tokens":
        return None
    return taught.margins[layer].cpu() > limits.tie


def _point(name: str, state: StateError, limits: Limits, length: int, flips: dict[int, torch.Tensor]) -> Point:
    worst, median = limits.states
    bad = state.each > worst
    layer = int(name.split(".")[1]) if name.endswith(".mlp.gate") else -1
    if layer in flips:
        bad = bad | flips[layer]
    beyond = bool(bad.any()) or state.median > median
    marked = bad if bad.any() else state.each > median
    rows = marked.nonzero().flatten()
    first = int((rows % length).min()) if beyond and len(rows) else 0
    row = int(rows[0]) if layer in flips and flips[layer].any() else state.row
    return Point(name, state, beyond, row // length, row % length, first)


def suspects(point: Point, routing: dict[int, torch.Tensor], limits: Limits) -> dict[str, Any]:
    """What else can be said of a diverging place: parameters used there without a module, and experts at fault.

    `routing` is layer -> expert ids [tokens, top_k].
    """
    said: dict[str, Any] = {}
    for suffix, names in HELD.items():
        if point.name.endswith(suffix):
            prefix = point.name.removesuffix(suffix)
            said["parameters"] = [prefix + n for n in names]
    if point.name.endswith(".mlp.experts") and (chosen := routing.get(int(point.name.split(".")[1]))) is not None:
        said["experts"] = guilty(point.state.each > limits.states[0], chosen.cpu())
    return said


def guilty(bad: torch.Tensor, chosen: torch.Tensor) -> list[int]:
    """The fewest experts that explain the diverging tokens: each served some, and most tokens it served diverge.

    bad [tokens], chosen [tokens, top_k]; empty where no such experts are.
    """
    served = {int(e): (chosen == e).any(-1) for e in chosen.unique()}
    share = {e: float(bad[tokens].double().mean()) for e, tokens in served.items()}
    left, found = bad.clone(), list[int]()
    while left.any():
        best = max((e for e in served if (served[e] & left).any()), key=lambda e: share[e])
        if share[best] < MOST:
            return []
        found.append(best)
        left &= ~served[best]
    return sorted(found)
