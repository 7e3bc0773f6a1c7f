"""Measures of pure logits and states, against hand-made cases and plain formulas."""

from __future__ import annotations

import math

import pytest
import torch

from kconv.errors import KconvError
from kconv.parity.limits import FIXED, limits_for, precision_of
from kconv.parity.measures import compare_logits, compare_states

GEN = torch.Generator().manual_seed(0)


def logits(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GEN, dtype=torch.float64)


def test_figures_equal_the_plain_formulas() -> None:
    ours, theirs = logits(2, 40, 30), logits(2, 40, 30)
    p, q = theirs.softmax(-1), ours.softmax(-1)
    kl = (p * (p.log() - q.log())).sum(-1)
    found = compare_logits(ours, theirs).figures
    assert found["max_abs"] == float((ours - theirs).abs().max())
    assert found["max_kl"] == pytest.approx(float(kl.max()), rel=1e-12)
    assert found["mean_kl"] == pytest.approx(float(kl.mean()), rel=1e-12)
    assert found["top1_agreement"] == float((ours.argmax(-1) == theirs.argmax(-1)).double().mean())


def test_equal_logits_agree_in_everything() -> None:
    x = logits(1, 70, 20)
    found = compare_logits(x, x.clone()).figures
    assert found["max_abs"] == found["max_kl"] == 0
    assert found["top1_agreement"] == found["topk_overlap"] == found["rank_agreement"] == 1


def test_half_precision_is_compared_in_float64() -> None:
    x = logits(1, 8, 20)
    assert compare_logits(x.bfloat16(), x).figures["max_abs"] == float((x.bfloat16().double() - x).abs().max())


def test_tokens_negated_after_a_prefix_fail_from_there_on() -> None:
    theirs = logits(1, 64, 50)
    ours = theirs.clone()
    ours[:, 16:] *= -1
    measures = compare_logits(ours, theirs)
    first = measures.first_beyond(FIXED["float32"])
    assert first is not None
    assert first["position"] == 16
    assert limits_for("float32", None, 64).exceeded("logits", measures)


def test_overlap_and_rank_of_a_reversed_order() -> None:
    theirs = torch.arange(40, dtype=torch.float64).view(1, 1, 40)
    found = compare_logits(theirs.clone().flip(-1), theirs).figures
    assert found["topk_overlap"] == 0
    swapped = theirs.clone()
    swapped[..., -10:] = theirs[..., -10:].flip(-1)
    found = compare_logits(swapped, theirs).figures
    assert found["topk_overlap"] == 1
    assert found["rank_agreement"] == pytest.approx(-1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sides", ["ours", "theirs", "both"])
def test_a_value_that_is_not_finite_is_seen_on_either_side(value: float, sides: str) -> None:
    ours, theirs = logits(2, 20, 10), logits(2, 20, 10)
    for side, x in (("ours", ours), ("theirs", theirs)):
        if sides in (side, "both"):
            x[1, 7, 3] = value
    measures = compare_logits(ours, theirs)
    assert measures.not_finite == 1
    worst = measures.worst()
    assert worst is not None
    assert (worst["row"], worst["position"]) == (1, 7)
    assert all(math.isfinite(v) for v in measures.figures.values())


def test_masked_tokens_are_not_compared() -> None:
    theirs = logits(2, 10, 8)
    ours, mask = theirs.clone(), torch.ones(2, 10)
    ours[1, 6:], mask[1, 6:] = math.nan, 0
    measures = compare_logits(ours, theirs, mask)
    assert measures.compared == 16
    assert measures.figures["max_abs"] == 0


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_a_comparison_of_nothing_fails(precision: str) -> None:
    x = logits(2, 10, 8)
    measures = compare_logits(x, x, torch.zeros(2, 10))
    assert measures.figures == {}
    assert limits_for(precision, None, 20).exceeded("padded", measures)


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(KconvError, match="cannot be compared"):
        compare_logits(logits(1, 4, 8), logits(1, 4, 9))


def test_states_are_measured_relative_to_the_reference() -> None:
    theirs = torch.ones(10, 16, dtype=torch.float64)
    ours = theirs.clone()
    ours[3] += 0.01
    found = compare_states(ours, theirs)
    assert found.error == pytest.approx(0.01)
    assert (found.row, found.median) == (3, 0)
    assert compare_states(ours, theirs, torch.arange(10) != 3).error == 0
    ours[5, 0] = math.nan
    assert compare_states(ours, theirs).error == math.inf


def test_without_known_noise_low_precision_is_refused() -> None:
    with pytest.raises(KconvError, match="no fixed limit is honest"):
        limits_for("bfloat16", None, 100)


def test_limits_follow_the_reference_noise() -> None:
    noise = {"max_abs": 0.1, "median_abs": 0.01, "p90_abs": 0.05, "max_kl": 1e-3, "mean_kl": 1e-4, "top1_agreement": 0.9}
    low = limits_for("bfloat16", noise, 1000).logits
    assert low["max_abs"] == pytest.approx(0.3)
    assert low["median_abs"] == pytest.approx(0.015)
    assert low["top1_agreement"] == pytest.approx(1 - 0.15 - 0.002)
    assert limits_for("float32", {**noise, "max_abs": 1e-9}, 1000).logits["max_abs"] == FIXED["float32"]["max_abs"]
    assert limits_for("float64", noise, 1000).logits == FIXED["float64"]


@pytest.mark.parametrize(
    ("ours", "device", "theirs", "expected"),
    [("float64", "cpu", "float64", "float64"), ("float64", "cpu", "float32", "float32"), ("float32", "cuda:0", "float64", "tf32"),
     ("bfloat16", "cpu", "float32", "bfloat16"), ("float32", "cpu", "bfloat16", "bfloat16")],
)  # fmt: skip
def test_the_coarser_side_decides(ours: str, device: str, theirs: str, expected: str) -> None:
    assert precision_of(ours, device, theirs) == expected
