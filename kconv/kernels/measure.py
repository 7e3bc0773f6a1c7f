"""How far a re-encoded tensor is from the original: counts and sums that add up over tiles and tensors.

| figure | meaning |
|---|---|
| `changed` of `count` | values that are not the same number after decoding |
| `relative` | sqrt(sum of squared differences / sum of squared values) |
| `worst` | largest absolute difference |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Error:
    """Differences between values and what decodes in their place; `a + b` is the error of both together."""

    count: int = 0
    changed: int = 0
    squared: float = 0.0
    norm: float = 0.0
    worst: float = 0.0

    @property
    def lossless(self) -> bool:
        """Whether every value came back as the same number."""
        return self.changed == 0

    @property
    def relative(self) -> float:
        """Root mean square of the differences relative to that of the values."""
        return math.sqrt(self.squared / self.norm) if self.norm else 0.0

    def figures(self) -> dict[str, float | int | bool]:
        """The same as JSON has it."""
        return {"values": self.count, "changed": self.changed, "relative": self.relative, "worst": self.worst,
                "lossless": self.lossless}  # fmt: skip

    def __add__(self, other: Error) -> Error:
        return Error(
            self.count + other.count, self.changed + other.changed, self.squared + other.squared,
            self.norm + other.norm, max(self.worst, other.worst),
        )  # fmt: skip

    def __str__(self) -> str:
        if self.lossless:
            return f"lossless: all {self.count} values the same"
        return (
            f"{self.changed} of {self.count} values changed, "
            f"relative error {self.relative:.3g} (root mean square), worst {self.worst:.3g}"
        )


def error_of(values: Tensor, decoded: Tensor) -> Error:
    """The error of `decoded` in place of `values`, in fp64 sums."""
    if not values.numel():
        return Error()
    difference = values.double() - decoded.double()
    return Error(
        values.numel(),
        int(torch.count_nonzero(difference)),
        float(difference.square().sum()),
        float(values.double().square().sum()),
        float(difference.abs().max()),
    )
