"""Killed at any moment, resumed, and the result is byte-identical; whatever is unfinished never looks finished."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kconv.checkpoint.reading import open_checkpoint
from kconv.errors import KconvError
from tests.engine.conftest import ARGUMENTS
from tests.engine.faults import WHEN, convert_in_child, die, fail, tree
from tests.reading import takes_direct_writes


def unfinished(out: Path) -> None:
    """Nothing under the final name, and the partial folder is refused as a source."""
    assert not out.exists()
    partial = out.parent / f".{out.name}.partial"
    if (partial / ".kconv-identity.json").exists() and not (partial / "kconv.json").exists():
        with pytest.raises(KconvError, match="unfinished"):
            open_checkpoint(partial)


@pytest.mark.parametrize("seed", range(12))
def test_killed_five_times_at_random_calls_then_resumed(source: Path, whole: dict, tmp_path: Path, seed: int) -> None:
    """12 conversions, each killed 5 times: every attempt gets up to a sixth of the calls that a whole conversion makes."""
    calls = count_calls(source, tmp_path / "counted")
    rng, out = random.Random(seed), tmp_path / "out"
    for _ in range(5):
        at, when = rng.randint(1, calls // 6), rng.choice(WHEN)
        way = rng.choice(["--direct", "--no-direct"])
        assert convert_in_child([str(source), str(out), *ARGUMENTS, "--resume", way], die, at, when) == -signal.SIGKILL
        unfinished(out)
    assert convert_in_child([str(source), str(out), *ARGUMENTS, "--resume"]) == 0
    assert tree(out) == whole


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("last", range(1, 7))
def test_killed_in_the_last_steps(source: Path, whole: dict, tmp_path: Path, when: str, last: int) -> None:
    """The end of a conversion: syncs, side files, index, manifest, rename, tidying."""
    calls = count_calls(source, tmp_path / "counted")
    out = tmp_path / "out"
    code = convert_in_child([str(source), str(out), *ARGUMENTS], die, calls + 1 - last, when)
    assert code in (0, -signal.SIGKILL)
    assert convert_in_child([str(source), str(out), *ARGUMENTS, "--resume"]) == 0
    assert tree(out) == whole


_CALLS: dict[Path, int] = {}


def count_calls(source: Path, out: Path) -> int:
    """How many file-changing calls a conversion makes (found by bisection: the smallest number that does not kill it)."""
    if source not in _CALLS:
        low, high = 1, 4096
        while low < high:
            middle = (low + high) // 2
            killed = convert_in_child([str(source), str(out / str(middle)), *ARGUMENTS], die, middle, "before") != 0
            low, high = (middle + 1, high) if killed else (low, middle)
        _CALLS[source] = low - 1
    return _CALLS[source]


@pytest.mark.parametrize("way", ["--direct", "--no-direct"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("at", [1, 9, 25])
def test_a_failing_disk_is_reported_and_the_run_resumes(
    source: Path, whole: dict, tmp_path: Path, code: int, at: int, way: str
) -> None:
    out = tmp_path / "out"
    assert convert_in_child([str(source), str(out), *ARGUMENTS, way], fail, at, code) == 3
    unfinished(out)
    assert convert_in_child([str(source), str(out), *ARGUMENTS, "--resume"]) == 0
    assert tree(out) == whole


def command(source: Path, out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "kconv", "convert", str(source), str(out), *ARGUMENTS, "--workers", "1", *more]


def test_interrupt_stops_cleanly_with_130(source: Path, whole: dict, tmp_path: Path) -> None:
    """SIGINT while slabs are written: exit code 130, a message, and a folder that resumes."""
    out = tmp_path / "out"
    slow = "import os, time\nreal = os.pwrite\ndef pwrite(*a):\n    time.sleep(0.05)\n    return real(*a)\nos.pwrite = pwrite\n"
    code = slow + f"import sys; sys.argv = {command(source, out)[2:]!r}\nfrom kconv.cli import main\nmain(sys.argv[1:])"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    partial = tmp_path / ".out.partial"
    deadline = time.monotonic() + 60
    while not list(partial.glob(".kconv-journal*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "--resume" in err
    assert "Traceback" not in err
    unfinished(out)
    assert subprocess.run(command(source, out, "--resume"), capture_output=True, check=False).returncode == 0
    assert tree(out) == whole


def test_another_run_does_not_resume_a_foreign_folder(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert convert_in_child([str(source), str(out), *ARGUMENTS], die, 20, "before") == -signal.SIGKILL
    other = [a if a != "bf16" else "packed" for a in ARGUMENTS]
    arguments = [*command(source, out)[:-2], "--resume", *other]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "begun by another run" in result.stderr
    assert "--overwrite" in result.stderr


def test_a_source_that_changed_does_not_resume(source: Path, tmp_path: Path) -> None:
    """The fingerprints of the source's files are part of the run's identity."""
    import shutil

    copy, out = tmp_path / "copy", tmp_path / "out"
    shutil.copytree(source, copy)
    assert convert_in_child([str(copy), str(out), *ARGUMENTS], die, 20, "before") == -signal.SIGKILL
    shard = sorted(copy.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    result = subprocess.run(command(copy, out, "--resume"), capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "source differ" in result.stderr


def test_torn_journal_line_and_damaged_slab_are_done_again(source: Path, whole: dict, tmp_path: Path) -> None:
    """What the journal claims since its last sync is read back: bytes lost in a power cut are written again."""
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    late = count_calls(source, tmp_path / "counted") * 2 // 3
    assert convert_in_child([str(source), str(out), *ARGUMENTS], die, late, "before") == -signal.SIGKILL
    journal = next(partial.glob(".kconv-journal*"))
    assert journal.read_text().count("\n") >= 1
    for shard in partial.glob("*.safetensors"):
        size = shard.stat().st_size
        header = int.from_bytes(shard.read_bytes()[:8], "little") + 8
        with open(shard, "r+b") as handle:
            handle.seek(header)
            handle.write(os.urandom(size - header))
    with open(journal, "a") as handle:
        handle.write("0.9 deadbe")
    assert convert_in_child([str(source), str(out), *ARGUMENTS, "--resume"]) == 0
    assert tree(out) == whole


def test_the_small_checkpoint_is_written_directly_too(source: Path, whole: dict, tmp_path: Path) -> None:
    """What makes the tests above say something about direct writes: most bytes of the checkpoint go that way."""
    if not takes_direct_writes(tmp_path):
        pytest.skip("no direct writes on this file system")
    out = tmp_path / "out"
    counts = tmp_path / "counts"
    assert convert_in_child([str(source), str(out), *ARGUMENTS, "--direct"], count_direct, counts) == 0
    assert tree(out) == whole
    direct, all_bytes = map(int, counts.read_text().split())
    assert direct > all_bytes / 2


def count_direct(counts: Path) -> None:
    """Leave in a file how many bytes go to descriptors opened with O_DIRECT, and how many are written in all."""
    import fcntl

    real, done = os.pwrite, [0, 0]

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        written = real(fd, data, offset)
        done[0] += written if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT else 0
        done[1] += written
        counts.write_text(f"{done[0]} {done[1]}")
        return written

    os.pwrite = pwrite  # type: ignore[assignment]
