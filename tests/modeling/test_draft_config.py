"""Native draft configs: what they refuse, what they write, what survives Transformers, and the K3 builders."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kconv.modeling import KimiK3TextConfig
from kconv.modeling.drafts import CLASSES, config_class
from kconv.modeling.drafts.config import DraftConfig, DraftConfigError
from kconv.modeling.drafts.dflash import DFlashConfig, DFlashKimiK25, DFlashKimiK25Config
from kconv.modeling.drafts.dflash2 import DFlash2Config
from kconv.modeling.drafts.dflash_k3 import (
    KimiK3DFlashConfig,
    KimiK3DFlashDraftModel,
    build_kimi_k3_dflash_draft_config,
    build_kimi_k3_dflash_target_kwargs,
)
from kconv.modeling.drafts.dspark import DSparkConfig
from kconv.modeling.drafts.eagle3 import Eagle3Config
from tests.modeling.tiny import K3

YARN = {
    "rope_type": "yarn", "rope_theta": 50000.0, "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
K25: dict[str, Any] = {
    "mask_token_id": 163838, "target_layer_ids": [1, 12, 24, 35, 47, 58], "num_hidden_layers": 6, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 18432, "block_size": 8, "rope_parameters": YARN,
    "max_position_embeddings": 262144,
}  # fmt: skip
MLA: dict[str, Any] = {"attention_mode": "mla", "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
TAPS: dict[str, Any] = {"mask_token_id": 5, "target_layer_ids": [1, 2]}


def k25(**changes: Any) -> DFlashKimiK25Config:
    return DFlashKimiK25Config(**copy.deepcopy({**K25, **changes}))


def refuses(said: str, make: Any, **fields: Any) -> None:
    with pytest.raises(DraftConfigError, match=said):
        make(**fields)


def test_k25_refusals() -> None:
    refuses("method 'eagle3' is not 'dflash'", k25, method="eagle3")
    refuses("raw embeddings", k25, target_layer_ids=[-1, 12, 24, 35, 47, 58])
    refuses("gives 5 taps for 6 draft layers", k25, target_layer_ids=[1, 12, 24, 35, 47])
    refuses("does not fit a target of 61 layers", k25, target_layer_ids=[1, 12, 24, 35, 47, 61])
    refuses("repeats a layer", k25, target_layer_ids=[1, 1, 24, 35, 47, 58])
    refuses("mask_token_id is missing", k25, mask_token_id=None)
    refuses("outside the vocabulary", k25, mask_token_id=163840)
    refuses("DeepSeek-YaRN", k25, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    refuses(
        "num_hidden_layers is 0, it should be a number of layers", k25, num_hidden_layers=0, layer_types=[], target_layer_ids=[]
    )
    refuses("positive sliding_window", k25, layer_types=["sliding_attention"] * 6)
    refuses("leaves nothing to draft", k25, block_size=1)
    refuses("no multiple of", k25, num_key_value_heads=7)
    refuses("projector_type 'domino'", k25, projector_type="domino")
    refuses("attention_multiplier must be positive", k25, attention_multiplier=0.0)
    refuses("output_multiplier must be positive", k25, output_multiplier=0.0)
    refuses("final_logit_softcapping must be positive", k25, final_logit_softcapping=-1.0)
    refuses("block_size is 8 at the top level and 16 in dflash_config", k25, dflash_config={"block_size": 16})
    refuses("dflash_config has the key taps", k25, dflash_config={"taps": [1]})
    refuses("block_size is '8', it should be a whole number or null", k25, block_size="8")


def test_every_field_of_the_design_is_there() -> None:
    config = k25(residual_multiplier=0.5, attention_multiplier=0.1, clip_qkv=8.0, stacked_qkv=True, use_qk_norm=False)
    assert (config.residual_multiplier, config.attention_multiplier, config.clip_qkv) == (0.5, 0.1, 8.0)
    assert (config.stacked_qkv, config.use_qk_norm, config.block_size) == (True, False, 8)
    assert config.dflash_config == {"mask_token_id": 163838, "target_layer_ids": K25["target_layer_ids"], "block_size": 8}


def test_sliding_layers_are_bidirectional_unless_said_otherwise() -> None:
    sliding = {"layer_types": ["sliding_attention"] * 6, "sliding_window": 4096}
    assert k25(**sliding).causal_layers == [False] * 6
    assert k25(**sliding, is_causal=True).causal_layers == [True] * 6


def test_the_published_size_of_k25() -> None:
    """69 tensors and 3,479,277,056 parameters, as published; no embedding, no head."""
    with torch.device("meta"):
        model = DFlashKimiK25(k25())
    shapes = {n: p.numel() for n, p in model.named_parameters()}
    assert (len(shapes), sum(shapes.values())) == (69, 3_479_277_056)


def test_the_published_size_of_k3() -> None:
    """NeMo's recipe: 42 tensors, 3,030,775,808 parameters, the MLP as wide as the target's dense layer."""
    config = build_kimi_k3_dflash_draft_config(
        KimiK3TextConfig(), num_draft_layers=3, num_target_layers=93, block_size=16, attention_backend="sdpa",
        dflash_config={"mask_token_id": 163605, "target_layer_ids": [90, 91, 92]},
    )  # fmt: skip
    with torch.device("meta"):
        model = KimiK3DFlashDraftModel(config)
    shapes = {n: p.numel() for n, p in model.named_parameters()}
    assert (len(shapes), sum(shapes.values())) == (42, 3_030_775_808)
    assert config.intermediate_size == 33792


def published_target() -> dict[str, Any]:
    """A published text config with everything a draft must not inherit."""
    return {
        **copy.deepcopy(K3), "model_type": "kimi_linear", "num_key_value_heads": 4, "mla_use_nope": True,
        "mla_use_output_gate": True, "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-5,
        "auto_map": {"AutoModelForCausalLM": "modeling_kimi_linear.KimiLinearForCausalLM"},
        "quantization_config": {"quant_method": "compressed-tensors"}, "head_dim": 12, "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "num_nextn_predict_layers": 1,
    }  # fmt: skip


def build(target: Any, **changes: Any) -> KimiK3DFlashConfig:
    arguments: dict[str, Any] = {
        "num_draft_layers": 2, "num_target_layers": 5, "block_size": 4, "attention_backend": "sdpa",
        "dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 2, 4]}, **changes,
    }  # fmt: skip
    return build_kimi_k3_dflash_draft_config(target, **arguments)


@pytest.mark.parametrize("as_object", [False, True])
def test_builder_switches_off_what_the_draft_does_not_build(as_object: bool) -> None:
    target: Any = KimiK3TextConfig(**K3) if as_object else published_target()
    before = copy.deepcopy(target.to_dict() if as_object else target)
    config = build(target)
    assert (target.to_dict() if as_object else target) == before
    written = json.loads(config.to_json_string())
    assert written["architectures"] == ["KimiK3DFlashDraftModel"]
    assert written["is_causal"] is False
    assert written["mla_norm_eps"] == 1e-6
    assert written["capture_stream"] == "prefix"
    assert written["target_num_hidden_layers"] == 5
    assert written["linear_attn_config"] == {"kda_layers": [], "full_attn_layers": [1, 2]}
    off = {"num_experts": None, "num_shared_experts": 0, "num_nextn_predict_layers": 0, "attn_res_block_size": None}
    assert {k: written[k] for k in off} == off
    leaked = (
        "auto_map",
        "quantization_config",
        "moe_intermediate_size",
        "num_experts_per_token",
        "routed_expert_hidden_size",
        "rope_theta",
    )
    assert not [k for k in leaked if k in written]
    assert written["head_dim"] is None
    assert written["rope_parameters"] is None
    assert written["block_size"] == written["dflash_config"]["block_size"] == 4


def test_builder_refusals() -> None:
    refuses(
        "model_type 'kimi_k3' is not a Kimi K3 text config",
        lambda: build({"model_type": "kimi_k3", "text_config": published_target()}),
    )
    refuses("model_type 'qwen3'", lambda: build({"model_type": "qwen3"}))
    refuses("projector_type 'domino'", lambda: build(published_target(), dflash_config={**TAPS, "projector_type": "domino"}))
    refuses("one key/value head per query head", lambda: build({**published_target(), "num_key_value_heads": 2}))
    refuses("mla_use_nope is false", lambda: build({**published_target(), "mla_use_nope": False}))
    refuses("no dense additive mask", lambda: build(published_target(), attention_backend="flex_attention"))
    refuses("mask_token_id is missing", lambda: build(published_target(), dflash_config={"target_layer_ids": [0]}))
    refuses("block_size is 4 and 8", lambda: build(published_target(), dflash_config={**TAPS, "block_size": 8}))
    refuses(
        "does not fit a target of 5",
        lambda: build(published_target(), dflash_config={"mask_token_id": 1, "target_layer_ids": [5]}),
    )


def test_target_kwargs() -> None:
    kwargs = build_kimi_k3_dflash_target_kwargs()
    assert kwargs["config"] == {"architectures": ["KimiK3ForCausalLM"]}
    assert (kwargs["backend"]["attn"], kwargs["backend"]["experts"], kwargs["backend"]["dispatcher"]) == (
        "eager",
        "torch_mm",
        "hybridep",
    )
    other = build_kimi_k3_dflash_target_kwargs({"target_experts": "torch", "target_enable_fsdp_optimizations": False})
    assert (other["backend"]["experts"], other["backend"]["enable_fsdp_optimizations"]) == ("torch", False)


def test_target_kwargs_are_nemos() -> None:
    """The fields are those of NeMo's BackendConfig."""
    common = pytest.importorskip("nemo_automodel.components.models.common")
    backend = common.BackendConfig(**{**build_kimi_k3_dflash_target_kwargs()["backend"], "dispatcher": "torch"})
    assert backend.rms_norm == "torch_fp32"


def test_other_refusals() -> None:
    refuses("an MLA draft needs kv_lora_rank", DSparkConfig, **TAPS, attention_mode="mla")
    refuses("neither 'gqa' nor 'mla'", DSparkConfig, **TAPS, attention_mode="linear")
    refuses("markov_head_type 'lstm'", DSparkConfig, **TAPS, markov_head_type="lstm")
    refuses("needs a Markov head", DSparkConfig, **TAPS, markov_rank=0)
    refuses("does not divide hidden_size", DFlash2Config, **TAPS, conv_group_size=17)
    refuses("does not fit a block", DFlash2Config, **TAPS, block_size=2, conv_kernel_size=3)
    refuses("whole vocabulary", DFlash2Config, **TAPS, draft_vocab_size=100)
    refuses("has one layer", Eagle3Config, **MLA, num_hidden_layers=2)
    refuses("normed twice", Eagle3Config, **MLA, fc_norm=True, norm_before_fc=True)
    refuses("none of", DFlashConfig, **TAPS, capture_stream="residual")
    refuses("has grouped-query attention", DFlashConfig, **TAPS, **MLA)


def test_no_rope_keys_on_a_draft_without_rope() -> None:
    stale = {"rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    config = KimiK3DFlashConfig(**{**TAPS, **stale})
    assert config.rope_parameters is None
    assert config.rope is None
    assert "rope_theta" not in config.to_dict()


@pytest.mark.parametrize("model_type", sorted(CLASSES))
def test_a_config_survives_transformers(tmp_path: Path, model_type: str) -> None:
    """Saved and loaded, twice: the same fields, and a key of one's own (a provenance block) with them."""
    fields: dict[str, Any] = {
        **TAPS,
        "block_size": 4,
        "target_num_hidden_layers": 5,
        "provenance": {"target": "a", "revision": "b" * 40},
    }
    if model_type in ("kimi_k3_dflash", "eagle3"):
        fields |= MLA | {"num_hidden_layers": 1}
    elif model_type == "dflash_kimi_k25":
        fields |= {"num_hidden_layers": 2, "rope_parameters": dict(YARN), "max_position_embeddings": 262144}
    first = config_class(model_type)(**fields)
    first.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    second = config_class(model_type).from_pretrained(tmp_path)
    assert second.to_dict() | {"transformers_version": ""} == first.to_dict() | {"transformers_version": ""}
    assert second.provenance == fields["provenance"]  # type: ignore[attr-defined]
    for key in (
        "block_size",
        "mask_token_id",
        "target_layer_ids",
        "is_causal",
        "layer_types",
        "capture_stream",
        "sample_from_anchor",
    ):
        assert key in written
    assert isinstance(second, DraftConfig)


def test_a_builder_that_is_given_no_taps_spreads_them_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    config = KimiK3TextConfig()
    made = build(config, num_draft_layers=5, num_target_layers=93, dflash_config={"mask_token_id": 96})
    assert made.target_layer_ids == [1, 23, 46, 68, 90]
    assert made.num_target_layers == 93
    assert "[1, 23, 46, 68, 90]" in caplog.text
    refuses(
        "cannot be spread", lambda: build(config, num_draft_layers=5, num_target_layers=5, dflash_config={"mask_token_id": 96})
    )


def test_a_config_changed_after_it_was_made_is_checked_again() -> None:
    config = k25(num_hidden_layers=6)
    config.mask_token_id = -1
    with pytest.raises(DraftConfigError, match="mask_token_id -1"):
        DFlashKimiK25(config)
