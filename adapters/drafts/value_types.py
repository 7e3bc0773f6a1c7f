"""What a draft's config.json may hold under each key that is read, published or native; checked before anything is read.

Keys that native configs have too are of the native kind; the table has those that only published files have. Any key may be
null. Keys that are not read (a target's, left over) may hold anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kconv.errors import Problems
from kconv.json_types import misfits

BLOCKS = ("dflash_config", "transformer_layer_config", "eagle_config")
PUBLISHED = {
    **dict.fromkeys((*BLOCKS, "rope_scaling", "rope_parameters"), "dict"),
    **dict.fromkeys(
        ("target_layer_ids", "dspark_target_layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"),
        "list[int]",
    ),
    **dict.fromkeys(("use_sliding_window", "causal", "sliding_window_non_causal", "use_aux_norm"), "bool"),
    **dict.fromkeys(
        ("aux_hidden_stream", "dspark_aux_hidden_state_format", "dtype", "torch_dtype", "projector_type", "tap_convention"), "str"
    ),
    "architectures": "list[str]", "max_window_layers": "count", "num_target_layers": "layers", "rope_theta": "float",
}  # fmt: skip
NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def check_published(config: Mapping[str, Any], read: tuple[str, ...]) -> None:
    """Raise Problems with every value of the wrong kind, at the top level and in the nested blocks; `read` are the keys read."""
    from kconv.modeling.drafts import register
    from kconv.modeling.drafts.config import ROPE, DraftConfig

    register()
    native = {name: kind for family in DraftConfig.families.values() for name, kind in family.kinds().items()}
    kinds = {**{k: v for k, v in native.items() if k in read}, **PUBLISHED}
    kinds = {name: f"{kind} | None" for name, kind in kinds.items()}
    lines = misfits(config, kinds)
    for block in BLOCKS:
        if isinstance(config.get(block), dict):
            lines += misfits(config[block], kinds, f"{block}.")
    for level in (config, config.get("transformer_layer_config")):
        for block in ("rope_parameters", "rope_scaling"):
            if isinstance(level, dict) and isinstance(level.get(block), dict):
                lines += misfits(level[block], ROPE, f"{block}.")
    _raise(lines)


def check_declared(declared: Mapping[str, Any]) -> None:
    """Raise Problems for declared values of the wrong kind."""
    from kconv.modeling.drafts.config import ROPE, DraftConfig

    _raise(misfits(declared, {**ROPE, **DraftConfig.kinds()}, "the declared "))


def check_sizes(config: Mapping[str, Any]) -> None:
    """Raise Problems when a size that every draft has is missing from what was read."""
    _raise([f"{name} is missing" for name in NEEDED if config.get(name) is None])


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """A native config with its class's defaults for what it leaves out; raises Problems for values of the wrong kind."""
    from kconv.modeling.drafts import config_class

    family = config_class(config["model_type"])
    _raise(misfits(config, {**family.kinds(), "dflash_config": "dict | None"}))
    return {**family.defaults(), **config}


def _raise(lines: list[str]) -> None:
    if lines:
        raise Problems("config.json does not describe a draft:", lines, hint="correct it, or fetch it again")
