"""Golden files from a reference, run by `capture_script.py` in a process of its own: this Python, or the reference's.

| reference | needs |
|---|---|
| a checkpoint whose class Transformers has | nothing more |
| a checkpoint with remote code | `trust_remote_code=True`; the official Kimi K3 code also an environment with transformers 4.57 |
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kconv.checkpoint.headers import read_header
from kconv.errors import EnvironmentLacks, KconvError
from kconv.storage.files import LocalFiles

SCRIPT = Path(__file__).with_name("capture_script.py")
TAIL = 12  # lines of a crashed reference's last words


def capture(
    ref: str | Path,
    out: str | Path,
    *,
    python: str | Path | None = None,
    trust_remote_code: bool = False,
    code: str | Path | None = None,
    dtype: str = "float64",
    also: Sequence[str] = ("float32",),
    device: str = "cpu",
    operators: str | None = None,
    modules: str = "sketch:4",
    ids: str | Path | None = None,
    text: str | Path | None = None,
    tokens: int = 512,
    batch: int = 2,
    seed: int = 0,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Run the reference in `ref` and write a golden file; returns what the script says it did.

    Args:
        ref: folder of the reference's checkpoint.
        out: the file to write, or a folder that gets a `golden.safetensors`.
        python: interpreter of the reference's environment (torch, transformers, safetensors); this one by default.
        trust_remote_code: run the code that comes with the checkpoint (or lies in `code`).
        dtype, also, device, operators: precision, lower ones to run as well, where, and with whose operators (`torch`, `fla`).
        modules: module outputs to keep: `none`, `full` or `sketch:K`.
        ids, text: JSON rows of ids or a safetensors file; a text file through the checkpoint's tokenizer, cut at `tokens`.
        tokens, batch, seed: seeded random inputs where neither is given.
        overwrite: replace a golden file that is there.

    Raises KconvError for what the reference refuses, EnvironmentLacks for what its environment lacks.
    """
    target = _target(ref, out, overwrite)
    argv = [str(Path(ref)), str(target), "--dtype", dtype, "--also", ",".join(also), "--device", device, "--modules", modules]
    argv += ["--tokens", str(tokens), "--batch", str(batch), "--seed", str(seed)]
    for flag, value in (("--ids", ids), ("--text", text), ("--code", code), ("--operators", operators)):
        argv += [flag, str(value)] if value is not None else []
    return _run(str(python or sys.executable), [*argv, *(["--trust-remote-code"] if trust_remote_code else [])])


def _target(ref: str | Path, out: str | Path, overwrite: bool) -> Path:
    """The file to write; refused where it is there, or where `ref` is no folder."""
    if str(ref).startswith("hf://") or not Path(ref).is_dir():
        raise KconvError(f"{ref} is no folder", hint="a reference runs from a local folder; `hf download OWNER/NAME` makes one")
    if not str(out):
        raise KconvError("the output is an empty name", hint="give a folder or a .safetensors file")
    target = Path(out)
    if target.is_dir() or target.suffix != ".safetensors":
        target = target / "golden.safetensors"
    if target.exists() and not overwrite:
        raise KconvError(f"{target} is there already", hint="--overwrite replaces it")
    if target.exists() and not _is_golden(target):
        raise KconvError(f"{target} is no golden file, so --overwrite does not touch it", hint="give another name")
    return target


def _is_golden(path: Path) -> bool:
    try:
        header, _ = read_header(LocalFiles(path), path.name, path.stat().st_size)
    except (OSError, ValueError):
        return False
    return "kconv_golden" in (header.get("__metadata__") or {})


def _run(python: str, argv: list[str]) -> dict[str, Any]:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run([python, str(SCRIPT), *argv], capture_output=True, text=True, env=env, check=False)
    except OSError as e:
        raise EnvironmentLacks(f"cannot run {python}: {e.strerror}", hint="give an interpreter by --reference-python") from e
    last = done.stdout.strip().splitlines()[-1:] or [""]
    try:
        said = json.loads(last[0])
    except ValueError:
        said = {}
    if done.returncode == 0 and "golden" in said:
        return said
    if "error" in said:
        raise (EnvironmentLacks if done.returncode == 3 else KconvError)(f"the reference: {said['error']}")
    words = "\n".join(done.stderr.strip().splitlines()[-TAIL:])
    if done.returncode == 2:
        raise KconvError(f"the reference: {words}")
    raise EnvironmentLacks(
        f"the reference's process failed (exit code {done.returncode}); its last words:\n{words}",
        hint="its environment needs torch, transformers and safetensors; see --reference-python",
    )
