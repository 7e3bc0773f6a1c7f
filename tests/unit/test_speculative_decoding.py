"""The reference decoder: the target's own output, token for token or in distribution, for every draft and every way back."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kconv.errors import KconvError
from kconv.modeling import KimiK3TextConfig
from kconv.modeling.drafts.dflash import DFlashConfig, DFlashDraftModel
from kconv.modeling.drafts.dflash2 import DFlash2Config, DFlash2DraftModel
from kconv.modeling.drafts.dflash_k3 import KimiK3DFlashDraftModel, build_kimi_k3_dflash_draft_config
from kconv.modeling.drafts.dspark import DSparkConfig, DSparkDraftModel
from kconv.modeling.drafts.eagle3 import Eagle3Config, Eagle3DraftModel
from kconv.modeling.drafts.sampling import Proposal, Sampler
from kconv.speculative.decoding import plain_generate, speculative_generate, verify_greedy, verify_sampled
from kconv.speculative.target import Snapshot, Target, new_cache
from tests.modeling import tiny

VOCAB = 17
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "target_layer_ids": [0, 2, 4],
    "mask_token_id": 16, "initializer_range": 0.3, "target_num_hidden_layers": 5,
}  # fmt: skip
MLA: dict[str, Any] = {
    "attention_mode": "mla", "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_interleave": True,
}  # fmt: skip
GQA: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16}


def k3_dflash(target: Any) -> Any:
    nested = {"mask_token_id": 16, "target_layer_ids": [0, 2, 4]}
    return KimiK3DFlashDraftModel(
        build_kimi_k3_dflash_draft_config(
            target.config, num_draft_layers=2, num_target_layers=5, block_size=4, dflash_config=nested
        )
    )


def eagle_full(target: Any) -> Any:
    return Eagle3DraftModel(Eagle3Config(**{**SIZES, **MLA}, num_hidden_layers=1, capture_stream="prefix"))


def eagle_reduced(target: Any) -> Any:
    """A head over 9 of 17 tokens, as Eagle 3.1."""
    model: Any = Eagle3DraftModel(
        Eagle3Config(
            **{**SIZES, **MLA}, num_hidden_layers=1, capture_stream="attn_res", draft_vocab_size=9, owns_vocab_maps=True,
            fc_norm=True, norm_output=True,
        )
    )  # fmt: skip
    model.d2t.copy_(torch.arange(9))
    model.t2d[::2] = True
    return model


def dspark(target: Any, **changes: Any) -> Any:
    keys = {**SIZES, **MLA, "block_size": 3, "markov_rank": 8, "capture_stream": "attn_res", "num_hidden_layers": 2, **changes}
    return DSparkDraftModel(DSparkConfig(**keys))


def dflash2(target: Any) -> Any:
    convolution: dict[str, Any] = {"conv_group_size": 8, "selector_rank": 8, "selector_top_k": 4}
    model = DFlash2DraftModel(
        DFlash2Config(**{**SIZES, **GQA}, **convolution, block_size=4, num_hidden_layers=2, capture_stream="prefix")
    )
    torch.nn.init.normal_(model.candidate_selector.successor_codebook)
    return model


FAMILIES = {
    "k3-dflash": k3_dflash,
    "dspark": dspark,
    "dspark-rnn": lambda t: dspark(t, markov_head_type="rnn"),
    "dflash2": dflash2,
    "eagle3": eagle_full,
    "eagle3.1": eagle_reduced,
}


@pytest.fixture(scope="module")
def k3() -> Any:
    return tiny.model(0, vocab_size=VOCAB, pad_token_id=0)


def draft_for(target: Any, family: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return FAMILIES[family](target).eval()


def prompt(length: int, seed: int = 1) -> torch.Tensor:
    return tiny.ids(1, length, seed=seed, vocab=VOCAB)


@pytest.mark.parametrize("way", ["record", "snapshot"])
@pytest.mark.parametrize("family", FAMILIES)
def test_k3_decodes_the_same_tokens(k3: Any, family: str, way: str) -> None:
    """KDA states go back to before the block, whatever was kept of it."""
    draft, kept = draft_for(k3, family), 0
    for seed in range(3):
        ids = prompt(5 + seed, seed)
        plain = plain_generate(k3, ids, 24)
        out = speculative_generate(k3, draft, ids, 24, way=way, draft_tokens=3)
        assert torch.equal(out.tokens, plain.tokens)
        assert sum(out.acceptance_lengths) == 23
        assert out.target_passes == 1 + len(out.acceptance_lengths) + (way == "snapshot") * out_of_order(out)
        kept += sum(a > 1 for a in out.acceptance_lengths)
    assert kept or family == "eagle3.1", "no draft was ever kept, so the comparison saw nothing"


def out_of_order(out: Any) -> int:
    """Verifications after which something had to be taken back."""
    return sum(a < n + 1 for a, n in zip(out.acceptance_lengths, out.proposed, strict=True))


@pytest.mark.parametrize("way", ["record", "snapshot"])
@pytest.mark.parametrize("target", ["k3.1", "kimi-linear"])
def test_other_kimi_targets_decode_the_same_tokens(target: str, way: str) -> None:
    """Kimi K3.1, whose cache has index keys beside the latents, and Kimi-Linear, which has no attention residuals."""
    index = {"num_heads": 16, "head_dim": 16, "topk": 8, "norm_eps": 1e-6, "norm_bias": True, "layers": [3, 5]}
    if target == "k3.1":
        model, stream = tiny.model(1, vocab_size=VOCAB, pad_token_id=0, indexer_config=index), "prefix"
    else:
        model, stream = (
            tiny.of(KimiK3TextConfig.from_k3({**tiny.LINEAR_48B, "vocab_size": VOCAB, "pad_token_id": 0}), 1),
            "output",
        )
    drafts = [draft_for(model, "k3-dflash"), dspark(model, capture_stream=stream).eval()]
    assert drafts[0].config.to_dict().get("indexer_config") is None
    for draft in drafts:
        draft.config.capture_stream = stream
        for seed in range(3):
            ids = prompt(12 + seed, seed)
            plain = plain_generate(model, ids, 20)
            out = speculative_generate(model, draft, ids, 20, way=way, draft_tokens=3)
            assert torch.equal(out.tokens, plain.tokens)
            assert sum(out.acceptance_lengths) == 19


def test_plain_decoding_is_generate(k3: Any) -> None:
    ids = prompt(6)
    expected = k3.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(plain_generate(k3, ids, 12).tokens, expected)


def qwen(layers: int = 5) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, initializer_range=0.2,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


@pytest.mark.parametrize("way", ["crop", "snapshot"])
def test_a_transformers_target(way: str) -> None:
    target, ids = qwen(), prompt(7)
    torch.manual_seed(0)
    draft = DFlashDraftModel(DFlashConfig(**{**SIZES, **GQA}, block_size=4, num_hidden_layers=2)).eval()
    out = speculative_generate(target, draft, ids, 30, way=way)
    assert torch.equal(out.tokens, plain_generate(target, ids, 30).tokens)


@pytest.fixture
def torch_forms() -> Iterator[None]:
    """Transformers takes fla's GPU kernels whenever fla can be imported; put its own torch functions back."""
    module = importlib.import_module("transformers.models.kimi_linear.modeling_kimi_linear")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in list(vars(module).items()):
            if inspect.isfunction(value) and hasattr(value, "__wrapped__") and "delta_attention" in name:
                patch.setattr(module, name, inspect.unwrap(value))
        yield


@pytest.mark.usefixtures("torch_forms")
def test_a_hybrid_transformers_target() -> None:
    """Transformers' Kimi-Linear: states written in place, which a snapshot must copy; cropping it is refused."""
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    keys = {k: v for k, v in tiny.LINEAR_48B.items() if k != "model_type"}
    torch.manual_seed(0)
    target = KimiLinearForCausalLM(KimiLinearConfig(**{**keys, "vocab_size": VOCAB})).eval()
    for p in target.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.2)
    torch.manual_seed(0)
    draft = DFlashDraftModel(DFlashConfig(**{**SIZES, **GQA}, block_size=4, num_hidden_layers=2)).eval()
    ids = prompt(7)
    out = speculative_generate(target, draft, ids, 24)
    assert torch.equal(out.tokens, plain_generate(target, ids, 24).tokens)
    assert any(a <= n for a, n in zip(out.acceptance_lengths, out.proposed, strict=True))
    with pytest.raises(KconvError, match="cannot be cropped"):
        speculative_generate(target, draft, ids, 24, way="crop")


def test_snapshot_restores_every_byte(k3: Any) -> None:
    target = Target(k3, way="snapshot")
    target.forward(prompt(6))
    target.keep(6)
    before = [{k: v for k, v in vars(layer).items() if isinstance(v, torch.Tensor)} for layer in target.cache.layers]
    copies = [{k: v.clone() for k, v in layer.items()} for layer in before]
    snapshot = Snapshot(target.cache)
    target.forward(prompt(4, 9))
    snapshot.restore()
    assert target.cache.tokens == 6
    for layer, saved in zip(target.cache.layers, copies, strict=True):
        for name, value in saved.items():
            assert torch.equal(getattr(layer, name), value)


@pytest.mark.parametrize("family", ["k3-dflash", "dspark", "dflash2", "eagle3.1"])
def test_stops_and_limits(k3: Any, family: str) -> None:
    """A stop token ends both alike, also inside a kept run; every limit is met exactly."""
    draft, ids = draft_for(k3, family), prompt(6)
    plain = plain_generate(k3, ids, 30)
    stop = int(plain.new_tokens[0, 11])
    a = plain_generate(k3, ids, 30, stop_token_ids=[stop])
    b = speculative_generate(k3, draft, ids, 30, stop_token_ids=[stop], draft_tokens=3)
    assert torch.equal(a.tokens, b.tokens)
    assert int(b.tokens[0, -1]) == stop
    assert stop not in b.new_tokens[0, :-1].tolist()
    for count in (0, 1, 2, 5):
        out = speculative_generate(k3, draft, ids, count, draft_tokens=3)
        assert torch.equal(out.tokens, plain.tokens[:, : 6 + count])


def test_verify_greedy() -> None:
    logits = torch.eye(5)[torch.tensor([[1, 2, 3, 4]])]
    assert verify_greedy(Proposal(torch.tensor([[1, 2, 0]])), logits)[0] == 2
    run, following = verify_greedy(Proposal(torch.tensor([[1, 2, 3]])), logits)
    assert (run, following.tolist()) == (3, [4])


def test_rejection_sampling_is_exact() -> None:
    """Two tokens drafted from the wrong distribution come out with the target's: every pair within 4.5 standard errors."""
    g = torch.Generator().manual_seed(0)
    first, second, third = torch.randn(4, generator=g), torch.randn(4, 4, generator=g), torch.randn(4, generator=g)
    q1, q2 = torch.randn(4, generator=g).softmax(-1), torch.randn(4, 4, generator=g).softmax(-1)
    sampler, trials = Sampler(1.0, generator=g), 12000
    counts, kept = torch.zeros(4, 4), 0
    for _ in range(trials):
        x = sampler.draw(q1[None])
        y = sampler.draw(q2[x])
        proposal = Proposal(torch.stack([x, y], 1), torch.stack([q1[None], q2[x]], 1))
        logits = torch.stack([first, second[int(x)], third])[None]
        run, following = verify_sampled(proposal, logits, sampler)
        tokens = [*proposal.tokens[0, :run].tolist(), int(following)][:2]
        if len(tokens) == 1:
            tokens.append(int(sampler.draw(second[tokens[0]].softmax(-1)[None])))
        counts[tokens[0], tokens[1]] += 1
        kept += run
    expected = first.softmax(-1)[:, None] * second.softmax(-1)
    error = (counts / trials - expected).abs() / (expected * (1 - expected) / trials).sqrt()
    assert error.max() < 4.5
    assert 0 < kept < 2 * trials


def test_a_perfect_draft_is_always_kept() -> None:
    p = torch.randn(1, 4, 6)
    sampler = Sampler(0.7, generator=torch.Generator().manual_seed(0))
    probs = sampler.probs(p)
    for _ in range(50):
        proposal = Proposal(sampler.draw(probs[:, :3]), probs[:, :3])
        assert verify_sampled(proposal, p, sampler)[0] == 3


@pytest.mark.parametrize("family", ["k3-dflash", "dspark", "dflash2", "eagle3.1"])
def test_sampled_decoding_is_the_targets(k3: Any, family: str) -> None:
    """The second token's frequencies over 250 runs equal the target's own distribution within 4.5 standard errors."""
    draft, ids, g, runs = draft_for(k3, family), prompt(5), torch.Generator().manual_seed(0), 250
    sampler = {"temperature": 1.3, "top_k": 8, "generator": g}
    with torch.no_grad():
        first = Sampler(1.3, 8).probs(k3(ids).logits[:, -1])[0]
        seconds = torch.stack(
            [Sampler(1.3, 8).probs(k3(torch.cat([ids, torch.tensor([[t]])], 1)).logits[:, -1])[0] for t in range(VOCAB)]
        )
    expected, counts = first @ seconds, torch.zeros(VOCAB)
    for _ in range(runs):
        out = speculative_generate(k3, draft, ids, 3, draft_tokens=2, **sampler)  # type: ignore[arg-type]
        counts[out.new_tokens[0, 1]] += 1
    error = (counts / runs - expected).abs() / (expected * (1 - expected) / runs).sqrt().clamp_min(1e-3)
    assert error.max() < 4.5


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.7), (5, 0.7)])
def test_sampler_equals_dflash(top_k: int, top_p: float) -> None:
    module = pytest.importorskip("dflash.model")
    logits = torch.randn(3, 4, 11)
    expected = module._sampling_probs(logits, 0.8, top_p, top_k)
    torch.testing.assert_close(Sampler(0.8, top_k, top_p).probs(logits), expected)


def test_min_confidence_shortens_blocks_and_changes_nothing_else(k3: Any) -> None:
    draft, ids = draft_for(k3, "dspark"), prompt(6)
    plain = plain_generate(k3, ids, 24)
    short = speculative_generate(k3, draft, ids, 24, min_confidence=1.1)
    assert torch.equal(short.tokens, plain.tokens)
    assert set(short.proposed) <= {0, 1}
    with pytest.raises(KconvError, match="no confidence head"):
        speculative_generate(k3, draft_for(k3, "k3-dflash"), ids, 4, min_confidence=0.5)


def test_report(k3: Any) -> None:
    out = speculative_generate(k3, draft_for(k3, "dspark"), prompt(6), 40)
    assert out.mean_acceptance_length == pytest.approx(sum(out.acceptance_lengths) / len(out.acceptance_lengths))
    full = [a - 1 for a, n in zip(out.acceptance_lengths, out.proposed, strict=True) if n == 3]
    assert out.per_position[2] == pytest.approx(sum(k == 3 for k in full) / len(full))
    assert len(out.per_position) == 3


def refused(k3: Any, said: str, **changes: Any) -> None:
    draft = dspark(k3, **changes)
    with pytest.raises(KconvError, match=said):
        speculative_generate(k3, draft.eval(), prompt(4), 4)


def test_a_draft_that_does_not_fit_is_refused(k3: Any) -> None:
    refused(k3, "states 64 wide, the target's are 48", hidden_size=64, head_dim=16)
    refused(k3, "vocabulary of 97, the target of 17", vocab_size=97)
    refused(k3, "trained on a target of 93 layers, this one has 5", target_num_hidden_layers=93)
    refused(k3, "taps layer 7", target_layer_ids=[0, 7], target_num_hidden_layers=None)
    refused(k3, "two streams", capture_stream=None)
    refused(k3, "outputs or boundaries", target_layer_ids=None, aux_layer_ids=[1, 3, 5])
    refused(k3, "no block_size", block_size=None)


def test_asking_for_more_than_was_trained_is_refused(k3: Any) -> None:
    with pytest.raises(KconvError, match="blocks of 3 drafted tokens, 9 are asked for"):
        speculative_generate(k3, draft_for(k3, "k3-dflash"), prompt(4), 20, draft_tokens=9)
    with pytest.raises(KconvError, match="as many tokens as it is asked for"):
        speculative_generate(k3, draft_for(k3, "eagle3"), prompt(4), 20)
    with pytest.raises(KconvError, match="runs one sequence"):
        plain_generate(k3, tiny.ids(2, 4, vocab=VOCAB), 4)


def test_an_unstated_block_size_can_be_given(k3: Any) -> None:
    """Inferact's file has none: the number of drafted tokens is a serving flag."""
    draft = dspark(k3, block_size=None).eval()
    out = speculative_generate(k3, draft, prompt(5), 16, draft_tokens=3)
    assert torch.equal(out.tokens, plain_generate(k3, prompt(5), 16).tokens)


def test_new_cache_is_the_models_own(k3: Any) -> None:
    assert type(new_cache(k3)).__name__ == "KimiK3Cache"
    assert type(new_cache(qwen())).__name__ == "DynamicCache"
