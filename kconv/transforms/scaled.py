"""What transforms of scaled codes share: values on the right, with the scales beside them when there is a sidecar.

With the sidecar the stored bits come back (`exact-with-sidecar`): the codes follow from value and scale, each is checked
by decoding it again, and what cannot be told apart is refused when it is decoded. Without it the way back chooses new
scales, and the grade is `lossy`. The values themselves are code times scale in fp32, rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

from kconv.errors import KconvError
from kconv.spec import FLOATS
from kconv.transforms.base import Grade, Transform

SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0", "U8")


@dataclass(frozen=True)
class ScaledTransform(Transform):
    """A quantised weight (left) as values of `dtype` (right), with its scales beside them when `sidecar`."""

    dtype: str = "BF16"
    sidecar: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in FLOATS - {"F64"}:
            raise KconvError(f"quantised weights decode to BF16, F16 or F32, not {self.dtype}")

    @property
    def grade(self) -> Grade:
        return Grade.EXACT_WITH_SIDECAR if self.sidecar else Grade.LOSSY
