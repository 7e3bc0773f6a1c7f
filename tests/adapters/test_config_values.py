"""Config values that no model can be made of are refused before anything is written, in every target; absent ones are said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kconv
from kconv.adapters.k3.values import HIDDEN_ACTS
from kconv.errors import KconvError
from tests.builders import Draft, small_k3
from tests.reading import json_of

IMPOSSIBLE: dict[str, tuple[Any, ...]] = {
    "rms_norm_eps": ("1e-5", None, 0, True, float("nan"), float("inf")),
    "routed_scaling_factor": (None, "1.0", float("nan")),
    "num_experts_per_token": (0, 99, -1, None, "2", 2.0, True),
    "moe_renormalize": ("false", None, 0),
    "mla_use_nope": (False, None, "true"),
    "mla_use_output_gate": ("yes",),
    "latent_moe_use_norm": ("no",),
    "hidden_act": ("gelu", None),
    "activation_situ_beta": ("4",),
    "moe_router_activation_func": ("tanh",),
    "topk_group": (2, 0),
    "num_expert_group": (3,),
}  # fmt: skip
CASES = [(key, value) for key, values in IMPOSSIBLE.items() for value in values]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_k3().write(tmp_path_factory.mktemp("values") / "src")


def with_config(folder: Path, out: Path, **changes: Any) -> Path:
    """The same checkpoint with other values in its text config; a value `...` takes the key out."""
    draft = Draft({}, json_of(folder / "config.json"))
    draft.text.update(changes)
    for key in [k for k, v in changes.items() if v is ...]:
        del draft.text[key]
    out.mkdir()
    for file in folder.iterdir():
        (out / file.name).hardlink_to(file)
    (out / "config.json").unlink()

    (out / "config.json").write_text(json.dumps(draft.config))
    return out


@pytest.mark.parametrize(("key", "value"), CASES)
def test_an_impossible_value_is_refused_before_anything_is_written(published: Path, tmp_path: Path, key: str, value: Any) -> None:
    source = with_config(published, tmp_path / "src", **{key: value})
    for target in ("native", "hf", "hf-text", "nemo"):
        with pytest.raises(KconvError, match=key):
            kconv.convert(source, tmp_path / target, to=target)
        assert not (tmp_path / target).exists()


@pytest.mark.parametrize("value", ("1e-5", None))
def test_an_impossible_value_of_a_native_config_is_refused_too(published: Path, tmp_path: Path, value: Any) -> None:
    kconv.convert(published, tmp_path / "native")
    native = with_config(tmp_path / "native", tmp_path / "edited", rms_norm_eps=value)
    with pytest.raises(KconvError, match="rms_norm_eps"):
        kconv.plan(native, to="hf").check()


def test_an_absent_key_is_the_published_class_default_and_is_said(published: Path, tmp_path: Path) -> None:
    source = with_config(published, tmp_path / "src", rms_norm_eps=..., routed_scaling_factor=...)
    plan = kconv.plan(source).check()
    said = [n for n in plan.layouts.notes if "leaves out" in n]
    assert len(said) == 1
    assert "rms_norm_eps (1e-06), routed_scaling_factor (1.0)" in said[0]
    assert plan.layouts.config["rms_norm_eps"] == 1e-6


@pytest.mark.parametrize("key", ("num_experts_per_token", "mla_use_nope"))
def test_an_absent_key_whose_default_is_no_model_is_refused(published: Path, tmp_path: Path, key: str) -> None:
    source = with_config(published, tmp_path / "src", **{key: ...})
    with pytest.raises(KconvError, match=key):
        kconv.plan(source).check()


def test_groups_that_are_switched_off_are_one_group_in_the_native_config(published: Path, tmp_path: Path) -> None:
    source = with_config(published, tmp_path / "src", use_grouped_topk=False, num_expert_group=2, topk_group=1)
    assert kconv.plan(source).check().layouts.config["num_expert_group"] == 1


def test_the_activations_are_those_that_the_model_computes() -> None:
    from kconv.modeling.situ import ACTIVATIONS

    assert set(HIDDEN_ACTS) == set(ACTIVATIONS)


K2_IMPOSSIBLE: dict[str, Any] = {
    "rms_norm_eps": "1e-5", "routed_scaling_factor": None, "num_experts_per_tok": 99, "norm_topk_prob": "false", "n_group": 3,
    "topk_group": 0,
}  # fmt: skip


@pytest.mark.parametrize("family", ("k2", "k25"))
def test_an_impossible_value_of_k2_is_refused(family: str, tmp_path: Path) -> None:
    kconv.tiny(family, tmp_path / "made")
    for i, (key, value) in enumerate(K2_IMPOSSIBLE.items()):
        source = with_config(tmp_path / "made", tmp_path / str(i), **{key: value})
        for target in ("native", "hf", "hf-text"):
            with pytest.raises(KconvError, match=key):
                kconv.plan(source, to=target).check()
    said = kconv.plan(with_config(tmp_path / "made", tmp_path / "absent", rms_norm_eps=...)).check().layouts.notes
    assert any("leaves out rms_norm_eps" in note for note in said)
