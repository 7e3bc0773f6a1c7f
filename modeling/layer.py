"""One decoder layer: attention (KDA or MLA) and an MLP (dense or MoE) on attention residuals or a plain stream."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from kconv.modeling.cache import KimiK3Cache
from kconv.modeling.config import KimiK3TextConfig
from kconv.modeling.frozen import freeze
from kconv.modeling.kda import KimiDeltaAttention
from kconv.modeling.mla import KimiMLA
from kconv.modeling.mlp import KimiMLP
from kconv.modeling.moe import KimiMoE
from kconv.modeling.norm import KimiRMSNorm
from kconv.modeling.residual import SourceScore, mix
from kconv.modeling.segments import Segments
from kconv.modeling.situ import GatedActivation


@dataclass(frozen=True)
class Layout:
    """What the layers of a forward pass share: sequences, cache, and the mask [B, 1, T, past + T] over a filled cache."""

    segments: Segments | None = None
    cache: KimiK3Cache | None = None
    allowed: torch.Tensor | None = None


class KimiK3DecoderLayer(GradientCheckpointingLayer):
    """Layer `index` (0-based) of a Kimi K3 or Kimi-Linear model."""

    def __init__(self, config: KimiK3TextConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.kind = config.layer_kinds[index]
        block = config.attn_res_block_size
        self.starts_block = block is not None and index % block == 0
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = KimiMLA(config, config.indexer_of(index)) if self.kind == "mla" else KimiDeltaAttention(config)
        experts = config.experts_of(index)
        act = GatedActivation(config.hidden_act, config.activation_situ_beta, config.activation_situ_linear_beta)
        self.sparse = experts > 0
        self.mlp = KimiMoE(config, experts) if experts else KimiMLP(hidden, config.intermediate_size, act)
        self.input_layernorm = KimiRMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = KimiRMSNorm(hidden, eps=eps)
        if block is not None:
            self.self_attention_res_norm, self.mlp_res_norm = (KimiRMSNorm(hidden, eps=eps) for _ in range(2))
            self.self_attention_res_proj, self.mlp_res_proj = (SourceScore(hidden) for _ in range(2))
            if index == 0:
                freeze(self.self_attention_res_norm)
                freeze(self.self_attention_res_proj)

    def forward(self, prefix: torch.Tensor, layout: Layout, *blocks: torch.Tensor) -> torch.Tensor:
        """Running prefix [batch, length, hidden] before the layer -> after it, given the finished `blocks` of that shape.

        Where `starts_block`, the incoming prefix becomes a block: here for this layer, in the model for later ones.
        """
        x = mix(prefix, blocks, self.self_attention_res_norm, self.self_attention_res_proj) if blocks else prefix
        a = self.attend(self.input_layernorm(x), layout)
        if self.starts_block:
            blocks, prefix = (*blocks, prefix), a.to(prefix.dtype)
        else:
            prefix = prefix + a
        x = mix(prefix, blocks, self.mlp_res_norm, self.mlp_res_proj) if blocks else prefix
        narrow, x = self.post_attention_layernorm(x, both=True)
        # The router reads what is not yet rounded: a rounding there can send a token to another expert.
        return prefix + (self.mlp(narrow, x) if self.sparse else self.mlp(narrow))

    def attend(self, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The attention of this layer over its normed input."""
        with nullcontext() if layout.cache is None else layout.cache.layer(self.index, x.device) as cache:
            if self.kind == "mla":
                return self.self_attn(x, layout.segments, cache, layout.allowed)
            return self.self_attn(x, layout.segments, cache)
