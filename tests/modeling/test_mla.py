"""MLA: expanded and latent-space forms, key/value groups, caches and sequences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kconv.modeling.cache import MLACacheLayer
from kconv.modeling.mla import KimiMLA
from kconv.modeling.segments import from_mask


def layer(seed: int = 0, **changes: Any) -> KimiMLA:
    config = {
        "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "mla_norm_eps": 1e-6, "mla_use_output_gate": True,
        "_attn_implementation": "eager",
    } | changes  # fmt: skip
    torch.manual_seed(seed)
    return KimiMLA(SimpleNamespace(**config)).double()


def by_hand(mla: KimiMLA, x: torch.Tensor) -> torch.Tensor:
    """One row, head by head and query by query, from the formula alone."""

    def norm(t: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return t / (t.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    q = norm(x @ mla.q_a_proj.weight.T, mla.q_a_layernorm.weight) @ mla.q_b_proj.weight.T
    kv = x @ mla.kv_a_proj_with_mqa.weight.T
    latent, shared = norm(kv[:, :10], mla.kv_a_layernorm.weight), kv[:, 10:]
    heads = []
    for h in range(4):
        rows = mla.kv_b_proj.weight.view(-1, 14, 10)[h // mla.groups]
        keys, values = torch.cat([latent @ rows[:8].T, shared], -1), latent @ rows[8:].T
        out = []
        for t in range(x.shape[0]):
            p = (q[t, 12 * h : 12 * h + 12] @ keys[: t + 1].T / 12**0.5).softmax(-1)
            out.append(p @ values[: t + 1])
        heads.append(torch.stack(out))
    return (torch.cat(heads, -1) * (x @ mla.g_proj.weight.T).sigmoid()) @ mla.o_proj.weight.T


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_against_the_formula(kv_heads: int, attention: str) -> None:
    mla = layer(num_key_value_heads=kv_heads, _attn_implementation=attention)
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    torch.testing.assert_close(mla(x)[0], by_hand(mla, x[0]), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("steps", [(7, 1, 1), (1, 8), (4, 3, 2)])
def test_cached_steps_equal_one_pass(steps: tuple[int, ...], kv_heads: int) -> None:
    mla = layer(num_key_value_heads=kv_heads)
    x = torch.randn(2, sum(steps), 32, dtype=torch.float64)
    cache = MLACacheLayer()
    parts = [mla(part, None, cache) for part in x.split(list(steps), dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), mla(x), rtol=1e-11, atol=1e-13)
    assert cache.latent is not None
    assert cache.latent.shape == (2, sum(steps), 14)


def test_latent_space_equals_expansion() -> None:
    mla = layer(num_key_value_heads=2)
    x, past = torch.randn(2, 3, 32, dtype=torch.float64), torch.randn(2, 11, 14, dtype=torch.float64)
    allowed = torch.rand(2, 1, 3, 11) > 0.4
    allowed[..., 0] = True
    q = mla.queries(x)
    expanded = (
        torch.softmax((q @ mla.expand(past)[0].transpose(-1, -2) * mla.scale).masked_fill(~allowed, float("-inf")), -1)
        @ mla.expand(past)[1]
    )
    torch.testing.assert_close(mla._in_latent_space(q, past, mla.kv_b_proj.weight, allowed), expanded, rtol=1e-11, atol=1e-13)


def test_sequences_do_not_see_each_other() -> None:
    mla = layer()
    x = torch.randn(2, 8, 32, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 0], [0, 0, 1, 1, 1, 1, 1, 1]])
    out = mla(x, from_mask(mask))
    for row, a, b in ((0, 0, 3), (0, 3, 7), (1, 2, 8)):
        torch.testing.assert_close(out[row : row + 1, a:b], mla(x[row : row + 1, a:b]), rtol=1e-11, atol=1e-13)
    assert out[0, 7].abs().max() == 0


def test_without_query_rank_and_gate() -> None:
    mla = layer(q_lora_rank=None, mla_use_output_gate=False)
    assert set(dict(mla.named_parameters())) == {
        f"{n}.weight" for n in ("q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
    }
    assert mla(torch.randn(1, 3, 32, dtype=torch.float64)).shape == (1, 3, 32)
