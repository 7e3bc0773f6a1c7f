"""The made-up checkpoints compute: finite logits of order 1, in every shape, and calm ones forgive rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kconv
from tests.reading import json_of

SMALL: dict[str, Any] = {
    "layers": 4, "hidden": 64, "dense_width": 48, "experts": 4, "expert_width": 32, "kda_head_dim": 16, "vocab": 300,
}  # fmt: skip


def logits(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = kconv.load(folder, dtype=dtype)
    ids = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(ids).logits.float()


def test_logits_of_a_hundred_seeds(tmp_path):
    for seed in range(100):
        kconv.tiny("k3", tmp_path / str(seed), seed=seed, latent=32, calm=seed % 2 == 0, **SMALL)
        out = logits(tmp_path / str(seed))
        assert out.isfinite().all(), seed
        assert 0.5 < out.std() < 2, seed


@pytest.mark.parametrize(
    "options",
    (
        {"experts": 8, "expert_groups": 4, "topk_groups": 2, "top_k": 3},
        {"expert_counts": (4, 3, 2), "dense_layers": 1},
        {"dense_layers": 3, "block": 1},
        {"experts": 0},
        {"experts": 1, "top_k": 1, "shared_experts": 0},
        {"heads": 3, "kda_heads": 5, "a_log": "heads", "conv_kernel": 3},
        {"latent": 0, "q_lora": 0},
        {"plain_experts": True, "root": "model."},
        {"mla_layers": (1, 2), "moe_every": 2},
        {"tied": True, "dtype": "float32"},
    ),
)
def test_logits_of_every_kind_of_shape(tmp_path, options):
    kconv.tiny("k3", tmp_path / "k3", **SMALL | options)
    out = logits(tmp_path / "k3")
    assert out.isfinite().all()
    assert 0.5 < out.std() < 2


def test_kimi_linear_computes(tmp_path):
    for seed in range(5):
        kconv.tiny("kimi-linear", tmp_path / str(seed), seed=seed, calm=seed == 0, **SMALL)
        out = logits(tmp_path / str(seed))
        assert out.isfinite().all(), seed
        assert 0.5 < out.std() < 2, seed


def test_kimi_linear_s_native_config_says_what_its_published_one_leaves_out(tmp_path):
    kconv.tiny("kimi-linear", tmp_path / "source", **SMALL)
    kconv.convert(tmp_path / "source", tmp_path / "native")
    config = json_of(tmp_path / "native" / "config.json")
    assert config["hidden_act"] == "silu"
    assert (config["attn_res_block_size"], config["routed_expert_hidden_size"]) == (None, None)
    assert (config["mla_use_output_gate"], config["latent_moe_use_norm"]) == (False, False)
    assert torch.equal(logits(tmp_path / "native"), logits(tmp_path / "source"))


def test_calm_weights_amplify_rounding_less(tmp_path):
    errors = {}
    for calm in (False, True):
        folder = tmp_path / f"calm-{calm}"
        kconv.tiny("k3", folder, layers=12, experts=8, hidden=128, vocab=300, calm=calm, seed=1)
        errors[calm] = (logits(folder, torch.bfloat16) - logits(folder)).abs().amax(-1).median()
    assert errors[True] < errors[False] / 4, errors
