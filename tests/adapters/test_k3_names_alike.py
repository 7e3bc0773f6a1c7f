"""Tensors whose names differ only in an expert's number are looked at once, and nothing that differs is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import kconv
from kconv.checkpoint.reading import Checkpoint, Entry, open_checkpoint
from kconv.spec import Spec


def tiny(tmp_path: Path) -> Checkpoint:
    kconv.tiny("k3", tmp_path / "k3")
    return open_checkpoint(tmp_path / "k3")


def test_groups_hold_every_tensor_once_with_its_file_and_spec(tmp_path):
    checkpoint = tiny(tmp_path)
    names = [n for group in checkpoint.alike for n in group.names]
    assert sorted(names) == sorted(checkpoint.entries)
    assert len(checkpoint.alike) < len(names) / 2
    for group in checkpoint.alike:
        held = {(e.spec, e.file) for e in map(checkpoint.entries.__getitem__, group.names)}
        assert held == {(group.entry.spec, group.entry.file)}
    assert checkpoint.nbytes == sum(e.spec.nbytes for e in checkpoint.entries.values())


def test_equal_specs_of_a_checkpoint_are_one_object(tmp_path):
    specs = [e.spec for e in tiny(tmp_path).entries.values()]
    assert len({id(s) for s in specs}) == len(set(specs))


def test_one_lacking_and_one_odd_expert_of_a_stack_are_named_and_the_others_claimed(tmp_path):
    checkpoint = tiny(tmp_path)
    experts = [n for n in checkpoint.entries if n.endswith("w2.weight_packed")]
    lacking, odd = experts[1], experts[2]
    entries = {n: e for n, e in checkpoint.entries.items() if n != lacking}
    entries[odd] = Entry(Spec("U8", (3, 5)), entries[odd].file, entries[odd].start)
    made = kconv.plan(replace(checkpoint, entries=entries))
    assert made.findings.missing == [lacking]
    assert [name for name, _ in made.findings.wrong if name == odd] == [odd]
    assert not made.findings.unclaimed


def test_layers_left_out_are_dropped_in_the_order_of_the_checkpoint(tmp_path):
    checkpoint = tiny(tmp_path)
    order = {n: i for i, n in enumerate(checkpoint.entries)}
    outside = next(d.names for d in kconv.plan(checkpoint, layers=(0, 1)).layouts.drops if "--layers" in d.reason)
    assert list(outside) == sorted(outside, key=order.__getitem__)
