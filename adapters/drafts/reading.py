"""A published draft config, read into the native one: every ambiguous key settled by rule, by dialect, or left open.

| ambiguity | rule |
|---|---|
| `block_size` nested, top level, or both | either; refused when they differ |
| whether it counts the anchor | it is the number of positions in every file; `sample_from_anchor` says how many are drafted |
| `num_target_layers` | the depth; the number of taps when `target_num_hidden_layers` stands beside it or a tap lies beyond it |
| layer ids | by `tap_convention`; else `target_layer_ids`: outputs, speculators' ids: boundaries minus 1, other `aux` ids: open |
| capture stream | `aux_hidden_stream`, vllm-ascend's `dspark_aux_hidden_state_format`, else the dialect's, else open |
| eps of latent norms | declared `mla_norm_eps`, else the dialect's, else `rms_norm_eps` |
| RoPE keys | `rope_parameters`, or `rope_scaling` and `rope_theta`; `type` is `rope_type`; refused when thetas differ |
| causality | `is_causal`, `dflash_config.causal`, speculators' `sliding_window_non_causal`, else the dialect's default |

What a config leaves open stays None and can be declared by whoever reads it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kconv.adapters.drafts.dialects import Dialect, dialect_of
from kconv.adapters.drafts.value_types import check_declared, check_published, check_sizes
from kconv.errors import KconvError, Problems

COPIED = (
    "vocab_size", "draft_vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "attention_bias", "hidden_act", "rms_norm_eps", "initializer_range", "max_position_embeddings",
    "sliding_window", "target_hidden_size", "bos_token_id", "eos_token_id", "pad_token_id", "fc_norm",
)  # fmt: skip
GQA = ("head_dim",)
MLA = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "mla_use_output_gate")
SITU = ("activation_situ_beta", "activation_situ_linear_beta")
LOGITS = ("output_multiplier", "final_logit_softcapping", "input_embedding_scale")
FAMILY: dict[str, tuple[str, ...]] = {
    "dflash": ("residual_multiplier", "attention_multiplier", "clip_qkv", "stacked_qkv", "use_qk_norm", *LOGITS),
    "dflash_kimi_k25": ("residual_multiplier", "attention_multiplier", "clip_qkv", "stacked_qkv", "use_qk_norm", *LOGITS),
    "kimi_k3_dflash": LOGITS,
    "dflash2": ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", *LOGITS),
    "dspark": ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov", *LOGITS),
    "eagle3": ("norm_output", "norm_before_residual", "norm_before_fc"),
}
READ = (
    *COPIED, *GQA, *MLA, *SITU, *(name for names in FAMILY.values() for name in names), "attention_mode", "block_size",
    "capture_stream", "is_causal", "last_tap_normed", "layer_is_causal", "layer_types", "mask_token_id", "mla_norm_eps",
    "mla_use_nope", "rope_interleave", "sample_from_anchor", "target_layer_ids", "target_num_hidden_layers", "window_rule",
)  # fmt: skip
DECLARABLE = ("block_size", "target_layer_ids", "capture_stream", "mla_norm_eps", "attention_factor", "target_num_hidden_layers")
CORRECTABLE = ("capture_stream", "mla_norm_eps", "attention_factor")
PROVENANCE = "kconv_provenance"
STREAM_KEYS = ("aux_hidden_stream", "capture_stream")
ASCEND = {"materialized": "attn_res", "raw": "prefix"}


@dataclass
class Reading:
    """A native config with its dialect, and what was noticed on the way."""

    dialect: Dialect
    config: dict[str, Any]
    notes: list[str] = field(default_factory=list)


class _Keys:
    """A published config as one look-up: nested block first, then the top level; refuses contradictions."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.top = config
        self.nested = config.get("dflash_config") or {}
        self.layer = config.get("transformer_layer_config") or config
        self.eagle = config.get("eagle_config") or {}
        self.problems: list[str] = []

    def get(self, *names: str) -> Any:
        """The first of `names` that is given, at any level."""
        for name in names:
            found = [level[name] for level in (self.nested, self.top, self.layer, self.eagle) if level.get(name) is not None]
            if found:
                if any(value != found[0] for value in found[1:]):
                    self.problems.append(f"{name} is given twice and differently: {' and '.join(map(repr, found))}")
                return copy.deepcopy(found[0])
        return None


def read_draft_config(
    config: Mapping[str, Any], names: Iterable[str] | None = None, declared: Mapping[str, Any] | None = None
) -> Reading:
    """Read a published draft config.

    Args:
        config: config.json.
        names: the checkpoint's tensor names, which say whether it holds copies of the target's tables.
        declared: values for what the config leaves open (`DECLARABLE`).

    Raises:
        KconvError: when it is no draft; Problems with everything that contradicts itself.
    """
    dialect = dialect_of(config)
    if dialect is None:
        raise KconvError(
            f"config.json is no draft that kconv knows: architectures {config.get('architectures')}, "
            f"model_type {config.get('model_type')!r}"
        )
    _declarable(declared or {})
    check_published(config, READ)
    keys = _Keys(config)
    reading = Reading(dialect, {"model_type": dialect.family, "architectures": [dialect.architecture], "dialect": dialect.name})
    _geometry(keys, reading)
    check_sizes(reading.config)
    for step in STEPS:
        step(keys, reading, declared or {})
    _copies(reading, set(names) if names is not None else None)
    if keys.problems:
        raise Problems(
            "config.json contradicts itself:", sorted(set(keys.problems)), hint="correct it, or declare the right value"
        )
    return _unsaid(_k25(reading))


def declare(config: Mapping[str, Any], declared: Mapping[str, Any]) -> dict[str, Any]:
    """A native config with values for what it leaves open; refuses to contradict what it states."""
    _declarable(declared)
    out = copy.deepcopy(dict(config))
    for key, value in declared.items():
        if key == "attention_factor":
            out["rope_parameters"] = {**(out.get("rope_parameters") or {}), key: float(value)}
        elif out.get(key) not in (None, value) and key not in CORRECTABLE:
            raise KconvError(f"{key} is {out[key]} in the config, {value} was declared")
        else:
            out[key] = value
    return out


def _declarable(declared: Mapping[str, Any]) -> None:
    unknown = set(declared) - set(DECLARABLE)
    if unknown:
        raise KconvError(f"cannot declare {', '.join(sorted(unknown))}", hint=f"these can be: {', '.join(DECLARABLE)}")
    check_declared(declared)


def _geometry(keys: _Keys, reading: Reading) -> None:
    out = reading.config
    out.update({k: v for k in COPIED if (v := keys.get(k)) is not None})
    dtype = keys.top.get("dtype") or keys.top.get("torch_dtype")
    if dtype:
        out["dtype"] = str(dtype).removeprefix("torch.")
    out["tie_word_embeddings"] = False
    if PROVENANCE in keys.top:
        out[PROVENANCE] = copy.deepcopy(keys.top[PROVENANCE])


def _attention(keys: _Keys, reading: Reading, declared: Mapping[str, Any]) -> None:
    out, dialect = reading.config, reading.dialect
    mode = keys.get("attention_mode")
    if mode is None:
        mode = dialect.attention or ("mla" if keys.get("kv_lora_rank") and keys.get("qk_rope_head_dim") else "gqa")
    elif dialect.attention not in (None, mode):
        keys.problems.append(f"attention_mode {mode!r} in a draft of the dialect {dialect.name}, which is {dialect.attention}")
    out["attention_mode"] = mode
    if mode == "gqa":
        out.update({k: v for k in GQA if (v := keys.get(k)) is not None})
        return
    out.update({k: v for k in MLA if (v := keys.get(k)) is not None})
    out.update({k: v for k in SITU if out.get("hidden_act") == "situ" and (v := keys.get(k)) is not None})
    nope = keys.get("mla_use_nope")
    out["mla_use_nope"] = dialect.fixed.get("mla_use_nope", bool(nope) and dialect.family != "dflash2")
    if nope is not None and nope != out["mla_use_nope"]:
        if dialect.name == "eagle3-mla":
            reading.notes.append("mla_use_nope is true, yet the trainer and every runtime of this head rotate: RoPE is kept")
        else:
            keys.problems.append(
                f"mla_use_nope is {nope}; every trainer and runtime of {dialect.name} has it {out['mla_use_nope']}"
            )
    if not out["mla_use_nope"]:
        out["rope_interleave"] = keys.get("rope_interleave") if keys.get("rope_interleave") is not None else True
    out["mla_norm_eps"] = declared.get("mla_norm_eps", keys.get("mla_norm_eps")) or dialect.fixed.get(
        "mla_norm_eps", out.get("rms_norm_eps", 1e-5)
    )


def _rope(keys: _Keys, reading: Reading, declared: Mapping[str, Any]) -> None:
    if reading.config.get("mla_use_nope"):
        return
    new, old = keys.layer.get("rope_parameters") or {}, keys.layer.get("rope_scaling") or {}
    block = {**old, **new}
    kind = block.pop("type", None)
    block.setdefault("rope_type", kind or "default")
    thetas = [t for t in (new.get("rope_theta"), old.get("rope_theta"), keys.layer.get("rope_theta")) if t is not None]
    if len({float(t) for t in thetas}) > 1:
        keys.problems.append(f"rope_theta is given twice and differently: {thetas}")
    clash = [k for k in (new.keys() & old.keys()) - {"rope_theta"} if new[k] != old[k]]
    keys.problems += [f"{k} differs between rope_parameters ({new[k]}) and rope_scaling ({old[k]})" for k in clash]
    if not thetas:
        reading.notes.append("no rope_theta in the config: 10000 is Transformers' default")
    block["rope_theta"] = float(thetas[0]) if thetas else 10000.0
    if block["rope_type"] == "yarn":
        if declared.get("attention_factor") is not None:
            block["attention_factor"] = float(declared["attention_factor"])
        elif block.get("attention_factor") is None:
            reading.notes.append(
                "YaRN without attention_factor: Transformers' rule is recorded; runtimes have taken other values"
            )
    else:
        block = {k: block[k] for k in ("rope_type", "rope_theta")}
    reading.config["rope_parameters"] = block


def _layers(keys: _Keys, reading: Reading, declared: Mapping[str, Any]) -> None:
    out = reading.config
    depth = out.get("num_hidden_layers", 0)
    kinds = keys.get("layer_types")
    if kinds is None and keys.get("use_sliding_window"):
        first = keys.get("max_window_layers")
        if first is None:
            keys.problems.append(
                "use_sliding_window is set without layer_types or max_window_layers: which layers slide is unknown"
            )
        kinds = ["sliding_attention" if i >= (first or 0) else "full_attention" for i in range(depth)]
    out["layer_types"] = kinds or ["full_attention"] * depth
    sliding = [kind == "sliding_attention" for kind in out["layer_types"]]
    if not any(sliding):
        out.pop("sliding_window", None)
    by_layer = keys.get("layer_is_causal")
    if by_layer is not None and len(by_layer) != depth:
        keys.problems.append(f"layer_is_causal has {len(by_layer)} entries for {depth} layers")
        by_layer = None
    if by_layer is not None and len(set(by_layer)) > 1:
        out["layer_is_causal"], out["is_causal"] = by_layer, False
        return
    stated = keys.get("is_causal") if by_layer is None else by_layer[0]
    stated = keys.nested.get("causal") if stated is None else stated
    out["is_causal"] = bool(stated)
    if stated is not None or not any(sliding):
        return
    non_causal = keys.top.get("sliding_window_non_causal")
    if reading.dialect.speculators:
        non_causal = reading.dialect.speculators == "dflash2" if non_causal is None else non_causal
        causal = not non_causal
    else:
        causal = reading.dialect.sliding_is_causal
        reading.notes.append(
            f"no is_causal: sliding layers are {'causal' if causal else 'bidirectional'} in the block, as its own code reads it"
        )
    if causal:
        out["layer_is_causal"] = sliding


def _taps(keys: _Keys, reading: Reading, declared: Mapping[str, Any]) -> None:
    out = reading.config
    convention: str | None = "output"
    ids = keys.get("target_layer_ids", "dspark_target_layer_ids")
    if ids is not None:
        convention = keys.get("tap_convention") or convention
    else:
        ids = keys.get("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
        torchspec = "output" if keys.top.get("_torchspec_version") else None
        convention = keys.get("tap_convention") or ("boundary" if reading.dialect.speculators else torchspec)
    if declared.get("target_layer_ids") is not None:
        out["target_layer_ids"] = list(declared["target_layer_ids"])
    elif ids is not None and convention == "output":
        out["target_layer_ids"] = ids
    elif ids is not None and convention == "boundary":
        out["target_layer_ids"] = [i - 1 for i in ids]
    elif ids is not None:
        reading.notes.append(
            f"layer ids {ids}: outputs or boundaries? the config does not say; declare target_layer_ids as outputs"
        )
    if ids is not None and convention != "output":
        out["aux_layer_ids"] = ids
    _target_depth(keys, reading, declared, out.get("target_layer_ids") or ids or [])


def _target_depth(keys: _Keys, reading: Reading, declared: Mapping[str, Any], ids: list[int]) -> None:
    out = reading.config
    stated, count = keys.get("target_num_hidden_layers"), keys.get("num_target_layers")
    if declared.get("target_num_hidden_layers") is not None:
        out["target_num_hidden_layers"] = declared["target_num_hidden_layers"]
    elif stated is not None:
        out["target_num_hidden_layers"] = stated
        if count not in (None, stated, len(ids)):
            keys.problems.append(f"num_target_layers is {count}: neither the depth {stated} nor the number of taps {len(ids)}")
    elif count is not None and count == len(ids) and ids and max(ids) >= count:
        reading.notes.append(f"num_target_layers {count} is the number of taps; the target's depth is not stated")
    elif count is not None:
        out["target_num_hidden_layers"] = count


def _stream(keys: _Keys, reading: Reading, declared: Mapping[str, Any]) -> None:
    stream = declared.get("capture_stream") or keys.get(*STREAM_KEYS)
    if stream is None and (fmt := keys.get("dspark_aux_hidden_state_format")):
        stream = ASCEND.get(fmt)
    if stream is None:
        stream = reading.dialect.fixed.get("capture_stream")
    if stream is not None:
        reading.config["capture_stream"] = stream


def _contract(keys: _Keys, reading: Reading, declared: Mapping[str, Any]) -> None:
    out = reading.config
    block, mask = declared.get("block_size") or keys.get("block_size"), keys.get("mask_token_id")
    if block is not None:
        out["block_size"] = block
    elif reading.dialect.family != "eagle3":
        reading.notes.append("no block_size in the config: a serving flag gives it")
    if mask is not None:
        out["mask_token_id"] = mask
    stated = keys.get("sample_from_anchor")
    if stated is None:
        stated = reading.dialect.fixed.get("sample_from_anchor", reading.dialect.speculators == "dspark")
    out["sample_from_anchor"] = bool(stated)
    for key in ("window_rule", "last_tap_normed"):
        value = keys.get(key)
        if value is not None or key in reading.dialect.fixed:
            out[key] = reading.dialect.fixed[key] if value is None else value


def _family(keys: _Keys, reading: Reading, declared: Mapping[str, Any]) -> None:
    out, dialect = reading.config, reading.dialect
    out.update({k: v for k in FAMILY[dialect.family] if (v := keys.get(k)) is not None})
    if out.get("final_logit_softcapping") == 0:
        out.pop("final_logit_softcapping")
    if dialect.fixed.get("use_qk_norm") is not None:
        out["use_qk_norm"] = dialect.fixed["use_qk_norm"]
    if dialect.family == "eagle3" and keys.get("use_aux_norm"):
        out["fc_norm"] = True
    projector = keys.nested.get("projector_type")
    if projector not in (None, dialect.projector):
        keys.problems.append(f"projector_type {projector!r}: a {dialect.family} draft has no such projector")
    if out.get("markov_head_type") == "classical":
        out["markov_head_type"] = "vanilla"


def _copies(reading: Reading, names: set[str] | None) -> None:
    """Whether the files hold the draft's own embedding table and head, or copies of the target's."""
    if names is None:
        return
    bare = {n.removeprefix("model.") for n in names}
    reading.config["owns_vocab_maps"] = "d2t" in bare
    for key, name in (("owns_embed_tokens", "embed_tokens.weight"), ("owns_lm_head", "lm_head.weight")):
        reading.config[key] = name in bare
    if "embed_tokens.weight" in bare and reading.dialect.family != "eagle3":
        reading.notes.append(
            "embed_tokens.weight is a copy of the target's table in the published drafts; compare it with `kconv check`"
        )
    if not _reduced(reading.config):
        return
    lacking = [
        what for key, what in (("owns_lm_head", "lm_head.weight"), ("owns_vocab_maps", "d2t and t2d")) if not reading.config[key]
    ]
    if lacking:
        raise KconvError(
            f"the draft predicts over {reading.config['draft_vocab_size']} of {reading.config['vocab_size']} tokens "
            f"without {' or '.join(lacking)}",
            hint="the target's own head and ids do not fit it; get the file that holds them (NeMo wrote eagle_meta.pt beside it)",
        )


def _reduced(config: Mapping[str, Any]) -> bool:
    return (config.get("draft_vocab_size") or config.get("vocab_size", 0)) < config.get("vocab_size", 0)


def _k25(reading: Reading) -> Reading:
    """A GQA DFlash draft with YaRN and one tap per layer is MAX's `DFlashKimiK25`, whose sliding layers are bidirectional."""
    out = reading.config
    taps = out.get("target_layer_ids") or []
    yarn = (out.get("rope_parameters") or {}).get("rope_type") == "yarn"
    if (
        reading.dialect.name == "z-lab-dflash"
        and out["attention_mode"] == "gqa"
        and yarn
        and len(taps) == out.get("num_hidden_layers")
    ):
        out.update(model_type="dflash_kimi_k25", architectures=["DFlashKimiK25"])
        out.pop("layer_is_causal", None)
    return reading


def _unsaid(reading: Reading) -> Reading:
    """Notes the open capture stream, except on Kimi K2.5, which has one residual stream."""
    if reading.config.get("capture_stream") is None and reading.config["model_type"] != "dflash_kimi_k25":
        reading.notes.append("the config does not name the capture stream; on Kimi K3 it must be declared (prefix or attn_res)")
    return reading


Step = Callable[[_Keys, Reading, Mapping[str, Any]], None]
STEPS: tuple[Step, ...] = (_attention, _rope, _layers, _taps, _stream, _contract, _family)
