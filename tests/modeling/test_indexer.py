"""Kimi K3.1's indexer against Transformers' DeepseekV32Indexer without rotation, and what follows from it in the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kconv.errors import Problems
from kconv.modeling import KimiK3Cache, KimiK3TextConfig
from kconv.modeling import indexer as module
from kconv.modeling.indexer import KimiIndexer
from kconv.modeling.mla import causal_mask
from tests.modeling.tiny import K3, ids, model

# Sixteen heads: with few, many keys score exactly 0, and which of equal ones is chosen is nobody's promise.
BLOCK: dict[str, Any] = {"num_heads": 16, "head_dim": 16, "topk": 8, "norm_eps": 1e-6, "norm_bias": True, "layers": [3, 5]}
HIDDEN, RANK = 48, 24


def drawn(indexer: KimiIndexer, seed: int = 0) -> KimiIndexer:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in indexer.named_parameters():
            x = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.2 * x if name == "k_norm.weight" else 0.3 * x)
    return indexer


def sparse_model(topk: int = 8, seed: int = 0, **changes: Any) -> Any:
    made = model(seed, indexer_config={**BLOCK, "topk": topk}, **changes)
    for layer in made.model.layers:
        if layer.kind == "mla":
            drawn(layer.self_attn.indexer)
    return made


def theirs_of(ours: KimiIndexer) -> Any:
    """Transformers' indexer with the same weights; cos = 1 and sin = 0 leave everything where it is."""
    deepseek = pytest.importorskip("transformers.models.deepseek_v32.modeling_deepseek_v32")
    config = deepseek.DeepseekV32Config(
        hidden_size=ours.wk.in_features, q_lora_rank=ours.wq_b.in_features, index_n_heads=ours.heads,
        index_head_dim=ours.dim, index_topk=ours.topk, qk_rope_head_dim=4,
    )  # fmt: skip
    theirs = deepseek.DeepseekV32Indexer(config, 0)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    return theirs


def states(batch: int, length: int, seed: int = 3, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = (torch.randn(batch, length, width, generator=generator).to(dtype) for width in (HIDDEN, RANK))
    return next(draw), next(draw)


def chosen(theirs: Any, x: torch.Tensor, compressed: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Boolean [B, T, T] of what Transformers' indexer chooses, future keys on short rows removed."""
    cos, sin = torch.ones(*x.shape[:2], 4, dtype=x.dtype), torch.zeros(*x.shape[:2], 4, dtype=x.dtype)
    mask = allowed.expand(x.shape[0], -1, -1)
    best = theirs(x, compressed, (cos, sin), mask, None)
    return torch.zeros_like(mask).scatter(-1, best.long(), True) & mask


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("length, topk", [(1, 8), (7, 8), (8, 8), (9, 8), (40, 8), (200, 64), (33, 1)])
def test_selection_is_that_of_transformers(length: int, topk: int, dtype: torch.dtype) -> None:
    ours = drawn(KimiIndexer({**BLOCK, "topk": topk}, HIDDEN, RANK)).to(dtype)
    x, compressed = states(2, length, dtype=dtype)
    allowed = causal_mask(length, length, x.device)
    mine = ours.select(x, compressed, ours.keys(x), allowed)[:, 0]
    assert torch.equal(mine, chosen(theirs_of(ours).to(dtype), x, compressed, allowed))
    assert torch.equal(mine.sum(-1), torch.arange(1, length + 1).clamp(max=topk).expand(2, -1))


def test_selection_by_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = drawn(KimiIndexer(BLOCK, HIDDEN, RANK))
    x, compressed = states(2, 50)
    whole = ours.select(x, compressed, ours.keys(x), causal_mask(50, 50, x.device))
    monkeypatch.setattr(module, "SCORES_AT_ONCE", 2 * 16 * 50 * 7)
    assert torch.equal(ours.select(x, compressed, ours.keys(x), causal_mask(50, 50, x.device)), whole)


def test_without_bias_it_is_a_bias_of_zero() -> None:
    ours = drawn(KimiIndexer({**BLOCK, "norm_bias": False}, HIDDEN, RANK))
    assert "k_norm.bias" not in ours.state_dict()
    other = KimiIndexer(BLOCK, HIDDEN, RANK)
    other.load_state_dict({**ours.state_dict(), "k_norm.bias": torch.zeros(16)})
    x, compressed = states(2, 30)
    allowed = causal_mask(30, 30, x.device)
    assert torch.equal(*(i.select(x, compressed, i.keys(x), allowed) for i in (ours, other)))


def by_hand(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """A sparse MLA layer from the rule: keys chosen by Transformers' indexer, the rest of them scored and masked."""
    a = layer.self_attn
    length = x.shape[1]
    compressed = a.q_a_layernorm(a.q_a_proj(x))
    read = chosen(theirs_of(a.indexer), x, compressed, causal_mask(length, length, x.device))[:, None]
    q = a.q_b_proj(compressed).unflatten(-1, (a.heads, -1)).transpose(1, 2)
    latent, shared = a.kv_a_proj_with_mqa(x).split([a.rank, a.rope], dim=-1)
    kv = a.kv_b_proj(a.kv_a_layernorm(latent)).unflatten(-1, (a.heads, -1)).transpose(1, 2)
    k = torch.cat([kv[..., : a.nope], shared[:, None].expand(-1, a.heads, -1, -1)], dim=-1)
    weights = (q @ k.transpose(-1, -2) * (a.nope + a.rope) ** -0.5).masked_fill(~read, float("-inf")).softmax(-1)
    o = (weights @ kv[..., a.nope :]).transpose(1, 2).flatten(-2)
    return a.o_proj(o * a.g_proj(x).sigmoid())


@pytest.mark.parametrize("attention", ("eager", "sdpa"))
@pytest.mark.parametrize("length", (5, 8, 9, 60))
def test_layer_follows_the_rule(attention: str, length: int) -> None:
    made = sparse_model()
    made.config._attn_implementation = attention
    layer = made.model.layers[2]
    x = states(2, length)[0]
    with torch.no_grad():
        torch.testing.assert_close(layer.self_attn(x), by_hand(layer, x), rtol=0, atol=2e-6)


def test_dense_below_top_k_and_not_above() -> None:
    dense, sparse = model(), sparse_model(topk=32)
    dense.load_state_dict({k: v for k, v in sparse.state_dict().items() if ".indexer." not in k})
    with torch.no_grad():
        short, long = ids(2, 32), ids(2, 60)
        assert torch.equal(dense(short, use_cache=False).logits, sparse(short, use_cache=False).logits)
        a, b = dense(long, use_cache=False).logits, sparse(long, use_cache=False).logits
    assert torch.equal(a[:, :32].argmax(-1), b[:, :32].argmax(-1))
    torch.testing.assert_close(a[:, :32], b[:, :32], rtol=0, atol=2e-6)
    assert (a[:, 33:] - b[:, 33:]).abs().max() > 1e-3


@pytest.mark.parametrize("chunks", ((1,) * 40, (7, 1, 20, 12), (39, 1)))
def test_cached_decoding_is_the_same(chunks: tuple[int, ...]) -> None:
    made, x = sparse_model(), ids(2, sum(chunks))
    cache, parts = KimiK3Cache(made.config), []
    with torch.no_grad():
        whole = made(x, use_cache=False).logits
        for part in x.split(chunks, dim=1):
            parts.append(made(part, cache=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=3e-5)
    assert cache.layers[2].latent.shape == (2, 40, 16 + 4 + 16)  # latents, shared key dimensions, index keys


def test_cached_decoding_after_left_padding() -> None:
    """Padding takes none of a row's top-k places: the padded row decodes as it does alone."""
    made, x, mask = sparse_model(), ids(2, 30), torch.ones(2, 40, dtype=torch.long)
    mask[1, :11] = 0
    more = ids(2, 10, seed=8)
    with torch.no_grad():
        cache = KimiK3Cache(made.config)
        made(x, attention_mask=mask[:, :30], cache=cache, use_cache=True)
        padded = [made(more[:, i : i + 1], attention_mask=mask[:, : 31 + i], cache=cache).logits for i in range(10)]
        alone = made(torch.cat([x[1:, 11:], more[1:]], dim=1), use_cache=False).logits
    torch.testing.assert_close(torch.cat(padded, dim=1)[1:], alone[:, 19:], rtol=0, atol=3e-5)


def test_packed_documents_do_not_see_each_other() -> None:
    made, x = sparse_model(), ids(1, 60)
    bounds = torch.tensor([0, 13, 20, 60])
    with torch.no_grad():
        packed = made(x, cu_seqlens=bounds, use_cache=False).logits
        apart = [made(x[:, a:b], use_cache=False).logits for a, b in ((0, 13), (13, 20), (20, 60))]
    torch.testing.assert_close(packed, torch.cat(apart, dim=1), rtol=0, atol=3e-5)


def test_generation_takes_tokens_back() -> None:
    """A cropped cache forgets index keys as it forgets latents."""
    made, x = sparse_model(), ids(1, 30)
    with torch.no_grad():
        cache = KimiK3Cache(made.config)
        cache.activate_past_recording()
        made(x, cache=cache, use_cache=True)
        made(ids(1, 6, seed=4), cache=cache, use_cache=True)
        cache.crop(-6)
        again = made(ids(1, 4, seed=5), cache=cache, use_cache=True).logits
        whole = made(torch.cat([x, ids(1, 4, seed=5)], dim=1), use_cache=False).logits
    torch.testing.assert_close(again, whole[:, 30:], rtol=0, atol=3e-5)


def test_save_and_load(tmp_path: Any) -> None:
    made = sparse_model()
    made.save_pretrained(tmp_path)
    again = type(made).from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(again(ids(1, 40)).logits, made(ids(1, 40)).logits)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"topk": 0}, "topk"), ({"num_heads": None}, "num_heads"), ({"norm_eps": None}, "norm_eps"), ({"layers": [1]}, "layers"),
        ({"norm_bias": 1}, "norm_bias"),
    ],
)  # fmt: skip
def test_incomplete_blocks_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(Problems, match=f"indexer_config.{message}"):
        KimiK3TextConfig(**{**K3, "indexer_config": {**BLOCK, **change}})


def test_an_indexer_needs_compressed_queries() -> None:
    with pytest.raises(Problems, match="q_lora_rank"):
        KimiK3TextConfig(**{**K3, "indexer_config": BLOCK, "q_lora_rank": None})
