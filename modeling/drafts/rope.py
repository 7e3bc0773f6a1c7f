"""Rotary embeddings of the drafts: plain and YaRN, both pair layouts, frequencies never stored in a low precision.

| fact | where it comes from |
|---|---|
| YaRN blends plain and stretched frequencies by a ramp between `beta_fast` and `beta_slow` | arXiv 2309.00071, Transformers |
| cos and sin are multiplied by `attention_factor`, always explicit here | else runtimes take 1.0 or 1.4159 for the K2.5 draft |
| MLA with YaRN multiplies the softmax scale by `mscale(factor, mscale_all_dim)` squared | DeepSeek-V3 |
| GQA drafts rotate halves `(i, i + d/2)`, MLA drafts rotate neighbours `(2i, 2i+1)` | z-lab's and DeepSeek's code |

Frequencies are computed from the configuration on each call in at least fp32: there is no buffer for a `.to(bfloat16)`
to round, which would dephase long contexts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kconv.errors import KconvError


def mscale(factor: float, scale: float = 1.0) -> float:
    """YaRN's amplitude `0.1 * scale * ln(factor) + 1`, 1 without stretching."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def default_attention_factor(rope: dict[str, Any]) -> float:
    """What Transformers 5 takes when a YaRN block gives no `attention_factor`: the ratio of both mscales, or mscale itself."""
    factor = float(rope["factor"])
    top, bottom = rope.get("mscale"), rope.get("mscale_all_dim")
    return mscale(factor, top) / mscale(factor, bottom) if top and bottom else mscale(factor)


@dataclass(frozen=True)
class Rope:
    """Frequencies and amplitude over `dim` rotated channels."""

    dim: int
    theta: float
    interleave: bool
    amplitude: float = 1.0
    factor: float | None = None
    original_max: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @classmethod
    def of(cls, dim: int, rope: dict[str, Any], interleave: bool) -> Rope:
        """From a Transformers 5 `rope_parameters` block; raises KconvError for a kind no draft uses."""
        kind, theta = rope.get("rope_type", "default"), float(rope["rope_theta"])
        if kind == "default":
            return cls(dim, theta, interleave)
        if kind != "yarn":
            raise KconvError(
                f"rope_type {kind!r} is not one of 'default', 'yarn'", hint="no known draft uses it; report the checkpoint"
            )
        return cls(
            dim, theta, interleave, float(rope["attention_factor"]), float(rope["factor"]),
            int(rope["original_max_position_embeddings"]), float(rope.get("beta_fast") or 32.0),
            float(rope.get("beta_slow") or 1.0), bool(rope.get("truncate", True)),
        )  # fmt: skip

    def frequencies(self, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Angle per position of each pair, shape [dim / 2]."""
        exponents = torch.arange(0, self.dim, 2, device=device).to(dtype) / self.dim
        plain = 1.0 / self.theta**exponents
        if self.factor is None:
            return plain
        keep = 1.0 - self._ramp(device, dtype)
        return plain / self.factor * (1.0 - keep) + plain * keep

    def _ramp(self, device: torch.device | None, dtype: torch.dtype) -> Tensor:
        """0 for pairs that keep their frequency, 1 for pairs that are stretched, linear between."""

        def pair_of(rotations: float) -> float:
            return self.dim * math.log(self.original_max / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        span = high - low if high != low else 0.001
        return ((torch.arange(self.dim // 2, device=device).to(dtype) - low) / span).clamp(0, 1)

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin for positions [B, S]: [B, S, dim] each, computed in at least fp32 and cast to `dtype`."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        angles = positions.to(wide)[..., None] * self.frequencies(positions.device, wide)
        angles = angles.repeat_interleave(2, -1) if self.interleave else torch.cat([angles, angles], -1)
        return (angles.cos() * self.amplitude).to(dtype), (angles.sin() * self.amplitude).to(dtype)

    def rotate(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate x [B, heads, S, dim] by tables [B, S, dim]."""
        cos, sin = (t.unsqueeze(1) for t in tables)
        if self.interleave:
            turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        else:
            first, second = x.chunk(2, -1)
            turned = torch.cat([-second, first], -1)
        return x * cos + turned * sin
