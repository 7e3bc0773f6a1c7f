"""The gated activation of bf16 tensors in one Triton launch, for inference on CUDA."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kconv.modeling.expert_kernels import bounded, gated

BLOCK = 1024


@triton.jit
def _activate(gate, up, out, size, beta, linear, ACT: tl.constexpr, SPAN: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    inside = at < size
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (gated(g, beta, ACT, True) * bounded(u, linear, ACT, True)).to(tl.bfloat16), mask=inside)


def activate(gate: torch.Tensor, up: torch.Tensor, kind: str, beta: float, linear: float) -> torch.Tensor:
    """`gate` and `up` bf16 [..., width], contiguous -> the same; `kind` and bounds as `GatedActivation.in_kernels` gives them."""
    out = torch.empty_like(gate)
    with torch.cuda.device_of(gate):
        _activate[(triton.cdiv(gate.numel(), BLOCK),)](gate, up, out, gate.numel(), beta, linear, ACT=kind, SPAN=BLOCK)
    return out
