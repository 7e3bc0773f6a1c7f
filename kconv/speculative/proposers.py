"""How each family drafts between two verifications of the target.

| family | context after a step | one proposal |
|---|---|---|
| DFlash, DFlash2, DSpark | `materialize` their states | one pass over `[anchor, MASK, ...]`; argmax, draw, walk or Markov |
| Eagle3 | committed states paired with the tokens that followed them | one pass a token, each fed with the one before |

The anchor is the last token the target gave; it has no target state yet, so the context ends before it.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from kconv.errors import KconvError
from kconv.modeling.drafts.cache import DraftCache
from kconv.modeling.drafts.eagle3 import Eagle3DraftModel
from kconv.modeling.drafts.model import BlockDraftModel
from kconv.modeling.drafts.sampling import Proposal, Sampler
from kconv.speculative.target import Target


class Proposer(ABC):
    """A draft during decoding of one sequence."""

    most: int

    @abstractmethod
    def commit(self, tokens: Tensor, hidden: Tensor) -> None:
        """Take tokens [1, n] that the target has processed, with its tapped states [1, n, taps * width]."""

    @abstractmethod
    def propose(self, anchor: Tensor, count: int, sampler: Sampler) -> Proposal:
        """At most `count` tokens behind the anchor [1]."""


def proposer_for(draft: Any, target: Target, draft_tokens: int | None = None, min_confidence: float | None = None) -> Proposer:
    """The proposer of a draft.

    Args:
        draft: a native draft module.
        target: whose embedding and head it borrows.
        draft_tokens: how many tokens to draft at most; what the config says by default, required where it says nothing.
        min_confidence: end a DSpark block before a position whose acceptance chance is lower.
    """
    if isinstance(draft, Eagle3DraftModel):
        if draft_tokens is None:
            raise KconvError(
                "an Eagle3 head drafts as many tokens as it is asked for", hint="give draft_tokens, 3 to 7 are usual"
            )
        return ChainProposer(draft, target, draft_tokens)
    if isinstance(draft, BlockDraftModel):
        return BlockProposer(draft, target, draft_tokens, min_confidence)
    raise KconvError(f"{type(draft).__name__} is no draft that kconv can decode with")


class BlockProposer(Proposer):
    """DFlash, DFlash2 and DSpark: a block at a time."""

    def __init__(self, draft: BlockDraftModel, target: Target, draft_tokens: int | None, min_confidence: float | None) -> None:
        self.draft, self.target = draft, target
        config = draft.config
        trained = config.num_draft_tokens if config.block_size is not None or draft_tokens is None else draft_tokens
        self.most = trained if draft_tokens is None else draft_tokens
        if self.most > trained:
            raise KconvError(
                f"the draft was trained on blocks of {trained} drafted tokens, {self.most} are asked for",
                hint="positions beyond its block were never trained",
            )
        self.block_size = config.block_size or (self.most if config.sample_from_anchor else self.most + 1)
        self.cache: DraftCache = draft.new_cache()
        takes = "min_confidence" in inspect.signature(draft.propose).parameters
        if min_confidence is not None and not takes:
            raise KconvError(f"min_confidence: {type(draft).__name__} has no confidence head", hint="it is DSpark's")
        self.extra = {} if min_confidence is None else {"min_confidence": min_confidence}

    def commit(self, tokens: Tensor, hidden: Tensor) -> None:
        """Write the states behind the context."""
        self.draft.materialize(hidden.to(self.draft.dtype), self.cache)

    def propose(self, anchor: Tensor, count: int, sampler: Sampler) -> Proposal:
        """One pass over the block; the whole block even when fewer tokens are wanted, as it was trained."""
        ids = torch.full((1, self.block_size), self.draft.config.mask_token_id or 0, dtype=torch.long, device=anchor.device)
        ids[:, 0] = anchor
        own = hasattr(self.draft, "embed_tokens")
        block = self.draft.embed_block(ids, None if own else self.target.embedding).to(self.draft.dtype)
        length = self.cache.committed
        hidden = self.draft.forward_block(block, self.cache)
        self.cache.crop(length)
        proposal = self.draft.propose(hidden, anchor, self.target.head, sampler, **self.extra)
        return cut(proposal, count)


class ChainProposer(Proposer):
    """Eagle3: a token at a time."""

    def __init__(self, draft: Eagle3DraftModel, target: Target, draft_tokens: int) -> None:
        self.draft, self.target, self.most = draft, target, draft_tokens
        self.cache: DraftCache = draft.new_cache()
        self.pending: Tensor | None = None

    def commit(self, tokens: Tensor, hidden: Tensor) -> None:
        """Pair each state with the token after it; the last state waits for its token."""
        states = self.draft.project_target(hidden.to(self.draft.dtype))
        if self.pending is not None:
            states = torch.cat([self.pending, states], 1)
            followers = tokens
        else:
            followers = tokens[:, 1:]
        self.pending = states[:, -1:]
        if followers.shape[1]:
            self._run(followers, states[:, :-1])
            self.cache.committed = self.cache.get_seq_length()

    def propose(self, anchor: Tensor, count: int, sampler: Sampler) -> Proposal:
        """`count` steps from the waiting state and the anchor; the cache is left as it was."""
        if self.pending is None:
            raise KconvError("propose before commit: the head has no target state to start from")
        committed, states, token = self.cache.committed, self.pending, anchor[:, None]
        tokens, rows = [], []
        for _ in range(min(count, self.most)):
            states = self._run(token, states)[:, -1:]
            picked, probs = sampler.pick(self.draft.head_logits(states, self.target.head)[:, -1])
            step = self.draft.vocabulary.to_target(
                Proposal(picked[:, None], None if probs is None else probs[:, None]), self.draft
            )
            token = step.tokens
            tokens.append(token)
            if step.probs is not None:
                rows.append(step.probs)
        self.cache.crop(committed)
        return Proposal(torch.cat(tokens, 1), torch.cat(rows, 1) if rows else None)

    def _run(self, tokens: Tensor, states: Tensor) -> Tensor:
        return self.draft(input_ids=tokens, states=states, cache=self.cache, embed_tokens=self.target.embedding)


def cut(proposal: Proposal, count: int) -> Proposal:
    """The first `count` tokens of a proposal."""
    return Proposal(proposal.tokens[:, :count], None if proposal.probs is None else proposal.probs[:, :count])
