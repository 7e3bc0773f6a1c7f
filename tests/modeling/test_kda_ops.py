"""KDA's chunk form against its recurrence and against fla's naive form."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kconv.modeling import kda_ops
from kconv.modeling.kda_ops import CHUNK, Delta, Gate

H, K, V = 2, 8, 6


def inputs(batch: int, length: int, seed: int = 0, dtype: torch.dtype = torch.float64, decay: float = 5.0) -> Delta:
    gen = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(batch, length, H, K, generator=gen, dtype=dtype) for _ in "qk")
    v = torch.randn(batch, length, H, V, generator=gen, dtype=dtype)
    g = -decay * torch.rand(batch, length, H, K, generator=gen, dtype=dtype)
    return Delta(q, k, v, g, torch.rand(batch, length, H, generator=gen, dtype=dtype))


def by_recurrence(x: Delta, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return kda_ops.delta_attention(x, state, None, recurrent_up_to=10**9)


@pytest.mark.parametrize("length", [1, 5, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 17])
@pytest.mark.parametrize("decay", [0.01, 5.0, 300.0])
def test_chunk_equals_recurrence(length: int, decay: float) -> None:
    x = inputs(2, length, decay=decay)
    state = torch.randn(2, H, K, V, dtype=torch.float64)
    o, s = kda_ops.delta_attention(x, state, None, recurrent_up_to=0)
    o_ref, s_ref = by_recurrence(x, state)
    torch.testing.assert_close(o, o_ref, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(s, s_ref, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("decay", [5.0, 300.0])
def test_chunk_in_fp32_is_as_accurate_as_the_recurrence(decay: float) -> None:
    """Differences of running sums must not cost digits: strong decays sum to hundreds within a chunk."""
    x = inputs(1, 200, decay=decay)
    exact, _ = by_recurrence(x, None)
    low = Delta(*(t.float() for t in x))
    chunk = (kda_ops.delta_attention(low, None, None, recurrent_up_to=0)[0] - exact).abs().max()
    step = (by_recurrence(low, None)[0] - exact).abs().max()
    assert chunk < 3 * step + 1e-6


def test_against_fla_naive() -> None:
    pytest.importorskip("fla")
    from fla.ops.kda.naive import naive_recurrent_kda

    x = inputs(2, 150, dtype=torch.float32)
    state = torch.randn(2, H, K, V)
    o_ref, s_ref = naive_recurrent_kda(
        kda_ops.unit(x.q), kda_ops.unit(x.k), x.v, x.g, x.beta, initial_state=state, output_final_state=True
    )
    o, s = kda_ops.delta_attention(x, state, None)
    torch.testing.assert_close(o, o_ref, rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(s, s_ref, rtol=1e-4, atol=2e-6)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 150), min_size=1, max_size=5))
def test_sequences_laid_end_to_end_equal_sequences_apart(lengths: list[int]) -> None:
    bounds = [0, *itertools.accumulate(lengths)]
    x = inputs(1, bounds[-1], seed=3)
    state = torch.randn(len(lengths), H, K, V, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    o, s = kda_ops.delta_attention(x, state, bounds)
    for i, (a, b) in enumerate(itertools.pairwise(bounds)):
        if a == b:
            assert torch.equal(s[i], state[i])
            continue
        o_ref, s_ref = by_recurrence(Delta(*(t[:, a:b] for t in x)), state[i : i + 1])
        torch.testing.assert_close(o[:, a:b], o_ref, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(s[i : i + 1], s_ref, rtol=1e-10, atol=1e-12)


def test_gradients() -> None:
    """Autograd through the chunk form against finite differences, over a chunk boundary and an initial state."""
    x = [t[:, :, :1, :3] if t.ndim == 4 else t[:, :, :1] for t in inputs(1, CHUNK + 3, decay=1.0)]  # one small head
    state = torch.randn(1, 1, 3, 3, dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in (*x, state)]

    def run(*a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return kda_ops.delta_attention(Delta(*a[:5]), a[5], None, recurrent_up_to=0)

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


def test_gradients_equal_the_recurrence() -> None:
    leaves = [t.clone().requires_grad_() for t in inputs(2, 130)]
    weight = torch.randn(2, 130, H, V, dtype=torch.float64)
    chunk = torch.autograd.grad((kda_ops.delta_attention(Delta(*leaves), None, None)[0] * weight).sum(), leaves)
    step = torch.autograd.grad((by_recurrence(Delta(*leaves), None)[0] * weight).sum(), leaves)
    for a, b in zip(chunk, step, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("bound", "z", "expected"), [(-5.0, 0.0, -2.5), (None, 0.0, -0.6931471805599453)])
def test_gate(bound: float | None, z: float, expected: float) -> None:
    zero = torch.zeros(1, dtype=torch.float64)
    g = Gate(zero, zero, bound).log_decay(torch.full((1, 1, 1, 1), z, dtype=torch.float64))
    assert g.item() == pytest.approx(expected, abs=1e-15)


def test_gate_uses_a_rate_per_head_and_a_bias_per_channel() -> None:
    z = torch.randn(1, 4, 2, 3, dtype=torch.float64)
    a_log, bias = torch.tensor([0.1, 1.2], dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    g = Gate(a_log, bias, -5.0).log_decay(z)
    for h, d in itertools.product(range(2), range(3)):
        expected = -5.0 * torch.sigmoid(a_log[h].exp() * (z[0, :, h, d] + bias[3 * h + d]))
        torch.testing.assert_close(g[0, :, h, d], expected)
