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
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from kconv.names import folded
from kconv.planning.plan import Plan

FORMAT = 1
OURS = ("native", "nemo")  # layouts that kconv made, whose source is what the way back leads to
SEAL = "sha256"


def build(plan: Plan, files: Mapping[str, Mapping[str, Any]], inputs: Mapping[str, str]) -> dict[str, Any]:
    """The manifest of a conversion, from its plan, the files it made, and the stamps of those it read."""
    source, layouts = plan.source, plan.layouts
    where = source.where if source.where.startswith("hf://") else Path(source.where).resolve().name
    earlier = (source.manifest or {}).get("source")
    ours = plan.backward or layouts.source_layout in OURS
    origin = earlier if ours and earlier else {
        "name": where,
        "revision": getattr(source.files, "revision", None),
        "config": source.config,
        "index_metadata": source.index_metadata,
        "tensors": len(source.entries),
    }  # fmt: skip
    return {
        "format": FORMAT,
        "source": origin,
        "family": layouts.family,
        "from": layouts.source_layout,
        "to": layouts.target_layout,
        "options": plan.options,
        "facts": layouts.facts,
        "plan_digest": plan.digest,
        "grade": str(plan.grade),
        "tensors": len(plan.targets),
        "dropped": [{"reason": d.reason, "count": len(d.names), "names": folded(d.names)} for d in layouts.drops],
        "notes": layouts.notes,
        "inputs": {name: inputs[name] for name in sorted(inputs)},
        "files": {name: dict(files[name]) for name in sorted(files)},
        "versions": versions(),
    }


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
