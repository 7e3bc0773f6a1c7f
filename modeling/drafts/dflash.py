"""DFlash drafts with grouped-query attention: z-lab's `DFlashDraftModel`, and MAX's `DFlashKimiK25` for a Kimi K2.5 target.

| field | default | meaning |
|---|---|---|
| `method` | `dflash` | anything else is refused |
| `residual_multiplier` | 1.0 | `residual + m * sublayer` |
| `attention_multiplier` | None | softmax scale instead of `head_dim ** -0.5` |
| `clip_qkv`, `stacked_qkv` | None, false | bounded projection weights; one fused `qkv_proj` |
| `use_qk_norm` | true | RMSNorm per head on queries and keys |
| `layer_types`, `sliding_window` | full | a sliding layer is non-causal unless the config says otherwise |

`DFlashKimiK25` adds what its target fixes: one tap per draft layer and DeepSeek-YaRN with an explicit `attention_factor`.
Without one the config takes Transformers' rule (1.0 for the published file), which is what z-lab's code computes with.
"""

from __future__ import annotations

from typing import Any

from kconv.modeling.drafts.config import DraftConfig, DraftConfigError, require_mask
from kconv.modeling.drafts.model import BlockDraftModel


class DFlashConfig(DraftConfig):
    """A GQA DFlash draft."""

    model_type = "dflash"

    method: str = "dflash"
    residual_multiplier: float = 1.0
    attention_multiplier: float | None = None
    clip_qkv: float | None = None
    stacked_qkv: bool = False

    def check(self) -> None:
        """Refuse another method, MLA, a missing mask id, and attention_multiplier 0."""
        if self.method != "dflash":
            raise DraftConfigError(
                f"method {self.method!r} is not 'dflash'", hint="DSpark, DFlash2 and Eagle3 have classes of their own"
            )
        if getattr(self, "projector_type", None) is not None:
            raise DraftConfigError(f"projector_type {getattr(self, 'projector_type', None)!r}: a DFlash draft has no projector")
        if self.attention_mode != "gqa":
            raise DraftConfigError("this DFlash draft has grouped-query attention; an MLA draft is another class")
        if self.attention_multiplier is not None and self.attention_multiplier <= 0:
            raise DraftConfigError(f"attention_multiplier must be positive, not {self.attention_multiplier}")
        super().check()
        require_mask(self)


class DFlashKimiK25Config(DFlashConfig):
    """The draft of a Kimi K2.5 target: one tap per draft layer, YaRN."""

    model_type = "dflash_kimi_k25"

    target_num_hidden_layers: int | None = 61

    def check(self) -> None:
        """Refuse a tap count other than the number of draft layers, and anything but YaRN."""
        super().check()
        taps = self.target_layer_ids or []
        if len(taps) != self.num_hidden_layers:
            raise DraftConfigError(
                f"target_layer_ids {taps} gives {len(taps)} taps for {self.num_hidden_layers} draft layers; it has one each",
                hint="a DFlash draft with another number of taps is a DFlashConfig",
            )
        kind = (self.rope_parameters or {}).get("rope_type")
        if kind != "yarn":
            raise DraftConfigError(f"rope_type {kind!r}: a Kimi K2.5 draft has a DeepSeek-YaRN block")


class DFlashDraftModel(BlockDraftModel):
    """DFlash with grouped-query attention."""

    config_class: Any = DFlashConfig


class DFlashKimiK25(DFlashDraftModel):
    """DFlash for Kimi K2.5."""

    config_class: Any = DFlashKimiK25Config
