"""State-dict adapters: tables that join the names of two layouts, one file a family, imported only when needed.

| model_type of config.json | family | adapter |
|---|---|---|
| kimi_k3, kimi_linear, kimi_k3_text | Kimi K3, Kimi-Linear | `kconv.adapters.k3` |
| kimi_k31, or what has its indexer | Kimi K3.1 | the same, with `kconv.adapters.k3.indexer` |
| kimi_k2, kimi_k25, deepseek_v3 | Kimi K2, K2-Thinking, K2.5 and later | `kconv.adapters.k2` |
| a draft's, published or native, whatever its model_type | DFlash, DFlash2, DSpark, Eagle3 | `kconv.adapters.drafts.adapter` |

An adapter module has `layouts(checkpoint, options) -> Layouts` and `describe(checkpoint) -> dict`; it does no I/O.
A new layout is one file and one row here.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from kconv.checkpoint.reading import Checkpoint
from kconv.errors import KconvError
from kconv.options import Options
from kconv.planning.edges import Layouts

ADAPTERS: dict[str, str] = {
    "kimi_k3": "kconv.adapters.k3",
    "kimi_linear": "kconv.adapters.k3",
    "kimi_k3_text": "kconv.adapters.k3",
    "kimi_k31": "kconv.adapters.k3",
    "kimi_k31_text": "kconv.adapters.k3",
    "kimi_k2": "kconv.adapters.k2",
    "kimi_k25": "kconv.adapters.k2",
    "deepseek_v3": "kconv.adapters.k2",
}


def adapter_for(checkpoint: Checkpoint) -> ModuleType:
    """The adapter of a checkpoint, by its config's `model_type`; raises KconvError naming the type when none fits."""
    _check_kinds(checkpoint)
    model_type = checkpoint.config.get("model_type")
    drafts = importlib.import_module("kconv.adapters.drafts.adapter")
    if drafts.is_draft(checkpoint.config):  # before the table: a draft may carry its target's model_type
        return drafts
    if model_type in ADAPTERS:
        return importlib.import_module(ADAPTERS[model_type])
    if checkpoint.config and importlib.import_module("kconv.adapters.k3.indexer").recognised(checkpoint):
        return importlib.import_module("kconv.adapters.k3")
    if not checkpoint.config:
        raise KconvError(f"{checkpoint.where} has no config.json", hint="put the checkpoint's config.json beside the weights")
    nested = (checkpoint.config.get("text_config") or {}).get("model_type")
    inner = f", text_config.model_type {nested!r}" if nested else ""
    raise KconvError(
        f"{checkpoint.where}/config.json: model_type is {model_type!r}{inner}",
        hint=f"kconv knows {', '.join(ADAPTERS)}",
    )


def _check_kinds(checkpoint: Checkpoint) -> None:
    """What decides the family has the form that a config gives it."""
    for key, kind in {"model_type": str, "architectures": list, "text_config": dict, "dflash_config": dict}.items():
        value = checkpoint.config.get(key)
        strange = value is not None and not isinstance(value, kind)
        if strange or (key == "architectures" and not all(isinstance(name, str) for name in value or ())):
            raise KconvError(f"{checkpoint.where}/config.json: {key} is {value!r}", hint="give the checkpoint's own config.json")


def layouts_for(checkpoint: Checkpoint, options: Options) -> Layouts:
    """The rules that take a checkpoint to the layout that `options.to` names."""
    return adapter_for(checkpoint).layouts(checkpoint, options)
