"""Every form of one checkpoint is the same target: packaged for one and checked against another, and found when it is not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import kconv
from kconv.packaging.check import check
from kconv.packaging.package import package
from kconv.packaging.target_model import Target
from kconv.synthesis.families import tiny
from tests.hubserver import HubServer
from tests.publish.packaged import DECLARED, WHOSE, draft_of

FORMS = {"k3": ("native", "hf-text", "nemo", "hf"), "k25": ("native", "hf-text", "hf")}
KIND = {"k3": "k3-dflash", "k25": "k25-dflash"}


@pytest.fixture(scope="module", params=sorted(FORMS))
def forms(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Path]]:
    """A family, and its tiny checkpoint as it is published and in every form that it is converted to."""
    folder, family = tmp_path_factory.mktemp("forms"), request.param
    made = {"published": folder / "published"}
    tiny(family, made["published"], seed=1, layers=9)
    for form in FORMS[family]:
        made[form] = folder / form
        vision = {"vision": "keep"} if form == "native" else {}
        kconv.convert(made["native"] if form == "hf" else made["published"], made[form], to=form, **vision)
    return family, made


def packaged_for(family: str, target: Path, tmp_path: Path) -> Path:
    draft = tmp_path / "draft"
    if not draft.exists():
        draft_of(KIND[family], draft)
    package(draft, target, tmp_path / "out", declared=DECLARED.get(KIND[family]), overwrite=True, **WHOSE)
    return tmp_path / "out"


def test_every_form_agrees_with_every_other(forms: tuple[str, dict[str, Path]], tmp_path: Path) -> None:
    family, made = forms
    for mine, target in made.items():
        out = packaged_for(family, target, tmp_path)
        spots = json.loads((out / "config.json").read_text())["kconv_provenance"]["target"]["spots"]["tensors"]
        assert len(spots) == 6, mine
        for theirs, other in made.items():
            result = check(out, other, **WHOSE)
            assert (result["fits"], result["differences"]) == (True, []), (mine, theirs)
            compared = set(result["compared"])
            tables = {"target.tensors.embed_tokens", "target.tensors.norm"}
            assert tables <= compared or mine == theirs == "published", (mine, theirs)
            assert sum(field.startswith("target.spots") for field in compared) == 6, (mine, theirs, result["not_compared"])
            assert ("target.conversion" in compared) == (theirs != "published")


def test_a_changed_row_of_a_converted_embedding_is_found(forms: tuple[str, dict[str, Path]], tmp_path: Path) -> None:
    family, made = forms
    out = packaged_for(family, made["published"], tmp_path)
    for form in FORMS[family]:
        changed = tmp_path / form
        shutil.copytree(made[form], changed)
        whole = Target.open(changed)
        name = whole.table("embed_tokens")
        assert name
        shard = changed / whole.entry(name).file
        tensors = load_file(shard)
        tensors[name] = tensors[name].flip(0).contiguous()
        save_file(tensors, shard, {"format": "pt"})
        fields = {row["field"] for row in check(out, changed, **WHOSE)["differences"]}
        assert fields >= {"target.tensors.embed_tokens", "target.conversion"}, form
        quick = {row["field"] for row in check(out, changed, **WHOSE, quick=True)["differences"]}
        assert "target.tensors.embed_tokens" in quick, form


def test_an_expert_of_a_converted_target_is_held_against_its_manifest(forms: tuple[str, dict[str, Path]], tmp_path: Path) -> None:
    family, made = forms
    out = packaged_for(family, made["published"], tmp_path)
    changed = tmp_path / "native"
    shutil.copytree(made["native"], changed)
    shard = next(p for p in sorted(changed.glob("*.safetensors")) if any(".experts." in n for n in load_file(p)))
    tensors = load_file(shard)
    name = next(n for n in tensors if ".experts." in n)
    tensors[name].view(torch.uint8).flatten()[7] ^= 1
    save_file(tensors, shard, {"format": "pt"})
    result = check(out, changed, **WHOSE)
    assert [row["field"] for row in result["differences"]] == ["target.conversion"]
    assert shard.name in result["differences"][0]["found"]


def test_a_target_converted_from_the_hub_is_exact_by_the_digests_its_manifest_states(hub: HubServer, tmp_path: Path) -> None:
    published = tmp_path / "published"
    tiny("k3", published, seed=1)
    hub.seed_folder("moonshotai/Tiny", published)
    kconv.convert("hf://moonshotai/Tiny", tmp_path / "native")
    draft = draft_of("k3-dflash", tmp_path / "draft")
    package(draft, "hf://moonshotai/Tiny", tmp_path / "out")
    result = check(tmp_path / "out", tmp_path / "native")
    assert (result["verdict"], result["differences"]) == ("exact", [])
    assert check(tmp_path / "out", tmp_path / "native", quick=True)["verdict"] == "same-content"
    package(draft, tmp_path / "native", tmp_path / "other")
    assert check(tmp_path / "other", "hf://moonshotai/Tiny")["verdict"] == "exact"


def test_tied_heads_agree_between_forms_and_an_untied_one_differs(tmp_path: Path) -> None:
    published = tmp_path / "published"
    tiny("k3", published, seed=1)
    config = json.loads((published / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    (published / "config.json").write_text(json.dumps(config))
    index = json.loads((published / "model.safetensors.index.json").read_text())
    shard = published / index["weight_map"].pop("language_model.lm_head.weight")
    tensors = load_file(shard)
    head = tensors.pop("language_model.lm_head.weight")
    save_file(tensors, shard, {"format": "pt"})
    (published / "model.safetensors.index.json").write_text(json.dumps(index))
    kconv.convert(published, tmp_path / "native")
    for target in (published, tmp_path / "native"):
        out = packaged_for("k3", target, tmp_path)
        for other in (published, tmp_path / "native"):
            result = check(out, other, **WHOSE)
            assert (result["fits"], result["differences"]) == (True, [])
    save_file(tensors | {"language_model.lm_head.weight": head}, shard, {"format": "pt"})
    index["weight_map"]["language_model.lm_head.weight"] = shard.name
    (published / "model.safetensors.index.json").write_text(json.dumps(index))
    fields = {row["field"] for row in check(out, published, **WHOSE)["differences"]}
    assert "target.tensors.lm_head" in fields
