"""Attention residuals: a layer reads a learned mixture of the finished blocks and of the running prefix.

Every `attn_res_block_size` layers the running prefix is set aside as a block and a new prefix begins. A reader scores
each source by `rms(source) . (norm.weight * proj.weight)` in at least fp32, softmaxes over the sources and sums the *raw*
sources. Kimi K3 ends with 8 blocks and the prefix: 9 sources. Without blocks (Kimi-Linear) this is the plain residual stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from kconv.modeling.dtypes import widen
from kconv.modeling.norm import KimiRMSNorm


def mix(prefix: torch.Tensor, blocks: Sequence[torch.Tensor], norm: KimiRMSNorm, proj: nn.Linear) -> torch.Tensor:
    """Mixture of `blocks` and `prefix`, each [batch, length, hidden]; returns the same shape in `prefix`'s dtype.

    Nothing is stacked: nine hidden states side by side would be the layer's largest tensor.
    """
    sources = [widen(s) for s in (*blocks, prefix)]
    direction = widen(norm.weight) * widen(proj.weight[0])
    scores = [(s * direction).sum(-1) * torch.rsqrt(s.square().mean(-1) + norm.eps) for s in sources]
    weights = torch.stack(scores, dim=-1).softmax(dim=-1)
    total = sources[0] * weights[..., 0:1]
    for i, source in enumerate(sources[1:], 1):
        total = total + source * weights[..., i : i + 1]
    return total.to(prefix.dtype)
