"""Results of `verify`, `verify-parity` and `check`, tied to the files they are about.

A result counts for a folder when its `subject` is the sha256 of the folder's `kconv.json`, which in turn holds the digest
of every other file. So yesterday's pass says nothing about today's files.

| result | recognised by | passes when |
|---|---|---|
| `check` | `fits` | it is true |
| `verify-parity` | `verdict`, no `fits` | it is `pass` |
| `verify` | `compared`, neither of the others | `ok`, and not of a sample |

Results lie in the folder as `kconv.verify.json`, `kconv.parity.json`, `kconv.check.json` (and are published with it), or
are given by path.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kconv.errors import AnswerIsNo, KconvError
from kconv.storage import json_text

MANIFEST = "kconv.json"
NAMES = ("kconv.verify.json", "kconv.parity.json", "kconv.check.json")


def subject(folder: str | Path) -> str | None:
    """What a result about this folder is tied to; None without a manifest."""
    path = Path(folder) / MANIFEST
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def judge(result: dict[str, Any]) -> tuple[bool, str]:
    """(passed, in words) of a result; raises KconvError if it is none."""
    if "fits" in result:
        return bool(result["fits"]), f"check: {'fits' if result['fits'] else 'does not fit'} {result.get('target')}"
    if "verdict" in result:
        figures = [f"{k} {result[k]:.2e}" for k in ("max_abs", "max_kl") if isinstance(result.get(k), int | float)]
        words = f"verify-parity {result['verdict']} against {result.get('reference')} in {result.get('dtype')}"
        return result["verdict"] == "pass", ", ".join([words, *figures])
    if "compared" in result:
        found = f"{result['compared']:,} tensors compared, {result.get('different', 0):,} different"
        if result.get("sample") is not None:
            return False, f"verify: {found}, but only a sample was"
        return bool(result.get("ok")) and result["compared"] > 0, f"verify: {found}"
    raise KconvError("is no result of verify, verify-parity or check --json")


def load(path: Path) -> dict[str, Any]:
    """A result file; raises KconvError if it is not one."""
    return json_text.read_path(path, "the evidence", hint="run verify, verify-parity or check --json again")


def passing(folder: Path, files: Iterable[Path] = ()) -> list[str]:
    """The passing results about a folder, in words.

    Raises AnswerIsNo when there is none, or one that failed, or one about other files.
    """
    about = subject(folder)
    if about is None:
        raise AnswerIsNo(
            f"{folder} has no {MANIFEST}, so no result can be tied to its files", hint="convert or package it with kconv"
        )
    paths = [*files, *(folder / name for name in NAMES if (folder / name).is_file())]
    words, against = [], []
    for path in paths:
        result = load(path)
        passed, said = judge(result)
        if result.get("subject") != about:
            against.append(f"{path.name} is about other files (run it again)")
        elif not passed:
            against.append(f"{path.name}: {said}")
        else:
            words.append(said)
    if against or not words:
        hint = f"kconv verify {folder} --source SOURCE --json > {folder / NAMES[0]}"
        raise AnswerIsNo(
            f"{folder} is not verified: {'; '.join(against) or 'no result of verify, verify-parity or check'}", hint=hint
        )
    return words


def write(folder: Path, name: str, result: Mapping[str, Any]) -> Path:
    """Put a result into the folder it is about."""
    path = folder / name
    path.write_text(json.dumps({**result, "subject": subject(folder)}, indent=1) + "\n", encoding="utf-8")
    return path
