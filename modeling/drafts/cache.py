"""The draft's keys and values, written apart for context and block.

| step | cache |
|---|---|
| `materialize` | appends what the layers keep of new context states |
| `forward_block` | appends the block behind the context |
| `crop(length)` | drops the block (and context states that were not committed) after verification |

An attention says what it keeps per position (GQA: rotated keys and values; MLA: normed latent and rotated shared key);
every kept tensor has its positions on axis -2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kconv.errors import KconvError

Kept = tuple[Tensor, ...]


def join(before: Kept | None, after: Kept) -> Kept:
    """Both along the positions."""
    return after if before is None else tuple(torch.cat([a, b], -2) for a, b in zip(before, after, strict=True))


class DraftCache:
    """Per layer, what attention keeps of context and block."""

    def __init__(self, num_layers: int) -> None:
        self.layers: list[Kept | None] = [None] * num_layers
        self.committed = 0

    def get_seq_length(self) -> int:
        """Positions held, a block that was not cropped yet included."""
        first = self.layers[0]
        return 0 if first is None else first[0].shape[-2]

    def append(self, layer: int, kept: Kept) -> Kept:
        """Write behind what the layer holds; returns everything it holds then."""
        joined = join(self.layers[layer], kept)
        self.layers[layer] = joined
        return joined

    def require_cropped(self) -> None:
        """Refuse to write behind a block that is still there: its states are not the target's."""
        if self.get_seq_length() != self.committed:
            raise KconvError(
                f"the draft cache still holds a block behind its {self.committed} context positions",
                hint="crop it to the committed length after verification",
            )

    def crop(self, length: int) -> None:
        """Keep the first `length` positions."""
        if length > self.get_seq_length():
            raise KconvError(f"cannot crop a draft cache of {self.get_seq_length()} positions to {length}")
        self.layers = [None if kept is None else tuple(t[..., :length, :] for t in kept) for kept in self.layers]
        self.committed = length
