"""Saving, loading and the Auto classes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModel, AutoModelForCausalLM

from kconv.errors import KconvError
from kconv.modeling import KimiK3ForCausalLM, KimiK3TextConfig, KimiK3TextModel
from tests.modeling.tiny import ids, model


@pytest.mark.parametrize("experts_format", ["packed", "bf16"])
def test_round_trip(tmp_path: Path, experts_format: str) -> None:
    m = model(dtype=torch.bfloat16, experts_format=experts_format)
    m.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["KimiK3ForCausalLM"]
    assert config["model_type"] == "kimi_k3_text"
    assert config["experts_format"] == experts_format
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is KimiK3ForCausalLM
    for (name, a), (other, b) in zip(m.state_dict().items(), again.state_dict().items(), strict=True):
        assert name == other
        assert a.dtype == b.dtype
        assert torch.equal(a, b), name
    x = ids(2, 9)
    with torch.no_grad():
        assert torch.equal(m(x).logits, again(x).logits)


def test_names_on_disk(tmp_path: Path) -> None:
    model(experts_format="packed").save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    layer = "model.layers.1."
    assert {
        "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight", "model.output_attn_res_norm.weight",
        "model.output_attn_res_proj.weight", "model.layers.0.mlp.gate_proj.weight", f"{layer}self_attn.A_log",
        f"{layer}self_attn.q_conv1d.weight", f"{layer}self_attn.o_norm.weight", f"{layer}self_attention_res_norm.weight",
        f"{layer}self_attention_res_proj.weight", f"{layer}mlp_res_norm.weight", f"{layer}mlp_res_proj.weight",
        f"{layer}mlp.gate.weight", f"{layer}mlp.gate.e_score_correction_bias", f"{layer}mlp.shared_experts.up_proj.weight",
        f"{layer}mlp.routed_expert_down_proj.weight", f"{layer}mlp.routed_expert_norm.weight",
        f"{layer}mlp.experts.gate_up_proj_packed", f"{layer}mlp.experts.gate_up_proj_scale",
        f"{layer}mlp.experts.down_proj_packed", f"{layer}mlp.experts.down_proj_scale",
    } <= names  # fmt: skip


def test_base_model_of_a_saved_head(tmp_path: Path) -> None:
    m = model()
    m.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is KimiK3TextModel
    with torch.no_grad():
        torch.testing.assert_close(base(ids(1, 5)).last_hidden_state, m.model(ids(1, 5)).last_hidden_state)


def test_a_head_on_a_bare_model_is_asked_for(tmp_path: Path) -> None:
    """The missing head is named; `strict=False` initialises it, and only it."""
    bare = model().model
    bare.save_pretrained(tmp_path)
    with pytest.raises(KconvError, match=r"lm_head\.weight"):
        KimiK3ForCausalLM.from_pretrained(tmp_path)
    made, info = KimiK3ForCausalLM.from_pretrained(tmp_path, strict=False, output_loading_info=True)
    assert set(info["missing_keys"]) == {"lm_head.weight"}
    assert made.lm_head.weight.std() > 0.05
    for name, t in bare.state_dict().items():
        assert torch.equal(made.model.state_dict()[name], t), name


def test_tied_embeddings(tmp_path: Path) -> None:
    m = model(tie_word_embeddings=True)
    assert m.lm_head.weight is m.model.embed_tokens.weight
    m.save_pretrained(tmp_path)
    again = KimiK3ForCausalLM.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(again.lm_head.weight, m.lm_head.weight)


@pytest.mark.parametrize("fault", ["missing", "surplus", "shape"])
def test_strict(tmp_path: Path, fault: str) -> None:
    m = model()
    state = m.state_dict()
    name = "model.layers.2.self_attn.kv_b_proj.weight"
    if fault == "missing":
        del state[name]
    elif fault == "surplus":
        state["model.layers.2.self_attn.extra.weight"] = torch.zeros(2)
    else:
        state[name] = state[name][:-1]
    m.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(KconvError, match=r"extra\.weight" if fault == "surplus" else r"kv_b_proj\.weight"):
        KimiK3ForCausalLM.from_pretrained(tmp_path)


def test_all_dense_model() -> None:
    """Relatives without experts (every layer dense) are built from the same config."""
    m = model(num_experts=None)
    assert not [n for n, _ in m.named_parameters() if "experts" in n]
    assert m(ids(1, 4)).logits.shape == (1, 4, 97)


def test_meta_device_at_full_size() -> None:
    """Kimi K3 itself, without its memory: parameter counts of the published checkpoint."""
    with torch.device("meta"):
        m = KimiK3ForCausalLM(KimiK3TextConfig(experts_format="packed"))
    count = {"codes": 0, "scales": 0, "rest": 0}
    for name, p in m.named_parameters():
        count["scales" if name.endswith("_scale") else "codes" if name.endswith("_packed") else "rest"] += p.numel()
    assert 2 * count["codes"] == 2_722_740_830_208
    assert count["scales"] == 2_722_740_830_208 // 32
    vision_and_projector = 57_179_884_544 + 11_122_432 - count["rest"]
    assert 0 < vision_and_projector < 600_000_000
