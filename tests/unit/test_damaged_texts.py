"""Cards, targets, evidence and what kconv itself keeps: damaged, they are refused in a sentence, whatever the damage."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

import kconv
from kconv.checkpoint import evidence, manifest
from kconv.checkpoint.reading import open_checkpoint
from kconv.engine.journal import Journal
from kconv.errors import KconvError, Unreadable
from kconv.packaging.target_model import Target, stated
from kconv.publishing import modelcard, modelcard_rules
from kconv.publishing.hub_hashes import HashMemory
from kconv.storage.files import LocalFiles
from kconv.zoo.cards import FOLDER, Card, load_card, numbers
from tests.builders import small_k3

YAMLS = {
    "a date that is none": "when: 2026-13-45",
    "a tag that makes objects": "x: !!python/object/apply:os.system [id]",
    "a list as a key": "? [1]\n: 2",
    "a key twice": "a: 1\na: 2",
    "nested without end": "a: " + "[" * 5000,
    "half a pair": 'a: "\\ud800',
}


@pytest.mark.parametrize("case", YAMLS)
def test_yaml_of_any_damage_is_refused_in_cards_and_readmes(case: str, tmp_path: Path) -> None:
    (tmp_path / "card.yaml").write_text(YAMLS[case])
    with pytest.raises(KconvError, match="not valid YAML"):
        load_card(tmp_path / "card.yaml")
    data, found = modelcard_rules.metadata(f"---\n{YAMLS[case]}\n---\n")
    assert data == {}
    assert "is not valid YAML" in found[0]


@pytest.mark.parametrize("text", ["0-999999999999", "1-99999999", "x", "", "3-", "-3", "0-2,,5", "9" * 5000])
def test_a_range_of_a_card_is_bounded_before_it_is_made(text: str) -> None:
    with pytest.raises(KconvError, match="is no range of at most 100,000 numbers"):
        numbers(text)
    assert numbers("0-2,5") == (0, 1, 2, 5)


def test_a_layout_of_more_tensors_than_any_checkpoint_has_is_refused_before_it_is_made() -> None:
    data = {"layout": {
        "domains": {"a": "0-99999", "b": "0-99999"},
        "groups": [{"prefix": "x.{a}.{b}.", "tensors": {"w": "F32 [1]"}, "copies": 1}],
    }}  # fmt: skip
    with pytest.raises(KconvError, match="makes 10,000,000,000 tensors"):
        next(Card(data, "mine.yaml").placed())


def test_a_card_that_lacks_any_required_key_is_refused(tmp_path: Path) -> None:
    whole = yaml.safe_load((FOLDER / "kimi-k3.yaml").read_text())
    for key in ("title", "verification", "adapter", "formats"):
        (tmp_path / "card.yaml").write_text(yaml.safe_dump({k: v for k, v in whole.items() if k != key}))
        with pytest.raises(KconvError, match=rf"'{key}' is a required property"):
            load_card(tmp_path / "card.yaml")


@pytest.mark.parametrize("change", [
    {"text_config": [1]}, {"text_config": "x"}, {"architectures": "K"}, {"architectures": {"a": 1}}, {"architectures": []},
])  # fmt: skip
def test_a_target_whose_config_is_odd_is_read_without_an_accident(change: dict[str, Any], tmp_path: Path) -> None:
    made = small_k3()
    made.config |= change
    target = Target.open(made.write(tmp_path / "t"))
    assert set(stated(target)) >= {"architecture", "vocab_size"}
    assert target.token(3) is None


@pytest.mark.parametrize("text", ['{"weight_map": [1]}', '{"weight_map": {"a": 1}}', "{}", "[]", '{"a": 1, "a": 2}', "\xff"])
def test_a_target_with_a_damaged_index_is_refused(text: str, tmp_path: Path) -> None:
    folder = small_k3().write(tmp_path / "t")
    (folder / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(KconvError):
        Target.open(folder).table("lm_head")


def test_links_in_a_circle_are_named(tmp_path: Path) -> None:
    folder = small_k3().write(tmp_path / "src")
    (folder / "a.txt").symlink_to("b.txt")
    (folder / "b.txt").symlink_to("a.txt")
    with pytest.raises(KconvError, match=r"a\.txt is a link in a circle"):
        open_checkpoint(folder)


@pytest.mark.parametrize("blob", [b"", b"[]", b"{", b"\xff\xfe", b'{"a":' * 5000, b'{"ok": true, "ok": false}'])
def test_damaged_evidence_is_refused_and_a_damaged_memory_is_forgotten(blob: bytes, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "kconv.verify.json").write_bytes(blob)
    with pytest.raises(KconvError, match="the evidence"):
        evidence.load(tmp_path / "kconv.verify.json")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    memory = HashMemory(tmp_path)
    memory.path.parent.mkdir(parents=True)
    for text in (blob, json.dumps({str(tmp_path / "x"): {"state": 3}}).encode(), b'{"x": 1}'):
        memory.path.write_bytes(text)
        assert HashMemory(tmp_path).known == {}


def test_a_journal_of_junk_claims_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"\xff\xfe\x00\nsync\n0.1 abc\n\xff torn")
    journal = Journal(path)
    journal.open()
    journal.close()
    assert (journal.durable, journal.claimed) == ({}, {"0.1": "abc"})


def test_a_journal_larger_than_any_machine_claims_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"0.1 abc\nsync\n")
    os.truncate(path, 1 << 40)
    journal = Journal(path)
    assert not journal.is_done()
    journal.open()
    journal.synced(last=True)
    journal.close()
    assert (journal.durable, journal.claimed, journal.is_done()) == ({}, {}, True)


def test_what_cannot_be_read_for_want_of_files_is_the_environment() -> None:
    codes = {number: Unreadable("x", OSError(number, "no")).exit_code for number in (24, 13)}
    assert codes == {24: 3, 13: 2}


def test_a_string_of_a_checkpoint_stands_in_a_card_as_text_only() -> None:
    hostile = "a`|b\n# head\x1b[2J <script>x</script> ![i](http://h/x) [l](javascript:x)"
    manifest = {
        "source": {"name": hostile, "revision": hostile, "config": {"a": 1}}, "family": hostile, "from": hostile, "to": "native",
        "grade": "exact", "options": {}, "plan_digest": "0", "dropped": [{"count": 1, "reason": hostile}], "files": {},
    }  # fmt: skip
    body = modelcard.converted_card(hostile, manifest).split("---\n", 2)[2]
    assert "\x1b" not in body
    assert "<script>" not in body
    assert "](http://h" not in body
    assert "](javascript" not in body
    assert [line for line in body.splitlines() if line == "# head"] == []
    assert all(line.replace("\\|", "").count("|") in (0, 3) for line in body.splitlines() if line.startswith("|--") is False)


def test_local_files_list_a_folder_with_links_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("a")
    assert LocalFiles(tmp_path).names() == []


@pytest.mark.parametrize(("path", "value"), [
    (("options",), {}), (("files",), None), (("provenance",), 10**39), (("provenance",), {"config.json": 1}),
    (("files", "config.json"), {}), (("files", "config.json", "size"), "x"),
    (("facts", "formats", 0, "form", "names"), []), (("facts", "formats", 0, "form", "names"), ["x", None]),
    (("facts", "formats", 0, "form", "names", 0), []), (("facts", "formats", 0, "rows"), 1),
    (("facts", "formats", 0, "rows"), {"a": 1}), (("facts", "formats", 0, "experts", "w1", 0), []),
])  # fmt: skip
def test_a_manifest_sealed_again_over_values_of_other_types_is_refused(path: tuple, value: Any, tmp_path: Path) -> None:
    kconv.convert(small_k3().write(tmp_path / "src"), tmp_path / "out")
    data = json.loads((tmp_path / "out" / "kconv.json").read_text())
    part = data
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    (tmp_path / "out" / "kconv.json").write_bytes(manifest.dump(data))
    with pytest.raises(KconvError, match=r"kconv\.json|is no form of a weight"):
        kconv.plan(tmp_path / "out", "hf").check()
    if path[0] != "facts":  # what only the way back reads is refused there
        assert not kconv.verify(tmp_path / "out", tmp_path / "src")["ok"]
