"""Attention residuals: a layer reads a learned mixture of the finished blocks and of the running prefix.

Every `attn_res_block_size` layers the running prefix is set aside as a block and a new prefix begins. A reader scores
each source by `proj(norm(source))` in at least fp32, softmaxes over the sources and sums the *raw* sources. Kimi
K3 ends with 8 blocks and the prefix: 9 sources. Without blocks (Kimi-Linear) this is the plain residual stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from kconv.modeling.dtypes import no_autocast, widen


class SourceScore(nn.Linear):
    """A `*_res_proj`: one score a source, in at least fp32 whatever the weight's dtype."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., 1] in at least fp32."""
        with no_autocast(x):
            return F.linear(widen(x), widen(self.weight))


def mix(prefix: torch.Tensor, blocks: Sequence[torch.Tensor], norm: nn.Module, proj: nn.Module) -> torch.Tensor:
    """Mixture of `blocks` and `prefix`, each [batch, length, hidden]; returns the same shape in `prefix`'s dtype.

    Nothing is stacked: nine hidden states side by side would be the layer's largest tensor.
    """
    sources = [widen(s) for s in (*blocks, prefix)]
    weights = widen(torch.cat([proj(norm(s, wide=True)) for s in sources], dim=-1)).softmax(dim=-1)
    total = sources[0] * weights[..., 0:1]
    for i, source in enumerate(sources[1:], 1):
        total = total + source * weights[..., i : i + 1]
    return total.to(prefix.dtype)
