"""MXFP4 on the CPU: the compiled loops of `mxfp4_loops` over tensors, any scale."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kconv.kernels import e2m1
from kconv.kernels.mxfp4_loops import FORMS, encode16

_NAME = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def decode(packed: Tensor, scale: Tensor, out: Tensor, check: Callable[[], None] | None) -> bool:
    """Packed [G, g/2] and scale [G] into out [G, g], once `check` let the scales pass; false for a dtype not known here."""
    if out.dtype not in _NAME:
        return False
    if check:
        check()
    form = FORMS[_NAME[out.dtype]]
    table = e2m1.pair_table(out.dtype, out.device)
    form.decode(
        packed.numpy().reshape(-1), scale.numpy(), out.view(table.dtype).numpy().view(form.word).reshape(-1),
        table.numpy().view(form.word), packed.shape[1], form.low, form.high, form.offset, form.mantissa,
    )  # fmt: skip
    return True


def encode(values: Tensor, scale: Tensor, out: Tensor) -> bool:
    """bf16 values [G, g] and scale [G] into packed out [G, g/2]; false when a value has no code."""
    pairs = values.view(torch.int32).numpy().view(np.uint32).reshape(-1)
    table = e2m1.code_table(values.device).numpy()
    return bool(encode16(pairs, scale.numpy(), out.numpy().reshape(-1), table, out.shape[1]))
