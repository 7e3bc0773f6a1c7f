"""Results of the public calls: frozen, read by attribute or by JSON key, and the JSON objects of the commands."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import kconv
from kconv.json_types import Result


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("results")
    kconv.tiny("k3", root / "source", seed=3)
    return root


def test_results_are_frozen_dataclasses_that_are_read_by_their_json_keys_too(folders: Path) -> None:
    done = kconv.convert(folders / "source", folders / "out")
    again = kconv.convert(folders / "source", folders / "out", resume=True)
    verified = kconv.verify(folders / "out", folders / "source")
    about = kconv.inspect(folders / "source")
    for found in (done, again, verified, about, kconv.plan(folders / "source").summary()):
        assert isinstance(found, Result)
        assert json.loads(json.dumps(found.to_json())) == {key: found[key] for key in found}
        with pytest.raises(dataclasses.FrozenInstanceError):
            found.new = 1  # type: ignore[attr-defined]
    assert verified.ok is verified["ok"] is True
    assert (done.source_layout, done["from"]) == ("hf", "hf")
    assert about["family"] == "Kimi K3"


def test_what_a_result_does_not_know_is_no_key_of_it(folders: Path) -> None:
    kconv.convert(folders / "source", folders / "spoilt")
    (folders / "spoilt" / "kconv.json").write_text("{}")
    found = kconv.verify(folders / "spoilt", folders / "source")
    assert list(found) == ["ok", "compared", "different", "missing", "extra", "differences", "files"]
    done = kconv.convert(folders / "source", folders / "twice")
    again = kconv.convert(folders / "source", folders / "twice", resume=True)
    assert set(done) - set(again) == {"peak_bytes", "errors"}
