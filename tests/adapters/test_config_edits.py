"""What was changed in a converted folder's config goes along on the way back, or is refused by name; nothing is taken back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kconv
from kconv.adapters.k3.config import NATIVE_ABSENT
from kconv.errors import Problems
from tests.builders import small_k3
from tests.reading import json_of

EDITS: dict[str, Any] = {
    "num_experts_per_token": 1, "rms_norm_eps": 3e-5, "routed_scaling_factor": 2.5, "eos_token_id": [501, 502],
    "pad_token_id": 3, "moe_renormalize": False, "activation_situ_beta": 2.0, "attn_res_block_size": 3,
    "max_position_embeddings": 4096, "a_key_of_my_own": {"kept": True},
}  # fmt: skip


def change(folder: Path, **edits: Any) -> None:
    """Edit config.json as a user would."""
    config = json_of(folder / "config.json")
    (folder / "config.json").write_text(json.dumps(config | edits))


@pytest.fixture
def native(tmp_path: Path) -> Path:
    kconv.convert(small_k3().write(tmp_path / "src"), tmp_path / "native")
    return tmp_path / "native"


def notes_of(plan: Any) -> str:
    return "\n".join(plan.layouts.notes)


@pytest.mark.parametrize("key", EDITS)
def test_an_edited_key_is_what_the_published_config_says(native: Path, tmp_path: Path, key: str) -> None:
    change(native, **{key: EDITS[key]})
    plan = kconv.plan(native, to="hf")
    kconv.convert(plan, tmp_path / "back")
    config, before = json_of(tmp_path / "back" / "config.json"), json_of(tmp_path / "src" / "config.json")
    assert config["text_config"][key] == EDITS[key]
    assert key not in before or config[key] == EDITS[key]
    assert f"config.json says {key} {EDITS[key]!r}, the recorded source {before['text_config'].get(key)!r}" in notes_of(plan)
    untouched = {k: v for k, v in before["text_config"].items() if k != key}
    assert {k: config["text_config"].get(k) for k in untouched} == untouched


@pytest.mark.parametrize("target", ("hf", "hf-text", "nemo"))
def test_an_edit_that_no_published_config_can_say_is_refused(native: Path, target: str) -> None:
    change(native, mla_norm_eps=1e-5)
    with pytest.raises(Problems, match=rf"mla_norm_eps is 1e-05, .* the {target} layout has no such key"):
        kconv.plan(native, to=target).check()


@pytest.mark.parametrize("target", ("hf-text", "nemo"))
def test_an_edited_key_reaches_the_text_layouts(native: Path, tmp_path: Path, target: str) -> None:
    change(native, routed_scaling_factor=2.5)
    kconv.convert(native, tmp_path / "out", to=target)
    made = json_of(tmp_path / "out" / "config.json")
    assert made["routed_scaling_factor"] == 2.5
    assert not {"experts_format", "mla_norm_eps", "residual_in_fp32", "num_experts_per_layer"} & set(made)


def test_a_key_removed_from_a_native_config_means_the_native_default(native: Path, tmp_path: Path) -> None:
    config = json_of(native / "config.json")
    del config["routed_scaling_factor"], config["attn_res_block_size"]
    (native / "config.json").write_text(json.dumps(config))
    kconv.convert(native, tmp_path / "back", to="hf")
    made = json_of(tmp_path / "back" / "config.json")["text_config"]
    assert (made["routed_scaling_factor"], made["attn_res_block_size"]) == (1.0, 12)


def saved_again(native: Path, tmp_path: Path, edit: Callable[[Any], Any]) -> Path:
    """Load, edit the model, save, and carry the manifest over as the error message says."""
    model = kconv.load(native)
    edit(model)
    model.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "kconv.json").write_bytes((native / "kconv.json").read_bytes())
    return tmp_path / "saved"


def test_a_resized_embedding_is_in_both_levels_of_the_published_config(native: Path, tmp_path: Path) -> None:
    saved = saved_again(native, tmp_path, lambda model: model.resize_token_embeddings(520))
    kconv.convert(saved, tmp_path / "back", to="hf")
    assert json_of(tmp_path / "back" / "config.json")["text_config"]["vocab_size"] == 520
    assert kconv.plan(tmp_path / "back").check().targets["model.embed_tokens.weight"].spec.shape[0] == 520


def test_a_model_saved_unchanged_gives_the_source_config_back(native: Path, tmp_path: Path) -> None:
    saved = saved_again(native, tmp_path, lambda model: None)
    kconv.convert(saved, tmp_path / "back", to="hf")
    assert json_of(tmp_path / "back" / "config.json") == json_of(tmp_path / "src" / "config.json")


def test_native_defaults_are_those_of_the_native_class() -> None:
    from kconv.modeling import KimiK3TextConfig

    made = KimiK3TextConfig().to_dict()
    assert {k: made[k] for k in NATIVE_ABSENT if k != "num_key_value_heads"} == {
        k: v for k, v in NATIVE_ABSENT.items() if k != "num_key_value_heads"
    }


def test_what_a_published_config_leaves_out_is_the_published_default(tmp_path: Path) -> None:
    draft = small_k3()
    for key in ("rms_norm_eps", "routed_scaling_factor", "moe_renormalize"):
        del draft.text[key]
    kconv.convert(draft.write(tmp_path / "src"), tmp_path / "native")
    made = json_of(tmp_path / "native" / "config.json")
    assert (made["rms_norm_eps"], made["routed_scaling_factor"], made["moe_renormalize"]) == (1e-6, 1.0, True)


@pytest.mark.parametrize("which", ("k2", "k25"))
@pytest.mark.parametrize("key, value", [("routed_scaling_factor", 1.25), ("num_experts_per_tok", 3), ("rms_norm_eps", 3e-5),
                                        ("eos_token_id", 7), ("rope_theta", 1234.0)])  # fmt: skip
def test_edits_of_a_kimi_k2_go_along_too(tmp_path: Path, which: str, key: str, value: Any) -> None:
    kconv.tiny(which, tmp_path / "src")
    kconv.convert(tmp_path / "src", tmp_path / "native")
    change(tmp_path / "native", **{key: value})
    kconv.convert(tmp_path / "native", tmp_path / "back", to="hf")
    before, made = json_of(tmp_path / "src" / "config.json"), json_of(tmp_path / "back" / "config.json")
    text = made.get("text_config", made)
    assert text[key] == value
    assert {k: v for k, v in text.items() if k != key} == {k: v for k, v in before.get("text_config", before).items() if k != key}
