"""How a refusal looks, through the command line and through Python alike.

| asserted each time | because |
|---|---|
| the exit code, and SystemExit as the only exception | no traceback for bad input |
| stdout is one JSON object with the key `error`, stderr says the same in words | programs and people |
| the message ends with a next step | an error that cannot be acted on is none |
| every file beside and in the source and the output is as it was | nothing is written when refused |
| `kconv.convert` raises the same message | one behaviour, two ways in |
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import kconv
from kconv.cli import cli
from kconv.cli.convert import command as convert_command
from kconv.errors import KconvError


def run(*argv: str | Path) -> Result:
    """The command line with these arguments, in this process."""
    return CliRunner().invoke(cli, [str(a) for a in argv])


def done(*argv: str | Path) -> dict[str, Any]:
    """The JSON object of a command that must succeed."""
    result = run(*argv, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def error_of(result: Result, code: int) -> str:
    """The message of a command that must fail with this exit code, said as JSON on stdout and in words on stderr."""
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == code, result.output
    said = json.loads(result.stdout)
    assert set(said) == {"error"}
    message = said["error"]["message"]
    assert said["error"]["exit_code"] == code
    assert "Traceback" not in result.stderr
    assert "error: " + message.splitlines()[0] in result.stderr
    return message


def refused(source: str | Path, out: Path, *args: str, code: int = 2, around: Path | None = None) -> str:
    """The message with which `convert SOURCE OUT` is refused, by the command line and by Python; nothing is written."""
    around = around or out.parent
    before = snapshot(around)
    message = error_of(run("convert", source, out, "--json", *args), code)
    assert "\n  next: " in message, message
    options = convert_command.make_context("convert", [str(source), str(out), *args]).params
    for name in ("as_json", "source", "out"):
        options.pop(name)
    with pytest.raises(KconvError) as raised:
        kconv.convert(str(source), out, **options)
    assert str(raised.value) == message
    assert raised.value.exit_code == code
    assert snapshot(around) == before
    return message


def snapshot(folder: Path) -> dict[str, str]:
    """Every file, folder and link below a folder, with what it holds."""
    found: dict[str, str] = {}
    for base, folders, files in os.walk(folder):
        found |= {str(Path(base, f)): "folder" for f in folders}
        for path in (Path(base, f) for f in files):
            found[str(path)] = os.readlink(path) if path.is_symlink() else hashlib.sha256(path.read_bytes()).hexdigest()
    return found
