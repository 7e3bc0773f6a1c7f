"""DSpark: DFlash whose anchor position predicts too, with a Markov head over the previous token and a confidence head.

| part | rule |
|---|---|
| block | position k predicts the token at anchor + 1 + k: `block_size` tokens are drafted, not one fewer |
| Markov head | adds `w2(f(w1[previous token]))` to the logits; `vanilla`: f is the identity, `gated`: times sigmoid(W [h; e]), |
| | `rnn`: s' = g s + (1 - g) tanh(c), output tanh(o), with [g; c; o] = W [s; e; h] |
| `w1`, `w2` | w1 is indexed by the target's ids, w2 spans the draft's vocabulary |
| confidence head | a logit per position from [h; e]: the chance that the target accepts it |

The backbone is grouped-query (RadixArk, RedHat, novita) or MLA with rotary embeddings (Inferact, lightseek) or without (NeMo).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kconv.modeling.drafts.config import DraftConfig, DraftConfigError, require_mask
from kconv.modeling.drafts.model import BlockDraftModel, Head
from kconv.modeling.drafts.sampling import Proposal, Sampler

MARKOV = ("vanilla", "gated", "rnn")


class DSparkConfig(DraftConfig):
    """A DSpark draft."""

    model_type = "dspark"

    sample_from_anchor: bool = True
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True

    def check(self) -> None:
        """Refuse unknown heads, and a confidence head that reads a Markov head that is not there."""
        super().check()
        require_mask(self)
        if self.markov_rank < 0 or (self.markov_rank and self.markov_head_type not in MARKOV):
            raise DraftConfigError(f"markov_head_type {self.markov_head_type!r} with rank {self.markov_rank}: known are {MARKOV}")
        if self.enable_confidence_head and self.confidence_head_with_markov and not self.markov_rank:
            raise DraftConfigError("confidence_head_with_markov needs a Markov head: markov_rank is 0")


class MarkovHead(nn.Module):
    """A low-rank bias on the logits by the previous token."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.kind, rank = config.markov_head_type, config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + config.hidden_size, 3 * rank)

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Bias [..., V] for one position: previous token [...] (target ids), hidden [..., C], and the carried state."""
        embedded = self.markov_w1(previous)
        if self.kind == "gated":
            embedded = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], -1))) * embedded
        elif self.kind == "rnn":
            state = torch.zeros_like(embedded) if state is None else state
            gate, candidate, out = self.joint_proj(torch.cat([state, embedded, hidden], -1)).chunk(3, -1)
            gate = gate.sigmoid()
            state = gate * state + (1 - gate) * candidate.tanh()
            embedded = out.tanh()
        return self.markov_w2(embedded), state

    def block(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """Biases [..., n, V] for known previous tokens [..., n] and hidden [..., n, C] (teacher forcing)."""
        state, rows = None, []
        for i in range(previous.shape[-1]):
            bias, state = self.step(previous[..., i], hidden[..., i, :], state)
            rows.append(bias)
        return torch.stack(rows, -2)


class ConfidenceHead(nn.Module):
    """A logit per position: how likely the target accepts it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, features: Tensor) -> Tensor:
        """[..., width] -> [...]."""
        return self.proj(features)[..., 0]


class DSparkDraftModel(BlockDraftModel):
    """DSpark over a grouped-query or MLA backbone."""

    config_class: Any = DSparkConfig
    config: DSparkConfig

    def extra_modules(self, config: DraftConfig) -> None:
        """The Markov and confidence heads that the config asks for."""
        assert isinstance(config, DSparkConfig)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = None
        if config.enable_confidence_head:
            extra = config.markov_rank if config.confidence_head_with_markov else 0
            self.confidence_head = ConfidenceHead(config.hidden_size + extra)

    def block_logits(self, hidden: Tensor, previous: Tensor, output_head: Head | None = None) -> Tensor:
        """Logits [..., n, V] at hidden [..., n, C] when the previous tokens [..., n] are known."""
        logits = self.compute_logits(hidden, output_head)
        return logits if self.markov_head is None else logits + self.markov_head.block(previous, hidden)

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """Acceptance logits [...] for hidden [..., C] behind the previous tokens [...]; None without that head."""
        if self.confidence_head is None:
            return None
        if self.config.confidence_head_with_markov and self.markov_head is not None:
            embedded = self.markov_head.markov_w1(previous).to(hidden.dtype)
            hidden = torch.cat([hidden, embedded], -1)
        return self.confidence_head(hidden)

    def propose(
        self, hidden: Tensor, anchor_ids: Tensor, output_head: Head | None, sampler: Sampler, min_confidence: float | None = None
    ) -> Proposal:
        """Tokens of a block, one after the other because each biases the next.

        With `min_confidence` the block ends before the first position whose acceptance chance is lower: it is decided by
        the tokens before that position alone, so that sampling stays exact.
        """
        drafted = self.drafting(hidden)
        logits = self.compute_logits(drafted, output_head)
        previous, state = anchor_ids, None
        tokens: list[Tensor] = []
        rows: list[Tensor] = []
        for i in range(drafted.shape[1]):
            if tokens and min_confidence is not None and self._unsure(drafted[:, i], previous, min_confidence):
                break
            row = logits[:, i]
            if self.markov_head is not None:
                bias, state = self.markov_head.step(previous, drafted[:, i], state)
                row = row + bias
            token, probs = sampler.pick(row)
            previous = self.vocabulary.target_ids(token, self)
            tokens.append(token)
            if probs is not None:
                rows.append(probs)
        proposal = Proposal(torch.stack(tokens, 1), torch.stack(rows, 1) if rows else None)
        return self.vocabulary.to_target(proposal, self)

    def _unsure(self, hidden: Tensor, previous: Tensor, least: float) -> bool:
        logit = self.confidence(hidden, previous)
        return logit is not None and bool((logit.sigmoid() < least).any())
