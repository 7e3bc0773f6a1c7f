"""A grade is what the way back gives: exact means the very bytes, value-exact the same values in another dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kconv
from kconv.checkpoint.reading import open_checkpoint
from kconv.errors import KconvError
from kconv.synthesis.families import tiny
from tests.builders import small_k3

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "K3 cast": ("k3", {"dtype": "float32", "vision": "keep"}),
    "K3 decoded": ("k3", {"experts": "fp32", "vision": "keep"}),
    "K3 as it is": ("k3", {"vision": "keep"}),
    "Kimi-Linear cast": ("kimi-linear", {"dtype": "float32"}),
    "Kimi-Linear experts": ("kimi-linear", {"experts": "fp32"}),
    "K2 cast": ("k2", {"dtype": "float32"}),
    "K2 decoded": ("k2", {"experts": "fp32"}),
}


def specs(folder: Path) -> dict[str, str]:
    return {name: str(entry.spec) for name, entry in open_checkpoint(folder).entries.items()}


@pytest.mark.parametrize("case", CASES)
def test_a_grade_is_exact_just_when_the_way_back_has_the_source_dtypes(case: str, tmp_path: Path) -> None:
    family, options = CASES[case]
    tiny(family, tmp_path / "src", layers=4)
    made = kconv.convert(tmp_path / "src", tmp_path / "out", **options)
    assert kconv.verify(tmp_path / "out", tmp_path / "src")["ok"]
    kconv.convert(tmp_path / "out", tmp_path / "back", to="hf")
    source, back = specs(tmp_path / "src"), specs(tmp_path / "back")
    assert back.keys() == source.keys()
    assert (made["grade"] in ("exact", "exact-with-sidecar")) == (back == source)
    widened = {(source[n].split()[0], back[n].split()[0]) for n in source if source[n] != back[n]}
    assert (made["grade"], widened) in [("value-exact", {("BF16", "F32")}), ("exact", set()), ("exact-with-sidecar", set())]


def test_a_requirement_of_exact_refuses_a_cast(tmp_path: Path) -> None:
    small_k3().write(tmp_path / "src")
    with pytest.raises(KconvError, match="the plan is value-exact, --require asks for exact"):
        kconv.convert(tmp_path / "src", tmp_path / "out", dtype="float32", require="exact")
    assert not (tmp_path / "out").exists()


def test_tensors_that_nemo_widens_make_the_grade_value_exact(tmp_path: Path) -> None:
    made = small_k3()
    for name in [n for n in made.tensors if "conv1d" in n]:
        made.tensors[name] = made.tensors[name].to(torch.bfloat16)
    made.write(tmp_path / "src")
    assert kconv.plan(tmp_path / "src", "nemo").summary()["grade"] == "value-exact"
