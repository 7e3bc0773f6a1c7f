"""Fixtures of the publishing tests."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kconv.synthesis.families import tiny
from tests.hubserver.fixtures import hub, hub_token, xet_hub

__all__ = ["hub", "hub_token", "xet_hub"]

CARD = "---\nlicense: mit\nbase_model: moonshotai/Kimi-K3\ntags: [kconv]\n---\n# A model\n"


def write_manifest(folder: Path) -> None:
    """A manifest over every file of the folder, in the form `kconv convert` writes."""
    files = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}
    rows = {
        name: {"size": p.stat().st_size, "sha256": hashlib.sha256(p.read_bytes()).hexdigest()}
        for name, p in files.items()
        if not name.startswith("kconv.")
    }
    (folder / "kconv.json").write_text(json.dumps({"format": 1, "files": rows}, indent=1))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache-home")))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small sharded checkpoint that is fit to be published."""
    folder = tmp_path / "model"
    folder.mkdir()
    weight_map = {}
    for k in range(1, 4):
        name = f"model-{k:05d}-of-00003.safetensors"
        generator = torch.Generator().manual_seed(k)
        save_file({f"w{k}": torch.randn(300 // k, 300, generator=generator)}, folder / name, {"format": "pt"})
        weight_map[f"w{k}"] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "x"}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "LICENSE").write_text("MIT")
    (folder / "README.md").write_text(CARD)
    write_manifest(folder)
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Kimi K3 that drafts are made for."""
    folder = tmp_path_factory.mktemp("target") / "k3"
    tiny("k3", folder, seed=1)
    return folder


@pytest.fixture(scope="module")
def k25_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Kimi K2.5 as deep as the tiny Kimi K3."""
    folder = tmp_path_factory.mktemp("k25-target") / "k25"
    tiny("k25", folder, seed=1, layers=9)
    return folder
