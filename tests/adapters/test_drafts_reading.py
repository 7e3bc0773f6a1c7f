"""Published configs with ambiguous keys, read: every trap has its row here, with its right reading or its refusal."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from kconv.adapters.drafts.dialects import dialect_of
from kconv.adapters.drafts.reading import declare, read_draft_config
from kconv.errors import KconvError, Problems
from kconv.modeling.drafts import config_class
from kconv.speculative.findings import copied_tables, review
from kconv.synthesis.drafts import KINDS
from kconv.synthesis.families import synthesize
from tests.modeling import tiny

FACTS = Path(__file__).parents[3] / "shared/k3/drafts"


def published(kind: str, **options: Any) -> dict[str, Any]:
    return copy.deepcopy(synthesize(kind, **options).config)


def read(config: dict[str, Any], **declared: Any) -> Any:
    return read_draft_config(config, declared=declared)


def native(config: dict[str, Any], **declared: Any) -> Any:
    found = read(config, **declared).config
    return config_class(found["model_type"])(**found)


def says(said: str, config: dict[str, Any], **declared: Any) -> None:
    with pytest.raises(KconvError, match=said):
        read(config, **declared)


# 1. layer ids


def test_outputs_and_boundaries() -> None:
    assert native(published("k25-dflash")).taps() == (1, 4, 7)
    assert native(published("speculators-dspark")).taps() == (1, 4, 7)
    assert published("speculators-dspark")["aux_hidden_state_layer_ids"] == [2, 5, 8]


def test_eagle_ids_are_open_until_declared() -> None:
    """[1, 29, 57] are outputs in TorchSpec, [2, 30, 58] boundaries elsewhere, for the same target; the numbers do not tell."""
    config = published("k3-eagle3")
    open_ = native(config)
    assert open_.target_layer_ids is None
    assert open_.aux_layer_ids == [1, 4, 7]
    with pytest.raises(KconvError, match="outputs or boundaries"):
        open_.taps()
    assert native(config, target_layer_ids=[0, 3, 6]).taps() == (0, 3, 6)
    assert native({**config, "tap_convention": "boundary"}).taps() == (0, 3, 6)
    assert native({**config, "_torchspec_version": "0.1.0"}).taps() == (1, 4, 7)


def test_ids_out_of_range_repeated_or_raw_are_refused() -> None:
    for ids, said in (([1, 4, 9], "does not fit a target of 9"), ([1, 1, 4], "repeats"), ([-1, 1, 4], "raw embeddings")):
        config = published("k25-dflash")
        config["dflash_config"]["target_layer_ids"] = ids
        with pytest.raises(KconvError, match=said):
            native(config)


def test_boundary_zero_is_the_raw_embedding() -> None:
    config = published("speculators-dspark")
    config["aux_hidden_state_layer_ids"] = [0, 5, 8]
    with pytest.raises(KconvError, match="raw embeddings"):
        native(config)


def test_order_is_kept_and_noted() -> None:
    config = published("k25-dflash")
    config["dflash_config"]["target_layer_ids"] = [7, 1, 4]
    assert native(config).taps() == (7, 1, 4)
    assert any("not ascending" in line for line in review(native(config)))


@pytest.mark.parametrize(
    ("keys", "depth"),
    [
        ({"num_target_layers": 93}, 93),
        ({"num_target_layers": 3, "target_num_hidden_layers": 93}, 93),
        ({"num_target_layers": 93, "target_num_hidden_layers": 93}, 93),
        ({"num_target_layers": 3}, None),
        ({}, None),
    ],
)
def test_num_target_layers_is_the_depth_or_the_taps(keys: dict[str, int], depth: int | None) -> None:
    config = published("k3-dspark")
    for key in ("num_target_layers", "target_num_hidden_layers"):
        config.pop(key)
    assert native({**config, **keys}).target_num_hidden_layers == depth


def test_num_target_layers_that_is_neither_is_refused() -> None:
    says("neither the depth 9 nor the number of taps 3", {**published("k3-dspark"), "num_target_layers": 7})


# 2. capture stream


def test_capture_stream() -> None:
    assert native(published("k3-dflash")).capture_stream == "prefix"
    assert native(published("k3-dspark")).capture_stream == "prefix"
    assert native(published("k3-dspark", fc_norm=True)).capture_stream == "attn_res"
    assert native({**published("k3-dspark"), "dspark_aux_hidden_state_format": "materialized"}).capture_stream == "attn_res"
    unstated = native(published("k3-dspark-gqa"))
    assert unstated.capture_stream is None
    assert any(
        "capture stream is not stated" in line for line in review(unstated, {"attn_res_block_size": 4, "num_hidden_layers": 9})
    )
    assert native(published("k3-dspark-gqa"), capture_stream="attn_res").capture_stream == "attn_res"


def test_prefix_taps_on_fresh_blocks_are_said() -> None:
    k3 = {"attn_res_block_size": 4, "num_hidden_layers": 9}
    lines = review(native(published("k3-dflash", taps=(1, 4, 8))), k3)
    assert any("taps [4, 8] are first layers of blocks of 4" in line for line in lines)
    assert any("tap 8 is the last layer" in line for line in lines)


# 3. mask id


def test_mask_ids_that_mean_something_else_are_said() -> None:
    assert any("pad_token_id" in line for line in review(native(published("k25-dflash", mask=511))))
    assert any("eos_token_id" in line for line in review(native(published("k25-dflash", mask=501))))
    target = {"text_config": {"num_hidden_layers": 9}, "media_placeholder_token_id": 508}
    assert any("media_placeholder_token_id" in line for line in review(native(published("k3-dflash")), target))
    assert not [line for line in review(native(published("k25-dflash"))) if "mask" in line]


def test_a_missing_mask_id_is_refused_not_guessed() -> None:
    config = published("k25-dflash")
    del config["dflash_config"]["mask_token_id"]
    with pytest.raises(KconvError, match="mask_token_id is missing"):
        native(config)
    config["dflash_config"]["mask_token_id"] = 512
    with pytest.raises(KconvError, match="outside the vocabulary of 512"):
        native(config)


# 4. block size


def test_block_size_nested_top_level_or_both() -> None:
    config = published("k25-dflash")
    nested = {**config, "dflash_config": {**config["dflash_config"], "block_size": config.pop("block_size")}}
    nested.pop("block_size", None)
    assert native(nested).block_size == 4
    assert native({**nested, "block_size": 4}).block_size == 4
    says("block_size is given twice and differently: 4 and 16", {**nested, "block_size": 16})


@pytest.mark.parametrize(
    ("kind", "drafted"), [("k25-dflash", 3), ("k3-dflash2", 3), ("k3-dspark-gqa", 4), ("speculators-dspark", 4)]
)
def test_what_a_block_of_four_drafts(kind: str, drafted: int) -> None:
    """DFlash's 4 counts the anchor it does not draft from; DSpark drafts from it."""
    assert native(published(kind)).num_draft_tokens == drafted
    assert native({**published(kind), "sample_from_anchor": drafted == 3}).num_draft_tokens == 7 - drafted


def test_an_unstated_block_size_stays_open() -> None:
    config = native(published("k3-dspark"))
    with pytest.raises(KconvError, match="no block_size"):
        _ = config.num_draft_tokens
    assert native(published("k3-dspark"), block_size=7).num_draft_tokens == 7


# 5. RoPE


def rope(**keys: Any) -> dict[str, Any]:
    config = published("k25-dflash")
    for key in ("rope_scaling", "rope_theta", "rope_parameters"):
        config.pop(key, None)
    return {**config, **keys}


YARN = {"factor": 64.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_scaling": {**YARN, "type": "yarn"}, "rope_theta": 50000},
        {"rope_scaling": {**YARN, "rope_type": "yarn"}, "rope_theta": 50000.0},
        {"rope_parameters": {**YARN, "rope_type": "yarn", "rope_theta": 50000.0}},
        {
            "rope_parameters": {**YARN, "rope_type": "yarn", "rope_theta": 50000.0},
            "rope_scaling": {**YARN, "rope_type": "yarn"},
            "rope_theta": 50000.0,
        },
    ],
)
def test_rope_keys_before_and_after_transformers_5(keys: dict[str, Any]) -> None:
    found = native(rope(**keys)).rope_parameters
    assert found == {**YARN, "rope_type": "yarn", "rope_theta": 50000.0, "attention_factor": 1.0}


def test_rope_contradictions_are_refused() -> None:
    says(
        "rope_theta is given twice",
        rope(rope_parameters={**YARN, "rope_type": "yarn", "rope_theta": 10000.0}, rope_theta=50000.0),
    )
    both = {"rope_parameters": {**YARN, "rope_type": "yarn"}, "rope_scaling": {**YARN, "factor": 32.0}, "rope_theta": 5e4}
    says("factor differs between rope_parameters", rope(**both))


def test_the_attention_factor_can_be_stated() -> None:
    """vllm-ascend pins 1.4158883083359672 for exactly this draft; whoever knows states it, and zero is a value too."""
    config = rope(rope_scaling={**YARN, "type": "yarn"}, rope_theta=5e4)
    assert native(config, attention_factor=1.4158883083359672).rope.amplitude == 1.4158883083359672
    stated = rope(rope_scaling={**YARN, "type": "yarn", "attention_factor": 0.0}, rope_theta=5e4)
    assert native(stated).rope.amplitude == 0.0
    assert any("attention_factor 1: a runtime that ignores mscale" in line for line in review(native(config)))


def test_an_eagle_head_rotates_whatever_mla_use_nope_says() -> None:
    reading = read(published("k3-eagle3"))
    assert reading.config["mla_use_nope"] is False
    assert reading.config["rope_interleave"] is True
    assert any("RoPE is kept" in note for note in reading.notes)


def test_no_rope_on_a_nope_draft() -> None:
    assert published("k3-dflash")["rope_theta"] == 10000.0
    assert native(published("k3-dflash")).rope_parameters is None


# 6. causality and windows


@pytest.mark.parametrize(
    ("kind", "keys", "causal"),
    [
        ("k3-dflash2", {}, [False, False]),
        ("k3-dflash2", {"is_causal": None}, [True, False]),
        ("k3-dflash2", {"is_causal": True}, [True, True]),
        ("speculators-dspark", {}, [True, True]),
        ("speculators-dspark", {"sliding_window_non_causal": True}, [False, False]),
    ],
)
def test_causality(kind: str, keys: dict[str, Any], causal: list[bool]) -> None:
    config = {k: v for k, v in {**published(kind), **keys}.items() if v is not None}
    assert native(config).causal_layers == causal


def test_nested_causal_key() -> None:
    config = published("k3-dflash2")
    del config["is_causal"]
    config["dflash_config"]["causal"] = False
    assert native(config).causal_layers == [False, False]


def test_k25_sliding_layers_are_bidirectional() -> None:
    config = {**published("k25-dflash"), "layer_types": ["sliding_attention"] * 3, "sliding_window": 8}
    assert native(config).causal_layers == [False] * 3
    assert any("write is_causal false" in line for line in review(native(config)))


def test_which_layers_slide() -> None:
    config = {**published("k25-dflash"), "use_sliding_window": True, "sliding_window": 8}
    del config["layer_types"]
    says("which layers slide is unknown", config)
    assert native({**config, "max_window_layers": 2}).layer_types == ["full_attention"] * 2 + ["sliding_attention"]
    assert native({**published("k25-dflash"), "sliding_window": 4096}).sliding_window is None


# 7. what is inherited, and what is there


def test_inherited_keys_do_not_come_along() -> None:
    config = {**published("k3-dflash"), "auto_map": {"AutoModel": "x.Y"}, "quantization_config": {"quant_method": "mxfp4"}}
    found = native(config).to_dict()
    gone = ("auto_map", "quantization_config", "moe_intermediate_size", "num_experts_per_token", "routed_expert_hidden_size")
    assert not [key for key in gone if key in found]
    assert found["head_dim"] is None


def test_the_families_own_model_type_does_not_decide() -> None:
    """An MLA DFlash2 says qwen3, NeMo's K3 draft says kimi_linear, an MLA Eagle3 head kimi_k2."""
    for kind in KINDS:
        config = published(kind)
        dialect = dialect_of(config)
        assert dialect is not None
        assert dialect.family != config.get("model_type")
    assert native(published("k3-dflash2")).attention_mode == "mla"


def test_a_config_without_architectures_is_known_by_its_type() -> None:
    config = published("k3-dspark")
    del config["architectures"]
    reading = read(config)
    assert reading.dialect.name == "k3-dspark"
    assert reading.config["architectures"] == ["DSparkDraftModel"]


def test_projectors() -> None:
    config = published("k25-dflash")
    config["dflash_config"]["projector_type"] = "domino"
    says("projector_type 'domino'", config)
    spark = published("k25-dflash")
    spark["dflash_config"] |= {"projector_type": "dspark", "markov_rank": 16}
    assert read(spark).config["model_type"] == "dspark"


def test_no_draft_is_said_to_be_one() -> None:
    says("no draft that kconv knows", {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"})
    assert dialect_of({"model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"]}) is None


def test_everything_wrong_is_said_at_once() -> None:
    config = {**published("k3-dspark"), "num_target_layers": 7, "mla_use_nope": True}
    config["rope_scaling"] = {"rope_theta": 1.0}
    with pytest.raises(Problems) as error:
        read(config)
    assert len(error.value.problems) == 3


# 8. eps of the latent norms


def test_eps_of_the_latent_norms() -> None:
    assert native(published("k3-dflash")).mla_norm_eps == 1e-6
    for kind in ("k3-dspark", "k3-dflash2", "k3-eagle3"):
        assert native(published(kind)).mla_norm_eps == 1e-5
    assert native(published("k3-dspark"), mla_norm_eps=1e-6).mla_norm_eps == 1e-6


# 9. copies of the target's tables


def test_copies_are_kept_and_compared() -> None:
    target = tiny.model(0, vocab_size=64, hidden_size=128)
    assert native(published("speculators-dspark")).owns_embed_tokens is False
    model = kconv_model(published("speculators-dspark", vocab=64, mask=60))
    assert copied_tables(model, target) == {"embed_tokens": False, "lm_head": False}
    model.embed_tokens.weight.data.copy_(target.get_input_embeddings().weight)
    assert copied_tables(model, target) == {"embed_tokens": True, "lm_head": False}


def kconv_model(config: dict[str, Any]) -> Any:
    from kconv.modeling.drafts import model_class

    found = read_draft_config(config, ["embed_tokens.weight", "lm_head.weight"]).config
    return model_class(found["model_type"])(config_class(found["model_type"])(**found))


# declaring


def test_declared_values() -> None:
    config = read(published("k3-dspark"), block_size=7).config
    assert declare(config, {"capture_stream": "attn_res"})["capture_stream"] == "attn_res"
    with pytest.raises(KconvError, match="block_size is 7 in the config, 5 was declared"):
        declare(config, {"block_size": 5})
    with pytest.raises(KconvError, match="cannot declare hidden_size"):
        declare(config, {"hidden_size": 5})


@pytest.mark.skipif(not FACTS.is_dir(), reason="needs ../shared/k3/drafts")
@pytest.mark.parametrize(
    ("name", "taps", "drafted"),
    [
        ("Inferact_Kimi-K3-DSpark", [2, 23, 47, 71, 89], None),
        ("RedHatAI_Kimi-K3-speculator.dspark", [23, 47, 71, 87, 91], 8),
        ("SpecForge_kimi-k3-dspark_RadixArk", [7, 23, 51, 67, 83], 7),
        ("TorchSpec_kimi_k3_dflash2_mla_swa", [19, 37, 54, 66, 78, 90], 7),
        ("NeMo_KimiK3DFlashDraftModel.derived", [90, 91, 92], 15),
        ("z-lab_Kimi-K2.5-DFlash", [1, 12, 24, 35, 47, 58], 7),
    ],
)
def test_published_configs(name: str, taps: list[int], drafted: int | None) -> None:
    config = native(json.loads((FACTS / f"{name}.config.json").read_text()))
    assert config.target_layer_ids == taps
    assert (config.num_draft_tokens if config.block_size else None) == drafted
