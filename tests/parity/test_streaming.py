"""One layer in memory at a time: the same figures, faults still named, and nothing held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kconv
from kconv import parity
from kconv.parity.streaming import load_streamed
from tests.parity.goldens import LONG, TINY, golden, model, perturb, tamper


def test_streamed_figures_equal_those_in_memory() -> None:
    streamed = parity.streamed(LONG, golden(LONG), dtype="float64").data()
    held = parity.compare(model(LONG), golden(LONG)).data()
    assert streamed["verdict"] == "pass"
    assert streamed["runs"] == held["runs"]
    assert streamed["layers"] == held["layers"]


def test_never_more_than_one_part_is_in_memory() -> None:
    loaded: Any = load_streamed(LONG, dtype=torch.float64)
    resident: list[set[str]] = []

    def watch(*_: Any) -> None:
        parts = [n for n, p in loaded.named_parameters() if not p.is_meta]
        resident.append({".".join(n.split(".")[:3]) if ".layers." in n else n.split(".")[-2] for n in parts})

    for layer in loaded.model.layers:
        layer.self_attn.register_forward_pre_hook(watch)
    with torch.no_grad():
        loaded(input_ids=torch.arange(8)[None], use_cache=False)
    tail = {"norm", "output_attn_res_norm", "output_attn_res_proj"}
    assert resident == [{f"model.layers.{i}", *tail} for i in range(5)]
    assert {n for n, p in loaded.named_parameters() if not p.is_meta} == {f"model.{n}.weight" for n in tail}


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_second_checkpoint_in_the_other_layout(dtype: str, tmp_path: Path) -> None:
    kconv.convert(LONG, tmp_path / "out")
    report = parity.streamed(tmp_path / "out", LONG, dtype=dtype, tokens=40, seed=3)
    assert report.passed, report.lines()
    assert report.data()["max_abs"] == 0
    assert report.data()["tokens"] == 80


def test_a_fault_against_a_second_checkpoint_is_named(tmp_path: Path) -> None:
    kconv.convert(LONG, tmp_path / "out")
    tamper(tmp_path / "out", lambda t: t["model.layers.3.self_attn.k_proj.weight"].mul_(1.25))
    report = parity.streamed(tmp_path / "out", LONG, dtype="bfloat16", tokens=40, source=LONG)
    assert not report.passed
    assert report.first_divergence == "layers.3.self_attn.k_proj"
    assert report.divergence is not None
    assert report.divergence["tensors"] == ["layers.3.self_attn.k_proj.weight"]


def test_hidden_states_alone_and_the_source_streamed(tmp_path: Path) -> None:
    kconv.convert(TINY, tmp_path / "out", experts="bf16")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.6.mlp.experts.down_proj"
        if name in tensors:
            perturb(tensors[name].double())
            tensors[name][4] = tensors[name][4].t().clone()

    tamper(tmp_path / "out", change)
    report = parity.streamed(tmp_path / "out", golden(TINY), dtype="float64", source=TINY)
    assert not report.passed
    assert report.first_divergence == "layers.6.mlp.experts"
