"""`kconv verify-parity` and `kconv capture`: exit codes, the JSON contract, messages."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import kconv
from kconv.cli import cli
from tests.parity.goldens import CALM, LONG, TINY, golden, tamper

CONTRACT = {"verdict", "max_abs", "max_kl", "mean_kl", "top1_agreement", "worst_token", "routing_flips", "first_divergence",
            "nan", "reference", "dtype"}  # fmt: skip
Tensors = dict[str, torch.Tensor]


def run(*args: Any) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli, [str(a) for a in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.stdout, result.stderr


def verify(converted: Path, *args: Any, reference: Path | None = None) -> tuple[int, dict[str, Any]]:
    code, out, _ = run("verify-parity", converted, "--reference", reference or golden(LONG), "--json", *args)
    return code, json.loads(out)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("parity") / "out"
    kconv.convert(LONG, out)
    return out


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    """A converted checkpoint to spoil."""
    return Path(shutil.copytree(made, tmp_path / "out"))


def test_the_contract_of_the_json(made: Path) -> None:
    code, data = verify(made, "--dtype", "float64")
    assert code == 0
    assert set(data) >= CONTRACT
    assert data["verdict"] == "pass"
    assert data["dtype"] == "float64"
    assert data["max_abs"] < 2e-6
    assert isinstance(data["routing_flips"], int)
    assert data["first_divergence"] is None
    assert data["nan"] is False
    assert set(data["worst_token"]) == {"row", "position", "abs", "kl"}
    assert data["subject"] == hashlib.sha256((made / "kconv.json").read_bytes()).hexdigest()


def test_the_default_precision_is_float32_and_said(made: Path) -> None:
    code, text, _ = run("verify-parity", made, "--reference", golden(LONG))
    assert code == 0
    assert "float32 on cpu" in text
    assert "in float64" in text
    assert text.rstrip().endswith("verdict: pass")


def swap(tensors: Tensors, names: list[str]) -> None:
    for name in names:
        tensors[name][[0, 1]] = tensors[name][[1, 0]]


def transpose(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name].t().contiguous()


def halves(tensors: Tensors, names: list[str]) -> None:
    for name in names:
        tensors[name] = torch.cat(tensors[name].chunk(2, dim=1)[::-1], dim=1).contiguous()


EXPERTS = [f"model.layers.3.mlp.experts.gate_up_proj_{n}" for n in ("packed", "scale")]
FAULTS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "perturbed": (lambda t: t["model.layers.2.self_attn.kv_b_proj.weight"].mul_(1.01), "layers.2.self_attn.kv_b_proj"),
    "one element": (lambda t: t["model.layers.4.mlp.gate.weight"].view(-1)[5].add_(0.01), "layers.4.mlp.gate"),
    "transposed": (lambda t: transpose(t, "model.layers.1.self_attn.v_proj.weight"), "layers.1.self_attn.v_proj"),
    "experts swapped": (lambda t: swap(t, EXPERTS), "layers.3.mlp.experts"),
    "gate for up": (lambda t: halves(t, EXPERTS), "layers.3.mlp.experts"),
    "bias dropped": (lambda t: t["model.layers.1.mlp.gate.e_score_correction_bias"].zero_(), "layers.1.mlp.gate"),
    "scale halved": (lambda t: t["model.layers.2.mlp.experts.down_proj_scale"][3].sub_(1), "layers.2.mlp.experts"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_files(fault: str, out: Path) -> None:
    change, module = FAULTS[fault]
    tamper(out, change)
    code, data = verify(out, "--dtype", "float64")
    assert code == 1
    assert data["verdict"] == "fail"
    assert data["first_divergence"] == module
    assert data["failed"]


def test_nan_in_the_files_and_in_the_reference(out: Path, tmp_path: Path) -> None:
    code, data = verify(LONG, reference=poisoned(tmp_path))
    assert (code, data["verdict"], data["nan"]) == (1, "fail", True)
    tamper(out, lambda t: t["model.layers.4.self_attn.o_proj.weight"].view(-1)[0].fill_(torch.nan))
    code, data = verify(out)
    assert (code, data["nan"], data["first_divergence"]) == (1, True, "layers.4.self_attn.o_proj")
    code, data = verify(out, reference=poisoned(tmp_path))
    assert (code, data["nan"]) == (1, True)


def poisoned(folder: Path) -> Path:
    """The golden file with a NaN in its logits."""
    from safetensors import safe_open

    tensors = load_file(golden(LONG))
    tensors["logits"][1, 300, 5] = torch.nan
    with safe_open(golden(LONG), framework="pt") as f:
        save_file(tensors, folder / "poisoned.safetensors", metadata=f.metadata())
    return folder / "poisoned.safetensors"


def test_the_failure_is_told_to_people(out: Path) -> None:
    tamper(out, lambda t: t["model.layers.2.self_attn.g_proj.weight"].mul_(1.01))
    code, text, _ = run("verify-parity", out, "--reference", golden(LONG), "--dtype", "float64")
    assert code == 1
    assert "first divergence: layers.2.self_attn.g_proj" in text
    assert "failed: logits max_abs" in text
    assert "verdict: fail" in text


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((LONG / "model.safetensors",), "no golden file"),
        ((CALM / "golden.safetensors",), "layers"),
        ((golden(LONG), "--noise", golden(TINY)), "other tokens"),
        ((golden(CALM), "--dtype", "bfloat16"), "own noise"),
        ((TINY,), "--trust-remote-code"),
        ((TINY, "--streamed", "--trust-remote-code"), "kconv capture"),
    ],
)
def test_bad_input_is_exit_code_2_without_a_traceback(args: tuple[Any, ...], said: str, made: Path) -> None:
    code, out, err = run("verify-parity", made, "--reference", *args)
    assert code == 2
    assert said in err
    assert "Traceback" not in out + err


def test_a_reference_that_cannot_run_here_is_exit_code_3(made: Path) -> None:
    code, _, err = run("verify-parity", made, "--reference", TINY, "--trust-remote-code", "--reference-python", "/no/python")
    assert code == 3
    assert "cannot run /no/python" in err


def test_streamed(made: Path) -> None:
    code, data = verify(made, "--streamed", "--dtype", "float64")
    assert (code, data["verdict"]) == (0, "pass")


def test_capture_writes_a_golden_file_and_says_so(tmp_path: Path) -> None:
    from kconv.synthesis.families import tiny

    tiny("kimi-linear", tmp_path / "kl", layers=2, seed=1)
    code, out, _ = run("capture", tmp_path / "kl", tmp_path / "new", "--tokens", 16, "--also", "", "--json")
    assert code == 0
    data = json.loads(out)
    assert data["golden"] == str(tmp_path / "new" / "golden.safetensors")
    assert Path(data["golden"]).exists()
    code, _, err = run("capture", tmp_path / "kl", tmp_path / "new")
    assert code == 2
    assert "--overwrite" in err
    code, _, err = run("capture", TINY, tmp_path / "x.safetensors")
    assert code == 2
    assert "--trust-remote-code" in err
