"""Who writes draft checkpoints and what each leaves unsaid: one row a dialect.

Columns: how it is recognised, the native class it becomes, and values that its trainer or reference code fixes while no
published file states them.

| fixed value | evidence |
|---|---|
| `mla_norm_eps` 1e-6 for NeMo's K3 DFlash | it inherits the target's norms, built without eps; others pass `rms_norm_eps` |
| `capture_stream` prefix | NeMo hooks `outputs[0]`; TokenSpeed and vLLM take it unless `aux_hidden_stream` says `attn_res` |
| `rope_interleave` for MLA | DeepSeek's neighbour pairs, in TorchSpec's trainer, vLLM and SGLang |
| RoPE in Eagle3 MLA though `mla_use_nope` is true | TorchSpec's attention and every runtime rotate whatever that key says |
| `last_tap_normed` for z-lab's DFlash and DFlash2 | its code reads `hidden_states[i + 1]`, the last of which is normed |
| `window_rule` anchor, sliding layers causal | speculators' mask builder |
| sliding layers causal without `is_causal` | z-lab's code, vLLM, SGLang; not `DFlashKimiK25`, non-causal in MAX's design |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Dialect:
    """One row: see the module's table."""

    name: str
    family: str
    architecture: str
    architectures: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    speculators: str | None = None
    projector: str | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    attention: str | None = None
    sliding_is_causal: bool = False

    def matches(self, config: Config) -> bool:
        """Whether a published config is of this dialect."""
        spoken = config.get("speculators_model_type")
        if spoken or self.speculators:
            return spoken == self.speculators
        nested, listed = config.get("dflash_config"), config.get("architectures")
        projector = nested.get("projector_type") if isinstance(nested, dict) else None
        named = {name for name in listed if isinstance(name, str)} if isinstance(listed, list | tuple) else set()
        if self.projector and projector == self.projector:
            return bool(named & {"DFlashDraftModel", *self.architectures})
        if named & set(self.architectures):
            return True
        return not named and config.get("model_type") in self.model_types


NOPE = {"mla_use_nope": True, "capture_stream": "prefix"}
ROPE = {"mla_use_nope": False, "rope_interleave": True}
EAGLE_MLA = {**ROPE, "sample_from_anchor": True}
SPECULATORS = {"window_rule": "anchor"}
ZLAB = {"last_tap_normed": True}

DIALECTS: tuple[Dialect, ...] = (
    Dialect("speculators-dflash", "dflash", "DFlashDraftModel", speculators="dflash", fixed=SPECULATORS),
    Dialect("speculators-dflash2", "dflash2", "DFlash2DraftModel", speculators="dflash2", fixed=SPECULATORS),
    Dialect("speculators-dspark", "dspark", "DSparkDraftModel", speculators="dspark", fixed=SPECULATORS),
    Dialect("speculators-eagle3", "eagle3", "Eagle3DraftModel", speculators="eagle3"),
    Dialect(
        "nemo-k3-dflash", "kimi_k3_dflash", "KimiK3DFlashDraftModel", ("KimiK3DFlashDraftModel",), attention="mla",
        fixed={**NOPE, "mla_norm_eps": 1e-6},
    ),
    Dialect(
        "nemo-k3-dspark", "dspark", "DSparkDraftModel", ("KimiK3DSparkModel",), attention="mla",
        fixed={**NOPE, "sample_from_anchor": True},
    ),
    Dialect(
        "nemo-dspark", "dspark", "DSparkDraftModel", ("Qwen3DSparkModel",), attention="gqa", fixed={"sample_from_anchor": True}
    ),
    Dialect(
        "k3-dspark", "dspark", "DSparkDraftModel", ("K3DSparkModel",), ("k3_dspark",), attention="mla",
        fixed={**ROPE, "sample_from_anchor": True, "capture_stream": "prefix"},
    ),
    Dialect(
        "dflash2", "dflash2", "DFlash2DraftModel", ("DFlash2DraftModel",), ("qwen3_dflash2",), fixed=ZLAB,
        sliding_is_causal=True,
    ),
    Dialect(
        "specforge-dspark", "dspark", "DSparkDraftModel", ("DSparkDraftModel",), ("qwen3_dspark",), projector="dspark",
        fixed={"sample_from_anchor": True}, sliding_is_causal=True,
    ),
    Dialect(
        "z-lab-dflash", "dflash", "DFlashDraftModel", ("DFlashDraftModel", "Qwen3DFlashDraftModel"), fixed=ZLAB,
        sliding_is_causal=True,
    ),
    Dialect(
        "nemo-k3-eagle3", "eagle3", "Eagle3DraftModel", ("KimiK3Eagle3DraftModel",), attention="mla",
        fixed={**NOPE, "sample_from_anchor": True},
    ),
    Dialect(
        "eagle3-mla", "eagle3", "Eagle3DraftModel", ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"),
        attention="mla", fixed=EAGLE_MLA,
    ),
    Dialect(
        "eagle3-gqa", "eagle3", "Eagle3DraftModel", ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"),
        attention="gqa", fixed={"sample_from_anchor": True, "use_qk_norm": False},
    ),
)  # fmt: skip


def dialect_of(config: Config) -> Dialect | None:
    """The first row that recognises a published config; None when it is no draft."""
    return next((d for d in DIALECTS if d.matches(config)), None)
