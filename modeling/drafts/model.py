"""What all block drafts share: fused target states as context, a pre-norm stack over `[context | block]`, borrowed tables.

| part | rule |
|---|---|
| `fc`, `hidden_norm` | `hidden_norm(fc(concat of taps))`, once, handed unchanged to every layer |
| `fc_norm` | optional RMSNorm per tap before `fc` (Eagle 3.1, DSpark) |
| `layers` | pre-norm attention and gated MLP; the norms see the block alone |
| embedding and head | the frozen target's, unless the checkpoint holds copies (`owns_embed_tokens`, `owns_lm_head`) |

Two ways in: `forward` takes context and blocks at once (training, goldens), `materialize` and `forward_block` take them
apart through a `DraftCache` (decoding).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init

from kconv.errors import KconvError
from kconv.modeling.drafts.cache import DraftCache
from kconv.modeling.drafts.config import DraftConfig
from kconv.modeling.drafts.gqa import Tables
from kconv.modeling.drafts.layer import DraftDecoderLayer
from kconv.modeling.drafts.mask import decode_mask
from kconv.modeling.drafts.sampling import Proposal, Sampler
from kconv.modeling.drafts.vocab import DraftVocabulary
from kconv.modeling.norm import KimiRMSNorm
from kconv.modeling.strict import StrictPreTrainedModel

Head = Callable[[Tensor], Tensor]


class BlockDraftModel(StrictPreTrainedModel):
    """A draft that predicts a whole block in one pass; subclasses set `config_class` and `layer_class`."""

    config_class = DraftConfig
    layer_class: ClassVar[type[DraftDecoderLayer]] = DraftDecoderLayer
    base_model_prefix = ""
    main_input_name = "noise_embedding"
    _no_split_modules = ["DraftDecoderLayer"]
    _supports_sdpa = True
    config: DraftConfig

    def __init__(self, config: DraftConfig) -> None:
        config.check()  # it may have been changed since it was made
        super().__init__(config)
        width = config.target_hidden_size or config.hidden_size
        taps = self.tap_count(config)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(KimiRMSNorm(width, config.rms_norm_eps) for _ in range(taps))
        self.context_width = taps * width
        self.fc = nn.Linear(self.context_width, config.hidden_size, bias=False)
        self.hidden_norm = KimiRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers: Any = nn.ModuleList(self.layer_class(config, i) for i in range(config.num_hidden_layers))
        self.norm = KimiRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.vocabulary = DraftVocabulary.of(config)
        if config.owns_embed_tokens:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.owns_lm_head:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size or config.vocab_size, bias=False)
        if config.owns_vocab_maps:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size or config.vocab_size, dtype=torch.long))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.extra_modules(config)
        self.post_init()

    @property
    def input_embedding_scale(self) -> float:
        """What embedded blocks are multiplied by; trainers that embed them themselves read it here."""
        return self.config.input_embedding_scale

    @property
    def target_layer_ids(self) -> list[int]:
        """The tapped target layers (0-based outputs, in order); raises where the checkpoint leaves their meaning open."""
        return list(self.config.taps())

    def extra_modules(self, config: DraftConfig) -> None:
        """Heads that a family adds, built before weights are initialised."""

    @staticmethod
    def tap_count(config: DraftConfig) -> int:
        """Number of tapped target layers, whatever convention their ids have."""
        ids = config.target_layer_ids if config.target_layer_ids is not None else config.aux_layer_ids
        if not ids:
            raise KconvError("the draft's config names no target layers, so the width of `fc` is unknown")
        return len(ids)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, KimiRMSNorm):
            init.ones_(module.weight)

    def project_target(self, target_hidden: Tensor) -> Tensor:
        """Concatenated taps [B, S, taps * width] -> context [B, S, hidden]."""
        if target_hidden.shape[-1] != self.context_width:
            raise KconvError(
                f"the context is {target_hidden.shape[-1]} wide, this draft's fc takes {self.context_width}",
                hint="capture the target layers that the draft's config names, in its order",
            )
        if self.config.fc_norm:
            chunks = target_hidden.chunk(len(self.fc_norm), -1)
            target_hidden = torch.cat([norm(c) for norm, c in zip(self.fc_norm, chunks, strict=True)], -1)
        return self.hidden_norm(self.fc(target_hidden))

    def forward(
        self,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | Mapping[str, Tensor] | None = None,
        noise_embedding: Tensor | None = None,
        target_hidden: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Hidden states of blocks behind their context.

        Args:
            position_ids: [B, S + Q], context then blocks; not needed without RoPE, nor for one block right behind its context.
            attention_mask: additive, [B, 1, Q, S + Q], one for all layers or one per layer type; None for one block.
            noise_embedding: [B, Q, hidden], the embedded blocks.
            target_hidden: [B, S, taps * width], the tapped states, concatenated.

        Returns:
            [B, Q, hidden] after the final norm.
        """
        if noise_embedding is None or target_hidden is None:
            raise KconvError("a block draft needs noise_embedding and target_hidden")
        context, hidden = self.project_target(target_hidden), noise_embedding
        length, queries = context.shape[1], hidden.shape[1]
        if position_ids is None and attention_mask is None:
            position_ids = torch.arange(length + queries, device=hidden.device)[None]
        before = self._tables(position_ids, slice(None, length), hidden)
        here = self._tables(position_ids, slice(length, None), hidden)
        for i, layer in enumerate(self.layers):
            mask = self._mask(i, attention_mask, queries, length + queries, hidden)
            hidden, _kept = layer(hidden, layer.self_attn.keep(context, before), here, mask)
        return self.norm(hidden)

    def new_cache(self) -> DraftCache:
        """An empty cache."""
        return DraftCache(len(self.layers))

    def materialize(self, target_hidden: Tensor, cache: DraftCache, position_ids: Tensor | None = None) -> None:
        """Write the context states [B, S, taps * width] behind the cache, at `position_ids` [B, S] or the next ones."""
        cache.require_cropped()
        context = self.project_target(target_hidden)
        tables = self._next_tables(cache, position_ids, context)
        for i, layer in enumerate(self.layers):
            cache.append(i, layer.self_attn.keep(context, tables))
        cache.committed = cache.get_seq_length()

    def forward_block(self, noise_embedding: Tensor, cache: DraftCache, position_ids: Tensor | None = None) -> Tensor:
        """Hidden states [B, Q, hidden] of one block behind the cached context; the block stays in the cache until `crop`."""
        cache.require_cropped()
        hidden, queries = noise_embedding, noise_embedding.shape[1]
        keys = cache.committed + queries
        tables = self._next_tables(cache, position_ids, hidden)
        for i, layer in enumerate(self.layers):
            hidden, kept = layer(hidden, cache.layers[i], tables, self._mask(i, None, queries, keys, hidden))
            cache.append(i, kept)
        return self.norm(hidden)

    def embed_block(self, input_ids: Tensor, embed_tokens: nn.Module | None = None) -> Tensor:
        """Rows of the embedding table [B, Q, hidden], the target's or the checkpoint's copy, scaled as the config says."""
        table: Any = embed_tokens if embed_tokens is not None else getattr(self, "embed_tokens", None)
        if table is None:
            raise KconvError("this draft owns no embedding table", hint="pass the target's: target.get_input_embeddings()")
        return table(input_ids) * self.config.input_embedding_scale

    def compute_logits(self, hidden: Tensor, output_head: Head | None = None) -> Tensor:
        """Logits [..., vocab] of hidden [..., hidden] by the target's head or its own, multiplied and soft-capped."""
        head: Any = getattr(self, "lm_head", None) or output_head
        if head is None:
            raise KconvError("this draft owns no output head", hint="pass the target's: target.get_output_embeddings()")
        logits = head(hidden)
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def propose(self, hidden: Tensor, anchor_ids: Tensor, output_head: Head | None, sampler: Sampler) -> Proposal:
        """Tokens for a block's hidden states [B, block_size, hidden], behind the anchors [B]."""
        logits = self.compute_logits(self.drafting(hidden), output_head)
        tokens, probs = sampler.pick(logits)
        return self.vocabulary.to_target(Proposal(tokens, probs), self)

    def drafting(self, hidden: Tensor) -> Tensor:
        """The positions that predict: all of them, or all but the anchor's."""
        return hidden if self.config.sample_from_anchor else hidden[:, 1:]

    def _mask(
        self, layer: int, given: Tensor | Mapping[str, Tensor] | None, queries: int, keys: int, like: Tensor
    ) -> Tensor | None:
        kind = (self.config.layer_types or [])[layer]
        if isinstance(given, Mapping):
            given = given[kind]
        if given is not None:
            return given.to(like.dtype)
        window = self.config.sliding_window if kind == "sliding_attention" else None
        return decode_mask(
            queries, keys, dtype=like.dtype, device=like.device, causal=self.config.causal_layers[layer],
            window=window, window_rule=self.config.window_rule,
        )  # fmt: skip

    def _tables(self, position_ids: Tensor | None, where: slice, like: Tensor) -> Tables:
        rope = self.config.rope
        if rope is None:
            return None
        if position_ids is None:
            raise KconvError("a draft with rotary embeddings needs position_ids when a mask is given")
        return rope.tables(position_ids[:, where], like.dtype)

    def _next_tables(self, cache: DraftCache, position_ids: Tensor | None, like: Tensor) -> Tables:
        if position_ids is None:
            position_ids = cache.committed + torch.arange(like.shape[1], device=like.device)[None]
        return self._tables(position_ids, slice(None), like)
