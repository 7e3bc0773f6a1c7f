"""Transformers' common model tests on our classes, K3, Kimi-Linear, packed experts and an indexer: none fails.

| skipped | why |
|---|---|
| attentions, Flash Attention, TP plan, `output_router_logits`, sub-configs, position embeddings | the family has none of it |
| accelerator, DeepSpeed, `kernels`, slow, prioritised | the environment, or Transformers' own choice of models |
| what its source distribution lacks: exporting, generation | `tests/modeling/test_generation.py` generates |
"""

from __future__ import annotations

import unittest
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from transformers import PreTrainedModel

from kconv.modeling import KimiK3ForCausalLM, KimiK3TextConfig, KimiK3TextModel
from kconv.modeling.strict import StrictPreTrainedModel
from tests.ecosystem.transformers_tests import common
from tests.modeling.test_indexer import BLOCK
from tests.modeling.tiny import K3, LINEAR, LINEAR_48B, ids

pytest.importorskip("parameterized")
theirs = common()
# What a model of the library has in its tables, which these tests read.
theirs.MODEL_MAPPING_NAMES["kimi_k3_text"] = "KimiK3TextModel"
theirs.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["kimi_k3_text"] = "KimiK3ForCausalLM"
TWO: dict[str, Any] = {"num_hidden_layers": 2, "attn_res_block_size": 1}
SPLIT: dict[str, Any] = {"kda_layers": [1], "full_attn_layers": [2]}


class ModelTester:
    """What the common tests ask of a model's own tester."""

    __test__ = False
    base_model_class = KimiK3TextModel
    batch_size, seq_length, encoder_seq_length, key_length, is_training = 2, 7, 7, 7, True
    num_hidden_layers, hidden_size, num_attention_heads, vocab_size = 2, 48, 4, 97

    def __init__(self, changes: dict[str, Any]) -> None:
        self.changes = changes

    def get_config(self) -> KimiK3TextConfig:
        if "model_type" in self.changes:
            linear = {**LINEAR_48B["linear_attn_config"], **SPLIT}
            return KimiK3TextConfig.from_k3({**LINEAR_48B, "num_hidden_layers": 2, "linear_attn_config": linear})
        return KimiK3TextConfig(**{**K3, **TWO, "linear_attn_config": {**LINEAR, **SPLIT}, **self.changes})

    def prepare_config_and_inputs_for_common(self) -> tuple[KimiK3TextConfig, dict[str, torch.Tensor]]:
        x = ids(self.batch_size, self.seq_length)
        return self.get_config(), {"input_ids": x, "attention_mask": torch.ones_like(x)}


class Common(theirs.ModelTesterMixin, theirs.GenerationTesterMixin):  # type: ignore[name-defined, misc]
    all_model_classes = (KimiK3TextModel, KimiK3ForCausalLM)
    has_attentions = False
    test_all_params_have_gradient = False  # a layer's unchosen experts, and what is out of training
    changes: ClassVar[dict[str, Any]] = {}

    def setUp(self) -> None:
        self.model_tester = ModelTester(self.changes)

    def loosely(self, test: Any) -> None:
        """Run a test of what Transformers does where files lack tensors, which ours refuses: see `test_saving`."""
        with mock.patch.object(StrictPreTrainedModel, "from_pretrained", PreTrainedModel.__dict__["from_pretrained"]):
            test()

    def test_correct_missing_keys(self) -> None:
        self.loosely(super().test_correct_missing_keys)

    def test_base_model_prefix_loads_base_weights(self) -> None:
        self.loosely(super().test_base_model_prefix_loads_base_weights)

    def test_model_weights_reload_no_missing_tied_weights(self) -> None:
        self.loosely(super().test_model_weights_reload_no_missing_tied_weights)


class TestK3(Common, unittest.TestCase):
    pass


class TestKimiLinear(Common, unittest.TestCase):
    changes: ClassVar[dict[str, Any]] = {"model_type": "kimi_linear"}


class TestPackedExperts(Common, unittest.TestCase):
    changes: ClassVar[dict[str, Any]] = {"experts_format": "packed"}

    def check_training_gradient_checkpointing(self, *args: Any, **kwargs: Any) -> None:
        self.skipTest("it asks for a gradient of every parameter: MXFP4 codes have none (test_training checks the others)")


class TestIndexer(Common, unittest.TestCase):
    changes: ClassVar[dict[str, Any]] = {"indexer_config": {**BLOCK, "layers": [2], "topk": 3}}
