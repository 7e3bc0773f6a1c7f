"""Pruned Kimi K3: experts removed and renumbered, equally or layer by layer, against the unpruned model that never picks them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import kconv
from kconv.errors import KconvError, Problems
from tests.reading import GOLDEN, json_of, stored_tensors

TINY = GOLDEN / "tiny-k3"
EXPERT = re.compile(r"(language_model\.model\.layers\.(\d+)\.block_sparse_moe\.experts\.)(\d+)(\..*)")
# Layer -> the experts that stay, of eight; the published order is not kept, as where importance sorted them.
EVEN = {layer: [7, 0, 2, 5] for layer in range(1, 9)}
UNEVEN = {
    1: [0, 1, 2, 3, 4, 5, 6, 7], 2: [6, 1], 3: [3, 2, 0], 4: [1, 4, 5, 7, 0], 5: [2, 3], 6: [7, 6, 5, 4], 7: [0, 7], 8: [5, 1, 3],
}  # fmt: skip


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("model-*.safetensors")):
        tensors |= load_file(shard)
    return tensors


def pruned(kept: dict[int, list[int]], out: Path, experts: int | None) -> Path:
    """The golden checkpoint with only these experts, renumbered; router rows and biases gathered."""
    made: dict[str, torch.Tensor] = {}
    for name, t in tensors_of(TINY).items():
        match = EXPERT.fullmatch(name)
        if match:
            stay = kept[int(match[2])]
            if int(match[3]) in stay:
                made[f"{match[1]}{stay.index(int(match[3]))}{match[4]}"] = t
        elif ".block_sparse_moe.gate." in name:
            made[name] = t[kept[int(name.split(".")[3])]].contiguous()
        else:
            made[name] = t
    out.mkdir()
    save_file(made, out / "model.safetensors", metadata={"format": "pt"})
    config = json_of(TINY / "config.json")
    if experts is not None:
        config["text_config"]["num_experts"] = experts
    (out / "config.json").write_text(json.dumps(config))
    return out


def golden_ids() -> torch.Tensor:
    return load_file(TINY / "golden.safetensors")["input_ids"]


def without(model: Any, kept: dict[int, list[int]]) -> Any:
    """The unpruned model whose routers never choose the removed experts: their correction bias is -inf."""
    for layer, stay in kept.items():
        bias = model.model.layers[layer].mlp.gate.e_score_correction_bias
        with torch.no_grad():
            bias[[e for e in range(8) if e not in stay]] = float("-inf")
    return model


@pytest.mark.parametrize("experts", ("packed", "bf16"))
@pytest.mark.parametrize("kept, said", [(EVEN, 4), (EVEN, None), (UNEVEN, None)], ids=("even", "config not updated", "uneven"))
def test_logits_are_those_of_the_unpruned_model_that_never_picks_them(tmp_path, kept, said, experts):
    folder = pruned(kept, tmp_path / "pruned", said)
    kconv.convert(folder, tmp_path / "native", experts=experts)
    assert kconv.verify(tmp_path / "native", folder)["ok"]
    ours = kconv.load(tmp_path / "native", dtype=torch.float32)
    reference = without(kconv.load(TINY, dtype=torch.float32), kept)
    unpruned = kconv.load(TINY, dtype=torch.float32)
    with torch.no_grad():
        a, b, c = (m(golden_ids(), use_cache=False).logits for m in (ours, reference, unpruned))
    torch.testing.assert_close(a, b, rtol=0, atol=3e-4)
    assert (a - b).abs().mean() < 1e-5
    assert (a - c).abs().max() > 0.1


def test_the_reference_is_the_official_one_where_nothing_is_pruned():
    """The unpruned side of the comparison gives the golden logits, so the reference is not only ours."""
    golden = load_file(TINY / "golden.safetensors")["logits_fp32"]
    with torch.no_grad():
        logits = kconv.load(TINY, dtype=torch.float32)(golden_ids(), use_cache=False).logits
    torch.testing.assert_close(logits, golden, rtol=0, atol=2e-3)


@pytest.mark.parametrize("kept", (EVEN, UNEVEN), ids=("even", "uneven"))
def test_it_comes_back_byte_for_byte(tmp_path, kept):
    folder = pruned(kept, tmp_path / "pruned", None)
    kconv.convert(folder, tmp_path / "native", vision="keep")
    kconv.convert(tmp_path / "native", tmp_path / "back", to="hf")
    assert stored_tensors(tmp_path / "back") == stored_tensors(folder)
    assert json_of(tmp_path / "back" / "config.json") == json_of(folder / "config.json")


def test_counts_are_said(tmp_path):
    folder = pruned(UNEVEN, tmp_path / "pruned", None)
    plan = kconv.plan(folder).check()
    assert plan.layouts.config["num_experts_per_layer"] == [0, 8, 2, 3, 5, 2, 4, 2, 3]
    said = "the tensors hold 2 in layers 2,5,7; 3 in layers 3,8; 4 in layers 6; 5 in layers 4; 8 in layers 1"
    assert f"the config says 8 experts, {said}" in plan.layouts.notes
    assert kconv.inspect(folder)["experts"] == [2, 3, 4, 5, 8]


def test_even_counts_become_the_config(tmp_path):
    """A config that still says eight is corrected in the native one, whose model has the four that are there."""
    config = kconv.plan(pruned(EVEN, tmp_path / "pruned", None)).check().layouts.config
    assert config["num_experts"] == 4
    assert "num_experts_per_layer" not in config


def test_fewer_experts_than_a_token_goes_to_are_refused(tmp_path):
    kept = {**EVEN, 5: [3]}
    with pytest.raises((KconvError, Problems), match="num_experts_per_token"):
        kconv.load(pruned(kept, tmp_path / "pruned", None), dtype=torch.float32)


def test_a_router_that_was_not_pruned_is_refused(tmp_path):
    folder = pruned(EVEN, tmp_path / "pruned", 4)
    tensors = load_file(folder / "model.safetensors")
    name = "language_model.model.layers.4.block_sparse_moe.gate.weight"
    save_file({**tensors, name: tensors_of(TINY)[name]}, folder / "model.safetensors")
    with pytest.raises(Problems, match=r"layer 4: the router .* has 8 rows, but expert 4-7 is lacking"):
        kconv.plan(folder).check()
