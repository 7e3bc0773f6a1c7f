"""Workers of a fresh process import and compile what their steps need, without finding a package half imported."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from kconv.engine.first_time import alone_at_first
from tests.builders import ROOT, small_k3


@pytest.fixture
def scaled(tmp_path: Path) -> Path:
    """A checkpoint in which two layers need kernels that import numba by different ways."""
    made = small_k3()
    for end in ("layers.1.self_attn.o_proj.weight", "layers.3.self_attn.kv_b_proj.weight"):
        weight = made.tensors[ROOT + end]
        made.tensors[ROOT + end] = weight.to(torch.float8_e4m3fn)
        made.tensors[f"{ROOT}{end}_scale"] = torch.full((weight.shape[0], 1), 0.5, dtype=torch.bfloat16)
    return made.write(tmp_path / "src")


@pytest.mark.parametrize("run", range(3))
def test_a_fresh_process_with_many_workers_converts_and_verifies(scaled: Path, tmp_path: Path, run: int) -> None:
    pytest.importorskip("numba")
    for words in (["convert", scaled, tmp_path / "out", "--to", "nemo"], ["verify", tmp_path / "out", "--source", scaled]):
        command = [sys.executable, "-m", "kconv", *map(str, words), "--workers", "4"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr


def test_the_first_of_a_kind_runs_alone_and_the_second_beside_it() -> None:
    inside, both = threading.Event(), threading.Barrier(2, timeout=30)

    def second() -> None:
        with alone_at_first("one kind"):
            inside.set()
            both.wait()

    with alone_at_first("one kind"):
        thread = threading.Thread(target=second, daemon=True)
        thread.start()
        assert not inside.wait(0.2)
    assert inside.wait(30)
    both.wait()
    thread.join()
    two = [threading.Thread(target=second, daemon=True) for _ in range(2)]
    for thread in two:  # a kind that is done waits for nobody: both meet at the barrier
        thread.start()
    for thread in two:
        thread.join(30)
        assert not thread.is_alive()
    assert not both.broken


def test_a_first_time_that_fails_leaves_the_lock_free_and_is_first_again() -> None:
    with pytest.raises(ZeroDivisionError), alone_at_first("failing"):
        raise ZeroDivisionError
    with alone_at_first("failing"):
        pass
