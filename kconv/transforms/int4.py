"""INT4 transforms: packed words, scales and what belongs to them on the left, values on the right.

| transform | left side | right side |
|---|---|---|
| `Int4(dtype, columns=I)` | packed I32 [O, ceil(I/8)], scale [O, I/group], shape I64 [2] | values [O, I], scale |
| `Int4(..., symmetric=False)` | packed, scale, zero point I32 [ceil(O/8), I/group], shape | values, scale, zero point |
| `Int4(..., sidecar=False)` | packed, scale, shape | values |

Exact-with-sidecar, the last one lossy.

The order on the left is packed, scale, zero point if asymmetric, shape if stored. `columns` comes from the module or the
config: a packed width tells it only to within 8; without it the packed words are taken as full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kconv.errors import BadData, KconvError
from kconv.spec import Spec, torch_dtype
from kconv.transforms import expect, notes
from kconv.transforms.base import SpecError, Specs, stated
from kconv.transforms.scaled import ScaledTransform

if TYPE_CHECKING:
    from torch import Tensor

    Outs = Sequence[Tensor] | None


@dataclass(frozen=True)
class Int4(ScaledTransform):
    """INT4 pack-quantized (left) as values (right).

    `group_size` 0 is one group a row; `shape_dtype` "" means that `weight_shape` is not stored.
    """

    columns: int = 0
    group_size: int = 32
    symmetric: bool = True
    scale_dtype: str = "BF16"
    shape_dtype: str = "I64"

    def identity(self) -> str:
        return stated(
            "Int4",
            dtype=self.dtype,
            sidecar=self.sidecar,
            columns=self.columns,
            group_size=self.group_size,
            symmetric=self.symmetric,
            scale_dtype=self.scale_dtype,
            shape_dtype=self.shape_dtype,
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        known = self.scale_dtype in ("BF16", "F16", "F32") and self.shape_dtype in ("", "I32", "I64")
        if not known or self.group_size < 0 or self.columns < 0:
            raise KconvError(f"no such form of INT4: {self}")
        if not (self.sidecar or self.symmetric):
            raise KconvError("asymmetric INT4 needs its zero points beside the values")

    def _left(self, rows: int, columns: int) -> Specs:
        group = self.group_size or columns
        if not columns or columns % group:
            raise SpecError(f"{columns} columns do not divide into groups of {group}")
        specs = [Spec("I32", (rows, -(-columns // 8))), Spec(self.scale_dtype, (rows, columns // group))]
        if not self.symmetric:
            specs.append(Spec("I32", (-(-rows // 8), columns // group)))
        if self.shape_dtype:
            specs.append(Spec(self.shape_dtype, (2,)))
        return tuple(specs)

    def _names(self) -> list[str]:
        return ["packed", "scale", *["zero point"] * (not self.symmetric), *["shape"] * bool(self.shape_dtype)]

    def _check(self, specs: Specs, wanted: Specs) -> None:
        for name, spec, wish in zip(self._names(), specs, wanted, strict=False):
            if spec != wish:
                raise SpecError(f"the {name} is {spec}, expected {wish}")

    def forward_specs(self, specs: Specs) -> Specs:
        expect.count("INT4 decoding", specs, len(self._names()))
        packed = specs[0]
        if len(packed.shape) != 2:
            raise SpecError(f"packed is {packed}, expected I32 [O, I/8]")
        columns = self.columns or packed.shape[1] * 8
        self._check(specs, self._left(packed.shape[0], columns))
        return Spec(self.dtype, (packed.shape[0], columns)), *specs[1 : self._kept]

    def backward_specs(self, specs: Specs) -> Specs:
        expect.count("INT4 encoding", specs, self._kept)
        expect.dtype("values", specs[0], (self.dtype,))
        if len(specs[0].shape) != 2 or (self.columns and specs[0].shape[1] != self.columns):
            raise SpecError(f"values are {specs[0]}, expected [O, {self.columns or 'I'}]")
        left = self._left(*specs[0].shape)
        if self.sidecar:
            self._check((left[0], *specs[1:]), left)
        return left

    @property
    def _kept(self) -> int:
        """Tensors on the right: values, scale, zero point if asymmetric."""
        return 1 + self.sidecar + (not self.symmetric)

    def forward(self, tensors: Sequence[Tensor], out: Outs = None) -> list[Tensor]:
        from kconv.kernels import int4

        packed, scale = tensors[:2]
        columns = self.columns or packed.shape[1] * 8
        if self.shape_dtype:
            self._check_shape(tensors[-1], packed.shape[0], columns)
        zero = None if self.symmetric else tensors[2]
        lent = out[0] if out else None
        dtype = torch_dtype(self.dtype)
        values = int4.decode(packed, scale, columns, dtype, lent, zero=zero, reversible=self.sidecar)
        return [values, *tensors[1 : self._kept]]

    def backward(self, tensors: Sequence[Tensor], out: Outs = None) -> list[Tensor]:
        import torch

        from kconv.kernels import int4

        if self.sidecar:
            zero = None if self.symmetric else tensors[2]
            packed = int4.encode_with_scale(tensors[0], tensors[1], out[0] if out else None, zero=zero)
            left = [packed, *tensors[1:]]
        else:
            values = tensors[0]
            packed, scale = int4.quantize(values, self.group_size, torch_dtype(self.scale_dtype))
            notes.measure("INT4", values, lambda: int4.decode(packed, scale, values.shape[1], values.dtype))
            left = [packed, scale]
        if self.shape_dtype:
            shape = torch.tensor(tensors[0].shape, dtype=torch_dtype(self.shape_dtype))
            left.append(out[-1].copy_(shape) if out else shape)
        return left

    def _check_shape(self, shape: Tensor, rows: int, columns: int) -> None:
        if shape.tolist() != [rows, columns]:
            raise BadData(
                f"weight_shape says {shape.tolist()}, the packed words hold {[rows, columns]}",
                operand=len(self._names()) - 1, position=(0,),
                hint="give the true number of columns, or ask the publisher: the two tensors disagree",
            )  # fmt: skip
