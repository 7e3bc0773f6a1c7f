"""What a forward pass or `generate` is asked for is done or refused: nothing is ignored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kconv.errors import KconvError
from tests.modeling.tiny import ids, model

BOUNDS = torch.tensor([0, 4, 9], dtype=torch.int32)


@pytest.mark.parametrize(
    "name, value",
    [
        ("output_attentions", True), ("output_router_logits", True), ("seq_idx", torch.zeros(1, 9)), ("_packed_seq_ids", BOUNDS),
        ("seq_lens", BOUNDS), ("block_residual", (1,)), ("attention_msak", torch.ones(1, 9)), ("cache_position", torch.arange(9)),
    ],
)  # fmt: skip
def test_what_is_not_done_is_refused_by_name(name: str, value: Any) -> None:
    m = model()
    for asked in (m, m.model):
        with pytest.raises(KconvError, match=name):
            asked(ids(1, 9), **{name: value})


def test_a_config_that_asks_for_attentions_is_refused() -> None:
    m = model()
    m.config._attn_implementation = "eager"
    m.config.output_attentions = True
    with pytest.raises(KconvError, match="output_attentions"):
        m(ids(1, 9))


def test_none_and_false_ask_for_nothing() -> None:
    m, x = model(), ids(1, 9)
    asked = m(x, output_attentions=False, output_router_logits=None, seq_idx=None, return_dict=True)
    assert torch.equal(asked.logits, m(x).logits)


def test_transformers_packing_keywords_are_boundaries() -> None:
    m, x = model(dtype=torch.float64), ids(1, 9)
    packed = m(x, cu_seq_lens_q=BOUNDS, cu_seq_lens_k=BOUNDS, max_length_q=5, max_length_k=5, use_cache=False).logits
    apart = torch.cat([m(x[:, :4], use_cache=False).logits, m(x[:, 4:], use_cache=False).logits], 1)
    torch.testing.assert_close(packed, apart, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(m(x, cu_seq_lens_k=BOUNDS, use_cache=False).logits, apart, rtol=1e-9, atol=1e-11)


def test_two_statements_about_documents_must_agree() -> None:
    m, x = model(), ids(1, 9)
    with pytest.raises(KconvError, match="differ"):
        m(x, cu_seq_lens_q=BOUNDS, cu_seq_lens_k=torch.tensor([0, 5, 9]), use_cache=False)
    mask = torch.ones(1, 9, dtype=torch.long)
    m(x, cu_seqlens=BOUNDS, attention_mask=mask, use_cache=False)
    mask[0, 0] = 0
    with pytest.raises(KconvError, match="both document boundaries and an attention_mask"):
        m(x, cu_seqlens=BOUNDS, attention_mask=mask, use_cache=False)


def test_shifted_labels_are_taken_as_they_are() -> None:
    m, x = model(dtype=torch.float64), ids(2, 9)
    shifted = F.pad(x, (0, 1), value=-100)[:, 1:]
    assert torch.equal(m(x, shift_labels=shifted).loss, m(x, labels=x).loss)
    shifted[:, 3:] = -100
    logits = m(x).logits[:, :3]
    torch.testing.assert_close(
        m(x, labels=x, shift_labels=shifted).loss, F.cross_entropy(logits.flatten(0, 1), x[:, 1:4].flatten())
    )


def test_generate_with_an_offloaded_cache_is_the_same() -> None:
    m, x = model(dtype=torch.float64), ids(2, 6)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    plain = m.generate(x, **options)
    kept = m.generate(x, cache_implementation="offloaded", **options)
    assert torch.equal(kept.sequences, plain.sequences)
    cache = kept.get("cache", kept.get("past_key_values"))
    assert cache.offloaded
    assert cache.get_seq_length() == 9


def test_a_cache_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(KconvError, match="cache_implementation 'quantized'"):
        model().generate(ids(1, 4), cache_implementation="quantized", max_new_tokens=2)
