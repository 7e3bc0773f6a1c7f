"""The quantisation block of a written config, in the words of compressed-tensors, from the forms that were written.

| what was written | block |
|---|---|
| every weight in the form it was published in | the source's own, word for word |
| no quantised weight | none, at either level |
| something else | one group a form; engines read what `format` and `targets` say, so `ignore` names every plain projection |

A form that compressed-tensors has no name for (ModelOpt's, Quark's, DeepSeek's) cannot stay beside a re-encoded one.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

from kconv.adapters.weights.forms import Form
from kconv.errors import KconvError

Config = dict[str, Any]
EXPERT_TARGET = r"re:.*block_sparse_moe\.experts\..*"
# Families of rows, as one expression where all of them are plain: engines look for fused names such as qkv_proj too.
FAMILIES = {
    "self_attn.": "re:.*self_attn.*",
    "mlp.shared_experts.": "re:.*shared_experts.*",
    "mlp.routed_expert_": "re:.*routed_expert_(down|up)_proj.*",
    "mlp.gate.": r"re:.*block_sparse_moe\.gate$",
    "mlp.": r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    "self_attention_res_proj.": "re:.*self_attention_res_proj.*",
    "mlp_res_proj.": "re:.*mlp_res_proj.*",
    "output_attn_res_proj.": "re:.*output_attn_res_proj.*",
    "lm_head.": "re:.*lm_head.*",
    "embed_tokens.": "re:.*embed_tokens.*",
}
VISION_MODULES = ("vision_tower.", "mm_projector.", "model.vision_tower.", "model.mm_projector.")
VISION = ("re:.*vision_tower.*", "re:.*mm_projector.*")


def block_of(rows: Mapping[str, Collection[Form]], experts: Collection[Form]) -> Config | None:
    """The block for rows (name -> their forms) and experts; raises KconvError for a form that it cannot say."""
    held: dict[Form, list[str]] = {}
    for name, forms in rows.items():
        for form in forms:
            held.setdefault(form, []).append(name)
    for form in experts:
        held.setdefault(form, []).append("")
    quantised = {form: names for form, names in held.items() if not form.plain}
    if not quantised:
        return None
    foreign = sorted(form.label for form in quantised if not form.format.sayable(form))
    if foreign:
        raise KconvError(
            f"{', '.join(foreign)} would stay beside weights whose form changes, and no quantization_config says both",
            hint="--dtype bfloat16 and --experts decode or re-encode the rest, or leave the options out to keep all as stored",
        )
    alone = len(quantised) == 1
    groups = {f"group_{i}": _group(form, names, alone) for i, (form, names) in enumerate(quantised.items())}
    formats = {group["format"] for group in groups.values()}
    return {
        "config_groups": groups,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "global_compression_ratio": None,
        "ignore": _ignored(rows, quantised),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def placed(config: Config, original: Config, block: Config) -> Config:
    """`config` with the block at the level where `original` has its own: in `text_config` where only that has one."""
    text = original.get("text_config")
    nested = isinstance(text, dict) and "quantization_config" in text and "quantization_config" not in original
    holder = config["text_config"] if nested and isinstance(config.get("text_config"), dict) else config
    holder["quantization_config"] = copy.deepcopy(block)
    return config


def _group(form: Form, names: list[str], alone: bool) -> Config:
    weights: Config = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 4, "observer": None,
        "observer_kwargs": {}, "scale_dtype": None, "strategy": "group", "symmetric": form.symmetric, "type": "float",
        "zp_dtype": None,
    }  # fmt: skip
    return {
        "format": form.format.format,
        "input_activations": form.format.activations(form),
        "output_activations": None,
        "targets": ["Linear"] if alone else [t for n in names for t in _targets(n)],
        "weights": weights | form.format.scheme(form),
    }


def _targets(name: str) -> list[str]:
    return ["re:.*" + _published(name).replace(".", r"\.") + "$"] if name else [EXPERT_TARGET]


def _published(name: str) -> str:
    """A row's module as the published names end; a dense MLP keeps `mlp`."""
    module = name.removesuffix(".weight")
    dense = module in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    return "block_sparse_moe." + module.removeprefix("mlp.") if module.startswith("mlp.") and not dense else module


def _ignored(rows: Mapping[str, Collection[Form]], quantised: Mapping[Form, list[str]]) -> list[str]:
    """Expressions for every plain row, the vision modules, and the experts where they are plain."""
    ignored: list[str] = []
    claimed = {name for names in quantised.values() for name in names}
    left = set(rows)
    for prefix, expression in FAMILIES.items():
        mine = sorted(name for name in left if name.startswith(prefix))
        left -= set(mine)
        plain = [name for name in mine if name not in claimed]
        if mine and plain == mine:
            ignored.append(expression)
        else:
            ignored += [target for name in plain for target in _targets(name)]
    seen = [] if any(name.startswith(VISION_MODULES) for name in claimed) else VISION
    return [*ignored, *([] if "" in claimed else [EXPERT_TARGET]), *seen]
