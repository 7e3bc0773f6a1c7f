"""Transforms that change the number format of a tensor without scales.

| transform | forward | backward | grade |
|---|---|---|---|
| `Cast(left, right)`, right wider | exact | refuses a value that does not come back | value-exact |
| `Cast(left, right)`, right narrower | refuses a value that `right` does not hold | exact | value-exact |
| `Cast(left, right, lossy=True)` | rounds to nearest even, refuses overflow | widens | lossy |

Exact is by bits: -0, subnormals and NaN payloads count. What is lost is the dtype: no layout records the one that a tensor
had before, so the way back has the same values in the new one, and the grade says value-exact.
A lossy cast from fp64 rounds by way of fp32, as torch does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kconv.errors import BadData, KconvError
from kconv.spec import FLOATS, Spec, torch_dtype
from kconv.transforms import expect
from kconv.transforms.base import Grade, Specs, Tiles, Transform, stated

if TYPE_CHECKING:
    from torch import Tensor

    Outs = Sequence[Tensor] | None

INTEGERS = frozenset({"U8", "I8", "I16", "I32", "I64"})


@dataclass(frozen=True)
class Cast(Transform):
    """A tensor of dtype `left` as one of dtype `right`."""

    left: str
    right: str
    lossy: bool = False

    def identity(self) -> str:
        return stated("Cast", left=self.left, right=self.right, lossy=self.lossy)

    def __post_init__(self) -> None:
        kinds = [kind for kind in (FLOATS, INTEGERS) if {self.left, self.right} <= kind]
        if not kinds or (self.lossy and INTEGERS in kinds):
            raise KconvError(f"cannot cast {self.left} to {self.right}{' with loss' * self.lossy}")

    @property
    def grade(self) -> Grade:
        return Grade.LOSSY if self.lossy else Grade.EXACT if self.left == self.right else Grade.VALUE_EXACT

    def _to(self, specs: Specs, source: str, target: str) -> Specs:
        expect.count("casting", specs, 1)
        expect.dtype("the tensor", specs[0], (source,))
        return (Spec(target, specs[0].shape),)

    def forward_specs(self, specs: Specs) -> Specs:
        return self._to(specs, self.left, self.right)

    def backward_specs(self, specs: Specs) -> Specs:
        return self._to(specs, self.right, self.left)

    def forward(self, tensors: Sequence[Tensor], out: Outs = None) -> list[Tensor]:
        return [_cast(tensors[0], self.left, self.right, self.lossy, out)]

    def backward(self, tensors: Sequence[Tensor], out: Outs = None) -> list[Tensor]:
        return [_cast(tensors[0], self.right, self.left, self.lossy, out)]

    def tiles(self, left: Specs, right: Specs) -> Tiles | None:
        return Tiles((1,), (1,)) if left[0].shape else None


def _cast(tensor: Tensor, source: str, target: str, lossy: bool, out: Outs) -> Tensor:
    from kconv.kernels.common import bits, lend

    result = lend(out[0] if out else None, tuple(tensor.shape), torch_dtype(target), tensor.device)
    _convert(tensor, result)
    if (source, target) == ("BF16", "F32"):
        return result
    if lossy:
        _refuse(tensor.isfinite() & ~result.isfinite(), tensor, target)
    else:
        again = tensor.new_empty(tensor.shape)
        _convert(result, again)
        _refuse(bits(again) != bits(tensor), tensor, target)
    return result


def _convert(tensor: Tensor, result: Tensor) -> None:
    """Into the storage of `result`; between bf16 and fp32 by bits, since rounding would give every NaN one payload."""
    import torch

    from kconv.kernels.common import bits

    if (tensor.dtype, result.dtype) == (torch.bfloat16, torch.float32):
        bits(result).copy_(bits(tensor)).bitwise_left_shift_(16)
    elif (tensor.dtype, result.dtype) == (torch.float32, torch.bfloat16):
        result.copy_(tensor)
        not_a_number = tensor.isnan()
        if bool(not_a_number.any()):
            bits(result)[not_a_number] = (bits(tensor)[not_a_number] >> 16).to(torch.int16)
    else:
        result.copy_(tensor)


def _refuse(bad: Tensor, tensor: Tensor, target: str) -> None:
    from kconv.kernels.common import first

    if bool(bad.any()):
        at = first(bad)
        raise BadData(
            f"{tensor[at].item()!r} is not representable in {target}", operand=0, position=at,
            hint="keep the tensor's dtype, or ask for a lossy cast",
        )  # fmt: skip
