"""Models of Transformers that answer on the CPU: what tests convert, and what they compare with."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch


@contextmanager
def torch_forms() -> Iterator[None]:
    """Kimi-Linear's own torch functions: Transformers takes fla's GPU kernels whenever fla can be imported."""
    module = importlib.import_module("transformers.models.kimi_linear.modeling_kimi_linear")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in list(vars(module).items()):
            if inspect.isfunction(value) and hasattr(value, "__wrapped__") and "delta_attention" in name:
                patch.setattr(module, name, inspect.unwrap(value))
        yield


def lively(model: Any, seed: int = 0, spread: float = 0.12) -> Any:
    """The model with weights that make every part count: matrices of `spread`, norms near 1, biases and decays at random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            drawn = torch.randn(p.shape, generator=generator)
            if name.endswith(("norm.weight", "norm1.weight", "norm2.weight")):
                p.copy_(1 + 0.1 * drawn)
            elif name.endswith("embed_tokens.weight"):
                p.copy_(drawn)
            else:
                p.copy_((0.5 if p.squeeze().ndim < 2 else spread) * drawn)
        for name, b in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                b.copy_(0.1 * torch.randn(b.shape, generator=generator))
    return model.eval()


def loaded(cls: Any, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A folder in Transformers' own class, every tensor of it used and none missing."""
    model, info = cls.from_pretrained(folder, dtype=dtype, attn_implementation="eager", output_loading_info=True)
    assert not info["missing_keys"], info["missing_keys"]
    assert not info["unexpected_keys"], info["unexpected_keys"]
    assert not info["mismatched_keys"], info["mismatched_keys"]
    return model.eval()
