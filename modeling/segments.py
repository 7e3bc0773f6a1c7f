"""Which tokens of a batch belong to which sequence: padding and packed documents in one form.

| the caller gives | meaning |
|---|---|
| `attention_mask` [B, T], 0 and 1 | padding, left, right or in between; one sequence a row |
| `attention_mask` [B, T] with numbers above 1 | indexed: each number is a document of its row, 0 is padding |
| `cu_seqlens` [documents + 1] | boundaries in the flattened batch, starting at 0 and ending at B * T |
| `position_ids` that jump (no mask, no cache) | a document begins wherever a position is not its predecessor plus one |

Valid tokens are gathered into one flat row: a sequence is a slice of it, nothing is computed for padding, and state and
attention begin anew at each boundary.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch

from kconv.errors import KconvError


@dataclass(frozen=True)
class Segments:
    """Sequences of a batch of `batch` rows of `length` tokens, laid end to end.

    `indices` [tokens] are the valid positions of the flattened batch (None: all of them); `cu_seqlens` [sequences + 1].
    `packed` when a row may hold several sequences; otherwise sequence i is row i, perhaps empty.
    """

    batch: int
    length: int
    indices: torch.Tensor | None
    cu_seqlens: torch.Tensor
    packed: bool

    @cached_property
    def bounds(self) -> list[int]:
        """`cu_seqlens` on the host; the one synchronisation of a forward pass."""
        return self.cu_seqlens.tolist()

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, ...] -> [1, tokens, ...]."""
        flat = x.reshape(1, self.batch * self.length, *x.shape[2:])
        return flat if self.indices is None else flat[:, self.indices]

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """[1, tokens, ...] -> [batch, length, ...], zero where there is no token."""
        rest = x.shape[2:]
        if self.indices is not None:
            x = x.new_zeros(self.batch * self.length, *rest).index_copy(0, self.indices, x[0])
        return x.reshape(self.batch, self.length, *rest)


def from_mask(mask: torch.Tensor) -> Segments | None:
    """Segments of a 0/1 or indexed mask [batch, length]; None when all tokens are valid and a row is one sequence."""
    batch, length = mask.shape
    valid = mask != 0
    documents = bool((mask > 1).any())
    if not documents and bool(valid.all()):
        return None
    indices = valid.flatten().nonzero().flatten()
    if not documents:
        counts = valid.sum(-1)
    else:
        ids, rows = mask.flatten()[indices], indices // length
        change = (ids[1:] != ids[:-1]) | (rows[1:] != rows[:-1])
        starts = torch.cat([change.new_ones(1), change]).nonzero().flatten()
        counts = torch.diff(starts, append=starts.new_tensor([ids.numel()]))
    return Segments(batch, length, indices, _cumulative(counts), packed=documents)


def from_cu_seqlens(cu_seqlens: torch.Tensor, batch: int, length: int) -> Segments:
    """Segments from boundaries in the flattened batch; raises KconvError unless they rise from 0 to batch * length."""
    cu = cu_seqlens.flatten()
    bounds = cu.tolist()
    if not bounds or bounds[0] != 0 or bounds[-1] != batch * length or any(a >= b for a, b in itertools.pairwise(bounds)):
        raise KconvError(
            f"cu_seqlens {bounds[:8]} must rise from 0 to batch * length = {batch * length}",
            hint="give the cumulative lengths of the documents of the flattened batch, without padding",
        )
    return Segments(batch, length, None, cu.to(torch.int32), packed=True)


def from_position_ids(position_ids: torch.Tensor, batch: int) -> Segments | None:
    """Segments wherever positions [1 or batch, length] do not follow each other; None when each row is one run."""
    positions = position_ids.expand(batch, -1)
    jump = positions[:, 1:] != positions[:, :-1] + 1
    if not bool(jump.any()):
        return None
    starts = torch.cat([jump.new_ones(batch, 1), jump], dim=1).flatten().nonzero().flatten()
    counts = torch.diff(starts, append=starts.new_tensor([positions.numel()]))
    return Segments(batch, positions.shape[1], None, _cumulative(counts), packed=True)


def _cumulative(counts: torch.Tensor) -> torch.Tensor:
    cu = torch.zeros(counts.numel() + 1, dtype=torch.int32, device=counts.device)
    cu[1:] = counts.cumsum(0)
    return cu
