"""`push_to_hub` of the native classes: the manifest goes along, and what was pushed loads again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

import kconv
from kconv.packaging.provenance import KEY
from kconv.synthesis.families import tiny
from tests.hubserver import HubServer


@pytest.mark.parametrize("kind", ["k3", "k25-dflash"])
def test_push_and_load(hub: HubServer, hub_token: str, tmp_path: Path, kind: str) -> None:
    tiny(kind, tmp_path / "published")
    model = kconv.load(tmp_path / "published")
    setattr(model.config, KEY, {"format": 1, "kept": "as it is"})
    model.push_to_hub("me/pushed")
    files = hub.files("me/pushed")
    manifest = json.loads(files["kconv.json"])
    assert manifest["kind"] == "saved"
    assert manifest["family"] == model.config.model_type
    assert set(manifest["files"]) == set(files) - {"kconv.json", ".gitattributes"}
    for name, known in manifest["files"].items():
        assert hashlib.sha256(files[name]).hexdigest() == known["sha256"]
    assert json.loads(files["config.json"])[KEY] == {"format": 1, "kept": "as it is"}
    again = kconv.load("hf://me/pushed")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    straight = type(model).from_pretrained("me/pushed")
    assert straight.state_dict().keys() == model.state_dict().keys()
