"""How tokens are picked from logits: greedily, or from softmax(logits / temperature) cut to top-k and top-p."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kconv.errors import KconvError
from kconv.modeling.dtypes import widen


@dataclass
class Proposal:
    """What a draft proposes: tokens [B, n] in the target's ids and, when sampled, the distributions [B, n, V] they came from."""

    tokens: Tensor
    probs: Tensor | None = None


@dataclass
class Sampler:
    """Greedy at temperature 0; raises KconvError for parameters out of range."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise KconvError(
                f"temperature {self.temperature}, top_k {self.top_k}, top_p {self.top_p}: the first two are not negative, "
                "top_p lies in (0, 1]"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0

    def probs(self, logits: Tensor) -> Tensor:
        """The distribution [..., V] tokens are drawn from, in at least fp32; not for greedy picking."""
        scores = widen(logits) / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            best, where = scores.topk(self.top_k, -1)
            scores = torch.full_like(scores, float("-inf")).scatter(-1, where, best)
        probs = scores.softmax(-1)
        if self.top_p < 1:
            ordered, order = probs.sort(-1, descending=True)
            ordered = ordered * (ordered.cumsum(-1) - ordered < self.top_p)
            probs = torch.zeros_like(probs).scatter(-1, order, ordered)
            probs = probs / probs.sum(-1, keepdim=True)
        return probs

    def draw(self, probs: Tensor) -> Tensor:
        """One token per distribution of probs [..., V]."""
        flat = torch.multinomial(probs.flatten(0, -2), 1, generator=self.generator)
        return flat.view(probs.shape[:-1])

    def pick(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens [...] for logits [..., V], and the distributions they were drawn from (None when greedy)."""
        if self.greedy:
            return logits.argmax(-1), None
        probs = self.probs(logits)
        return self.draw(probs), probs
