"""Trials in processes forked from one that has imported everything: each with its folder, its limits, its verdict.

| limit of a trial | |
|---|---|
| time | `SECONDS`; it is then killed, and has failed |
| memory | an address space of `MOST_SPACE` more than it began with |
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import shutil
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from tests.fuzz.scenes import SCENES, SHARES
from tests.fuzz.trial import Trial, memory, short

SECONDS, GRACE = 45, 15
MOST_SPACE = 2 << 30


@dataclass
class Verdict:
    """What came of a trial: exit codes of its commands, what was mutated, what failed."""

    kind: str
    number: int
    codes: list[int] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    mutations: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass
class Child:
    """A running trial."""

    verdict: Verdict
    pid: int
    pipe: int
    deadline: float
    said: bytes = b""


class Runner:
    """Trials of one seed, below one folder, on sound folders that are there."""

    def __init__(self, folder: Path, bases: Path, seed: int, jobs: int) -> None:
        self.folder, self.bases, self.seed, self.jobs = folder, bases, seed, jobs

    def run(self, trials: list[tuple[str, int]]) -> Iterator[Verdict]:
        """Verdicts as they come, at most `jobs` trials at a time."""
        gc.collect()
        gc.freeze()  # a forked process then shares these objects with this one
        children: dict[int, Child] = {}
        try:
            for kind, number in trials:
                while len(children) >= self.jobs:
                    yield from self._ended(children)
                child = self._start(kind, number)
                children[child.pipe] = child
            while children:
                yield from self._ended(children)
        finally:
            gc.unfreeze()

    def _start(self, kind: str, number: int) -> Child:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            os.setsid()
            _trial(self.folder / f"{kind}-{number}", self.bases, kind, f"{self.seed}/{kind}/{number}", write)
        os.close(write)
        return Child(Verdict(kind, number), pid, read, time.monotonic() + SECONDS + GRACE)

    def _ended(self, children: dict[int, Child]) -> Iterator[Verdict]:
        """Wait a while, collect what children said, and the verdicts of those that ended or are too late."""
        ready, _, _ = select.select(list(children), [], [], 0.5)
        for pipe in ready:
            piece = os.read(pipe, 1 << 20)
            children[pipe].said += piece
            if not piece:
                yield self._verdict(children.pop(pipe))
        for child in [c for c in children.values() if time.monotonic() > c.deadline]:
            child.verdict.failures.append(f"timeout: {SECONDS + GRACE} s, and no alarm was heard")
            yield self._verdict(children.pop(child.pipe))

    def _verdict(self, child: Child) -> Verdict:
        os.close(child.pipe)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        verdict, said = child.verdict, child.said
        if said:
            data = json.loads(said)
            verdict.codes, verdict.commands, verdict.mutations = data["codes"], data["commands"], data["mutations"]
            verdict.failures += data["failures"]
        elif not verdict.failures:
            verdict.failures.append(f"crash: the process ended with {status}")
        shutil.rmtree(self.folder / f"{verdict.kind}-{verdict.number}", ignore_errors=True)
        escaped = [p.name for p in self.folder.iterdir() if p != self.bases and not _ours(p.name)]
        if escaped:
            verdict.failures.append(f"written elsewhere: {', '.join(escaped)} beside the trials")
            for name in escaped:
                path = self.folder / name
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        return verdict


def _ours(name: str) -> bool:
    kind, _, number = name.partition("-")
    return kind in SCENES and number.isdigit()


def plan_of(trials: int, kind: str | None) -> list[tuple[str, int]]:
    """(kind, number) of so many trials, of one kind or of all by their shares."""
    return [(kind or SHARES[i % len(SHARES)], i) for i in range(trials)]


def _trial(folder: Path, bases: Path, kind: str, seed: str, pipe: int) -> None:
    """Run one trial in this process, say its verdict through the pipe, and end; an alarm says where a late one stands."""
    shutil.rmtree(folder, ignore_errors=True)
    trial = Trial(folder, Random(seed))

    def late(_number: int, frame: FrameType | None) -> None:
        trial.fail("timeout", short("".join(traceback.format_stack(frame))))
        _say(trial, pipe)

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        _furnish(trial)
        _limit()
        SCENES[kind](trial, bases)
    except BaseException:
        trial.fail("harness", traceback.format_exc()[-500:])
    _say(trial, pipe)


def _say(trial: Trial, pipe: int) -> None:
    said: dict[str, Any] = {
        "codes": [r.code for r in trial.ran], "commands": [" ".join(r.args) for r in trial.ran],
        "mutations": trial.mutations, "failures": trial.failures,
    }  # fmt: skip
    text = json.dumps(said).encode()
    while text:
        text = text[os.write(pipe, text) :]
    os._exit(0)


def _furnish(trial: Trial) -> None:
    """The trial's folders; the process works in `area`, its home and temporary files lie in the trial as well."""
    for path in (trial.area, trial.decoy, trial.folder / "home", trial.folder / "tmp"):
        path.mkdir(parents=True)
    (trial.decoy / "keep.json").write_text("{}")
    (trial.decoy / "keep.safetensors").write_bytes(b"decoy")
    home = str(trial.folder / "home")
    os.environ |= {"HOME": home, "TMPDIR": str(trial.folder / "tmp"), "XDG_CACHE_HOME": home}
    os.chdir(trial.area)


def _limit() -> None:
    space = memory("VmSize") + MOST_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
