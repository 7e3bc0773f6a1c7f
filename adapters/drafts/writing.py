"""A native draft config written for runtimes: for drafts trained natively, which have no published config to go back to.

| key | written | why |
|---|---|---|
| `block_size`, `mask_token_id`, `target_layer_ids` | in `dflash_config` and at the top level | runtimes read either |
| `sample_from_anchor` | always | says whether `block_size` counts the anchor |
| `num_target_layers`, `target_num_hidden_layers` | both the depth | the first is read as the depth or as the number of taps |
| RoPE's three keys | all, with `attention_factor`; none without RoPE | Transformers 5 and 4, and runtimes' own defaults |
| `is_causal`, `layer_types`, `sliding_window` | always | the default differs between runtimes |
| `aux_hidden_stream`, `mla_norm_eps` | where they are known | in hardly any published file |
| Eagle3's ids | boundaries, with `tap_convention` | vLLM takes these as they are |

Nothing of the target is left over: no `auto_map`, no `quantization_config`, no MoE keys, no `head_dim` on MLA. What was written
is read back, and a value that no published key carries is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kconv.adapters.drafts.dialects import DIALECTS
from kconv.adapters.drafts.reading import COPIED, FAMILY, GQA, MLA, SITU, read_draft_config
from kconv.errors import Problems

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Written:
    """How one kind of draft is published: the dialect it is read by, its names, and keys that belong in the nested block."""

    family: tuple[str, ...]
    dialect: str
    architecture: str
    model_type: str
    when: Callable[[Config], bool] = lambda c: True
    nested: tuple[str, ...] = ()
    projector: str | None = None


def _mla(c: Config) -> bool:
    return c["attention_mode"] == "mla"


def _nope(c: Config) -> bool:
    return _mla(c) and bool(c.get("mla_use_nope"))


CONV = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "attention_mode")
HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov", "attention_mode")
WRITTEN: tuple[Written, ...] = (
    Written(("kimi_k3_dflash",), "nemo-k3-dflash", "KimiK3DFlashDraftModel", "kimi_linear"),
    Written(("dflash", "dflash_kimi_k25"), "z-lab-dflash", "DFlashDraftModel", "qwen3"),
    Written(("dflash2",), "dflash2", "DFlash2DraftModel", "qwen3", nested=CONV),
    Written(("dspark",), "nemo-k3-dspark", "KimiK3DSparkModel", "kimi_linear", _nope),
    Written(("dspark",), "k3-dspark", "K3DSparkModel", "k3_dspark", _mla),
    Written(("dspark",), "specforge-dspark", "DSparkDraftModel", "qwen3", nested=HEADS, projector="dspark"),
    Written(("eagle3",), "nemo-k3-eagle3", "KimiK3Eagle3DraftModel", "kimi_linear", _nope),
    Written(("eagle3",), "eagle3-mla", "Eagle3DeepseekV2ForCausalLM", "kimi_k2", _mla),
    Written(("eagle3",), "eagle3-gqa", "LlamaForCausalLMEagle3", "llama"),
)
CONTRACT = ("block_size", "mask_token_id", "target_layer_ids")
NOT_PUBLISHED = (
    "dialect",
    "architectures",
    "model_type",
    "owns_embed_tokens",
    "owns_lm_head",
    "owns_vocab_maps",
    "aux_layer_ids",
)


def serving_config(native: Any) -> dict[str, Any]:
    """The published config.json of a native draft config (object or dict).

    Raises:
        KconvError: when it is no native draft config.
        Problems: naming every value that the family's published form cannot carry.
    """
    from kconv.modeling.drafts import config_class
    from kconv.modeling.drafts.config import DraftConfig

    whole = native if isinstance(native, DraftConfig) else config_class(native.get("model_type"))(**native)
    config = {name: getattr(whole, name) for name in whole.kinds()}
    how = next(w for w in WRITTEN if whole.model_type in w.family and w.when(config))
    out: dict[str, Any] = {"architectures": [how.architecture], "model_type": how.model_type}
    names = (*COPIED, *(MLA if _mla(config) else GQA), *FAMILY[whole.model_type])
    names += SITU if config["hidden_act"] == "situ" else ()
    out.update({k: config[k] for k in names if config.get(k) is not None})
    if whole.dtype is not None:
        out["dtype"] = str(whole.dtype).removeprefix("torch.")
    out["tie_word_embeddings"] = False
    if (provenance := getattr(whole, "kconv_provenance", None)) is not None:
        out["kconv_provenance"] = provenance
    _taps(config, how, out)
    _rope(config, out)
    _layers(config, how, out)
    _refuse_losses(config, out)
    return copy.deepcopy(out)


def _taps(config: Config, how: Written, out: dict[str, Any]) -> None:
    depth = config["target_num_hidden_layers"]
    out["sample_from_anchor"] = config["sample_from_anchor"]
    if depth is not None:
        out.update(num_target_layers=depth, target_num_hidden_layers=depth)
    if config["capture_stream"] is not None:
        out["aux_hidden_stream"] = config["capture_stream"]
    if config["mla_norm_eps"] is not None:
        out["mla_norm_eps"] = config["mla_norm_eps"]
    if how.family == ("eagle3",):
        ids = config["target_layer_ids"]
        out["eagle_aux_hidden_state_layer_ids"] = [i + 1 for i in ids] if ids is not None else config["aux_layer_ids"]
        if ids is not None:
            out["tap_convention"] = "boundary"
        return
    stated = {k: config[k] for k in CONTRACT if config[k] is not None}
    out.update(stated)
    out["dflash_config"] = {**stated, **{k: config[k] for k in how.nested}}
    if how.projector:
        out["dflash_config"]["projector_type"] = how.projector


def _rope(config: Config, out: dict[str, Any]) -> None:
    if _mla(config):
        out["mla_use_nope"] = config["mla_use_nope"]
        if not config["mla_use_nope"]:
            out["rope_interleave"] = config["rope_interleave"]
    rope = config["rope_parameters"]
    if _nope(config) or not rope:
        return
    out["rope_parameters"] = rope
    out["rope_theta"] = rope["rope_theta"]
    scaled = rope["rope_type"] != "default"
    out["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"} if scaled else None


def _layers(config: Config, how: Written, out: dict[str, Any]) -> None:
    kinds = config["layer_types"]
    sliding = [kind == "sliding_attention" for kind in kinds]
    out.update(layer_types=kinds, use_sliding_window=any(sliding), is_causal=config["is_causal"])
    out["sliding_window"] = config["sliding_window"] if any(sliding) else None
    dialect = next(d for d in DIALECTS if d.name == how.dialect)
    if config["layer_is_causal"] == sliding and dialect.sliding_is_causal:
        del out["is_causal"]  # what this dialect's code takes for it where it is not stated


def _refuse_losses(config: Config, out: dict[str, Any]) -> None:
    """Read what was written; raise Problems for values that did not survive."""
    from kconv.modeling.drafts import config_class

    read = read_draft_config(out).config
    again = config_class(read["model_type"])(**read)
    taps, depth = config["target_layer_ids"], config["target_num_hidden_layers"]
    skip = {*NOT_PUBLISHED} | ({"last_tap_normed"} if taps and depth and max(taps) < depth - 1 else set())
    lost = [
        f"{name} is {value!r}, would be read as {getattr(again, name, None)!r}"
        for name, value in config.items()
        if name not in skip and getattr(again, name, None) != value
    ]
    if lost:
        raise Problems(
            "no published config carries these values of the native one:", lost, hint="keep the native layout for this draft"
        )
