"""Who is at fault inside a layer, when the reference's golden file holds hidden states only.

The checkpoint that the converted one was made from stands in: its layers, loaded on the fly, reproduce the reference's
hidden states (that is checked), so their modules computed what the reference's modules did. Where they do not reproduce
them either and no tensor differs, the conversion is not at fault, and that is said.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from kconv.parity.golden import Golden
from kconv.parity.layerwise import Expected, Point, compare_layers
from kconv.parity.limits import Limits
from kconv.parity.trace import Prefixes, held, trace


def find_culprit(model: Any, golden: Golden, first: Point, right: Any, limits: Limits) -> dict[str, Any]:
    """What the source (loaded as `right`) says of the first diverging place: `first_divergence`, `tensors`, `notes`."""
    scope = scope_of(first.name, golden)
    tensors = differing(model, right, scope)
    how: dict[str, Any] = {"teach": golden.hidden, "points": scope}
    theirs = trace(right, golden.ids, force=golden.routing or None, **how)
    alone = compare_layers(theirs, golden, Expected([], lambda name: None), limits)
    if not tensors and any(p.beyond and p.name == first.name for p in alone.points):
        return {"notes": ["the source's own weights diverge here as well: not the conversion, but the code or the config"]}
    ours = _ours(model, golden, theirs, how)
    expected = Expected(list(theirs.points), theirs.points.get, dict(theirs.routing))
    places = compare_layers(ours, golden, expected, limits).points
    inside = (p for p in places if p.beyond and p.name.startswith(scope))
    place = next(inside, first)
    return {"tensors": tensors, "first_divergence": owner(place.module, tensors)}


def _ours(model: nn.Module, golden: Golden, theirs: Any, how: dict[str, Any]) -> Any:
    """Our pass over the same inputs, with the source's experts forced where ours differ."""
    routing = {i: ids for i, (ids, _) in theirs.routing.items()}
    run = trace(model, golden.ids, against=routing, **how)
    if not any((ids != routing[i]).any() for i, (ids, _) in run.routing.items()):
        return run
    again = trace(model, golden.ids, force=routing, **how)
    again.gaps = run.gaps
    return again


def scope_of(name: str, golden: Golden) -> Prefixes:
    """Names begin so in the part of the model that a place lies in: its layer, or itself; the end of the model is one part."""
    if name in ("norm", "output_attn_res") and golden.layers:
        return (f"layers.{golden.layers - 1}.", "output_attn_res", "norm")
    found = re.match(r"layers\.\d+", name)
    return (f"{found[0]}.",) if found else (name,)


def differing(ours: nn.Module, theirs: nn.Module, scope: Prefixes) -> list[str]:
    """Names (without `model.`) of the tensors within `scope` that are not equal, bit for bit."""
    with held(ours, scope), held(theirs, scope):
        return _differing(ours, theirs, scope)


def _differing(ours: nn.Module, theirs: nn.Module, scope: Prefixes) -> list[str]:
    right = theirs.state_dict()
    found = []
    for name, value in ours.state_dict().items():
        short = name.removeprefix("model.")
        if not short.startswith(scope) or name not in right:
            continue
        if value.shape != right[name].shape or not torch.equal(value, right[name]):
            found.append(short)
    return found


def owner(module: str, tensors: list[str]) -> str:
    """A mixture is no module: the norm or projection whose tensor differs is, if only one of them does."""
    held = {t.rpartition(".")[0] for t in tensors if t.startswith(f"{module}_")}
    return held.pop() if len(held) == 1 else module
