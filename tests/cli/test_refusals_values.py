"""Values that cannot be converted: refused with tensor, file and position, and nothing is left behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import kconv
from kconv.errors import KconvError
from tests.builders import EXPERTS, ROOT, Draft, expert, load_all, small_k3
from tests.cli.refusing import done, refused

SCALE, PACKED = expert(1, 3, "w2.weight_scale"), expert(1, 3, "w2.weight_packed")


def refusal(draft: Draft, tmp_path: Path, *args: str) -> str:
    return refused(draft.write(tmp_path / "src"), tmp_path / "out", *args)


def with_scale(byte: int, code: int) -> Draft:
    """A group whose scale byte is `byte` and whose 32 codes are `code`: row 5, second group of layer 1's expert 3, w2."""
    draft = small_k3()
    draft.tensors[SCALE][5, 1] = byte
    draft.tensors[PACKED][5, 16:32] = code * 17
    return draft


@pytest.mark.parametrize("target", ["native", "hf-text"])
@pytest.mark.parametrize("experts", ["bf16", "fp32"])
def test_scale_that_is_nan(target: str, experts: str, tmp_path: Path) -> None:
    message = refusal(with_scale(255, 1), tmp_path, "--experts", experts, "--to", target)
    assert f"{SCALE} in model-00001-of-00002.safetensors, position [5, 1]: scale byte 255 is NaN" in message
    assert "fetch the file again, or ask its publisher" in message


def test_position_in_a_large_tensor_is_the_tensors_own(tmp_path: Path) -> None:
    """The executor converts rows in pieces; the position is not the piece's."""
    draft = small_k3()
    rows = 1 << 15
    draft.text["moe_intermediate_size"] = rows
    for layer in (1, 2, 3):
        for e in range(EXPERTS):
            for part, shape in {"w1": (rows, 32), "w3": (rows, 32), "w2": (64, rows // 2)}.items():
                draft.tensors[expert(layer, e, f"{part}.weight_packed")] = torch.zeros(shape, dtype=torch.uint8)
                scale = torch.full((shape[0], shape[1] // 16), 127, dtype=torch.uint8)
                draft.tensors[expert(layer, e, f"{part}.weight_scale")] = scale
    for shared, shape in {"gate_proj": (2 * rows, 128), "up_proj": (2 * rows, 128), "down_proj": (128, 2 * rows)}.items():
        for layer in (1, 2, 3):
            name = f"{ROOT}layers.{layer}.block_sparse_moe.shared_experts.{shared}.weight"
            draft.tensors[name] = torch.zeros(shape, dtype=torch.bfloat16)
    name = expert(2, 6, "w3.weight_scale")
    draft.tensors[name][rows - 3, 1] = 255
    src = draft.write(tmp_path / "src")
    with pytest.raises(KconvError, match=rf"{re.escape(name)} in .*, position \[{rows - 3}, 1\]: scale byte 255"):
        kconv.convert(src, tmp_path / "out", experts="bf16")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]


@pytest.mark.parametrize("byte, code, value", [(254, 7, 6), (253, 7, 6)])
def test_product_that_bf16_cannot_hold(byte: int, code: int, value: int, tmp_path: Path) -> None:
    message = refusal(with_scale(byte, code), tmp_path, "--experts", "bf16")
    assert f"{SCALE} in model-00001-of-00002.safetensors, position [5, 1]: scale byte {byte}" in message
    assert f"times {value}" in message
    assert "not representable in bfloat16" in message
    assert "keep the tensor packed, or choose a wider dtype" in message


@pytest.mark.parametrize("byte, code, value", [
    (0, 1, 2.0**-128), (0, 9, -(2.0**-128)), (254, 1, 2.0**126), (252, 7, 6 * 2.0**125),
])  # fmt: skip
def test_products_at_the_edge_that_bf16_holds(byte: int, code: int, value: float, tmp_path: Path) -> None:
    done("convert", with_scale(byte, code).write(tmp_path / "src"), tmp_path / "out", "--experts", "bf16")
    down = load_all(tmp_path / "out")["model.layers.1.mlp.experts.down_proj"]
    assert (down[3, 5, 32:].double() == value).all()


def test_product_that_fp16_cannot_hold(tmp_path: Path) -> None:
    message = refusal(with_scale(160, 7), tmp_path, "--experts", "fp16")
    assert f"{SCALE} in model-00001-of-00002.safetensors, position [5, 1]: scale byte 160" in message


def test_weight_that_a_narrower_dtype_cannot_hold(tmp_path: Path) -> None:
    draft = small_k3()
    name = ROOT + "layers.2.input_layernorm.weight"
    draft.tensors[name][7] = 2.0**-40
    message = refusal(draft, tmp_path, "--dtype", "float16")
    assert "is not representable in F16" in message
    assert "position [" in message


def test_value_without_a_code_on_the_way_back(tmp_path: Path) -> None:
    """A decoded expert that was changed has no code at its sidecar's scale."""
    from safetensors.torch import load_file, save_file

    done("convert", small_k3().write(tmp_path / "src"), tmp_path / "native", "--experts", "bf16")
    (shard,) = (tmp_path / "native").glob("model-*.safetensors")
    tensors = load_file(shard)
    tensors["model.layers.2.mlp.experts.down_proj"][4, 9, 33] *= 1.25
    save_file(tensors, shard)
    message = refused(tmp_path / "native", tmp_path / "out", "--to", "hf")
    assert "model.layers.2.mlp.experts.down_proj in model-00001-of-00001.safetensors, position [" in message
