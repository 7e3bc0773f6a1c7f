"""Cached decoding equals the full pass: padding, chunks of a prompt, beams, speculative decoding, embeddings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kconv.errors import KconvError
from kconv.modeling import KimiK3Cache, KimiK3TextConfig
from kconv.modeling.compat import CACHE_NAME
from tests.modeling.tiny import LINEAR_48B, ids, model, of

KINDS = {
    "k3": lambda **c: model(dtype=torch.float64, **c),
    "packed": lambda **c: model(dtype=torch.float64, experts_format="packed", **c),
    "kimi-linear": lambda **c: of(KimiK3TextConfig.from_k3(LINEAR_48B), dtype=torch.float64),
    "kv groups": lambda **c: model(dtype=torch.float64, num_key_value_heads=2, **c),
}
CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}


def full(m: Any, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return m(x, use_cache=False, **kwargs).logits


def steps(m: Any, x: torch.Tensor, sizes: list[int], mask: torch.Tensor | None = None) -> torch.Tensor:
    cache, out, at = KimiK3Cache(m.config), [], 0
    for part in x.split(sizes, dim=1):
        at += part.shape[1]
        with torch.no_grad():
            out.append(m(part, attention_mask=None if mask is None else mask[:, :at], cache=cache).logits)
    assert cache.get_seq_length() == x.shape[1]
    return torch.cat(out, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [[1] * 12, [8, 1, 1, 1, 1], [3, 9], [5, 4, 3]])
def test_cached_equals_full(kind: str, sizes: list[int]) -> None:
    m, x = KINDS[kind](), ids(2, 12)
    torch.testing.assert_close(steps(m, x, sizes), full(m, x), **CLOSE)


@pytest.mark.parametrize("sizes", [[12], [7, 1, 1, 1, 1, 1], [2, 2, 8], [1] * 12])
@pytest.mark.parametrize("side", ["left", "right", "both", "holes"])
def test_padding(side: str, sizes: list[int]) -> None:
    """Padded rows equal unpadded rows, whole or in cached steps that may begin with rows of nothing but padding."""
    m, x = KINDS["k3"](), ids(3, 12)
    mask = torch.ones(3, 12, dtype=torch.long)
    rows = {
        "left": {1: slice(0, 5), 2: slice(0, 2)}, "right": {1: slice(9, 12), 2: slice(4, 12)},
        "both": {1: slice(0, 4), 2: slice(10, 12)}, "holes": {0: slice(3, 5), 1: slice(6, 7), 2: slice(0, 1)},
    }[side]  # fmt: skip
    for row, where in rows.items():
        mask[row, where] = 0
    out = steps(m, x, sizes, mask) if len(sizes) > 1 else full(m, x, attention_mask=mask)
    for row in range(3):
        valid = mask[row].bool()
        torch.testing.assert_close(out[row][valid], full(m, x[row : row + 1, valid])[0], **CLOSE)


@pytest.mark.parametrize("side", ["left", "right"])
def test_long_rows_of_uneven_length(side: str) -> None:
    """Over many chunks: what goes wrong only after hundreds of tokens shows here."""
    m, x = KINDS["k3"](), ids(3, 530)
    lengths, mask = (530, 301, 65), torch.zeros(3, 530, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, slice(530 - length, None) if side == "left" else slice(0, length)] = 1
    out = steps(m, x, [512, 18], mask)
    for row in range(3):
        valid = mask[row].bool()
        torch.testing.assert_close(out[row][valid], full(m, x[row : row + 1, valid])[0], **CLOSE)


def greedy(m: Any, x: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        x = torch.cat([x, full(m, x)[:, -1:].argmax(-1)], 1)
    return x


@pytest.mark.parametrize("kind", KINDS)
def test_generate(kind: str) -> None:
    m, x = KINDS[kind](), ids(2, 9)
    out = m.generate(x, max_new_tokens=7, do_sample=False, eos_token_id=None)
    assert torch.equal(out, greedy(m, x, 7))


def test_generate_with_left_padding() -> None:
    m, x = KINDS["k3"](), ids(2, 9)
    mask = torch.ones_like(x)
    mask[1, :4] = 0
    out = m.generate(x, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert torch.equal(out[:1], greedy(m, x[:1], 6))
    assert torch.equal(out[1:, 4:], greedy(m, x[1:, 4:], 6))


def test_generate_without_cache_and_from_embeddings() -> None:
    m, x = KINDS["k3"](), ids(1, 6)
    expected = greedy(m, x, 5)
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    assert torch.equal(m.generate(x, use_cache=False, **options), expected)
    assert torch.equal(m.generate(inputs_embeds=m.get_input_embeddings()(x), **options), expected[:, 6:])


def test_beams_reorder_the_cache() -> None:
    m, x = KINDS["k3"](), ids(2, 6)
    options = {"max_new_tokens": 5, "num_beams": 4, "do_sample": False, "eos_token_id": None}
    assert torch.equal(m.generate(x, **options), m.generate(x, use_cache=False, **options))


def test_speculative_decoding_with_another_model() -> None:
    m, draft = KINDS["k3"](), model(seed=5, dtype=torch.float64)
    x = ids(1, 8)
    out = m.generate(x, assistant_model=draft, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert torch.equal(out, greedy(m, x, 12))


@pytest.mark.parametrize("removed", [1, 3, 5])
@pytest.mark.parametrize("sizes", [[5], [2, 3], [1, 1, 1, 1, 1]])
def test_crop_goes_back(removed: int, sizes: list[int]) -> None:
    m, x = KINDS["k3"](), ids(2, 12)
    cache = KimiK3Cache(m.config)
    with torch.no_grad():
        m(x[:, :4], cache=cache)
        cache.activate_past_recording()
        for part in x[:, 4:9].split(sizes, dim=1):
            m(part, cache=cache)
        cache.crop(-removed)
        rest = m(x[:, 9 - removed :], cache=cache).logits
    assert cache.get_seq_length() == 12
    torch.testing.assert_close(rest, full(m, x)[:, 9 - removed :], **CLOSE)


def test_crop_needs_a_recording() -> None:
    m, cache = KINDS["k3"](), None
    cache = KimiK3Cache(m.config)
    m(ids(1, 4), cache=cache)
    with pytest.raises(KconvError, match="cannot take 2 tokens back"):
        cache.crop(-2)


def test_cache_is_compressed() -> None:
    m, cache = KINDS["k3"](), None
    cache = KimiK3Cache(m.config)
    with torch.no_grad():
        m(ids(2, 10), cache=cache)
    assert cache.layers[2].latent.shape == (2, 10, 16 + 4)
    assert cache.layers[0].state.shape == (2, 3, 16, 16)
    assert cache.layers[0].conv.shape == (2, 3, 3, 48)


def test_state_is_fp32_in_a_bf16_model() -> None:
    m = model(dtype=torch.bfloat16)
    cache = KimiK3Cache(m.config)
    with torch.no_grad():
        m(ids(1, 10), cache=cache)
    assert cache.layers[0].state.dtype == torch.float32
    assert cache.layers[2].latent.dtype == torch.bfloat16


def test_outputs() -> None:
    m, x = KINDS["k3"](), ids(2, 7)
    with torch.no_grad():
        out = m(x, output_hidden_states=True)
        assert out[CACHE_NAME].get_seq_length() == 7
        assert len(out.hidden_states) == 6
        assert torch.equal(m.lm_head(out.hidden_states[-1]), out.logits)
        assert torch.equal(out.hidden_states[0], m.get_input_embeddings()(x))
        torch.testing.assert_close(m(x, logits_to_keep=2).logits, out.logits[:, -2:])
        torch.testing.assert_close(m(x, logits_to_keep=torch.tensor([0, 3])).logits, out.logits[:, [0, 3]])
        torch.testing.assert_close(m(inputs_embeds=out.hidden_states[0]).logits, out.logits)
        mask = torch.ones_like(x)
        mask[0, 5:] = 0
        torch.testing.assert_close(m(x, padding_mask=mask == 0).logits, m(x, attention_mask=mask).logits)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "exactly one of input_ids"),
        ({"input_ids": ids(2, 4), "attention_mask": torch.ones(2, 5)}, "does not fit"),
        ({"input_ids": ids(2, 4), "cu_seqlens": torch.tensor([0, 3, 7])}, "must rise from 0"),
        ({"input_ids": ids(1, 4), "cu_seqlens": torch.tensor([0, 2, 4]), "use_cache": True}, "cannot be cached"),
        ({"input_ids": ids(1, 4), "cache": object(), "use_cache": True}, "cannot hold KDA states"),
    ],
)  # fmt: skip
def test_bad_input(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(KconvError, match=message):
        model()(**kwargs)
