"""Processes that race for one folder; `python -m tests.engine.races` runs as many trials as are asked for."""

from __future__ import annotations

from pathlib import Path

from tests.engine.races import race


def test_racing_processes_leave_a_whole_folder_and_nothing_beside_it(tmp_path: Path) -> None:
    seen, wrong = race(16, 7, tmp_path)
    assert wrong == []
    assert seen["exit 0"] >= 8
    assert seen["exit 2"] >= 4, "some have to lose, or nothing raced"
