"""Grouped-query attention over `[context | block]`, as in the DFlash drafts for Kimi K2.5 and K3 (z-lab, modal).

| detail | rule |
|---|---|
| queries | from the block alone |
| keys, values | `k_proj`, `v_proj` of `[context | block]`; the context is the fused target state, not normed by the layer |
| q/k norm | RMSNorm over each head's channels, before rotation |
| positions | keys at their own positions, queries at the block's |
| `clip_qkv` | bounds the projection *weights* (MAX's `AttentionWithRope`), not with fused weights |
| scale | `head_dim ** -0.5`, or `attention_multiplier` |
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from kconv.modeling.drafts.cache import Kept, join
from kconv.modeling.drafts.config import DraftConfig
from kconv.modeling.norm import KimiRMSNorm

Tables = tuple[Tensor, Tensor] | None


class BoundedLinear(nn.Linear):
    """A Linear whose weight is bounded to [-clip, clip] as it is used; `clip` None leaves it as it is."""

    def __init__(self, in_features: int, out_features: int, bias: bool, clip: float | None) -> None:
        super().__init__(in_features, out_features, bias)
        self.clip = clip

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return F.linear(x, self.weight if self.clip is None else self.weight.clamp(-self.clip, self.clip), self.bias)


class GQADraftAttention(nn.Module):
    """Non-causal grouped-query attention of a block over its context and itself."""

    def __init__(self, config: DraftConfig, layer_idx: int, in_features: int | None = None) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
        self.head_dim = config.head_dim or config.hidden_size // self.heads
        self.rope = config.rope
        self.scale = getattr(config, "attention_multiplier", None) or self.head_dim**-0.5
        clip = getattr(config, "clip_qkv", None)
        self.stacked = bool(getattr(config, "stacked_qkv", False))
        width, bias = in_features or config.hidden_size, config.attention_bias
        sizes = [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]
        if self.stacked:
            self.qkv_proj = nn.Linear(width, sum(sizes), bias=bias)
        else:
            self.q_proj, self.k_proj, self.v_proj = (BoundedLinear(width, size, bias, clip) for size in sizes)
        self.sizes = sizes
        self.o_proj = nn.Linear(sizes[0], config.hidden_size, bias=bias)
        self.use_qk_norm = config.use_qk_norm
        if self.use_qk_norm:
            self.q_norm = KimiRMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = KimiRMSNorm(self.head_dim, config.rms_norm_eps)

    def project(self, x: Tensor, which: int) -> Tensor:
        """Queries (0), keys (1) or values (2) of x [B, S, width] as heads [B, heads, S, head_dim], not normed."""
        if self.stacked:
            out = self.qkv_proj(x).split(self.sizes, dim=-1)[which]
        else:
            out = (self.q_proj, self.k_proj, self.v_proj)[which](x)
        return out.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def keep(self, x: Tensor, tables: Tables) -> Kept:
        """What is kept of x [B, S, width]: keys, normed and rotated, and values, each [B, kv_heads, S, head_dim]."""
        k = self.project(x, 1)
        if self.use_qk_norm:
            k = self.k_norm(k)
        if self.rope is not None and tables is not None:
            k = self.rope.rotate(k, tables)
        return k, self.project(x, 2)

    def forward(self, hidden: Tensor, context: Kept | None, tables: Tables, mask: Tensor | None) -> tuple[Tensor, Kept]:
        """Attend from the block.

        Args:
            hidden: [B, Q, width], the normed block.
            context: what is kept of the context, from `keep`; None without context.
            tables: cos and sin at the block's positions.
            mask: additive, [B or 1, 1, Q, S + Q], or None.

        Returns:
            The output [B, Q, hidden] and what is kept of the block.
        """
        q = self.project(hidden, 0)
        if self.use_qk_norm:
            q = self.q_norm(q)
        if self.rope is not None and tables is not None:
            q = self.rope.rotate(q, tables)
        kept = self.keep(hidden, tables)
        k, v = join(context, kept)
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=self.scale, enable_gqa=self.heads != self.kv_heads)
        return self.o_proj(out.transpose(1, 2).flatten(2)), kept
