"""What is close enough, and why.

| precision | logits | modules: worst token, median token | a flip is a near-tie up to |
|---|---|---|---|
| float64 | fixed: 2e-6 max abs, 1e-6 median token, 1e-11 max KL | 5e-6, 3e-7 (golden files are stored in fp32) | 1e-6 |
| float32, CPU | fixed: 2e-5, 1e-5, 1e-9; the reference's own noise where that is larger | 5e-5, 2e-6 | 1e-5 |
| float32, GPU (TF32 inside fla's kernels) | the reference's own noise | 6e-2, 8e-3 | 1e-2 |
| float16 | the reference's own noise | 6e-2, 8e-3 | 1e-2 |
| bfloat16 | the reference's own noise | 0.25, 3e-2 | 5e-2 |

The precision of a comparison is the coarser one of the two sides. Noise is the distance of the reference in that precision
from itself in a higher one, on the same tokens; a limit is `factor` times it (1.5 by default; twice that for the worst of all
tokens, which varies more), and never below the fixed one.

Without routing flips every figure has a limit. With them the free run is held to the median token, and the run with the
reference's routing forced to everything: one flipped near-tie moves a token's logits by whole units and says nothing of the
weights. Module errors, each layer on the reference's inputs, are relative to the root-mean-square norm of the reference's
tokens. Measured on the golden files with right weights and up to 1,024 tokens, the largest (worst token, median token) are
1.9e-6 and 7e-8 in float64, 1.0e-5 and 5.5e-7 in float32, 0.14 and 9.5e-3 in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kconv.errors import KconvError
from kconv.parity.measures import Measures

ORDER = ("float64", "float32", "tf32", "float16", "bfloat16")
FIXED: dict[str, dict[str, float]] = {
    "float64": {"max_abs": 2e-6, "median_abs": 1e-6, "max_kl": 1e-11},
    "float32": {"max_abs": 2e-5, "median_abs": 1e-5, "max_kl": 1e-9},
}
STATES: dict[str, tuple[float, float]] = {
    "float64": (5e-6, 3e-7), "float32": (5e-5, 2e-6), "tf32": (6e-2, 8e-3), "float16": (6e-2, 8e-3), "bfloat16": (0.25, 3e-2),
}  # fmt: skip
TIES = {"float64": 1e-6, "float32": 1e-5, "tf32": 1e-2, "float16": 1e-2, "bfloat16": 5e-2}
FACTOR, TAIL = 1.5, 2.0
CALIBRATED = ("max_abs", "p90_abs", "median_abs", "max_kl", "mean_kl")
ROBUST = ("median_abs",)  # figures of the free run that a few flipped tokens do not move
TOP1_SLACK = 2  # tokens: a handful of near-equal best tokens may fall either way


@dataclass(frozen=True)
class Limits:
    """Limits of one comparison: `logits` by figure, `states` (worst, median token), `tie`, and where they come from."""

    precision: str
    logits: dict[str, float]
    states: tuple[float, float]
    tie: float
    origin: str

    def exceeded(self, check: str, measures: Measures, only: tuple[str, ...] | None = None) -> list[dict[str, Any]]:
        """The figures of `measures` beyond their limits (of `only` these), as the report lists them."""
        if not measures.figures:
            return [{"check": check, "figure": "tokens", "value": 0, "limit": 1}]
        bad = []
        for name, limit in self.logits.items():
            value = measures.figures[name]
            wrong = value < limit if name == "top1_agreement" else not value <= limit
            if wrong and (only is None or name in only):
                bad.append({"check": check, "figure": name, "value": value, "limit": limit})
        return bad


def precision_of(dtype: str, device: str, reference: str) -> str:
    """The coarser precision of ours (dtype on a device) and of the reference's answers."""
    ours = "tf32" if dtype == "float32" and not device.startswith("cpu") else dtype
    if ours not in ORDER or reference not in ORDER:
        raise KconvError(f"parity is defined in {', '.join(o for o in ORDER if o != 'tf32')}, not in {ours} and {reference}")
    return max(ours, reference, key=ORDER.index)


def limits_for(
    precision: str, noise: dict[str, float] | None, tokens: int, scale: float = 1.0, factor: float = FACTOR, origin: str = ""
) -> Limits:
    """Limits in `precision`; `scale` is the root-mean-square reference logit; beyond 2 fixed limits grow with it.

    Raises KconvError where only the reference's own noise can tell what is close enough, and it is not known.
    """
    fixed = {k: v * max(scale / 2, 1.0) ** (2 if k.endswith("kl") else 1) for k, v in FIXED.get(precision, {}).items()}
    if not fixed and noise is None:
        raise KconvError(
            f"in {precision} no fixed limit is honest, and the reference's own noise in it is not known",
            hint="capture the reference with `--also` this precision, or give its noise by --noise",
        )
    if noise is None or precision == "float64":
        return Limits(precision, fixed, STATES[precision], TIES[precision], f"fixed for {precision}")
    held = [k for k in CALIBRATED if k in noise and (not fixed or k in fixed)]
    logits = {k: max(fixed.get(k, 0.0), factor * noise[k] * (TAIL if k.startswith("max") else 1)) for k in held}
    if not fixed and "top1_agreement" in noise:
        logits["top1_agreement"] = 1 - factor * (1 - noise["top1_agreement"]) - TOP1_SLACK / max(tokens, 1)
    why = f"{factor} x the reference's own noise ({origin}), {factor * TAIL:g} x for the worst token"
    why += ", at least the fixed limits" if fixed else ""
    return Limits(precision, logits, STATES[precision], TIES[precision], why)
