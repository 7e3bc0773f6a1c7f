"""FP8 transforms: codes and scales on the left, values on the right.

| transform | left side | right side | grade |
|---|---|---|---|
| `Fp8(dtype, layout, block)` | codes [..., O, I], scale | values [..., O, I], scale | exact-with-sidecar |
| `Fp8(..., sidecar=False)` | the same | values | lossy: new scales on the way back |
| `Mxfp8(dtype)` | codes F8_E4M3 [..., O, I], scale U8 [..., O, I/32] | values, scale | exact-with-sidecar |

`layout` is one of `kernels.geometry`, by the shape of the scale (`layout_of`); `block` comes from the config.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from kconv.errors import KconvError
from kconv.kernels.geometry import LAYOUTS, grid, layout_of, scale_shape
from kconv.spec import Spec, torch_dtype
from kconv.transforms import expect, notes
from kconv.transforms.base import SpecError, Specs, Tiles, stated
from kconv.transforms.scaled import SCALE_DTYPES, ScaledTransform

if TYPE_CHECKING:
    from torch import Tensor

    Outs = Sequence[Tensor] | None

T = TypeVar("T")
CODES = ("F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ")


@dataclass(frozen=True)
class Fp8(ScaledTransform):
    """FP8 codes with their scales (left) as values (right).

    `stored` is the dtype of the codes in the file where that is not `code` (U8, or F8_E4M3 holding FNUZ codes).
    """

    layout: str = "block"
    block: tuple[int, int] | None = None
    code: str = "F8_E4M3"
    scale_dtype: str = "F32"
    stored: str = ""

    def identity(self) -> str:
        return stated(
            "Fp8",
            dtype=self.dtype,
            sidecar=self.sidecar,
            layout=self.layout,
            block=self.block,
            code=self.code,
            scale_dtype=self.scale_dtype,
            stored=self.stored,
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layout not in LAYOUTS or self.code not in CODES or self.scale_dtype not in SCALE_DTYPES:
            raise KconvError(f"no such form of FP8: {self}")
        if self.layout.startswith("block") and self.block is None:
            raise KconvError(
                "block scales without a block size",
                hint="it is weight_block_size or block_structure in the quantisation config; it is not guessed",
            )
        if self.scale_dtype == "U8" and not self.layout.startswith("block"):
            raise KconvError(f"U8 scales in the layout {self.layout} could mean anything: only blocks of E8M0 bytes are known")

    @classmethod
    def of(cls, weight: Spec, scale: Spec, *, block: tuple[int, int] | None = None, **options: Any) -> Fp8:
        """The transform for a pair of specs: layout by shape, code and scale by dtype; `options` are the other fields."""
        layout = _spec_error(layout_of, weight.shape, scale.shape, block)
        options.setdefault("code", weight.dtype)
        used = block if layout.startswith("block") else None
        return cls(layout=layout, block=used, scale_dtype=scale.dtype, stored=_unless(weight.dtype, options["code"]), **options)

    @property
    def _codes(self) -> str:
        return self.stored or self.code

    def _scale(self, shape: tuple[int, ...]) -> Spec:
        return Spec(self.scale_dtype, _spec_error(scale_shape, self.layout, shape, self.block))

    def _pair(self, what: str, specs: Specs, dtype: str, n: int) -> Spec:
        expect.count(f"FP8 {what}", specs, n)
        expect.dtype("the weight", specs[0], (dtype,))
        scale = self._scale(specs[0].shape)
        if n == 2:
            expect.dtype("the scale", specs[1], (scale.dtype,))
            expect.shape("the scale", specs[1], scale.shape, f"({self.layout}{_tiles(self.block)}) for weight {specs[0]}")
        return scale

    def forward_specs(self, specs: Specs) -> Specs:
        scale = self._pair("decoding", specs, self._codes, 2)
        values = Spec(self.dtype, specs[0].shape)
        return (values, scale) if self.sidecar else (values,)

    def backward_specs(self, specs: Specs) -> Specs:
        scale = self._pair("encoding", specs, self.dtype, 2 if self.sidecar else 1)
        return Spec(self._codes, specs[0].shape), scale

    def forward(self, tensors: Sequence[Tensor], out: Outs = None) -> list[Tensor]:
        from kconv.kernels import fp8

        values = fp8.decode(
            tensors[0], tensors[1], torch_dtype(self.dtype), out[0] if out else None,
            block=self.block, code=self.code, reversible=self.sidecar,
        )  # fmt: skip
        return [values, tensors[1]] if self.sidecar else [values]

    def backward(self, tensors: Sequence[Tensor], out: Outs = None) -> list[Tensor]:
        from kconv.kernels import fp8

        if not self.sidecar:
            codes, scale = fp8.quantize(tensors[0], self.code, layout=self.layout, block=self.block, scale_dtype=self.scale_dtype)
            notes.measure("FP8", tensors[0], lambda: fp8.decode(codes, scale, tensors[0].dtype, block=self.block))
            return [codes.view(torch_dtype(self._codes)), scale]
        lent = out[0].view(torch_dtype(self.code)) if out else None
        codes = fp8.encode_with_scale(tensors[0], tensors[1], self.code, lent, block=self.block)
        return [codes.view(torch_dtype(self._codes)), tensors[1]]

    def tiles(self, left: Specs, right: Specs) -> Tiles | None:
        shape = left[0].shape
        if len(shape) > 2:
            rows = 1
        elif self.layout in ("scalar", "tensor", "tensor-2d"):
            return None
        else:
            rows = grid(self.layout, shape, self.block).height
        return Tiles((rows, 1), (rows, 1)[: len(right)])


def Mxfp8(dtype: str = "BF16", sidecar: bool = True, scale_dtype: str = "U8") -> Fp8:
    """MXFP8: F8_E4M3 codes with an E8M0 byte per 32 along the last axis, which is FP8 in blocks of 1 x 32."""
    return Fp8(dtype, sidecar, "block", (1, 32), "F8_E4M3", scale_dtype)


def _spec_error(function: Callable[..., T], *arguments: object) -> T:
    try:
        return function(*arguments)
    except KconvError as e:
        raise SpecError(e.message, hint=e.hint) from e


def _tiles(block: tuple[int, int] | None) -> str:
    return f" {block[0]} x {block[1]}" if block else ""


def _unless(dtype: str, code: str) -> str:
    return "" if dtype == code else dtype
