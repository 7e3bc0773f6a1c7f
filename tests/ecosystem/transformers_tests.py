"""Transformers' own common model tests, from the source distribution of the release that is installed, kept in a cache.

| what | where it comes from |
|---|---|
| `tests/test_modeling_common.py` | the source distribution, by pip, once for each release |
| its mixins for exporting and generation | not in that distribution: empty classes stand for them |
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tarfile
import types
from pathlib import Path
from typing import Any

import pytest
import transformers

PACKAGE = "transformers_own_tests"
ABSENT = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}


def common() -> Any:
    """The module `test_modeling_common`; the tests are skipped where no package index can be reached."""
    folder = _cached(transformers.__version__)
    if PACKAGE not in sys.modules:
        package: Any = types.ModuleType(PACKAGE)
        package.__path__ = [str(folder)]
        sys.modules[PACKAGE] = package
        for name, mixin in ABSENT.items():
            parent, _, _ = name.partition(".")
            sys.modules.setdefault(f"{PACKAGE}.{parent}", types.ModuleType(parent))
            module = types.ModuleType(name)
            setattr(module, mixin, type(mixin, (), {}))
            sys.modules[f"{PACKAGE}.{name}"] = module
    return importlib.import_module(f"{PACKAGE}.test_modeling_common")


def _cached(version: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kconv" / f"transformers-{version}-tests"
    if not (cache / "test_modeling_common.py").exists():
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation", "--no-binary", ":all:"]
        got = subprocess.run(
            [*command, "-d", str(cache), f"transformers=={version}"], capture_output=True, text=True, check=False
        )
        if got.returncode:
            pytest.skip(f"Transformers' source distribution cannot be fetched: {got.stderr[-200:]}", allow_module_level=True)
        with tarfile.open(next(cache.glob("*.tar.gz"))) as archive:
            for member in archive.getmembers():
                name = Path(member.name)
                if len(name.parts) == 3 and name.parts[1] == "tests" and name.suffix == ".py":
                    member.name = name.name
                    archive.extract(member, cache, filter="data")
    return cache
