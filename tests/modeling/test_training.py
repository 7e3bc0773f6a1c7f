"""Forward and backward: finite differences, checkpointing, a loss that falls, frozen packed experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kconv.modeling import KimiK3ForCausalLM, KimiK3TextConfig
from tests.modeling.tiny import K3, LINEAR_48B, ids, model, of

KINDS = {
    "k3": lambda: model(dtype=torch.float64),
    "kimi-linear": lambda: of(KimiK3TextConfig.from_k3(LINEAR_48B), dtype=torch.float64),
    "packed": lambda: model(dtype=torch.float64, experts_format="packed"),
}


def loss_and_gradients(m: Any, x: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    m.zero_grad()
    loss = m(x, labels=x).loss
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_against_finite_differences(kind: str) -> None:
    """The derivative along a random direction of each parameter, by central differences in float64."""
    m, x = KINDS[kind](), ids(2, 11)
    _, gradients = loss_and_gradients(m, x)
    gen, step = torch.Generator().manual_seed(0), 1e-6
    for name, p in m.named_parameters():
        if not p.requires_grad:
            assert name not in gradients
            continue
        direction = torch.randn(p.shape, generator=gen, dtype=torch.float64)
        values = []
        with torch.no_grad():
            for sign in (1, -1):
                p.add_(direction, alpha=sign * step)
                values.append(m(x, labels=x).loss.item())
                p.sub_(direction, alpha=sign * step)
        expected = (values[0] - values[1]) / (2 * step)
        assert (gradients[name] * direction).sum().item() == pytest.approx(expected, rel=2e-5, abs=2e-8), name


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_nothing(reentrant: bool) -> None:
    m, x = KINDS["k3"](), ids(2, 20)
    m.train()
    loss, gradients = loss_and_gradients(m, x)
    m.gradient_checkpointing_enable({"use_reentrant": reentrant})
    m.enable_input_require_grads()
    again, checkpointed = loss_and_gradients(m, x)
    assert again == loss
    assert gradients.keys() == checkpointed.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(checkpointed[name], gradient, rtol=1e-10, atol=1e-12)


def test_checkpointing_recomputes() -> None:
    """It must save memory: with it, a layer runs once more during the backward pass."""
    m, x = KINDS["k3"](), ids(1, 6)
    m.train()
    m.gradient_checkpointing_enable({"use_reentrant": False})
    calls = []
    m.model.layers[0].self_attn.register_forward_hook(lambda *a: calls.append(1))
    m(x, labels=x).loss.backward()
    assert len(calls) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_few_steps_lower_the_loss(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    m: Any = KimiK3ForCausalLM(KimiK3TextConfig(**K3))
    m.to(dtype).train()
    optimizer = torch.optim.AdamW(m.parameters(), lr=3e-3)
    x, losses = ids(4, 24), []
    for _ in range(12):
        loss = m(x, labels=x).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[0] == pytest.approx(torch.tensor(97.0).log().item(), abs=0.3)
    assert losses[-1] < losses[0] - 0.7
    assert m.model.layers[0].self_attn.A_log.dtype == torch.float32


def test_initialisation_is_seeded_and_as_documented() -> None:
    torch.manual_seed(3)
    a = KimiK3ForCausalLM(KimiK3TextConfig(**K3))
    torch.manual_seed(3)
    b = KimiK3ForCausalLM(KimiK3TextConfig(**K3))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    parameters = dict(a.named_parameters())
    assert parameters["lm_head.weight"].std().item() == pytest.approx(0.1, rel=0.1)
    assert parameters["model.layers.1.mlp.experts.down_proj"].std().item() == pytest.approx(0.1, rel=0.1)
    assert torch.equal(parameters["model.norm.weight"], torch.ones(48))
    assert parameters["model.layers.0.self_attn.A_log"].abs().max() == 0
    step = torch.nn.functional.softplus(parameters["model.layers.0.self_attn.dt_bias"])
    assert step.min() > 0.9e-3
    assert step.max() < 0.11
    rate = KimiK3ForCausalLM(KimiK3TextConfig.from_k3(LINEAR_48B)).model.layers[0].self_attn.A_log.exp()
    assert rate.min() >= 1
    assert rate.max() <= 16
