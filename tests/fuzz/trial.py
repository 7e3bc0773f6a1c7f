"""One trial: command lines run in this process in a folder of its own, and what each of them left there.

| checked after every command | |
|---|---|
| the exit code | 0, 1, 2, 3 or 130; 3 never for an unexpected error |
| what was said | no traceback, no control character, no token; with `--json` one object on stdout |
| memory | at most `MOST_GROWTH` more than before |
| the folder | only what the command may write has changed; after 1, 2 and 130 nothing has |
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import IO, Any

MOST_GROWTH, MOST_SAID = 700 << 20, 8 << 20
CODES = {0, 1, 2, 3, 130}
UNEXPECTED = re.compile(r"unexpected|please report|internal error|Traceback", re.IGNORECASE)
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f]")
TOKEN = "hf_secret_token_of_this_trial"


@dataclass
class Ran:
    """A command that ended."""

    args: list[str]
    code: int
    out: str
    err: str

    @property
    def answer(self) -> dict[str, Any]:
        """The JSON object on stdout; {} where there is none."""
        try:
            value = json.loads(self.out)
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    @property
    def said(self) -> str:
        """The first line of the error."""
        return str(self.answer.get("error", {}).get("message", self.err)).strip().split("\n")[0][:200]


@dataclass
class Trial:
    """The folder of a trial (`area`, where commands run, and `decoy`, which nothing may touch), its dice, its findings."""

    folder: Path
    rng: Random
    ran: list[Ran] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    mutations: list[str] = field(default_factory=list)

    @property
    def area(self) -> Path:
        """Where the commands run."""
        return self.folder / "area"

    @property
    def decoy(self) -> Path:
        """A folder beside it that is to stay as it is."""
        return self.folder / "decoy"

    def fail(self, kind: str, detail: str) -> None:
        """Note a failure."""
        self.failures.append(f"{kind}: {detail}"[:600])

    def run(self, *args: str, writes: str = "", keeps: str = "") -> Ran:
        """A command with `--json`; `writes` is the entry of `area` that it makes, `keeps` one that it may go on with."""
        before = snapshot(self.folder)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        began = memory("VmHWM")
        given = [*args, "--json"]
        code, out, err, trace = called(given)
        ran = Ran(given, code, out, err)
        self.ran.append(ran)
        if (grown := memory("VmHWM") - began) > MOST_GROWTH:
            self.fail("memory", f"{ran.args[0]} exit {ran.code}: {grown >> 20} MB")
        self._judge_words(ran, trace)
        self._judge_folder(ran, before, snapshot(self.folder), writes, keeps)
        return ran

    def _judge_words(self, ran: Ran, trace: str) -> None:
        where = f"{ran.args[0]} exit {ran.code}"
        if trace:
            self.fail("traceback", f"{ran.args[0]}: {short(trace)}")
        elif ran.code not in CODES:
            self.fail("exit code", where)
        if "Traceback (most recent" in ran.err + ran.out and not trace:
            self.fail("traceback", f"{ran.args[0]}: {short(ran.err)}")
        elif ran.code == 3 and UNEXPECTED.search(ran.err):
            self.fail("unexpected", ran.said)
        if CONTROL.search(ran.err) or CONTROL.search(ran.out):
            self.fail("control characters", f"{where}: {CONTROL.search(ran.err + ran.out)!r}")
        if TOKEN in ran.err + ran.out:
            self.fail("token shown", where)
        if not trace and not ran.answer:
            self.fail("no JSON object", f"{where}: {ran.out[:200]!r}")

    def _judge_folder(self, ran: Ran, before: dict[str, Any], after: dict[str, Any], writes: str, keeps: str) -> None:
        changed = sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))
        partial = f"area/.{writes}.partial"
        own = [f"area/{writes}"] if writes and ran.code == 0 else []
        own += [partial] if writes and ran.code == 3 else []
        own += [f"area/{keeps}", f"area/.{writes}.kconv-lock"] if keeps else []
        strange = [n for n in changed if not any(n == o or n.startswith(o + "/") for o in own)]
        if strange:
            kind = "left behind" if ran.code else "written elsewhere"
            self.fail(kind, f"{ran.args[0]} exit {ran.code}: {', '.join(strange[:5])}")


def called(args: list[str]) -> tuple[int, str, str, str]:
    """(exit code, stdout, stderr, traceback of what escaped) of a command line in this process."""
    from kconv.cli import main

    code, trace = 0, ""
    with tempfile.TemporaryFile(dir="/dev/shm") as out, tempfile.TemporaryFile(dir="/dev/shm") as err:
        with _streams(out.fileno(), err.fileno()):
            try:
                main(args)
            except SystemExit as e:
                code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
            except BaseException:
                code, trace = 1, traceback.format_exc()
        return code, _text(out), _text(err), trace


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(MOST_SAID).decode("utf-8", "replace")


@contextlib.contextmanager
def _streams(out: int, err: int) -> Iterator[None]:
    """The process's own stdout and stderr lead to these descriptors, as in a UTF-8 locale: the one strict, the other escaping."""
    streams = sys.stdout, sys.stderr
    for stream in streams:
        stream.flush()
    kept = [(number, os.dup(number)) for number in (1, 2)]
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - closed below, as Python does at its end
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    for handler in logging.getLogger("huggingface_hub").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.stream = sys.stderr
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = streams
        for number, copy in kept:
            os.dup2(copy, number)
            os.close(copy)


def short(trace: str) -> str:
    """The last line of a traceback and the last place in our own code."""
    lines = [line.strip() for line in trace.strip().split("\n") if line.strip()]
    ours = [line for line in lines if re.match(r'File ".*/(kconv|adapters|modeling)/', line)]
    where = re.sub(r'File ".*/([\w.-]+/[\w.-]+)", line (\d+), in (\S+)', r"\1:\2 \3", ours[-1]) if ours else "?"
    return f"{lines[-1][:300]} ({where})"


def memory(key: str) -> int:
    """Bytes that `/proc/self/status` states under a key."""
    return int(re.findall(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024


def snapshot(folder: Path) -> dict[str, Any]:
    """Kind, size, time and number of every entry below a folder; `home` is the Hub client's and left out."""
    found: dict[str, Any] = {}
    root = os.fsencode(folder)
    for base, folders, files in os.walk(root):
        if base == root and b"home" in folders:
            folders.remove(b"home")
        for name in (*folders, *files):
            path = os.path.join(base, name)
            s = os.lstat(path)
            key = os.fsdecode(os.path.relpath(path, root)).encode("utf-8", "backslashreplace").decode()
            is_folder = (s.st_mode & 0o170000) == 0o040000
            found[key] = (s.st_mode, s.st_ino) if is_folder else (s.st_mode, s.st_ino, s.st_size, s.st_mtime_ns)
    return found
