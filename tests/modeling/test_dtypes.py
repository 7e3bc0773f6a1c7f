"""fp32 parameters stay fp32, codes stay codes, float64 is float64 everywhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kconv.modeling import KimiK3ForCausalLM
from kconv.modeling.kda_ops import Delta, delta_attention
from tests.modeling.tiny import ids, model

FP32 = re.compile(r"(A_log|dt_bias|[qkv]_conv1d\.weight|o_norm\.weight|e_score_correction_bias)$")
CASTS = {
    "to(bfloat16)": (lambda m: m.to(torch.bfloat16), torch.bfloat16),
    "bfloat16()": (lambda m: m.bfloat16(), torch.bfloat16),
    "half()": (lambda m: m.half(), torch.float16),
    "through float64": (lambda m: m.double().to(torch.bfloat16), torch.bfloat16),
    "modules one by one": (lambda m: [c.to(torch.bfloat16) for c in m.modules()] and m, torch.bfloat16),
}


def check(m: Any, dtype: torch.dtype) -> None:
    seen = set()
    for name, p in m.state_dict().items():
        if p.dtype == torch.uint8:
            seen.add("codes")
            continue
        kept = FP32.search(name)
        seen.add("fp32" if kept else "cast")
        assert p.dtype == (torch.float32 if kept and dtype.itemsize < 4 else dtype), name
    assert seen == {"codes", "fp32", "cast"}


@pytest.mark.parametrize("cast", CASTS)
def test_casts(cast: str) -> None:
    m = model(experts_format="packed")
    before = {n: p.clone() for n, p in m.state_dict().items() if FP32.search(n) or p.dtype == torch.uint8}
    fn, dtype = CASTS[cast]
    m = fn(m)
    check(m, dtype)
    after = m.state_dict()
    assert all(torch.equal(after[n], p) for n, p in before.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_casts_reach_every_parameter(dtype: torch.dtype) -> None:
    check(model(experts_format="packed").to(dtype), dtype)
    check(model(experts_format="packed").double().to(dtype), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_from_pretrained(tmp_path: Path, dtype: torch.dtype) -> None:
    m = model(experts_format="packed")
    m.save_pretrained(tmp_path)
    loaded = KimiK3ForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    check(loaded, dtype)
    kept = m.state_dict()
    for name, p in loaded.state_dict().items():
        if FP32.search(name):
            assert torch.equal(p.float(), kept[name]), name


def test_assigning_narrow_tensors_widens_them() -> None:
    m = model(experts_format="packed")
    narrow = {n: t.bfloat16() if t.is_floating_point() else t for n, t in m.state_dict().items()}
    m.load_state_dict(narrow, assign=True)
    check(m, torch.bfloat16)


def test_gradients_are_cast_with_their_parameters() -> None:
    m = model()
    m(ids(1, 5), labels=ids(1, 5)).loss.backward()
    m.to(torch.bfloat16)
    for name, p in m.named_parameters():
        assert p.grad is None or p.grad.dtype == p.dtype, name


def test_float64_has_no_fp32_inside() -> None:
    """Two models that differ by 1e-12 in one weight must differ in their logits: fp32 anywhere would swallow it."""
    m = model(dtype=torch.float64)
    x = ids(1, 9)
    with torch.no_grad():
        first = m(x).logits
        m.model.layers[0].self_attn.q_proj.weight.mul_(1 + 1e-12)
        second = m(x).logits
    assert first.dtype == torch.float64
    assert 0 < (first - second).abs().max() < 1e-9


def test_autocast_does_not_narrow_the_router_or_the_recurrence() -> None:
    """Under autocast both stay in fp32: the same inputs give the same choice, weights and states to the last bit."""
    layer = model().model.layers[1]
    x, (q, k, v, g) = torch.randn(7, 48), (torch.randn(1, 20, 3, 16) for _ in range(4))
    delta = Delta(q, k, v, -g.abs(), torch.rand(1, 20, 3))
    plain = [*layer.mlp.gate(x), *delta_attention(delta, None, None)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = [*layer.mlp.gate(x), *delta_attention(delta, None, None)]
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


def test_autocast_training_step() -> None:
    m = model().train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = m(ids(2, 12), labels=ids(2, 12)).loss
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in m.parameters() if p.grad is not None)
