"""Capturing target states: native K3 in both streams, Transformers' models, the order, the last layer, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kconv.errors import KconvError
from kconv.speculative.capture import capture_hidden, tap_findings
from tests.modeling import tiny


@pytest.fixture(scope="module")
def k3() -> Any:
    return tiny.model(0)


def qwen() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    return Qwen3ForCausalLM(config).eval()


@torch.no_grad()
def test_prefix_is_hidden_states_plus_one(k3: Any) -> None:
    ids = tiny.ids(2, 9)
    with capture_hidden(k3, [3, 0, 1], "prefix") as captured:
        out = k3(ids, output_hidden_states=True)
    expected = torch.cat([out.hidden_states[i + 1] for i in (3, 0, 1)], -1)
    assert torch.equal(captured.hidden, expected)


@torch.no_grad()
def test_prefix_restarts_at_a_block(k3: Any) -> None:
    """With blocks of 2 the state after layer 2 holds that layer's contribution alone: it forgot what came before."""
    ids = tiny.ids(1, 9)
    seen: dict[str, torch.Tensor] = {}
    layer = k3.model.layers[2]
    handles = [
        layer.self_attn.register_forward_hook(lambda m, i, o: seen.__setitem__("attention", o)),
        layer.mlp.register_forward_hook(lambda m, i, o: seen.__setitem__("mlp", o)),
    ]
    with capture_hidden(k3, [2], "prefix") as captured:
        k3(ids)
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(captured.hidden, seen["attention"] + seen["mlp"])


@torch.no_grad()
def test_attn_res_is_what_the_next_layer_reads(k3: Any) -> None:
    """Each tap equals the input of the next layer's first norm; the last one the input of the final norm."""
    ids = tiny.ids(2, 9)
    read: dict[int, torch.Tensor] = {}
    layers = k3.model.layers
    norms = [layer.input_layernorm for layer in layers[1:]] + [k3.model.norm]
    handles = [norm.register_forward_pre_hook(lambda m, a, i=i: read.__setitem__(i, a[0])) for i, norm in enumerate(norms)]
    with capture_hidden(k3, [0, 1, 2, 3, 4], "attn_res") as captured:
        k3(ids)
    for handle in handles:
        handle.remove()
    for i in range(5):
        torch.testing.assert_close(captured.state(i), read[i], rtol=0, atol=1e-6)


@torch.no_grad()
def test_the_streams_differ(k3: Any) -> None:
    ids = tiny.ids(1, 9)
    states = {}
    for stream in ("prefix", "attn_res"):
        with capture_hidden(k3, [1, 2], stream) as captured:
            k3(ids)
        states[stream] = captured.hidden
    assert states["prefix"].shape == states["attn_res"].shape
    assert not torch.allclose(states["prefix"], states["attn_res"], atol=1e-2)


@torch.no_grad()
def test_transformers_models_and_the_last_layer() -> None:
    model, ids = qwen(), torch.arange(7)[None]
    out = model(ids, output_hidden_states=True)
    with capture_hidden(model, [2, 0]) as captured:
        model(ids)
    assert torch.equal(captured.hidden, torch.cat([out.hidden_states[3], out.hidden_states[1]], -1))
    with capture_hidden(model, [3]) as before, capture_hidden(model, [3], last_normed=True) as behind:
        model(ids)
    assert torch.equal(behind.hidden, out.hidden_states[4])
    assert torch.equal(model.model.norm(before.hidden), behind.hidden)
    assert not torch.allclose(before.hidden, behind.hidden)


def test_hooks_are_taken_off(k3: Any) -> None:
    with pytest.raises(RuntimeError, match="stopped"), capture_hidden(k3, [0], "prefix"):
        raise RuntimeError("stopped")
    assert not k3.model.layers[0]._forward_hooks


@pytest.mark.parametrize(
    ("taps", "stream", "said"),
    [
        ([0, 99], "prefix", "does not fit a target of 5 layers"),
        ([-1], "prefix", "raw embeddings"),
        ([1, 1], "prefix", "repeats"),
        ([], "prefix", "empty"),
        ([1], None, "two streams"),
        ([1], "output", "two streams"),
        ([1], "residual", "none of"),
    ],
)
def test_refusals(k3: Any, taps: list[int], stream: str | None, said: str) -> None:
    with pytest.raises(KconvError, match=said), capture_hidden(k3, taps, stream):
        pass


def test_attn_res_needs_attention_residuals() -> None:
    with pytest.raises(KconvError, match="needs attention residuals"), capture_hidden(qwen(), [1], "attn_res"):
        pass


def test_what_is_doubtful_about_taps() -> None:
    """NeMo's default formula gives 72 on K3: the first layer of a block of 12; its recipe takes 92, the last layer."""
    assert tap_findings([1, 19, 37, 54, 72, 90], 93, 12, "prefix")[0].startswith("taps [72] are first layers of blocks of 12")
    assert tap_findings([1, 19, 37, 54, 72, 90], 93, 12, "attn_res") == []
    assert tap_findings([90, 91, 92], 93, 12, "prefix")[0].startswith("tap 92 is the last layer")
