"""A target with a cache from which tokens can be taken back: what verification of a draft needs.

| way | caches | how the state before the rejected tokens comes back |
|---|---|---|
| `crop` | attention only | the last keys and values are forgotten |
| `record` | Kimi K3's own | MLA forgets; KDA takes the state before the block and replays its recorded inputs |
| `snapshot` | any, recurrent ones too | all layers go back to before the block, the kept tokens run through the model again |

`auto` takes the first that fits. A recurrent state cannot be cropped: doing so anyway is how a draft silently ruins its target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kconv.errors import KconvError
from kconv.modeling.compat import CACHE_NAME
from kconv.speculative.capture import Captured, capture_hidden, decoder_of

WAYS = ("auto", "crop", "record", "snapshot")


def new_cache(model: nn.Module) -> Any:
    """An empty cache of the kind the model fills."""
    from transformers import DynamicCache

    from kconv.modeling.cache import KimiK3Cache
    from kconv.modeling.config import KimiK3TextConfig

    config: Any = model.config
    return KimiK3Cache(config) if isinstance(config, KimiK3TextConfig) else DynamicCache(config=config)


def _recurrent(layer: Any) -> bool:
    return any(hasattr(layer, name) for name in ("recurrent_states", "conv_states", "state"))


def resolve_way(cache: Any, way: str) -> str:
    """The way to take tokens back out of `cache`; raises KconvError for one that cannot."""
    if way not in WAYS:
        raise KconvError(f"way {way!r} is none of {', '.join(WAYS)}")
    recurrent = any(_recurrent(layer) for layer in cache.layers)
    records = hasattr(cache, "tokens")
    if way == "auto":
        return "crop" if not recurrent else "record" if records else "snapshot"
    if way == "crop" and recurrent:
        raise KconvError("this target has recurrent layers, whose state cannot be cropped", hint="use way='snapshot', or 'auto'")
    if way == "record" and not records:
        raise KconvError(f"a {type(cache).__name__} does not record its inputs", hint="use way='snapshot', or 'auto'")
    return way


def _frozen(value: Any, clone: bool) -> Any:
    """A value as it is now: containers copied, tensors cloned where the layer writes into them."""
    if isinstance(value, Tensor):
        return value.clone() if clone else value
    if isinstance(value, list | tuple):
        return type(value)(_frozen(v, clone) for v in value)
    if isinstance(value, dict):
        return {k: _frozen(v, clone) for k, v in value.items()}
    return value


class Snapshot:
    """Everything a cache holds, without copying what it only ever replaces."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.counters = {k: v for k, v in vars(cache).items() if isinstance(v, int)}
        self.layers = [{k: _frozen(v, self._in_place(layer)) for k, v in vars(layer).items()} for layer in cache.layers]

    @staticmethod
    def _in_place(layer: Any) -> bool:
        return hasattr(layer, "recurrent_states") or hasattr(layer, "conv_states") or "Static" in type(layer).__name__

    def restore(self) -> None:
        """Put it all back; a snapshot is used once."""
        vars(self.cache).update(self.counters)
        for layer, saved in zip(self.cache.layers, self.layers, strict=True):
            vars(layer).clear()
            vars(layer).update(saved)


class Target:
    """A target model during decoding of one sequence: its cache, and the states a draft taps.

    Args:
        model: a causal language model with a cache.
        taps: layers to capture (0-based outputs); empty for none.
        stream: capture stream, see `capture`.
        way: how tokens are taken back, see the module's table.
        last_normed: where a tap on the last layer is taken, see `capture`.
    """

    def __init__(
        self,
        model: nn.Module,
        taps: Sequence[int] = (),
        stream: str | None = None,
        way: str = "auto",
        *,
        last_normed: bool = False,
    ) -> None:
        self.model = model
        self.taps, self.stream, self.last_normed = tuple(taps), stream, last_normed
        self.cache = new_cache(model)
        self.way = resolve_way(self.cache, way)
        if self.way != "snapshot" and hasattr(self.cache, "activate_past_recording"):
            self._record()
        self.length = 0
        self.passes = 0
        self._before: Snapshot | None = None
        self._last: Tensor | None = None

    def _record(self) -> None:
        activate = getattr(self.cache, "activate_past_recording", None)
        if callable(activate):
            activate()

    @property
    def device(self) -> torch.device:
        """Where the model's embedding lies."""
        return self.embedding.weight.device

    @property
    def embedding(self) -> Any:
        """The token embedding, which drafts borrow."""
        return self.model.get_input_embeddings()  # type: ignore[operator]

    @property
    def head(self) -> Any:
        """The output head, which drafts borrow."""
        head = self.model.get_output_embeddings() if hasattr(self.model, "get_output_embeddings") else None  # type: ignore[operator]
        return head if head is not None else self.model.lm_head

    @torch.no_grad()
    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run ids [1, n] behind the cache.

        Returns:
            logits [1, n, V], and the tapped states [1, n, taps * hidden] (None without taps).
        """
        if ids.shape[0] != 1:
            raise KconvError(f"the reference decoder runs one sequence, not {ids.shape[0]}")
        if self.way == "snapshot":
            self._before = Snapshot(self.cache)
        logits, hidden = self._run(ids)
        self._last = ids
        return logits, hidden

    def _run(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        captured: Captured | None = None
        call = {CACHE_NAME: self.cache, "use_cache": True}
        if self.taps:
            with capture_hidden(self.model, self.taps, self.stream, last_normed=self.last_normed) as captured:
                out = self.model(ids, **call)
        else:
            out = self.model(ids, **call)
        self.length += ids.shape[1]
        self.passes += 1
        return out.logits, captured.hidden if captured else None

    @torch.no_grad()
    def keep(self, count: int) -> None:
        """Keep the first `count` tokens of the latest `forward`, take the others back."""
        assert self._last is not None
        surplus = self._last.shape[1] - count
        if self.way == "snapshot":
            if surplus:
                assert self._before is not None
                self._before.restore()
                self.length -= self._last.shape[1]
                if count:
                    self._run(self._last[:, :count])
        else:
            self.cache.crop(-surplus)
            self.length -= surplus
        self._before = self._last = None


def depth_of(model: nn.Module) -> int:
    """Number of decoder layers."""
    return len(decoder_of(model).layers)
