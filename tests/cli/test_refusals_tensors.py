"""Tensors that are missing, too many, twice, or not as the config says: refused by name, before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.builders import ROOT, Draft, dense_experts, expert, flat_k3, small_k3
from tests.cli.refusing import done, refused, run

LAYER1 = ROOT + "layers.1."
GATE = LAYER1 + "block_sparse_moe.gate.weight"


def refusal(draft: Draft, tmp_path: Path, *args: str) -> str:
    return refused(draft.write(tmp_path / "src"), tmp_path / "out", *args)


def test_tensor_that_no_rule_claims(tmp_path: Path) -> None:
    # KB-017: a newer layout's tensors are neither dropped nor kept in silence.
    draft = small_k3()
    name = LAYER1 + "self_attn.sink.wk.weight"
    draft.tensors[name] = torch.zeros(4)
    message = refusal(draft, tmp_path)
    assert f"no rule claims: {name} in model-00001-of-00002.safetensors" in message
    assert "nothing is left out silently" in message


def test_unclaimed_tensors_are_folded_and_counted(tmp_path: Path) -> None:
    draft = small_k3()
    draft.tensors |= {f"{ROOT}layers.{i}.self_attn.sink.wk.weight": torch.zeros(4) for i in range(3)}
    message = refusal(draft, tmp_path)
    assert f"no rule claims: {ROOT}layers.{{0-2}}.self_attn.sink.wk.weight (3 tensors) in model-00001" in message


def test_plan_says_the_same(tmp_path: Path) -> None:
    draft = small_k3()
    draft.tensors["extra"] = torch.zeros(4)
    result = run("plan", draft.write(tmp_path / "src"))
    assert result.exit_code == 2
    assert "no rule claims: extra in model-00001-of-00002.safetensors" in result.stderr
    assert result.stdout == ""


def test_scale_is_missing(tmp_path: Path) -> None:
    name = expert(1, 3, "w2.weight_scale")
    message = refusal(small_k3().pop(name), tmp_path)
    assert f"missing from the source: {name}" in message
    assert "fetch what is missing" in message


def test_scale_without_its_codes(tmp_path: Path) -> None:
    name = expert(1, 3, "w2.weight_packed")
    assert f"missing from the source: {name}" in refusal(small_k3().pop(name), tmp_path)


def test_scale_spelled_as_no_release_does(tmp_path: Path) -> None:
    draft = small_k3()
    draft.tensors = {n.replace("w1.weight_scale", "w1.scale_weight"): t for n, t in draft.tensors.items()}
    message = refusal(draft, tmp_path)
    folded = f"{ROOT}layers.{{1-3}}.block_sparse_moe.experts.{{0-7}}.w1"
    assert f"missing from the source: {folded}.weight_scale (24 tensors)" in message
    assert f"no rule claims: {folded}.scale_weight (24 tensors)" in message


def test_expert_is_missing(tmp_path: Path) -> None:
    draft = small_k3()
    draft.pop(*[n for n in draft.tensors if n.startswith(expert(2, 5, ""))])
    message = refusal(draft, tmp_path)
    assert "layer 2: the router" in message
    assert "has 8 rows, but expert 5 is lacking" in message
    assert f"missing from the source: {expert(2, 5, 'w1.weight_packed')}" in message


def test_one_part_of_an_expert_is_missing(tmp_path: Path) -> None:
    draft = dense_experts(small_k3()).pop(expert(2, 5, "w2.weight"))
    assert f"missing from the source: {expert(2, 5, 'w2.weight')}" in refusal(draft, tmp_path)


def test_expert_beyond_the_router(tmp_path: Path) -> None:
    draft = small_k3()
    seventh = {n: t for n, t in draft.tensors.items() if n.startswith(expert(1, 7, ""))}
    draft.tensors |= {n.replace("experts.7.", "experts.8."): t.clone() for n, t in seventh.items()}
    message = refusal(draft, tmp_path)
    assert f"layer 1: the router {GATE} in model-00001-of-00002.safetensors has 8 rows, but expert 8 is there too" in message


def test_router_has_fewer_rows_than_experts(tmp_path: Path) -> None:
    draft = small_k3()
    draft.tensors[GATE] = draft.tensors[GATE][:6].clone()
    message = refusal(draft, tmp_path)
    assert f"layer 1: the router {GATE} in model-00001-of-00002.safetensors has 6 rows, but expert 6-7 is there too" in message
    bias = GATE.replace("weight", "e_score_correction_bias")
    assert f"{bias} in model-00001-of-00002.safetensors is F32 [8]" in message
    assert "experts by the router's rows = 6" in message


def test_experts_of_both_kinds_in_one_layer(tmp_path: Path) -> None:
    draft = small_k3()
    draft.tensors[expert(1, 3, "w2.weight")] = torch.zeros(64, 64).bfloat16()
    draft.pop(expert(1, 3, "w2.weight_packed"), expert(1, 3, "w2.weight_scale"))
    message = refusal(draft, tmp_path)
    assert "layer 1 holds experts both quantised and plain" in message
    assert f"no rule claims: {expert(1, 3, 'w2.weight')}" in message


def test_experts_under_names_of_another_family(tmp_path: Path) -> None:
    draft = dense_experts(small_k3())
    draft.tensors = {n.replace(".w1.weight", ".gate_proj.weight"): t for n, t in draft.tensors.items()}
    message = refusal(draft, tmp_path)
    assert "experts.{0-7}.gate_proj.weight (24 tensors)" in message
    assert "experts.{0-7}.w1.weight (24 tensors)" in message


def test_norm_that_the_config_switched_off(tmp_path: Path) -> None:
    draft = small_k3()
    draft.text["latent_moe_use_norm"] = False
    message = refusal(draft, tmp_path)
    assert f"no rule claims: {ROOT}layers.{{1-3}}.block_sparse_moe.routed_expert_norm.weight (3 tensors)" in message


def test_shape_against_the_config_gives_the_formula(tmp_path: Path) -> None:
    draft = small_k3()
    name = ROOT + "layers.3.self_attn.kv_b_proj.weight"
    draft.tensors[name] = draft.tensors[name][1:].clone()
    message = refusal(draft, tmp_path)
    assert f"{name} in model-00002-of-00002.safetensors is BF16 [127, 32], the config asks for BF16 [128, 32]" in message
    assert "(num_key_value_heads = 4) x (qk_nope_head_dim+v_head_dim = 32), (kv_lora_rank = 32)" in message


def test_shape_of_an_expert_against_the_config(tmp_path: Path) -> None:
    draft = small_k3()
    for e in range(8):
        draft.tensors[expert(1, e, "w1.weight_packed")] = torch.zeros(65, 32, dtype=torch.uint8)
        draft.tensors[expert(1, e, "w1.weight_scale")] = torch.zeros(65, 2, dtype=torch.uint8)
    message = refusal(draft, tmp_path)
    assert f"{expert(1, 0, 'w1.weight_packed')} in model-00001-of-00002.safetensors is U8 [65, 32]" in message
    assert "(moe_intermediate_size = 64), (routed_expert_hidden_size = 64)" in message


def test_one_expert_shaped_unlike_the_others(tmp_path: Path) -> None:
    draft = small_k3()
    draft.tensors[expert(1, 4, "w2.weight_scale")] = torch.zeros(64, 1, dtype=torch.uint8)
    message = refusal(draft, tmp_path)
    assert f"{expert(1, 4, 'w2.weight_scale')} in model-00001-of-00002.safetensors is U8 [64, 1]" in message
    assert "the first expert's is U8 [64, 2]" in message


def test_dtype_against_the_config(tmp_path: Path) -> None:
    draft = small_k3()
    name = ROOT + "layers.3.self_attn.kv_b_proj.weight"
    draft.tensors[name] = draft.tensors[name].half()
    message = refusal(draft, tmp_path)
    assert f"{name} in model-00002-of-00002.safetensors is F16 [128, 32]" in message
    assert "the config asks for BF16 [128, 32] or F32 [128, 32]" in message


def test_wrong_width_everywhere_is_folded(tmp_path: Path) -> None:
    draft = small_k3()
    draft.text["hidden_size"] = 120
    message = refusal(draft, tmp_path)
    assert f"{ROOT}layers.{{0-3}}.input_layernorm.weight (4 tensors)" in message
    assert len(message.splitlines()) < 60


@pytest.mark.parametrize("tail", [1e-3, -0.0, float("nan"), float("inf")])
def test_padding_of_a_log_that_holds_data(tail: float, tmp_path: Path) -> None:
    draft = small_k3()
    for layer in (0, 2):
        draft.tensors[f"{ROOT}layers.{layer}.self_attn.A_log"][100] = tail
    message = refusal(draft, tmp_path)
    assert f"{ROOT}layers.0.self_attn.A_log in model-00001-of-00002.safetensors, position [100]" in message
    assert f"{ROOT}layers.2.self_attn.A_log in model-00002-of-00002.safetensors, position [100]" in message
    assert "padding after 3 of 128 entries" in message


@pytest.mark.parametrize("length", [2, 7, 127])
def test_a_log_of_a_length_that_fits_no_heads(length: int, tmp_path: Path) -> None:
    draft = small_k3()
    name = ROOT + "layers.1.self_attn.A_log"
    draft.tensors[name] = torch.zeros(length)
    message = refusal(draft, tmp_path)
    assert f"{name} in model-00001-of-00002.safetensors is F32 [{length}]" in message
    assert "KDA num_heads = 3" in message


def test_layers_under_two_roots(tmp_path: Path) -> None:
    draft = small_k3()
    draft.tensors["model.layers.0.input_layernorm.weight"] = torch.zeros(128).bfloat16()
    message = refusal(draft, tmp_path)
    assert "layers under two roots: language_model.model. (245 tensors" in message
    assert "and model. (1 tensor, model.layers.0.input_layernorm.weight in model-00002-of-00002.safetensors)" in message
    assert "remove the tensors that do not belong" in message


def test_residual_tensor_in_both_spellings(tmp_path: Path) -> None:
    draft = small_k3()
    name = ROOT + "layers.0.self_attention_res.proj_weight"
    draft.tensors[name] = torch.zeros(1, 128).bfloat16()
    message = refusal(draft, tmp_path)
    assert "attention-residual tensors in two spellings" in message
    assert f"1 tensor, {name} in model-00001-of-00002.safetensors" in message


def test_next_token_layers_are_not_dropped(tmp_path: Path) -> None:
    draft = small_k3()
    name = ROOT + "layers.4.eh_proj.weight"
    draft.tensors[name] = torch.zeros(4)
    draft.text["num_nextn_predict_layers"] = 1
    message = refusal(draft, tmp_path)
    assert f"config.json has 4 layers (0-3), but 1 tensor, {name} in model-00002-of-00002.safetensors lie beyond" in message
    assert "next-token prediction layers, which kconv does not convert" in message


def test_native_checkpoint_that_lost_a_tensor(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    done("convert", small_k3().write(tmp_path / "src"), tmp_path / "native")
    (shard,) = (tmp_path / "native").glob("*.safetensors")
    tensors = load_file(shard)
    del tensors["model.layers.3.self_attn.kv_b_proj.weight"]
    tensors["model.layers.2.mlp.experts.down_proj_packed"] = tensors["model.layers.2.mlp.experts.down_proj_packed"][:7].clone()
    save_file(tensors, shard)
    (tmp_path / "native" / "model.safetensors.index.json").unlink()
    message = refused(tmp_path / "native", tmp_path / "out", "--to", "hf")
    assert "missing from the source: model.layers.3.self_attn.kv_b_proj.weight" in message
    assert "model.layers.2.mlp.experts.down_proj_packed in model-00001-of-00001.safetensors is U8 [7, 64, 32]" in message
    assert "should hold 8 experts" in message


def test_text_only_root_is_refused_alike(tmp_path: Path) -> None:
    name = "model.layers.3.self_attn.kv_b_proj.weight"
    assert f"missing from the source: {name}" in refusal(flat_k3().pop(name), tmp_path)
