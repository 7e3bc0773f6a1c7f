"""MXFP4 transforms: packed codes and scales on the left, values on the right.

| transform | left side | right side | grade |
|---|---|---|---|
| `Mxfp4(dtype)` | packed U8 [..., C/2], scale U8 [..., C/32] | values [..., C], scale | exact-with-sidecar |
| `Mxfp4(dtype, sidecar=False)` | the same | values [..., C] | value-exact: canonical scales on the way back |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kconv.errors import KconvError
from kconv.kernels import backend
from kconv.spec import FLOATS, Spec, torch_dtype
from kconv.transforms import expect, notes
from kconv.transforms.base import Grade, SpecError, Specs, Tiles, Transform, stated

if TYPE_CHECKING:
    from torch import Tensor

    Outs = Sequence[Tensor] | None
    Arrays = Sequence[np.ndarray] | None

SCALES = ("U8", "F8_E8M0")
PACKED = ("U8", "I8", "F4")


@dataclass(frozen=True)
class Mxfp4(Transform):
    """MXFP4 (left) as values of `dtype`, with the scales beside them when `sidecar` (right); see `kernels.mxfp4`.

    `packed_dtype` F4 counts codes in the last axis of its spec; the tensor itself is U8, two codes a byte.
    """

    dtype: str = "BF16"
    sidecar: bool = True
    group_size: int = 32
    scale_dtype: str = "U8"
    packed_dtype: str = "U8"

    def identity(self) -> str:
        return stated(
            "Mxfp4",
            dtype=self.dtype,
            sidecar=self.sidecar,
            group_size=self.group_size,
            scale_dtype=self.scale_dtype,
            packed_dtype=self.packed_dtype,
        )

    def __post_init__(self) -> None:
        known = self.dtype in FLOATS and self.scale_dtype in SCALES and self.packed_dtype in PACKED
        if not known or self.group_size % 2 or self.group_size < 2:
            raise KconvError(f"no such form of MXFP4: {self}")

    @property
    def grade(self) -> Grade:
        return Grade.EXACT_WITH_SIDECAR if self.sidecar else Grade.VALUE_EXACT

    def forward_specs(self, specs: Specs) -> Specs:
        expect.count("MXFP4 decoding", specs, 2)
        packed, scale = specs
        expect.dtype("packed", packed, (self.packed_dtype,))
        expect.dtype("scale", scale, (self.scale_dtype,))
        if not packed.shape:
            raise SpecError(f"packed is {packed}, which has no axis of codes")
        width = packed.shape[-1] * (1 if self.packed_dtype == "F4" else 2)
        self._divides(width, packed)
        expect.shape(
            "scale", scale, (*packed.shape[:-1], width // self.group_size),
            f"for packed {packed}: {width} codes in groups of {self.group_size}",
        )  # fmt: skip
        values = Spec(self.dtype, (*packed.shape[:-1], width))
        return (values, scale) if self.sidecar else (values,)

    def backward_specs(self, specs: Specs) -> Specs:
        expect.count("MXFP4 encoding", specs, 2 if self.sidecar else 1)
        values = specs[0]
        expect.dtype("values", values, (self.dtype,))
        if not values.shape:
            raise SpecError(f"values are {values}, which has no axis of groups")
        width = values.shape[-1]
        self._divides(width, values)
        scale = Spec(self.scale_dtype, (*values.shape[:-1], width // self.group_size))
        if self.sidecar and specs[1] != scale:
            raise SpecError(f"scale is {specs[1]}, expected {scale} for values {values}")
        return Spec(self.packed_dtype, (*values.shape[:-1], width if self.packed_dtype == "F4" else width // 2)), scale

    def _divides(self, width: int, spec: Spec) -> None:
        if width % self.group_size:
            raise SpecError(f"{spec} holds {width} codes a row, which groups of {self.group_size} do not divide")

    def on_bytes(self, data: Sequence[np.ndarray], specs: Specs, backward: bool, out: Arrays = None) -> list[np.ndarray] | None:
        """By numba's loops, else to bf16 by numpy, where the scales are ordinary; the rest is left to tensors."""
        run = self._encoder() if backward else self._decoder()
        if run is None:
            return None
        made = self.backward_specs(specs)[0] if backward else self.forward_specs(specs)[0]
        target = out[0] if out else np.empty(made.nbytes, np.uint8)
        done = run(data[0], data[1], target, self.group_size)
        return [target, data[1]][: 2 if self.sidecar else 1] if done else None

    def _decoder(self) -> Callable[..., bool] | None:
        if backend.choice("cpu") == "numba":
            from kconv.kernels.mxfp4_loops import decode_bytes

            return partial(decode_bytes, self.dtype)
        if self.dtype != "BF16":
            return None
        from kconv.kernels.mxfp4_arrays import decode_bytes as by_numpy

        return by_numpy

    def _encoder(self) -> Callable[..., bool] | None:
        if backend.choice("cpu") != "numba" or not self.sidecar or self.dtype != "BF16":
            return None
        from kconv.kernels.mxfp4_loops import encode_bytes

        return encode_bytes

    def forward(self, tensors: Sequence[Tensor], out: Outs = None) -> list[Tensor]:
        import torch

        from kconv.kernels import mxfp4

        packed, scale = tensors[0].view(torch.uint8), tensors[1]
        values = mxfp4.decode(packed, scale, torch_dtype(self.dtype), out[0] if out else None)
        if scale.numel() and not scale.view(torch.uint8).any() and bool((packed & 0x77).any()):
            notes.warn("all scale bytes are 0 (2^-127), as of a placeholder that was never filled; the neutral scale is 127")
        return [values, tensors[1]] if self.sidecar else [values]

    def backward(self, tensors: Sequence[Tensor], out: Outs = None) -> list[Tensor]:
        import torch

        from kconv.kernels import mxfp4

        stored = torch.int8 if self.packed_dtype == "I8" else torch.uint8
        if self.sidecar:
            lent = out[0].view(torch.uint8) if out else None
            return [mxfp4.encode_with_scale(tensors[0], tensors[1], lent).view(stored), tensors[1]]
        packed, scale = mxfp4.encode(tensors[0], self.group_size)
        return [packed.view(stored), scale.view(torch_dtype(self.scale_dtype))]

    def tiles(self, left: Specs, right: Specs) -> Tiles | None:
        return Tiles((1,) * len(left), (1,) * len(right)) if len(left[0].shape) > 1 else None
