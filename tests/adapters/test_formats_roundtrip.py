"""The golden K3 in every format, written by an independent library: kconv's values are that library's, bit for bit, and
the stored bytes, the config and the side files come back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

pytest.importorskip("compressed_tensors")

import kconv
from kconv.kernels.common import same_bits
from tests.adapters.reencoded import BLOCK, ENCODERS, ct_block, reencode
from tests.builders import load_all, small_k3
from tests.reading import json_of, stored_tensors

EXPERT = re.compile(r"language_model\.model\.layers\.(\d+)\.block_sparse_moe\.experts\.(\d+)\.(w\d)")
ROWS = ("self_attn.", "shared_experts.", "routed_expert_", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
PACKED = ("mxfp4", "mxfp4_quark")


def is_expert(module: str) -> bool:
    return ".experts." in module


def is_row(module: str) -> bool:
    return not is_expert(module) and any(r in module for r in ROWS) and "_norm" not in module and "layernorm" not in module


def native_value(native: dict[str, Tensor], module: str) -> Tensor:
    """A published module's matrix in a native checkpoint, by names and rows written out here."""
    match = EXPERT.fullmatch(module)
    if match:
        layer, expert, part = int(match[1]), int(match[2]), match[3]
        experts = f"model.layers.{layer}.mlp.experts."
        if part == "w2":
            return native[experts + "down_proj"][expert]
        return native[experts + "gate_up_proj"][expert].chunk(2)[part == "w3"]
    name = module.removeprefix("language_model.").replace("block_sparse_moe.", "mlp.")
    return native[name + ".weight"]


def blocks(form: str) -> dict[str, Any]:
    """The block that a publisher of this form writes."""
    if form in ("mxfp4_quark", "fp8_quark"):
        weight = {"dtype": "fp4", "group_size": 32} if form == "mxfp4_quark" else {"dtype": "fp8_e4m3", "qscheme": "per_channel"}
        return {"quant_method": "quark", "global_quant_config": {"weight": weight}, "exclude": [], "layer_quant_config": {}}
    if form == "fp8_inverse":
        return {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
    if form == "nvfp4_modelopt":
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    return ct_block(group_0=(form, ["Linear"]))


def written(tmp_path: Path, choice: Callable[[str], str | None], block: dict[str, Any]) -> tuple[Path, dict[str, Tensor]]:
    draft = small_k3(vision=True)
    expected = reencode(draft, choice)
    draft.config["quantization_config"] = block
    return draft.write(tmp_path / "source"), expected


def there_and_back(source: Path, tmp_path: Path, **options: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Converts to native and back, verifies both, and holds the way back against the source; returns the result and native."""
    made = kconv.convert(source, tmp_path / "native", vision="keep", **options)
    kconv.convert(tmp_path / "native", tmp_path / "back", to="hf")
    before, after = stored_tensors(source), stored_tensors(tmp_path / "back")
    assert set(after) == set(before)
    assert [n for n in before if before[n] != after[n]] == []
    assert json_of(tmp_path / "back" / "config.json") == json_of(source / "config.json")
    for folder, of in (("native", source), ("back", tmp_path / "native")):
        result = kconv.verify(tmp_path / folder, of)
        assert result["ok"], result
    return made, load_all(tmp_path / "native")


@pytest.mark.parametrize("form", [f for f in ENCODERS if f != "fp8_modelopt"])
def test_experts(form, tmp_path):
    source, expected = written(tmp_path, lambda m: form if is_expert(m) else None, blocks(form))
    options = {"experts": "bf16"} if form in PACKED else {}
    made, native = there_and_back(source, tmp_path, **options)
    assert len(expected) == 3 * 8 * 3
    assert [m for m, v in expected.items() if not same_bits(native_value(native, m).contiguous(), v)] == []
    assert made["grade"] == "exact-with-sidecar"
    config = json_of(tmp_path / "native" / "config.json")
    assert "quantization_config" not in config
    assert config["experts_format"] == "bf16"


@pytest.mark.parametrize("form", PACKED)
def test_mxfp4_stays_packed_in_any_spelling(form, tmp_path):
    source, _ = written(tmp_path, lambda m: form if is_expert(m) else None, blocks(form))
    made, native = there_and_back(source, tmp_path)
    assert made["grade"] == "exact"
    assert native["model.layers.1.mlp.experts.gate_up_proj_packed"].shape == (8, 128, 32)


@pytest.mark.parametrize("form", [f for f in ENCODERS if f != "nvfp4_modelopt"])
def test_every_other_projection(form, tmp_path):
    """Attention, shared experts, latent projections and dense MLP, beside the MXFP4 experts as published."""
    draft = small_k3(vision=True)
    kept = {n: t.clone() for n, t in draft.tensors.items() if ".experts." in n}
    expected = reencode(draft, lambda m: form if is_row(m) and draft.tensors[m + ".weight"].shape[1] % 32 == 0 else None)
    draft.tensors |= kept
    draft.config["quantization_config"] = beside_experts(form, expected)
    _, native = there_and_back(draft.write(tmp_path / "source"), tmp_path)
    assert len(expected) > 30
    assert [m for m, v in expected.items() if not same_bits(native_value(native, m).contiguous(), v)] == []
    codes = [n for n, t in native.items() if not t.is_floating_point() or t.element_size() == 1]
    assert [n for n in codes if not re.search(r"_packed|_scale|weight_shape", n)] == []


def beside_experts(form: str, modules: dict[str, Tensor]) -> dict[str, Any]:
    """The block of a form with a group of its own for the MXFP4 experts."""
    if form == "fp8_modelopt":
        layers = {m: {"quant_algo": "FP8_PB_WO"} for m in modules}
        layers |= {f"language_model.model.layers.{i}.block_sparse_moe.experts.0.w{n}": {"quant_algo": "MXFP4"}
                   for i in (1, 2, 3) for n in (1, 2, 3)}  # fmt: skip
        return {"quant_method": "modelopt_mixed", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    block = blocks(form)
    if block["quant_method"] == "compressed-tensors":
        made = ct_block(group_0=("mxfp4", [r"re:.*\.experts\..*"]), group_1=("fp8_block", ["Linear"]))
        made["config_groups"]["group_1"] = block["config_groups"]["group_0"]
        return made
    if block["quant_method"] == "quark":
        return {**block, "layer_quant_config": {"*.experts.*": {"weight": {"dtype": "fp4", "group_size": 32}}}}
    return {**block, "modules_to_not_convert": ["experts"]}


def test_the_config_is_json_that_comes_back_word_for_word(tmp_path):
    source, _ = written(tmp_path, lambda m: "nvfp4" if is_expert(m) else None, blocks("nvfp4"))
    there_and_back(source, tmp_path)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"] == blocks("nvfp4")
