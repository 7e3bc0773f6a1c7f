"""Packed documents: state and attention begin anew at each boundary."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from kconv.modeling import KimiK3TextConfig
from tests.modeling.tiny import LINEAR_48B, ids, model, of

LENGTHS = (5, 1, 70, 2, 66)
CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}
MODELS = {
    "k3": lambda: model(dtype=torch.float64),
    "kimi-linear": lambda: of(KimiK3TextConfig.from_k3(LINEAR_48B), dtype=torch.float64),
}


def apart(m: Any, x: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    return torch.cat([m(x[:, a:b], use_cache=False).logits for a, b in itertools.pairwise(cuts)], dim=1)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("given", ["cu_seqlens", "cu_seq_lens_q", "indexed mask", "position_ids"])
def test_packed_equals_apart(kind: str, given: str) -> None:
    m, cuts = MODELS[kind](), [0, *itertools.accumulate(LENGTHS)]
    x = ids(1, cuts[-1])
    cu, lengths = torch.tensor(cuts), torch.tensor(LENGTHS)
    kwargs: Any = {
        "cu_seqlens": {"cu_seqlens": cu},
        "cu_seq_lens_q": {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 70, "max_length_k": 70},
        "indexed mask": {"attention_mask": torch.repeat_interleave(torch.arange(1, 6), lengths)[None]},
        "position_ids": {"position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]},
    }[given]
    with torch.no_grad():
        torch.testing.assert_close(m(x, use_cache=False, **kwargs).logits, apart(m, x, cuts), **CLOSE)


def test_rows_of_documents_with_padding() -> None:
    m, x = MODELS["k3"](), ids(2, 20)
    mask = torch.zeros(2, 20, dtype=torch.long)
    mask[0, :8], mask[0, 8:17], mask[1, 3:9], mask[1, 9:20] = 1, 2, 1, 2
    with torch.no_grad():
        out = m(x, attention_mask=mask, use_cache=False).logits
        for row, a, b in ((0, 0, 8), (0, 8, 17), (1, 3, 9), (1, 9, 20)):
            torch.testing.assert_close(out[row : row + 1, a:b], m(x[row : row + 1, a:b], use_cache=False).logits, **CLOSE)


def test_documents_matter() -> None:
    """The same tokens as one document give other answers, so the tests above can fail."""
    m, x = MODELS["k3"](), ids(1, 20)
    with torch.no_grad():
        packed = m(x, cu_seqlens=torch.tensor([0, 9, 20]), use_cache=False).logits
        whole = m(x, use_cache=False).logits
    torch.testing.assert_close(packed[:, :9], whole[:, :9], **CLOSE)
    assert (packed[:, 9:] - whole[:, 9:]).abs().amax(-1).min() > 1e-6


def test_gradients_of_packed_documents() -> None:
    m, x = MODELS["k3"](), ids(1, 30)
    cuts = [0, 11, 30]
    m(x, cu_seqlens=torch.tensor(cuts), use_cache=False).logits.square().sum().backward()
    packed = {n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None}
    m.zero_grad()
    apart(m, x, cuts).square().sum().backward()
    for name, p in m.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(packed[name], p.grad, rtol=1e-8, atol=1e-9)
