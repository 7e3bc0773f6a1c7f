"""The DFlash draft for Kimi K3 (`KimiK3DFlashDraftModel` of NeMo AutoModel): dense NoPE-MLA layers with SiTU MLPs.

13 tensors a layer and `fc`, `hidden_norm`, `norm`; no embedding and no head: both are the frozen target's. Everything else of
the target (KDA, experts, attention residuals, MTP) is switched off in the config, which says so for whoever reads it.

`q_a_layernorm` and `kv_a_layernorm` have eps 1e-6, the target's class default, not `rms_norm_eps`: no published config
says so, therefore this one does (`mla_norm_eps`).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any, ClassVar

from kconv.modeling.drafts.config import DraftConfig, DraftConfigError, require_mask, spread_taps
from kconv.modeling.drafts.layer import DraftDecoderLayer
from kconv.modeling.drafts.mla import MLADraftAttention
from kconv.modeling.drafts.model import BlockDraftModel

logger = logging.getLogger("kconv.modeling")
TEXT_TYPES = ("kimi_linear", "kimi_k3_text")
FROM_TARGET = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "mla_use_nope", "mla_use_output_gate", "hidden_act",
    "activation_situ_beta", "activation_situ_linear_beta", "rms_norm_eps", "initializer_range", "max_position_embeddings",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


class KimiK3DFlashConfig(DraftConfig):
    """Config of the Kimi K3 DFlash draft; what the draft does not build is stated as off."""

    model_type = "kimi_k3_dflash"

    attention_mode: str = "mla"
    num_attention_heads: int = 96
    intermediate_size: int = 33792
    num_hidden_layers: int = 3
    q_lora_rank: int | None = 1536
    kv_lora_rank: int | None = 512
    qk_nope_head_dim: int | None = 128
    qk_rope_head_dim: int | None = 64
    v_head_dim: int | None = 128
    mla_use_nope: bool = True
    mla_use_output_gate: bool = True
    mla_norm_eps: float | None = 1e-6
    hidden_act: str = "situ"
    activation_situ_beta: float | None = 4.0
    activation_situ_linear_beta: float | None = 25.0
    capture_stream: str | None = "prefix"
    num_experts: int | None = None
    num_shared_experts: int = 0
    num_nextn_predict_layers: int = 0
    attn_res_block_size: int | None = None
    linear_attn_config: dict | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        nested = kwargs.get("dflash_config")
        inner = nested.get("projector_type") if isinstance(nested, dict) else None
        if (projector := inner or kwargs.get("projector_type")) is not None:
            raise DraftConfigError(f"projector_type {projector!r}: the Kimi K3 DFlash draft has no projector")
        super().__post_init__(**kwargs)
        if self.linear_attn_config is None:
            self.linear_attn_config = {"kda_layers": [], "full_attn_layers": list(range(1, self.num_hidden_layers + 1))}

    def check(self) -> None:
        """Refuse RoPE, grouped key/value heads, and a missing mask id."""
        if not self.mla_use_nope:
            raise DraftConfigError("mla_use_nope is false: Kimi K3's attention, which this draft inherits, rotates nothing")
        super().check()
        require_mask(self)


class KimiK3DFlashAttention(MLADraftAttention):
    """Kimi K3's MLA, non-causal over `[context | block]`, NoPE."""


class KimiK3DFlashDecoderLayer(DraftDecoderLayer):
    """Pre-norm MLA over `[context | block]` and a dense SiTU MLP."""

    def attention(self, config: DraftConfig, layer_idx: int) -> KimiK3DFlashAttention:
        """Kimi K3's."""
        return KimiK3DFlashAttention(config, layer_idx)


class KimiK3DFlashDraftModel(BlockDraftModel):
    """The draft; owns no embedding and no head."""

    config_class: Any = KimiK3DFlashConfig
    layer_class: ClassVar[type[DraftDecoderLayer]] = KimiK3DFlashDecoderLayer
    _no_split_modules = ["KimiK3DFlashDecoderLayer"]


def _read(config: Any, key: str) -> Any:
    return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)


def _check_target(target_config: Any) -> None:
    found = _read(target_config, "model_type")
    if found not in TEXT_TYPES:
        raise DraftConfigError(
            f"model_type {found!r} is not a Kimi K3 text config",
            hint=f"pass target.text_config, whose model_type is one of {TEXT_TYPES}",
        )


def build_kimi_k3_dflash_draft_config(
    target_config: Any,
    *,
    num_draft_layers: int,
    num_target_layers: int,
    block_size: int,
    dflash_config: Mapping[str, Any],
    attention_backend: str = "sdpa",
    capture_stream: str = "prefix",
) -> KimiK3DFlashConfig:
    """The config of a draft for a Kimi K3 target; the target's config is not changed.

    Args:
        target_config: the target's text config, an object or a dict, published (`kimi_linear`) or native (`kimi_k3_text`).
        num_draft_layers: layers of the draft.
        num_target_layers: layers of the target's text model.
        block_size: positions of one block, the anchor's included.
        dflash_config: `mask_token_id`, optionally the logit transform and `target_layer_ids`; without them DFlash's rule
            spreads one tap a draft layer over the target, and a warning says which.
        attention_backend: only `sdpa` takes the dense additive mask.
        capture_stream: what is tapped: NeMo's hook reads the running prefix.

    Raises:
        DraftConfigError: for a multimodal config, another attention backend, or what `KimiK3DFlashConfig` refuses.
    """
    _check_target(target_config)
    if attention_backend not in ("sdpa", "eager"):
        raise DraftConfigError(f"attention_backend {attention_backend!r} takes no dense additive mask", hint="use sdpa")
    geometry = {k: copy.deepcopy(v) for k in FROM_TARGET if (v := _read(target_config, k)) is not None}
    nested = copy.deepcopy(dict(dflash_config))
    if nested.get("target_layer_ids") is None:
        nested["target_layer_ids"] = spread_taps(num_target_layers, num_draft_layers)
        logger.warning("the draft taps target layers %s, by DFlash's rule: none were given", nested["target_layer_ids"])
    if nested.setdefault("block_size", block_size) != block_size:
        raise DraftConfigError(f"block_size is {block_size} and {nested['block_size']} in dflash_config")
    keys: dict[str, Any] = {**geometry, "dflash_config": nested}
    return KimiK3DFlashConfig(
        **keys, num_hidden_layers=num_draft_layers, target_num_hidden_layers=num_target_layers,
        target_hidden_size=_read(target_config, "hidden_size"), capture_stream=capture_stream,
        architectures=["KimiK3DFlashDraftModel"], dtype=_read(target_config, "dtype"),
    )  # fmt: skip


def build_kimi_k3_dflash_target_kwargs(recipe: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Keyword arguments with which a trainer loads the frozen target that such a draft reads.

    `config` picks the text-only architecture: the vision tower is never read. `backend` holds the fields of NeMo
    AutoModel's `BackendConfig`: written-out attention, fp32 norms, no fused rotation (there is none), its own state-dict
    adapter; the dispatcher, the experts' kernel and the FSDP switch come from `recipe` where it gives
    `target_dispatcher`, `target_experts` or `target_enable_fsdp_optimizations`. Native modules need none of it.
    """
    given = dict(recipe or {})
    return {
        "config": {"architectures": ["KimiK3ForCausalLM"]},
        "backend": {
            "attn": "eager",
            "linear": "torch",
            "rms_norm": "torch_fp32",
            "rope_fusion": False,
            "dispatcher": str(given.get("target_dispatcher", "hybridep")),
            "experts": str(given.get("target_experts", "torch_mm")),
            "enable_hf_state_dict_adapter": True,
            "enable_fsdp_optimizations": bool(given.get("target_enable_fsdp_optimizations", True)),
        },
    }
