"""What reads a draft: which families each runtime takes, the keys it needs, and what it would get silently wrong.

| runtime | file | refuses or gets wrong |
|---|---|---|
| vllm | shared; own for GQA DSpark | a missing mask; fc width other than taps x target width; DFlash2's embedding scale |
| sglang | shared | guesses missing taps; `block_size` 16 if missing; only silu; adds 1 to Eagle3 ids when the first is 1 |
| trtllm | shared | `block_size` at the top only; a missing mask becomes vocab_size |
| mlx | shared | `rope_theta`, `num_target_layers`, `block_size` at the top; a missing mask becomes 0 |
| transformers | shared | z-lab's own code: `block_size` at the top |
| max | own | Kimi K2.5 only; one tap a layer, ascending; a whole YaRN block; reads one layer early; one window for all layers |
| speculators | own | Qwen3 layers only; its mask measures the window from the anchor |
| nemo | shared | trains K3 DFlash drafts; no serving runtime registers `KimiK3DFlashDraftModel` |

Sources: the table "What each runtime needs" of the facts this project collected (vLLM, SGLang, TensorRT-LLM, MAX, dflash,
dflash-mlx, speculators at the revisions named there). None of vLLM, SGLang, TensorRT-LLM, MAX and MLX was run here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kconv.errors import KconvError, Problems
from kconv.packaging import runtime_configs as configs

Native = Mapping[str, Any]
YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
BLOCKS = ("dflash", "dflash2", "dspark", "kimi_k3_dflash")


@dataclass(frozen=True)
class Runtime:
    """One runtime: families it takes (`family/attention`), keys it needs, families that need a file of their own, hurdles,
    and the `model_type`s of the targets that it drafts for (none: any)."""

    name: str
    families: tuple[str, ...]
    needs: tuple[str, ...]
    own: tuple[str, ...] = ()
    hurdles: Callable[[Native], list[str]] = lambda c: []
    targets: tuple[str, ...] = ()


def _max(c: Native) -> list[str]:
    found, taps, block = [], c.get("target_layer_ids") or [], c.get("rope_parameters") or {}
    if len(taps) != c["num_hidden_layers"]:
        found.append(f"it needs one tap a layer: {len(taps)} taps, {c['num_hidden_layers']} layers")
    if list(taps) != sorted(taps):
        found.append(f"it concatenates in layer order, the draft was trained on {list(taps)}")
    if block.get("rope_type") != "yarn" or (lacking := [k for k in YARN if block.get(k) is None]):
        found.append(
            f"it needs a complete YaRN block: {', '.join(lacking) if block.get('rope_type') == 'yarn' else 'there is none'}"
        )
    kinds = set(c.get("layer_types") or [])
    if len(kinds) > 1:
        found.append("it applies a window to all layers or to none")
    if "sliding_attention" in kinds and any(configs.causal_layers(c)):
        found.append("its windows are not causal inside the block")
    return found


def _sglang(c: Native) -> list[str]:
    found = [f"hidden_act must be silu, not {c['hidden_act']}"] if c.get("hidden_act", "silu") != "silu" else []
    if c["model_type"] == "eagle3" and (c.get("target_layer_ids") or [None])[0] == 0:
        found.append("the first boundary would be 1, at which it adds 1 to every id")
    return found


def _speculators(c: Native) -> list[str]:
    found = []
    if c.get("sliding_window") and c.get("window_rule") != "anchor":
        found.append("its mask measures the window from the anchor, the draft was trained with it measured from the query")
    if c.get("hidden_act", "silu") != "silu":
        found.append(f"hidden_act must be silu, not {c['hidden_act']}")
    causal, kinds = configs.causal_layers(c), configs.windows(c)["layer_types"]
    if any(flag for flag, kind in zip(causal, kinds, strict=True) if kind == "full_attention"):
        found.append("its full-attention layers are always bidirectional in the block")
    return found


def _vllm(c: Native) -> list[str]:
    scaled = c["model_type"] == "dflash2" and c.get("input_embedding_scale", 1.0) != 1.0
    return ["it refuses an input_embedding_scale other than 1 in DFlash2"] if scaled else []


NESTED = ("dflash_config.mask_token_id", "dflash_config.target_layer_ids")
RUNTIMES: dict[str, Runtime] = {
    r.name: r
    for r in (
        Runtime(
            "vllm", ("dflash/gqa", "dflash2/gqa", "dflash2/mla", "dspark/gqa", "dspark/mla", "eagle3/mla", "eagle3/gqa"),
            ("architectures", "target_hidden_size"), own=("dspark/gqa",), hurdles=_vllm,
        ),
        Runtime(
            "sglang", ("dflash/gqa", "dflash2/gqa", "dspark/gqa", "eagle3/mla", "eagle3/gqa"),
            ("num_hidden_layers", "hidden_act"), hurdles=_sglang,
        ),
        Runtime("trtllm", ("dflash/gqa", "dflash2/gqa", "dspark/gqa"), ("model_type", "block_size", *NESTED, "rope_theta")),
        Runtime("mlx", ("dflash/gqa",), ("num_target_layers", "block_size", "head_dim", "rope_theta", *NESTED)),
        Runtime("transformers", ("dflash/gqa", "dflash2/gqa"), ("num_target_layers", "block_size", *NESTED)),
        Runtime(
            "max", ("dflash/gqa",), ("num_hidden_layers", "block_size", *NESTED, *(f"rope_scaling.{k}" for k in ("type", *YARN))),
            own=("dflash/gqa",), hurdles=_max, targets=("kimi_k25",),
        ),
        Runtime(
            "speculators", ("dflash/gqa", "dflash2/gqa", "dspark/gqa"),
            ("speculators_model_type", "speculators_config.algorithm", "speculators_config.verifier.architectures",
             "transformer_layer_config.hidden_size", "aux_hidden_state_layer_ids", "mask_token_id", "block_size",
             "draft_vocab_size"),
            own=("dflash/gqa", "dflash2/gqa", "dspark/gqa"), hurdles=_speculators,
        ),
        Runtime("nemo", ("kimi_k3_dflash/mla",), ("architectures", "num_target_layers", "block_size", *NESTED)),
    )
}  # fmt: skip
SERVING_BLOCK = {  # what serving runtimes need of every block draft, by family
    "dflash": (*NESTED, "block_size", "num_target_layers"),
    "dflash2": (*NESTED, "block_size", "num_target_layers", "dflash_config.conv_kernel_size", "dflash_config.selector_rank"),
    "dspark/gqa": (*NESTED, "block_size", "dflash_config.markov_rank"),
    "dspark/mla": ("mask_token_id", "target_layer_ids", "block_size", "markov_rank"),
    "eagle3": ("eagle_config.eagle_aux_hidden_state_layer_ids", "draft_vocab_size"),
}


def family(c: Native) -> str:
    """`family/attention` of a native config."""
    return f"{c['model_type'].removesuffix('_kimi_k25')}/{c['attention_mode']}"


def choose(c: Native, asked: Sequence[str] | None, target: str) -> tuple[list[Runtime], list[str]]:
    """The runtimes to write for, and notes on those left out; `target` is the `model_type` of the target's config.

    Raises Problems when one that was asked for cannot read the draft, KconvError when none can.
    """
    unknown = [name for name in asked or [] if name not in RUNTIMES]
    if unknown:
        raise KconvError(f"no runtime is called {', '.join(unknown)}", hint=f"these are known: {', '.join(RUNTIMES)}")
    chosen, left = [], []
    for name in asked or RUNTIMES:
        runtime = RUNTIMES[name]
        taken = family(c) in runtime.families
        reasons = runtime.hurdles(c) if taken else [f"it does not take {family(c)} drafts"]
        if taken and runtime.targets and target not in runtime.targets:
            reasons.append(f"it drafts for {', '.join(runtime.targets)} targets only, this one is {target}")
        if reasons:
            left.append(f"{name}: {'; '.join(reasons)}")
        else:
            chosen.append(runtime)
    if asked and left:
        raise Problems("not every runtime can read this draft:", left, hint="leave it out of --runtime")
    if not chosen:
        raise Problems("no runtime can read this draft:", left)
    return chosen, [line for line in left if "does not take" not in line]


def config_for(runtime: Runtime, c: Native, target: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json that a runtime reads; raises AssertionError if a key it needs is not in it."""
    if runtime.name == "max":
        config = configs.for_max(c)
    elif runtime.name == "vllm":
        config = configs.for_vllm(c)
    elif runtime.name == "speculators":
        config = configs.for_speculators(c, target)
    else:
        config = configs.shared(c)
    lacking = [path for path in needed(runtime, c) if lookup(config, path) is None]
    if lacking:
        raise AssertionError(f"{runtime.name} needs {lacking}")
    return config


def needed(runtime: Runtime, c: Native) -> tuple[str, ...]:
    """Every dotted key that a runtime needs for this draft."""
    name = family(c)
    name = "dspark/mla" if (runtime.name, name) == ("vllm", "dspark/gqa") else name  # flat keys
    serving = SERVING_BLOCK.get(name) or SERVING_BLOCK.get(name.split("/")[0], ())
    return (*runtime.needs, *(serving if runtime.name in ("vllm", "sglang", "trtllm") else ()))


def lookup(config: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; None if it is not there."""
    value: Any = config
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
