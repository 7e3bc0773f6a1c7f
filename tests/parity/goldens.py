"""What the parity tests share: golden folders, native models of them, tampering with converted checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import kconv

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
TINY, LONG, CALM, WIDE = (GOLDEN / n for n in ("tiny-k3", "long-k3", "calm-k3", "calm-k3-wide"))


def golden(folder: Path) -> Path:
    """The golden file of a folder."""
    return folder / "golden.safetensors"


@functools.cache
def model(folder: Path, dtype: torch.dtype = torch.float64, experts: str | None = None) -> Any:
    """The checkpoint of a golden folder as a native model, loaded once; leave it as it was."""
    loaded: Any = kconv.load(folder, dtype=dtype, experts=experts)
    loaded.set_attn_implementation("eager")
    return loaded


@contextmanager
def changed(loaded: Any, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Iterator[None]:
    """Inside, one tensor of the model is what `change` makes of it (or leaves in it)."""
    tensor = loaded.state_dict()[name]
    before = tensor.clone()
    try:
        made = change(tensor)
        if made is not None:
            tensor.copy_(made)
        yield
    finally:
        tensor.copy_(before)


def perturb(tensor: torch.Tensor) -> None:
    """A relative change of a percent, or another code for one expert."""
    generator = torch.Generator().manual_seed(0)
    if tensor.dtype == torch.uint8:
        tensor[2] ^= 1
    else:
        tensor.mul_(1 + 0.01 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64))


def tamper(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of a converted checkpoint in its files."""
    for file in folder.glob("model-*.safetensors"):
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
