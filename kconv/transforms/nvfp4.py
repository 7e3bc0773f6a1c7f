"""NVFP4 transforms: packed codes, group scales and a global scale on the left, values on the right.

| transform | left side | right side |
|---|---|---|
| `Nvfp4(dtype)` | packed U8 [..., I/2], scale F8_E4M3 [..., I/16], global F32 | values [..., I], scale, global |
| `Nvfp4(dtype, sidecar=False)` | the same | values |

Exact-with-sidecar, the second lossy: new scales on the way back.

`divides` is the form of compressed-tensors (`weight_global_scale` [1]); without it, ModelOpt's (`weight_scale_2` []).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kconv.spec import Spec, torch_dtype
from kconv.transforms import expect, notes
from kconv.transforms.base import SpecError, Specs, stated
from kconv.transforms.scaled import ScaledTransform

if TYPE_CHECKING:
    from torch import Tensor

    Outs = Sequence[Tensor] | None

GROUP = 16


@dataclass(frozen=True)
class Nvfp4(ScaledTransform):
    """NVFP4 (left) as values (right)."""

    divides: bool = True
    global_shape: tuple[int, ...] = (1,)

    def identity(self) -> str:
        return stated("Nvfp4", dtype=self.dtype, sidecar=self.sidecar, divides=self.divides, global_shape=self.global_shape)

    def _scales(self, values: tuple[int, ...]) -> Specs:
        return Spec("F8_E4M3", (*values[:-1], values[-1] // GROUP)), Spec("F32", self.global_shape)

    def _check(self, scales: Specs, values: Spec) -> None:
        for name, spec, wanted in zip(("scale", "global scale"), scales, self._scales(values.shape), strict=True):
            if spec != wanted:
                raise SpecError(f"the {name} is {spec}, expected {wanted} for values {list(values.shape)}")

    def _width(self, spec: Spec, per_element: int) -> int:
        width = per_element * spec.shape[-1] if spec.shape else 0
        if not width or width % GROUP:
            raise SpecError(f"{spec} holds {width} codes a row, which groups of {GROUP} do not divide")
        return width

    def forward_specs(self, specs: Specs) -> Specs:
        expect.count("NVFP4 decoding", specs, 3)
        expect.dtype("packed", specs[0], ("U8",))
        values = Spec(self.dtype, (*specs[0].shape[:-1], self._width(specs[0], 2)))
        self._check(specs[1:], values)
        return (values, *specs[1:]) if self.sidecar else (values,)

    def backward_specs(self, specs: Specs) -> Specs:
        expect.count("NVFP4 encoding", specs, 3 if self.sidecar else 1)
        expect.dtype("values", specs[0], (self.dtype,))
        width = self._width(specs[0], 1)
        if self.sidecar:
            self._check(specs[1:], specs[0])
        return Spec("U8", (*specs[0].shape[:-1], width // 2)), *self._scales(specs[0].shape)

    def forward(self, tensors: Sequence[Tensor], out: Outs = None) -> list[Tensor]:
        from kconv.kernels import nvfp4

        packed, scale, whole = tensors
        lent, dtype = out[0] if out else None, torch_dtype(self.dtype)
        values = nvfp4.decode(packed, scale, whole, dtype, lent, divides=self.divides, reversible=self.sidecar)
        return [values, *tensors[1:]] if self.sidecar else [values]

    def backward(self, tensors: Sequence[Tensor], out: Outs = None) -> list[Tensor]:
        from kconv.kernels import nvfp4

        if self.sidecar:
            values, scale, whole = tensors
            packed = nvfp4.encode_with_scale(values, scale, whole, out[0] if out else None, divides=self.divides)
            return [packed, scale, whole]
        packed, scale, whole = nvfp4.quantize(tensors[0], divides=self.divides)
        decode = partial(nvfp4.decode, packed, scale, whole, tensors[0].dtype, divides=self.divides)
        notes.measure("NVFP4", tensors[0], decode)
        return [packed, scale, whole.reshape(self.global_shape)]
