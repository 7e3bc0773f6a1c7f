"""Real experts of `golden/tiny-k3`, re-encoded by compressed-tensors into each format, through the transforms and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from kconv.kernels.common import same_bits
from kconv.transforms.fp8 import Fp8, Mxfp8
from kconv.transforms.int4 import Int4
from kconv.transforms.mxfp4 import Mxfp4
from kconv.transforms.nvfp4 import Nvfp4
from tests.unit.test_kernels_oracles import FP8, MXFP8, NVFP4, compressor, decompressed, scheme
from tests.unit.transform_checks import round_trip

GOLDEN = Path(__file__).parents[1] / "data/golden/tiny-k3"


@pytest.fixture(scope="module")
def experts() -> dict[str, list[torch.Tensor]]:
    """Packed codes and scales of every expert projection, by name."""
    files = sorted(set(json.loads((GOLDEN / "model.safetensors.index.json").read_text())["weight_map"].values()))
    tensors = {}
    for file in files:
        with safe_open(GOLDEN / file, "pt") as opened:
            tensors.update({name: opened.get_tensor(name) for name in opened.keys() if ".experts." in name})  # noqa: SIM118
    names = sorted({name.rpartition(".")[0] for name in tensors})
    return {name: [tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"]] for name in names}


@pytest.fixture(scope="module")
def weight(experts) -> torch.Tensor:
    """All w1 of the checkpoint below one another, in bf16."""
    parts = [Mxfp4("BF16").forward(pair)[0] for name, pair in experts.items() if name.endswith("w1")]
    return torch.cat(parts)


def test_every_expert_comes_back_bit_for_bit(experts):
    assert len(experts) > 100
    for pair in list(experts.values())[::5]:
        round_trip(Mxfp4("BF16"), pair)
    packed, scale = (torch.cat([pair[i].flatten() for pair in experts.values()]) for i in range(2))
    values, _ = Mxfp4("BF16").forward([packed, scale])
    assert torch.equal(Mxfp4("BF16").backward([values, scale])[0], packed)
    assert {0, 8} <= set((packed & 15).unique().tolist())  # both zeros are there


def through(name, state, transform, left, **args):
    """kconv's values are the library's own, and the stored bytes come back."""
    values = round_trip(transform, left)[0]
    assert same_bits(values, decompressed(name, state, **args).contiguous())


def test_fp8_block(weight):
    args = {**FP8, "strategy": "block", "block_structure": [16, 16]}
    tiles = weight.view(weight.shape[0] // 16, 16, -1, 16).abs().amax((1, 3)).float()
    scale = (tiles / 448).clamp(min=1e-9).bfloat16()
    state = compressor("float-quantized").compress({"weight": weight, "weight_scale": scale}, scheme(**args))
    transform = Fp8("BF16", block=(16, 16), scale_dtype="BF16")
    through("float-quantized", state, transform, [state["weight"], state["weight_scale"]], **args)


def test_fp8_channel(weight):
    args = {**FP8, "strategy": "channel"}
    scale = (weight.abs().amax(1, keepdim=True).float() / 448).clamp(min=1e-9).bfloat16()
    state = compressor("float-quantized").compress({"weight": weight, "weight_scale": scale}, scheme(**args))
    transform = Fp8("BF16", layout="channel-2d", scale_dtype="BF16")
    through("float-quantized", state, transform, [state["weight"], state["weight_scale"]], **args)


def test_mxfp8(weight):
    top = weight.view(weight.shape[0], -1, 32).abs().amax(-1).float()
    scale = torch.exp2(torch.frexp(top.clamp(min=1e-9)).exponent.float() - 9).bfloat16()
    state = compressor("mxfp8-quantized").compress({"weight": weight, "weight_scale": scale}, scheme(**MXFP8))
    through("mxfp8-quantized", state, Mxfp8("BF16"), [state["weight"], state["weight_scale"]], **MXFP8)


def test_nvfp4(weight):
    whole = (448 * 6 / weight.abs().max().float()).reshape(1)
    top = weight.view(weight.shape[0], -1, 16).abs().amax(-1).float()
    scale = (top / 6 * whole).clamp(min=2.0**-9).to(torch.float8_e4m3fn).float()
    given = {"weight": weight, "weight_scale": scale, "weight_global_scale": whole}
    state = compressor("nvfp4-pack-quantized").compress(given, scheme(**NVFP4))
    left = [state["weight_packed"], state["weight_scale"], state["weight_global_scale"]]
    through("nvfp4-pack-quantized", state, Nvfp4("BF16"), left, **NVFP4)


def test_int4(weight):
    args = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    scale = (weight.view(weight.shape[0], -1, 32).abs().amax(-1).float() / 7).clamp(min=1e-9).bfloat16()
    state = compressor("pack-quantized").compress({"weight": weight, "weight_scale": scale}, scheme(**args))
    left = [state["weight_packed"], state["weight_scale"], state["weight_shape"]]
    through("pack-quantized", state, Int4("BF16"), left, **args)
