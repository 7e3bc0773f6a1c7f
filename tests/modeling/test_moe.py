"""Router and experts against a plain loop over tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kconv.kernels.mxfp4 import decode
from kconv.modeling import KimiK3TextConfig, expert_paths
from kconv.modeling import experts as experts_module
from kconv.modeling.experts import KimiExperts
from kconv.modeling.moe import KimiMoE
from kconv.modeling.router import KimiRouter
from kconv.modeling.situ import situ
from tests.modeling.tiny import K3, ids, model


def config(**changes: Any) -> KimiK3TextConfig:
    return KimiK3TextConfig(**{**K3, **changes})


def seeded(module: torch.nn.Module, seed: int = 0) -> Any:
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in [*module.parameters(), *module.buffers()]:
            if p.dtype == torch.uint8:
                p.copy_(torch.randint(0, 256, p.shape, generator=gen, dtype=torch.uint8))
            else:
                p.copy_(0.3 * torch.randn(p.shape, generator=gen))
        for name, p in module.named_parameters():
            if name.endswith("_scale"):
                p.copy_(torch.randint(122, 126, p.shape, generator=gen, dtype=torch.uint8))
    return module.double()


@pytest.mark.parametrize(
    ("changes", "renormalised", "scaling"),
    [
        ({}, True, 1.0),
        ({"moe_renormalize": False, "routed_scaling_factor": 2.5}, False, 2.5),
        ({"num_experts_per_token": 1, "routed_scaling_factor": 2.0}, False, 2.0),
        ({"moe_router_activation_func": "softmax"}, True, 1.0),
    ],
)  # fmt: skip
def test_router(changes: dict[str, Any], renormalised: bool, scaling: float) -> None:
    router: KimiRouter = seeded(KimiRouter(config(**changes), 6))
    x = torch.randn(11, 48, dtype=torch.float64)
    indices, weights = router(x)
    logits = x @ router.weight.T
    scores = logits.softmax(-1) if "moe_router_activation_func" in changes else logits.sigmoid()
    for t in range(11):
        best = (scores[t] + router.e_score_correction_bias).topk(router.top_k).indices
        assert set(indices[t].tolist()) == set(best.tolist())
        chosen = scores[t][indices[t]]
        expected = chosen / (chosen.sum() + 1e-20) if renormalised else chosen
        torch.testing.assert_close(weights[t], expected * scaling)


def test_router_groups() -> None:
    """Only the best group may be chosen from, judged by its two best biased scores."""
    router: KimiRouter = seeded(KimiRouter(config(num_experts=8, num_expert_group=4, topk_group=1), 8))
    x = torch.randn(50, 48, dtype=torch.float64)
    indices, _ = router(x)
    biased = (x @ router.weight.T).sigmoid() + router.e_score_correction_bias
    best = biased.view(50, 4, 2).sum(-1).argmax(-1)
    assert torch.equal(indices // 2, best[:, None].expand(-1, 2))


def test_router_scores_are_fp32_in_a_bf16_model() -> None:
    router = KimiRouter(config(), 6).to(torch.bfloat16)
    torch.nn.init.normal_(router.weight)
    torch.nn.init.zeros_(router.e_score_correction_bias)
    x = torch.randn(5, 48, dtype=torch.bfloat16)
    indices, weights = router(x)
    scores = (x.float() @ router.weight.float().T).sigmoid().gather(1, indices)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))


def test_forced_routing() -> None:
    router: KimiRouter = seeded(KimiRouter(config(), 6))
    x = torch.randn(5, 48, dtype=torch.float64)
    router.forced = torch.tensor([[0, 5]] * 5)
    indices, weights = router(x)
    scores = (x @ router.weight.T).sigmoid()[:, [0, 5]]
    assert torch.equal(indices, router.forced)
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))


def matrices(experts: KimiExperts) -> tuple[torch.Tensor, torch.Tensor]:
    if not experts.packed:
        return experts.gate_up_proj, experts.down_proj  # type: ignore[return-value]
    return tuple(  # type: ignore[return-value]
        decode(getattr(experts, f"{n}_packed"), getattr(experts, f"{n}_scale"), torch.float64)
        for n in ("gate_up_proj", "down_proj")
    )


@pytest.mark.parametrize("experts_format", ["bf16", "packed"])
def test_experts_against_a_loop(experts_format: str) -> None:
    experts: KimiExperts = seeded(KimiExperts(config(experts_format=experts_format), 6))
    x, indices = torch.randn(9, 32, dtype=torch.float64), torch.stack([torch.randperm(5)[:2] for _ in range(9)])
    weights = torch.rand(9, 2, dtype=torch.float64)
    gate_up, down = matrices(experts)
    expected = torch.zeros_like(x)
    for t in range(9):
        for slot in range(2):
            e = indices[t, slot]
            gate, up = gate_up[e, :32] @ x[t], gate_up[e, 32:] @ x[t]
            expected[t] += weights[t, slot] * (down[e] @ situ(gate, up, 4.0, 25.0))
    torch.testing.assert_close(experts(x, indices, weights), expected, rtol=1e-11, atol=1e-12)


def test_packed_equals_its_decoded_matrices() -> None:
    """Bit for bit in every dtype of the model: decoding is exact and the products are the same."""
    packed: KimiExperts = seeded(KimiExperts(config(experts_format="packed"), 6))
    plain = KimiExperts(config(), 6).double()
    with torch.no_grad():
        for target, value in zip(plain.parameters(), matrices(packed), strict=True):
            target.copy_(value)
    indices, weights = torch.randint(0, 6, (20, 2)), torch.rand(20, 2)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = torch.randn(20, 32).to(dtype)
        assert torch.equal(packed.to(dtype)(x, indices, weights), plain.to(dtype)(x, indices, weights)), dtype


@pytest.mark.parametrize("experts_format", ["bf16", "packed"])
def test_grouped_products_equal_the_loop(monkeypatch: pytest.MonkeyPatch, experts_format: str) -> None:
    """The path of bf16 on CUDA, whose grouped product torch also has on the CPU; packed experts two at a time."""
    experts: KimiExperts = seeded(KimiExperts(config(experts_format=experts_format), 6)).to(torch.bfloat16)
    x, weights = torch.randn(20, 32).bfloat16().requires_grad_(experts_format == "bf16"), torch.rand(20, 2)
    indices = torch.stack([torch.randperm(5)[:2] for _ in range(20)])
    results = []
    for grouped in (False, True):
        monkeypatch.setattr(expert_paths, "can_group", lambda x, inter, grouped=grouped: grouped)
        monkeypatch.setattr(experts_module, "DECODE_AT_ONCE", 2)
        y = experts(x, indices, weights)
        results.append([y, *(torch.autograd.grad(y.sum(), x) if x.requires_grad else ())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-3)


def test_gradient_flows_through_packed_experts() -> None:
    packed: KimiExperts = seeded(KimiExperts(config(experts_format="packed"), 6))
    indices, weights = torch.randint(0, 6, (3, 2)), torch.rand(3, 2, dtype=torch.float64).requires_grad_()
    x = torch.randn(3, 32, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, w: packed(a, indices, w), (x, weights))


def test_experts_are_lighter_packed() -> None:
    size = {
        f: sum(p.numel() * p.element_size() for p in KimiExperts(config(experts_format=f), 6).to(torch.bfloat16).parameters())
        for f in ("packed", "bf16")
    }  # fmt: skip
    assert size["packed"] / size["bf16"] == pytest.approx((4 + 8 / 32) / 16)


def test_latent_norm_and_shared_experts() -> None:
    moe: KimiMoE = seeded(KimiMoE(config(), 6))
    x = torch.randn(2, 3, 48, dtype=torch.float64)
    flat = x.view(6, 48)
    y = moe.experts(flat @ moe.routed_expert_down_proj.weight.T, *moe.gate(flat))
    y = y / (y.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * moe.routed_expert_norm.weight
    expected = (y @ moe.routed_expert_up_proj.weight.T).view_as(x) + moe.shared_experts(x)
    torch.testing.assert_close(moe(x), expected)
    shared = moe.shared_experts
    gate, up = F.linear(x, shared.gate_proj.weight), F.linear(x, shared.up_proj.weight)
    torch.testing.assert_close(shared(x), F.linear(situ(gate, up, 4.0, 25.0), shared.down_proj.weight))


def test_situ() -> None:
    g, u = torch.randn(2, 50, dtype=torch.float64) * 30
    expected = 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25)
    torch.testing.assert_close(situ(g, u, 4.0, 25.0), expected)
    torch.testing.assert_close(situ(g, u, None, None), torch.tanh(g) * torch.sigmoid(g) * u)
    assert situ(g.bfloat16(), u.bfloat16(), 4.0, 25.0).dtype == torch.bfloat16


def test_pruned_layers_have_their_own_counts() -> None:
    pruned = model(num_experts_per_layer=[None, 6, 3, 4, 2])
    counts = [layer.mlp.gate.weight.shape[0] for layer in pruned.model.layers[1:]]
    assert counts == [6, 3, 4, 2]
    assert pruned(ids(1, 7)).logits.shape == (1, 7, 97)
