"""dflash 0.1.0 (z-lab) live: DFlash and DFlash2 with grouped-query attention, and its decoder against ours."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kconv.modeling.drafts.sampling import Sampler
from kconv.speculative import load_draft, plain_generate, speculative_generate

pytestmark = pytest.mark.skipif(importlib.util.find_spec("dflash") is None, reason="needs dflash 0.1.0")

VOCAB, HIDDEN, BLOCK, TAPS = 13, 32, 4, [0, 2]
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False, "max_position_embeddings": 256, "rope_theta": 50000.0,
    "rope_scaling": YARN,
    "num_target_layers": 3, "block_size": BLOCK, "dflash_config": {"mask_token_id": 12, "target_layer_ids": TAPS},
    "layer_types": ["full_attention"] * 2, "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CONV = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4, "block_size": BLOCK}


def fill(model: torch.nn.Module, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        scale = 1.0 if p.ndim == 1 else p.shape[-1] ** -0.5
        p.data.copy_((1.0 if p.ndim == 1 else 0.0) + scale * (0.2 if p.ndim == 1 else 1.0) * torch.randn(p.shape, generator=g))


def theirs(folder: Path, family: str = "DFlashDraftModel", seed: int = 0, **changes: Any) -> Any:
    """z-lab's module with random weights, saved as it publishes them."""
    import dflash.model as reference
    from transformers import Qwen3Config

    config = {**CONFIG, "architectures": [family], **changes}
    if family == "DFlash2DraftModel":
        config["dflash_config"] = {**config["dflash_config"], **CONV}
    qwen = Qwen3Config(**json.loads(json.dumps(config)))
    qwen._attn_implementation = "eager"
    model = getattr(reference, family)(qwen).float().eval()
    fill(model, seed)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, folder / "model.safetensors", {"format": "pt"})
    return model


@pytest.fixture(scope="module")
def target() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=False, max_position_embeddings=256,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = Qwen3ForCausalLM(config).float().eval()
    fill(model, 3)
    return model


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "use_sliding_window": True}
CASES = [
    ("DFlashDraftModel", {}),
    ("DFlashDraftModel", {**SLIDING, "is_causal": False}),
    ("DFlashDraftModel", {**SLIDING, "is_causal": True}),
    ("DFlashDraftModel", {**SLIDING, "rope_scaling": None}),
    ("DFlashDraftModel", {"rope_scaling": {**YARN, "attention_factor": 1.4158883083359672}}),
    ("DFlash2DraftModel", {"rope_scaling": None}),
    ("DFlash2DraftModel", {**SLIDING, "rope_scaling": None}),
    ("DFlash2DraftModel", {**SLIDING, "rope_scaling": None, "is_causal": False}),
]


@pytest.mark.parametrize(("family", "changes"), CASES)
@torch.no_grad()
def test_one_block(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """Same hidden states at once and through the cache; a sliding layer is causal exactly where theirs is."""
    reference = theirs(tmp_path, family, **changes)
    ours = load_draft(tmp_path, dtype=torch.float32)
    length = 11
    context, noise = torch.randn(1, length, len(TAPS) * HIDDEN), torch.randn(1, BLOCK, HIDDEN)
    positions = torch.arange(length + BLOCK)[None]
    expected = reference(position_ids=positions, noise_embedding=noise, target_hidden=context)
    torch.testing.assert_close(ours(noise_embedding=noise, target_hidden=context), expected, rtol=0, atol=2e-5)
    cache = ours.new_cache()
    ours.materialize(context[:, :7], cache)
    ours.materialize(context[:, 7:], cache)
    torch.testing.assert_close(ours.forward_block(noise, cache), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", ["DFlashDraftModel", "DFlash2DraftModel"])
@torch.no_grad()
def test_generate_agrees(tmp_path: Path, target: Any, family: str) -> None:
    """Same tokens and the same acceptance lengths as `dflash_generate`, and the tokens of plain decoding.

    The last verification is left out of the comparison of lengths: theirs shortens the block there, which changes what a
    bidirectional draft predicts; ours keeps the block it was trained on and cuts the proposal.
    """
    import dflash.model as reference_module

    reference = theirs(tmp_path, family, seed=1, rope_scaling=None)
    ours = load_draft(tmp_path, dtype=torch.float32)
    kept = 0
    for seed in range(4):
        prompt = torch.randint(3, VOCAB, (1, 7 + seed), generator=torch.Generator().manual_seed(seed))
        out = _their_generate(reference_module, reference, target, prompt, 40)
        mine = speculative_generate(target, ours, prompt, 40)
        plain = plain_generate(target, prompt, 40)
        assert torch.equal(mine.tokens, plain.tokens)
        assert torch.equal(mine.tokens, out.output_ids)
        assert mine.acceptance_lengths[:-1] == out.acceptance_lengths[: len(mine.acceptance_lengths) - 1]
        kept += sum(a > 1 for a in mine.acceptance_lengths)
    assert kept > 10, "the comparison should see drafts that were kept"


def _their_generate(module: Any, draft: Any, target: Any, prompt: torch.Tensor, count: int) -> Any:
    """Their generator; its clock asks for a GPU."""
    module._cuda_time = lambda: 0.0
    return module.dflash_generate(draft, target, prompt, count, None, return_stats=True)


@torch.no_grad()
def test_selector_walks_like_theirs(tmp_path: Path) -> None:
    reference = theirs(tmp_path, "DFlash2DraftModel", seed=2, rope_scaling=None)
    ours = load_draft(tmp_path, dtype=torch.float32)
    hidden, anchor = torch.randn(2, BLOCK, HIDDEN), torch.tensor([3, 7])
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    path, _, _ = reference.propose(hidden[:, 1:], anchor, head, 0.0)
    assert torch.equal(ours.propose(hidden, anchor, head, Sampler()).tokens, path)


@torch.no_grad()
def test_logit_transform(tmp_path: Path) -> None:
    nested = {**CONFIG["dflash_config"], "output_multiplier": 0.25, "final_logit_softcapping": 3.0}
    reference = theirs(tmp_path, dflash_config=nested)
    ours = load_draft(tmp_path, dtype=torch.float32)
    hidden, head = torch.randn(2, 3, HIDDEN), torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    torch.testing.assert_close(ours.compute_logits(hidden, head), reference.compute_logits(hidden, head))
