"""Eagle3 and Eagle 3.1 heads: one layer that drafts token after token from fused target states.

| part | rule |
|---|---|
| input | `[input_layernorm(embedding of the next token), hidden_norm(state)]`, twice the width, into the attention |
| state | first `fc(concat of taps)`, then the layer's own output: raw, or normed (`norm_output`, Eagle 3.1) |
| `fc_norm` | RMSNorm per tap before `fc` (Eagle 3.1); `norm_before_fc`: one `input_norm` over all taps |
| residual | the state; `norm_before_residual`: its normed form |
| logits | `lm_head(norm(output))` over the draft's vocabulary; `d2t` leads to the target's ids |
| positions | state t is paired with the embedding of token t + 1, both at position t, and predicts token t + 2 |

The attention is MLA (lightseek, k-l-lambda, NeMo) or grouped-query (Llama-style heads). It is causal over the committed
positions and the drafted ones.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kconv.errors import KconvError
from kconv.modeling.drafts.cache import DraftCache, Kept
from kconv.modeling.drafts.config import DraftConfig, DraftConfigError
from kconv.modeling.drafts.gqa import GQADraftAttention, Tables
from kconv.modeling.drafts.mask import decode_mask
from kconv.modeling.drafts.mla import MLADraftAttention
from kconv.modeling.drafts.model import BlockDraftModel
from kconv.modeling.mlp import KimiMLP
from kconv.modeling.norm import KimiRMSNorm
from kconv.modeling.situ import GatedActivation


class Eagle3Config(DraftConfig):
    """An Eagle3 head."""

    model_type = "eagle3"

    attention_mode: str = "mla"
    num_hidden_layers: int = 1
    sample_from_anchor: bool = True
    num_aux_hidden_states: int = 3
    norm_output: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    owns_lm_head: bool = True
    owns_embed_tokens: bool = True

    def check(self) -> None:
        """Refuse more than one layer."""
        super().check()
        if self.num_hidden_layers != 1:
            raise DraftConfigError(f"an Eagle3 head has one layer, the config has {self.num_hidden_layers}")
        if self.fc_norm and self.norm_before_fc:
            raise DraftConfigError("fc_norm and norm_before_fc are both set: the taps would be normed twice")


class Eagle3DecoderLayer(nn.Module):
    """The fused first layer: attention over `[embedding, state]`, then a gated MLP."""

    def __init__(self, config: Eagle3Config, layer_idx: int = 0) -> None:
        super().__init__()
        attention = MLADraftAttention if config.attention_mode == "mla" else GQADraftAttention
        self.self_attn = attention(config, layer_idx, in_features=2 * config.hidden_size)
        act = GatedActivation(config.hidden_act, config.activation_situ_beta, config.activation_situ_linear_beta)
        self.mlp = KimiMLP(config.hidden_size, config.intermediate_size, act)
        self.input_layernorm = KimiRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = KimiRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = KimiRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm_before_residual = config.norm_before_residual

    def forward(
        self, embeddings: Tensor, states: Tensor, past: Kept | None, tables: Tables, mask: Tensor | None
    ) -> tuple[Tensor, Kept]:
        """[B, Q, hidden] embeddings and states -> [B, Q, hidden], and what the attention keeps of them."""
        normed = self.hidden_norm(states)
        fused = torch.cat([self.input_layernorm(embeddings), normed], -1)
        attended, kept = self.self_attn(fused, past, tables, mask)
        hidden = (normed if self.norm_before_residual else states) + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), kept


class Eagle3DraftModel(BlockDraftModel):
    """An Eagle3 head; drafts by `extend` (committed tokens) and `step` (its own)."""

    config_class: Any = Eagle3Config
    config: Eagle3Config
    layer_class: ClassVar[Any] = Eagle3DecoderLayer
    _no_split_modules = ["Eagle3DecoderLayer"]
    main_input_name = "input_ids"

    def extra_modules(self, config: DraftConfig) -> None:
        """No norm behind `fc`; one norm before it where the config has it."""
        assert isinstance(config, Eagle3Config)
        del self.hidden_norm
        if config.norm_before_fc:
            self.input_norm = KimiRMSNorm(self.context_width, config.rms_norm_eps)

    @staticmethod
    def tap_count(config: DraftConfig) -> int:
        """Number of taps: listed, or as the config counts them (three by default)."""
        ids = config.target_layer_ids or config.aux_layer_ids
        return len(ids) if ids else getattr(config, "num_aux_hidden_states", 3)

    def project_target(self, target_hidden: Tensor) -> Tensor:
        """Concatenated taps [B, S, taps * width] -> states [B, S, hidden]."""
        if target_hidden.shape[-1] != self.context_width:
            raise KconvError(f"the states are {target_hidden.shape[-1]} wide, this head's fc takes {self.context_width}")
        if self.config.norm_before_fc:
            target_hidden = self.input_norm(target_hidden)
        if self.config.fc_norm:
            chunks = target_hidden.chunk(len(self.fc_norm), -1)
            target_hidden = torch.cat([norm(c) for norm, c in zip(self.fc_norm, chunks, strict=True)], -1)
        return self.fc(target_hidden)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        states: Tensor | None = None,
        cache: DraftCache | None = None,
        position_ids: Tensor | None = None,
        embed_tokens: nn.Module | None = None,
        **_: Any,
    ) -> Tensor:
        """One pass over tokens and the states before them.

        Args:
            input_ids: [B, Q], token t + 1 for each state t.
            states: [B, Q, hidden], from `project_target` or from the step before.
            cache: earlier positions; the new ones are written behind them.
            position_ids: [B, Q], the states' positions; by default those behind the cache.
            embed_tokens: the target's table, when the checkpoint holds no copy.

        Returns:
            [B, Q, hidden]: the next step's states (normed with `norm_output`).
        """
        if input_ids is None or states is None:
            raise KconvError("an Eagle3 head needs input_ids and states")
        embeddings = self.embed_block(input_ids, None if hasattr(self, "embed_tokens") else embed_tokens).to(states.dtype)
        cache = self.new_cache() if cache is None else cache
        past, queries = cache.get_seq_length(), states.shape[1]
        if position_ids is None:
            position_ids = past + torch.arange(queries, device=states.device)[None]
        tables = self._tables(position_ids, slice(None), states)
        mask = (
            decode_mask(queries, past + queries, dtype=states.dtype, device=states.device, causal=True) if queries > 1 else None
        )
        hidden, kept = self.layers[0](embeddings, states, cache.layers[0], tables, mask)
        cache.append(0, kept)
        return self.norm(hidden) if self.config.norm_output else hidden

    def head_logits(self, hidden: Tensor, output_head: Any = None) -> Tensor:
        """Logits [..., draft vocabulary] of what `forward` returned."""
        return self.compute_logits(hidden if self.config.norm_output else self.norm(hidden), output_head)
