"""The outcome of a parity check: the JSON keys of the command's contract, and the same for people.

| key | meaning |
|---|---|
| `verdict`, `failed` | `pass` or `fail`; the checks beyond their limits, each with figure, value and limit |
| `max_abs`, `max_kl`, `mean_kl`, `top1_agreement`, `worst_token` | of the free run, without a mask |
| `routing_flips` | tokens whose expert set differs in at least one layer of the free run; null where no router is known |
| `first_divergence` | the module that diverges first when each layer gets the reference's inputs; null when none does |
| `nan` | whether a NaN or an infinity appeared on either side |
| `reference`, `dtype` | what the answers come from; the precision that ours ran in |
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kconv.parity.limits import Limits
from kconv.parity.measures import Measures, plain

MAIN = "logits"


@dataclass
class Report:
    """What a parity check found."""

    reference: str
    dtype: str
    device: str
    limits: Limits
    attention: dict[str, str | None] = field(default_factory=dict)
    runs: dict[str, Measures] = field(default_factory=dict)
    failed: list[dict[str, Any]] = field(default_factory=list)
    routing_flips: int | None = None
    flips_by_layer: dict[int, int] = field(default_factory=dict)
    routing: str | None = None
    first_divergence: str | None = None
    divergence: dict[str, Any] | None = None
    layers: list[dict[str, Any]] = field(default_factory=list)
    noise: dict[str, float] | None = None
    not_finite: bool = False
    uncovered: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether something was compared and nothing failed."""
        return bool(self.runs) and not self.failed

    def data(self) -> dict[str, Any]:
        """The JSON object of `kconv verify-parity --json`."""
        free = self.runs[MAIN]
        figures = {k: plain(v) for k, v in free.figures.items()}
        named = ("max_abs", "max_kl", "mean_kl", "top1_agreement")
        return {
            "verdict": "pass" if self.passed else "fail",
            **{k: figures.get(k) for k in named},
            "worst_token": free.worst(),
            "routing_flips": self.routing_flips,
            "first_divergence": self.first_divergence,
            "nan": self.not_finite,
            "reference": self.reference,
            "dtype": self.dtype,
            "device": self.device,
            "attention": self.attention,
            "failed": [{**f, "value": plain(f["value"])} for f in self.failed],
            "divergence": self.divergence,
            "first_bad_token": free.first_beyond(self.limits.logits),
            "tokens": free.compared,
            "runs": {n: {k: plain(v) for k, v in m.figures.items()} for n, m in self.runs.items()},
            "limits": {"from": self.limits.origin, "precision": self.limits.precision, "logits": self.limits.logits,
                       "modules": list(self.limits.states), "near_tie": self.limits.tie},
            "noise": self.noise,
            "of_noise": self.of_noise(),
            "flips_by_layer": {str(k): v for k, v in self.flips_by_layer.items()},
            "routing": self.routing,
            "layers": self.layers,
            "unseen": self.uncovered,
            "notes": self.notes,
        }  # fmt: skip

    def of_noise(self) -> dict[str, float] | None:
        """Our figures as multiples of the reference's own noise (of disagreement for top-1)."""
        if self.noise is None:
            return None
        ours = dict(self.runs[MAIN].figures)
        theirs = dict(self.noise)
        for side in (ours, theirs):
            if "top1_agreement" in side:
                side["top1_disagreement"] = 1 - side.pop("top1_agreement")
        keys = [k for k in theirs if k in ours and not k.startswith(("topk", "rank")) and theirs[k]]
        return {k: ours[k] / theirs[k] for k in keys}

    def lines(self) -> list[str]:
        """The report for people, line by line."""
        out = [
            f"reference  {self.reference}",
            f"ours       {self.dtype} on {self.device}, {self.attention.get('ours')} attention",
            f"limits     {self.limits.origin}",
        ]
        out += [f"  {'run':10} {'tokens':>7} {'max abs':>9} {'median':>9} {'max KL':>9} {'mean KL':>9} {'top-1':>7}"]
        for name, m in self.runs.items():
            f = m.figures
            cells = [f"{f[k]:9.2e}" for k in ("max_abs", "median_abs", "max_kl", "mean_kl")] if f else ["        -"] * 4
            out.append(f"  {name:10} {m.compared:7d} {' '.join(cells)} {f.get('top1_agreement', 0):7.4f}")
        cells = [f"{self.limits.logits[k]:9.2e}" if k in self.limits.logits else " " * 9
                 for k in ("max_abs", "median_abs", "max_kl", "mean_kl")]  # fmt: skip
        top1 = self.limits.logits.get("top1_agreement")
        out.append(f"  {'limit':10} {'':7} {' '.join(cells)} {'' if top1 is None else f'{top1:7.4f}'}".rstrip())
        if self.layers:
            worst = max(self.layers, key=lambda x: x["error"] if x["error"] is not None else float("inf"))
            out.append(f"layer by layer, on the reference's inputs: worst {worst['module']} {_e(worst['error'])}, "
                       f"limits {self.limits.states[0]:.0e} (worst token), {self.limits.states[1]:.0e} (median)")  # fmt: skip
        if self.routing_flips is not None:
            out.append(f"routing flips: {self.routing_flips} tokens (the reference's experts: {self.routing})")
        out += self.notes
        if self.first_divergence:
            out.append(f"first divergence: {self.first_divergence} {_where(self.divergence or {})}")
        for f in self.failed[:8]:
            out.append(f"failed: {f['check']} {f['figure']} {_e(f['value'])}, limit {_e(f['limit'])}")
        if len(self.failed) > 8:
            out.append(f"and {len(self.failed) - 8} more")
        out.append(f"verdict: {'pass' if self.passed else 'fail'}")
        return out


def _e(value: float | None) -> str:
    return "not finite" if value is None or value != value or abs(value) == float("inf") else f"{value:.3g}"


def _where(d: dict[str, Any]) -> str:
    parts = [f"error {_e(d['error'])}", f"from position {d['first_position']}"] if "first_position" in d else []
    parts += [f"{k}: {', '.join(map(str, d[k]))}" for k in ("parameters", "experts", "tensors") if d.get(k)]
    return f"({'; '.join(parts)})"
