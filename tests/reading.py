"""Reads checkpoints with the safetensors library, independently of kconv, and finds the published files where they are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "data" / "golden"
PUBLISHED = ROOT.parent / "shared" / "k3"

needs_published = pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published index and config are not beside this clone")


class Stored(NamedTuple):
    """One tensor as it lies in a file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of the model's and the vision tower's files in a folder."""
    found: dict[str, Stored] = {}
    for path in sorted(folder.glob("*.safetensors")):
        if path.name in ("golden.safetensors",):
            continue
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                assert name not in found
                tensor = file.get_tensor(name)
                raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                found[name] = Stored(file.get_slice(name).get_dtype(), tuple(tensor.shape), raw)
    return found


def tensor(stored: Stored) -> torch.Tensor:
    """A stored tensor as torch has it."""
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}
    return torch.frombuffer(bytearray(stored.data), dtype=dtypes[stored.dtype]).reshape(stored.shape)


def json_of(path: Path) -> Any:
    return json.loads(path.read_text())


def weight_map(folder: Path) -> dict[str, str]:
    return json_of(folder / "model.safetensors.index.json")["weight_map"]


def takes_direct_writes(folder: Path) -> bool:
    """Whether the file system of a folder opens files for direct writes."""
    probe = folder / "direct.probe"
    probe.touch()
    try:
        os.close(os.open(probe, os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    finally:
        probe.unlink()
    return True
