"""The Kimi K3 text model and its language-model head, as Transformers models.

`output_hidden_states` gives what the reference gives: the embedding, the running prefix after each layer, and in place of
the last one the final norm's output. Padding, packing and the cache are described in `segments` and `cache`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from kconv.errors import KconvError
from kconv.modeling import decode_graph, peft_targets
from kconv.modeling import segments as seg
from kconv.modeling.arguments import LOSS, PACKING, boundaries, check_keywords
from kconv.modeling.cache import KimiK3Cache
from kconv.modeling.compat import CACHE_NAME
from kconv.modeling.config import KimiK3TextConfig, check
from kconv.modeling.dtypes import widen
from kconv.modeling.init import initialise
from kconv.modeling.kda import KimiDeltaAttention
from kconv.modeling.layer import KimiK3DecoderLayer, Layout
from kconv.modeling.loss import causal_lm_loss
from kconv.modeling.mla import causal_mask
from kconv.modeling.norm import KimiRMSNorm
from kconv.modeling.residual import SourceScore, mix
from kconv.modeling.static_cache import StaticKimiK3Cache
from kconv.modeling.strict import StrictPreTrainedModel

CACHES = (None, "dynamic", "static", "offloaded")  # generation's `cache_implementation`
FP32_PARAMETERS = ("A_log", "dt_bias", "q_conv1d", "k_conv1d", "v_conv1d", "o_norm", "e_score_correction_bias")
STATIC_TOKENS = 256  # a static cache holds a multiple of so many


class KimiK3PreTrainedModel(StrictPreTrainedModel):
    """Base of the family: loading, saving and initialisation."""

    config: KimiK3TextConfig
    config_class = KimiK3TextConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["KimiK3DecoderLayer"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _keep_in_fp32_modules_strict = list(FP32_PARAMETERS)
    _supports_sdpa = True
    _supports_flash_attn = False
    _supports_flex_attn = False

    def post_init(self) -> None:
        """Transformers' last step of construction; PEFT is told which modules to adapt by default."""
        peft_targets.register(self.config.model_type)
        super().post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if not initialise(module, self.config.initializer_range):
            super()._init_weights(module)

    def set_kda_backend(self, backend: str) -> None:
        """Run KDA on `torch`, on `fla`, or on whichever fits the device (`auto`, the default)."""
        for module in self.modules():
            if isinstance(module, KimiDeltaAttention):
                module.backend = backend  # type: ignore[assignment]


class KimiK3TextModel(KimiK3PreTrainedModel):
    """Embedding, decoder layers, final mix and norm; raises Problems for a config that was changed into one of no model."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # a checkpoint with a head holds this model too

    def __init__(self, config: KimiK3TextConfig) -> None:
        check(config)
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(KimiK3DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = KimiRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.attn_res_block_size is not None:
            self.output_attn_res_norm = KimiRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            self.output_attn_res_proj = SourceScore(config.hidden_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding."""
        self.embed_tokens = value  # type: ignore[assignment]

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: KimiK3Cache | None = None,
        past_key_values: KimiK3Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: torch.Tensor | None = None,
        padding_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states [batch, length, hidden] of ids or embeddings; see `segments` for masks and packed documents.

        `attention_mask` [batch, past + length]; `padding_mask` (true where padding) is its complement. Positions matter
        only where they restart, since no layer rotates anything.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise KconvError("give exactly one of input_ids and inputs_embeds")
        check_keywords(kwargs, PACKING, type(self).__name__)
        self._check_outputs()
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = own_cache(cache if cache is not None else past_key_values)
        if attention_mask is None and padding_mask is not None:
            attention_mask = ~padding_mask.bool()
        cu_seqlens = boundaries(cu_seqlens, kwargs, attention_mask)
        segments, allowed = layout_of(x, attention_mask, position_ids, cu_seqlens, 0 if cache is None else cache.tokens)
        cache = self._cache(cache, use_cache, packed=segments is not None and segments.packed)
        record = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        allowed = allowed if cache is None else cache.allowed(allowed)
        x, states = self._run(x, Layout(segments, cache, allowed), bool(record))
        if cache is not None:
            cache.advance(x.shape[1])
        outputs: dict[str, Any] = {"last_hidden_state": x, "hidden_states": states, CACHE_NAME: cache}
        return BaseModelOutputWithPast(**outputs)

    def _check_outputs(self) -> None:
        """A config can ask for outputs as a keyword can."""
        asked = {n: True for n in ("output_attentions", "output_router_logits") if getattr(self.config, n, False)}
        check_keywords(asked, frozenset(), f"{type(self).__name__} with this config")

    def _run(self, x: torch.Tensor, layout: Layout, record: bool) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
        dtype, states = x.dtype, [x]
        x = widen(x) if self.config.residual_in_fp32 else x
        blocks: tuple[torch.Tensor, ...] = ()
        for layer in self.layers:
            y = layer(x, layout, *blocks)
            blocks = (*blocks, x) if layer.starts_block else blocks
            x = y
            if record:
                states.append(x.to(dtype))
        if blocks:
            x = mix(x, blocks, self.output_attn_res_norm, self.output_attn_res_proj)
        x = self.norm(x)
        return x, (*states[:-1], x) if record else None

    def _cache(self, cache: KimiK3Cache | None, use_cache: bool | None, packed: bool) -> KimiK3Cache | None:
        """The given cache, a new one where one is wanted, or None; raises KconvError where one is asked for and cannot be."""
        checkpointing = self.training and torch.is_grad_enabled() and any(layer.gradient_checkpointing for layer in self.layers)
        if cache is None and not use_cache:
            wanted = use_cache is None and self.config.use_cache and not (self.training or packed)
            return KimiK3Cache(self.config) if wanted else None
        if packed:
            raise KconvError("packed documents cannot be cached: a cache keeps one sequence a row", hint="pass use_cache=False")
        if checkpointing:
            raise KconvError("gradient checkpointing runs layers twice and cannot fill a cache", hint="pass use_cache=False")
        return KimiK3Cache(self.config) if cache is None else cache


def own_cache(cache: Any) -> KimiK3Cache | None:
    """`cache` itself; raises KconvError when it is another class's, which has no place for KDA states."""
    if cache is None or isinstance(cache, KimiK3Cache):
        return cache
    raise KconvError(
        f"a {type(cache).__name__} cannot hold KDA states", hint="pass kconv.modeling.KimiK3Cache(model.config), or no cache"
    )


def layout_of(
    x: torch.Tensor,
    mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    past: int,
) -> tuple[seg.Segments | None, torch.Tensor | None]:
    """Sequences of x [batch, length, hidden] and the mask over `past` cached tokens; raises KconvError for what does not fit."""
    batch, length = x.shape[:2]
    if mask is not None and (mask.ndim != 2 or mask.shape[0] != batch or mask.shape[1] != past + length):
        raise KconvError(
            f"attention_mask {list(mask.shape)} does not fit {batch} rows of {past} cached and {length} new tokens",
            hint=f"give [{batch}, {past + length}] with 1 for tokens and 0 for padding, or document numbers",
        )
    segments = None
    if cu_seqlens is not None:
        segments = seg.from_cu_seqlens(cu_seqlens.to(x.device), batch, length)
    elif mask is not None:
        segments = seg.from_mask(mask[:, past:].to(x.device))
    elif position_ids is not None and past == 0 and length > 1:
        segments = seg.from_position_ids(position_ids.to(x.device), batch)
    return segments, _over_cache(mask, past, length)


def _over_cache(mask: torch.Tensor | None, past: int, length: int) -> torch.Tensor | None:
    """Boolean [batch, 1, length, past + length] over a cache with padding; None where plain causality is right."""
    if mask is None or past == 0 or bool((mask != 0).all()):
        return None
    allowed = (mask != 0)[:, None, None] & causal_mask(length, past + length, mask.device)
    # A padded query before the first token of its row may read anything: its output is never used, but must not be NaN.
    return allowed | ~allowed.any(-1, keepdim=True)


class KimiK3ForCausalLM(KimiK3PreTrainedModel, GenerationMixin):
    """Kimi K3 text model with its head; generates, saves and loads like any Transformers model."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: KimiK3TextConfig) -> None:
        super().__init__(config)
        self.model = KimiK3TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: KimiK3Cache | None = None,
        past_key_values: KimiK3Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: torch.Tensor | None = None,
        padding_mask: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [batch, kept, vocab] of all positions, of the last `logits_to_keep` or of those it indexes; loss of `labels`.

        Labels are those of the kept positions, shifted here; `shift_labels` of the same shape are shifted already.
        """
        check_keywords(kwargs, PACKING | LOSS, type(self).__name__)
        given = cache if cache is not None else past_key_values
        record = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        others = (inputs_embeds, labels, cu_seqlens, padding_mask, *(v for k, v in kwargs.items() if k in PACKING))
        if not record and use_cache is not False and all(o is None for o in others):
            replayed = decode_graph.step(self, given, input_ids, attention_mask)
            if replayed is not None:
                outputs: dict[str, Any] = {"logits": replayed, CACHE_NAME: given}
                return CausalLMOutputWithPast(**outputs)
        out = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, inputs_embeds=inputs_embeds,
            cache=given, use_cache=use_cache, padding_mask=padding_mask,
            output_hidden_states=output_hidden_states, cu_seqlens=cu_seqlens,
            **{k: v for k, v in kwargs.items() if k in PACKING},
        )  # fmt: skip
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else slice(None)
        logits = self.lm_head(out.last_hidden_state[:, logits_to_keep if isinstance(logits_to_keep, torch.Tensor) else kept])
        loss = causal_lm_loss(logits, labels, kwargs.get("num_items_in_batch"), kwargs.get("shift_labels"))
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=out.hidden_states,
            **{CACHE_NAME: out.get(CACHE_NAME)},
        )

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Generation's cache is ours: `offloaded` is held on the CPU between steps, decoding on a `static` one is a CUDA graph.

        A static one is kept with the model and emptied for the next call, as long as the weights lie where they did; for an
        assistant it grows like the usual one. Raises KconvError for other kinds.
        """
        kind = generation_config.cache_implementation
        if generation_config.use_cache is False or model_kwargs.get(CACHE_NAME) is not None:
            return
        if kind not in CACHES:
            raise KconvError(
                f"cache_implementation {kind!r}: a KDA state and MLA's latents are neither keys nor values to be kept so",
                hint="leave it out, or use 'static' or 'offloaded'",
            )
        if kind == "static" and not generation_config.is_assistant:
            model_kwargs[CACHE_NAME] = self._emptied_static_cache(int(args[-1] if args else kwargs["max_cache_length"]))
            return
        model_kwargs[CACHE_NAME] = KimiK3Cache(self.config, offloaded=kind == "offloaded")
        if generation_config.is_assistant:
            model_kwargs[CACHE_NAME].activate_past_recording()

    def _emptied_static_cache(self, tokens: int) -> StaticKimiK3Cache:
        weights = decode_graph.where_weights_lie(self)
        kept: tuple[Any, StaticKimiK3Cache] | None = self.__dict__.get("_static_cache")
        if kept is None or kept[0] != weights or kept[1].capacity < tokens:
            capacity = -(-tokens // STATIC_TOKENS) * STATIC_TOKENS
            kept = self.__dict__["_static_cache"] = (weights, StaticKimiK3Cache(self.config, capacity))
        kept[1].reset()
        return kept[1]
