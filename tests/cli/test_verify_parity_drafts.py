"""`kconv verify-parity` for drafts: both layouts pass in both precisions, every fault fails, what does not belong is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import kconv
from kconv.cli import cli
from kconv.parity.drafts import LIMIT

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
DRAFTS = ["k3-dflash-draft", "k25-dflash-draft"]
CONTRACT = {"verdict", "max_abs", "max_kl", "mean_kl", "top1_agreement", "worst_token", "routing_flips", "first_divergence",
            "nan", "reference", "dtype"}  # fmt: skip
Tensors = dict[str, torch.Tensor]


def verify(converted: Path, reference: Path, *args: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(cli, ["verify-parity", str(converted), "--reference", str(reference), "--json", *args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, json.loads(result.stdout)


def answers(name: str) -> Path:
    return GOLDEN / name / "golden.safetensors"


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp("drafts") / name for name in DRAFTS}
    for name, out in made.items():
        kconv.convert(GOLDEN / name, out)
    return made


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", DRAFTS)
def test_passes_in_both_layouts(name: str, dtype: str, native: dict[str, Path]) -> None:
    for folder in (GOLDEN / name, native[name]):
        code, data = verify(folder, answers(name), "--dtype", dtype)
        assert code == 0
        assert set(data) >= CONTRACT
        assert data["verdict"] == "pass"
        assert data["dtype"] == dtype
        assert set(data["runs"]) == {"output", "output_one_block", "cached"}
        assert 0 < data["max_abs"] < LIMIT
        assert (data["nan"], data["first_divergence"], data["routing_flips"]) == (False, None, None)


def test_for_people(native: dict[str, Path]) -> None:
    result = CliRunner().invoke(
        cli, ["verify-parity", str(native["k3-dflash-draft"]), "--reference", str(answers("k3-dflash-draft"))]
    )
    assert result.exit_code == 0
    assert result.stdout.rstrip().endswith("verdict: pass")
    assert "float32 on cpu" in result.stdout


def swap(tensors: Tensors, a: str, b: str) -> None:
    tensors[a], tensors[b] = tensors[b], tensors[a]


FAULTS: dict[str, tuple[str, Callable[[Tensors], Any]]] = {
    "one element": (DRAFTS[0], lambda t: t["layers.1.self_attn.kv_b_proj.weight"].view(-1)[7].add_(0.01)),
    "layers swapped": (DRAFTS[1], lambda t: swap(t, "layers.0.self_attn.q_proj.weight", "layers.1.self_attn.q_proj.weight")),
    "gate for up": (DRAFTS[1], lambda t: swap(t, "layers.2.mlp.gate_proj.weight", "layers.2.mlp.up_proj.weight")),
    "taps in another order": (DRAFTS[0], lambda t: t.update({"fc.weight": torch.cat(t["fc.weight"].chunk(3, 1)[::-1], 1)})),
    "a norm left at one": (DRAFTS[1], lambda t: t["layers.0.self_attn.k_norm.weight"].fill_(1.0)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_fails(fault: str, tmp_path: Path) -> None:
    name, spoil = FAULTS[fault]
    (tmp_path / "config.json").write_bytes((GOLDEN / name / "config.json").read_bytes())
    tensors = {n: t.float() for n, t in load_file(GOLDEN / name / "model.safetensors").items()}
    spoil(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    code, data = verify(tmp_path, answers(name))
    assert code == 1
    assert data["verdict"] == "fail"
    assert data["max_abs"] > LIMIT
    assert {f["check"] for f in data["failed"]} == {"output", "output_one_block", "cached"}


def test_not_a_number_fails(tmp_path: Path) -> None:
    name = DRAFTS[0]
    entries = load_file(answers(name))
    entries["output"][1, 5, 3] = float("nan")
    save_file(entries, tmp_path / "golden.safetensors")
    code, data = verify(GOLDEN / name, tmp_path / "golden.safetensors")
    assert code == 1
    assert data["nan"] is True
    assert data["max_abs"] is None
    assert data["worst_token"] == {"row": 1, "position": 5}


@pytest.mark.parametrize(
    ("converted", "reference", "said"),
    [
        ("k3-dflash-draft", "tiny-k3/golden.safetensors", "no golden file of a draft"),
        ("k3-dflash-draft", "k3-dflash-draft", "no golden file of a draft"),
        ("tiny-k3", "k3-dflash-draft/golden.safetensors", "no draft that kconv knows"),
    ],
)
def test_what_does_not_belong_together(converted: str, reference: str, said: str) -> None:
    code, data = verify(GOLDEN / converted, GOLDEN / reference)
    assert code == 2
    assert said in data["error"]["message"]


def test_coarse_precision_and_other_shapes_are_refused(tmp_path: Path) -> None:
    name = DRAFTS[0]
    code, data = verify(GOLDEN / name, answers(name), "--dtype", "bfloat16")
    assert code == 2
    assert "says nothing of bfloat16" in data["error"]["message"]
    entries = load_file(answers(name))
    entries["target_hidden"] = entries["target_hidden"][..., :-1].contiguous()
    save_file(entries, tmp_path / "golden.safetensors")
    code, data = verify(GOLDEN / name, tmp_path / "golden.safetensors")
    assert code == 2
    assert "target_hidden is [2, 21, 383], this draft takes [B, tokens, 384]" in data["error"]["message"]
