"""One forward pass of a native model, watched: logits, hidden states, module outputs and routing.

| pass | what is replaced | what it shows |
|---|---|---|
| free | nothing | what a user gets |
| forced | each router's choice, by the reference's | whether a difference is a wrong weight or a near-tie |
| taught | each layer's input, by the reference's hidden state | every layer by itself, without what earlier layers did wrong |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from kconv.errors import KconvError
from kconv.parity.capture_script import Recorder, Refused, decoder

DEVICE, PARTS = "_kconv_device", "_kconv_parts"  # what a streamed model carries: see `streaming`
States = Callable[[int], torch.Tensor | None]
Prefixes = tuple[str, ...]
ByLayer = dict[int, torch.Tensor]


@dataclass
class Trace:
    """What one pass computed; see `Recorder` for the shapes.

    `gaps` (layer -> [tokens]) is by how much the router preferred an expert that the reference did not take, 0 where it took
    the same ones; `margins` by how much its last chosen expert was ahead of the first one left out. Forced routers have none.
    """

    logits: torch.Tensor
    hidden: dict[int, torch.Tensor]
    points: dict[str, torch.Tensor]
    routing: dict[int, tuple[torch.Tensor, torch.Tensor]]
    gaps: dict[int, torch.Tensor] = field(default_factory=dict)
    margins: dict[int, torch.Tensor] = field(default_factory=dict)


def trace(
    model: nn.Module, ids: torch.Tensor, mask: torch.Tensor | None = None, *, sketch: int = 0, points: bool | Prefixes = False,
    force: ByLayer | None = None, teach: States | None = None,
    against: ByLayer | None = None,
) -> Trace:  # fmt: skip
    """Run ids [B, T] and keep what `Trace` holds.

    Args:
        model: a native causal language model, in evaluation mode.
        mask: attention mask [B, T]; None runs without one.
        sketch: projections to reduce module outputs to (0: whole).
        points: record module outputs too; given prefixes, those whose names begin so.
        force: layer -> expert ids [tokens, top_k] to use instead of its router's.
        teach: i -> hidden state [B, T, hidden] that stands in for `hidden[i]` once that has been recorded, or None.
        against: layer -> the reference's expert ids, [tokens, top_k], to measure `gaps` from.
    """
    device = device_of(model)
    with ExitStack() as stack, torch.no_grad():
        try:
            only = points if isinstance(points, tuple) else ("",)
            seen = stack.enter_context(Recorder(model, k=sketch, points=bool(points), only=only))
        except Refused as e:
            raise KconvError(str(e)) from e
        if force:
            stack.enter_context(forced(model, force))
        if teach:
            stack.enter_context(taught(model, teach))
        gaps, margins = stack.enter_context(choices(model, against or {}))
        mask = None if mask is None else mask.to(device)
        logits = model(input_ids=ids.to(device), attention_mask=mask, use_cache=False).logits
    return Trace(logits, seen.hidden, seen.points, seen.routing, gaps, margins)


@contextmanager
def forced(model: nn.Module, experts: ByLayer) -> Iterator[None]:
    """Inside, the routers of the layers named take these experts, with weights of their own scores."""
    here = routers(model)
    try:
        for i, ids in experts.items():
            if i in here:
                here[i].forced = ids
        yield
    finally:
        for router in here.values():
            router.forced = None


def device_of(model: nn.Module) -> torch.device:
    """Where a model runs; a streamed one says so itself, its parameters being nowhere."""
    return getattr(model, DEVICE, None) or next(model.parameters()).device


def decoder_of(model: nn.Module) -> Any:
    """The module that holds the decoder's layers; raises KconvError where there is none."""
    try:
        return decoder(model)[1]
    except Refused as e:
        raise KconvError(str(e)) from e


@contextmanager
def held(model: nn.Module, scope: Prefixes) -> Iterator[None]:
    """Inside, the parts of a streamed model that lie within `scope` are in memory."""
    parts = [p for n, p in getattr(model, PARTS, {}).items() if f"{n.removeprefix('model.')}.".startswith(scope)]
    for part in parts:
        part.fill()
    try:
        yield
    finally:
        for part in parts:
            part.drop()


def routers(model: nn.Module) -> dict[int, Any]:
    """Layer -> its router."""
    layers = enumerate(decoder(model)[1].layers)
    return {i: layer.mlp.gate for i, layer in layers if hasattr(layer.mlp, "gate")}


@contextmanager
def choices(model: nn.Module, experts: ByLayer) -> Iterator[tuple[ByLayer, ByLayer]]:
    """Inside, routers are watched as they choose; yields `gaps` (from `experts`, where given) and `margins`, being filled."""
    gaps: ByLayer = {}
    margins: ByLayer = {}
    here = routers(model)
    for i, router in here.items():
        router.choose = _watched(router, i, experts.get(i), gaps, margins)
    try:
        yield gaps, margins
    finally:
        for router in here.values():
            del router.choose


def _watched(router: Any, i: int, theirs: torch.Tensor | None, gaps: ByLayer, margins: ByLayer) -> Callable[..., Any]:
    choose = router.choose

    def watched(scores: torch.Tensor) -> torch.Tensor:
        ours = choose(scores)
        biased = scores + router.e_score_correction_bias
        mine = _set(ours, biased)
        rest = biased.masked_fill(mine, float("-inf")).amax(-1)
        margins[i] = biased.masked_fill(~mine, float("inf")).amin(-1) - rest
        if theirs is not None:
            wanted = _set(theirs, biased)
            won = biased.masked_fill(~(mine & ~wanted), float("-inf")).amax(-1)
            lost = biased.masked_fill(~(wanted & ~mine), float("inf")).amin(-1)
            gaps[i] = torch.where((mine == wanted).all(-1), 0.0, won - lost)
        return ours

    return watched


def _set(experts: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Expert ids [tokens, k] as a boolean [tokens, experts] like the scores."""
    return torch.zeros_like(scores).scatter(1, experts.to(scores.device), 1) > 0


@contextmanager
def taught(model: nn.Module, states: States) -> Iterator[None]:
    """Inside, what follows the embedding and each layer but the last reads `states(i)` instead of their output.

    Attention residuals are taught as well: a block that a later layer sets aside is the prefix it was given.
    """
    stack: Any = decoder(model)[1]
    sources = [stack.embed_tokens, *list(stack.layers)[:-1]]
    hooks = [m.register_forward_hook(_replacer(i, states)) for i, m in enumerate(sources)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _replacer(i: int, states: States) -> Callable[..., Any]:
    def replace(module: nn.Module, args: Any, out: Any) -> Any:
        state = states(i)
        if state is None:
            return out
        first = out[0] if isinstance(out, tuple) else out
        if state.shape != first.shape:
            raise KconvError(f"the reference's hidden state {i} is {list(state.shape)}, the model's {list(first.shape)}")
        state = state.to(first.device, first.dtype)
        return (state, *out[1:]) if isinstance(out, tuple) else state

    return replace
