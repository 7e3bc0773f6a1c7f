"""Published -> native -> published, read on both sides by the safetensors library: every tensor and the config come back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import kconv
from tests.reading import GOLDEN, json_of, stored_tensors, weight_map

VISION = ("vision_tower.", "mm_projector.", "model.vision_tower.", "model.mm_projector.")
BASE: dict[str, Any] = {"hidden": 64, "dense_width": 48, "kda_head_dim": 16, "vocab": 300, "split_experts": True}

# Shapes, each with something that a fixed table would get wrong; the other dimensions are random.
SHAPES: dict[str, dict[str, Any]] = {
    "grouped routing": {"experts": 8, "expert_groups": 4, "topk_groups": 2, "top_k": 3},
    "several dense layers": {"layers": 6, "dense_layers": 3},
    "blocks of one layer": {"layers": 5, "block": 1},
    "one block longer than the model": {"layers": 5, "block": 12},
    "one expert": {"experts": 1, "top_k": 1},
    "odd head counts": {"heads": 5, "kda_heads": 7, "a_log": "heads"},
    "experts pruned unevenly": {"layers": 5, "expert_counts": (5, 2, 4, 3)},
    "plain experts, one padding too few": {"plain_experts": True, "kda_heads": 129, "kda_head_dim": 2},
    "another root, dotted residuals": {"root": "model.language_model.", "dotted_res": True, "a_log": "broadcast"},
    "text only": {"root": "model.", "layers": 4},
    "no latent, no query compression, tied": {"latent": 0, "q_lora": 0, "tied": True},
    "experts in every second layer": {"moe_every": 2, "layers": 6},
}
DIMENSIONS: dict[str, tuple[int, ...]] = {
    "layers": (3, 6), "experts": (2, 6), "expert_width": (32, 97, 32), "latent": (32, 65, 32), "heads": (1, 5),
    "kda_heads": (1, 5), "shared_experts": (0, 3), "block": (1, 4), "q_lora": (8, 41), "kv_lora": (8, 41), "nope_dim": (4, 21),
    "rope_dim": (1, 10), "v_dim": (4, 21), "conv_kernel": (2, 6), "vision_layers": (1, 4),
}  # fmt: skip


def random_shape(name: str) -> dict[str, Any]:
    """A shape's own options over random dimensions of its own."""
    rng = random.Random(name)
    dimensions = {option: rng.randrange(*bounds) for option, bounds in DIMENSIONS.items()}
    return BASE | dimensions | SHAPES[name] | {"seed": rng.randrange(1000)}


@pytest.fixture(params=["golden", "kimi-linear", *SHAPES])
def source(request, tmp_path) -> Path:
    """A published checkpoint: the one made with the official code, or a random one."""
    if request.param == "golden":
        return GOLDEN / "tiny-k3"
    if request.param == "kimi-linear":
        kconv.tiny("kimi-linear", tmp_path / "source", layers=6, hidden=64, experts=5, kda_heads=5, seed=3)
        return tmp_path / "source"
    kconv.tiny("k3", tmp_path / "source", **random_shape(request.param))
    return tmp_path / "source"


def is_vision(name: str) -> bool:
    return name.startswith(VISION)


def there_and_back(source: Path, tmp_path: Path, vision: str, **options: Any) -> tuple[Path, Path]:
    """The native folder and the published one made from it."""
    kconv.convert(source, tmp_path / "native", vision=vision, **options)
    kconv.convert(tmp_path / "native", tmp_path / "back", to="hf")
    return tmp_path / "native", tmp_path / "back"


@pytest.mark.parametrize("experts", ("packed", "bf16"))
def test_everything_comes_back(source, tmp_path, experts):
    plain = not any(n.endswith("weight_packed") for n in weight_map(source))
    options = {} if plain else {"experts": experts}
    vision = "keep" if any(map(is_vision, weight_map(source))) else "drop"
    native, back = there_and_back(source, tmp_path, vision, **options)
    before, after = stored_tensors(source), stored_tensors(back)
    assert set(after) == set(before)
    assert [n for n in before if after[n] != before[n]] == []
    assert json_of(back / "config.json") == json_of(source / "config.json")
    assert set(weight_map(back)) == set(before)
    for folder, of in ((native, source), (back, native)):
        result = kconv.verify(folder, of)
        assert result["ok"], result
    grade = json_of(native / "kconv.json")["grade"]
    assert grade == ("exact" if plain or experts == "packed" else "exact-with-sidecar")


def test_without_vision_the_text_model_comes_back(source, tmp_path):
    native, back = there_and_back(source, tmp_path, "drop")
    before, after = stored_tensors(source), stored_tensors(back)
    text = {n: t for n, t in before.items() if not is_vision(n)}
    assert text
    assert after == text
    vision = len(before) - len(text)
    dropped = json_of(native / "kconv.json")["dropped"]
    assert [(d["count"], d["reason"]) for d in dropped] == ([(vision, "vision left out (--vision drop)")] if vision else [])
    result = kconv.verify(native, source)
    assert result["ok"], result
    assert result["compared"] == len(text)
    assert result["dropped"] == ([f"{vision} tensors: vision left out (--vision drop)"] if vision else [])


def test_the_native_tensors_are_the_published_ones_restacked(tmp_path):
    """The native side against names and rows written out by hand, so that a table wrong both ways is seen."""
    source = GOLDEN / "tiny-k3"
    kconv.convert(source, tmp_path / "native", vision="keep")
    published, native = stored_tensors(source), stored_tensors(tmp_path / "native")
    experts = "language_model.model.layers.5.block_sparse_moe.experts."
    stacked = b"".join(published[f"{experts}{e}.{w}.weight_packed"].data for e in range(8) for w in ("w1", "w3"))
    assert native["model.layers.5.mlp.experts.gate_up_proj_packed"] == ("U8", (8, 128, 32), stacked)
    scales = b"".join(published[f"{experts}{e}.w2.weight_scale"].data for e in range(8))
    assert native["model.layers.5.mlp.experts.down_proj_scale"] == ("U8", (8, 64, 2), scales)
    a_log = published["language_model.model.layers.0.self_attn.A_log"]
    assert native["model.layers.0.self_attn.A_log"] == ("F32", (3,), a_log.data[:12])
    assert a_log.data[12:] == bytes(125 * 4)
    same = {
        "language_model.model.layers.8.self_attn.g_proj.weight": "model.layers.8.self_attn.g_proj.weight",
        "language_model.model.layers.1.block_sparse_moe.gate.weight": "model.layers.1.mlp.gate.weight",
        "language_model.lm_head.weight": "lm_head.weight",
        "vision_tower.patch_embed.pos_emb.weight": "vision_tower.patch_embed.pos_emb.weight",
    }
    for old, new in same.items():
        assert native[new] == published[old]


def test_decoded_experts_are_what_compressed_tensors_decodes(tmp_path):
    """bf16 experts against compressed-tensors, which wrote the published checkpoint."""
    unpack = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers").unpack_fp4_from_uint8
    import torch

    from tests.reading import tensor

    source = GOLDEN / "tiny-k3"
    kconv.convert(source, tmp_path / "native", experts="bf16")
    published, native = stored_tensors(source), stored_tensors(tmp_path / "native")
    down = tensor(native["model.layers.3.mlp.experts.down_proj"])
    for expert in range(8):
        name = f"language_model.model.layers.3.block_sparse_moe.experts.{expert}.w2.weight_"
        codes, scale = tensor(published[name + "packed"]), tensor(published[name + "scale"])
        values = unpack(codes, *codes.shape[:1], codes.shape[1] * 2, dtype=torch.float32)
        decoded = values * torch.exp2(scale.float() - 127).repeat_interleave(32, dim=1)
        assert torch.equal(down[expert].float(), decoded)
