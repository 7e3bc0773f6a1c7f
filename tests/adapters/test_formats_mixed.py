"""Checkpoints that mix formats, as published: what they plan, what their config says afterwards, what is re-encoded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("compressed_tensors")
from compressed_tensors.quantization import QuantizationConfig

import kconv
from kconv.kernels.common import same_bits
from tests.adapters.reencoded import CT_FORMATS, ct_block, plain_weights, reencode
from tests.adapters.test_formats_roundtrip import is_expert, native_value, there_and_back
from tests.builders import Draft, load_all, small_k3
from tests.reading import json_of
from tests.unit.test_kernels_oracles import MXFP4, NVFP4, decompressed

MXFP4_GROUP = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}


def nvidia(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """nvidia/Kimi-K3-NVFP4: NVFP4 experts, FP8 attention in 4-D blocks, `quantized_layers` at top level and beside."""
    draft = small_k3(vision=True)
    expected = reencode(draft, lambda m: "nvfp4_modelopt" if is_expert(m) else "fp8_modelopt" if attention(m) else None)
    layers = {m: {"quant_algo": "NVFP4", "group_size": 16} if is_expert(m) else {"quant_algo": "FP8_PB_WO"} for m in expected}
    draft.config["quantization_config"] = {
        "quant_method": "modelopt_mixed", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers,
    }  # fmt: skip
    quant = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    draft.side["hf_quant_config.json"] = json.dumps(quant, indent=4).encode()
    return draft.write(tmp_path / "source"), expected


def attention(module: str) -> bool:
    return "self_attn." in module and "norm" not in module


def red_hat_fp8(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """RedHatAI/Kimi-K3-FP8-BLOCK: experts, shared experts, latent projections and the dense MLP; a stale nested block."""
    stale = json.loads(json.dumps(small_k3().text["quantization_config"]))
    draft = small_k3(vision=True)
    expected = reencode(draft, lambda m: None if attention(m) or not_linear(m) else "fp8_block")
    draft.config["quantization_config"] = ct_block(group_0=("fp8_block", ["Linear"])) | {
        "ignore": [f"re:.*{n}.*" for n in ("self_attn", "gate$", "lm_head", "res_proj", "vision_tower", "mm_projector")]
    }  # fmt: skip
    draft.text["quantization_config"] = stale
    return draft.write(tmp_path / "source"), expected


def not_linear(module: str) -> bool:
    never = ("embed_tokens", "lm_head", "res_proj", "block_sparse_moe.gate", "vision_tower", "mm_projector")
    return any(n in module for n in never)


def amd_quark(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """amd/Kimi-K3-Quark-MXFP4-AttnFP8: MXFP4 experts, FP8 attention with a scale a channel."""
    some = ("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
    draft = small_k3(vision=True)
    expected = reencode(
        draft, lambda m: "mxfp4_quark" if is_expert(m) else "fp8_quark" if attention(m) and m.endswith(some) else None
    )  # fmt: skip
    fp8 = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}, "input_tensors": {"dtype": "fp8_e4m3", "is_dynamic": True}}
    rest = sorted(set(plain_weights(draft)) - set(expected) - {m for m in plain_weights(draft) if is_expert(m)})
    draft.config["quantization_config"] = {
        "quant_method": "quark", "global_quant_config": {"weight": MXFP4_GROUP}, "layer_quant_config": {"*self_attn*": fp8},
        "exclude": rest,
    }  # fmt: skip
    return draft.write(tmp_path / "source"), expected


@pytest.mark.parametrize("publisher", [nvidia, red_hat_fp8, amd_quark])
def test_published_mixes_plan_whole_and_come_back(publisher, tmp_path):
    source, expected = publisher(tmp_path)
    plan = kconv.plan(source, vision="keep").check()
    assert plan.summary()["unclaimed"] == []
    assert plan.summary()["dropped"] == 0
    _, native = there_and_back(source, tmp_path)
    decoded = {m: v for m, v in expected.items() if not (publisher is amd_quark and is_expert(m))}
    assert len(decoded) > 15
    assert [m for m, v in decoded.items() if not same_bits(native_value(native, m).contiguous(), v)] == []


def test_model_opts_own_description_goes_and_comes_back(tmp_path):
    source, _ = nvidia(tmp_path)
    there_and_back(source, tmp_path)
    assert not (tmp_path / "native" / "hf_quant_config.json").exists()
    before = (source / "hf_quant_config.json").read_bytes()
    assert (tmp_path / "back" / "hf_quant_config.json").read_bytes() == before
    kconv.convert(source, tmp_path / "text", to="hf-text")
    layers = json_of(tmp_path / "text" / "hf_quant_config.json")["quantization"]["quantized_layers"]
    assert {m.split(".")[0] for m in layers} == {"model"}
    kconv.convert(source, tmp_path / "plain", to="hf", experts="bf16", dtype="bfloat16")
    assert not (tmp_path / "plain" / "hf_quant_config.json").exists()


def test_activation_scales_are_recorded_and_not_taken_for_weights(tmp_path):
    source, _ = nvidia(tmp_path)
    kconv.convert(source, tmp_path / "native")
    native = load_all(tmp_path / "native")
    assert native["model.layers.1.mlp.experts.gate_up_proj_input_scale"].shape == (8, 2)
    index = json_of(tmp_path / "native" / "model.safetensors.index.json")["weight_map"]
    assert not any("scale" in name for name in index)
    made = kconv.plan(source, to="hf", experts="bf16", dtype="bfloat16").check()
    assert "activation scales of weights that are decoded" in {d.reason for d in made.layouts.drops}


def test_decoding_leaves_no_block_at_any_level(tmp_path):
    source, expected = red_hat_fp8(tmp_path)
    made = kconv.convert(source, tmp_path / "plain", to="hf", experts="bf16", dtype="bfloat16", sidecar=False)
    config = json_of(tmp_path / "plain" / "config.json")
    assert "quantization_config" not in config
    assert "quantization_config" not in config["text_config"]
    assert any("the top-level one counts" in n for n in made["notes"])
    stored = load_all(tmp_path / "plain")
    assert [m for m, v in expected.items() if not same_bits(stored[m + ".weight"], v)] == []


@pytest.mark.parametrize("native", (False, True))
def test_mxfp4_to_nvfp4_loses_nothing_and_says_so(native, tmp_path):
    draft = small_k3(vision=True)
    source = draft.write(tmp_path / "source")
    if native:
        kconv.convert(source, tmp_path / "native", vision="keep")
    made = kconv.convert(tmp_path / "native" if native else source, tmp_path / "out", to="hf", experts="nvfp4")
    values = 3 * 8 * 3 * 64 * 64
    assert made["grade"] == "lossy"
    assert made["errors"] == {"NVFP4": {"values": values, "changed": 0, "relative": 0.0, "worst": 0.0, "lossless": True}}
    assert f"re-encoded to NVFP4: lossless: all {values} values the same" in made["notes"]
    stored, before = load_all(tmp_path / "out"), plain_weights(draft)
    for module in (m for m in before if is_expert(m)):
        state = {s: stored[f"{module}.{s}"] for s in ("weight_packed", "weight_scale", "weight_global_scale")}
        assert torch.equal(decompressed("nvfp4-pack-quantized", state, **NVFP4), before[module])


@pytest.mark.parametrize(("asked", "form"), (("fp8-block", "fp8_block"), ("nvfp4", "nvfp4"), ("mxfp4", "mxfp4")))
def test_the_written_block_is_one_that_compressed_tensors_reads(asked, form, tmp_path):
    """From plain experts; the error is measured, and the library's own decoding has the values that kconv reads back."""
    draft = small_k3(vision=True)
    reencode(draft, lambda m: None)
    before = {m: w for m, w in plain_weights_of_plain(draft).items() if is_expert(m)}
    made = kconv.convert(draft.write(tmp_path / "source"), tmp_path / "out", to="hf", experts=asked)
    (error,) = made["errors"].values()
    assert made["grade"] == "lossy"
    assert error["values"] == sum(w.numel() for w in before.values())
    assert 0 < error["relative"] < 0.2
    config = json_of(tmp_path / "out" / "config.json")
    block = QuantizationConfig.model_validate(config["quantization_config"])
    assert block.format == CT_FORMATS[form][0]
    assert kconv.verify(tmp_path / "out", tmp_path / "source")["ok"]
    kconv.convert(tmp_path / "out", tmp_path / "native", **({"experts": "bf16"} if form == "mxfp4" else {}))
    native, stored = load_all(tmp_path / "native"), load_all(tmp_path / "out")
    args = {"fp8_block": {**CT_FORMATS["fp8_block"][1], "block_structure": [128, 128]}, "nvfp4": NVFP4, "mxfp4": MXFP4}[form]
    for module in before if form != "fp8_block" else ():  # 64 x 64 is less than a block, which the library refuses
        state = {n.removeprefix(module + "."): t for n, t in stored.items() if n.startswith(module + ".")}
        assert torch.equal(native_value(native, module), decompressed(CT_FORMATS[form][0], state, **args).bfloat16())


def plain_weights_of_plain(draft: Draft) -> dict[str, torch.Tensor]:
    """Decodes the draft's MXFP4 experts in place, and returns every matrix."""
    found = plain_weights(draft)
    for module, weight in found.items():
        if f"{module}.weight_packed" in draft.tensors:
            draft.pop(f"{module}.weight_packed", f"{module}.weight_scale")
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(module)))
            draft.tensors[f"{module}.weight"] = (weight.float() * (1 + 0.1 * noise)).bfloat16()
    return {m: draft.tensors[f"{m}.weight"] for m in found}


def test_fp8_block_is_what_red_hats_release_quantises(tmp_path):
    draft = small_k3(vision=True)
    made = kconv.convert(draft.write(tmp_path / "source"), tmp_path / "out", to="hf", experts="fp8-block", weights="fp8-block")
    stored = load_all(tmp_path / "out")
    codes = {n.removesuffix(".weight") for n, t in stored.items() if t.dtype == torch.float8_e4m3fn}
    assert {m for m in codes if not is_expert(m)} == {
        m for m in plain_weights(draft) if not (is_expert(m) or attention(m) or not_linear(m))
    }  # fmt: skip
    config: dict[str, Any] = json_of(tmp_path / "out" / "config.json")
    assert "quantization_config" not in config
    block = config["text_config"]["quantization_config"]
    QuantizationConfig.model_validate(block)
    assert block["config_groups"]["group_0"]["weights"]["block_structure"] == [128, 128]
    assert not any("stored is" in n or "leaves out" in n for n in kconv.plan(tmp_path / "out").layouts.notes)
    assert set(made["errors"]) == {"FP8"}
    assert {f for f in kconv.inspect(tmp_path / "out")["formats"] if f.startswith("FP8")} == {
        "FP8 E4M3 blocks of 128 x 128, weight_scale BF16"
    }
    again = kconv.plan(tmp_path / "out", to="hf", experts="fp8-block", weights="fp8-block").check()
    assert again.summary()["grade"] == "exact"  # they are in that form already


def test_weights_in_fp8_beside_mxfp4_experts_make_two_groups(tmp_path):
    kconv.convert(small_k3(vision=True).write(tmp_path / "source"), tmp_path / "out", to="hf", weights="fp8-block")
    block = json_of(tmp_path / "out" / "config.json")["text_config"]["quantization_config"]
    QuantizationConfig.model_validate(block)
    assert block["format"] == "mixed-precision"
    assert sorted(g["format"] for g in block["config_groups"].values()) == ["float-quantized", "mxfp4-pack-quantized"]
    plan = kconv.plan(tmp_path / "out").check()
    assert [n for n in plan.layouts.notes if "stored is" in n or "leaves out" in n] == []


def test_inspect_says_forms_and_counts(tmp_path):
    source, _ = nvidia(tmp_path)
    found = kconv.inspect(source)
    assert found["formats"]["NVFP4 (ModelOpt)"]["weights"] == 3 * 8 * 3
    assert found["formats"]["NVFP4 (ModelOpt)"]["tensors"] == 3 * 8 * 3 * 3
    (label,) = [f for f in found["formats"] if f.startswith("FP8")]
    assert label == "FP8 E4M3 4-D blocks of 128 x 128, weight_scale F32"
    assert found["converts_to"]["native"] == "exact-with-sidecar"
    assert found["converts_to"]["hf"] == "exact"
