"""Which way the routed experts of a layer are computed; the choice is logged once, at level INFO, by `kconv.modeling`."""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import Any, Literal, Protocol

import torch

Path = Literal["fused", "grouped", "loop"]
CHANNELS = 128  # the fused kernels take whole pieces of so many
logger = logging.getLogger("kconv.modeling")


class Routed(Protocol):
    """Routed experts, as far as the choice depends on them."""

    grouped: bool
    packed: bool
    inter: int


def path_of(experts: Routed, x: torch.Tensor, stored: tuple[Any, ...]) -> Path:
    """How `experts` computes rows `x` with its `stored` matrices.

    | path | what runs | where |
    |---|---|---|
    | fused | `kconv.modeling.fused_experts`: Triton, no wait for the device, packed codes as stored | bf16 on CUDA of compute \
capability 9.0 and more, widths in multiples of 128, matrices held as plain tensors; plain experts without gradients |
    | grouped | `torch._grouped_mm`, packed experts decoded a few at a time | bf16 on CUDA, rows of whole 16-byte units; packed \
experts without gradients |
    | loop | one product an expert, in the reference's order | CPU, float64, fp32, all else, and `experts.grouped = False` |
    """
    reason = _not_fused(experts, x, stored)
    if reason is None:
        _say("fused", "bf16 on CUDA")
        return "fused"
    trained = experts.packed and torch.is_grad_enabled() and x.requires_grad
    path: Path = "grouped" if experts.grouped and can_group(x, experts.inter) and not trained else "loop"
    _say(path, reason)
    return path


def can_group(x: torch.Tensor, inter: int) -> bool:
    """Whether `torch._grouped_mm` takes these rows: bf16 on CUDA, rows of whole 16-byte units."""
    aligned = x.shape[-1] % 8 == 0 and inter % 8 == 0
    return hasattr(torch, "_grouped_mm") and x.is_cuda and x.dtype == torch.bfloat16 and aligned


def _not_fused(experts: Routed, x: torch.Tensor, stored: tuple[Any, ...]) -> str | None:
    """Why the fused kernels cannot be used; None where they can."""
    if not experts.grouped:
        return "the reference's order of operations was asked for"
    if not compiles_for(x.device):
        return f"no fused kernels for {x.device.type} here: they want CUDA of compute capability 9.0 and Triton"
    if x.dtype != torch.bfloat16 or not x.numel():
        return f"{list(x.shape)} rows of {x.dtype}"
    if x.shape[-1] % CHANNELS or experts.inter % CHANNELS:
        return f"widths {x.shape[-1]} and {experts.inter} are not both multiples of {CHANNELS}"
    if any(type(m) not in (torch.Tensor, torch.nn.Parameter) or not m.is_contiguous() for m in stored):
        return "matrices that are not plain contiguous tensors"
    if not experts.packed and torch.is_grad_enabled() and (x.requires_grad or any(m.requires_grad for m in stored)):
        return "plain experts in training"
    return None


@functools.cache
def compiles_for(device: torch.device) -> bool:
    """Whether the fused kernels can be compiled for a device."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def _say(path: Path, reason: str) -> None:
    logger.info("routed experts: %s (%s)", path, reason)
