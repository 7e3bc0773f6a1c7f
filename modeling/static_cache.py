"""A cache whose tensors stay where they are, so that a decoding step can be a CUDA graph.

| layer | buffers | filled |
|---|---|---|
| KDA | conv tails and state of the first pass | written over after each pass |
| MLA | `capacity` tokens; twice as many, elsewhere, when those are used up | the first `length` |

Everything of `kconv.modeling.cache` works on it, by views of the buffers. While `at` is set, to a position on the device, a
pass of one token writes there, reads the whole buffer behind a mask, and counts nothing: that is the pass to be captured.
"""

from __future__ import annotations

from typing import Any

import torch

from kconv.modeling.cache import KDACacheLayer, KimiK3Cache, MLACacheLayer, Replay, States, removal
from kconv.modeling.config import KimiK3TextConfig


class StaticMLACacheLayer(MLACacheLayer):
    """Latents of one MLA layer in a buffer [B, capacity, rank]."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self.buffer: torch.Tensor | None = None
        self.at: torch.Tensor | None = None
        super().__init__()

    @property  # type: ignore[override]
    def latent(self) -> torch.Tensor | None:
        """The filled part of the buffer, a view."""
        return None if self.buffer is None or not self.length else self.buffer[:, : self.length]

    @latent.setter
    def latent(self, value: torch.Tensor | None) -> None:
        self.length = 0
        if value is not None:
            self._room(value, value.shape[1])[:, : value.shape[1]] = value
            self.length = value.shape[1]

    def _room(self, like: torch.Tensor, length: int) -> torch.Tensor:
        """The buffer, or a new one that fits rows such as `like`; what was in it is kept where the rows are the same."""
        while self.capacity < length:
            self.capacity *= 2
        old, shape = self.buffer, (like.shape[0], self.capacity, like.shape[2])
        if old is None or old.shape != shape or old.dtype != like.dtype or old.device != like.device:
            self.buffer = like.new_zeros(shape)
            if old is not None and self.length and old.shape[0] == shape[0]:
                self.buffer[:, : self.length] = old[:, : self.length]
        assert self.buffer is not None
        return self.buffer

    def update(self, latent: torch.Tensor) -> torch.Tensor:
        """Append [B, T, rank]; returns all of it, or the whole buffer while `at` is set."""
        if self.at is not None:
            assert self.buffer is not None
            return self.buffer.index_copy_(1, self.at, latent)
        end = self.length + latent.shape[1]
        buffer = self._room(latent, end)
        buffer[:, self.length : end] = latent
        self.length = end
        return buffer[:, :end]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens."""
        self.length = max(self.length - removal(tokens_to_remove), 0)


class StaticKDACacheLayer(KDACacheLayer):
    """States of one KDA layer, copied into the tensors of the first pass."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}
        self._filled: set[str] = set()
        super().__init__()

    def _read(self, name: str) -> torch.Tensor | None:
        return self._held[name] if name in self._filled else None

    def _write(self, name: str, value: torch.Tensor | None) -> None:
        self._filled.discard(name)
        if value is None:
            return
        held = self._held.get(name)
        if held is None or (held.shape, held.dtype, held.device) != (value.shape, value.dtype, value.device):
            self._held[name] = value.clone()
        elif held is not value:
            held.copy_(value)
        self._filled.add(name)

    conv = property(lambda self: self._read("conv"), lambda self, value: self._write("conv", value))  # type: ignore[assignment]
    state = property(lambda self: self._read("state"), lambda self, value: self._write("state", value))  # type: ignore[assignment]

    def store(self, states: States, tokens: int, replay: Replay | None) -> None:
        """Copy the states; what is recorded for `crop` must not change under a later pass, so then they are new tensors."""
        if self.record_past:
            self._held = {}
        super().store(states, tokens, replay)


class StaticKimiK3Cache(KimiK3Cache):
    """Cache of a whole model for `capacity` tokens, at first; see the module's table."""

    def __init__(self, config: KimiK3TextConfig, capacity: int) -> None:
        super().__init__(config)
        self.layers = [StaticMLACacheLayer(capacity) if kind == "mla" else StaticKDACacheLayer() for kind in config.layer_kinds]
        self.at: torch.Tensor | None = None
        self.graph: Any = None
        self.graph_failed = False

    @property
    def recording(self) -> bool:
        """Whether some layer keeps what `crop` needs."""
        return any(layer.record_past for layer in self.layers if isinstance(layer, StaticKDACacheLayer))

    @property
    def capacity(self) -> int:
        """Tokens that fit without new buffers."""
        return min((layer.capacity for layer in self._mla()), default=2**31)

    def _mla(self) -> list[StaticMLACacheLayer]:
        return [layer for layer in self.layers if isinstance(layer, StaticMLACacheLayer)]

    def hold(self, at: torch.Tensor | None) -> None:
        """Let passes write at the position `at` [1] on the device and count nothing; None ends that."""
        self.at = at
        for layer in self._mla():
            layer.at = at

    def advance(self, tokens: int) -> None:
        """Called once per forward pass, after every layer has stored its part."""
        if self.at is None:
            super().advance(tokens)

    def replayed(self) -> None:
        """Count a token that a captured pass has written."""
        self.tokens += 1
        for layer in self._mla():
            layer.length += 1

    def allowed(self, given: torch.Tensor | None) -> torch.Tensor | None:
        """The mask over the keys of a pass: `given`, or [1, 1, 1, capacity] of what lies up to `at`."""
        if self.at is None or not self._mla():
            return given
        return (torch.arange(self.capacity, device=self.at.device) <= self.at)[None, None, None]

    def pointers(self) -> tuple[int, ...]:
        """Where every buffer lies; a captured pass is right only while this stays the same."""
        held = (t for layer in self.layers for t in layer_tensors(layer))
        return tuple(0 if t is None else t.data_ptr() for t in held)

    def __getstate__(self) -> dict[str, Any]:
        """Without the graph, which cannot be copied or pickled."""
        return {**self.__dict__, "graph": None}

    def states(self) -> list[torch.Tensor]:
        """The tensors that a pass writes over."""
        return [t for layer in self.layers if isinstance(layer, StaticKDACacheLayer) for t in layer._held.values()]


def layer_tensors(layer: Any) -> list[torch.Tensor | None]:
    """The buffers of a layer."""
    return [layer.buffer] if isinstance(layer, StaticMLACacheLayer) else [layer.conv, layer.state]
