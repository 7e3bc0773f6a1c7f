"""What is particular to each quantisation format, one class and one row of `FORMATS` a format.

| part | what it answers |
|---|---|
| `holds` | whether a stored form is of the format |
| `specs`, `decoder`, `encoder` | the stored tensors of a weight; from them to values; from values to them, or None |
| `label` | the form in a few words, for people |
| `sayable`, `format`, `scheme`, `activations` | the form in a quantisation block, in the words of compressed-tensors |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from kconv.kernels.geometry import scale_shape
from kconv.spec import Spec
from kconv.transforms.base import Specs, Transform
from kconv.transforms.fp8 import Fp8
from kconv.transforms.int4 import Int4
from kconv.transforms.mxfp4 import Mxfp4
from kconv.transforms.nvfp4 import Nvfp4
from kconv.transforms.quantize import Quantize, QuantizeFp8, QuantizeMxfp4, QuantizeNvfp4

MX_GROUP, NV_GROUP = 32, 16
STRATEGIES = {"block": "block", "channel-2d": "channel", "tensor": "tensor"}


@dataclass(frozen=True)
class Fields:
    """How a weight is stored: its tensors' suffixes in the order of its decoder's left side, and the decoder's parameters."""

    kind: str
    names: tuple[str, ...] = ("weight",)
    stored: str = "BF16"
    scale: str = ""
    code: str = ""
    layout: str = ""
    block: tuple[int, int] | None = None
    group: int = 0
    symmetric: bool = True
    shape: str = ""
    divides: bool = True
    whole: tuple[int, ...] = ()


class Format(ABC):
    """One format: what `Fields` of its `kind` mean. `least_names` is the fewest tensors that its forms have."""

    kind: str
    format: str = ""
    least_names = 1

    def holds(self, form: Fields) -> bool:
        """Whether a form is of this format."""
        return form.kind == self.kind

    @abstractmethod
    def specs(self, form: Fields, shape: tuple[int, ...]) -> Specs:
        """Specs of the stored tensors of a weight of `shape` [O, I]."""

    @abstractmethod
    def label(self, form: Fields) -> str:
        """The form in a few words, for people."""

    @abstractmethod
    def decoder(self, form: Fields, dtype: str, columns: int, *, sidecar: bool) -> Transform:
        """From the stored tensors of a weight [O, columns] to its values."""

    def encoder(self, form: Fields, dtype: str) -> Quantize | None:
        """From values to the stored tensors; None where kconv does not encode to the form."""
        return None

    def scalar(self, form: Fields) -> bool:
        """Whether the form's last tensor has no axis."""
        return False

    def sayable(self, form: Fields) -> bool:
        """Whether compressed-tensors has words for the form."""
        return form.names[0] == "weight_packed"

    @abstractmethod
    def scheme(self, form: Fields) -> dict[str, Any]:
        """What the `weights` of a config group say beyond the defaults."""

    def activations(self, form: Fields) -> dict[str, Any] | None:
        """The `input_activations` of a config group."""
        return None


class Plain(Format):
    """Values as they are."""

    kind, least_names = "plain", 0

    def specs(self, form: Fields, shape: tuple[int, ...]) -> Specs:
        return (Spec(form.stored, shape),)

    def label(self, form: Fields) -> str:
        return form.stored

    def decoder(self, form: Fields, dtype: str, columns: int, *, sidecar: bool) -> Transform:
        raise AssertionError("a plain weight is not decoded")

    def sayable(self, form: Fields) -> bool:
        return False

    def scheme(self, form: Fields) -> dict[str, Any]:
        raise AssertionError("a plain weight is in no group")


class Mxfp4Format(Format):
    """Codes of 4 bits, an exponent for 32 of them."""

    kind, format, least_names = "mxfp4", "mxfp4-pack-quantized", 2

    def specs(self, form: Fields, shape: tuple[int, ...]) -> Specs:
        rows, columns = shape
        width = columns if form.stored == "F4" else columns // 2
        return Spec(form.stored, (rows, width)), Spec(form.scale, (rows, columns // MX_GROUP))

    def label(self, form: Fields) -> str:
        return f"MXFP4 ({'compressed-tensors' if form.names[0] == 'weight_packed' else 'Quark'})"

    def decoder(self, form: Fields, dtype: str, columns: int, *, sidecar: bool) -> Transform:
        return Mxfp4(dtype, sidecar, MX_GROUP, form.scale, form.stored)

    def encoder(self, form: Fields, dtype: str) -> Quantize:
        return QuantizeMxfp4(dtype)

    def scheme(self, form: Fields) -> dict[str, Any]:
        return {"group_size": MX_GROUP, "scale_dtype": "torch.uint8", "num_bits": 4}


class Nvfp4Format(Format):
    """Codes of 4 bits, an FP8 scale for 16 of them, a float for the weight."""

    kind, format = "nvfp4", "nvfp4-pack-quantized"

    def specs(self, form: Fields, shape: tuple[int, ...]) -> Specs:
        rows, columns = shape
        return Spec("U8", (rows, columns // 2)), Spec("F8_E4M3", (rows, columns // NV_GROUP)), Spec("F32", form.whole)

    def label(self, form: Fields) -> str:
        return f"NVFP4 ({'compressed-tensors' if form.divides else 'ModelOpt'})"

    def decoder(self, form: Fields, dtype: str, columns: int, *, sidecar: bool) -> Transform:
        return Nvfp4(dtype, sidecar, form.divides, form.whole)

    def encoder(self, form: Fields, dtype: str) -> Quantize:
        return QuantizeNvfp4(dtype, form.divides, form.whole)

    def scalar(self, form: Fields) -> bool:
        return form.whole == ()

    def scheme(self, form: Fields) -> dict[str, Any]:
        return {"strategy": "tensor_group", "group_size": NV_GROUP, "scale_dtype": "torch.float8_e4m3fn"}


class Int4Format(Format):
    """Words of eight 4-bit integers, a float for each group of them."""

    kind, format = "int4", "pack-quantized"

    def specs(self, form: Fields, shape: tuple[int, ...]) -> Specs:
        groups = shape[1] // (form.group or shape[1])
        zero = () if form.symmetric else (Spec("I32", (-(-shape[0] // 8), groups)),)
        right = (Spec("BF16", shape), Spec(form.scale, (shape[0], groups)), *zero)
        return self.decoder(form, "BF16", shape[1], sidecar=True).backward_specs(right)

    def label(self, form: Fields) -> str:
        return f"INT4, groups of {form.group}{'' if form.symmetric else ', zero points'}"

    def decoder(self, form: Fields, dtype: str, columns: int, *, sidecar: bool) -> Transform:
        return Int4(dtype, sidecar, columns, form.group, form.symmetric, form.scale, form.shape)

    def scheme(self, form: Fields) -> dict[str, Any]:
        return {"type": "int", "group_size": form.group}


class Fp8Format(Format):
    """Codes of 8 bits, scaled by the tensor, by channels, or by blocks."""

    kind, format = "fp8", "float-quantized"

    def specs(self, form: Fields, shape: tuple[int, ...]) -> Specs:
        return Spec(form.stored, shape), Spec(form.scale, scale_shape(form.layout, shape, form.block))

    def label(self, form: Fields) -> str:
        how = {"block": "blocks", "block-4d": "4-D blocks"}.get(form.layout, f"per {form.layout.split('-')[0]}")
        tiles = f" of {form.block[0]} x {form.block[1]}" if form.block else ""
        return f"FP8 {form.code.removeprefix('F8_')} {how.replace('scalar', 'tensor')}{tiles}, {form.names[1]} {form.scale}"

    def decoder(self, form: Fields, dtype: str, columns: int, *, sidecar: bool) -> Transform:
        stored = "" if form.stored == form.code else form.stored
        return Fp8(dtype, sidecar, form.layout, form.block, form.code, form.scale, stored)

    def encoder(self, form: Fields, dtype: str) -> Quantize:
        return QuantizeFp8(dtype, form.layout, form.block, form.code, form.scale)

    def scalar(self, form: Fields) -> bool:
        return form.layout == "scalar"

    def sayable(self, form: Fields) -> bool:
        return form.names == ("weight", "weight_scale") and form.layout in STRATEGIES

    def scheme(self, form: Fields) -> dict[str, Any]:
        structure = list(form.block) if form.block else None
        return {"num_bits": 8, "strategy": STRATEGIES[form.layout], "block_structure": structure}

    def activations(self, form: Fields) -> dict[str, Any] | None:
        """For blocks as engines run them: quantised on the fly in groups of 128."""
        if form.layout != "block":
            return None
        how = {"dynamic": True, "observer": None, "symmetric": True}
        return {**how, "group_size": 128, "num_bits": 8, "strategy": "group", "type": "float"}


class Mxfp8Format(Fp8Format):
    """Codes of 8 bits, an exponent for 32 of them: FP8 in blocks of one row."""

    format = "mxfp8-quantized"

    def holds(self, form: Fields) -> bool:
        return super().holds(form) and form.block == (1, MX_GROUP)

    def label(self, form: Fields) -> str:
        return "MXFP8"

    def scheme(self, form: Fields) -> dict[str, Any]:
        return {"group_size": MX_GROUP, "scale_dtype": "torch.uint8", "num_bits": 8}

    def activations(self, form: Fields) -> dict[str, Any] | None:
        return None


FORMATS: dict[str, Format] = {
    "plain": Plain(), "mxfp4": Mxfp4Format(), "nvfp4": Nvfp4Format(), "int4": Int4Format(), "mxfp8": Mxfp8Format(),
    "fp8": Fp8Format(),
}  # fmt: skip
"""Every format by name; where two of a kind hold a form, the first one is meant."""
KINDS = {format.kind: format for format in reversed(FORMATS.values())}


def format_of(form: Fields) -> Format:
    """The format of a form."""
    return next(format for format in FORMATS.values() if format.holds(form))
