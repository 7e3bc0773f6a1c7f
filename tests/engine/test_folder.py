"""Nothing is removed, replaced or adopted that kconv did not make for this very job, and nothing of its own is left behind."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kconv
from kconv.checkpoint import folder as folders
from kconv.checkpoint.claim import claim, lock_path
from kconv.errors import KconvError
from tests.builders import small_k3
from tests.cli.refusing import done, error_of, run, snapshot
from tests.engine.faults import WHEN, convert_in_child, die, tree
from tests.publish.packaged import DECLARED, WHOSE

DRAFT = "k25-dflash"


@pytest.fixture
def src(tmp_path: Path) -> Path:
    return small_k3().write(tmp_path / "src")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("target") / "target"
    kconv.tiny("k3", out, seed=3)
    return out


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("draft") / "draft"
    kconv.tiny(DRAFT, out, seed=3)
    return out


def packaged(draft: Path, target: Path, out: Path, **options: Any) -> dict[str, Any]:
    return kconv.package(draft, target, out, declared=DECLARED[DRAFT], read_tables=False, **(WHOSE | options))


def interrupted(src: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A conversion that a full disk ended; returns what it left."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", full)
        assert run("convert", src, out).exit_code == 3
    return folders.partial_path(out)


def refused_and_untouched(call: Callable[[], object], around: Path) -> str:
    before = snapshot(around)
    with pytest.raises(KconvError) as raised:
        call()
    assert raised.value.exit_code == 2
    assert snapshot(around) == before
    return str(raised.value)


# What is not kconv's


@pytest.mark.parametrize("kind", ["folder", "link", "file"])
def test_a_foreign_folder_under_the_name_of_an_unfinished_one_is_left_alone(
    kind: str, src: Path, draft: Path, target: Path, tmp_path: Path
) -> None:
    out, partial, mine = tmp_path / "out", tmp_path / ".out.partial", tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    if kind == "file":
        partial.write_text("years of work")
    elif kind == "link":
        partial.symlink_to(mine)
    else:
        mine.rename(partial)
    calls: list[Callable[[], object]] = [
        lambda: kconv.convert(src, out),
        lambda: kconv.convert(src, out, resume=True),
        lambda: kconv.convert(src, out, overwrite=True),
        lambda: kconv.convert(src, out, part=(1, 2)),
        lambda: packaged(draft, target, out),
        lambda: packaged(draft, target, out, overwrite=True),
        lambda: kconv.tiny("k3", out),
    ]
    for call in calls:
        said = refused_and_untouched(call, tmp_path)
        assert f"{partial} is in the way" in said
        assert "move it elsewhere" in said


def test_a_users_file_in_an_unfinished_folder_stops_its_removal(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = interrupted(src, tmp_path / "out", monkeypatch)
    (partial / "notes.txt").write_text("mine")
    said = refused_and_untouched(lambda: kconv.convert(src, tmp_path / "out", overwrite=True), tmp_path)
    assert "also holds notes.txt, which kconv did not write there" in said


def test_package_and_tiny_leave_an_interrupted_conversion_alone(
    src: Path, draft: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(src, tmp_path / "out", monkeypatch)
    for call in (lambda: packaged(draft, target, tmp_path / "out", overwrite=True), lambda: kconv.tiny("k3", tmp_path / "out")):
        said = refused_and_untouched(call, tmp_path)
        assert "an unfinished run of kconv convert left it" in said
    kconv.convert(src, tmp_path / "out", resume=True)
    assert kconv.verify(tmp_path / "out", src)["ok"]


@pytest.mark.parametrize("name", ["notes.txt", "runs/log.txt", "extra.safetensors", "empty/"])
def test_overwrite_names_a_users_file_and_keeps_it(name: str, src: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    kconv.convert(src, out)
    path = out / name
    path.parent.mkdir(exist_ok=True)
    path.mkdir() if name.endswith("/") else path.write_text("mine")
    said = refused_and_untouched(lambda: kconv.convert(src, out, overwrite=True), tmp_path)
    assert f"also holds {name.replace('/log.txt', '/')}" in said
    assert "move what you want to keep elsewhere" in said


def test_a_users_file_that_comes_during_the_conversion_is_kept_too(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    kconv.convert(src, out)
    real = os.fdatasync

    def late(fd: int) -> None:
        (out / "notes.txt").write_text("mine")
        real(fd)

    monkeypatch.setattr(os, "fdatasync", late)
    with pytest.raises(KconvError, match=r"also holds notes\.txt") as raised:
        kconv.convert(src, out, overwrite=True, experts="bf16")
    monkeypatch.undo()
    assert raised.value.exit_code == 3
    assert "the same command with --resume goes on" in str(raised.value)
    assert (out / "notes.txt").read_text() == "mine"
    (out / "notes.txt").unlink()
    assert kconv.convert(src, out, overwrite=True, resume=True, experts="bf16")["resumed_slabs"] > 0


def test_overwrite_leaves_other_folders_beside_the_output_alone(src: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    kconv.convert(src, out)
    for name in (".out.old", ".out.kconv-old-mine", ".out2.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("years of work")
    before = {k: v for k, v in snapshot(tmp_path).items() if not k.startswith(str(out))}
    kconv.convert(src, out, overwrite=True, experts="bf16")
    assert {k: v for k, v in snapshot(tmp_path).items() if not k.startswith(str(out))} == before


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}', '{"format": 1, "files": {"a": 1}}', "[" * 5000])
def test_overwrite_does_not_touch_a_folder_with_another_programs_manifest(text: str, src: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kconv.json").write_text(text)
    said = refused_and_untouched(lambda: kconv.convert(src, tmp_path / "out", overwrite=True), tmp_path)
    assert "was not made by kconv" in said


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"made_by": "kconv convert", "job": {}, "files": [1]}', "[" * 5000, "\udc80"])
def test_a_damaged_identity_is_nobodys(text: str, src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = interrupted(src, tmp_path / "out", monkeypatch)
    (partial / ".kconv-identity.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    for options in ({}, {"resume": True}, {"overwrite": True}):
        said = refused_and_untouched(lambda o=options: kconv.convert(src, tmp_path / "out", **o), tmp_path)  # type: ignore[misc]
        assert "is in the way" in said


def _moved_out(entry: Path, outside: Path) -> None:
    entry.rename(outside)
    entry.symlink_to(outside)


def _pipe(entry: Path, _outside: Path) -> None:
    entry.unlink()
    os.mkfifo(entry)


@pytest.mark.parametrize("again", ("--resume", "--overwrite"))
@pytest.mark.parametrize("name", (".kconv-journal-1-of-1", ".kconv-identity.json", "model-00001-of-00001.safetensors"))
@pytest.mark.parametrize("change", (_moved_out, _pipe))
def test_an_unfinished_folder_with_links_is_not_written_through(
    change: Callable[[Path, Path], None], name: str, again: str, src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = interrupted(src, tmp_path / "out", monkeypatch)
    change(partial / name, tmp_path / "outside")
    before = {p: p.lstat().st_mtime_ns for p in tmp_path.rglob("*")}
    message = error_of(run("convert", src, tmp_path / "out", again, "--json"), 2)
    assert f"{partial} is in the way: a folder in which {name} is a link or no file" in message
    assert {p: p.lstat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_a_pipe_for_a_manifest_is_not_waited_for(src: Path, tmp_path: Path) -> None:
    kconv.convert(src, tmp_path / "out")
    _pipe(tmp_path / "out" / "kconv.json", tmp_path)
    assert "was not made by kconv" in error_of(run("convert", src, tmp_path / "out", "--overwrite", "--json"), 2)


def test_package_never_replaces_its_target_nor_writes_inside_it(draft: Path, target: Path, tmp_path: Path) -> None:
    native = tmp_path / "native"
    kconv.convert(target, native)
    for out in (native, native / "drafts" / "one", tmp_path):
        said = refused_and_untouched(lambda o=out: packaged(draft, native, o, overwrite=True), tmp_path)  # type: ignore[misc]
        assert f"the target {native}" in said


# What kconv may leave behind


@pytest.mark.parametrize("options", [{"target_revision": "main"}, {"target_repo": "My Model"}, {"training": {"who": "me"}}])
def test_package_checks_what_it_is_told_before_it_writes(
    options: dict, draft: Path, target: Path, tmp_path: Path
) -> None:
    refused_and_untouched(lambda: packaged(draft, target, tmp_path / "out", **options), tmp_path)


def test_a_package_that_fails_midway_leaves_nothing(
    draft: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (OSError(28, "No space left on device"), KeyboardInterrupt(), KconvError("no")):

        def fail(*_: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(type(error)):
            packaged(draft, target, tmp_path / "deep" / "out")
        assert list(tmp_path.iterdir()) == []


NAMES = ["model.safetensors.index.json/x", "kconv.json/x", "model-00001-of-00001.safetensors/x"]


@pytest.mark.parametrize("name", NAMES)
def test_a_side_file_in_the_way_of_an_output_is_refused_before_writing(name: str, draft: Path, tmp_path: Path) -> None:
    src = shutil.copytree(draft, tmp_path / "src")
    (src / name).parent.mkdir()
    (src / name).write_text("x")
    message = error_of(run("convert", src, tmp_path / "new" / "out", "--json"), 2)
    assert name in message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]


def test_a_refusal_after_writing_began_leaves_nothing(src: Path, tmp_path: Path) -> None:
    plan = kconv.plan(src)
    shard = sorted(src.glob("*.safetensors"))[1]
    with open(shard, "r+b") as handle:
        handle.truncate(10_000)
    with pytest.raises(KconvError, match="before its header says"):
        kconv.convert(plan, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["src"]


def test_what_is_kept_after_a_full_disk_is_said(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", full)
        message = error_of(run("convert", src, tmp_path / "out", "--json"), 3)
    assert "what was written is kept in .out.partial; the same command with --resume goes on" in message
    assert sorted(p.name for p in tmp_path.iterdir()) == [".out.partial", "src"]


EMPTY = [
    ("convert", "", "out"), ("convert", "SRC", ""), ("plan", ""), ("plan", "SRC", "--out", ""), ("inspect", ""),
    ("tiny", "k3", ""),
    ("package", "SRC", "--target", "SRC", ""), ("verify", "SRC", "--source", ""), ("capture", "SRC", ""), ("zoo", "page", ""),
]  # fmt: skip


@pytest.mark.parametrize("argv", EMPTY)
def test_empty_names_are_refused(argv: tuple[str, ...], src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert run(*[str(src) if a == "SRC" else a for a in argv]).exit_code == 2
    assert list((tmp_path / "work").iterdir()) == []


# One at a time


def test_a_folder_that_another_process_makes_is_refused(src: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with open(lock_path(out), "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for options in ({}, {"overwrite": True}, {"resume": True}, {"part": (1, 2)}):
            said = refused_and_untouched(lambda o=options: kconv.convert(src, out, **o), tmp_path)  # type: ignore[misc]
            assert f"another kconv process is making {out}" in said
        refused_and_untouched(lambda: kconv.tiny("k3", out), tmp_path)
        fcntl.flock(held, fcntl.LOCK_SH)
        refused_and_untouched(lambda: kconv.convert(src, out), tmp_path)
        assert not kconv.convert(src, out, part=(1, 2))["finished"]
    assert kconv.convert(src, out, part=(2, 2))["finished"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "src"]


def test_two_processes_with_the_same_part_do_not_share_it(src: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    kconv.convert(src, out, part=(1, 2))
    with open(tmp_path / ".out.partial" / ".kconv-journal-1-of-2", "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(KconvError, match="another process is doing the same part"):
            kconv.convert(src, out, part=(1, 2))
    assert kconv.convert(src, out, part=(2, 2))["finished"]


def test_a_users_file_under_the_name_of_the_lock_is_kept(src: Path, tmp_path: Path) -> None:
    lock_path(tmp_path / "out").write_text("mine")
    assert "is in the way" in refused_and_untouched(lambda: kconv.convert(src, tmp_path / "out"), tmp_path)


def test_folders_made_on_the_way_to_a_refused_output_are_removed(tmp_path: Path) -> None:
    with claim(tmp_path / "a" / "b" / "out"):
        assert (tmp_path / "a" / "b").is_dir()
    assert list(tmp_path.iterdir()) == []


# Put in place


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("last", range(1, 9))
def test_killed_while_an_old_folder_is_replaced(
    src: Path, tmp_path: Path, when: str, last: int, exchange: bool
) -> None:
    """At any moment OUT is the old folder, the new one, or (without exchange, for an instant) absent; nothing is lost or left."""
    out, more = tmp_path / "out", ["--overwrite", "--experts", "bf16"]
    kconv.convert(src, tmp_path / "alone", experts="bf16")
    kconv.convert(src, out)
    old, new = tree(out), tree(tmp_path / "alone")
    code = convert_in_child([str(src), str(out), *more], die_in_the_end, last, when, exchange)
    assert code in (0, -signal.SIGKILL)
    if out.exists():
        found = {n: h for n, h in tree(out).items() if not n.startswith(".kconv-")}
        assert found in (old, new)
    assert convert_in_child([str(src), str(out), "--overwrite", "--experts", "bf16"]) == 0
    assert tree(out) == new
    assert sorted(p.name for p in tmp_path.iterdir()) == ["alone", "out", "src"]


def die_in_the_end(nth: int, when: str, exchange: bool) -> None:
    """SIGKILL at the nth change of a file after the new folder is written whole."""
    real = folders.check_replaceable
    folders._swapped = folders._swapped if exchange else (lambda one, other: False)

    def check(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        die(nth, when)

    folders.check_replaceable = check


def test_a_replaced_folder_is_put_back_when_the_new_one_never_came(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    kconv.convert(src, out)
    old = tree(out)
    code = convert_in_child([str(src), str(out), "--overwrite", "--experts", "bf16"], die_in_the_end, 7, "before", False)
    assert code == -signal.SIGKILL
    if not out.exists():
        with claim(out):
            assert tree(out) == old


def test_the_winner_reads_back_what_it_put_in_place(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.rename

    def meddled(one: Path, other: Path) -> None:
        real(one, other)
        (Path(other) / "config.json").unlink()

    monkeypatch.setattr(os, "rename", meddled)
    with pytest.raises(KconvError, match=r"is not as it was written: config\.json") as raised:
        kconv.convert(src, tmp_path / "out")
    assert raised.value.exit_code == 3


# Resume


def test_resume_on_a_finished_folder_notices_that_the_source_changed(src: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    kconv.convert(src, out)
    assert kconv.convert(src, out, resume=True)["notes"] == [f"{out} is already finished"]
    shard = sorted(src.glob("*.safetensors"))[1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    said = refused_and_untouched(lambda: kconv.convert(src, out, resume=True), tmp_path)
    assert f"{shard.name} of the source changed since" in said
    assert "kconv verify" in said
    kconv.convert(src, out, resume=True, overwrite=True)
    assert kconv.verify(out, src)["ok"]


def test_resume_on_a_finished_folder_notices_another_side_file(src: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    kconv.convert(src, out)
    (src / "LICENSE").write_text("words")
    said = refused_and_untouched(lambda: kconv.convert(src, out, resume=True), tmp_path)
    assert "LICENSE of the source came or went since" in said


def test_resume_on_a_finished_folder_notices_that_it_is_damaged(src: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    kconv.convert(src, out)
    (out / "config.json").unlink()
    said = refused_and_untouched(lambda: kconv.convert(src, out, resume=True), tmp_path)
    assert "config.json is missing or of another size" in said


def test_resume_claims_nothing_of_a_folder_that_does_not_record_its_source(src: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    kconv.convert(src, out)
    manifest = json.loads((out / "kconv.json").read_text())
    del manifest["inputs"]
    (out / "kconv.json").write_text(json.dumps(manifest))
    said = refused_and_untouched(lambda: kconv.convert(src, out, resume=True), tmp_path)
    assert "does not record when the files of its source were changed" in said


def test_a_copy_that_kept_its_times_counts_as_the_same_source(src: Path, tmp_path: Path) -> None:
    kconv.convert(src, tmp_path / "out")
    shutil.copytree(src, tmp_path / "copy")
    assert kconv.convert(tmp_path / "copy", tmp_path / "out", resume=True)["finished"]


@pytest.mark.parametrize("finished", [True, False])
def test_resume_says_which_option_differs(
    finished: bool, src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    kconv.convert(src, out) if finished else interrupted(src, out, monkeypatch)
    said = refused_and_untouched(lambda: kconv.convert(src, out, resume=True, experts="bf16"), tmp_path)
    assert "options differ (experts: not given then, bf16 now)" in said


# Open files


def test_calls_leave_no_descriptor_open(src: Path, draft: Path, target: Path, tmp_path: Path) -> None:
    def calls(k: int) -> list[object]:
        """The results are kept, so that nothing is closed by chance."""
        out = tmp_path / f"out{k}"
        return [
            kconv.plan(src),
            kconv.inspect(src),
            kconv.convert(src, out),
            kconv.verify(out, src),
            packaged(draft, target, tmp_path / f"package{k}"),
            kconv.check(draft, target, tables=False),
        ]

    kept = [calls(0)]
    before = len(os.listdir("/proc/self/fd"))
    kept += [calls(1)]
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    held = [os.readlink(link) for link in links if os.path.exists(link)]
    assert [name for name in held if name.endswith((".safetensors", ".json"))] == []
    assert len(links) == before
    assert kept[0][0].check().source.files.read("config.json"), "files are opened again when they are used again"  # type: ignore[attr-defined]


def test_done_says_nothing_beside_the_output(src: Path, tmp_path: Path) -> None:
    done("convert", src, tmp_path / "deep" / "out")
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["out"]


# Single files


def test_the_zoo_page_replaces_a_page_and_nothing_else(tmp_path: Path) -> None:
    mine = tmp_path / "index.html"
    mine.write_text("<html>my own site</html>")
    assert "is there and no page of the zoo" in error_of(run("zoo", "page", tmp_path, "--json"), 2)
    assert mine.read_text() == "<html>my own site</html>"
    mine.unlink()
    done("zoo", "page", tmp_path)
    done("zoo", "page", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["index.html"]


def test_capture_overwrites_a_golden_file_and_nothing_else(draft: Path, tmp_path: Path) -> None:
    ref = shutil.copytree(draft, tmp_path / "ref")
    said = refused_and_untouched(lambda: kconv.parity.capture(ref, ref / "model.safetensors", overwrite=True), tmp_path)
    assert "is no golden file, so --overwrite does not touch it" in said
