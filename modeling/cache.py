"""What generation remembers: per KDA layer three convolution tails and one state, per MLA layer the compressed latents.

| layer | kept per sequence | grows |
|---|---|---|
| KDA | `conv` [B, 3, W - 1, H * D], `state` [B, H, K, V] in at least fp32 | no |
| MLA | `latent` [B, tokens, kv_lora_rank + shared key dims] (K3: 576 numbers a token) | yes |

`crop(-n)` takes back the last n tokens, as speculative decoding needs. MLA forgets them. A KDA state cannot be undone:
after `activate_past_recording()` the inputs of each forward pass are kept, and replayed up to the tokens that remain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache

from kconv.errors import KconvError
from kconv.modeling.config import KimiK3TextConfig

States = tuple[torch.Tensor | None, torch.Tensor | None]
Replay = Callable[[int], States]


class CacheLayer:
    """What both kinds of layer share; subclasses list their tensors (batch first) in `tensors`."""

    tensors: tuple[str, ...] = ()
    is_compileable = is_sliding = is_initialized = supports_early_init = False
    is_croppable = True

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        for name in self.tensors:
            setattr(self, name, None)

    def _each(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for name in self.tensors:
            if (t := getattr(self, name)) is not None:
                setattr(self, name, fn(t))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Rows in the order of `beam_idx`."""
        self._each(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`."""
        self._each(lambda t: t[indices.to(t.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        self._each(lambda t: t.repeat_interleave(repeats, dim=0))

    def move(self, device: torch.device | str) -> None:
        """Bring the tensors to `device`."""
        for name in self.tensors:
            if (t := getattr(self, name)) is not None:
                setattr(self, name, t.to(device))

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1

    get_max_cache_shape = get_max_length


class KDACacheLayer(CacheLayer):
    """Convolution tails and recurrent state of one KDA layer."""

    tensors = ("conv", "state")
    conv: torch.Tensor | None
    state: torch.Tensor | None

    def __init__(self) -> None:
        self.record_past = False
        self._records: list[tuple[int, Replay | None]] = []
        super().__init__()

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._records = []

    def _each(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super()._each(fn)
        self._records = []  # recorded rows are no longer the cache's rows

    def store(self, states: States, tokens: int, replay: Replay | None) -> None:
        """Take the states after `tokens` more tokens; `replay(n)` gives those after the first n of them."""
        self.conv, self.state = states
        if self.record_past:
            self._records.append((tokens, replay))

    def activate_past_recording(self) -> None:
        """Keep what `crop` needs from now on."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens, at most those recorded since the last call; forget the record."""
        left, states = removal(tokens_to_remove), (self.conv, self.state)
        recorded = sum(tokens for tokens, _ in self._records)
        if left > recorded:
            raise KconvError(
                f"cannot take {left} tokens back out of a KDA state: {recorded} are recorded",
                hint="call cache.activate_past_recording() before the forward pass that is to be taken back",
            )
        while left:
            tokens, replay = self._records.pop()
            if replay is None:
                raise KconvError("cannot take tokens back out of a forward pass with padding or packed documents")
            with torch.no_grad():
                states = replay(max(tokens - left, 0))
            left = max(left - tokens, 0)
        self.conv, self.state = states
        self._records = []


class MLACacheLayer(CacheLayer):
    """Compressed keys and values of one MLA layer."""

    tensors = ("latent",)
    latent: torch.Tensor | None

    def update(self, latent: torch.Tensor) -> torch.Tensor:
        """Append [B, T, rank] and return all of it, [B, past + T, rank]."""
        self.latent = latent if self.latent is None else torch.cat([self.latent, latent], dim=1)
        return self.latent

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens."""
        count = removal(tokens_to_remove)
        self._each(lambda t: t[:, : t.shape[1] - count])


def removal(tokens_to_remove: int) -> int:
    """Transformers asks for the removal of n tokens by -n; a positive number once meant the length to keep."""
    if tokens_to_remove > 0:
        raise KconvError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number")
    return -tokens_to_remove


class KimiK3Cache(Cache):
    """Cache of a whole model, in the interface that Transformers' generation uses; `offloaded` keeps it on the CPU."""

    layers: list[Any]

    def __init__(self, config: KimiK3TextConfig, offloaded: bool = False) -> None:
        layers: list[Any] = [MLACacheLayer() if kind == "mla" else KDACacheLayer() for kind in config.layer_kinds]
        super().__init__(layers=layers)
        self.tokens, self.offloaded = 0, offloaded

    @contextmanager
    def layer(self, index: int, device: torch.device) -> Iterator[Any]:
        """The cache of layer `index`; where `offloaded`, it is on `device` for the time of its layer only."""
        layer = self.layers[index]
        if self.offloaded:
            layer.move(device)
        yield layer
        if self.offloaded:
            layer.move("cpu")

    def advance(self, tokens: int) -> None:
        """Called once per forward pass, after every layer has stored its part."""
        self.tokens += tokens

    def allowed(self, given: torch.Tensor | None) -> torch.Tensor | None:
        """The mask over the keys of a pass: the one that padding makes, unless the cache has its own."""
        return given

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding included."""
        return self.tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Keys that a query of `query_length` tokens sees, and their offset."""
        return self.tokens + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens in every layer."""
        super().crop(tokens_to_remove)
        self.tokens -= abs(tokens_to_remove)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.tokens = 0
