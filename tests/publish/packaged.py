"""Small drafts and what their configs leave open, packaged for one target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kconv.packaging.package import Packaged, package
from kconv.synthesis.families import tiny

DECLARED: dict[str, dict[str, Any]] = {
    "k3-dspark": {"block_size": 7, "capture_stream": "prefix"}, "k3-dspark-gqa": {"capture_stream": "attn_res"},
    "speculators-dspark": {"capture_stream": "attn_res"}, "k3-dflash2": {"capture_stream": "attn_res"},
    "k3-eagle3": {"capture_stream": "prefix", "target_layer_ids": [1, 4, 7]}, "k25-dflash": {"capture_stream": "prefix"},
}  # fmt: skip
WHOSE: dict[str, Any] = {"target_repo": "moonshotai/Tiny", "target_revision": "a" * 40}


def draft_of(kind: str, folder: Path, **options: Any) -> Path:
    tiny(kind, folder, seed=3, **options)
    return folder


def packaged(kind: str, tmp_path: Path, target: Path, **options: Any) -> tuple[Path, Packaged]:
    source = draft_of(kind, tmp_path / "draft")
    data = package(source, target, tmp_path / "out", declared=DECLARED.get(kind), **(WHOSE | options))
    return tmp_path / "out", data


def config_of(folder: Path, name: str = "config.json") -> dict[str, Any]:
    return json.loads((folder / name).read_text())
