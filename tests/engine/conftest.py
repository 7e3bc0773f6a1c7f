"""One small checkpoint with everything in it, and its uninterrupted conversion."""

from __future__ import annotations

from pathlib import Path

import pytest

from kconv.synthesis.families import tiny
from tests.engine.faults import convert_in_child, tree

ARGUMENTS = ["--experts", "bf16", "--vision", "keep", "--shard-size", "400KB"]


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Kimi K3 checkpoint whose experts lie in several shards."""
    out = tmp_path_factory.mktemp("engine") / "source"
    tiny("k3", out, seed=3, split_experts=True)
    return out


@pytest.fixture(scope="session")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """sha256 of every file of an uninterrupted conversion."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert convert_in_child([str(source), str(out), *ARGUMENTS]) == 0
    return tree(out)
