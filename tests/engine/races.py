"""Processes that race for one OUT: whoever ends with 0 left a whole folder, whoever does not wrote nothing.

    python -m tests.engine.races [--trials 1000] [--seed 0] [--folder /dev/shm]

| a trial | what races |
|---|---|
| processes | two or three of `convert --overwrite` (two options), `convert`, `package --overwrite`, forked from one warm parent |
| OUT before | absent, or a finished conversion |
| a kill | in every fourth trial one of them gets SIGKILL at a random moment; one more `convert --overwrite` then has to succeed |

After each trial OUT is, file by file, what a process that ended with 0 makes alone, and nothing else lies beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.engine.faults import tree

REFUSED = (2, 3)


@dataclass
class Race:
    """The sources, the commands, what each makes alone, and what was seen."""

    folder: Path
    commands: dict[str, list[str]] = field(default_factory=dict)
    alone: dict[str, dict[str, str]] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)

    def prepare(self) -> None:
        """Make the sources and run each command alone."""
        import kconv
        from tests.publish.packaged import DECLARED, WHOSE

        source, draft = self.folder / "source", self.folder / "draft"
        kconv.tiny("k3", source, seed=3, layers=4, experts=2)
        kconv.tiny("k25-dflash", draft, seed=3)
        shape = kconv.tiny("k3", self.folder / "target", seed=3)
        assert shape["tensors"]
        common = [str(source), "OUT", "--workers", "2"]
        said = [f"--declare={k}={v}" for k, v in DECLARED["k25-dflash"].items()]
        whose = ["--target-repo", WHOSE["target_repo"], "--target-revision", WHOSE["target_revision"], "--no-tables"]
        self.commands = {
            "packed": ["convert", *common, "--overwrite"],
            "bf16": ["convert", *common, "--overwrite", "--experts", "bf16"],
            "once": ["convert", *common],
            "draft": ["package", str(draft), "--target", str(self.folder / "target"), "OUT", *said, *whose, "--overwrite"],
        }
        self.warm()
        for name in self.commands:
            out = self.folder / "alone" / name / "out"
            out.parent.mkdir(parents=True)
            assert self.run(name, out) == 0, name
            self.alone[name] = tree(out)

    def warm(self) -> None:
        """Convert and package once here, so that a forked process has everything imported."""
        from kconv.cli import cli

        for name in ("packed", "bf16", "draft"):
            with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
                out = str(self.folder / "warm" / name)
                with contextlib.suppress(SystemExit):
                    cli.main([out if a == "OUT" else a for a in self.commands[name]])

    def run(self, name: str, out: Path) -> int:
        """A command's exit code, run in a forked process."""
        return os.waitstatus_to_exitcode(os.waitpid(self.start(name, out), 0)[1])

    def start(self, name: str, out: Path) -> int:
        """Fork a process that runs a command; returns its id."""
        pid = os.fork()
        if pid:
            return pid
        code = 70
        try:
            with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
                from kconv.cli import main

                main([str(out) if a == "OUT" else a for a in self.commands[name]])
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else 71
        finally:
            os._exit(code)

    def trial(self, rng: random.Random, where: Path) -> list[str]:
        """One race; returns what was wrong."""
        out = where / "out"
        before = rng.choice([None, "packed", "bf16"])
        if before:
            shutil.copytree(self.folder / "alone" / before / "out", out)
        names = rng.choices(list(self.commands), k=rng.choice([2, 2, 3]))
        killed = rng.random() < 0.25
        pids = {}
        for name in names:
            pids[self.start(name, out)] = name
            time.sleep(rng.random() * rng.choice([0, 0.02, 0.1]))
        if killed:
            time.sleep(rng.random() * 0.1)
            os.kill(rng.choice(list(pids)), signal.SIGKILL)
        codes = [(pids[pid], os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) for pid in pids]
        self.seen.update(f"exit {code}" for _, code in codes)
        wrong = [f"{name} ended with {code}" for name, code in codes if code not in (0, *REFUSED, -signal.SIGKILL)]
        if killed and -signal.SIGKILL in [code for _, code in codes]:
            return wrong + self.after_a_kill(out, codes)
        winners = [name for name, code in codes if code == 0]
        if not winners and not before:
            wrong.append("nobody won")
        return wrong + self.found(out, winners or [before or ""]) + self.beside(out)

    def after_a_kill(self, out: Path, codes: list[tuple[str, int]]) -> list[str]:
        """What is left of a killed process: a whole OUT or none, and nothing that one more run cannot clear away."""
        wrong = self.found(out, list(self.alone)) if out.exists() and not (out / ".kconv-identity.json").exists() else []
        code = self.run("packed", out)
        if code == 2 and any(n == "draft" and c == -signal.SIGKILL for n, c in codes):
            code = self.run("draft", out)  # what `package` left is not for `convert` to remove
            return wrong + ([f"afterwards package ended with {code}"] if code else self.found(out, ["draft"]))
        return wrong + ([f"afterwards convert ended with {code}"] if code else self.found(out, ["packed"])) + self.beside(out)

    def found(self, out: Path, names: list[str]) -> list[str]:
        """Nothing where OUT is what one of these commands makes alone."""
        found = tree(out) if out.is_dir() else {}
        if any(found == self.alone.get(name) for name in names):
            return []
        near = {name: sorted({*found} ^ {*self.alone.get(name, {})})[:4] for name in names}
        return [f"OUT is none of {', '.join(names)}: {near}"]

    def beside(self, out: Path) -> list[str]:
        """What lies beside OUT and should not."""
        return [f"{p.name} was left" for p in out.parent.iterdir() if p != out]


def race(trials: int, seed: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Run trials; returns how processes ended, and what was wrong."""
    it = Race(folder)
    it.prepare()
    wrong: list[str] = []
    for k in range(trials):
        where = folder / "trial"
        where.mkdir()
        wrong += [f"trial {k} of seed {seed}: {line}" for line in it.trial(random.Random(f"{seed}-{k}"), where)]
        shutil.rmtree(where)
    return it.seen, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where to work: /dev/shm is fast")
    asked = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        seen, wrong = race(asked.trials, asked.seed, Path(folder))
    print(*wrong, sep="\n")
    ends = ", ".join(f"{n} x {what}" for what, n in sorted(seen.items()))
    print(f"{asked.trials} trials in {time.monotonic() - began:.0f} s: {ends}; {len(wrong)} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
