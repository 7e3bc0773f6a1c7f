"""Weights in forms that are damaged, contradictory or undecidable: refused by name, with the next step; and what is only said."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("compressed_tensors")

import kconv
from tests.adapters.reencoded import BLOCK, Encoded, ct_block, fp8_inverse, int4, mxfp4, nvfp4, reencode
from tests.builders import ROOT, Draft, expert, load_all, small_k3
from tests.cli.refusing import done, refused

KV = ROOT + "layers.3.self_attn.kv_b_proj"  # [128, 32]
KV_A = ROOT + "layers.3.self_attn.kv_a_proj_with_mqa"  # [40, 128]
FP8_BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK), "modules_to_not_convert": ["experts"]}


def with_fp8(module: str = KV_A, block: dict[str, Any] | None = FP8_BLOCK, suffix: str = "weight_scale_inv") -> Draft:
    """The small K3 with one weight in FP8 blocks, and this block in its config."""
    draft = small_k3()
    state, _ = fp8_inverse(draft.tensors.pop(module + ".weight"), suffix)
    draft.tensors |= {f"{module}.{s}": t for s, t in state.items()}
    draft.text.pop("quantization_config")
    if block:
        draft.config["quantization_config"] = copy.deepcopy(block)
    return draft


def experts_as(encode: Callable[[Tensor], Encoded], layer: int = 1, **block: Any) -> Draft:
    """The small K3 with one layer's experts encoded, and this block."""
    draft = small_k3()
    kept = draft.text["quantization_config"]
    reencode(draft, lambda m: encode.__name__ if f"layers.{layer}." in m and ".experts." in m else None)
    draft.text["quantization_config"] = kept
    if block:
        draft.config["quantization_config"] = block
    return draft


def refusal(draft: Draft, tmp_path: Path, *args: str) -> str:
    return refused(draft.write(tmp_path / "src"), tmp_path / "out", *args)


def values(draft: Draft, tmp_path: Path, module: str = KV_A, **options: Any) -> Tensor:
    """The module's decoded values."""
    kconv.convert(draft.write(tmp_path / "src"), tmp_path / "out", **options)
    return load_all(tmp_path / "out")[module.removeprefix("language_model.") + ".weight"]


def test_codes_without_a_scale(tmp_path):
    message = refusal(with_fp8().pop(KV_A + ".weight_scale_inv"), tmp_path)
    assert f"{KV_A}.weight in model-00002-of-00002.safetensors is F8_E4M3 [40, 128], quantised, and has no scale" in message
    assert "ask the publisher" in message


def test_scale_without_codes(tmp_path):
    draft = small_k3()
    draft.tensors[KV_A + ".weight_scale"] = torch.ones(1, 2)
    message = refusal(draft, tmp_path)
    assert f"{KV_A}.weight_scale in model-00002-of-00002.safetensors scales nothing: the weight beside it is BF16" in message


def test_scale_of_a_weight_that_is_not_there(tmp_path):
    message = refusal(with_fp8().pop(KV_A + ".weight"), tmp_path)
    assert f"{KV_A}.weight_scale_inv in model-00002-of-00002.safetensors scales a weight that is not there" in message


def test_scale_under_a_name_that_nobody_uses(tmp_path):
    """KB-008."""
    draft = with_fp8(suffix="scale_weight")
    message = refusal(draft, tmp_path)
    assert f"{KV_A}.weight in model-00002-of-00002.safetensors is F8_E4M3 [40, 128], quantised, and has no scale" in message
    assert f"no rule claims: {KV_A}.scale_weight" in message


@pytest.mark.parametrize("suffix", ("weight_scale", "weight_scale_inv"))
def test_both_names_of_a_scale_are_applied(suffix, tmp_path):
    """KB-008; KB-001: 40 rows in blocks of 32 leave a partial tile."""
    _, expected = fp8_inverse(small_k3().tensors[KV_A + ".weight"])
    assert torch.equal(values(with_fp8(suffix=suffix), tmp_path), expected)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
def test_scales_of_any_float_dtype(dtype, tmp_path):
    """KB-020."""
    draft = with_fp8()
    name = KV_A + ".weight_scale_inv"
    draft.tensors[name] = torch.tensor([[1.0, 0.5], [0.25, 2.0]], dtype=dtype)
    spread = draft.tensors[name].float().repeat_interleave(32, 0)[:40].repeat_interleave(64, 1)
    expected = (draft.tensors[KV_A + ".weight"].float() * spread).bfloat16()
    assert torch.equal(values(draft, tmp_path), expected)


@pytest.mark.parametrize("shape", ((), (1,), (1, 1), (40,), (40, 1), (2, 2), (2, 1, 2, 1)))
def test_layouts_of_scales_are_told_by_shape(shape, tmp_path):
    """KB-014: a block size in the config does not make a grid of a scale that is none."""
    draft = with_fp8()
    draft.tensors[KV_A + ".weight_scale_inv"] = torch.full(shape, 0.5)
    assert torch.equal(values(draft, tmp_path), (draft.tensors[KV_A + ".weight"].float() * 0.5).bfloat16())


def test_a_scale_of_no_layout(tmp_path):
    draft = with_fp8()
    draft.tensors[KV_A + ".weight_scale_inv"] = torch.ones(3, 2)
    message = refusal(draft, tmp_path)
    assert f"{KV_A}.weight_scale_inv in model-00002-of-00002.safetensors is F32 [3, 2]: scale [3, 2] fits no layout" in message
    assert "in blocks of 32 x 64" in message


def test_a_third_weight_with_a_wrong_scale_is_named_before_anything_is_written(tmp_path):
    """KB-019."""
    draft = with_fp8()
    for i, n in enumerate(("q_proj", "k_proj", "v_proj")):
        name = f"{ROOT}layers.0.self_attn.{n}"
        state, _ = fp8_inverse(draft.tensors.pop(name + ".weight"))
        scale = state["weight_scale_inv"][: 3 - (i == 2)]
        draft.tensors |= {f"{name}.weight": state["weight"], f"{name}.weight_scale_inv": scale}
    message = refusal(draft, tmp_path)
    assert f"{ROOT}layers.0.self_attn.v_proj.weight_scale_inv" in message
    assert "k_proj" not in message


def test_block_size_that_is_said_nowhere_and_fits_twice(tmp_path):
    """KB-002: never guessed."""
    draft = with_fp8(block=None)
    draft.tensors[KV_A + ".weight_scale_inv"] = torch.ones(1, 2)
    message = refusal(draft, tmp_path)
    assert "fits blocks of 64 x 64, 128 x 64 for a weight [40, 128], and the config names no block size" in message
    assert "--block 128x128" in message
    assert done("plan", tmp_path / "src", "--block", "64x64")["grade"] == "exact-with-sidecar"


def test_block_size_that_the_grid_alone_decides(tmp_path):
    """KB-002: 40 rows and two scale rows are blocks of 32, never of 20."""
    _, expected = fp8_inverse(small_k3().tensors[KV_A + ".weight"])
    assert torch.equal(values(with_fp8(block=None), tmp_path), expected)


def test_block_size_against_the_config(tmp_path):
    message = refusal(with_fp8(), tmp_path, "--block", "128x128")
    assert "is in blocks of 32 x 64 by quantization_config, --block says 128 x 128" in message
    assert "leave --block out" in message


def test_bytes_as_scales(tmp_path):
    """KB-004: exponents by dtype and grid; a U8 scale of another grid could mean anything."""
    found = {}
    for dtype in (torch.uint8, torch.float8_e8m0fnu):
        draft = with_fp8()
        draft.tensors[KV_A + ".weight_scale_inv"] = torch.full((40, 4), 120, dtype=torch.uint8).view(dtype)
        found[dtype] = values(draft, tmp_path / str(dtype))
    assert torch.equal(found[torch.uint8], found[torch.float8_e8m0fnu])
    assert torch.equal(found[torch.uint8], (draft.tensors[KV_A + ".weight"].float() * 2**-7).bfloat16())
    draft.tensors[KV_A + ".weight_scale_inv"] = torch.full((40,), 120, dtype=torch.uint8)
    assert "bytes are exponents in blocks only, here they could mean anything" in refusal(draft, tmp_path / "grid")


def test_fnuz_codes_by_the_config(tmp_path):
    """KB-010: the same bytes, half the value; an unknown variant is refused."""
    plain = values(with_fp8(), tmp_path / "fn")
    halved = values(with_fp8(block={**FP8_BLOCK, "fmt": "e4m3fnuz"}), tmp_path / "fnuz")
    assert torch.equal(halved, plain / 2)
    message = refusal(with_fp8(block={**FP8_BLOCK, "fmt": "e3m4"}), tmp_path / "no")
    assert "is 'e3m4' by the config, no FP8 format that kconv knows" in message


def test_codes_of_another_format_than_the_config_names(tmp_path):
    message = refusal(with_fp8(block={**FP8_BLOCK, "fmt": "e5m2"}), tmp_path)
    assert "is F8_E4M3 [40, 128], the config says F8_E5M2" in message


def test_a_nan_among_the_scales_of_nvfp4(tmp_path):
    """KB-011."""
    draft = experts_as(nvfp4)
    draft.tensors[expert(1, 2, "w2.weight_scale")].view(torch.uint8)[3, 1] = 0x7F
    draft.config["quantization_config"] = two_groups()
    message = refusal(draft, tmp_path, "--experts", "bf16")
    assert f"{expert(1, 2, 'w2.weight_scale')} in model-00001-of-00002.safetensors, position [3, 1]: scale 0x7F is NaN" in message


def two_groups() -> dict[str, Any]:
    return ct_block(group_0=("nvfp4", [r"re:.*layers\.1\..*experts.*"]), group_1=("mxfp4", ["Linear"]))


def test_parameters_come_from_the_group_that_matches(tmp_path):
    """KB-025: the matching group is not the first; two that match equally are refused."""
    block = ct_block(group_0=("fp8_channel", ["re:.*self_attn.*"]), group_1=("int4", [r"re:.*layers\.1\..*experts.*"]))
    block["config_groups"]["group_2"] = ct_block(g=("mxfp4", ["Linear"]))["config_groups"]["g"]
    draft = experts_as(int4, **block)
    assert kconv.plan(draft.write(tmp_path / "good"), experts="bf16").check()
    block["config_groups"]["group_3"] = {**block["config_groups"]["group_0"], "targets": [r"re:.*experts.*"]}
    message = refusal(experts_as(int4, **block), tmp_path, "--experts", "bf16")
    assert "belongs to 2 groups of the config that differ: config_groups.group_1 and config_groups.group_3" in message


def test_int4_where_the_config_says_mxfp4(tmp_path):
    """KB-026: a dtype that disagrees with the declared format."""
    message = refusal(experts_as(int4), tmp_path, "--experts", "bf16")
    assert f"{expert(1, 0, 'w1.weight_packed')} in model-00001-of-00002.safetensors is I32 [64, 8]" in message
    assert "stored as INT4, groups of 32; config_groups.group_0 says MXFP4" in message


def test_asymmetric_int4_without_its_zero_points(tmp_path):
    block = ct_block(group_0=("int4", [r"re:.*layers\.1\..*experts.*"]), group_1=("mxfp4", ["Linear"]))
    block["config_groups"]["group_0"]["weights"] = {**block["config_groups"]["group_0"]["weights"], "symmetric": False}
    message = refusal(experts_as(int4, **block), tmp_path, "--experts", "bf16")
    assert "is asymmetric by the config, but weight_zero_point is lacking" in message


def test_codes_ordered_by_activations(tmp_path):
    block = ct_block(group_0=("int4", [r"re:.*layers\.1\..*experts.*"]), group_1=("mxfp4", ["Linear"]))
    draft = experts_as(int4, **block)
    for e in range(8):
        draft.tensors[expert(1, e, "w1.weight_g_idx")] = torch.zeros(64, dtype=torch.int32)
    assert "weight_g_idx" in (message := refusal(draft, tmp_path, "--experts", "bf16"))
    assert "export without actorder" in message


def test_nvfp4_without_its_global_scale(tmp_path):
    draft = experts_as(nvfp4, **two_groups())
    draft.pop(*[n for n in draft.tensors if n.endswith("weight_global_scale")])
    message = refusal(draft, tmp_path, "--experts", "bf16")
    assert f"{expert(1, 0, 'w1.weight_scale')} in model-00001-of-00002.safetensors is F8_E4M3 [64, 4] as of NVFP4" in message
    assert "weight_global_scale is lacking" in message


def test_a_second_global_scale_has_no_meaning(tmp_path):
    draft = with_fp8()
    draft.tensors[KV_A + ".weight_scale_2"] = torch.tensor(1.0)
    assert f"{KV_A}.weight_scale_2 in model-00002-of-00002.safetensors (F32 []) has no meaning beside" in refusal(draft, tmp_path)


def test_packed_is_only_for_mxfp4(tmp_path):
    draft = small_k3()
    reencode(draft, lambda m: "nvfp4" if ".experts." in m else None)
    draft.config["quantization_config"] = ct_block(group_0=("nvfp4", ["Linear"]))
    message = refusal(draft, tmp_path, "--experts", "packed")
    assert "--experts packed: the source's experts are NVFP4 (compressed-tensors), and only MXFP4 stays packed" in message
    assert "--experts bf16 decodes them" in message
    plan = kconv.plan(tmp_path / "src").check()
    assert any("decoded to bfloat16; only MXFP4 stays packed" in n for n in plan.layouts.notes)


@pytest.mark.parametrize(
    ("args", "said"),
    ((("--experts", "nvfp4"), "the native layout keeps experts plain or packed as MXFP4"),
     (("--weights", "fp8-block"), "the native layout keeps weights other than experts plain")),
)  # fmt: skip
def test_forms_that_the_native_layout_does_not_hold(args, said, tmp_path):
    assert said in (message := refusal(small_k3(), tmp_path, *args))
    assert "--to hf" in message


def test_two_methods_in_one_output(tmp_path):
    message = refusal(with_fp8(), tmp_path, "--to", "hf", "--experts", "nvfp4")
    assert "FP8 E4M3 blocks of 32 x 64, weight_scale_inv F32 would stay beside weights whose form changes" in message
    assert "--dtype bfloat16" in message


def test_what_the_config_leaves_out_is_read_and_said(tmp_path):
    """KB-028, KB-029: the tensors count; a packed projection that the config ignores is decoded, and comes back packed."""
    draft = small_k3()
    name = ROOT + "layers.1.block_sparse_moe.shared_experts.up_proj"
    state, expected = mxfp4(draft.tensors.pop(name + ".weight"))
    draft.tensors |= {f"{name}.{s}": t for s, t in state.items()}
    source = draft.write(tmp_path / "src")
    made = kconv.convert(source, tmp_path / "native")
    assert torch.equal(load_all(tmp_path / "native")["model.layers.1.mlp.shared_experts.up_proj.weight"], expected.bfloat16())
    said = "the config's quantization_config leaves out weights stored as MXFP4 (compressed-tensors) (up_proj): the tensors count"
    assert said in made["notes"]
    kconv.convert(tmp_path / "native", tmp_path / "back", to="hf")
    after = load_all(tmp_path / "back")
    assert all(torch.equal(after[n], t) for n, t in draft.tensors.items())


def test_hf_quant_config_that_says_otherwise(tmp_path):
    draft = with_fp8(block={"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
                            "quantized_layers": {KV_A: {"quant_algo": "FP8"}}}, suffix="weight_scale")  # fmt: skip
    draft.tensors[KV_A + ".weight_scale"] = torch.tensor(0.5)
    draft.side["hf_quant_config.json"] = b'{"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {}}}'
    notes = kconv.plan(draft.write(tmp_path / "src")).check().layouts.notes
    assert f"hf_quant_config.json and config.json say different things of 1 modules, {KV_A} first: config.json counts" in notes


def test_scales_that_were_never_filled(tmp_path):
    """KB-031: a warning with the tensor's name."""
    draft = small_k3()
    draft.tensors[expert(1, 3, "w2.weight_scale")].zero_()
    made = kconv.convert(draft.write(tmp_path / "src"), tmp_path / "out", experts="bf16")
    (warning,) = [n for n in made["notes"] if "all scale bytes are 0" in n]
    assert warning.startswith(expert(1, 3, "w2.weight_packed"))


@pytest.mark.parametrize("options", ({}, {"experts": "bf16"}))
def test_a_plan_lists_what_the_run_writes(options, tmp_path):
    """KB-034: kept packed and decoded alike."""
    source = small_k3().write(tmp_path / "src")
    plan = kconv.plan(source, **options).check()
    kconv.convert(source, tmp_path / "out", **options)
    written = load_all(tmp_path / "out")
    assert set(written) == set(plan.targets)
    assert sum(t.nbytes for t in written.values()) == plan.output_bytes
