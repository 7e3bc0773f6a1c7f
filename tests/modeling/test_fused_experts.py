"""The fused experts in Triton's interpreter, and what decides whether they are used."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kconv.modeling import KimiK3TextConfig, expert_paths
from kconv.modeling.experts import KimiExperts
from kconv.modeling.wide_linear import wide_linear
from tests.modeling.tiny import K3


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_kernels_agree_with_float64_and_read_every_code_exactly() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(Path(__file__).with_name("experts_in_triton.py"))]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found.pop("inexact products") == 0
    forward = {k: v for k, v in found.items() if not k.startswith("gradient")}
    assert len(forward) == 12
    assert max(forward.values()) < 8e-3, found  # bf16 operands
    assert max(found.values()) < 2e-2, found


def experts(**changes: Any) -> KimiExperts:
    sizes = {"routed_expert_hidden_size": 128, "moe_intermediate_size": 128, "experts_format": "packed"}
    return KimiExperts(KimiK3TextConfig(**{**K3, **sizes, **changes}), 6)


def path(module: KimiExperts, x: torch.Tensor) -> str:
    return expert_paths.path_of(module, x, tuple(module.parameters()))


def test_a_layer_says_which_way_it_takes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.zeros(3, 128, dtype=torch.bfloat16)
    assert path(experts(), x) == "loop"  # no GPU here
    monkeypatch.setattr(expert_paths, "compiles_for", lambda device: True)
    expert_paths._say.cache_clear()
    with caplog.at_level("INFO", logger="kconv.modeling"):
        assert path(experts(), x) == "fused"
    assert "routed experts: fused" in caplog.text
    assert path(experts(), x.requires_grad_()) == "fused"


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, torch.float64),
        ({}, torch.float32),
        ({"routed_expert_hidden_size": 96}, torch.bfloat16),
        ({"moe_intermediate_size": 64}, torch.bfloat16),
    ],
)
def test_what_the_kernels_cannot_take_goes_the_other_ways(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(expert_paths, "compiles_for", lambda device: True)
    module = experts(**changes)
    assert path(module, torch.zeros(3, module.width, dtype=dtype)) == "loop"


def test_plain_experts_in_training_and_the_reference_order_are_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_paths, "compiles_for", lambda device: True)
    x = torch.zeros(3, 128, dtype=torch.bfloat16)
    plain = experts(experts_format="bf16")
    assert path(plain, x) == "loop"
    with torch.no_grad():
        assert path(plain, x) == "fused"
        plain.grouped = False
        assert path(plain, x) == "loop"


def test_a_wide_product_on_the_cpu_is_the_plain_one() -> None:
    x, weight = torch.randn(5, 64), torch.randn(7, 64).bfloat16()
    assert torch.equal(wide_linear(x, weight), x @ weight.float().T)
