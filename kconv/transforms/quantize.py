"""Lossy re-encoding: values on the left, codes and scales on the right, the error measured (`transforms.notes`).

| transform | right side | scale |
|---|---|---|
| `QuantizeFp8(dtype, layout, block)` | codes [..., O, I], scale | a power of two where that loses nothing, else max / 448 |
| `QuantizeMxfp4(dtype)` | packed U8 [..., I/2], scale U8 [..., I/32] | 2^(floor(log2(max)) - 2), the rule of OCP MX |
| `QuantizeNvfp4(dtype)` | packed, scale F8_E4M3 [..., I/16], global F32 | powers of two where they lose nothing, else max / 6 |

The grade is `lossy` whatever the data; a measured error of zero says that this data lost nothing. They are the decoding
transforms without sidecar, turned around.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kconv.transforms import notes
from kconv.transforms.base import Grade, Specs, Tiles, Transform, stated
from kconv.transforms.fp8 import Fp8
from kconv.transforms.mxfp4 import Mxfp4
from kconv.transforms.nvfp4 import Nvfp4

if TYPE_CHECKING:
    from torch import Tensor

    Outs = Sequence[Tensor] | None


@dataclass(frozen=True)
class Quantize(Transform):
    """Values of `dtype` (left) as a quantised weight (right)."""

    dtype: str = "BF16"
    grade: ClassVar[Grade] = Grade.LOSSY

    @property
    def decoder(self) -> Transform:
        """The transform that decodes the right side."""
        raise NotImplementedError

    def _encode(self, values: Tensor) -> list[Tensor]:
        return self.decoder.backward([values])

    def forward_specs(self, specs: Specs) -> Specs:
        return self.decoder.backward_specs(specs)

    def backward_specs(self, specs: Specs) -> Specs:
        return self.decoder.forward_specs(specs)

    def forward(self, tensors: Sequence[Tensor], out: Outs = None) -> list[Tensor]:
        coded = self._encode(tensors[0])
        return coded if out is None else [target.copy_(made) for target, made in zip(out, coded, strict=True)]

    def backward(self, tensors: Sequence[Tensor], out: Outs = None) -> list[Tensor]:
        return self.decoder.forward(tensors, out)

    def tiles(self, left: Specs, right: Specs) -> Tiles | None:
        tiles = self.decoder.tiles(right, left)
        return None if tiles is None else Tiles(tiles.right, tiles.left)


@dataclass(frozen=True)
class QuantizeFp8(Quantize):
    """Values (left) as FP8 codes and scales (right)."""

    layout: str = "block"
    block: tuple[int, int] | None = (128, 128)
    code: str = "F8_E4M3"
    scale_dtype: str = "F32"

    def identity(self) -> str:
        return stated(
            "QuantizeFp8",
            dtype=self.dtype,
            layout=self.layout,
            block=self.block,
            code=self.code,
            scale_dtype=self.scale_dtype,
        )

    def __post_init__(self) -> None:
        _ = self.decoder  # which refuses a form that does not exist

    @property
    def decoder(self) -> Fp8:
        return Fp8(self.dtype, False, self.layout, self.block, self.code, self.scale_dtype)


@dataclass(frozen=True)
class QuantizeMxfp4(Quantize):
    """Values (left) as MXFP4 codes and scales (right)."""

    group_size: int = 32

    def identity(self) -> str:
        return stated("QuantizeMxfp4", dtype=self.dtype, group_size=self.group_size)

    @property
    def decoder(self) -> Mxfp4:
        return Mxfp4(self.dtype, sidecar=False, group_size=self.group_size)

    def _encode(self, values: Tensor) -> list[Tensor]:
        from kconv.kernels import mxfp4

        packed, scale = mxfp4.quantize(values, self.group_size)
        notes.measure("MXFP4", values, lambda: mxfp4.decode(packed, scale, values.dtype))
        return [packed, scale]


@dataclass(frozen=True)
class QuantizeNvfp4(Quantize):
    """Values (left) as NVFP4 codes, scales and global scale (right)."""

    divides: bool = True
    global_shape: tuple[int, ...] = (1,)

    def identity(self) -> str:
        return stated("QuantizeNvfp4", dtype=self.dtype, divides=self.divides, global_shape=self.global_shape)

    @property
    def decoder(self) -> Nvfp4:
        return Nvfp4(self.dtype, False, self.divides, self.global_shape)
