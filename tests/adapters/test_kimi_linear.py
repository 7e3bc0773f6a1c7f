"""Kimi-Linear between Transformers' own class and ours: what `save_pretrained` writes, what is published, and back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kconv
from kconv.errors import KconvError
from tests.adapters.live import lively, loaded, torch_forms
from tests.reading import json_of, stored_tensors

transformers = pytest.importorskip("transformers", minversion="5.24")

SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "qk_nope_head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 3,
}  # fmt: skip
BLOCK = {"full_attn_layers": [3, 5], "kda_layers": [1, 2, 4], "num_heads": 3, "head_dim": 32, "short_conv_kernel_size": 4}
KINDS = ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"]
# The same model, said in the published words and in Transformers'.
CONFIGS: dict[str, dict[str, Any]] = {
    "published block": {"linear_attn_config": BLOCK, "first_k_dense_replace": 2},
    "layer types": {
        "layer_types": KINDS, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 3,
        "linear_num_heads": 3, "linear_head_dim": 32, "linear_conv_kernel_dim": 4,
    },
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu() -> Iterator[None]:
    with torch_forms():
        yield


@pytest.fixture(scope="module", params=CONFIGS)
def saved(request, tmp_path_factory) -> Path:
    """A random Kimi-Linear as Transformers saves it, in bf16."""
    folder = tmp_path_factory.mktemp("saved")
    config = transformers.KimiLinearConfig(**SIZES, **CONFIGS[request.param])
    lively(transformers.KimiLinearForCausalLM(config)).to(torch.bfloat16).save_pretrained(folder)
    return folder


def ids(length: int = 70) -> torch.Tensor:
    return torch.randint(4, 300, (2, length), generator=torch.Generator().manual_seed(5))


def assert_same_logits(ours: Any, theirs: Any) -> None:
    """Within fp32 noise: 7e-6 measured, of logits up to 5."""
    with torch.no_grad():
        a, b = ours(ids(), use_cache=False).logits, theirs(ids(), use_cache=False).logits
    assert b.std() > 0.5
    torch.testing.assert_close(a, b, rtol=0, atol=5e-6 * float(b.abs().max()))


@pytest.mark.parametrize("way", ("convert, then load", "load as saved"))
def test_what_transformers_saves_computes_the_same(saved, tmp_path, way):
    source = saved
    if way == "convert, then load":
        kconv.convert(saved, tmp_path / "native")
        assert kconv.verify(tmp_path / "native", saved)["ok"]
        source = tmp_path / "native"
    assert_same_logits(kconv.load(source, dtype=torch.float32), loaded(transformers.KimiLinearForCausalLM, saved))


def test_what_transformers_saves_comes_back_byte_for_byte(saved, tmp_path):
    """`save_pretrained` calls the dense layers' MLP block_sparse_moe too; that comes back as well."""
    kconv.convert(saved, tmp_path / "native")
    kconv.convert(tmp_path / "native", tmp_path / "back", to="hf")
    before, after = stored_tensors(saved), stored_tensors(tmp_path / "back")
    assert "model.layers.0.block_sparse_moe.gate_proj.weight" in before
    assert before["model.layers.0.self_attn.A_log"].shape == (1, 1, 3, 1)
    assert after == before
    assert json_of(tmp_path / "back" / "config.json") == json_of(saved / "config.json")


def test_the_published_layout_computes_the_same(tmp_path):
    """`mlp` in dense layers, A_log F32 [1, 1, H, 1], bf16 convolutions, low-rank gates; three shards."""
    kconv.tiny("kimi-linear", tmp_path / "published", layers=5, hidden=64, kda_heads=3, calm=True)
    kconv.convert(tmp_path / "published", tmp_path / "native")
    kconv.convert(tmp_path / "native", tmp_path / "back", to="hf")
    stored = stored_tensors(tmp_path / "published")
    assert "model.layers.0.mlp.gate_proj.weight" in stored
    assert stored["model.layers.0.self_attn.A_log"][:2] == ("F32", (1, 1, 3, 1))
    assert stored["model.layers.0.self_attn.q_conv1d.weight"].dtype == "BF16"
    assert stored_tensors(tmp_path / "back") == stored
    theirs = loaded(transformers.KimiLinearForCausalLM, tmp_path / "back")
    assert_same_logits(kconv.load(tmp_path / "native", dtype=torch.float32), theirs)


def test_the_published_spelling_is_written_for_hf_text(saved, tmp_path):
    kconv.convert(saved, tmp_path / "native")
    kconv.convert(tmp_path / "native", tmp_path / "text", to="hf-text")
    assert "model.layers.0.mlp.gate_proj.weight" in stored_tensors(tmp_path / "text")
    theirs = [loaded(transformers.KimiLinearForCausalLM, folder) for folder in (tmp_path / "text", saved)]
    with torch.no_grad():
        a, b = (m(ids(), use_cache=False).logits for m in theirs)
    assert torch.equal(a, b)


def test_names_of_transformers_modules_are_refused_with_the_remedy(tmp_path):
    config = transformers.KimiLinearConfig(**SIZES, **CONFIGS["published block"])
    transformers.KimiLinearForCausalLM(config).save_pretrained(tmp_path / "own", save_original_format=False)
    with pytest.raises(KconvError, match="forget_gate") as refused:
        kconv.plan(tmp_path / "own")
    assert "save_original_format" in (refused.value.hint or "")


def test_dense_layers_between_sparse_ones_are_refused(tmp_path):
    mixed = {**CONFIGS["layer types"], "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"]}
    transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**SIZES, **mixed)).save_pretrained(tmp_path / "mixed")
    with pytest.raises(KconvError, match="mlp_layer_types"):
        kconv.plan(tmp_path / "mixed")
