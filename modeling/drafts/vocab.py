"""A draft over a subset of the target's vocabulary: `d2t[i]` is an OFFSET (target id = i + d2t[i]), `t2d` marks the subset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kconv.errors import KconvError
from kconv.modeling.drafts.config import DraftConfig
from kconv.modeling.drafts.sampling import Proposal


@dataclass(frozen=True)
class DraftVocabulary:
    """Sizes of both vocabularies; the maps themselves are buffers of the model."""

    target_size: int
    draft_size: int | None

    @classmethod
    def of(cls, config: DraftConfig) -> DraftVocabulary:
        """From a draft's config."""
        return cls(config.vocab_size, config.draft_vocab_size if config.has_draft_vocab else None)

    def target_ids(self, tokens: Tensor, model: Any) -> Tensor:
        """Draft ids as target ids."""
        return tokens if self.draft_size is None else tokens + model.d2t[tokens]

    def to_target(self, proposal: Proposal, model: Any) -> Proposal:
        """A proposal over the draft's vocabulary as one over the target's."""
        if self.draft_size is None:
            return proposal
        probs = proposal.probs
        if probs is not None:
            ids = self.target_ids(torch.arange(self.draft_size, device=probs.device), model)
            full = torch.zeros(*probs.shape[:-1], self.target_size, dtype=probs.dtype, device=probs.device)
            probs = full.index_copy_(-1, ids, probs)
        return Proposal(self.target_ids(proposal.tokens, model), probs)


def check_maps(d2t: Tensor, t2d: Tensor, draft_size: int, target_size: int) -> None:
    """Refuse maps that are not each other's inverse: a wrong one makes every draft token another token."""
    if tuple(d2t.shape) != (draft_size,) or tuple(t2d.shape) != (target_size,):
        raise KconvError(
            f"d2t {list(d2t.shape)} and t2d {list(t2d.shape)} do not fit vocabularies of {draft_size} and {target_size}"
        )
    ids = torch.arange(draft_size) + d2t.long()
    if int(ids.min()) < 0 or int(ids.max()) >= target_size:
        raise KconvError(
            f"d2t leads to token {int(ids.max())} of a vocabulary of {target_size}", hint="d2t holds offsets, not ids"
        )
    if int(ids.unique().numel()) != draft_size:
        raise KconvError("d2t leads two draft tokens to one target token (all zero, as an untrained map would be?)")
    marked = t2d.bool().nonzero().flatten()
    if not torch.equal(marked, ids.sort().values):
        raise KconvError(f"t2d marks {marked.numel()} tokens, d2t leads to {draft_size} others")
