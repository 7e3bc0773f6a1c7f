"""Which modules PEFT adapts by default: its own tables, filled in for this family once PEFT is there.

| method | modules |
|---|---|
| LoRA and the like | queries and values: of KDA `q_proj`, `v_proj`; of MLA `q_proj` or `q_b_proj`, `kv_b_proj` |
| LayerNorm tuning | all norms of the stream |
"""

from __future__ import annotations

import sys

LOW_RANK = ("LORA", "ADALORA", "LOHA", "LOKR", "OFT", "BOFT")
ATTENTION = ["q_proj", "v_proj", "q_b_proj", "kv_b_proj"]
NORMS = ["input_layernorm", "post_attention_layernorm", "norm"]


def register(model_type: str) -> None:
    """Make PEFT know `model_type`, where PEFT has been imported; importing it here would cost every user its seconds."""
    constants = sys.modules.get("peft.utils.constants")
    if constants is None:
        return
    wanted = {**dict.fromkeys(LOW_RANK, ATTENTION), "LNTUNING": NORMS}
    for method, modules in wanted.items():
        table = getattr(constants, f"TRANSFORMERS_MODELS_TO_{method}_TARGET_MODULES_MAPPING", None)
        if isinstance(table, dict):
            table.setdefault(model_type, list(modules))
