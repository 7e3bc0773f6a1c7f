"""How far two runs lie apart, token by token, in float64.

| figure | of each token | overall |
|---|---|---|
| `abs` | largest difference of its logits | max, median, 90th percentile |
| `kl` | KL(reference, candidate) of its next-token distributions, in nats | max, mean |
| `top1`, `topk` | same best token; share of the reference's k best that the candidate has too | mean |
| `rank` | Spearman's correlation of the two orders of the reference's k best | mean |
| `finite` | no NaN and no infinity on either side | count of tokens that are not |

Figures are taken over finite tokens; a token that is not finite fails any check. A comparison of nothing has no figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kconv.errors import KconvError

CHUNK = 64  # tokens compared at once: 64 x 163,840 float64 logits of both sides are 170 MB
TOP_K = 10


@dataclass(frozen=True)
class Tokens:
    """One value a token, [tokens] each; `row` and `position` say where in the batch a token stands."""

    row: torch.Tensor
    position: torch.Tensor
    abs: torch.Tensor
    kl: torch.Tensor
    top1: torch.Tensor
    topk: torch.Tensor
    rank: torch.Tensor
    finite: torch.Tensor

    def __len__(self) -> int:
        return len(self.row)

    def at(self, i: int) -> dict[str, Any]:
        """Where token `i` stands and its figures, as plain values."""
        return {
            "row": int(self.row[i]),
            "position": int(self.position[i]),
            "abs": plain(self.abs[i]),
            "kl": plain(self.kl[i]),
        }


@dataclass(frozen=True)
class Measures:
    """The comparison of one run: `tokens`, and what they say overall (`figures`; empty when no token is finite)."""

    tokens: Tokens
    figures: dict[str, float]

    @property
    def compared(self) -> int:
        """Number of tokens compared."""
        return len(self.tokens)

    @property
    def not_finite(self) -> int:
        """Tokens with a NaN or an infinity on either side."""
        return int((~self.tokens.finite).sum())

    def worst(self) -> dict[str, Any] | None:
        """The first token that is not finite, or else the one with the largest logit error; None of nothing."""
        t = self.tokens
        if not len(t):
            return None
        return t.at(int(t.finite.long().argmin()) if self.not_finite else int(t.abs.argmax()))

    def first_beyond(self, limits: dict[str, float]) -> dict[str, Any] | None:
        """The earliest position at which a token exceeds `max_abs` or `max_kl` of `limits`, or is not finite."""
        t = self.tokens
        bad = ~t.finite
        for value, key in ((t.abs, "max_abs"), (t.kl, "max_kl")):
            if key in limits:
                bad = bad | (value > limits[key])
        if not bad.any():
            return None
        at = torch.where(bad, t.position, t.position.max() + 1)
        return t.at(int(at.argmin()))


def plain(value: Any) -> float | None:
    """A float for JSON: None instead of NaN and infinities."""
    number = float(value)
    return number if abs(number) < float("inf") else None


def compare_logits(candidate: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor | None = None) -> Measures:
    """Compare logits [batch, length, vocab] where `mask` [batch, length] is not 0; raises KconvError if shapes differ."""
    if candidate.shape != reference.shape or candidate.ndim != 3:
        raise KconvError(
            f"logits {list(candidate.shape)} cannot be compared with the reference's {list(reference.shape)}",
            hint="give [batch, length, vocab] of the same tokens and the same vocabulary",
        )
    mask = torch.ones(candidate.shape[:2]) if mask is None else mask.cpu()
    if mask.shape != candidate.shape[:2]:
        raise KconvError(f"the mask {list(mask.shape)} does not fit logits {list(candidate.shape)}")
    row, position = mask.nonzero(as_tuple=True)
    ours, theirs = candidate[row.to(candidate.device), position.to(candidate.device)], reference[row, position]
    parts = [_tokens(a, b) for a, b in _chunks(ours, theirs)]
    columns = [torch.cat(c) for c in zip(*parts, strict=True)] if parts else [torch.zeros(0)] * 5 + [torch.zeros(0).bool()]
    tokens = Tokens(row, position, *columns)
    return Measures(tokens, _figures(tokens))


def _chunks(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for i in range(0, len(a), CHUNK):
        yield a[i : i + CHUNK].cpu().double(), b[i : i + CHUNK].cpu().double()


def _tokens(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """abs, kl, top1, topk, rank, finite of [tokens, vocab] each."""
    finite = ours.isfinite().all(-1) & theirs.isfinite().all(-1)
    p, q = theirs.log_softmax(-1), ours.log_softmax(-1)
    # Of exact distributions KL is never negative; what is left below zero is rounding.
    kl = (p.exp() * (p - q)).sum(-1).clamp(min=0)
    k = min(TOP_K, ours.shape[-1])
    best, mine = theirs.topk(k, dim=-1).indices, ours.topk(k, dim=-1).indices
    overlap = (best[:, :, None] == mine[:, None, :]).any(-1).double().mean(-1)
    places = ours.gather(-1, best).argsort(dim=-1, descending=True).argsort(dim=-1).double()
    apart = (places - torch.arange(k, dtype=torch.float64)).square().sum(-1)
    rank = 1 - 6 * apart / (k * (k * k - 1)) if k > 1 else torch.ones(len(ours), dtype=torch.float64)
    return (ours - theirs).abs().amax(-1), kl, (best[:, 0] == mine[:, 0]).double(), overlap, rank, finite


def _figures(t: Tokens) -> dict[str, float]:
    if not t.finite.any():
        return {}
    error, kl = t.abs[t.finite], t.kl[t.finite]
    return {
        "max_abs": float(error.max()),
        "median_abs": float(error.median()),
        "p90_abs": float(error.quantile(0.9)),
        "max_kl": float(kl.max()),
        "mean_kl": float(kl.mean()),
        "top1_agreement": float(t.top1[t.finite].mean()),
        "topk_overlap": float(t.topk[t.finite].mean()),
        "rank_agreement": float(t.rank[t.finite].mean()),
    }


@dataclass(frozen=True)
class StateError:
    """How far one hidden state or module output lies from the reference's.

    `error` is the largest token error over the root-mean-square norm of the reference's tokens; `median` that of the median
    token. `row` is the token (a row of [tokens, width]) with the largest error; infinite where a value is not finite.
    """

    error: float
    median: float
    row: int
    each: torch.Tensor


def compare_states(candidate: torch.Tensor, reference: torch.Tensor, keep: torch.Tensor | None = None) -> StateError:
    """Compare [tokens, width] with the reference's over the tokens that `keep` [tokens] marks."""
    a, b = candidate.detach().cpu().double(), reference.detach().cpu().double()
    apart, norm = (a - b).norm(dim=-1), b.norm(dim=-1)
    known = norm[norm.isfinite()]
    scale = known.square().mean().sqrt() if len(known) else torch.ones(())
    each = torch.nan_to_num(apart / scale.clamp(min=1e-30), nan=float("inf"), posinf=float("inf"))
    if keep is not None:
        each = torch.where(keep.cpu(), each, torch.zeros(()).double())
    if not len(each):
        return StateError(0.0, 0.0, 0, each)
    kept = each if keep is None else each[keep.cpu()]
    median = float(kept.median()) if len(kept) else 0.0
    return StateError(float(each.max()), median, int(each.argmax()), each)
