"""From measures to a verdict: what is held to which limit, and what a failure is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from kconv.errors import KconvError
from kconv.parity.golden import Golden
from kconv.parity.layerwise import Layers, Point, suspects
from kconv.parity.limits import ROBUST, limits_for, precision_of
from kconv.parity.measures import Measures, compare_logits, plain
from kconv.parity.report import MAIN, Report
from kconv.parity.trace import ByLayer

Noise = str | Path | dict[str, float] | None
DERIVED = "as our layers choose on its inputs"


class Verdict:
    """A report being written."""

    def __init__(self, report: Report) -> None:
        self.report, self.limits = report, report.limits
        self.flipped = False

    def judge(self, name: str, measures: Measures, only: tuple[str, ...] | None = None) -> None:
        """Hold a run to its limits (to `only` these figures)."""
        self.report.runs[name] = measures
        self.report.failed += self.limits.exceeded(name, measures, only)

    def judge_free(self, name: str, measures: Measures) -> None:
        """Hold a run without forced routing to all limits, or to the robust ones where near-ties fell the other way."""
        self.judge(name, measures, ROBUST if self.flipped else None)

    def flips(self, ours: ByLayer, theirs: ByLayer, origin: str) -> bool:
        """Count tokens whose experts differ (ids [tokens, top_k], ascending), judge the free run, say whether there are any."""
        differs = {i: (ids.cpu() != theirs[i].cpu()).any(-1) for i, ids in ours.items() if i in theirs}
        anywhere = torch.stack(list(differs.values())).any(0) if differs else torch.zeros(1, dtype=torch.bool)
        self.report.flips_by_layer = {i: int(d.sum()) for i, d in sorted(differs.items())}
        self.report.routing_flips, self.report.routing = int(anywhere.sum()), origin
        self.flipped = bool(anywhere.any())
        self.judge_free(MAIN, self.report.runs[MAIN])
        return self.flipped

    def layers(self, found: Layers, routing: ByLayer) -> Point | None:
        """Enter the comparison layer by layer; returns the first place that diverges."""
        report, limit = self.report, self.limits.states[0]
        report.layers = [p.data() for p in found.points if p.name.count(".") <= 1]
        bad = [p for p in found.points if p.beyond]
        report.not_finite = report.not_finite or any(plain(p.state.error) is None for p in bad)
        report.failed += [{"check": p.module, "figure": "module error", "value": p.state.error, "limit": limit} for p in bad]
        if found.missing:
            some = ", ".join(found.missing[:3])
            report.notes.append(f"{len(found.missing)} recorded modules are not found on our side, and not compared: {some}")
        first = found.first()
        if first is not None:
            report.first_divergence = first.module
            report.divergence = first.data() | suspects(first, routing, self.limits)
        elif report.failed:
            report.notes.append("every layer agrees on the reference's inputs: look at what passes between layers")
        return first

    def hear(self, said: dict[str, Any]) -> None:
        """Enter what the source's own layer says of the first divergence."""
        self.report.first_divergence = said.pop("first_divergence", self.report.first_divergence)
        self.report.notes += said.pop("notes", [])
        self.report.divergence = (self.report.divergence or {}) | said

    def uncovered(self, names: dict[str, set[int] | None], differ: list[str] | None) -> None:
        """Enter what took no part in the runs (state dict name -> idle experts), and what of it differs from the source."""
        experts = {n.split(".")[2]: e for n, e in names.items() if e is not None}
        idle = sum(map(len, experts.values()))
        said = [f"{idle} experts of {len(experts)} layers"] if idle else []
        said += ["rows of the embedding"] if "model.embed_tokens.weight" in names else []
        said += ["the first layer's self_attention_res"] if any("self_attention_res" in n for n in names) else []
        how = "not judged; --source compares them bit for bit" if differ is None else "compared with the source bit for bit"
        self.report.notes.append(f"unseen by every token, {how}: {', '.join(said)}")
        self.report.uncovered = {"experts": {k: sorted(e) for k, e in experts.items()}, "different": differ}
        for name in differ or ():
            self.report.failed.append({"check": name, "figure": "unseen, other bits than the source's", "value": 1, "limit": 0})
        if differ and self.report.first_divergence is None:
            self.report.first_divergence = differ[0].split("[")[0].removesuffix(".weight")
            self.report.divergence = {"module": self.report.first_divergence, "tensors": differ, "error": None}

    def close(self) -> Report:
        """The report, with what is not finite entered."""
        broken = {name: m.not_finite for name, m in self.report.runs.items() if m.not_finite}
        self.report.not_finite = self.report.not_finite or bool(broken)
        figure = "tokens not finite"
        self.report.failed += [{"check": n, "figure": figure, "value": count, "limit": 0} for n, count in broken.items()]
        return self.report


def open_report(golden: Golden, dtype: str, device: str, noise: Noise, factor: float) -> Report:
    """An empty report of a comparison with `golden`, with its limits."""
    logits = golden.logits
    figures, origin = noise_of(golden, dtype, noise)
    precision = precision_of(dtype, device, golden.dtype)
    limits = limits_for(precision, figures, golden.ids.numel(), scale_of(logits), factor, origin)
    return Report(golden.reference, dtype, device, limits, noise=figures)


def scale_of(logits: torch.Tensor) -> float:
    """Root-mean-square of the finite logits."""
    finite = logits[logits.isfinite()].double()
    return float(finite.square().mean().sqrt()) if len(finite) else 1.0


def noise_of(golden: Golden, dtype: str, given: Noise) -> tuple[dict[str, float] | None, str]:
    """The reference's own distance, in `dtype`, from its answers, and where that is known from."""
    if isinstance(given, dict):
        return given, "as given"
    if given is None:
        run = golden.run_in(dtype)
        return (None, "") if run is None else (compare_logits(run, golden.logits).figures, f"captured in {dtype}")
    if Path(given).suffix == ".safetensors":
        other = Golden(given)
        if not torch.equal(other.ids, golden.ids):
            raise KconvError(
                f"{given} was captured on other tokens than {golden.path}", hint="capture it with --ids of the golden"
            )
        run = other.run_in(dtype)
        run = other.logits if run is None and other.dtype == dtype else run
        if run is None:
            raise KconvError(f"{given} holds no run of the reference in {dtype}", hint=f"capture one with --dtype {dtype}")
        return compare_logits(run, golden.logits).figures, Path(given).name
    try:
        figures = json.loads(Path(given).read_text())
        return {str(k): float(v) for k, v in figures.items()}, Path(given).name
    except (OSError, ValueError, TypeError, AttributeError) as e:
        raise KconvError(f"{given} is neither a golden file nor JSON figures: {e}") from e
