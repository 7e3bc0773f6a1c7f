"""What no run can see is compared with the source bit for bit: tensors that took no part in computing these tokens.

| uncovered | why |
|---|---|
| the first layer's `self_attention_res_norm`, `_proj` | there is no block to mix before the first one is set aside |
| experts that no token was sent to | few tokens, many experts |
| the embedding's rows of ids that do not occur | few tokens, a large vocabulary |

Only their bytes are read from the source, through the plan that would convert it; everything else the runs have judged.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from kconv.engine.sink import Sink
from kconv.parity.trace import ByLayer, decoder_of, held, routers
from kconv.spec import torch_dtype

if TYPE_CHECKING:
    import numpy as np

    from kconv.engine.slabs import Part, Region, Slab
    from kconv.planning.plan import Plan

Uncovered = dict[str, set[int] | None]  # name in the state dict -> experts (None: the whole tensor)


def uncovered(model: Any, routing: ByLayer, ids: torch.Tensor) -> Uncovered:
    """The tensors that a pass over `ids` with this routing (layer -> expert ids) did not read, or not all of."""
    found: Uncovered = {}
    layers = decoder_of(model).layers
    if len(ids.unique()) < model.get_input_embeddings().weight.shape[0]:
        found["model.embed_tokens.weight"] = None
    for name, _ in layers[0].named_parameters():
        if name.startswith("self_attention_res_"):
            found[f"model.layers.0.{name}"] = None
    for i, router in routers(model).items():
        chosen = set(routing[i].unique().tolist()) if i in routing else set()
        idle = set(range(router.weight.shape[0])) - chosen
        if idle:
            found |= {f"model.layers.{i}.mlp.experts.{n}": idle for n, _ in layers[i].mlp.experts.named_parameters()}
    return found


def same_form(source: Any, model: Any) -> dict[str, Any]:
    """Options under which the source's plan gives experts in the form that `model` holds them in."""
    from kconv.conversion import plan

    wanted = getattr(model.config, "experts_format", None)
    given = plan(str(source), "native").layouts.config.get("experts_format")
    return {"experts": wanted} if wanted and given and wanted != given else {}


def different(model: Any, source: Any, names: Uncovered) -> list[str]:
    """Which of these tensors do not equal the source's, as `layers.0.mlp.experts.down_proj[3]`; sorted."""
    from kconv.conversion import default_workers, plan
    from kconv.engine.run import execute
    from kconv.engine.slabs import streams

    made = plan(str(source), "native", **same_form(source, model)).check()
    found: set[str] = set()
    for scope in sorted({_scope(n) for n in names}):
        here = {n: e for n, e in names.items() if n.removeprefix("model.").startswith(scope) and n in made.targets}
        with held(model, (scope,)):
            sink = _Comparison(model, made, here)
            part = copy.copy(made)
            part.edges = [made.edges[i] for i in sorted({made.targets[n].edge for n in here})]
            todo = [_only(stream, sink) for stream in streams(part, sink.place)]
            execute(todo, made.source.files, sink, workers=default_workers())
        found |= sink.found
    return sorted(found)


def _scope(name: str) -> str:
    """How the names in a tensor's part of the model begin, without `model.`: `layers.3.`, `embed_tokens.`."""
    part = name.removeprefix("model.").split(".")
    return ".".join(part[:2] if part[0] == "layers" else part[:1]) + "."


def _only(stream: Iterator[Slab], sink: _Comparison) -> Iterator[Slab]:
    """Slabs without the parts that concern experts the runs have seen."""
    for slab in stream:
        slab.parts = [p for p in slab.parts if sink.wants(p)]
        if slab.parts:
            yield slab


class _Comparison(Sink):
    """A sink that compares converted regions with the model's tensors."""

    takes_tensors = True

    def __init__(self, model: Any, made: Plan, names: Uncovered) -> None:
        state = model.state_dict()
        self.ours = {n: state[n] for n in names if n in state}
        self.rows = {n: made.targets[n].spec.nbytes // made.targets[n].spec.shape[0] for n, e in names.items() if e}
        self.names, self.found = names, set[str]()

    def place(self, name: str) -> tuple[str, int]:
        """Offsets count bytes of the target's own dtype."""
        return name, 0

    def wants(self, part: Part) -> bool:
        """Whether the part writes something uncovered."""
        return any(w.name in self.ours and (self.names[w.name] is None or self._expert(w) in (self.names[w.name] or ()))
                   for w in part.writes)  # fmt: skip

    def _expert(self, region: Region) -> int:
        return region.offset // self.rows[region.name]

    def put(self, region: Region, data: np.ndarray) -> str:
        """Compare bytes that lie on the CPU."""
        return self.put_tensor(region, torch.from_numpy(data).view(torch_dtype(region.spec.dtype)))

    def put_tensor(self, region: Region, tensor: torch.Tensor) -> str:
        """Compare a tensor with the region's place in the model."""
        ours = self.ours.get(region.name)
        if ours is not None:
            start = region.offset // tensor.element_size()
            mine = ours.reshape(-1)[start : start + tensor.numel()].cpu()
            if not torch.equal(mine, tensor.reshape(-1).cpu().to(mine.dtype)):
                row = f"[{self._expert(region)}]" if region.name in self.rows else ""
                self.found.add(region.name.removeprefix("model.") + row)
        return ""
