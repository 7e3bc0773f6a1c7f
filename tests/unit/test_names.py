"""Folding names for people: indices become ranges, files are named or counted, nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kconv.names import fold, folded, number, ranges


@pytest.mark.parametrize("part, value", [
    ("0", 0), ("007", 7), ("123456789", 123456789), ("1234567890", None), ("²", None), ("٣", None), ("-1", None), ("1e3", None),
    ("", None), ("x", None),
])  # fmt: skip
def test_what_is_an_index(part: str, value: int | None) -> None:
    assert number(part) == value


@given(st.lists(st.integers(0, 200), min_size=1))
def test_ranges_hold_exactly_the_numbers(numbers: list[int]) -> None:
    found: set[int] = set()
    for part in ranges(numbers).split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    assert found == set(numbers)


def test_one_line_a_pattern_with_ranges_and_counts() -> None:
    names = [f"layers.{i}.experts.{e}.w1" for i in (1, 2, 5) for e in (0, 1)] + ["norm.weight"]
    assert folded(names) == ["layers.{1-2,5}.experts.{0-1}.w1 (6 tensors)", "norm.weight"]


def test_files_are_named_while_they_are_few() -> None:
    files = {"a.0": "x", "a.1": "y", "b": "x", "c": ""}
    assert folded(files, file_of=files.__getitem__) == ["a.{0-1} (2 tensors) in x, y", "b in x", "c"]
    many = {f"a.{i}": f"f{i}" for i in range(4)}
    assert folded(many, file_of=many.__getitem__) == ["a.{0-3} (4 tensors) in 4 files from f0 to f3"]


def test_what_is_left_out_is_counted() -> None:
    assert folded([f"name{c}" for c in "abcde"], most=3) == ["namea", "nameb", "namec", "... and 2 more patterns"]


@given(st.text(max_size=30))
def test_any_name_can_be_folded(name: str) -> None:
    assert folded([name])[0].count(".") == fold(name).count(".") == name.count(".")
