"""Packaged drafts in the classes of those who will use them: z-lab's dflash, speculators, nemo-automodel."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kconv.packaging import provenance
from kconv.packaging.target_model import Target
from tests.hubserver import HubServer
from tests.publish.packaged import config_of, packaged


@pytest.mark.skipif(importlib.util.find_spec("dflash") is None, reason="needs dflash 0.1.0")
@pytest.mark.parametrize("kind", ["k25-dflash"])
def test_dflash_loads_it(kind: str, tmp_path: Path, target: Path) -> None:
    """z-lab's own class, through Transformers' from_pretrained on the folder."""
    from dflash.model import DFlashDraftModel

    out, _ = packaged(kind, tmp_path, target)
    model, info = DFlashDraftModel.from_pretrained(out, output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.target_layer_ids == [1, 4, 7]
    assert model.block_size == 4


def staged(out: Path, runtime: str, tmp_path: Path) -> Path:
    """What a user of a runtime with its own config does: that config beside the weights."""
    folder = tmp_path / f"for-{runtime}"
    folder.mkdir()
    os.symlink(out / "model.safetensors", folder / "model.safetensors")
    shutil.copy(out / "runtimes" / runtime / "config.json", folder / "config.json")
    return folder


@pytest.mark.skipif(importlib.util.find_spec("speculators") is None, reason="needs speculators 0.9")
@pytest.mark.parametrize("kind", ["k25-dflash", "k3-dspark-gqa"])
def test_speculators_loads_it(hub: HubServer, kind: str, tmp_path: Path, target: Path) -> None:
    """With its verifier block: speculators fetches the tables that the package borrows from that repository of the Hub."""
    from speculators import SpeculatorModel, SpeculatorModelConfig

    hub.seed_folder("moonshotai/Tiny", target)
    out, data = packaged(kind, tmp_path, target)
    assert data["tables"] == {"embed_tokens": "borrowed", "lm_head": "borrowed"}
    folder = staged(out, "speculators", tmp_path)
    config = SpeculatorModelConfig.from_pretrained(folder)
    assert config.speculators_config.verifier.name_or_path == "moonshotai/Tiny"
    assert config.speculators_config.verifier.architectures == ["KimiK3ForConditionalGeneration"]
    assert getattr(config, provenance.KEY)["target"]["revision"] == "a" * 40
    model = SpeculatorModel.from_pretrained(folder)
    state, tensors = model.state_dict(), load_file(out / "model.safetensors")
    assert tensors.keys() <= state.keys()
    assert all(torch.equal(state[n].float(), t.float()) for n, t in tensors.items())
    whole = Target.open(target)
    for kind_of_table in ("embed_tokens", "lm_head"):
        name = whole.table(kind_of_table) or ""
        theirs = load_file(target / whole.entry(name).file)[name]
        assert torch.equal(state[f"{kind_of_table}.weight"].float(), theirs.float())


@pytest.mark.skipif(
    any(importlib.util.find_spec(n) is None for n in ("nemo_automodel", "fla", "triton")), reason="needs nemo-automodel"
)
def test_nemo_loads_it(tmp_path: Path, target: Path) -> None:
    from nemo_automodel.components.models.kimi_k3.config import KimiK3TextConfig
    from nemo_automodel.components.speculative.dflash.draft_kimi_k3 import KimiK3DFlashDraftModel

    out, _ = packaged("k3-dflash", tmp_path, target)
    config = config_of(out)
    stale = ("architectures", "model_type", "dtype")
    model = KimiK3DFlashDraftModel(KimiK3TextConfig(**{k: v for k, v in config.items() if k not in stale}))
    missing = model.load_state_dict(load_file(out / "model.safetensors"), strict=True)
    assert not missing.missing_keys
