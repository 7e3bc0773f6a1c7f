"""The draft families by `model_type`, imported when they are asked for.

| model_type | config | model |
|---|---|---|
| `kimi_k3_dflash` | `KimiK3DFlashConfig` | `KimiK3DFlashDraftModel` |
| `dflash_kimi_k25`, `dflash` | `DFlashKimiK25Config`, `DFlashConfig` | `DFlashKimiK25`, `DFlashDraftModel` |
| `dflash2` | `DFlash2Config` | `DFlash2DraftModel` |
| `dspark` | `DSparkConfig` | `DSparkDraftModel` |
| `eagle3` | `Eagle3Config` | `Eagle3DraftModel` |
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kconv.errors import KconvError

if TYPE_CHECKING:
    from kconv.modeling.drafts.config import DraftConfig

CLASSES: dict[str, tuple[str, str, str]] = {
    "kimi_k3_dflash": ("kconv.modeling.drafts.dflash_k3", "KimiK3DFlashConfig", "KimiK3DFlashDraftModel"),
    "dflash_kimi_k25": ("kconv.modeling.drafts.dflash", "DFlashKimiK25Config", "DFlashKimiK25"),
    "dflash": ("kconv.modeling.drafts.dflash", "DFlashConfig", "DFlashDraftModel"),
    "dflash2": ("kconv.modeling.drafts.dflash2", "DFlash2Config", "DFlash2DraftModel"),
    "dspark": ("kconv.modeling.drafts.dspark", "DSparkConfig", "DSparkDraftModel"),
    "eagle3": ("kconv.modeling.drafts.eagle3", "Eagle3Config", "Eagle3DraftModel"),
}


def config_class(model_type: str) -> type[DraftConfig]:
    """The config class of a native `model_type`; raises KconvError for one that is no draft."""
    return _get(model_type, 1)


def model_class(model_type: str) -> Any:
    """The model class of a native `model_type`."""
    return _get(model_type, 2)


def _get(model_type: str, which: int) -> Any:
    if model_type not in CLASSES:
        raise KconvError(f"model_type {model_type!r} is no native draft", hint=f"these are: {', '.join(CLASSES)}")
    row = CLASSES[model_type]
    return getattr(importlib.import_module(row[0]), row[which])


def register() -> None:
    """Make the Auto classes of Transformers know the draft families."""
    from transformers import AutoConfig, AutoModel

    for model_type in CLASSES:
        AutoConfig.register(model_type, config_class(model_type), exist_ok=True)
        AutoModel.register(config_class(model_type), model_class(model_type), exist_ok=True)
