"""Loads a small checkpoint in the published layout into the native model, independently of the adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from kconv.kernels.mxfp4 import decode
from kconv.modeling import KimiK3ForCausalLM, KimiK3TextConfig

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
PREFIX = "language_model."


def published_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("model-*.safetensors")):
        tensors |= load_file(file)
    return {k.removeprefix(PREFIX): v for k, v in tensors.items() if k.startswith(PREFIX)}


def native_state(tensors: dict[str, torch.Tensor], config: KimiK3TextConfig) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for name, t in tensors.items():
        if ".experts." in name:
            continue
        value = t[: config.linear["num_heads"]] if name.endswith("A_log") else t
        state[name.replace(".block_sparse_moe.", ".mlp.")] = value
    for layer in range(config.num_hidden_layers):
        if experts := config.experts_of(layer):
            state |= _experts(tensors, f"model.layers.{layer}.", experts, config.experts_format == "packed")
    return state


def _experts(tensors: dict[str, torch.Tensor], prefix: str, experts: int, packed: bool) -> dict[str, torch.Tensor]:
    def stack(weights: str, part: str) -> torch.Tensor:
        rows = [
            torch.cat([tensors[f"{prefix}block_sparse_moe.experts.{e}.w{w}.{part}"] for w in weights]) for e in range(experts)
        ]
        return torch.stack(rows)

    state: dict[str, torch.Tensor] = {}
    for name, weights in (("gate_up_proj", "13"), ("down_proj", "2")):
        codes, scales = stack(weights, "weight_packed"), stack(weights, "weight_scale")
        if packed:
            state |= {f"{prefix}mlp.experts.{name}_packed": codes, f"{prefix}mlp.experts.{name}_scale": scales}
        else:
            state[f"{prefix}mlp.experts.{name}"] = decode(codes, scales, torch.float32)
    return state


def load_published(name: str, dtype: torch.dtype, experts_format: str = "packed", attention: str = "eager") -> Any:
    folder = GOLDEN / name
    config = KimiK3TextConfig.from_k3(json.loads((folder / "config.json").read_text()), experts_format=experts_format)
    config._attn_implementation = attention
    model: Any = KimiK3ForCausalLM(config)
    model.load_state_dict(native_state(published_tensors(folder), config), strict=True)
    return model.to(dtype).eval()


def golden(name: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / name / "golden.safetensors")
