"""speculators 0.9 live: its configs and weights load here, ours load there, and both compute the same.

It pins an older Transformers, yet runs beside 5.24 when installed without its dependencies.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import kconv
from kconv.modeling.drafts.mask import block_mask
from kconv.speculative import load_draft
from kconv.synthesis.families import tiny

pytestmark = pytest.mark.skipif(importlib.util.find_spec("speculators") is None, reason="needs speculators 0.9")

VOCAB, HIDDEN, BLOCK, LENGTH, COUNT = 61, 32, 4, 17, 3
LAYER: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "rope_theta": 10000.0,
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "use_sliding_window": True,
}  # fmt: skip
AUX = [2, 5]


def speculators_config(algorithm: str) -> Any:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["KimiK3ForConditionalGeneration"]),
    )


def layer_config(**changes: Any) -> Any:
    from transformers import Qwen3Config

    config = Qwen3Config(**{**LAYER, **changes})
    config._attn_implementation = "eager"
    return config


def fill(model: torch.nn.Module) -> None:
    g = torch.Generator().manual_seed(0)
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=g)
        p.data.copy_(1 + 0.2 * noise if p.ndim == 1 else noise * p.shape[-1] ** -0.5)


def build(algorithm: str, **fields: Any) -> Any:
    """A speculators block draft with random weights."""
    from importlib import import_module

    names = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}[algorithm]
    config_class = getattr(import_module(f"speculators.models.{algorithm}.config"), f"{names}SpeculatorConfig")
    model_class = getattr(import_module(f"speculators.models.{algorithm}.core"), f"{names}DraftModel")
    config = config_class(
        transformer_layer_config=layer_config(), draft_vocab_size=VOCAB, block_size=BLOCK, aux_hidden_state_layer_ids=AUX,
        mask_token_id=60,
        speculators_config=speculators_config(algorithm), **fields,
    )  # fmt: skip
    model = model_class(config).float().eval()
    fill(model)
    return model


def run(model: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Hidden states and logits of their training pass over three blocks, with its inputs."""
    g = torch.Generator().manual_seed(1)
    io = {
        "context": torch.randn(1, LENGTH, len(AUX) * HIDDEN, generator=g),
        "ids": torch.randint(0, VOCAB, (1, LENGTH), generator=g),
        "last": torch.randn(1, LENGTH, HIDDEN, generator=g),
    }  # fmt: skip
    hidden, logits, _, _, indices = model._backbone_forward(
        io["context"], io["ids"], torch.ones(1, LENGTH), io["last"], torch.zeros(1, LENGTH, dtype=torch.long), max_anchors=COUNT
    )
    io["anchors"] = indices.view(COUNT, BLOCK)[:, 0][None]
    return hidden, logits, io


CASES = [
    ("dflash", {}),
    ("dflash", {"sliding_window_non_causal": True}),
    ("dspark", {"markov_rank": 6}),
    ("dspark", {"markov_rank": 6, "markov_head_type": "gated", "sliding_window_non_causal": True}),
    ("dspark", {"markov_rank": 6, "markov_head_type": "rnn", "sample_from_anchor": False}),
    ("dflash2", {"conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}),
]


@pytest.mark.parametrize(("algorithm", "fields"), CASES)
@torch.no_grad()
def test_block_drafts(tmp_path: Path, algorithm: str, fields: dict[str, Any]) -> None:
    theirs = build(algorithm, **fields)
    hidden, logits, io = run(theirs)
    theirs.save_pretrained(tmp_path)
    ours = load_draft(tmp_path, dtype=torch.float32)
    assert ours.config.target_layer_ids == [i - 1 for i in AUX]
    assert ours.config.num_draft_tokens == (BLOCK if theirs.config.sample_from_anchor else BLOCK - 1)
    anchors = io["anchors"]
    keep = torch.ones_like(anchors, dtype=torch.bool)
    masks = {
        kind: block_mask(
            anchors, keep, LENGTH, BLOCK, causal=ours.config.causal_layers[i], window_rule=ours.config.window_rule,
            window=ours.config.sliding_window if kind == "sliding_attention" else None,
        )
        for i, kind in enumerate(ours.config.layer_types)
    }  # fmt: skip
    noise = torch.full((1, COUNT, BLOCK), 60)
    noise[..., 0] = io["ids"].gather(1, anchors)
    positions = torch.cat([torch.arange(LENGTH), (anchors[0][:, None] + torch.arange(BLOCK)).flatten()])[None]
    out = ours(
        position_ids=positions,
        attention_mask=masks,
        noise_embedding=ours.embed_block(noise.flatten(1), theirs.embed_tokens),
        target_hidden=io["context"],
    )
    torch.testing.assert_close(out, hidden, rtol=0, atol=2e-5)
    torch.testing.assert_close(ours.compute_logits(out, theirs.lm_head), logits, rtol=0, atol=2e-5)
    if algorithm == "dspark":
        heads(ours, theirs, out)
    if algorithm == "dflash2":
        selector(ours, theirs, out, logits)


def heads(ours: Any, theirs: Any, out: torch.Tensor) -> None:
    blocks = out.view(COUNT, BLOCK, -1)
    previous = torch.randint(0, VOCAB, (COUNT, BLOCK), generator=torch.Generator().manual_seed(3))
    bias = theirs.markov_head.block_bias(prev_token_ids=previous, hidden_states=blocks)
    torch.testing.assert_close(ours.markov_head.block(previous, blocks), bias, rtol=0, atol=2e-5)
    features = torch.cat([blocks, theirs.markov_head.prev_embeddings(previous)], -1)
    torch.testing.assert_close(ours.confidence(blocks, previous), theirs.confidence_head(features), rtol=0, atol=2e-5)


def selector(ours: Any, theirs: Any, out: torch.Tensor, logits: torch.Tensor) -> None:
    previous = torch.randint(0, VOCAB, out.shape[:2], generator=torch.Generator().manual_seed(3))
    candidates, scores = theirs.candidate_selector.select(logits, out, previous)
    mine = ours.candidate_selector.scores(out, logits.gather(-1, candidates), candidates, previous)
    torch.testing.assert_close(mine, scores, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "flags", [{}, {"fc_norm": True, "norm_output": True}, {"norm_before_fc": True, "norm_before_residual": True}]
)
@torch.no_grad()
def test_eagle3(tmp_path: Path, flags: dict[str, Any]) -> None:
    """Their draft tokens, step by step, for a head over 23 of 61 tokens."""
    from speculators.models.eagle3.config import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel

    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config(num_hidden_layers=1, layer_types=["full_attention"]), draft_vocab_size=23,
        eagle_aux_hidden_state_layer_ids=AUX, speculators_config=speculators_config("eagle3"), **flags,
    )  # fmt: skip
    theirs = Eagle3DraftModel(config).float().eval()
    fill(theirs)
    chosen = torch.arange(0, 46, 2)
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[chosen] = True
    theirs.load_vocab_mappings(t2d, chosen - torch.arange(23))
    theirs.save_pretrained(tmp_path)
    ours = load_draft(tmp_path, dtype=torch.float32)
    g = torch.Generator().manual_seed(1)
    context, ids = torch.randn(1, LENGTH, len(AUX) * HIDDEN, generator=g), torch.randint(0, VOCAB, (1, LENGTH), generator=g)
    drafted = theirs(context, ids, torch.zeros(1, LENGTH, dtype=torch.long), ttt_steps=3)
    states = ours.project_target(context)
    for t in (0, 6, LENGTH - 4):
        cache = ours.new_cache()
        state = ours(input_ids=ids[:, : t + 1], states=states[:, : t + 1], cache=cache, embed_tokens=theirs.embed_tokens)[:, -1:]
        for step in range(3):
            if step:
                token = ids[:, t + step : t + step + 1]
                state = ours(input_ids=token, states=state, cache=cache, embed_tokens=theirs.embed_tokens)
            assert torch.equal(ours.head_logits(state).argmax(-1)[:, 0], drafted[step][:, t])


def test_a_converted_draft_loads_there(tmp_path: Path) -> None:
    """There and back through the native layout, then into their own loader, weights and config."""
    from speculators import SpeculatorModel

    tiny("speculators-dspark", tmp_path / "published", seed=1, dtype="float32")
    kconv.convert(kconv.plan(tmp_path / "published", to="native"), tmp_path / "native")
    kconv.convert(kconv.plan(tmp_path / "native", to="hf"), tmp_path / "back")
    theirs = SpeculatorModel.from_pretrained(tmp_path / "back")
    ours = load_draft(tmp_path / "native")
    assert type(theirs).__name__ == "DSparkDraftModel"
    assert theirs.config.speculators_config.verifier.architectures == ["KimiK3ForConditionalGeneration"]
    known = dict(theirs.state_dict())
    for name, tensor in ours.state_dict().items():
        assert torch.equal(known[name], tensor), name
