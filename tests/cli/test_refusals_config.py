"""A config.json that cannot be read, is of another model, or contradicts itself or the tensors."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kconv
from kconv.adapters.tables.config import GENERATION_DEFAULTS
from kconv.checkpoint.manifest import checked
from kconv.checkpoint.reading import Checkpoint, open_checkpoint
from kconv.errors import KconvError
from tests.builders import Draft, flat_k3, small_k3, smallest_k3
from tests.cli.refusing import done, refused

HEAD = "language_model.lm_head.weight"


def refusal(draft: Draft, tmp_path: Path, *args: str) -> str:
    return refused(draft.write(tmp_path / "src"), tmp_path / "out", *args)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe\x00", b"[]", b"[" * 100_000, b""])
def test_config_that_is_no_json_object(content: bytes, tmp_path: Path) -> None:
    src = small_k3().write(tmp_path / "src")
    (src / "config.json").write_bytes(content)
    message = refused(src, tmp_path / "out")
    assert f"{src}/config.json is not" in message
    assert "fetch the file again" in message


def test_unknown_model_type_is_named_with_its_place(tmp_path: Path) -> None:
    draft = small_k3()
    draft.config["model_type"] = "kimi_k9"
    message = refusal(draft, tmp_path)
    assert "src/config.json: model_type is 'kimi_k9', text_config.model_type 'kimi_linear'" in message
    assert "kconv knows kimi_k3, kimi_linear" in message


def test_unknown_nested_model_type_is_named_with_its_place(tmp_path: Path) -> None:
    draft = small_k3()
    draft.text["model_type"] = "kimi_k9"
    assert "config.json: text_config.model_type is 'kimi_k9'" in refusal(draft, tmp_path)


def test_flat_and_nested_configs_are_both_read(tmp_path: Path) -> None:
    assert done("plan", small_k3().write(tmp_path / "nested"))["family"] == "Kimi K3"
    assert done("plan", flat_k3().write(tmp_path / "flat"))["family"] == "Kimi K3"


def test_missing_head_of_an_untied_model_has_two_remedies(tmp_path: Path) -> None:
    message = refusal(small_k3().pop(HEAD), tmp_path)
    assert f"{HEAD} is missing and config.json says tie_word_embeddings false" in message
    assert "--tie if the embedding is the head, or fetch the file that holds the head" in message


@pytest.mark.parametrize("top", [None, False])
def test_tied_only_in_the_text_config(top: bool | None, tmp_path: Path) -> None:
    draft = small_k3().pop(HEAD)
    draft.text["tie_word_embeddings"] = True
    draft.config.pop("tie_word_embeddings")
    if top is not None:
        draft.config["tie_word_embeddings"] = top
    done("convert", draft.write(tmp_path / "src"), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True


def test_tie_writes_a_tied_config_for_every_target(tmp_path: Path) -> None:
    src = small_k3().pop(HEAD).write(tmp_path / "src")
    for target in ("native", "hf-text", "hf"):
        done("convert", src, tmp_path / target, "--to", target, "--tie")
        config = json.loads((tmp_path / target / "config.json").read_text())
        assert config.get("text_config", config)["tie_word_embeddings"] is True
        index = json.loads((tmp_path / target / "model.safetensors.index.json").read_text())
        assert not any("lm_head" in name for name in index["weight_map"])


def test_stored_head_of_a_tied_model_has_two_remedies(tmp_path: Path) -> None:
    draft = small_k3()
    draft.text["tie_word_embeddings"] = True
    message = refusal(draft, tmp_path)
    assert f"{HEAD} is stored in model-00001-of-00002.safetensors although config.json says tie_word_embeddings true" in message
    assert "--tie leaves it out (the embedding is the head), or set tie_word_embeddings to false" in message


def test_stored_head_of_a_tied_model_is_left_out_by_name(tmp_path: Path) -> None:
    draft = small_k3()
    draft.text["tie_word_embeddings"] = True
    result = done("convert", draft.write(tmp_path / "src"), tmp_path / "out", "--tie")
    assert result["dropped"] == 1
    manifest = json.loads((tmp_path / "out" / "kconv.json").read_text())
    assert manifest["dropped"] == [{"reason": "the embedding is the head (--tie)", "count": 1, "names": [HEAD]}]
    done("verify", tmp_path / "out", "--source", tmp_path / "src")


def test_layer_lists_that_do_not_cover_the_layers(tmp_path: Path) -> None:
    draft = small_k3()
    draft.text["num_hidden_layers"] = 5
    message = refusal(draft, tmp_path)
    assert "kda_layers and full_attn_layers (1-based) do not cover the 5 layers once each" in message
    assert "correct linear_attn_config or num_hidden_layers" in message


def test_dense_layers_elsewhere_than_the_config_says(tmp_path: Path) -> None:
    draft = small_k3()
    draft.text["first_k_dense_replace"] = 2
    message = refusal(draft, tmp_path)
    assert "missing from the source: language_model.model.layers.1.mlp.gate_proj.weight" in message
    assert "no rule claims: language_model.model.layers.1.block_sparse_moe.gate.weight" in message


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "kv_lora_rank", "num_hidden_layers"])
def test_config_that_lacks_a_size(key: str, tmp_path: Path) -> None:
    draft = small_k3()
    del draft.text[key]
    message = refusal(draft, tmp_path)
    assert f"config.json lacks {key}" in message
    assert "give the checkpoint's own config.json" in message


def test_config_that_lacks_the_layer_lists(tmp_path: Path) -> None:
    draft = small_k3()
    del draft.text["linear_attn_config"]
    assert "config.json has no linear_attn_config" in refusal(draft, tmp_path)


@pytest.mark.parametrize("key, value, said", [
    ("hidden_size", "128", "hidden_size is '128', which is no count"),
    ("num_experts", -1, "num_experts is -1, which is no count"),
    ("num_hidden_layers", 1 << 40, "num_hidden_layers is 1099511627776, which is no count"),
    ("dtype", "float3", "dtype is 'float3', which is no format of weights"),
    ("quantization_config", "mxfp4", "quantization_config is no object"),
])  # fmt: skip
def test_config_value_that_cannot_be(key: str, value: object, said: str, tmp_path: Path) -> None:
    draft = small_k3()
    draft.text[key] = value
    assert said in refusal(draft, tmp_path)


STRANGE: list[Any] = [None, True, -1, 0, 1.5, 1 << 70, "x", [0], ["x"], {"x": 1}]
UNREAD = {"vision_config", "id2label", "label2id"} | GENERATION_DEFAULTS


def places(config: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The paths of all values of a config that anything reads."""
    found = []
    for key, value in config.items():
        if key not in UNREAD:
            found.append((*path, key))
            found += places(value, (*path, key)) if isinstance(value, dict) else []
    return found


def changed(original: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    result = copy.deepcopy(original)
    holder = result
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return result


def test_no_strange_value_in_a_config_makes_a_traceback(tmp_path: Path) -> None:
    """Every key, with every kind of value: either planned or refused in words."""
    checkpoint = open_checkpoint(smallest_k3().write(tmp_path / "src", shards=1))
    answers = set()
    for path in places(checkpoint.config):
        target = "hf-text" if {"quantization_config", "auto_map"} & set(path) else "native"
        for value in STRANGE:
            config = changed(checkpoint.config, path, value)
            answers.add(planned(replace(checkpoint, config=config, notes=[]), target))
    assert answers == {True, False}


def test_no_strange_value_in_a_manifest_makes_a_traceback(tmp_path: Path) -> None:
    done("convert", smallest_k3().write(tmp_path / "src"), tmp_path / "native")
    checkpoint = open_checkpoint(tmp_path / "native")
    manifest = checkpoint.manifest or {}
    answers = set()
    for path in [p for p in places(manifest) if "config" not in p[:-1]]:
        for value in STRANGE:
            strange = changed(manifest, path, value)
            answers.add(planned(replace(checkpoint, manifest=strange, notes=[]), "hf"))
    assert answers == {True, False}


def planned(checkpoint: Checkpoint, target: str) -> bool:
    """Whether a plan is possible; anything but a plan or a KconvError with a next step is a failure."""
    error: KconvError | None = None
    try:
        if checkpoint.manifest is not None:
            checked(checkpoint.manifest, "kconv.json")
        kconv.plan(checkpoint, target).check()
    except KconvError as e:
        error = e
    assert error is None or error.hint
    return error is None


def test_manifest_of_another_program(tmp_path: Path) -> None:
    src = small_k3().write(tmp_path / "src")
    (src / "kconv.json").write_text('{"version": 1, "source": "somewhere"}')
    message = refused(src, tmp_path / "out")
    assert f"{src}/kconv.json is not as kconv wrote it: source is 'somewhere', expected an object" in message
    assert "remove it if it is another program's" in message


def test_native_checkpoint_without_its_manifest_has_no_published_config(tmp_path: Path) -> None:
    done("convert", small_k3().write(tmp_path / "src"), tmp_path / "native")
    (tmp_path / "native" / "kconv.json").unlink()
    message = refused(tmp_path / "native", tmp_path / "out", "--to", "hf")
    assert "native has no kconv.json of a conversion, so its published config is not known" in message
    assert "or use --to hf-text" in message
    assert done("convert", tmp_path / "native", tmp_path / "text", "--to", "hf-text")["grade"] == "exact"
