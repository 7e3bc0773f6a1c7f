"""The same conversion by other libraries, to measure beside ours: LIBRARY SOURCE OUT; prints the peak memory in kB.

* nemo-automodel: its K3 state-dict adapter from the published names to its grouped bf16 experts.
* compressed-tensors: its MXFP4 decompression, expert by expert, into per-expert bf16 matrices.

Each loads, converts and saves with the safetensors library, file by file where its interface allows it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from safetensors.torch import load_file, save_file

STALE = ("quantization_config", "auto_map", "dtype", "architectures", "model_type")


def nemo(source: Path, out: Path) -> None:
    """NeMo AutoModel's adapter over the whole state dict: its groups need all experts of the model at once."""
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.kimi_k3.config import KimiK3TextConfig
    from nemo_automodel.components.models.kimi_k3.model import KimiK3ForCausalLM

    text = json.loads((source / "config.json").read_text())["text_config"]
    config = KimiK3TextConfig(**{k: v for k, v in text.items() if k not in STALE}, torch_dtype=torch.bfloat16)
    backend = BackendConfig(
        attn="eager", linear="torch", rms_norm="torch_fp32", rope_fusion=False, dispatcher="torch", experts="torch_mm",
        enable_hf_state_dict_adapter=True,
    )  # fmt: skip
    with torch.device("meta"):
        adapter = KimiK3ForCausalLM(config, backend=backend).state_dict_adapter
    adapter.dtype = torch.bfloat16
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("model-*.safetensors")):
        tensors |= {k: v for k, v in load_file(file).items() if k.startswith("language_model.")}
    native = adapter.from_hf(tensors)
    save_file({k: v.contiguous() for k, v in native.items()}, out / "model.safetensors")


def compressed(source: Path, out: Path) -> None:
    """compressed-tensors' decompression, one source file at a time."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    text = json.loads((source / "config.json").read_text())["text_config"]
    weights = text["quantization_config"]["config_groups"]["group_0"]["weights"]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
    for file in sorted(source.glob("model-*.safetensors")):
        made = {}
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith("weight_packed"):
                pair = {"weight_packed": tensor, "weight_scale": tensors[name.replace("_packed", "_scale")]}
                made[name.removesuffix("_packed")] = compressor.decompress(pair, scheme)["weight"].to(torch.bfloat16)
            elif not name.endswith("weight_scale"):
                made[name] = tensor
        save_file(made, out / file.name)


def main() -> None:
    library, source, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    out.mkdir()
    {"nemo-automodel": nemo, "compressed-tensors": compressed}[library](source, out)
    for file in out.iterdir():
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
    status = Path("/proc/self/status").read_text().splitlines()
    print(next(line.split()[1] for line in status if line.startswith("VmHWM")))


if __name__ == "__main__":
    main()
