"""Native PyTorch modules, one mechanism a file; importing this registers them with Transformers' Auto classes."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from kconv.modeling.cache import KimiK3Cache
from kconv.modeling.config import KimiK3TextConfig
from kconv.modeling.drafts import register
from kconv.modeling.model import KimiK3ForCausalLM, KimiK3PreTrainedModel, KimiK3TextModel
from kconv.modeling.static_cache import StaticKimiK3Cache

AutoConfig.register(KimiK3TextConfig.model_type, KimiK3TextConfig, exist_ok=True)
AutoModel.register(KimiK3TextConfig, KimiK3TextModel, exist_ok=True)
AutoModelForCausalLM.register(KimiK3TextConfig, KimiK3ForCausalLM, exist_ok=True)
register()

__all__ = [
    "KimiK3Cache", "KimiK3ForCausalLM", "KimiK3PreTrainedModel", "KimiK3TextConfig", "KimiK3TextModel", "StaticKimiK3Cache",
]  # fmt: skip
