"""The spellings and forms of Kimi K3 that exist, against one native result; values against a decoder written here.

Every variant goes through the real commands. "The same" means the same bytes in the weight files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.builders import (
    ROOT,
    Draft,
    dense_experts,
    expert,
    flat_k3,
    load_all,
    read_index,
    small_k3,
)
from tests.cli.refusing import done

A_LOG = "self_attn.A_log"
FP32 = ("A_log", "dt_bias", "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", "o_norm.weight", "e_score_correction_bias")


def native(draft: Draft, folder: Path, *args: str) -> dict[str, Tensor]:
    """The native tensors of a draft checkpoint."""
    folder.mkdir()
    done("convert", draft.write(folder / "src"), folder / "out", *args)
    return load_all(folder / "out")


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and a[n].shape == b[n].shape and raw(a[n]) == raw(b[n]) for n in a
    )


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture
def plain(tmp_path: Path) -> dict[str, Tensor]:
    """The small K3 as published, converted."""
    return native(small_k3(), tmp_path / "plain")


def back(folder: Path) -> dict[str, Tensor]:
    """What `--to hf` makes of a native folder."""
    done("convert", folder / "out", folder / "back", "--to", "hf")
    return load_all(folder / "back")


def spelled_flat() -> Draft:
    return flat_k3()


def spelled_transformers() -> Draft:
    draft = small_k3().renamed("language_model.model.", "model.language_model.")
    return draft.renamed("language_model.lm_head", "lm_head")


def dotted() -> Draft:
    return small_k3().renamed("_res_norm.weight", "_res.norm_weight").renamed("_res_proj.weight", "_res.proj_weight")


def a_log(form: Callable[[Tensor], Tensor]) -> Draft:
    draft = small_k3()
    for name in [n for n in draft.tensors if n.endswith(A_LOG)]:
        draft.tensors[name] = form(draft.tensors[name][:3])
    return draft


def padded(n: int) -> Callable[[Tensor], Tensor]:
    return lambda heads: torch.cat([heads, torch.zeros(n - 3)])


SPELLINGS: dict[str, Callable[[], Draft]] = {
    "root model.": spelled_flat,
    "root model.language_model.": spelled_transformers,
    "dotted residual names": dotted,
    "A_log of the head count": lambda: a_log(lambda heads: heads.clone()),
    "A_log padded to 8": lambda: a_log(padded(8)),
    "A_log padded to 256": lambda: a_log(padded(256)),
    "A_log with four axes": lambda: a_log(lambda heads: heads.clone().view(1, 1, 3, 1)),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_gives_the_same_and_comes_back(spelling: str, plain: dict[str, Tensor], tmp_path: Path) -> None:
    draft = SPELLINGS[spelling]()
    assert same(native(draft, tmp_path / "x"), plain)
    assert same(back(tmp_path / "x"), draft.tensors)
    assert json.loads((tmp_path / "x" / "back" / "config.json").read_text()) == draft.config


@pytest.mark.parametrize("shards, index", [(1, True), (1, False), (4, False), (7, True)])
def test_any_sharding_gives_the_same(shards: int, index: bool, plain: dict[str, Tensor], tmp_path: Path) -> None:
    src = small_k3().write(tmp_path / "src", shards=shards, index=index)
    done("convert", src, tmp_path / "out")
    assert same(load_all(tmp_path / "out"), plain)


def test_parts_of_one_expert_in_different_files(plain: dict[str, Tensor], tmp_path: Path) -> None:
    draft = small_k3()
    files = {n: f"model-0000{i % 5 + 1}-of-00005.safetensors" for i, n in enumerate(sorted(draft.tensors))}
    done("convert", draft.write_as(tmp_path / "src", files), tmp_path / "out")
    assert same(load_all(tmp_path / "out"), plain)


def decoded(packed: Tensor, scale: Tensor) -> np.ndarray:
    """MXFP4 by its definition: sign, two exponent bits, one mantissa bit; low nibble first; scale 2^(byte-127)."""
    codes = np.stack([packed.numpy() & 15, packed.numpy() >> 4], -1).reshape(packed.shape[0], -1)
    magnitude = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7]
    groups = np.ldexp(1.0, scale.numpy().astype(int) - 127)
    return np.where(codes & 8, -magnitude, magnitude) * groups.repeat(32, axis=1)


def test_gate_rows_come_first_then_up_and_nothing_is_transposed(tmp_path: Path) -> None:
    """Expert and latent width are equal here, so that no shape would give a mistake away."""
    draft = small_k3()
    assert draft.text["moe_intermediate_size"] == draft.text["routed_expert_hidden_size"] == 64
    made = native(draft, tmp_path / "x", "--experts", "bf16")
    for layer in (1, 2, 3):
        for e in range(8):
            names = [expert(layer, e, f"{w}.weight_") for w in ("w1", "w2", "w3")]
            w1, w2, w3 = (decoded(draft.tensors[n + "packed"], draft.tensors[n + "scale"]) for n in names)
            base = f"model.layers.{layer}.mlp.experts."
            np.testing.assert_array_equal(made[base + "gate_up_proj"][e].double().numpy(), np.concatenate([w1, w3]))
            np.testing.assert_array_equal(made[base + "down_proj"][e].double().numpy(), w2)


def test_result_says_how_gate_and_up_lie(tmp_path: Path) -> None:
    native(small_k3(), tmp_path / "x")
    facts = json.loads((tmp_path / "x" / "out" / "kconv.json").read_text())["facts"]
    assert "w1 (gate), then rows of w3 (up)" in facts["gate_up_proj"]


def test_experts_one_by_one_and_stacked_give_the_same(tmp_path: Path) -> None:
    draft = dense_experts(small_k3())
    one_by_one = native(draft, tmp_path / "x")
    done("convert", tmp_path / "x" / "out", tmp_path / "again")
    assert same(load_all(tmp_path / "again"), one_by_one)
    assert torch.equal(one_by_one["model.layers.2.mlp.experts.down_proj"][5], draft.tensors[expert(2, 5, "w2.weight")])
    assert same(back(tmp_path / "x"), draft.tensors)


def pruned(counts: dict[int, int]) -> Draft:
    """Layers that keep only their first experts, with the router's rows and biases."""
    draft = small_k3()
    for layer, count in counts.items():
        for e in range(count, 8):
            draft.pop(*[n for n in draft.tensors if n.startswith(expert(layer, e, ""))])
        for name in ("weight", "e_score_correction_bias"):
            gate = f"{ROOT}layers.{layer}.block_sparse_moe.gate.{name}"
            draft.tensors[gate] = draft.tensors[gate][:count].clone()
    return draft


def test_expert_counts_that_differ_by_layer(tmp_path: Path) -> None:
    draft = pruned({1: 5, 3: 2})
    made = native(draft, tmp_path / "x")
    assert [made[f"model.layers.{i}.mlp.experts.down_proj_packed"].shape[0] for i in (1, 2, 3)] == [5, 8, 2]
    assert json.loads((tmp_path / "x" / "out" / "config.json").read_text())["num_experts_per_layer"] == [0, 5, 8, 2]
    assert same(back(tmp_path / "x"), draft.tensors)


def test_pruned_checkpoint_whose_config_kept_the_old_count(tmp_path: Path) -> None:
    src = pruned({1: 5, 2: 5, 3: 5}).write(tmp_path / "src")
    assert "the config says 8 experts, the tensors hold 5 in layers 1-3" in done("plan", src)["notes"]


def test_fp32_set_stays_fp32_whatever_the_dtype(tmp_path: Path) -> None:
    """Sixteen close biases would be rounded together in bf16."""
    draft = small_k3()
    name = f"{ROOT}layers.1.block_sparse_moe.gate.e_score_correction_bias"
    draft.tensors[name] = 6.9 + torch.arange(8) * 0.015
    for target in ("native", "hf-text"):
        made = native(draft, tmp_path / target, "--to", target, "--dtype", "bfloat16")
        kept = {n: t for n, t in made.items() if n.endswith(FP32)}
        assert len(kept) == 3 * 6 + 3
        assert all(t.dtype == torch.float32 for t in kept.values())
        bias = next(t for n, t in kept.items() if "layers.1." in n and n.endswith("e_score_correction_bias"))
        assert torch.equal(bias, draft.tensors[name])
        assert len(set(bias.tolist())) == 8


def test_dtype_there_and_back(tmp_path: Path) -> None:
    made = native(small_k3(), tmp_path / "x", "--dtype", "float32")
    assert made["model.layers.0.input_layernorm.weight"].dtype == torch.float32
    assert json.loads((tmp_path / "x" / "out" / "config.json").read_text())["dtype"] == "float32"
    done("convert", tmp_path / "x" / "out", tmp_path / "back", "--to", "hf", "--dtype", "bfloat16")
    assert same(load_all(tmp_path / "back"), small_k3().tensors)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"


def test_checkpoint_stored_in_fp32(tmp_path: Path) -> None:
    draft = dense_experts(small_k3())
    draft.tensors = {n: t.float() for n, t in draft.tensors.items()}
    assert {t.dtype for t in native(draft, tmp_path / "x").values()} == {torch.float32}
    assert same(back(tmp_path / "x"), draft.tensors)


def test_vision_is_dropped_by_name_and_count(tmp_path: Path) -> None:
    src = small_k3(vision=True).write(tmp_path / "src")
    result = done("convert", src, tmp_path / "out")
    vision = [n for n in read_index(src) if n.startswith(("vision_tower.", "mm_projector."))]
    assert result["dropped"] == len(vision) == 18
    (drop,) = json.loads((tmp_path / "out" / "kconv.json").read_text())["dropped"]
    assert drop["count"] == 18
    assert any("vision_tower" in n for n in drop["names"])
    assert not any("vision" in n or "projector" in n for n in read_index(tmp_path / "out"))


def test_scalars_and_odd_dtypes_in_the_vision_part_survive(tmp_path: Path) -> None:
    draft = small_k3(vision=True)
    draft.tensors["mm_projector.scale"] = torch.tensor(0.25)
    draft.tensors["vision_tower.steps"] = torch.tensor(7, dtype=torch.int64)
    draft.tensors["vision_tower.empty"] = torch.zeros(0, 3, dtype=torch.bfloat16)
    made = native(draft, tmp_path / "x", "--vision", "keep")
    assert made["mm_projector.scale"].shape == made["vision_tower.steps"].shape == ()
    assert same(back(tmp_path / "x"), draft.tensors)


def test_next_token_layers_that_only_the_config_has(tmp_path: Path) -> None:
    draft = small_k3()
    draft.text["num_nextn_predict_layers"] = 1
    src = draft.write(tmp_path / "src")
    result = done("convert", src, tmp_path / "out")
    assert "config.json promises num_nextn_predict_layers 1, the weights hold none; written as 0" in result["notes"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def with_block(place: str, block: Any) -> Draft:
    draft = small_k3()
    (draft.config if place == "top" else draft.text)["quantization_config"] = block
    return draft


def test_stale_nested_quantisation_block_is_reported_and_the_top_one_counts(tmp_path: Path) -> None:
    top = {**small_k3().text["quantization_config"], "ignore": ["lm_head"]}
    src = with_block("top", top).write(tmp_path / "src")
    result = done("convert", src, tmp_path / "out", "--to", "hf-text")
    assert "config.json has two quantisation blocks; the top-level one counts, the one in text_config is stale" in result["notes"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"] == top
    assert any("two quantisation blocks" in note for note in done("inspect", src)["notes"])


def test_tensors_decide_what_is_quantised_not_the_config(tmp_path: Path) -> None:
    without = small_k3()
    del without.text["quantization_config"]
    notes = " ".join(done("plan", without.write(tmp_path / "a"))["notes"])
    assert "config.json has no quantization_config, but" in notes
    assert "the tensors count" in notes
    beside = dense_experts(small_k3())
    beside.text["quantization_config"] = small_k3().text["quantization_config"]
    result = done("convert", beside.write(tmp_path / "b"), tmp_path / "out")
    assert "config.json has a quantization_config, but no" in " ".join(result["notes"])
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_ignore_list_loses_the_prefix_with_the_names(tmp_path: Path) -> None:
    draft = small_k3(vision=True)
    block = draft.text["quantization_config"]
    block["ignore"] = [
        "language_model.model.layers.0.self_attn.q_a_proj", "language_model.lm_head", "re:.*lm_head", "re:.*self_attn.*",
        r"re:^language_model\.model\.layers\.0\..*", "re:language_model.model.norm", "re:.*vision_tower.*", "mm_projector.proj.0",
    ]  # fmt: skip
    block["config_groups"]["group_0"]["targets"] = ["Linear", "language_model.model.layers.1.block_sparse_moe.experts.0.w1"]
    done("convert", draft.write(tmp_path / "src"), tmp_path / "out", "--to", "hf-text")
    made = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert made["ignore"] == [
        "model.layers.0.self_attn.q_a_proj", "lm_head", "re:.*lm_head", "re:.*self_attn.*",
        r"re:^model\.layers\.0\..*", "re:model.norm",
    ]  # fmt: skip
    assert made["config_groups"]["group_0"]["targets"] == ["Linear", "model.layers.1.block_sparse_moe.experts.0.w1"]
    assert {n.split(".")[0] for n in read_index(tmp_path / "out")} == {"model", "lm_head"}


@pytest.mark.parametrize("target", ["native", "hf-text", "hf"])
def test_no_quantisation_block_beside_decoded_experts(target: str, tmp_path: Path) -> None:
    draft = with_block("top", small_k3().text["quantization_config"])
    src = draft.write(tmp_path / "src")
    done("convert", src, tmp_path / "out", "--to", target, "--experts", "bf16", "--no-sidecar")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert "quantization_config" not in config.get("text_config", {})
    assert config["dtype"] == "bfloat16"


@pytest.mark.parametrize("target", ["native", "hf", "hf-text"])
def test_shards_are_planned_from_output_bytes(target: str, tmp_path: Path) -> None:
    """Decoded experts are four times their source: no file is over the limit but that of one larger tensor."""
    limit = 100_000
    src = small_k3().write(tmp_path / "src")
    done("convert", src, tmp_path / "out", "--experts", "bf16", "--no-sidecar", "--to", target, "--shard-size", "100kB")
    for path in (tmp_path / "out").glob("*.safetensors"):
        sizes = [t.nbytes for t in load_file(path).values()]
        assert sum(sizes) <= limit or len(sizes) == 1, (path.name, sizes)


def test_index_is_the_union_of_the_headers_on_disk(tmp_path: Path) -> None:
    done("convert", small_k3(vision=True).write(tmp_path / "src"), tmp_path / "out", "--vision", "keep", "--shard-size", "300kB")
    for group in ("model", "vision"):
        index = json.loads((tmp_path / "out" / f"{group}.safetensors.index.json").read_text())
        found: dict[str, str] = {}
        total = 0
        for path in sorted((tmp_path / "out").glob(f"{group}-*.safetensors")):
            tensors = load_file(path)
            found |= dict.fromkeys(tensors, path.name)
            total += sum(t.nbytes for t in tensors.values())
        assert index["weight_map"] == found
        assert index["metadata"]["total_size"] == total


def test_layers_alone_make_a_model_of_that_depth(tmp_path: Path) -> None:
    src = small_k3().write(tmp_path / "src")
    for target in ("native", "hf-text", "hf"):
        done("convert", src, tmp_path / target, "--to", target, "--layers", "0-1")
        config = json.loads((tmp_path / target / "config.json").read_text())
        text = config.get("text_config", config)
        assert text["num_hidden_layers"] == 2
        assert text["linear_attn_config"]["kda_layers"] == [1, 2]
        assert text["linear_attn_config"]["full_attn_layers"] == []
        assert not any(".layers.2." in n or ".layers.3." in n for n in read_index(tmp_path / target))


def test_output_is_loaded_whole_by_the_class_that_it_names(tmp_path: Path) -> None:
    """No name of the module is missing from the files and none is surplus."""
    import importlib

    done("convert", small_k3().write(tmp_path / "src"), tmp_path / "out", "--experts", "bf16", "--no-sidecar")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    module = importlib.import_module("kconv.modeling.model")
    model = getattr(module, config["architectures"][0])
    made = model.from_pretrained(tmp_path / "out")
    assert set(made.state_dict()) == set(read_index(tmp_path / "out"))
