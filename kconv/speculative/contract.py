"""The training contract of block drafts: where blocks stand, what they see (`kconv.modeling.drafts.mask`), what they predict.

| item | DFlash, DFlash2 | DSpark (`sample_from_anchor`) |
|---|---|---|
| block | `[anchor token, MASK x (block_size - 1)]`; padding blocks are all MASK | the same |
| anchors | supervised, with a whole block ahead: `[0, S - block_size]` | supervised, followed by a supervised token |
| position k predicts | token `anchor + k`; position 0 is not trained | token `anchor + 1 + k` |
| draft positions | anchor + offset, local to the document when packed | the same |
| weights | `exp(-(k - 1) / gamma)`; gamma 7, 5, 4 for blocks of 16, 10, 8 | `exp(-k / gamma)` |

Acceptance of a block: the leading run of drafted tokens that equal the target's; a step yields that run and one token of the
target, so the acceptance length is between 1 and the number of drafted tokens plus 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kconv.errors import KconvError
from kconv.modeling.drafts.mask import block_mask, decode_mask

__all__ = [
    "Anchors", "NoValidAnchors", "acceptance_lengths", "accepted_run", "block_mask", "block_positions", "block_tokens",
    "decay_weights", "decode_mask", "document_ids", "labels", "remaining_in_document", "sample_anchors",
]  # fmt: skip


class NoValidAnchors(KconvError):
    """No row has a supervised position with room for a block; a trainer skips the batch."""


@dataclass(frozen=True)
class Anchors:
    """Sorted anchor positions [B, N] and which of them are real [B, N] (padding anchors are 0)."""

    positions: Tensor
    keep: Tensor


def document_ids(seq_lens: Tensor, length: int) -> Tensor:
    """Document of each position [B, length], from the lengths of packed documents [B, most], zero-padded."""
    ends = seq_lens.cumsum(1)
    return (ends[:, None] <= torch.arange(length, device=seq_lens.device)[None, :, None]).sum(-1)


def remaining_in_document(documents: Tensor) -> Tensor:
    """How many positions of the same document follow each position, [B, S]."""
    after = torch.zeros_like(documents)
    for i in range(documents.shape[1] - 2, -1, -1):
        after[:, i] = torch.where(documents[:, i] == documents[:, i + 1], after[:, i + 1] + 1, 0)
    return after


def valid_anchors(loss_mask: Tensor, block_size: int, sample_from_anchor: bool, documents: Tensor | None = None) -> Tensor:
    """Which positions may be anchors, [B, S] bool; a packed block stays inside its document."""
    supervised = loss_mask > 0.5
    length = supervised.shape[1]
    if sample_from_anchor:
        following = torch.cat([supervised[:, 1:], torch.zeros_like(supervised[:, :1])], 1)
        valid, needed = supervised & following, 1
    else:
        room = torch.arange(length, device=loss_mask.device) <= max(length - block_size, 0)
        valid, needed = supervised & room, block_size - 1
    return valid if documents is None else valid & (remaining_in_document(documents) >= needed)


def sample_anchors(
    loss_mask: Tensor,
    block_size: int,
    num_anchors: int = 512,
    *,
    sample_from_anchor: bool = False,
    documents: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Anchors:
    """Random anchors of each row.

    Args:
        loss_mask: [B, S], above 0.5 where supervised.
        block_size: positions of one block.
        num_anchors: at most so many a row.
        sample_from_anchor: whether the anchor's position predicts too (DSpark).
        documents: [B, S] document ids when packed.
        generator: source of randomness.

    Raises:
        NoValidAnchors: when no row has a valid position.
    """
    valid = valid_anchors(loss_mask, block_size, sample_from_anchor, documents)
    most = min(num_anchors, int(valid.sum(1).max()))
    if most == 0:
        raise NoValidAnchors(
            f"no supervised position of {loss_mask.shape[1]} leaves room for a block of {block_size}",
            hint="skip the batch, or use longer sequences",
        )
    order = torch.rand(valid.shape, generator=generator, device=loss_mask.device).masked_fill(~valid, 2.0).argsort(1)[:, :most]
    keep = valid.gather(1, order)
    positions = order.masked_fill(~keep, valid.shape[1]).sort(1).values
    kept = positions < valid.shape[1]
    return Anchors(positions.masked_fill(~kept, 0), kept)


def block_tokens(input_ids: Tensor, anchors: Anchors, block_size: int, mask_token_id: int) -> Tensor:
    """Token ids of the blocks, [B, N * block_size]: the anchor's token, then masks; padding blocks are all masks."""
    batch, blocks = anchors.positions.shape
    ids = torch.full((batch, blocks, block_size), mask_token_id, dtype=input_ids.dtype, device=input_ids.device)
    ids[..., 0] = torch.where(anchors.keep, input_ids.gather(1, anchors.positions), mask_token_id)
    return ids.flatten(1)


def block_positions(anchors: Anchors, block_size: int, context_positions: Tensor) -> Tensor:
    """Position ids [B, S + N * block_size] of context and blocks; `context_positions` [B, S] restart per packed document."""
    base = context_positions.gather(1, anchors.positions)[..., None]
    blocks = base + torch.arange(block_size, device=base.device)
    return torch.cat([context_positions, blocks.flatten(1)], 1)


def labels(
    input_ids: Tensor,
    loss_mask: Tensor,
    anchors: Anchors,
    block_size: int,
    *,
    sample_from_anchor: bool = False,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What each block position should predict, and whether it is trained.

    Returns:
        target ids [B, N, block_size], and a bool mask of the same shape: inside the sequence, supervised, of a real block,
        in the anchor's document; position 0 of a DFlash block never counts. DSpark counts a run: nothing after a gap.
    """
    length = input_ids.shape[1]
    offset = torch.arange(block_size, device=input_ids.device) + (1 if sample_from_anchor else 0)
    where = anchors.positions[..., None] + offset
    inside = where < length
    safe = where.clamp(max=length - 1)
    rows = input_ids[:, None].expand(-1, safe.shape[1], -1)
    trained = inside & anchors.keep[..., None] & (loss_mask[:, None].expand(-1, safe.shape[1], -1).gather(2, safe) > 0.5)
    if documents is not None:
        own = documents.gather(1, anchors.positions)[..., None]
        trained = trained & (documents[:, None].expand(-1, safe.shape[1], -1).gather(2, safe) == own)
    trained = trained.long().cumprod(-1).bool() if sample_from_anchor else trained & (offset > 0)
    return rows.gather(2, safe), trained


def decay_weights(block_size: int, gamma: float | None, *, sample_from_anchor: bool = False) -> Tensor:
    """Loss weight of each block position [block_size]: 1 for the first trained one, decaying with `gamma` (None: uniform)."""
    step = torch.arange(block_size) - (0 if sample_from_anchor else 1)
    weights = torch.ones(block_size) if gamma is None else torch.exp(-step / gamma)
    return torch.where(step < 0, torch.zeros(()), weights)


def accepted_run(drafted: Tensor, posterior: Tensor) -> Tensor:
    """Length [B] of the leading run of drafted tokens [B, n] that equal the target's own picks [B, n or more]."""
    return (drafted == posterior[:, : drafted.shape[1]]).long().cumprod(1).sum(1)


def acceptance_lengths(predicted: Tensor, target: Tensor, trained: Tensor) -> Tensor:
    """Acceptance length of each block in training data: accepted run plus the target's token.

    Args:
        predicted, target: [B, N, block_size] ids.
        trained: which positions count; an untrained one does not break the run.

    Returns:
        [number of blocks with a trained position], floats.
    """
    run = (((predicted == target) | ~trained).long().cumprod(-1) * trained.long()).sum(-1)
    return (run + 1.0)[trained.any(-1)]
