"""The config: published ones read, wrong ones refused with every reason."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from kconv.errors import KconvError, Problems
from kconv.modeling import KimiK3ForCausalLM, KimiK3TextConfig
from tests.modeling.published import GOLDEN
from tests.modeling.tiny import K3, LINEAR, LINEAR_48B

REAL = Path(__file__).parents[3] / "shared" / "k3" / "config.json"


def published() -> dict[str, Any]:
    return json.loads((GOLDEN / "tiny-k3" / "config.json").read_text())


def content(config: KimiK3TextConfig) -> dict[str, Any]:
    return {k: v for k, v in config.to_dict().items() if k not in ("transformers_version", "_name_or_path", "architectures")}


def test_from_a_multimodal_config() -> None:
    config = KimiK3TextConfig.from_k3(published())
    assert config.model_type == "kimi_k3_text"
    assert config.layer_kinds == ["kda", "kda", "kda", "mla", "kda", "kda", "kda", "mla", "mla"]
    assert [config.experts_of(i) for i in range(9)] == [0] + [8] * 8
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (500, 501, 511)
    assert config.experts_format == "packed"
    junk = {"max_length", "top_k", "quantization_config", "vision_config", "text_config", "auto_map", "num_beams"}
    assert not junk & set(config.to_dict())


def test_text_config_alone_gives_the_same() -> None:
    whole, text = KimiK3TextConfig.from_k3(published()), KimiK3TextConfig.from_k3(published()["text_config"])
    assert whole.to_dict() == text.to_dict()


def test_source_is_left_alone() -> None:
    source = published()
    before = copy.deepcopy(source)
    KimiK3TextConfig.from_k3(source).linear["kda_layers"].append(99)
    assert source == before


def test_top_quantization_config_wins_over_a_stale_nested_one() -> None:
    source = published()
    source["quantization_config"] = {"format": "float-quantized"}
    assert KimiK3TextConfig.from_k3(source).experts_format == "bf16"
    assert KimiK3TextConfig.from_k3(source, experts_format="packed").experts_format == "packed"


def test_native_config_round_trip(tmp_path: Path) -> None:
    config = KimiK3TextConfig(**K3, experts_format="packed", num_experts_per_layer=[None, 6, 3, 4, 2])
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["experts_format"] == "packed"
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is KimiK3TextConfig
    assert content(again) == content(config)
    assert content(KimiK3TextConfig.from_k3(again)) == content(config)


def test_kimi_linear() -> None:
    config = KimiK3TextConfig.from_k3(LINEAR_48B)
    assert config.attn_res_block_size is None
    assert config.routed_expert_hidden_size is None
    assert config.q_lora_rank is None
    assert not config.mla_use_output_gate
    assert config.linear["gate_lower_bound"] is None
    assert config.hidden_act == "silu"


def test_groups_that_are_switched_off() -> None:
    source = {**LINEAR_48B, "num_expert_group": 2, "use_grouped_topk": False}
    assert KimiK3TextConfig.from_k3(source).num_expert_group == 1


def test_defaults_are_kimi_k3() -> None:
    config = KimiK3TextConfig()
    assert config.layer_kinds.count("mla") == 24
    assert config.layer_kinds[-2:] == ["mla", "mla"]
    assert config.qk_head_dim == 192


@pytest.mark.skipif(not REAL.exists(), reason="the published config is not part of the repository")
def test_the_real_config() -> None:
    config = KimiK3TextConfig.from_k3(json.loads(REAL.read_text()))
    default = KimiK3TextConfig(experts_format="packed", dtype="bfloat16")
    assert content(config) == content(default)


def linear(**changes: Any) -> dict[str, Any]:
    return {"linear_attn_config": {**LINEAR, **changes}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (linear(kda_layers=[1, 2]), r"leave out layers \[4\]"),
        (linear(kda_layers=[0, 1, 2, 4]), r"outside 1..5: \[0\]"),
        (linear(kda_layers=[1, 2, 3, 4]), r"twice: \[3\]"),
        (linear(kda_layers=None), "kda_layers is missing"),
        (linear(head_dim=0), "head_dim = 0"),
        (linear(gate_lower_bound=5.0), "gate_lower_bound = 5.0"),
        ({"mla_use_nope": False}, "mla_use_nope is false"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ({"hidden_size": -1}, "hidden_size = -1"),
        ({"num_experts_per_token": 7}, "fewer experts than num_experts_per_token 7"),
        ({"num_experts_per_layer": [6]}, "has 1 entries for 5 layers"),
        ({"num_experts_per_layer": [None, 6, 6, 1, 6]}, "{3: 1}"),
        ({"num_expert_group": 4}, "do not divide into 4 groups"),
        ({"topk_group": 2}, "topk_group 2 exceeds"),
        ({"experts_format": "int4"}, "experts_format = 'int4'"),
        ({"experts_format": "packed", "moe_intermediate_size": 40}, "40 is no multiple of 32"),
        ({"moe_router_activation_func": "tanh"}, "moe_router_activation_func = 'tanh'"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps = 0.0"),
    ],
)  # fmt: skip
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(KconvError, match=message):
        KimiK3TextConfig(**{**K3, **changes})


def test_all_problems_at_once() -> None:
    with pytest.raises(KconvError) as error:
        KimiK3TextConfig(**{**K3, "hidden_act": "gelu", "mla_use_nope": False, "vocab_size": 0})
    assert all(name in str(error.value) for name in ("hidden_act", "mla_use_nope", "vocab_size"))


def test_not_a_kimi_config() -> None:
    with pytest.raises(KconvError, match="neither Kimi K3 nor Kimi-Linear"):
        KimiK3TextConfig.from_k3({"model_type": "llama", "hidden_size": 8})


def test_a_config_changed_after_it_was_made_is_checked_again() -> None:
    config = KimiK3TextConfig(**K3)
    config.num_attention_heads = 0
    with pytest.raises(Problems, match="num_attention_heads = 0"):
        KimiK3ForCausalLM(config)
