"""The nemo target: NeMo AutoModel loads it strictly and computes the golden logits; and every way back."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import kconv
from kconv.errors import KconvError
from tests.reading import GOLDEN, ROOT, json_of, stored_tensors, tensor

TINY = GOLDEN / "tiny-k3"
TOKENS = 20  # Triton's interpreter takes a second for each
NEEDED = ("nemo_automodel", "fla", "triton")
needs_nemo = pytest.mark.skipif(any(importlib.util.find_spec(n) is None for n in NEEDED), reason=f"needs {', '.join(NEEDED)}")


@pytest.fixture(scope="module")
def nemo(tmp_path_factory) -> Path:
    """The golden checkpoint in the nemo layout, straight from the published one."""
    folder = tmp_path_factory.mktemp("nemo") / "nemo"
    kconv.convert(TINY, folder, to="nemo")
    return folder


def text_of(folder: Path) -> dict:
    return {n: t for n, t in stored_tensors(folder).items() if not n.startswith(("vision_tower.", "mm_projector."))}


def logits_of(folder: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """NeMo's logits of the golden ids, with the folder's weights and with those that its own adapter reads."""
    ids = load_file(TINY / "golden.safetensors")["input_ids"][:1, :TOKENS].contiguous()
    save_file({"input_ids": ids}, scratch / "ids.safetensors")
    files = [folder, TINY, scratch / "ids.safetensors", scratch / "out.safetensors"]
    command = [sys.executable, "-m", "tests.adapters.nemo_strict", *files]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run([str(a) for a in command], env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return load_file(scratch / "out.safetensors")


@needs_nemo
def test_nemo_loads_it_strictly_and_gives_the_golden_logits(nemo, tmp_path):
    """The very bits that NeMo computes with its own adapter; the golden ones within what its fp32 differs by (6.4e-4)."""
    answers, golden = logits_of(nemo, tmp_path), load_file(TINY / "golden.safetensors")["logits_fp32"]
    assert golden.std() > 0.5
    assert torch.equal(answers["logits"], answers["own"])
    torch.testing.assert_close(answers["logits"], golden[:1, :TOKENS], rtol=0, atol=1e-3)


def test_names_and_layouts(nemo):
    """The nemo side against rows taken by hand from the published checkpoint."""
    tensors, source = stored_tensors(nemo), stored_tensors(TINY)
    holders = {n.split("self_attn.")[1]: t for n, t in tensors.items() if "layers.0.self_attn." in n and "_fp32_params" in n}
    assert set(holders) == {
        "_fp32_params.A_log", "_fp32_params.dt_bias", "o_norm._fp32_params.weight",
        *(f"{p}_conv1d._fp32_params.weight" for p in "qkv"),
    }  # fmt: skip
    assert {t.dtype for t in holders.values()} == {"F32"}
    assert holders["_fp32_params.A_log"].shape == (3,)
    kconv_bf16 = tensor(tensors["model.layers.5.mlp.experts.gate_and_up_projs"])
    assert kconv_bf16.shape == (8, 64, 128)
    down = tensor(tensors["model.layers.5.mlp.experts.down_projs"])
    base = "language_model.model.layers.5.block_sparse_moe.experts.3."
    for part, values in (("w1", kconv_bf16[3][:, :64]), ("w3", kconv_bf16[3][:, 64:]), ("w2", down[3])):
        packed, scale = (tensor(source[f"{base}{part}.weight_{k}"]) for k in ("packed", "scale"))
        assert torch.equal(values.T.float(), mxfp4(packed, scale))


def mxfp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """E2M1 codes by the format's table, low nibble first, times 2^(scale - 127)."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).long()
    values = table[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    return values * torch.exp2(scale.float() - 127).repeat_interleave(32, dim=1)


def test_every_way_there_and_back(nemo, tmp_path):
    """Published -> nemo -> published; the same by way of native, in both orders; each step verified."""
    steps: dict[str, tuple[Path, str, dict[str, Any]]] = {
        "published": (nemo, "hf", {}), "native": (nemo, "native", {}), "published by native": (tmp_path / "native", "hf", {}),
        "packed": (TINY, "native", {}), "nemo by packed": (tmp_path / "packed", "nemo", {}),
        "published by nemo by packed": (tmp_path / "nemo by packed", "hf", {}),
    }  # fmt: skip
    for name, (source, to, options) in steps.items():
        kconv.convert(source, tmp_path / name, to=to, **options)
        result = kconv.verify(tmp_path / name, source)
        assert result["ok"], (name, result)
    assert kconv.verify(nemo, TINY)["ok"]
    published = text_of(TINY)
    for name in ("published", "published by native", "published by nemo by packed"):
        assert text_of(tmp_path / name) == published, name
        assert json_of(tmp_path / name / "config.json") == json_of(TINY / "config.json"), name
    main = {n: t for n, t in stored_tensors(nemo).items() if "scale" not in n}
    assert {n: t for n, t in stored_tensors(tmp_path / "nemo by packed").items() if "scale" not in n} == main


def test_without_the_sidecar_values_come_back(nemo, tmp_path):
    kconv.convert(TINY, tmp_path / "plain", to="nemo", sidecar=False)
    assert not list((tmp_path / "plain").glob("sidecar*"))
    kconv.convert(tmp_path / "plain", tmp_path / "back", to="hf")
    kconv.convert(tmp_path / "back", tmp_path / "again", to="nemo", sidecar=False)
    assert stored_tensors(tmp_path / "again") == stored_tensors(tmp_path / "plain")
    assert json_of(tmp_path / "plain" / "kconv.json")["grade"] == "value-exact"


def test_kconv_loads_it(nemo):
    """The nemo layout is a source like any other."""
    ids = load_file(TINY / "golden.safetensors")["input_ids"]
    with torch.no_grad():
        ours, direct = (kconv.load(f, dtype=torch.float32, experts="bf16")(ids).logits for f in (nemo, TINY))
    assert torch.equal(ours, direct)


@pytest.mark.parametrize(
    "family, options, message",
    [
        ("k3", {"vision": "keep"}, "text model's"),
        ("k3", {"experts": "packed"}, "experts are plain"),
        ("kimi-linear", {}, "no nemo layout"),
    ],
)
def test_what_has_no_nemo_layout_is_refused(tmp_path, family, options, message):
    kconv.tiny(family, tmp_path / "source", layers=4)
    with pytest.raises(KconvError, match=message):
        kconv.plan(tmp_path / "source", "nemo", **options)


def test_uneven_experts_are_refused(tmp_path):
    kconv.tiny("k3", tmp_path / "source", layers=4, expert_counts=(4, 3, 4))
    with pytest.raises(KconvError, match="different numbers of experts"):
        kconv.plan(tmp_path / "source", "nemo")
