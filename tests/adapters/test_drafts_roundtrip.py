"""Drafts there and back, and into modules: bytes, names and configs, for every kind that `kconv tiny` makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

import kconv
from kconv.errors import KconvError, Problems
from kconv.speculative import load_draft
from kconv.synthesis.drafts import KINDS
from kconv.synthesis.families import tiny

GOLDEN = Path(__file__).parents[1] / "data/golden"
OPTIONS: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in KINDS},
    "k3-dspark+fc_norm": {"fc_norm": True},
    "k3-eagle3+31": {"v31": True},
    "k3-eagle3+full": {"draft_vocab": 512},
}


def make(folder: Path, kind: str, **options: Any) -> Path:
    tiny(kind.partition("+")[0], folder, seed=3, **{**OPTIONS.get(kind, {}), **options})
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        found |= load_file(file)
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("kind", sorted(OPTIONS))
def test_there_and_back(tmp_path: Path, kind: str) -> None:
    source = make(tmp_path / "published", kind)
    kconv.convert(kconv.plan(source, to="native"), tmp_path / "native")
    kconv.convert(kconv.plan(tmp_path / "native", to="hf"), tmp_path / "back")
    same(tensors(source), tensors(tmp_path / "back"))
    assert json.loads((source / "config.json").read_text()) == json.loads((tmp_path / "back/config.json").read_text())
    assert kconv.verify(tmp_path / "native", source=source)["different"] == 0


@pytest.mark.parametrize("kind", sorted(OPTIONS))
def test_every_way_in_gives_the_same_module(tmp_path: Path, kind: str) -> None:
    """Published through `kconv.load` and `load_draft`, native through `from_pretrained` and Auto, saved and loaded again."""
    source = make(tmp_path / "published", kind)
    kconv.convert(kconv.plan(source, to="native"), tmp_path / "native")
    first = load_draft(source)
    auto = AutoModel.from_pretrained(tmp_path / "native", dtype=torch.bfloat16)
    assert type(auto) is type(first)
    auto.save_pretrained(tmp_path / "saved")
    others = [kconv.load(source), kconv.load(tmp_path / "native"), load_draft(tmp_path / "native"), auto]
    others.append(type(first).from_pretrained(tmp_path / "saved", dtype=torch.bfloat16))
    for other in others:
        same(dict(first.state_dict()), dict(other.state_dict()))
        assert fields(other.config) == fields(first.config)
    assert AutoConfig.from_pretrained(tmp_path / "native").model_type == first.config.model_type


def fields(config: Any) -> dict[str, Any]:
    """What a config says, without where and when it was written."""
    skip = ("transformers_version", "_name_or_path", "dtype", "architectures")
    return {k: v for k, v in config.to_dict().items() if k not in skip}


@pytest.mark.parametrize("kind", ["k3-dflash", "k25-dflash"])
@torch.no_grad()
def test_goldens_through_load(kind: str) -> None:
    """Both entries of both goldens from the checkpoint files, within 2e-5 of the answers that others computed."""
    folder = GOLDEN / f"{kind}-draft"
    model, golden = kconv.load(folder, dtype=torch.float32), load_file(folder / "golden.safetensors")
    blocks = model(
        position_ids=golden["position_ids"],
        attention_mask=golden["attention_mask"],
        noise_embedding=golden["noise_embedding"],
        target_hidden=golden["target_hidden"],
    )
    one = model(noise_embedding=golden["noise_embedding"][:, :4], target_hidden=golden["target_hidden"])
    assert (blocks - golden["output"]).abs().max() < 2e-5
    assert (one - golden["output_one_block"]).abs().max() < 2e-5


def test_dtype_casts_what_is_cast(tmp_path: Path) -> None:
    source = make(tmp_path / "published", "k3-eagle3")
    kconv.convert(kconv.plan(source, to="native", dtype="float32"), tmp_path / "wide")
    wide = tensors(tmp_path / "wide")
    assert wide["d2t"].dtype == torch.int64
    assert wide["t2d"].dtype == torch.bool
    assert all(t.dtype == torch.float32 for n, t in wide.items() if n not in ("d2t", "t2d"))


@pytest.mark.parametrize(
    ("trait", "renamed"),
    [
        ("midlayer", {"layers.0.": "midlayer."}),
        ("model", {"": "model."}),
    ],
)
def test_other_spellings_of_an_eagle_head(tmp_path: Path, trait: str, renamed: dict[str, str]) -> None:
    source = make(tmp_path / "published", "k3-eagle3")
    (before, after), inside = next(iter(renamed.items())), tensors(source)
    outside = ("lm_head.", "d2t", "t2d")
    respelled = {
        after + n[len(before) :] if n.startswith(before) and not n.startswith(outside) else n: t for n, t in inside.items()
    }
    save_file(respelled, source / "model.safetensors")
    made = kconv.plan(source, to="native").check()
    assert made.layouts.facts["spelling"] == [trait]
    same(dict(load_draft(source).state_dict()), inside)
    kconv.convert(made, tmp_path / "native")
    kconv.convert(kconv.plan(tmp_path / "native", to="hf"), tmp_path / "back")
    same(tensors(tmp_path / "back"), respelled)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("k3-dspark-gqa", {"markov_head.": "logit_head.markov_head."}),
        ("k3-dspark-gqa", {"markov_head.": "", "confidence_head.proj.": "confidence_proj."}),
        (
            "k3-dflash2",
            {"predecessor_codebook": "predecessor_codebook.weight", "successor_codebook": "successor_codebook.weight"},
        ),
    ],
)
def test_other_spellings_of_heads(tmp_path: Path, family: str, names: dict[str, str]) -> None:
    source = make(tmp_path / "published", family)
    respelled = {}
    for name, tensor in tensors(source).items():
        for before, after in names.items():
            name = name.replace(before, after)
        respelled[name] = tensor
    save_file(respelled, source / "model.safetensors")
    kconv.convert(kconv.plan(source, to="native"), tmp_path / "native")
    kconv.convert(kconv.plan(tmp_path / "native", to="hf"), tmp_path / "back")
    same(tensors(tmp_path / "back"), respelled)


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    found = tensors(folder)
    for name, value in changes.items():
        name = name.replace("__", ".")
        if value is None:
            del found[name]
        else:
            found[name] = value
    save_file(found, folder / "model.safetensors")


def test_a_smaller_vocabulary_needs_its_maps(tmp_path: Path) -> None:
    source = make(tmp_path / "published", "k3-eagle3", draft_vocab=8, vocab=32, mask=31)
    edit(source, d2t=None, t2d=None)
    with pytest.raises(KconvError, match=r"8 of 32 tokens without d2t and t2d"):
        kconv.plan(source, to="native")


def test_a_smaller_vocabulary_needs_its_head(tmp_path: Path) -> None:
    source = make(tmp_path / "published", "k3-eagle3", draft_vocab=8, vocab=32, mask=31)
    edit(source, lm_head__weight=None)
    with pytest.raises(KconvError, match=r"without lm_head.weight"):
        kconv.plan(source, to="native")


def test_a_full_vocabulary_may_borrow_the_head(tmp_path: Path) -> None:
    source = make(tmp_path / "published", "k3-eagle3", draft_vocab=512)
    edit(source, lm_head__weight=None, embed_tokens__weight=None)
    model = load_draft(source)
    assert not model.config.owns_lm_head
    with pytest.raises(KconvError, match="owns no output head"):
        model.compute_logits(torch.zeros(1, 128, dtype=torch.bfloat16))


@pytest.mark.parametrize("fault", ["ids", "zero", "marks"])
def test_maps_that_do_not_fit_are_refused_before_writing(tmp_path: Path, fault: str) -> None:
    source = make(tmp_path / "published", "k3-eagle3", draft_vocab=8, vocab=32, mask=31)
    d2t, t2d = tensors(source)["d2t"], tensors(source)["t2d"]
    if fault == "ids":
        edit(source, d2t=d2t + torch.arange(8) + 30)
    elif fault == "zero":
        edit(source, d2t=-torch.arange(8))
    else:
        edit(source, t2d=torch.zeros_like(t2d))
    with pytest.raises(KconvError, match="d2t"):
        kconv.convert(kconv.plan(source, to="native"), tmp_path / "native")
    assert not (tmp_path / "native").exists()


def test_from_pretrained_is_strict(tmp_path: Path) -> None:
    source = make(tmp_path / "published", "k25-dflash")
    kconv.convert(kconv.plan(source, to="native"), tmp_path / "native")
    found = tensors(tmp_path / "native")
    for file in (tmp_path / "native").glob("model*"):
        file.unlink()
    found["layers.9.mlp.up_proj.weight"] = found.pop("layers.1.mlp.up_proj.weight")
    found["norm.weight"] = found["norm.weight"][:64].clone()
    save_file(found, tmp_path / "native/model.safetensors", {"format": "pt"})
    from kconv.modeling.drafts.dflash import DFlashKimiK25

    with pytest.raises(Problems) as error:
        DFlashKimiK25.from_pretrained(tmp_path / "native")
    text = str(error.value)
    assert "missing from the files: layers.1.mlp.up_proj.weight" in text
    assert "not in the model: layers.9.mlp.up_proj.weight" in text
    assert "norm.weight is [64] in the files, the config asks for [128]" in text


def test_options_that_do_not_apply_are_refused(tmp_path: Path) -> None:
    source = make(tmp_path / "published", "k3-dflash")
    for options in ({"experts": "bf16"}, {"vision": "keep"}, {"tie": True}):
        with pytest.raises(KconvError, match="nothing to apply"):
            kconv.plan(source, to="native", **options)
    with pytest.raises(KconvError, match="hf-text: a draft has no"):
        kconv.plan(source, to="hf-text")


def test_inspect_says_what_it_is(tmp_path: Path) -> None:
    source = make(tmp_path / "published", "k3-dspark")
    said = kconv.inspect(source)
    assert said["family"] == "draft (dspark)"
    assert (said["dialect"], said["spelling"]) == ("k3-dspark", ["context"])
    assert said["block_size"] is None
    assert said["target_layer_ids"] == [1, 4, 7]
    assert said["converts_to"]["native"] == "exact"
