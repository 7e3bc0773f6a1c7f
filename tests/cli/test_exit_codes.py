"""Exit 1 is an answer and nothing else, whatever happens to the process: its streams, its limits, an error in kconv itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import kconv
from kconv.cli.common import Outcome, outcome_command
from kconv.errors import KconvError
from tests.builders import small_k3

KCONV = f"{sys.executable} -m kconv"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source `src` and its conversion `out`."""
    folder = tmp_path_factory.mktemp("pair")
    small_k3().write(folder / "src")
    kconv.convert(folder / "src", folder / "out")
    return folder


def shell(line: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A line of bash in a folder."""
    said = ["bash", "-o", "pipefail", "-c", line]
    return subprocess.run(said, cwd=folder, capture_output=True, text=True, errors="replace", env=os.environ | env, timeout=300)


@pytest.mark.parametrize("redirection", ["2>&-", ">&-", "<&- >&- 2>&-", "2>/dev/full", "2> >(exec true)", ">/dev/null 2>&1"])
def test_an_answer_of_yes_exits_0_wherever_stderr_leads_or_nowhere(pair: Path, redirection: str) -> None:
    assert shell(f"{KCONV} verify out --source src {redirection}", pair).returncode == 0


@pytest.mark.parametrize("arguments", ["verify out --source src", "plan src --json", "--help", "zoo list", "plan none --json"])
def test_a_full_stdout_exits_3_and_says_so(pair: Path, arguments: str) -> None:
    done = shell(f"{KCONV} {arguments} >/dev/full", pair)
    assert done.returncode == 3
    assert "No space left on device" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", ["verify out --source src", "plan src", "--help"])
def test_a_stdout_that_nobody_reads_exits_3_in_silence(pair: Path, arguments: str) -> None:
    done = shell(f"(sleep 0.2; {KCONV} {arguments}) | true", pair)
    assert done.returncode == 3
    assert "error" not in done.stderr
    assert "Traceback" not in done.stderr


def test_an_encoding_that_lacks_characters_gets_escapes(pair: Path) -> None:
    (pair / "src–é").symlink_to("src")
    for encoding in ("latin-1", "ascii"):
        done = shell(f"{KCONV} plan src–é", pair, PYTHONIOENCODING=encoding, PYTHONUTF8="0")
        assert done.returncode == 0, done.stderr
        assert "src\\u2013" in done.stdout


def test_a_file_never_gets_the_number_of_a_closed_stream(pair: Path) -> None:
    assert shell(f"{KCONV} convert src closed <&- >&- 2>&-", pair).returncode == 0
    assert kconv.verify(pair / "closed", pair / "src")["ok"]


@pytest.mark.parametrize("error", [ZeroDivisionError("n\x1b[2J"), AssertionError("no"), RecursionError("deep"), OSError("odd")])
def test_an_error_that_kconv_did_not_foresee_exits_3_with_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    @outcome_command("broken", epilog="Example:  kconv broken")
    def broken() -> Outcome:
        raise error

    done = CliRunner().invoke(broken, ["--json"])
    assert done.exit_code == 3
    said = json.loads(done.stdout)["error"]
    assert said["exit_code"] == 3
    assert type(error).__name__ in said["message"]
    assert "please report it" in said["message"]
    assert len(done.stderr.splitlines()) == 1
    assert "\x1b[2J" not in done.stderr
    monkeypatch.setenv("KCONV_TRACEBACK", "1")
    assert "Traceback" in CliRunner().invoke(broken, []).stderr


def test_an_error_while_printing_an_answer_exits_3() -> None:
    @outcome_command("broken", epilog="Example:  kconv broken")
    def broken() -> Outcome:
        return Outcome({"set": {1}}, show=lambda console: console.print([1].pop(2)))

    assert CliRunner().invoke(broken, ["--json"]).exit_code == 3
    assert CliRunner().invoke(broken, []).exit_code == 3


def test_want_of_memory_and_usage_errors_keep_their_codes() -> None:
    @outcome_command("broken", epilog="Example:  kconv broken")
    @click.argument("kind")
    def broken(kind: str) -> Outcome:
        raise {"memory": MemoryError(), "usage": click.UsageError("no"), "bad": KconvError("bad \x1b]0;name\x07")}[kind]

    codes = {kind: CliRunner().invoke(broken, [kind]) for kind in ("memory", "usage", "bad")}
    assert {kind: done.exit_code for kind, done in codes.items()} == {"memory": 3, "usage": 2, "bad": 2}
    assert "bad \\x1b]0;name\\x07" in codes["bad"].stderr


@pytest.mark.parametrize("files", range(10, 24, 2))
def test_few_open_files_are_the_environment_and_no_answer(pair: Path, files: int) -> None:
    done = shell(f"ulimit -n {files}; {KCONV} verify out --source src --workers 2", pair)
    assert done.returncode in (0, 3), done.stderr
    assert "Traceback" not in done.stderr
