"""The static cache equals the growing one, and a pass that writes at a position on the device equals a plain pass."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from kconv.modeling import KimiK3Cache, StaticKimiK3Cache, decode_graph
from tests.modeling.test_generation import CLOSE, KINDS, full
from tests.modeling.tiny import ids


def steps(m: Any, x: torch.Tensor, sizes: list[int], cache: KimiK3Cache) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([m(part, cache=cache).logits for part in x.split(sizes, dim=1)], 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capacity", [4, 12, 64])
def test_a_static_cache_equals_a_full_pass_and_grows(kind: str, capacity: int) -> None:
    m, x = KINDS[kind](), ids(2, 12)
    cache = StaticKimiK3Cache(m.config, capacity)
    torch.testing.assert_close(steps(m, x, [5, 4, 1, 2], cache), full(m, x), **CLOSE)
    assert cache.capacity >= 12


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_at_a_position_on_the_device_equals_a_plain_one(kind: str) -> None:
    """What a graph captures, run as it is: the whole buffer behind a mask, states written in place, nothing counted."""
    m, x = KINDS[kind](), ids(2, 12)
    cache = StaticKimiK3Cache(m.config, 16)
    parts = [steps(m, x[:, :7], [7], cache)]
    places = cache.pointers()
    for t in range(7, 12):
        cache.hold(torch.tensor([t]))
        parts.append(steps(m, x[:, t : t + 1], [1], cache))
        cache.hold(None)
        assert cache.get_seq_length() == t
        cache.replayed()
    torch.testing.assert_close(torch.cat(parts, 1), full(m, x), **CLOSE)
    assert cache.pointers() == places
    assert cache.get_seq_length() == 12


def test_rows_are_reordered_repeated_and_chosen_like_those_of_the_growing_cache() -> None:
    m, x = KINDS["k3"](), ids(2, 9)
    outs = []
    for cache in (KimiK3Cache(m.config), StaticKimiK3Cache(m.config, 16)):
        steps(m, x[:, :7], [7], cache)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([3, 0, 2, 1]))  # type: ignore[arg-type]
        cache.batch_select_indices(torch.tensor([0, 2, 3]))
        outs.append(steps(m, torch.cat([x, x[:1]])[:, 7:], [1, 1], cache))
    torch.testing.assert_close(*outs, **CLOSE)


def test_tokens_are_taken_back() -> None:
    m, x = KINDS["k3"](), ids(1, 12)
    cache = StaticKimiK3Cache(m.config, 8)
    cache.activate_past_recording()
    steps(m, x[:, :9], [5, 4], cache)
    cache.crop(-6)
    torch.testing.assert_close(steps(m, x[:, 3:], [9], cache), full(m, x)[:, 3:], **CLOSE)


def test_generation_with_a_static_cache_gives_the_same_tokens_and_keeps_its_buffers() -> None:
    m, x = KINDS["packed"](), ids(2, 6)
    options: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = m.generate(x, **options)
    assert torch.equal(m.generate(x, cache_implementation="static", **options), wanted)
    first = m.__dict__["_static_cache"][1]
    assert torch.equal(m.generate(x, cache_implementation="static", **options), wanted)
    assert m.__dict__["_static_cache"][1] is first
    with torch.no_grad():
        m.lm_head.weight = torch.nn.Parameter(m.lm_head.weight.clone())
    m.generate(x, cache_implementation="static", **options)
    assert m.__dict__["_static_cache"][1] is not first


def test_without_a_gpu_no_step_is_captured() -> None:
    m, x = KINDS["k3"](), ids(1, 5)
    cache = StaticKimiK3Cache(m.config, 8)
    steps(m, x, [4, 1], cache)
    assert cache.graph is None
    assert decode_graph.step(m, cache, x[:, :1], None) is None


def test_a_model_with_a_static_cache_can_be_copied() -> None:
    m, x = KINDS["k3"](), ids(1, 5)
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = m.generate(x, cache_implementation="static", **options)
    parts: tuple[int, ...] = ()
    m.__dict__["_static_cache"][1].graph = (part for part in parts)  # like a graph, it can neither be copied nor pickled
    assert torch.equal(copy.deepcopy(m).generate(x, cache_implementation="static", **options), wanted)
