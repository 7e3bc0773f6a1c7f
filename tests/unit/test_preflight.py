"""What is known before the first byte is written: needs, room, memory, folders, and the estimate of time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kconv
from kconv.checkpoint import place
from kconv.conversion import SHARD_SIZE
from kconv.engine import preflight, probe
from kconv.engine.out_files import lay_out
from kconv.errors import KconvError
from kconv.planning.plan import Plan
from tests.builders import small_k3
from tests.cli.refusing import done, run, snapshot


@pytest.fixture
def src(tmp_path: Path) -> Path:
    draft = small_k3(vision=True)
    draft.side["tiktoken.model"] = b"x" * 1_000_000
    return draft.write(tmp_path / "src")


@pytest.fixture
def plan(src: Path) -> Plan:
    return kconv.plan(src).check()


def written(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("options", [{}, {"experts": "bf16"}, {"vision": "keep"}, {"to": "hf"}, {"to": "hf-text"}])
def test_needed_bytes_cover_what_is_written_and_not_much_more(options: dict[str, str], src: Path, tmp_path: Path) -> None:
    made = kconv.plan(src, **options)  # type: ignore[arg-type]
    need = preflight.needed_bytes(made, lay_out(made.targets, SHARD_SIZE))
    kconv.convert(made, tmp_path / "out")
    assert written(tmp_path / "out") <= need + place.SLACK
    assert need <= 1.2 * written(tmp_path / "out")


def test_what_an_earlier_run_wrote_counts_as_there(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    files = lay_out(plan.targets, SHARD_SIZE)
    partial = tmp_path / ".out.partial"
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=600, f_frsize=4096, f_files=0, f_favail=0))
    with pytest.raises(KconvError, match=r"2\.46 MB free"):
        place.check_room(tmp_path / "out", files, partial, 3_000_000)
    partial.mkdir()
    (partial / "x").write_bytes(os.urandom(2_000_000))
    place.check_room(tmp_path / "out", files, partial, 3_000_000)


def test_holes_of_a_rehearsal_need_no_room(tmp_path: Path) -> None:
    """A checkpoint whose tensors are holes makes an output of holes."""
    import struct

    from tests.builders import header_of

    src = small_k3().write(tmp_path / "src", shards=1)
    (shard,) = src.glob("*.safetensors")
    base = 8 + struct.unpack("<Q", shard.read_bytes()[:8])[0]
    size = shard.stat().st_size
    assert header_of(shard)
    with open(shard, "r+b") as handle:
        handle.truncate(base)
        handle.truncate(size)
    made = kconv.plan(src)
    assert preflight.stored_bytes(made, made.output_bytes) < made.output_bytes / 2


def test_free_memory_is_no_more_than_the_machine_has() -> None:
    assert 0 < preflight.free_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_free_memory_respects_the_limit_of_the_process() -> None:
    limit = 3 << 30
    script = (
        f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))\n"
        "from kconv.engine.preflight import free_memory; print(free_memory())"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 0 < int(result.stdout) <= limit


def test_preflight_says_what_it_takes_and_leaves_nothing(plan: Plan, tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    found = probe.preflight(plan, tmp_path / "deep" / "out", shard_size=500_000, workers=2)
    assert snapshot(tmp_path) == before
    files = lay_out(plan.targets, 500_000)
    assert found["files"] == len(files) > 1
    assert found["largest_file"] == max(f.size for f in files)
    assert found["needed_bytes"] > plan.output_bytes + 1_000_000
    disk = os.statvfs(tmp_path)
    assert found["free_bytes"] == pytest.approx(disk.f_bavail * disk.f_frsize, rel=0.2)
    assert found["read_rate"] > 0
    assert found["write_rate"] > 0
    assert found["estimated_seconds"] >= 0


def test_estimate_grows_with_the_work(src: Path) -> None:
    packed, decoded = kconv.plan(src), kconv.plan(src, experts="bf16")
    reading = sum(e.spec.nbytes for n, e in packed.source.entries.items() if n not in set(packed.dropped)) / 1000
    for plan in (packed, decoded):
        writing = plan.output_bytes / 500
        assert probe.seconds_for(plan, 1000, 500, one_disk=True) == pytest.approx(reading + writing)
        assert probe.seconds_for(plan, 1000, 500, one_disk=False) == pytest.approx(max(reading, writing))
        assert probe.seconds_for(plan, None, 500, one_disk=False) == pytest.approx(writing)


def test_plan_with_an_output_shows_the_preflight(src: Path, tmp_path: Path) -> None:
    data = done("plan", src, "--out", tmp_path / "out", "--shard-size", "500kB")
    assert data["preflight"]["files"] > 1
    result = run("plan", src, "--out", tmp_path / "out")
    assert "free" in result.stdout
    assert "about 0:0" in result.stdout
    assert not (tmp_path / "out").exists()


def test_plan_with_an_output_refuses_what_convert_would(src: Path, tmp_path: Path) -> None:
    for out, said in ((src, "is the source"), (src / "x", "lies inside the source"), (tmp_path, "holds the source")):
        result = run("plan", src, "--out", out, "--json")
        assert result.exit_code == 2
        assert said in json.loads(result.stdout)["error"]["message"]


def test_peak_of_the_workers_is_what_the_largest_piece_takes(src: Path) -> None:
    made = kconv.plan(src, experts="bf16")
    one = preflight.peak_bytes(made, 1)
    assert preflight.peak_bytes(made, 3) == 3 * one
    pieces = [(lefts, rights) for e in made.edges for lefts, rights in zip(e.lefts, e.rights, strict=True)]
    assert 0 < one <= max(sum(s.nbytes for s in (*lefts, *rights)) for lefts, rights in pieces)
