"""Vision tensors are held against the tower's sizes and read in their stored form, whatever the family and the target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kconv
from kconv.errors import Problems
from tests.builders import Draft, load_all
from tests.reading import json_of, stored_tensors

BLOCK = "vision_tower.encoder.blocks.1."
FAMILIES = ("k3", "k25")
KEEPING: tuple[dict[str, Any], ...] = ({"to": "hf"}, {"to": "native", "vision": "keep"})
SIDES = {"k3": {"layers": 4, "experts": 4}, "k25": {}}


@pytest.fixture(params=FAMILIES)
def draft(request: pytest.FixtureRequest, tmp_path: Path) -> Draft:
    kconv.tiny(request.param, tmp_path / "made", **SIDES[request.param])
    made = Draft(load_all(tmp_path / "made"), json_of(tmp_path / "made" / "config.json"))
    made.text["quantization_config"]["ignore"] += ["re:.*vision_tower.*", "re:.*mm_projector.*"]
    return made


def fp8(draft: Draft, name: str, scale: torch.dtype = torch.bfloat16) -> None:
    """Store a weight in FP8 with a scale per row, its first code a NaN's neighbour and its second minus zero."""
    weight = draft.tensors[name].float()
    found = weight.abs().amax(1, keepdim=True).clamp(min=1e-3) / 448
    codes = (weight / found).to(torch.float8_e4m3fn)
    codes.view(torch.uint8)[0, :2] = torch.tensor([0x7E, 0x80], dtype=torch.uint8)
    draft.tensors |= {name: codes, name + "_scale": found.to(scale)}


def half_shaped(draft: Draft) -> None:
    draft.tensors[BLOCK + "mlp.fc1.weight"] = draft.tensors[BLOCK + "mlp.fc1.weight"][:, ::2]


def bare_codes(draft: Draft) -> None:
    fp8(draft, BLOCK + "mlp.fc1.weight")
    del draft.tensors[BLOCK + "mlp.fc1.weight_scale"]


def boolean(draft: Draft) -> None:
    draft.tensors[BLOCK + "mlp.fc1.weight"] = draft.tensors[BLOCK + "mlp.fc1.weight"] > 0


def orphan(draft: Draft) -> None:
    draft.tensors[BLOCK + "mlp.fc1.weight_scale"] = torch.ones(4)


def orphan_of_a_norm(draft: Draft) -> None:
    draft.tensors[BLOCK + "norm0.weight_scale"] = torch.ones(4)


def missing(draft: Draft) -> None:
    del draft.tensors[BLOCK + "mlp.fc1.weight"]


def missing_projector(draft: Draft) -> None:
    del draft.tensors["mm_projector.proj.2.weight"]


DAMAGE: dict[Callable[[Draft], None], str] = {
    missing: "mlp.fc1.weight", missing_projector: "mm_projector.proj.2.weight", half_shaped: "mlp.fc1.weight",
    bare_codes: "mlp.fc1.weight .*no scale", boolean: "mlp.fc1.weight", orphan: "mlp.fc1.weight_scale .*scales nothing",
    orphan_of_a_norm: "norm0.weight_scale",
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda d: d.__name__)
@pytest.mark.parametrize("options", KEEPING, ids=lambda o: o["to"])
def test_a_damaged_vision_tensor_is_named(draft: Draft, damage: Callable[[Draft], None], options: Any, tmp_path: Path) -> None:
    damage(draft)
    source = draft.write(tmp_path / "src")
    with pytest.raises(Problems, match=f"(?s){DAMAGE[damage]}"):
        kconv.plan(source, **options).check()
    kconv.plan(source, to="native", vision="drop").check()


@pytest.mark.parametrize("damage", (missing, half_shaped, boolean), ids=lambda d: d.__name__)
def test_a_damaged_vision_tensor_is_named_on_the_way_back(draft: Draft, damage: Any, tmp_path: Path) -> None:
    kconv.convert(draft.write(tmp_path / "src"), tmp_path / "native", vision="keep")
    native = Draft(load_all(tmp_path / "native"), json_of(tmp_path / "native" / "config.json"))
    name = next(n for n in native.tensors if n.endswith(("blocks.1.mlp.fc1.weight", "layers.1.mlp.fc2.weight")))
    native.tensors = {n.replace(name, BLOCK + "mlp.fc1.weight"): t for n, t in native.tensors.items()}
    damage(native)
    native.tensors = {n.replace(BLOCK + "mlp.fc1.weight", name): t for n, t in native.tensors.items()}
    broken = native.write(tmp_path / "broken")
    (broken / "kconv.json").write_bytes((tmp_path / "native" / "kconv.json").read_bytes())
    with pytest.raises(Problems, match=name):
        kconv.plan(broken, to="hf").check()


@pytest.mark.parametrize("part", ("wqkv", "mlp.fc1"))
def test_scaled_fp8_vision_is_decoded_and_comes_back(draft: Draft, part: str, tmp_path: Path) -> None:
    name = f"{BLOCK}{part}.weight"
    fp8(draft, name)
    source = draft.write(tmp_path / "src")
    kconv.convert(source, tmp_path / "native", vision="keep")
    made = stored_tensors(tmp_path / "native")
    tower = {n: t.dtype for n, t in made.items() if "vision_tower" in n and not n.endswith("_scale")}
    assert set(tower.values()) == {"BF16"}
    kconv.convert(tmp_path / "native", tmp_path / "back", to="hf")
    assert stored_tensors(tmp_path / "back") == stored_tensors(source)


def test_decoded_fp8_vision_has_the_values_of_its_codes(draft: Draft, tmp_path: Path) -> None:
    name = BLOCK + "mlp.fc1.weight"
    fp8(draft, name)
    wanted = (draft.tensors[name].float() * draft.tensors[name + "_scale"].float()).to(torch.bfloat16)
    kconv.convert(draft.write(tmp_path / "src"), tmp_path / "native", vision="keep")
    made = load_all(tmp_path / "native")
    got = next(made[n] for n in made if n.endswith(("blocks.1.mlp.fc1.weight", "layers.1.mlp.fc2.weight")))
    assert torch.equal(got, wanted)


def test_fp8_vision_stays_as_published_where_nothing_is_asked(draft: Draft, tmp_path: Path) -> None:
    fp8(draft, BLOCK + "mlp.fc1.weight")
    source = draft.write(tmp_path / "src")
    kconv.convert(source, tmp_path / "again", to="hf")
    assert stored_tensors(tmp_path / "again") == stored_tensors(source)


def test_a_cast_reaches_the_tower(draft: Draft, tmp_path: Path) -> None:
    source = draft.write(tmp_path / "src")
    for options in KEEPING:
        out = tmp_path / options["to"]
        kconv.convert(source, out, dtype="float32", **options)
        tower = {n: t.dtype for n, t in stored_tensors(out).items() if "vision_tower" in n or "mm_projector" in n}
        assert set(tower.values()) == {"F32"}, options


def test_a_tower_without_sizes_goes_along_and_the_keys_are_named(tmp_path: Path) -> None:
    kconv.tiny("k3", tmp_path / "made", layers=4, experts=4)
    draft = Draft(load_all(tmp_path / "made"), json_of(tmp_path / "made" / "config.json"))
    del draft.config["vision_config"]["qkv_hidden_size"], draft.config["vision_config"]["patch_size"]
    source = draft.write(tmp_path / "src")
    plan = kconv.plan(source, to="hf").check()
    assert any("vision_config lacks qkv_hidden_size, patch_size" in note for note in plan.layouts.notes)
    kconv.convert(plan, tmp_path / "out")
    assert stored_tensors(tmp_path / "out") == stored_tensors(source)


def test_a_tower_of_another_kind_goes_along_but_never_half_of_a_weight(tmp_path: Path) -> None:
    kconv.tiny("k3", tmp_path / "made", layers=4, experts=4)
    draft = Draft(load_all(tmp_path / "made"), json_of(tmp_path / "made" / "config.json"))
    draft.tensors = {n: t for n, t in draft.tensors.items() if not n.startswith(("vision_tower.", "mm_projector."))}
    own = "vision_tower.vision_model.encoder.layers.0."
    draft.tensors |= {
        own + "self_attn.q_proj.weight": torch.randn(48, 32), own + "self_attn.q_proj.bias": torch.randn(48),
        "vision_tower.vision_model.embeddings.position_ids": torch.arange(16)[None],
    }  # fmt: skip
    source = draft.write(tmp_path / "src")
    kconv.convert(source, tmp_path / "out", to="hf")
    assert stored_tensors(tmp_path / "out") == stored_tensors(source)
    fp8(draft, own + "self_attn.q_proj.weight")
    kconv.convert(draft.write(tmp_path / "coded"), tmp_path / "native", vision="keep")
    assert stored_tensors(tmp_path / "native")[own + "self_attn.q_proj.weight"].dtype == "BF16"
    del draft.tensors[own + "self_attn.q_proj.weight_scale"]
    with pytest.raises(Problems, match=r"q_proj\.weight .*no scale"):
        kconv.plan(draft.write(tmp_path / "bare"), to="hf").check()
