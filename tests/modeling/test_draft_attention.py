"""Attention of the drafts against Transformers: YaRN, rotated MLA with DeepSeek's scale, and what a mask lets through."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kconv.modeling.drafts.config import DraftConfig
from kconv.modeling.drafts.dflash import DFlashConfig, DFlashDraftModel
from kconv.modeling.drafts.dflash_k3 import KimiK3DFlashConfig, KimiK3DFlashDraftModel
from kconv.modeling.drafts.dspark import DSparkConfig
from kconv.modeling.drafts.mask import block_mask, decode_mask
from kconv.modeling.drafts.mla import MLADraftAttention
from kconv.modeling.drafts.rope import Rope, default_attention_factor, mscale
from kconv.speculative import review

YARN = {
    "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 50000.0,
}  # fmt: skip
MLA: dict[str, Any] = {
    "attention_mode": "mla", "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
    "vocab_size": 97,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "mask_token_id": 96,
    "target_layer_ids": [0, 2], "block_size": 4, "initializer_range": 0.3,
}  # fmt: skip


def transformers_rope(rope: dict[str, Any], dim: int) -> tuple[torch.Tensor, float]:
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = Qwen3Config(head_dim=dim, rope_parameters=dict(rope), max_position_embeddings=2048)
    return ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))


@pytest.mark.parametrize("changes", [{}, {"beta_fast": 1.0}, {"factor": 64.0, "original_max_position_embeddings": 4096}])
def test_yarn_equals_transformers(changes: dict[str, Any]) -> None:
    rope = {**YARN, **changes}
    frequencies, factor = transformers_rope(rope, 64)
    ours = Rope.of(64, {**rope, "attention_factor": default_attention_factor(rope)}, interleave=False)
    torch.testing.assert_close(ours.frequencies(), frequencies, rtol=1e-6, atol=0)
    assert ours.amplitude == factor == 1.0


def test_the_amplitude_is_never_inferred_silently() -> None:
    """Without mscale keys Transformers takes 0.1 ln(64) + 1, with both their ratio; a config says which, a stated one wins."""
    plain = {k: v for k, v in YARN.items() if not k.startswith("mscale")} | {"factor": 64.0}
    assert default_attention_factor(plain) == pytest.approx(1.4158883083359672, abs=1e-15)
    assert default_attention_factor({**plain, "mscale": 1.0, "mscale_all_dim": 1.0}) == 1.0
    config = DFlashConfig(mask_token_id=1, target_layer_ids=[1], rope_parameters=dict(plain), head_dim=128)
    assert config.rope_parameters is not None
    assert config.rope_parameters["attention_factor"] == pytest.approx(0.1 * math.log(64) + 1)
    stated = DFlashConfig(mask_token_id=1, target_layer_ids=[1], rope_parameters={**plain, "attention_factor": 0.0}, head_dim=128)
    assert stated.rope is not None
    assert stated.rope.amplitude == 0.0


def test_frequencies_survive_a_cast_to_bf16() -> None:
    """A rounded frequency buffer is 3 radians off after a thousand positions; there is no buffer to round."""
    config = DFlashConfig(
        mask_token_id=1, target_layer_ids=[1], hidden_size=64, num_attention_heads=4, num_hidden_layers=1, head_dim=16
    )
    model: Any = DFlashDraftModel(config)
    model.to(torch.bfloat16)
    assert model.config.rope is not None
    cos, _ = model.config.rope.tables(torch.tensor([[100_001]]), torch.float32)
    angle = 100_001 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(cos[0, 0, :8], angle.cos(), rtol=0, atol=2e-2)
    assert not [n for n, b in model.named_buffers() if "freq" in n]


@pytest.mark.parametrize("rope", [YARN, {"rope_type": "default", "rope_theta": 10000.0}], ids=["yarn", "plain"])
@torch.no_grad()
def test_rotated_mla_equals_deepseek(rope: dict[str, Any]) -> None:
    """Transformers' DeepSeek-V3 attention over `[context | block]` under the block's mask: same rotation, same softmax scale."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    shared = {
        k: v for k, v in MLA.items() if k.startswith(("q_", "kv_", "qk_", "v_")) or k in ("hidden_size", "num_attention_heads")
    }
    theirs_config = DeepseekV3Config(
        **shared,
        num_key_value_heads=4,
        num_hidden_layers=1,
        rope_parameters=dict(rope),
        max_position_embeddings=2048,
        rope_interleave=True,
    )
    theirs_config._attn_implementation = "eager"
    theirs = DeepseekV3Attention(theirs_config, 0).eval()
    config = DSparkConfig(**MLA, rope_parameters=dict(rope), rope_interleave=True, mla_norm_eps=1e-6)
    ours = MLADraftAttention(config, 0).eval()
    g = torch.Generator().manual_seed(0)
    for p in theirs.parameters():
        p.copy_(torch.randn(p.shape, generator=g) * 0.3)
    ours.load_state_dict(theirs.state_dict())
    context, block = torch.randn(2, 300, 48, generator=g), torch.randn(2, 4, 48, generator=g)
    both = torch.cat([context, block], 1)
    tables = DeepseekV3RotaryEmbedding(theirs_config)(both, torch.arange(304)[None])
    expected = theirs(both, tables, torch.zeros(1, 1, 304, 304))[0][:, 300:]
    assert config.rope is not None
    before, here = (config.rope.tables(torch.arange(a, b)[None], torch.float32) for a, b in ((0, 300), (300, 304)))
    out, _ = ours(block, ours.keep(context, before), here, None)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-5)
    if rope["rope_type"] == "yarn":
        assert ours.scale == pytest.approx(16**-0.5 * mscale(32.0) ** 2)


def k3(seed: int = 0, **changes: Any) -> KimiK3DFlashDraftModel:
    torch.manual_seed(seed)
    model: Any = KimiK3DFlashDraftModel(KimiK3DFlashConfig(**{**MLA, **changes}))
    return model.double().eval()


def gqa(seed: int = 0, **changes: Any) -> DFlashDraftModel:
    torch.manual_seed(seed)
    keys = {
        k: MLA[k]
        for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "mask_token_id", "target_layer_ids")
    }
    config = DFlashConfig(
        **keys, num_attention_heads=4, num_key_value_heads=2, head_dim=16, block_size=4, initializer_range=0.3, **changes
    )
    return DFlashDraftModel(config).double().eval()


@pytest.mark.parametrize("make", [k3, gqa])
@torch.no_grad()
def test_context_at_or_after_the_anchor_changes_nothing(make: Any) -> None:
    model, length, anchor = make(), 12, 7
    mask = block_mask(torch.tensor([[anchor]]), torch.ones(1, 1, dtype=torch.bool), length, 4, dtype=torch.float64)
    context, noise = torch.randn(1, length, 96, dtype=torch.float64), torch.randn(1, 4, 48, dtype=torch.float64)
    positions = torch.cat([torch.arange(length), torch.arange(anchor, anchor + 4)])[None]

    def run(states: torch.Tensor) -> torch.Tensor:
        return model(position_ids=positions, attention_mask=mask, noise_embedding=noise, target_hidden=states)

    out = run(context)
    later = context.clone()
    later[:, anchor:] += 10.0
    assert torch.equal(out, run(later))
    earlier = context.clone()
    earlier[:, anchor - 1] += 1.0
    assert not torch.allclose(out, run(earlier))


@pytest.mark.parametrize("make", [k3, gqa])
@torch.no_grad()
def test_many_blocks_at_once_equal_one_at_a_time(make: Any) -> None:
    """The training layout is the decoding layout: each block as if its context ended at its anchor."""
    model, length, anchors = make(), 12, [3, 7, 8]
    context, noise = torch.randn(2, length, 96, dtype=torch.float64), torch.randn(2, 12, 48, dtype=torch.float64)
    positions = torch.cat([torch.arange(length)] + [torch.arange(a, a + 4) for a in anchors])[None].expand(2, -1)
    mask = block_mask(torch.tensor([anchors] * 2), torch.ones(2, 3, dtype=torch.bool), length, 4, dtype=torch.float64)
    together = model(position_ids=positions, attention_mask=mask, noise_embedding=noise, target_hidden=context)
    for i, anchor in enumerate(anchors):
        cache = model.new_cache()
        model.materialize(context[:, :anchor], cache)
        alone = model.forward_block(noise[:, 4 * i : 4 * i + 4], cache)
        torch.testing.assert_close(together[:, 4 * i : 4 * i + 4], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", ["query", "anchor"])
@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_sliding_window_per_layer(rule: str, causal: bool) -> None:
    """One mask a layer type while training is what decoding does, for both window rules."""
    sliding: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "window_rule": rule}
    model, length, anchor = gqa(**sliding, layer_is_causal=[causal, False]), 12, 9
    anchors, keep = torch.tensor([[anchor]]), torch.ones(1, 1, dtype=torch.bool)
    masks = {
        "sliding_attention": block_mask(anchors, keep, length, 4, causal=causal, window=5, window_rule=rule, dtype=torch.float64),
        "full_attention": block_mask(anchors, keep, length, 4, dtype=torch.float64),
    }
    context, noise = torch.randn(1, length, 96, dtype=torch.float64), torch.randn(1, 4, 48, dtype=torch.float64)
    positions = torch.cat([torch.arange(length), torch.arange(anchor, anchor + 4)])[None]
    trained = model(position_ids=positions, attention_mask=masks, noise_embedding=noise, target_hidden=context)
    cache = model.new_cache()
    model.materialize(context[:, :anchor], cache)
    torch.testing.assert_close(model.forward_block(noise, cache), trained, rtol=0, atol=1e-12)


def test_the_mask_of_a_narrow_window() -> None:
    """Decoding bounds the block itself too where it is not causal, as z-lab does."""
    seen = decode_mask(3, 6, dtype=torch.float32, device=torch.device("cpu"), window=2)
    assert seen is not None
    expected = [[0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1]]
    assert (seen[0, 0] == 0).long().tolist() == expected


@torch.no_grad()
def test_without_positions_and_causality_all_mask_positions_are_one() -> None:
    """Kimi K3's NoPE in a bidirectional block leaves nothing to tell its mask positions apart: one proposal for all of them."""

    def spread(model: Any) -> float:
        cache = model.new_cache()
        model.materialize(torch.randn(1, 6, 96, dtype=torch.float64), cache)
        anchor, mask = torch.randn(1, 1, 48, dtype=torch.float64), torch.randn(1, 1, 48, dtype=torch.float64)
        masks = model.forward_block(torch.cat([anchor, mask.expand(-1, 3, -1)], 1), cache)[:, 1:]
        return float((masks - masks[:, :1]).abs().max())

    assert spread(k3()) < 1e-12
    assert any("same hidden state" in line for line in review(k3().config))
    for model in (k3(layer_is_causal=[True, False]), gqa()):
        assert spread(model) > 1e-3
        assert not any("same hidden state" in line for line in review(model.config))


@torch.no_grad()
def test_cache_crop_and_order() -> None:
    model = k3()
    context, noise = torch.randn(1, 6, 96, dtype=torch.float64), torch.randn(1, 4, 48, dtype=torch.float64)
    cache = model.new_cache()
    model.materialize(context, cache)
    first = model.forward_block(noise, cache)
    assert (cache.get_seq_length(), cache.committed) == (10, 6)
    with pytest.raises(Exception, match="still holds a block"):
        model.materialize(context, cache)
    cache.crop(6)
    assert torch.equal(model.forward_block(noise, cache), first)
    cache.crop(4)
    model.materialize(context[:, 4:], cache)
    torch.testing.assert_close(model.forward_block(noise, cache), first, rtol=0, atol=1e-12)
    with pytest.raises(Exception, match="cannot crop"):
        cache.crop(99)


@torch.no_grad()
def test_stacked_projections_and_multipliers() -> None:
    """A fused qkv_proj computes what the three do; residual and attention multipliers are applied where they are said to be."""
    apart, fused = gqa(), gqa(stacked_qkv=True)
    weights = dict(apart.state_dict())
    for i in range(2):
        parts = [weights.pop(f"layers.{i}.self_attn.{n}_proj.weight") for n in "qkv"]
        weights[f"layers.{i}.self_attn.qkv_proj.weight"] = torch.cat(parts)
    fused.load_state_dict(weights, strict=True)
    context, noise = torch.randn(1, 6, 96, dtype=torch.float64), torch.randn(1, 4, 48, dtype=torch.float64)
    out = apart(noise_embedding=noise, target_hidden=context)
    torch.testing.assert_close(fused(noise_embedding=noise, target_hidden=context), out, rtol=0, atol=1e-12)
    silent = gqa(residual_multiplier=0.0)
    silent.load_state_dict(apart.state_dict())
    torch.testing.assert_close(silent(noise_embedding=noise, target_hidden=context), silent.norm(noise), rtol=0, atol=1e-12)
    same = gqa(attention_multiplier=16**-0.5, clip_qkv=1e9)
    same.load_state_dict(apart.state_dict())
    torch.testing.assert_close(same(noise_embedding=noise, target_hidden=context), out, rtol=0, atol=1e-12)
    clipped = gqa(clip_qkv=0.1)
    clipped.load_state_dict(apart.state_dict())
    bounded = {
        n: t.clamp(-0.1, 0.1) if n.split(".")[-2] in ("q_proj", "k_proj", "v_proj") else t for n, t in apart.state_dict().items()
    }
    apart.load_state_dict(bounded)
    torch.testing.assert_close(
        clipped(noise_embedding=noise, target_hidden=context),
        apart(noise_embedding=noise, target_hidden=context),
        rtol=0,
        atol=1e-12,
    )


@torch.no_grad()
def test_draft_mla_stays_in_lockstep_with_the_target() -> None:
    """The draft's attention module has exactly the target's tensors; one target layer's weights load into it."""
    from kconv.modeling.mla import KimiMLA

    model = k3()
    attention = model.layers[0].self_attn
    assert isinstance(attention, KimiMLA)
    target = KimiMLA(model.config)
    assert {n: t.shape for n, t in target.state_dict().items()} == {n: t.shape for n, t in attention.state_dict().items()}
    attention.load_state_dict(target.state_dict())


def test_drafts_own_no_tables_unless_the_file_does() -> None:
    names = [n for n, _ in k3().named_parameters()]
    assert not [n for n in names if "embed_tokens" in n or "lm_head" in n]
    assert len(names) == 13 * 2 + 3
    assert isinstance(k3().config, DraftConfig)
