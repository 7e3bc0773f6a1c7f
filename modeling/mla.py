"""Multi-head latent attention without rotation (NoPE): the full-attention layers.

| part | computation | parameters (K3 sizes) |
|---|---|---|
| q | `q_b(norm(q_a(x)))`, or `q_proj(x)`; 128 + 64 per head | `q_a_proj` [1536, 7168], `q_b_proj` [18432, 1536] |
| latent | 512 latents, normed, and 64 key dimensions shared by all heads | `kv_a_proj_with_mqa` [576, 7168] |
| k, v | `kv_b(latents)`: 128 + 128 per head; the shared 64 join k unrotated | `kv_b_proj` [24576, 512] |
| scores | `q k^T * 192^-0.5`, causal, softmax in at least fp32 | |
| keys read | all earlier ones, or those that an indexer chooses (Kimi K3.1, `kconv.modeling.indexer`) | `indexer.*` |
| output | `o_proj(attention * sigmoid(g_proj(x)))`, gate optional | `g_proj`, `o_proj` |

The cache keeps latents and shared key dimensions, and the indexer's keys beside them. Short queries over a cache are
answered in latent space (`kv_b` folded into the query and the output), longer ones expand the latents; both are the same
function up to rounding. Folding needs the weight: where `kv_b_proj` is adapted, quantised or hooked, latents are expanded
whatever the length (`kconv.modeling.foldable`).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from kconv.modeling.dtypes import wide
from kconv.modeling.foldable import FoldableLinear, weight_of
from kconv.modeling.indexer import KimiIndexer
from kconv.modeling.norm import KimiRMSNorm

if TYPE_CHECKING:
    from kconv.modeling.cache import MLACacheLayer
    from kconv.modeling.segments import Segments


def causal_mask(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """Boolean [queries, keys], true where the key is not later than the query; the last query is the last key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, allowed: torch.Tensor | None, eager: bool
) -> torch.Tensor:
    """Attention of q [B, H, T, D] over k [B, H, S, D] and v [B, H, S, V]; returns [B, H, T, V].

    `allowed` is boolean and broadcasts to [B, H, T, S]; None means causal with aligned ends. `eager` writes the softmax
    out (in at least fp32, as the reference does) instead of calling torch's fused kernels.
    """
    queries, keys = q.shape[2], k.shape[2]
    if allowed is None and queries > 1 and (eager or queries != keys):
        allowed = causal_mask(queries, keys, q.device)
    if not eager:
        causal = allowed is None and queries > 1
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=causal, scale=scale)
    return softmax(q @ k.transpose(-1, -2) * scale, allowed) @ v


def softmax(scores: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last axis in at least fp32, zero where `allowed` is false; returns the dtype of `scores`."""
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    return scores.softmax(-1, dtype=wide(scores.dtype)).to(scores.dtype)


def by_head(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """x [B, H, T, in] times each head's matrix [H, in, out], which a broadcast product would copy for every row of a batch."""
    rows = x.transpose(0, 1).flatten(1, 2)
    return (rows @ matrices).unflatten(1, (x.shape[0], x.shape[2])).transpose(0, 1)


class KimiMLA(nn.Module):
    """One MLA layer; see the module's table. `config` needs only the MLA fields of KimiK3TextConfig: drafts reuse it."""

    def __init__(self, config: Any, indexer: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.heads, self.groups = config.num_attention_heads, config.num_attention_heads // config.num_key_value_heads
        self.nope, self.rope, self.value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.rank, self.q_rank = config.kv_lora_rank, config.q_lora_rank
        self.scale = (self.nope + self.rope) ** -0.5
        self.config = config
        hidden, q_width, eps = config.hidden_size, self.heads * (self.nope + self.rope), config.mla_norm_eps
        if self.q_rank is None:
            self.q_proj = nn.Linear(hidden, q_width, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, self.q_rank, bias=False)
            self.q_a_layernorm = KimiRMSNorm(self.q_rank, eps=eps)
            self.q_b_proj = nn.Linear(self.q_rank, q_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.rank + self.rope, bias=False)
        self.kv_a_layernorm = KimiRMSNorm(self.rank, eps=eps)
        self.kv_b_proj = FoldableLinear(self.rank, config.num_key_value_heads * (self.nope + self.value))
        self.o_proj = nn.Linear(self.heads * self.value, hidden, bias=False)
        self.gated = config.mla_use_output_gate
        if self.gated:
            self.g_proj = nn.Linear(hidden, self.heads * self.value, bias=False)
        self.indexer = None if indexer is None or self.q_rank is None else KimiIndexer(indexer, hidden, self.q_rank)

    @property
    def eager(self) -> bool:
        """Whether attention is written out rather than left to torch's fused kernels."""
        return getattr(self.config, "_attn_implementation", None) == "eager"

    def forward(
        self, x: torch.Tensor, segments: Segments | None = None, cache: MLACacheLayer | None = None,
        allowed: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """[batch, length, hidden] -> the same; `allowed` [B, 1, T, past + T] masks a pass over a filled cache."""
        latents = self.latents(x)
        past = 0
        if cache is not None:
            latents = cache.update(latents)
            past = latents.shape[1] - x.shape[1]
        if past:
            o = self._over_cache(x, latents, allowed)
        elif segments is None:
            o = attend(self.queries(x), *self.expand(latents), self.scale, self.selected_keys(x, latents), self.eager)
        else:
            x_flat, latents = segments.pack(x), segments.pack(latents)
            o = segments.unpack(self._by_sequence(x_flat, latents, segments.bounds).transpose(1, 2)).transpose(1, 2)
        return self.output(o, x)

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """Queries [B, H, T, nope + rope] of [B, T, hidden]."""
        q = self.q_proj(x) if self.q_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        return q.unflatten(-1, (self.heads, self.nope + self.rope)).transpose(1, 2)

    def latents(self, x: torch.Tensor) -> torch.Tensor:
        """Normed latents and shared key dimensions, [B, T, rank + rope], then index keys: all that a cache needs."""
        latent, shared = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], dim=-1)
        index = () if self.indexer is None else (self.indexer.keys(x),)
        return torch.cat([self.kv_a_layernorm(latent), shared, *index], dim=-1)

    def expand(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [B, H, S, nope + rope] and values [B, H, S, value] of latents [B, S, rank + rope or more]."""
        latent, shared = latents[..., : self.rank + self.rope].split([self.rank, self.rope], dim=-1)
        kv = self.kv_b_proj(latent).unflatten(-1, (-1, self.nope + self.value)).transpose(1, 2)
        kv = kv if self.groups == 1 else kv.repeat_interleave(self.groups, dim=1)
        k, v = kv.split([self.nope, self.value], dim=-1)
        return torch.cat([k, shared[:, None].expand(-1, self.heads, -1, -1)], dim=-1), v

    def output(self, o: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Gate heads [B, H, T, value] by the layer's input [B, T, hidden] and project them back to [B, T, hidden]."""
        o = o.transpose(1, 2).flatten(-2)
        return self.o_proj(o * self.g_proj(x).sigmoid() if self.gated else o)

    def selected_keys(self, x: torch.Tensor, latents: torch.Tensor, allowed: torch.Tensor | None = None) -> torch.Tensor | None:
        """Boolean mask [B, 1, T, S] of the keys a query may read, causality included; None reads all earlier ones.

        `latents` is everything the cache holds; `allowed` what padding leaves of it.
        """
        if self.indexer is None or latents.shape[1] <= self.indexer.topk:
            return allowed
        if allowed is None:
            allowed = causal_mask(x.shape[1], latents.shape[1], x.device)
        compressed = self.q_a_layernorm(self.q_a_proj(x))
        return self.indexer.select(x, compressed, latents[..., self.rank + self.rope :], allowed)

    def _by_sequence(self, x: torch.Tensor, latents: torch.Tensor, bounds: list[int]) -> torch.Tensor:
        """Each sequence of a flat row by itself: causal without a mask, and no work between sequences."""
        q, (k, v) = self.queries(x), self.expand(latents)
        parts = [
            attend(
                q[:, :, a:b],
                k[:, :, a:b],
                v[:, :, a:b],
                self.scale,
                self.selected_keys(x[:, a:b], latents[:, a:b]),
                self.eager,
            )
            for a, b in itertools.pairwise(bounds)
            if b > a
        ]
        return torch.cat(parts, dim=2) if parts else v

    def _over_cache(self, x: torch.Tensor, latents: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
        allowed = self.selected_keys(x, latents, allowed)
        # Expanding costs rank * (nope + value) per key and head, latent space this much more per query and key.
        extra = 2 * self.rank + self.rope - (self.nope + self.rope + self.value)
        costly = x.shape[1] * extra > self.rank * (self.nope + self.value)
        weight = None if costly else weight_of(self.kv_b_proj)
        if weight is None:
            return attend(self.queries(x), *self.expand(latents), self.scale, allowed, self.eager)
        return self._in_latent_space(self.queries(x), latents, weight, allowed)

    def _in_latent_space(
        self, q: torch.Tensor, latents: torch.Tensor, weight: torch.Tensor, allowed: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention with `kv_b`'s weight folded into queries and outputs: keys and values stay one row of `latents` a token."""
        up = weight.view(-1, self.nope + self.value, self.rank)
        up = up if self.groups == 1 else up.repeat_interleave(self.groups, dim=0)
        to_key, to_value = up.split([self.nope, self.value], dim=1)
        nope, rope = q.split([self.nope, self.rope], dim=-1)
        folded = torch.cat([by_head(nope, to_key), rope], dim=-1)
        rows = latents[..., : self.rank + self.rope]
        scores = (folded.flatten(1, 2) @ rows.transpose(1, 2)).unflatten(1, q.shape[1:3]) * self.scale
        if allowed is None and q.shape[2] > 1:
            allowed = causal_mask(q.shape[2], latents.shape[1], q.device)
        weights = softmax(scores, allowed)
        read = (weights.flatten(1, 2) @ latents[..., : self.rank]).unflatten(1, q.shape[1:3])
        return by_head(read, to_value.transpose(1, 2))
