"""Right conversions pass: the recorded answers of the official code, in every precision and form of experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kconv
from kconv import parity
from tests.parity.goldens import CALM, LONG, TINY, WIDE, golden, model


@pytest.mark.parametrize("experts", ["packed", "bf16"])
def test_tiny_in_float64(experts: str, tmp_path: Path) -> None:
    kconv.convert(TINY, tmp_path / "out", experts=experts)
    report = kconv.parity(tmp_path / "out", golden(TINY), dtype="float64", cached=True)  # type: ignore[operator]
    data = report.data()
    assert data["verdict"] == "pass", report.lines()
    assert set(data["runs"]) == {"logits", "padded", "row1", "cached"}
    assert all(run["max_abs"] < 2e-6 for run in data["runs"].values())
    assert len(data["layers"]) >= 10
    assert all(layer["error"] < 2e-6 for layer in data["layers"])
    assert (data["first_divergence"], data["routing_flips"], data["nan"]) == (None, 0, False)


def test_tiny_in_fp32_is_no_further_than_the_official_fp32() -> None:
    report = parity.compare(model(TINY, torch.float32), golden(TINY))
    assert report.passed, report.lines()
    assert report.data()["runs"]["logits"]["median_abs"] < 1.5 * 2.2e-5
    assert report.data()["max_kl"] < 1.5 * 4.9e-8


@pytest.mark.parametrize("folder", [CALM, WIDE], ids=["calm", "wide"])
def test_calm_in_fp32(folder: Path) -> None:
    report = parity.compare(model(folder, torch.float32), golden(folder))
    assert report.passed, report.lines()
    assert report.data()["max_abs"] < 2e-5


def test_long_prompt_with_every_module() -> None:
    report = parity.compare(model(LONG), golden(LONG))
    data = report.data()
    assert report.passed, report.lines()
    assert data["tokens"] == 1040
    assert data["runs"]["padded"]["max_abs"] < 2e-6
    assert "not judged" in data["notes"][-1]
    assert len(data["notes"]) == 1, "a recorded module is called without its hooks: call modules, not their methods"
    held = parity.Golden(golden(LONG))
    assert held.mask.sum(1).tolist() == [520, 390]
    assert len(held.points) == 136


def test_bf16_is_judged_by_the_reference_noise_and_flips_are_set_apart() -> None:
    report = parity.compare(model(LONG, torch.bfloat16), golden(LONG))
    data = report.data()
    assert report.passed, report.lines()
    assert data["routing_flips"] > 0
    assert data["runs"]["forced"]["max_abs"] < data["max_abs"] / 10
    assert data["limits"]["from"].startswith("1.5 x the reference's own noise (captured in bfloat16)")
    assert 0.1 < data["of_noise"]["median_abs"] < 1.5


def test_low_precision_without_known_noise_is_refused() -> None:
    with pytest.raises(kconv.errors.KconvError, match="own noise"):
        parity.compare(model(CALM, torch.bfloat16), golden(CALM))


def test_noise_may_be_given_as_figures(tmp_path: Path) -> None:
    figures = tmp_path / "noise.json"
    figures.write_text('{"max_abs": 1.8, "median_abs": 0.049, "mean_kl": 3.1e-3, "max_kl": 0.12, "top1_agreement": 0.929}')
    report = parity.compare(model(CALM, torch.bfloat16), golden(CALM), noise=figures)
    assert report.passed, report.lines()
    figures.write_text('{"median_abs": 1e-3}')
    report = parity.compare(model(CALM, torch.bfloat16), golden(CALM), noise=figures)
    assert {f["figure"] for f in report.failed} == {"median_abs"}


def test_both_attention_implementations_are_named() -> None:
    loaded = model(LONG)
    loaded.set_attn_implementation("sdpa")
    try:
        report = parity.compare(loaded, golden(LONG))
    finally:
        loaded.set_attn_implementation("eager")
    assert report.passed, report.lines()
    assert report.data()["attention"] == {"ours": "sdpa", "reference": "eager"}


def test_the_package_is_callable_however_it_was_imported() -> None:
    import kconv.parity.measures  # binds kconv.parity to the module

    assert callable(kconv.parity)
    assert parity.check.__module__ == "kconv.parity.comparison"
