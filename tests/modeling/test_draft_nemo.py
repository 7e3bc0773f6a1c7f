"""NeMo AutoModel 0.7.0 live: its K3 DFlash, DSpark and Eagle3 drafts, loaded from what it would save."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kconv.modeling.drafts.mask import block_mask
from kconv.modeling.drafts.sampling import Sampler
from kconv.speculative import load_draft
from tests.modeling import draft_reference
from tests.modeling.draft_reference import ANCHORS, BLOCK, B, S

NEEDED = ("nemo_automodel", "fla", "triton")
pytestmark = pytest.mark.skipif(any(importlib.util.find_spec(n) is None for n in NEEDED), reason=f"needs {', '.join(NEEDED)}")
KINDS = ("dflash", "dspark-vanilla", "dspark-gated", "dspark-rnn", "eagle3-3", "eagle3-31")
ROOT = Path(draft_reference.__file__).parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every kind, made by NeMo in a process of its own."""
    folder = tmp_path_factory.mktemp("nemo-drafts")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, draft_reference.__file__, str(folder), *KINDS]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return {kind: folder / kind for kind in KINDS}


def load(folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    return load_draft(folder, dtype=torch.float32), load_file(folder / "io.safetensors")


def close(a: torch.Tensor, b: torch.Tensor, atol: float = 2e-5) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


@torch.no_grad()
def test_dflash(made: dict[str, Path]) -> None:
    model, io = load(made["dflash"])
    assert model.config.mla_norm_eps == 1e-6
    out = model(attention_mask=io["mask"], noise_embedding=io["noise"], target_hidden=io["target_hidden"])
    close(out, io["output"])
    close(model.compute_logits(out, lambda h: h @ io["head"].T), io["logits"])
    assert model.config.input_embedding_scale == 2.0


@torch.no_grad()
def test_the_eps_of_the_latent_norms_is_seen(made: dict[str, Path]) -> None:
    """With 1e-5, which no file contradicts, the same weights give other answers: the trap is real and this test would see it."""
    io = load_file(made["dflash"] / "io.safetensors")
    wrong = load_draft(made["dflash"], dtype=torch.float32, mla_norm_eps=1e-5)
    out = wrong(attention_mask=io["mask"], noise_embedding=io["noise"], target_hidden=io["target_hidden"])
    assert (out - io["output"]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@torch.no_grad()
def test_dspark(made: dict[str, Path], kind: str) -> None:
    model, io = load(made[f"dspark-{kind}"])
    assert model.config.mla_norm_eps == 1e-5
    assert model.config.sample_from_anchor
    assert model.config.num_draft_tokens == BLOCK
    out = model(attention_mask=io["mask"], noise_embedding=io["noise"], target_hidden=io["target_hidden"])
    close(out, io["output"])
    blocks = out.unflatten(1, (-1, BLOCK))
    close(model.block_logits(blocks, io["previous"]), io["logits"])
    close(model.confidence(blocks, io["previous"]), io["confidence"])
    proposal = model.propose(blocks[:, 0], io["anchor"], None, Sampler())
    assert torch.equal(proposal.tokens, io["drafted"])


@pytest.mark.parametrize("variant", ["3", "31"])
@torch.no_grad()
def test_eagle3(made: dict[str, Path], variant: str) -> None:
    """NeMo's training-time test against real decoding steps: a step at t sees the committed states and its own drafts."""
    model, io = load(made[f"eagle3-{variant}"])
    close(model.project_target(io["aux"]), io["projected"])
    for t in (0, 4, S - 4):
        cache = model.new_cache()
        states = model(input_ids=io["ids"][:, : t + 1], states=io["projected"][:, : t + 1], cache=cache)[:, -1:]
        close(model.head_logits(states)[:, 0], io["logits"][0][:, t])
        for step in (1, 2):
            states = model(input_ids=io["ids"][:, t + step : t + step + 1], states=states, cache=cache)
            close(model.head_logits(states)[:, 0], io["logits"][step][:, t])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_masks_equal_nemo(causal: bool, window: int | None, packed: bool) -> None:
    from nemo_automodel.components.attention.dflash_mask import create_dflash_sdpa_mask

    anchors = torch.tensor([list(ANCHORS), [1, 7, 0]])
    keep = torch.tensor([[True, True, True], [True, True, False]])
    documents = torch.tensor([[0] * 5 + [1] * (S - 5), [0] * 2 + [1] * 8 + [2] * (S - 10)])
    own = documents.gather(1, anchors)
    theirs = create_dflash_sdpa_mask(
        anchors,
        keep,
        S,
        BLOCK,
        torch.device("cpu"),
        torch.float32,
        causal,
        documents if packed else None,
        own if packed else None,
        window,
    )
    ours = block_mask(anchors, keep, S, BLOCK, causal=causal, window=window, documents=documents if packed else None)
    assert torch.equal(theirs, ours)
    assert ours.shape == (B, 1, 3 * BLOCK, S + 3 * BLOCK)


def drafts(kind: str) -> Any:
    from kconv.modeling.drafts.dflash import DFlashConfig, DFlashDraftModel
    from kconv.modeling.drafts.dflash_k3 import KimiK3DFlashConfig, KimiK3DFlashDraftModel

    shared: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
        "mask_token_id": 96, "target_layer_ids": [0, 2], "block_size": 4, "target_num_hidden_layers": 7,
        "input_embedding_scale": 2.0,
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "gqa":
        return DFlashDraftModel(DFlashConfig(**shared, num_key_value_heads=2, head_dim=12))
    mla: dict[str, Any] = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    return KimiK3DFlashDraftModel(KimiK3DFlashConfig(**shared, **mla))


@pytest.mark.parametrize("kind", ["mla", "gqa"])
def test_nemos_trainer_trains_our_drafts_unchanged(kind: str) -> None:
    from nemo_automodel.components.speculative.dflash.core import DFlashTrainerModule

    draft = drafts(kind)
    head, table = torch.nn.Linear(48, 97, bias=False), torch.nn.Embedding(97, 48)
    trainer = DFlashTrainerModule(draft, head, table, 96, block_size=4, attention_backend="sdpa", num_anchors=3)
    ids, states = torch.randint(0, 90, (2, 20)), torch.randn(2, 20, 96)
    optimizer, losses = torch.optim.Adam(draft.parameters(), lr=1e-2), []
    for _ in range(6):
        torch.manual_seed(1)
        loss = trainer(ids, states, torch.ones(2, 20)).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in draft.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
    assert (draft.target_layer_ids, draft.config.num_target_layers, draft.input_embedding_scale) == ([0, 2], 7, 2.0)


@pytest.mark.parametrize("target, layers", [(93, 5), (93, 1), (61, 6), (27, 3), (7, 2)])
def test_taps_that_nobody_names_are_spread_as_nemo_spreads_them(target: int, layers: int) -> None:
    from nemo_automodel.components.speculative.dflash.draft_qwen3 import build_target_layer_ids

    from kconv.modeling.drafts.config import spread_taps

    assert spread_taps(target, layers) == build_target_layer_ids(target, layers)
