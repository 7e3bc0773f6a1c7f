"""Several processes on one folder: the result does not depend on how many there were, nor on which one died."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.conftest import ARGUMENTS
from tests.engine.faults import context, convert_in_child, die, tree


def arguments(source: Path, out: Path, part: str) -> list[str]:
    return [str(source), str(out), *ARGUMENTS, "--part", part]


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2)])
def test_parts_one_after_the_other(source: Path, whole: dict, tmp_path: Path, order: tuple) -> None:
    out = tmp_path / "out"
    for i in order:
        assert not out.exists()
        assert convert_in_child(arguments(source, out, f"{i}/3")) == 0
    assert tree(out) == whole


def test_two_parts_at_once_one_of_them_killed(source: Path, whole: dict, tmp_path: Path) -> None:
    out = tmp_path / "out"
    from tests.engine.faults import _child

    both = [
        context.Process(target=_child, args=(arguments(source, out, "1/2"), None, ())),
        context.Process(target=_child, args=(arguments(source, out, "2/2"), die, (25, "half"))),
    ]
    for process in both:
        process.start()
    for process in both:
        process.join(120)
    assert [p.exitcode for p in both] == [0, -signal.SIGKILL]
    assert not out.exists()
    assert convert_in_child(arguments(source, out, "2/2")) == 0
    assert tree(out) == whole


def test_a_finished_part_run_again_says_so(source: Path, whole: dict, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for part in ("1/2", "2/2", "1/2"):
        assert convert_in_child(arguments(source, out, part)) == 0
    assert tree(out) == whole


def test_another_number_of_parts_is_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert convert_in_child(arguments(source, out, "1/2")) == 0
    assert convert_in_child(arguments(source, out, "2/3")) == 2


def test_four_processes_under_torchrun(source: Path, whole: dict, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--no-python", sys.executable, "-m", "kconv"]
    result = subprocess.run([*run, "convert", str(source), str(out), *ARGUMENTS], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert tree(out) == whole
