"""Decoding steps as CUDA graphs: one launch a token, over a `StaticKimiK3Cache`.

| a step is replayed where | otherwise |
|---|---|
| one new token a row, ids alone, no padding, no gradients, no hidden states or losses asked for | the plain pass |
| the model is in evaluation on one CUDA device, without hooks, indexers or forced routing | the plain pass |
| the cache's buffers and the weights lie where they were captured | captured again |

The first step of a cache costs a plain pass more. A pass that cannot be captured (experts that wait for the device) is logged
once, and the plain pass serves.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from kconv.modeling.router import KimiRouter
from kconv.modeling.static_cache import StaticKimiK3Cache

logger = logging.getLogger(__package__)
HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class DecodeGraph:
    """A captured pass of one token for each of `ids` [B, 1] through a causal model and its filled cache."""

    def __init__(self, model: Any, cache: StaticKimiK3Cache, ids: torch.Tensor) -> None:
        self.ids, self.at = ids.clone(), torch.tensor([cache.tokens], device=ids.device)
        self.graph = torch.cuda.CUDAGraph()
        kept = [(t, t.clone()) for t in cache.states()]
        cache.hold(self.at)
        try:
            self._warm_up(model, cache)
            for state, before in kept:
                state.copy_(before)
            with torch.cuda.graph(self.graph):
                self.logits = self._pass(model, cache)
        finally:
            cache.hold(None)
        self.pointers = cache.pointers()

    def _pass(self, model: Any, cache: StaticKimiK3Cache) -> torch.Tensor:
        return model.lm_head(model.model(input_ids=self.ids, cache=cache, use_cache=True).last_hidden_state)

    def _warm_up(self, model: Any, cache: StaticKimiK3Cache) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._pass(model, cache)
        torch.cuda.current_stream().wait_stream(stream)

    def fits(self, cache: StaticKimiK3Cache, ids: torch.Tensor) -> bool:
        """Whether the buffers are those that were captured, with room for one more token."""
        return self.ids.shape == ids.shape and cache.tokens < cache.capacity and self.pointers == cache.pointers()

    def __call__(self, cache: StaticKimiK3Cache, ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, 1, vocab] of one more token."""
        self.ids.copy_(ids)
        self.at.fill_(cache.tokens)
        self.graph.replay()
        cache.replayed()
        return self.logits.clone()


def step(model: Any, cache: Any, ids: torch.Tensor | None, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Logits [B, 1, vocab] of a decoding step, `cache` advanced by it; None where the plain pass has to be taken."""
    if not isinstance(cache, StaticKimiK3Cache) or ids is None or not _can_replay(model, cache, ids, mask):
        return None
    if cache.graph is None or not cache.graph.fits(cache, ids):
        if cache.tokens >= cache.capacity or not _can_capture(model):
            return None  # a plain pass makes room
        try:
            with torch.cuda.device(ids.device):
                cache.graph = DecodeGraph(model, cache, ids)
        except RuntimeError as error:
            logger.warning("decoding without a CUDA graph: %s", str(error).splitlines()[0])
            cache.graph_failed = True
            return None
    return cache.graph(cache, ids)


def _can_replay(model: Any, cache: StaticKimiK3Cache, ids: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """What may differ from step to step; the mask is looked at last, since that waits for the device."""
    ready = ids.is_cuda and ids.ndim == 2 and ids.shape[1] == 1 and cache.tokens > 0 and cache.at is None
    if not ready or torch.is_grad_enabled() or model.training or cache.graph_failed or cache.recording:
        return False
    if mask is None:
        return True
    return mask.ndim == 2 and mask.shape[1] == cache.tokens + 1 and bool((mask == 1).all())


def _can_capture(model: Any) -> bool:
    """What a captured pass would miss: hooks, several devices, Python in attention or routing that reads values."""
    if len({p.device for p in model.parameters()}) > 1 or model.config.indexer_config is not None:
        return False
    modules = list(model.modules())
    forced = any(isinstance(m, KimiRouter) and m.forced is not None for m in modules)
    return not forced and not any(getattr(m, name) for m in modules for name in HOOKS)


def where_weights_lie(model: Any) -> tuple[tuple[int, int], ...]:
    """Identity and place of every parameter: a captured pass is right only while this stays the same."""
    return tuple((id(p), p.data_ptr()) for p in model.parameters())
