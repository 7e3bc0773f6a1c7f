"""The sparse-attention indexer of Kimi K3.1's MLA layers: which keys a query may read.

| part | computation | parameters (K3.1 sizes) |
|---|---|---|
| q | `wq_b(norm(q_a(x)))`, 128 per index head | `wq_b` [4096, 1536] |
| k | `LayerNorm(wk(x))`, one per token, kept in the cache beside the latents | `wk` [128, 7168], `k_norm` [128], bias optional |
| w | `weights_proj(x)` | `weights_proj` [32, 7168] |
| score of query t and key s | sum over heads of `w * relu(q . k)`, in at least fp32 | |
| keys read | of those that causality and padding allow, the `topk` best; all of them where there are no more | |

Nothing rotates. All attention heads read the same keys; up to `topk` tokens it is dense attention. Among equal scores (keys
that no head wakes for score exactly 0) any may be chosen. Scale factors change no
selected set; those of DeepSeek-V3.2 are kept, so that the rounding is its own. Selection has no gradient.
Source: DeepSeek-V3.2's rule, which public engines apply to K3.1; unverified against the official code, which was not seen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kconv.modeling.dtypes import no_autocast, widen
from kconv.modeling.frozen import freeze

SCORES_AT_ONCE = 1 << 26  # numbers of query x head x key that one step holds: 256 MB in fp32


class KimiIndexer(nn.Module):
    """Chooses keys; `config` is a model's `indexer_config`, the widths are those of the layer's input and compressed queries."""

    def __init__(self, config: dict[str, Any], hidden: int, q_rank: int) -> None:
        super().__init__()
        self.heads, self.dim, self.topk = config["num_heads"], config["head_dim"], config["topk"]
        self.wq_b = nn.Linear(q_rank, self.heads * self.dim, bias=False)
        self.wk = nn.Linear(hidden, self.dim, bias=False)
        self.k_norm = nn.LayerNorm(self.dim, eps=config["norm_eps"], bias=config["norm_bias"])
        self.weights_proj = nn.Linear(hidden, self.heads, bias=False)
        freeze(self)

    @torch.no_grad()
    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """Index keys [B, T, dim] of the layer's input [B, T, hidden]."""
        return self.k_norm(self.wk(x))

    @torch.no_grad()
    def select(self, x: torch.Tensor, compressed: torch.Tensor, keys: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        """Boolean [B, 1, T, S], true where a query reads a key.

        Args:
            x: input [B, T, hidden].
            compressed: normed compressed queries [B, T, q_rank].
            keys: index keys [B, S, dim], the cached ones first.
            allowed: what causality and padding allow; broadcasts to [B, 1, T, S].
        """
        batch, queries, total = x.shape[0], x.shape[1], keys.shape[1]
        allowed = allowed.expand(batch, 1, queries, total)
        step = max(1, SCORES_AT_ONCE // (batch * self.heads * total))
        parts = [
            self._some(x[:, a : a + step], compressed[:, a : a + step], keys, allowed[:, 0, a : a + step])
            for a in range(0, queries, step)
        ]
        return torch.cat(parts, dim=1)[:, None]

    def _some(self, x: torch.Tensor, compressed: torch.Tensor, keys: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        q = self.wq_b(compressed).unflatten(-1, (self.heads, self.dim))
        weights = widen(self.weights_proj(x)) * self.heads**-0.5
        with no_autocast(x):
            scores = (widen(q) @ widen(keys).transpose(-1, -2).unsqueeze(1) * self.dim**-0.5).relu()
            scores = (weights.unsqueeze(-2) @ scores).squeeze(-2)
        scores = scores.masked_fill(~allowed, float("-inf"))
        best = scores.topk(min(self.topk, scores.shape[-1]), dim=-1).indices
        # Rows with fewer than topk allowed keys were filled up with others: those stay out.
        return torch.zeros_like(allowed).scatter(-1, best, True) & allowed
