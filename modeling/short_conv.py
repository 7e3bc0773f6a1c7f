"""KDA's short causal convolution: depthwise, SiLU, in at least fp32, its state the last width - 1 inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kconv.modeling import fla_kernels
from kconv.modeling.dtypes import Fp32Parameters, wide, wide_parameter
from kconv.modeling.segments import Segments


class ShortConvolution(Fp32Parameters):
    """Causal depthwise convolution over time followed by SiLU; weight [channels, 1, width] held in at least fp32."""

    fp32_names = ("weight",)

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = wide_parameter(channels, 1, width)

    @property
    def width(self) -> int:
        """Number of taps."""
        return self.weight.shape[-1]

    def forward(self, x: torch.Tensor, segments: Segments | None, state: torch.Tensor | None, use_fla: bool) -> torch.Tensor:
        """Convolve [batch, length, channels], or the flat row of `segments`; returns the same shape and dtype.

        `state` [sequences, width - 1, channels] holds the inputs before each sequence (None: zeros).
        """
        if use_fla:
            return fla_kernels.short_conv(x, self.weight, segments, state)
        extended, positions = self._extend(x, segments, state)
        taps = [extended[:, j : j + x.shape[1]] if positions is None else extended[:, positions + j] for j in range(self.width)]
        weight = self.weight[:, 0]
        dtype = wide(torch.promote_types(x.dtype, weight.dtype))
        y = torch.stack([tap.to(dtype) * weight[:, j] for j, tap in enumerate(taps)]).sum(0)
        return F.silu(y).to(x.dtype)

    def tail(self, x: torch.Tensor, segments: Segments | None, state: torch.Tensor | None) -> torch.Tensor:
        """The state after `x`: the last `width - 1` inputs of each sequence, [sequences, width - 1, channels]."""
        past = self.width - 1
        if segments is None:
            return self._extend(x[:, -past:], None, None if x.shape[1] >= past else state)[0][:, -past:]
        extended, _ = self._extend(x, segments, state)
        ends = segments.cu_seqlens[1:].long() + past * torch.arange(1, len(segments.bounds), device=x.device)
        return extended[0, ends[:, None] - past + torch.arange(past, device=x.device)]

    def _extend(
        self, x: torch.Tensor, segments: Segments | None, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Inputs with `width - 1` earlier ones before each sequence, and where in it each token's window begins."""
        past, channels = self.width - 1, x.shape[-1]
        if segments is None:
            before = x.new_zeros(x.shape[0], past, channels) if state is None else state.to(x.dtype)
            return torch.cat([before, x], dim=1), None
        count = len(segments.bounds) - 1
        cu = segments.cu_seqlens.long()
        sequence = torch.repeat_interleave(torch.arange(count, device=x.device), cu.diff(), output_size=x.shape[1])
        positions = torch.arange(x.shape[1], device=x.device) + past * sequence
        extended = x.new_zeros(x.shape[1] + past * count, channels).index_copy(0, positions + past, x[0])
        if state is not None:
            rows = (cu[:-1] + past * torch.arange(count, device=x.device))[:, None] + torch.arange(past, device=x.device)
            extended = extended.index_copy(0, rows.flatten(), state.to(x.dtype).flatten(0, 1))
        return extended[None], positions
