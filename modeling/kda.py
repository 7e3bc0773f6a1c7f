"""Kimi Delta Attention: linear attention with a gated delta rule and a decay per channel.

| part | computation | parameters (K3 sizes) |
|---|---|---|
| q, k, v | silu(causal conv of width 4 (proj(x))) | `q/k/v_proj` [12288, 7168], `q/k/v_conv1d` [12288, 1, 4] fp32 |
| decay | of f_b(f_a(x)), see `kda_ops.Gate` | `f_a_proj`, `f_b_proj`, `A_log` [96] fp32, `dt_bias` [12288] fp32 |
| strength | sigmoid(b_proj(x)) | `b_proj` [96, 7168] |
| state | fp32 or wider [96, 128, 128] per sequence | |
| output | o_proj(o_norm(o, gate)), gate of full or low rank | `g_proj`, or `g_a_proj`, `g_b_proj`; `o_norm` fp32 |

CUDA runs fla's kernels where fla is installed, everything else the plain torch forms; `backend` forces one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import nn

from kconv.errors import EnvironmentLacks
from kconv.modeling import fla_kernels, kda_ops
from kconv.modeling.cache import KDACacheLayer, States
from kconv.modeling.config import KimiK3TextConfig
from kconv.modeling.dtypes import Fp32Parameters, wide_parameter, widen
from kconv.modeling.norm import KimiGatedRMSNorm
from kconv.modeling.segments import Segments
from kconv.modeling.short_conv import ShortConvolution

RECURRENT_UP_TO = 8  # tokens; a decoding step is cheaper token by token


@dataclass(frozen=True)
class KDAInputs:
    """What the recurrence reads, before the convolutions: q, k, v, z [B, T, H * D] and beta logits [B, T, H]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    z: torch.Tensor
    beta: torch.Tensor

    def first(self, count: int) -> KDAInputs:
        """The first `count` tokens of each row."""
        return KDAInputs(*(x[:, :count] for x in (self.q, self.k, self.v, self.z, self.beta)))


class KimiDeltaAttention(Fp32Parameters):
    """One KDA layer; see the module's table."""

    fp32_names = ("A_log", "dt_bias")

    def __init__(self, config: KimiK3TextConfig) -> None:
        super().__init__()
        linear = config.linear
        self.heads, self.head_dim = linear["num_heads"], linear["head_dim"]
        self.lower_bound: float | None = linear.get("gate_lower_bound")
        self.backend: Literal["auto", "torch", "fla"] = "auto"
        hidden, width = config.hidden_size, self.heads * self.head_dim
        taps = linear["short_conv_kernel_size"]
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, width, bias=False) for _ in "qkv")
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (ShortConvolution(width, taps) for _ in "qkv")
        self.f_a_proj = nn.Linear(hidden, self.head_dim, bias=False)
        self.f_b_proj = nn.Linear(self.head_dim, width, bias=False)
        self.b_proj = nn.Linear(hidden, self.heads, bias=False)
        self.A_log = wide_parameter(self.heads)
        self.dt_bias = wide_parameter(width)
        self.full_rank_gate: bool = bool(linear.get("use_full_rank_gate", False))
        if self.full_rank_gate:
            self.g_proj = nn.Linear(hidden, width, bias=False)
        else:
            self.g_a_proj = nn.Linear(hidden, self.head_dim, bias=False)
            self.g_b_proj = nn.Linear(self.head_dim, width, bias=False)
        self.o_norm = KimiGatedRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.o_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor, segments: Segments | None = None, cache: KDACacheLayer | None = None) -> torch.Tensor:
        """[batch, length, hidden] -> the same; with a cache, `segments` must hold one sequence a row."""
        packed = x if segments is None else segments.pack(x)
        inputs = KDAInputs(
            self.q_proj(packed),
            self.k_proj(packed),
            self.v_proj(packed),
            self.f_b_proj(self.f_a_proj(packed)),
            self.b_proj(packed),
        )
        before: States = (None, None) if cache is None else (cache.conv, cache.state)
        o, after = self.recur(inputs, segments, before, keep=cache is not None)
        if cache is not None:
            cache.store(after, x.shape[1], self._replay(inputs, segments, before))
        gate = self.g_proj(packed) if self.full_rank_gate else self.g_b_proj(self.g_a_proj(packed))
        o = self.o_norm(o, gate.unflatten(-1, (self.heads, self.head_dim)))
        y = self.o_proj(o.flatten(-2))
        return y if segments is None else segments.unpack(y)

    def recur(self, inputs: KDAInputs, segments: Segments | None, before: States, keep: bool) -> tuple[torch.Tensor, States]:
        """Convolutions and recurrence; returns o [B, T, H, V] and, where `keep`, the states that the cache holds."""
        conv, state = before
        use_fla = self._use_fla(inputs.q)
        heads, tails = [], []
        for i, convolve in enumerate((self.q_conv1d, self.k_conv1d, self.v_conv1d)):
            x, earlier = (inputs.q, inputs.k, inputs.v)[i], None if conv is None else conv[:, i]
            heads.append(convolve(x, segments, earlier, use_fla).unflatten(-1, (self.heads, self.head_dim)))
            if keep:
                tails.append(convolve.tail(x, segments, earlier))
        z = inputs.z.unflatten(-1, (self.heads, self.head_dim))
        raw = kda_ops.Delta(heads[0], heads[1], heads[2], z, inputs.beta)
        short = segments is None and inputs.q.shape[1] <= RECURRENT_UP_TO and not torch.is_grad_enabled()
        gate = kda_ops.Gate(self.A_log, self.dt_bias, self.lower_bound)
        if use_fla:
            cu = None if segments is None else segments.cu_seqlens
            o, final = fla_kernels.delta_attention(raw, gate, state, cu, chunk=not short, keep=keep)
        else:
            ready = raw._replace(g=gate.log_decay(z), beta=widen(inputs.beta).sigmoid())
            bounds = None if segments is None else segments.bounds
            o, final = kda_ops.delta_attention(ready, state, bounds, RECURRENT_UP_TO if short else 0)
        return o, (torch.stack(tails, dim=1), final) if keep else (None, None)

    def _replay(self, inputs: KDAInputs, segments: Segments | None, before: States) -> Callable[[int], States] | None:
        """How to get the states after only the first tokens of this call; None where rows are not aligned."""
        return None if segments is not None else partial(self._states_after, inputs, before)

    def _states_after(self, inputs: KDAInputs, before: States, count: int) -> States:
        return before if count == 0 else self.recur(inputs.first(count), None, before, keep=True)[1]

    def _use_fla(self, x: torch.Tensor) -> bool:
        if self.backend == "auto":
            return x.is_cuda and x.dtype != torch.float64 and fla_kernels.available()
        if self.backend == "fla" and not fla_kernels.available():
            raise EnvironmentLacks("flash-linear-attention cannot be imported", hint="pip install kconv[gpu]")
        return self.backend == "fla"
