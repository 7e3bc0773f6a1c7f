"""`kconv.json`: what a converted checkpoint is, where it came from, and the digest of every file beside it.

| key | meaning |
|---|---|
| `source` | name or repository, revision, its config word for word, its index metadata, how many tensors |
| `family`, `from`, `to`, `options`, `facts` | what was asked, and what the way back needs to know (root, A_log's form, ...) |
| `plan_digest`, `grade`, `dropped` | the plan that made it, what it keeps, what was left out and why |
| `inputs` | what was read: size and time of each of the source's files, or the Hub's hash of it |
| `files` | size and digest of every other file of the folder: sha256, of large weight files xxh3-128 unless asked otherwise |
| `versions` | kconv, torch, safetensors, Python |
| `sha256` | of the rest, in the canonical form in which the file is written: a changed byte shows here as well |
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from kconv.errors import KconvError

FORMAT = 1
SEAL = "sha256"

KINDS: dict[tuple[str, ...], type] = {
    ("source",): dict, ("source", "config"): dict, ("facts",): dict, ("options",): dict, ("files",): dict,
    ("plan_digest",): str, ("from",): str, ("to",): str, ("provenance",): dict,
}  # fmt: skip
WORDS: dict[type, str] = {dict: "an object", str: "a text"}


def write_saved(folder: Path, family: str) -> None:
    """The manifest of a folder that a native class saved: what every file is, though not what it was converted from."""
    from kconv.storage.hashing import sha256_file

    paths = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "kconv.json"}
    files = {n: {"size": p.stat().st_size, "sha256": sha256_file(p)} for n, p in paths.items() if not n.startswith(".")}
    made = {"format": FORMAT, "kind": "saved", "family": family, "files": files, "versions": versions()}
    (folder / "kconv.json").write_bytes(dump(made))


def versions() -> dict[str, str]:
    """Versions of what decides the bytes."""
    found = {"python": platform.python_version()}
    for package in ("kconv", "torch", "safetensors"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "unknown"
    return found


def dump(manifest: Mapping[str, Any]) -> bytes:
    """The canonical bytes of a manifest, sealed by the sha256 of everything else in it."""
    rest = {k: v for k, v in manifest.items() if k != SEAL}
    seal = hashlib.sha256(json.dumps(rest, ensure_ascii=False).encode()).hexdigest()
    return json.dumps({**rest, SEAL: seal}, indent=1, ensure_ascii=False).encode() + b"\n"


def checked(manifest: dict[str, Any], where: str) -> dict[str, Any]:
    """The manifest itself; raises KconvError where it is not as kconv writes it."""
    wrong = next(_wrong(manifest), None)
    if wrong:
        raise KconvError(
            f"{where} is not as kconv wrote it: {wrong}",
            hint="copy kconv.json again from the conversion, or remove it if it is another program's",
        )
    return manifest


def _wrong(manifest: dict[str, Any]) -> Iterator[str]:
    from dataclasses import fields

    from kconv.options import Options

    for path, kind in KINDS.items():
        value: Any = manifest
        for key in path:
            value = value.get(key, kind())
        if not isinstance(value, kind):
            yield f"{'.'.join(path)} is {value!r}, expected {WORDS[kind]}"
            return
    if not all(isinstance(seal, str) for seal in manifest.get("provenance", {}).values()):
        yield "provenance holds what is no digest"
    for name, known in manifest.get("files", {}).items():
        if not isinstance(known, dict) or type(known.get("size")) is not int:
            yield f"files.{name} has no size"
    options = manifest.get("options", {})
    unknown = sorted(set(options) - {f.name for f in fields(Options)})
    if unknown or not ("options" not in manifest or isinstance(options.get("to"), str)):
        yield f"options are {', '.join(unknown) or 'without a target'}, which no conversion has"
