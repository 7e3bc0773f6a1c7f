"""Every weight is used through its module: what is put in its place is seen by training, prefill, decoding and offloading."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from kconv.modeling import KimiK3Cache, KimiK3TextConfig
from kconv.modeling.drafts.dflash import DFlashConfig, DFlashDraftModel
from kconv.modeling.drafts.dflash2 import DFlash2Config, DFlash2DraftModel
from kconv.modeling.drafts.dflash_k3 import KimiK3DFlashConfig, KimiK3DFlashDraftModel
from kconv.modeling.drafts.dspark import DSparkConfig, DSparkDraftModel
from kconv.modeling.drafts.eagle3 import Eagle3Config, Eagle3DraftModel
from tests.modeling.test_indexer import sparse_model
from tests.modeling.tiny import LINEAR_48B, ids, model, of

KINDS = {
    "k3": lambda: model(dtype=torch.float64),
    "packed": lambda: model(dtype=torch.float64, experts_format="packed"),
    "kimi-linear": lambda: of(KimiK3TextConfig.from_k3(LINEAR_48B), dtype=torch.float64),
    "kv groups": lambda: model(dtype=torch.float64, num_key_value_heads=2, q_lora_rank=None),
    "indexer": lambda: sparse_model(topk=3, dtype=torch.float64),
}
SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
    "mask_token_id": 96, "target_layer_ids": [0, 2], "block_size": 4, "initializer_range": 0.3,
}  # fmt: skip
MLA: dict[str, Any] = {
    "attention_mode": "mla", "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}  # fmt: skip
GQA: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 12}
DRAFTS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "k3 dflash": (KimiK3DFlashDraftModel, KimiK3DFlashConfig, MLA),
    "gqa": (DFlashDraftModel, DFlashConfig, {**GQA, "fc_norm": True}),
    "clipped": (DFlashDraftModel, DFlashConfig, {**GQA, "clip_qkv": 0.4}),
    "stacked": (DFlashDraftModel, DFlashConfig, {**GQA, "stacked_qkv": True, "attention_bias": True}),
    "dflash2": (DFlash2DraftModel, DFlash2Config, {**GQA, "selector_rank": 8}),
    "dspark": (DSparkDraftModel, DSparkConfig, {**GQA, "markov_rank": 8, "markov_head_type": "rnn", "owns_embed_tokens": True}),
    "eagle3": (Eagle3DraftModel, Eagle3Config, {**MLA, "num_hidden_layers": 1, "norm_before_fc": True}),
}
Outputs = dict[str, torch.Tensor]
CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}


class Shifted(nn.Module):
    """Stands in the place of a Linear, as adapters do: it has no weight, its output is the base's plus `delta`'s."""

    def __init__(self, base: nn.Linear, delta: torch.Tensor) -> None:
        super().__init__()
        self.base, self.delta = base, delta

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(x, self.delta)


class Plus(nn.Module):
    """A parametrisation that adds."""

    def __init__(self, delta: torch.Tensor) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, p: torch.Tensor) -> torch.Tensor:
        return p + self.delta


def delta_of(p: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    if p.dtype == torch.uint8:
        return torch.randint(0, 2, p.shape, generator=generator, dtype=torch.uint8)
    return 0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype)


def outputs(m: Any) -> Outputs:
    """Logits of a whole pass, of cached steps, and loss and gradient of training."""
    x, cache, steps = ids(2, 9), KimiK3Cache(m.config), []
    with torch.no_grad():
        whole = m.eval()(x, use_cache=False).logits
        steps = [m(part, cache=cache).logits for part in x.split([5, 1, 1, 2], dim=1)]
    embedded = m.get_input_embeddings()(x).detach().requires_grad_()
    loss = m.train()(inputs_embeds=embedded, labels=x).loss
    (gradient,) = torch.autograd.grad(loss, embedded)
    return {"prefill": whole, "cached": torch.cat(steps, 1), "loss": loss, "gradient": gradient}


def of_draft(m: Any) -> Outputs:
    """Hidden states and logits of a block, with context and block in one pass and apart; what its heads add."""
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(1, 6, 2 * 48, generator=generator, dtype=torch.float64)
    tokens, table = ids(1, 4), nn.Embedding(97, 48, _weight=torch.randn(97, 48, generator=generator, dtype=torch.float64))
    head = nn.Linear(48, 97, bias=False).double()
    nn.init.normal_(head.weight, generator=generator)
    with torch.no_grad():
        if isinstance(m, Eagle3DraftModel):
            cache, projected = m.new_cache(), m.project_target(states)
            ahead = ids(1, 6)
            whole = m.head_logits(m(ahead, projected), head)
            parts = [m(ahead[:, a:b], projected[:, a:b], cache) for a, b in ((0, 4), (4, 6))]
            return {"whole": whole, "cached": m.head_logits(torch.cat(parts, 1), head)}
        block = m.embed_block(tokens, None if hasattr(m, "embed_tokens") else table)
        whole = m(noise_embedding=block, target_hidden=states)
        cache = m.new_cache()
        m.materialize(states[:, :4], cache)
        m.materialize(states[:, 4:], cache)
        cached = m.forward_block(block, cache)
        return {"whole": _heads(m, whole, tokens, head), "cached": _heads(m, cached, tokens, head)}


def _heads(m: Any, hidden: torch.Tensor, tokens: torch.Tensor, head: nn.Module) -> torch.Tensor:
    logits = m.compute_logits(hidden, head)
    extra = []
    if isinstance(m, DSparkDraftModel):
        logits = m.block_logits(hidden, tokens, head)
        sure = m.confidence(hidden, tokens)
        assert sure is not None
        extra.append(sure[..., None])
    if isinstance(m, DFlash2DraftModel):
        extra.append(m.candidate_selector.scores(hidden, logits[..., :5], torch.arange(5).expand(1, 4, 5), tokens))
    return torch.cat([hidden, logits, *extra], -1)


def tensor_of(m: Any, name: str) -> torch.Tensor:
    owner, _, own = name.rpartition(".")
    return getattr(m.get_submodule(owner), own)


Change = Callable[[Any, str, torch.Tensor], None]


def add(m: Any, name: str, delta: torch.Tensor) -> None:
    """What everything else must amount to: the weight itself changed."""
    with torch.no_grad():
        tensor_of(m, name).add_(delta)


def replace(m: Any, name: str, delta: torch.Tensor) -> None:
    owner = name.removesuffix(".weight")
    m.set_submodule(owner, Shifted(m.get_submodule(owner), delta))


def parametrised(m: Any, name: str, delta: torch.Tensor) -> None:
    owner, _, own = name.rpartition(".")
    parametrize.register_parametrization(m.get_submodule(owner), own, Plus(delta))


def with_all(m: Any, change: Change, names: Iterable[str]) -> Any:
    made = copy.deepcopy(m)
    for name in names:
        change(made, name, delta_of(tensor_of(m, name)))
    return made


def same(m: Any, change: Change, names: list[str], run: Callable[[Any], Outputs]) -> None:
    """All weights changed at once; where that differs from the changed weights, say which one it is."""
    seen, wanted, before = run(with_all(m, change, names)), run(with_all(m, add, names)), run(copy.deepcopy(m))
    for mode, expected in wanted.items():
        assert not torch.allclose(expected, before[mode], **CLOSE), mode
        if not torch.allclose(seen[mode], expected, **CLOSE):
            alone = [n for n in names if not _agree(m, change, n, run, mode)]
            raise AssertionError(f"in {mode} the value is not that of the changed weights: {alone}")


def _agree(m: Any, change: Change, name: str, run: Callable[[Any], Outputs], mode: str) -> bool:
    return torch.allclose(run(with_all(m, change, [name]))[mode], run(with_all(m, add, [name]))[mode], **CLOSE)


def linear_weights(m: nn.Module) -> list[str]:
    return [f"{n}.weight" for n, c in m.named_modules() if isinstance(c, nn.Linear) and getattr(c, "clip", None) is None]


@pytest.mark.parametrize("kind", KINDS)
def test_what_replaces_a_linear_is_called(kind: str) -> None:
    m = KINDS[kind]()
    names = linear_weights(m)
    assert len(names) > 40
    same(m, replace, names, outputs)


@pytest.mark.parametrize("kind", KINDS)
def test_what_parametrises_a_weight_is_used(kind: str) -> None:
    m = KINDS[kind]()
    names = list(m.state_dict())
    assert len(names) > 60
    same(m, parametrised, names, outputs)


def draft(kind: str) -> Any:
    made, config, changes = DRAFTS[kind]
    torch.manual_seed(0)
    built = made(config(**{**SMALL, **changes})).double().eval()
    with torch.no_grad():
        for p in built.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return built


@pytest.mark.parametrize("kind", DRAFTS)
def test_drafts_use_what_replaces_a_weight(kind: str) -> None:
    m = draft(kind)
    same(m, replace, linear_weights(m), of_draft)
    same(m, parametrised, [n for n, _ in m.named_parameters()], of_draft)


def test_hooks_on_a_folded_weight_fire_while_decoding() -> None:
    m, calls = KINDS["k3"](), []

    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        calls.append(module)
        return out * 1.5

    m.model.layers[2].self_attn.kv_b_proj.register_forward_hook(hook)
    expected = m(ids(1, 8), use_cache=False).logits
    cache = KimiK3Cache(m.config)
    with torch.no_grad():
        parts = [m(part, cache=cache).logits for part in ids(1, 8).split([7, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, **CLOSE)
    assert len(calls) == 3


@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("kind", KINDS)
def test_offloading_changes_no_bit(kind: str, place: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    m = KINDS[kind]()
    wanted = outputs(copy.deepcopy(m))
    if place == "cpu":
        accelerate.cpu_offload(m, execution_device=torch.device("cpu"))
    else:
        accelerate.disk_offload(m, str(tmp_path), execution_device=torch.device("cpu"))
    assert all(p.is_meta for n, p in m.named_parameters())
    for mode, seen in outputs(m).items():
        assert torch.equal(seen, wanted[mode]), mode
