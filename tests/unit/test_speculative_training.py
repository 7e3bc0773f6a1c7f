"""A draft trained under the contract helps its target: the bench in small, with what a figure alone would not show."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.bench.speculative import Language, Size, draft_loss, make_draft, measure, train_draft, train_target

SMALL = Size(5, 48, 4, 12, 4, 24, 8, 60, 60, 4e-3)


@pytest.fixture(scope="module")
def trained() -> tuple[Any, Language]:
    language = Language(SMALL.vocab)
    target, loss = train_target(SMALL, language, "cpu")
    assert loss < 3.0
    target.zero_grad(set_to_none=True)
    return target, language


@pytest.mark.parametrize("family", ["dflash", "dspark"])
def test_training_makes_the_draft_useful(trained: tuple[Any, Language], family: str) -> None:
    """Same tokens before and after, fewer target passes after; the target's weights are not moved."""
    target, language = trained
    weights = {name: p.clone() for name, p in target.named_parameters()}
    draft = make_draft(family, target)
    before = measure(target, draft.eval(), language, "cpu", 2, 24)
    train_draft(draft, target, SMALL, language, "cpu")
    after = measure(target, draft, language, "cpu", 2, 24)
    assert before["identical_tokens"]
    assert after["identical_tokens"]
    assert after["acceptance_length"] > 1.5
    assert after["acceptance_length"] > before["acceptance_length"]
    assert after["target_passes"]["speculative"] < after["target_passes"]["plain"]
    assert all(torch.equal(p, weights[name]) for name, p in target.named_parameters())


@pytest.mark.parametrize("family", ["dflash", "k3-dflash", "dspark"])
def test_every_parameter_learns(trained: tuple[Any, Language], family: str) -> None:
    """One backward pass reaches each of the draft's parameters but the confidence head's, and none of the target's."""
    target, language = trained
    draft = make_draft(family, target).train()
    ids = language.sample(4, 48, torch.Generator().manual_seed(0))
    draft_loss(draft, target, ids, torch.Generator().manual_seed(1)).backward()
    idle = {name for name, p in draft.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0}
    assert {name for name in idle if not name.startswith("confidence_head")} == set()
    assert all(p.grad.isfinite().all() for p in draft.parameters() if p.grad is not None)
    assert all(p.grad is None for p in target.parameters())
