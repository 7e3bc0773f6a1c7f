"""What a draft is and how it is run: one configuration without the ambiguous keys of the published files.

| field | meaning here | what published files do |
|---|---|---|
| `block_size` | positions of one block, the anchor's included | nested or top level; sometimes absent |
| `sample_from_anchor` | the anchor's position predicts too: `block_size` drafted tokens, not one fewer | rarely stated |
| `target_layer_ids` | 0-based target layers whose OUTPUT is tapped, in `fc`'s order | outputs or boundaries |
| `target_num_hidden_layers` | depth of the target | `num_target_layers` is the depth or the number of taps |
| `capture_stream` | `output`; on Kimi K3 `prefix` (running sum) or `attn_res` (what is read next) | mostly unstated |
| `last_tap_normed` | a tap on the last layer is taken behind the target's final norm | z-lab: behind, NeMo: before |
| `mla_norm_eps` | eps of `q_a_layernorm` and `kv_a_layernorm` (MLA) | in no file; 1e-6 or 1e-5 by trainer |
| `rope_parameters` | Transformers 5 form, explicit `attention_factor`; None without RoPE | `rope_scaling`, `rope_theta` |
| `is_causal`, `layer_is_causal` | whether a position sees only earlier ones of its block | default differs by runtime |

`None` for `block_size`, `target_layer_ids` or `capture_stream` means "the checkpoint does not say": it loads and converts,
and what needs the value refuses until it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig

from kconv.errors import KconvError
from kconv.json_types import misfits
from kconv.modeling.drafts.rope import Rope, default_attention_factor

SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "q_lora_rank",
    "kv_lora_rank", "v_head_dim", "draft_vocab_size", "target_hidden_size", "max_position_embeddings", "conv_kernel_size",
    "conv_group_size", "selector_rank", "selector_top_k", "num_aux_hidden_states",
)  # fmt: skip
NARROW = {
    **dict.fromkeys(SIZES, "size"), **dict.fromkeys(("markov_rank", "qk_nope_head_dim", "qk_rope_head_dim"), "count"),
    "num_hidden_layers": "layers", "target_num_hidden_layers": "layers",
}  # fmt: skip
ROPE = {
    **dict.fromkeys(
        ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings",
         "partial_rotary_factor"),
        "float | None",
    ),
    "rope_theta": "float | None", "rope_type": "str | None", "type": "str | None", "truncate": "bool | None",
}  # fmt: skip
KEYWORDS = {"dflash_config": "dict | None", "rope_theta": "float | None", "partial_rotary_factor": "float | None"}
LAYER_TYPES = ("full_attention", "sliding_attention")
STREAMS = ("output", "prefix", "attn_res")


class DraftConfigError(KconvError, ValueError):
    """A draft configuration that cannot be right; also a ValueError, as configuration classes raise."""


class DraftConfig(PreTrainedConfig):
    """Geometry and contract of a draft; subclasses add their family's fields and set `model_type`.

    Raises `DraftConfigError` naming the field, its value and the next step.
    """

    model_type = "kconv_draft"
    families: ClassVar[dict[str, type[DraftConfig]]] = {}

    vocab_size: int = 163840
    draft_vocab_size: int | None = None
    hidden_size: int = 7168
    intermediate_size: int = 14336
    num_hidden_layers: int = 5
    num_attention_heads: int = 64
    num_key_value_heads: int | None = None
    attention_mode: str = "gqa"
    head_dim: int | None = None
    use_qk_norm: bool = True
    attention_bias: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    mla_use_nope: bool = False
    mla_use_output_gate: bool = False
    hidden_act: str = "silu"
    activation_situ_beta: float | None = None
    activation_situ_linear_beta: float | None = None
    rms_norm_eps: float = 1e-5
    mla_norm_eps: float | None = None
    initializer_range: float = 0.02
    max_position_embeddings: int = 1048576
    rope_parameters: dict | None = None
    rope_interleave: bool = False
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    is_causal: bool = False
    layer_is_causal: list[bool] | None = None
    window_rule: str = "query"

    block_size: int | None = None
    sample_from_anchor: bool = False
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    target_num_hidden_layers: int | None = None
    target_hidden_size: int | None = None
    capture_stream: str | None = None
    last_tap_normed: bool = False
    fc_norm: bool = False
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    input_embedding_scale: float = 1.0
    owns_embed_tokens: bool = False
    owns_lm_head: bool = False
    owns_vocab_maps: bool = False
    aux_layer_ids: list[int] | None = None
    dialect: str | None = None

    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        DraftConfig.families[cls.model_type] = cls

    @classmethod
    def kinds(cls) -> dict[str, str]:
        """What each field may hold, for `kconv.json_types`."""
        inherited = {f.name for f in fields(PreTrainedConfig)}
        own = {f.name: str(f.type) for f in fields(cls) if f.name not in inherited and isinstance(f.type, str)}
        return {name: kind.replace("int", NARROW[name]) if name in NARROW else kind for name, kind in own.items()}

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The fields' defaults, which a config.json may leave out."""
        return {f.name: f.default for f in fields(cls) if f.name in cls.kinds()}

    def __post_init__(self, **kwargs: Any) -> None:
        nested = kwargs.pop("dflash_config", None)
        _check_types(self)
        if wrong := misfits({"dflash_config": nested, **kwargs}, KEYWORDS):
            raise DraftConfigError("; ".join(wrong))
        for rope in (self.rope_parameters, kwargs.get("rope_scaling")):
            _check_rope(rope)
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        if self.attention_mode == "gqa" and self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        self.layer_types = list(self.layer_types or ["full_attention"] * self.num_hidden_layers)
        if self.attention_mode == "mla" and self.mla_norm_eps is None:
            self.mla_norm_eps = self.rms_norm_eps
        super().__post_init__(**kwargs)
        self._agrees(nested)
        self.check()

    def convert_rope_params_to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Transformers' own normalisation, kept away from drafts without RoPE, where it would invent a theta."""
        if not self.uses_rope:
            for key in ("rope_scaling", "rope_theta", "partial_rotary_factor"):
                kwargs.pop(key, None)
            self.rope_parameters = None
            return kwargs
        kwargs = super().convert_rope_params_to_dict(**kwargs)
        rope = self.rope_parameters or {}
        if rope.get("rope_type") == "yarn" and rope.get("attention_factor") is None:
            rope["attention_factor"] = default_attention_factor(rope)
        return kwargs

    @property
    def uses_rope(self) -> bool:
        """Whether queries and keys are rotated."""
        return not (self.attention_mode == "mla" and self.mla_use_nope)

    @property
    def rope(self) -> Rope | None:
        """The rotary embedding, None without RoPE."""
        if not self.uses_rope or self.rope_parameters is None:
            return None
        dim = self.qk_rope_head_dim if self.attention_mode == "mla" else self.head_dim
        return Rope.of(dim or 0, self.rope_parameters, self.rope_interleave)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens one block drafts; raises when the checkpoint does not give its block size."""
        if self.block_size is None:
            raise DraftConfigError(
                "the checkpoint's config has no block_size, so the number of drafted tokens is unknown",
                hint="give it: block_size=7 is what the published K3DSparkModel cards serve",
            )
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def num_target_layers(self) -> int | None:
        """The target's depth, under the name that trainers read (the number of taps in some published files)."""
        return self.target_num_hidden_layers

    @property
    def causal_layers(self) -> list[bool]:
        """Per layer, whether a block position sees only earlier positions."""
        return self.layer_is_causal or [self.is_causal] * self.num_hidden_layers

    @property
    def has_draft_vocab(self) -> bool:
        """Whether the draft predicts over a subset of the target's vocabulary (then `d2t` and `t2d` are needed)."""
        return self.draft_vocab_size is not None and self.draft_vocab_size < self.vocab_size

    @property
    def dflash_config(self) -> dict[str, Any]:
        """The nested block that runtimes read: mask id, taps and block size."""
        keys = ("mask_token_id", "target_layer_ids", "block_size")
        block = {k: getattr(self, k) for k in keys if getattr(self, k) is not None}
        if self.output_multiplier != 1.0:
            block["output_multiplier"] = self.output_multiplier
        if self.final_logit_softcapping is not None:
            block["final_logit_softcapping"] = self.final_logit_softcapping
        if self.input_embedding_scale != 1.0:
            block["input_embedding_scale"] = self.input_embedding_scale
        return block

    def taps(self) -> tuple[int, ...]:
        """The tapped target layers (0-based outputs, in order); raises when the checkpoint leaves their meaning open."""
        if self.target_layer_ids is None:
            raise DraftConfigError(
                "the checkpoint does not say whether its layer ids are outputs or boundaries",
                hint="give them: target_layer_ids=[...] as 0-based outputs (a boundary id b is the output of layer b-1)",
            )
        return tuple(self.target_layer_ids)

    def check(self) -> None:
        """Raise `DraftConfigError` for what cannot be right."""
        _check_sizes(self)
        _check_layers(self)
        check_taps(self.target_layer_ids, self.target_num_hidden_layers)
        check_mask(self.mask_token_id, self.vocab_size)
        _check_logits(self)
        if self.uses_rope and self.rope_parameters and (self.rope_parameters.get("rope_theta") or 0) <= 0:
            raise DraftConfigError(f"rope_theta is {self.rope_parameters.get('rope_theta')}, it should be above 0")
        _ = self.rope

    def to_dict(self) -> dict[str, Any]:
        """All fields, and the nested block that runtimes look for."""
        return {**super().to_dict(), "dflash_config": self.dflash_config}

    def _agrees(self, nested: dict[str, Any] | None) -> None:
        """Take values given only in the nested block; refuse those given twice and differently."""
        defaults = {f.name: f.default for f in fields(self)}
        for key, value in (nested or {}).items():
            if key not in defaults:
                raise DraftConfigError(f"dflash_config has the key {key}, which {self.model_type} does not use")
            here = getattr(self, key)
            if here is None or here == defaults[key]:
                setattr(self, key, value)
            elif here != value:
                raise DraftConfigError(f"{key} is {here} at the top level and {value} in dflash_config")


def _check_types(config: DraftConfig) -> None:
    kinds = config.kinds()
    if wrong := misfits({name: getattr(config, name) for name in kinds}, kinds):
        raise DraftConfigError("; ".join(wrong))
    dtype = config.dtype
    if isinstance(dtype, str) and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise DraftConfigError(f"dtype is {dtype!r}, which is none of torch's")


def _check_rope(rope: Any) -> None:
    """Refuse a block that Transformers' normalisation, or the rotation, could not read."""
    if rope is None:
        return
    if not isinstance(rope, dict):
        raise DraftConfigError(f"rope_scaling is {rope!r}, it should be an object")
    if wrong := misfits(rope, ROPE, "rope_parameters."):
        raise DraftConfigError("; ".join(wrong))
    if rope.get("rope_type", rope.get("type")) != "yarn":
        return
    low = [k for k in ("factor", "original_max_position_embeddings") if (rope.get(k) or 0) <= 0]
    if low:
        raise DraftConfigError(f"YaRN needs {' and '.join(low)} above 0, the config has {[rope.get(k) for k in low]}")


def spread_taps(target_layers: int, draft_layers: int) -> list[int]:
    """DFlash's rule for a draft that names no taps: one for each of its layers, from layer 1 to the target's third last.

    Raises DraftConfigError where the target is too shallow for as many different ones.
    """
    if draft_layers == 1:
        return [target_layers // 2]
    step = (target_layers - 4) / (draft_layers - 1)
    ids = [round(1 + i * step) for i in range(draft_layers)]
    if len(set(ids)) < draft_layers or target_layers < 4:
        raise DraftConfigError(
            f"{draft_layers} taps cannot be spread over a target of {target_layers} layers", hint="give target_layer_ids"
        )
    return ids


def check_taps(ids: Sequence[int] | None, depth: int | None) -> None:
    """Refuse an empty list, the raw embeddings, repetitions, and ids beyond the target."""
    if ids is None:
        return
    if not ids:
        raise DraftConfigError("target_layer_ids is empty: the draft has no context")
    if any(i < 0 for i in ids):
        raise DraftConfigError(
            f"target_layer_ids {list(ids)} names the target's raw embeddings, which no draft of this kind taps",
            hint="ids are 0-based outputs: layer 0's output is 0",
        )
    if len(set(ids)) != len(ids):
        raise DraftConfigError(f"target_layer_ids {list(ids)} repeats a layer; `fc` has one slice per tap")
    if depth is not None and (max(ids) >= depth or len(ids) > depth):
        raise DraftConfigError(f"target_layer_ids {list(ids)} does not fit a target of {depth} layers (ids 0..{depth - 1})")


def check_mask(mask: int | None, vocab_size: int) -> None:
    """Refuse a mask id outside the vocabulary."""
    if mask is not None and not 0 <= mask < vocab_size:
        raise DraftConfigError(f"mask_token_id {mask} is outside the vocabulary of {vocab_size}")


def require_mask(config: DraftConfig) -> None:
    """Refuse a block draft without a mask id: every runtime guesses another one."""
    if config.mask_token_id is None:
        raise DraftConfigError(
            "mask_token_id is missing", hint="give the id the draft was trained with; there is no convention to fall back on"
        )


def _check_sizes(config: DraftConfig) -> None:
    if config.block_size is not None and config.block_size < (1 if config.sample_from_anchor else 2):
        raise DraftConfigError(f"block_size {config.block_size} leaves nothing to draft")
    if config.attention_mode not in ("gqa", "mla"):
        raise DraftConfigError(f"attention_mode {config.attention_mode!r} is neither 'gqa' nor 'mla'")
    if config.num_attention_heads % (config.num_key_value_heads or 1):
        raise DraftConfigError(
            f"{config.num_attention_heads} query heads are no multiple of {config.num_key_value_heads} key/value heads"
        )
    if config.attention_mode == "mla":
        if config.num_key_value_heads != config.num_attention_heads:
            raise DraftConfigError(
                f"MLA has one key/value head per query head, the config has {config.num_key_value_heads} "
                f"for {config.num_attention_heads}"
            )
        needed = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        if missing := [k for k in needed if getattr(config, k) is None]:
            raise DraftConfigError(f"an MLA draft needs {', '.join(missing)}")


def _check_layers(config: DraftConfig) -> None:
    kinds = config.layer_types or []
    if len(kinds) != config.num_hidden_layers or not set(kinds) <= set(LAYER_TYPES):
        raise DraftConfigError(
            f"layer_types {kinds} must give one of {LAYER_TYPES} for each of {config.num_hidden_layers} layers"
        )
    if "sliding_attention" in kinds and (config.sliding_window or 0) < 1:
        raise DraftConfigError(f"sliding layers need a positive sliding_window, not {config.sliding_window}")
    if config.layer_is_causal is not None and len(config.layer_is_causal) != config.num_hidden_layers:
        raise DraftConfigError(f"layer_is_causal has {len(config.layer_is_causal)} entries for {config.num_hidden_layers} layers")
    if config.window_rule not in ("query", "anchor"):
        raise DraftConfigError(f"window_rule {config.window_rule!r} is neither 'query' nor 'anchor'")
    if config.capture_stream is not None and config.capture_stream not in STREAMS:
        raise DraftConfigError(f"capture_stream {config.capture_stream!r} is none of {STREAMS}")


def _check_logits(config: DraftConfig) -> None:
    if config.output_multiplier <= 0:
        raise DraftConfigError(f"output_multiplier must be positive, not {config.output_multiplier}")
    if config.final_logit_softcapping is not None and config.final_logit_softcapping <= 0:
        raise DraftConfigError(f"final_logit_softcapping must be positive, not {config.final_logit_softcapping}")
