"""NeMo AutoModel's K3 on a published checkpoint: argv FOLDER IDS.safetensors OUT.safetensors, run in a process of its own.

On the CPU its fla calls need `TRITON_INTERPRET=1`, set before triton is imported, and an autotuner that does not look for a GPU.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

STALE = ("quantization_config", "auto_map", "dtype", "architectures", "model_type")


def empty_model(text: dict[str, Any], dtype: torch.dtype, device: str = "cpu", experts: str = "torch_mm") -> Any:
    """NeMo's KimiK3ForCausalLM of a text config, in `dtype`."""
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.kimi_k3.config import KimiK3TextConfig
    from nemo_automodel.components.models.kimi_k3.model import KimiK3ForCausalLM

    config = KimiK3TextConfig(**{k: v for k, v in text.items() if k not in STALE}, torch_dtype=dtype)
    if device == "cpu":
        config.kda_mode, config.kda_use_fused_gate = "fused_recurrent", False
    backend = BackendConfig(
        attn="eager" if device == "cpu" else "sdpa",
        linear="torch",
        rms_norm="torch_fp32",
        rope_fusion=False,
        dispatcher="torch",
        experts=experts,
        enable_hf_state_dict_adapter=True,
    )
    return KimiK3ForCausalLM(config, backend=backend)


def nemo_model(folder: Path, dtype: torch.dtype, device: str = "cpu", experts: str = "torch_mm") -> Any:
    """The same with a published checkpoint's weights, by NeMo's own adapter; its fp32 parameters stay fp32."""
    model = empty_model(json.loads((folder / "config.json").read_text())["text_config"], dtype, device, experts)
    model.state_dict_adapter.dtype = torch.float32
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("model-*.safetensors")):
        tensors |= load_file(file)
    tensors = {k: v for k, v in tensors.items() if k.startswith("language_model.")}
    native = model.state_dict_adapter.from_hf(tensors)
    wanted = model.state_dict()
    missing = [k for k in wanted if k not in native and not k.endswith("_extra_state")]
    assert not missing, missing[:5]
    with torch.no_grad():
        for name, target in wanted.items():
            if name in native:
                target.copy_(native[name].reshape(target.shape))
    return model.to(device).eval()


def no_autotuning() -> None:
    """Triton's autotuner takes the first configuration instead of looking for a GPU to time them on."""
    import triton.runtime.autotuner as autotuner

    constant = [1.0, 1.0, 1.0]
    autotuner.Autotuner._bench = lambda self, *a, config=None, **k: constant
    autotuner.Autotuner.do_bench = property(lambda self: lambda fn, quantiles=None: constant)


def main() -> None:
    no_autotuning()
    folder, ids_file, out = (Path(a) for a in sys.argv[1:4])
    inputs = load_file(ids_file)
    model = nemo_model(folder, torch.float32)
    with torch.no_grad():
        answers = {"logits": model(inputs["input_ids"]).logits}
        mask = inputs["attention_mask"]
        answers["logits_padded"] = model(inputs["input_ids"], attention_mask=mask, padding_mask=mask == 0).logits
    save_file({k: v.float().contiguous() for k, v in answers.items()}, out)


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    main()
