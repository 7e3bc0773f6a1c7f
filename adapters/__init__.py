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
from dataclasses import dataclass
from types import ModuleType

from kconv.checkpoint.reading import Checkpoint
from kconv.errors import KconvError
from kconv.planning.plan import Layouts

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
TARGETS = ("native", "hf", "hf-text", "nemo")
EXPERTS = ("packed", "bf16", "fp16", "fp32", "mxfp4", "nvfp4", "fp8-block")
WEIGHTS = ("fp8-block",)
VISION = ("keep", "drop")
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Options:
    """What a user asks of a conversion; None means the adapter's default."""

    to: str = "native"
    experts: str | None = None
    vision: str | None = None
    dtype: str | None = None
    sidecar: bool = True
    layers: tuple[int, int] | None = None
    tie: bool = False
    weights: str | None = None
    block: tuple[int, int] | None = None
    dsa_topk: int | None = None
    indexer_eps: float | None = None

    def __post_init__(self) -> None:
        choices = {"to": TARGETS, "experts": EXPERTS, "vision": VISION, "dtype": DTYPES, "weights": WEIGHTS}
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed and not (value is None and name != "to"):
                raise KconvError(f"unknown {name} {value!r}", hint=f"there are {', '.join(allowed)}")
        if self.block is not None:
            object.__setattr__(self, "block", tuple(self.block))  # a manifest's JSON has lists
        if self.block and not (len(self.block) == 2 and all(type(n) is int and n > 0 for n in self.block)):
            raise KconvError(f"block {self.block!r} is no block size", hint="give rows and columns, for example (128, 128)")
        if self.dsa_topk is not None and not (type(self.dsa_topk) is int and self.dsa_topk > 0):
            raise KconvError(f"dsa_topk {self.dsa_topk!r} is no number of keys", hint="give a positive whole number")
        if self.indexer_eps is not None and not (isinstance(self.indexer_eps, float) and 0 < self.indexer_eps < 1):
            raise KconvError(f"indexer_eps {self.indexer_eps!r} is no eps", hint="give a small positive number, for example 1e-6")
        if self.layers and not (len(self.layers) == 2 and 0 <= self.layers[0] <= self.layers[1]):
            raise KconvError(f"layers {self.layers!r} are no range", hint="give the first and the last, for example (0, 3)")


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
