"""What a tensor is before its data is read: a safetensors dtype name and a shape.

| dtype | bits | torch |
|---|---|---|
| BOOL, U8, I8 | 8 | bool, uint8, int8 |
| F8_E4M3, F8_E5M2, F8_E8M0 | 8 | float8_e4m3fn, float8_e5m2, float8_e8m0fnu |
| F8_E4M3FNUZ, F8_E5M2FNUZ | 8 | float8_e4m3fnuz, float8_e5m2fnuz |
| U16, I16, F16, BF16 | 16 | uint16, int16, float16, bfloat16 |
| U32, I32, F32 | 32 | uint32, int32, float32 |
| U64, I64, F64, C64 | 64 | uint64, int64, float64, complex64 |
| F4 | 4 | none: bytes of two codes, the last dimension counts codes |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BITS: dict[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4,
}  # fmt: skip
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
TORCH_NAMES: dict[str, str] = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "U16": "uint16", "I16": "int16", "F16": "float16", "BF16": "bfloat16", "U32": "uint32", "I32": "int32",
    "F32": "float32", "U64": "uint64", "I64": "int64", "F64": "float64", "C64": "complex64",
}  # fmt: skip
SAFETENSORS_NAMES: dict[str, str] = {torch_name: name for name, torch_name in TORCH_NAMES.items()}


@dataclass(frozen=True, slots=True)
class Spec:
    """dtype (safetensors name) and shape of one tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes the data takes in a safetensors file."""
        return self.numel * BITS[self.dtype] // 8

    @property
    def row_bytes(self) -> int:
        """Bytes of one row along axis 0 (the whole tensor when it has no axis)."""
        return self.nbytes // self.shape[0] if self.shape and self.shape[0] else self.nbytes

    def rows(self, n: int) -> Spec:
        """The spec of `n` rows along axis 0."""
        return Spec(self.dtype, (n, *self.shape[1:]))

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a safetensors dtype name; raises KeyError for F4, which torch stores as bytes."""
    import torch

    return getattr(torch, TORCH_NAMES[name])


def dtype_name(dtype: torch.dtype | str) -> str:
    """The safetensors name of a torch dtype, or of its name in a config (`bfloat16`, `torch.bfloat16`)."""
    return SAFETENSORS_NAMES[str(dtype).removeprefix("torch.")]


def spec_of(tensor: torch.Tensor) -> Spec:
    """The spec of a real tensor."""
    return Spec(dtype_name(tensor.dtype), tuple(tensor.shape))
