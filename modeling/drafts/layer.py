"""One draft layer: pre-norm attention over `[context | block]` and a gated MLP; the norms see the block alone."""

from __future__ import annotations

from torch import Tensor, nn

from kconv.modeling.drafts.cache import Kept
from kconv.modeling.drafts.config import DraftConfig
from kconv.modeling.drafts.gqa import GQADraftAttention, Tables
from kconv.modeling.drafts.mla import MLADraftAttention
from kconv.modeling.mlp import KimiMLP
from kconv.modeling.norm import KimiRMSNorm
from kconv.modeling.situ import GatedActivation


class DraftDecoderLayer(nn.Module):
    """Pre-norm attention over `[context | block]` and a gated MLP."""

    def __init__(self, config: DraftConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = self.attention(config, layer_idx)
        act = GatedActivation(config.hidden_act, config.activation_situ_beta, config.activation_situ_linear_beta)
        self.mlp = KimiMLP(config.hidden_size, config.intermediate_size, act)
        self.input_layernorm = KimiRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = KimiRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.residual_multiplier = getattr(config, "residual_multiplier", 1.0)

    def attention(self, config: DraftConfig, layer_idx: int) -> nn.Module:
        """The attention module the configuration asks for."""
        return MLADraftAttention(config, layer_idx) if config.attention_mode == "mla" else GQADraftAttention(config, layer_idx)

    def add(self, residual: Tensor, branch: Tensor) -> Tensor:
        """The residual stream after a sublayer."""
        return residual + (branch if self.residual_multiplier == 1.0 else self.residual_multiplier * branch)

    def forward(self, hidden: Tensor, context: Kept | None, tables: Tables, mask: Tensor | None) -> tuple[Tensor, Kept]:
        """[B, Q, hidden] -> [B, Q, hidden] and what is kept of the block; arguments as the attention's."""
        attended, kept = self.self_attn(self.input_layernorm(hidden), context, tables, mask)
        hidden = self.add(hidden, attended)
        return self.add(hidden, self.mlp(self.post_attention_layernorm(hidden))), kept
