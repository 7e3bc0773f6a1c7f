"""What a user asks of a conversion, and the values each option may have."""

from __future__ import annotations

from dataclasses import dataclass

from kconv.errors import KconvError

TARGETS = ("native", "hf", "hf-text", "nemo")
EXPERTS = ("packed", "bf16", "fp16", "fp32", "mxfp4", "nvfp4", "fp8-block")
WEIGHTS = ("fp8-block",)
VISION = ("keep", "drop")
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Options:
    """What a user asks of a conversion; None means the adapter's default."""

    to: str = "native"
    experts: str | None = None
    vision: str | None = None
    dtype: str | None = None
    sidecar: bool = True
    layers: tuple[int, int] | None = None
    tie: bool = False
    weights: str | None = None
    block: tuple[int, int] | None = None
    dsa_topk: int | None = None
    indexer_eps: float | None = None

    def __post_init__(self) -> None:
        choices = {"to": TARGETS, "experts": EXPERTS, "vision": VISION, "dtype": DTYPES, "weights": WEIGHTS}
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed and not (value is None and name != "to"):
                raise KconvError(f"unknown {name} {value!r}", hint=f"there are {', '.join(allowed)}")
        if self.block is not None:
            object.__setattr__(self, "block", tuple(self.block))  # a manifest's JSON has lists
        if self.block and not (len(self.block) == 2 and all(type(n) is int and n > 0 for n in self.block)):
            raise KconvError(f"block {self.block!r} is no block size", hint="give rows and columns, for example (128, 128)")
        if self.dsa_topk is not None and not (type(self.dsa_topk) is int and self.dsa_topk > 0):
            raise KconvError(f"dsa_topk {self.dsa_topk!r} is no number of keys", hint="give a positive whole number")
        if self.indexer_eps is not None and not (isinstance(self.indexer_eps, float) and 0 < self.indexer_eps < 1):
            raise KconvError(f"indexer_eps {self.indexer_eps!r} is no eps", hint="give a small positive number, for example 1e-6")
        if self.layers and not (len(self.layers) == 2 and 0 <= self.layers[0] <= self.layers[1]):
            raise KconvError(f"layers {self.layers!r} are no range", hint="give the first and the last, for example (0, 3)")
