"""Does a converted checkpoint compute what its reference computes? `check` for paths, `compare` for a model in memory.

| run | compared with | fails when |
|---|---|---|
| `logits` | the reference without a mask | a figure is beyond its limit (with routing flips: the median token) |
| `forced` | the same, experts forced to the reference's; only with routing flips | any figure is beyond its limit |
| `padded`, `rowN` | with the mask, where it is 1; a row alone, without its padding | as `logits` |
| `cached` | the last tokens, decoded from a cache; on request | as `logits` |
| layer by layer | every module, each layer on the reference's inputs | any place is beyond its limits |

A value that is not finite fails, on either side; so does a comparison of nothing.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kconv.errors import KconvError
from kconv.parity.capturing import capture
from kconv.parity.golden import Golden
from kconv.parity.layerwise import Layers, compare_layers, expected_of, suspects
from kconv.parity.limits import FACTOR, ROBUST, Limits, limits_for, precision_of
from kconv.parity.measures import Measures, compare_logits, plain
from kconv.parity.report import MAIN, Report
from kconv.parity.trace import Trace, decoder_of, trace
from kconv.parity.witness import testify

DECODED = 4  # tokens that the `cached` run decodes one by one


def check(
    converted: str | Path,
    reference: str | Path,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    source: str | Path | None = None,
    noise: str | Path | None = None,
    factor: float = FACTOR,
    attention: str = "eager",
    cached: bool = False,
    reference_dtype: str = "float64",
    python: str | Path | None = None,
    **live: Any,
) -> Report:
    """Compare a checkpoint (native or published layout) with a golden file, or with a reference that is run for it.

    Args:
        converted: the checkpoint in question; anything `kconv.load` takes.
        reference: a golden file, or the folder of a checkpoint that `capture` can run.
        dtype, device: how ours runs; float64 is the sharpest test.
        source: the checkpoint that `converted` was made from; names module and tensors where the golden file cannot.
        noise: a golden file of the reference in this precision, or JSON figures, for low precision.
        factor: how many times the reference's own noise is allowed.
        attention: `eager` (the reference's order of operations) or `sdpa`.
        cached: also decode the last tokens from a cache.
        reference_dtype, python, live: how a reference that is run is run; see `capture`.

    Raises KconvError for bad input, EnvironmentLacks when the reference cannot run here.
    """
    from kconv.loading import load

    with reference_of(reference, dtype=dtype, device=device, reference_dtype=reference_dtype, python=python,
                      noise=noise, **live) as (golden, its_noise):  # fmt: skip
        model = load(converted, device=device, dtype=getattr(torch, dtype))
        model.set_attn_implementation(attention)
        return compare(model, golden, source=source or _beside(golden, converted), noise=its_noise, factor=factor, cached=cached)


def _beside(golden: Golden, converted: str | Path) -> Path | None:
    """The checkpoint that a golden file lies in, unless it is the one in question."""
    folder = golden.path.resolve().parent
    holds = (folder / "config.json").exists() and len(list(folder.glob("*.safetensors"))) > 1
    return folder if holds and folder != Path(str(converted)).resolve() else None


@contextmanager
def reference_of(
    reference: str | Path, *, dtype: str, device: str, reference_dtype: str, python: Any, noise: Any, **live: Any
) -> Iterator[tuple[Golden, str | Path | None]]:
    """The golden file, or one captured for the occasion, and where its noise in `dtype` is to be found."""
    if Path(reference).suffix == ".safetensors":
        yield Golden(reference), noise
        return
    with tempfile.TemporaryDirectory(prefix="kconv-parity-") as scratch:
        gpu = not device.startswith("cpu")
        also = [dtype] if dtype != reference_dtype and not gpu else []
        out = Path(scratch) / "golden.safetensors"
        how = {"device": device, "python": python}
        operators = "torch" if reference_dtype == "float64" else None
        capture(reference, out, dtype=reference_dtype, also=also, **{"operators": operators, **how, **live})
        if gpu and noise is None and dtype != reference_dtype:
            noise = Path(scratch) / "noise.safetensors"
            again = {k: v for k, v in live.items() if k not in ("ids", "text")}
            capture(reference, noise, dtype=dtype, also=(), modules="none", ids=out, **how, **again)
        yield Golden(out), noise


def compare(
    model: nn.Module,
    golden: Golden | str | Path,
    *,
    source: Any = None,
    noise: str | Path | None = None,
    factor: float = FACTOR,
    cached: bool = False,
) -> Report:
    """Compare a native model in memory with a golden file; arguments as for `check`."""
    golden = golden if isinstance(golden, Golden) else Golden(golden)
    parameter = next(p for p in model.parameters() if p.is_floating_point())
    dtype, device = str(model.dtype).removeprefix("torch."), str(parameter.device)
    report = _report(golden, dtype, device, noise, factor)
    _fits(model, golden)
    run = _Comparison(model, golden, report)
    run.free()
    if golden.layers:
        run.layers(source)
    else:
        report.notes.append("the golden file holds no hidden states: no layer can be named")
    run.masked()
    if cached:
        run.decoded()
    report.not_finite = report.not_finite or any(m.not_finite for m in report.runs.values())
    broken = {name: m.not_finite for name, m in report.runs.items() if m.not_finite}
    report.failed += [{"check": n, "figure": "tokens not finite", "value": count, "limit": 0} for n, count in broken.items()]
    return report


def _report(golden: Golden, dtype: str, device: str, noise: str | Path | None, factor: float) -> Report:
    logits = golden.logits
    figures, origin = noise_of(golden, dtype, noise)
    finite = logits[logits.isfinite()].double()
    scale = float(finite.square().mean().sqrt()) if len(finite) else 1.0
    precision = precision_of(dtype, device, golden.dtype)
    limits = limits_for(precision, figures, golden.ids.numel(), scale, factor, origin)
    return Report(golden.reference, dtype, device, limits, noise=figures)


def noise_of(golden: Golden, dtype: str, given: str | Path | None) -> tuple[dict[str, float] | None, str]:
    """The reference's own distance, in `dtype`, from its answers, and where that is known from."""
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


def _fits(model: Any, golden: Golden) -> None:
    layers = len(decoder_of(model).layers)
    if golden.layers and golden.layers != layers:
        raise KconvError(f"the model has {layers} layers, the reference {golden.layers}", hint="is this the same model?")
    vocab = model.get_input_embeddings().weight.shape[0]
    if golden.logits.shape[-1] != vocab or int(golden.ids.max()) >= vocab:
        raise KconvError(f"the model's vocabulary is {vocab}, the reference's {golden.logits.shape[-1]}")


class _Comparison:
    """The runs of one comparison; each adds to the report."""

    def __init__(self, model: Any, golden: Golden, report: Report) -> None:
        self.model, self.golden, self.report = model, golden, report
        self.limits: Limits = report.limits
        self.flipped = False
        self.first: Trace

    def _judge(self, name: str, measures: Measures, only: tuple[str, ...] | None = None) -> None:
        self.report.runs[name] = measures
        self.report.failed += self.limits.exceeded(name, measures, only)

    @property
    def _robust(self) -> tuple[str, ...] | None:
        """The figures that a run without forced routing is held to: all, unless near-ties fell the other way."""
        return ROBUST if self.flipped else None

    def free(self) -> None:
        """What a user gets; judged at once unless its routing may differ from the reference's."""
        self.first = trace(self.model, self.golden.ids)
        self.report.runs[MAIN] = compare_logits(self.first.logits, self.golden.logits)
        if self.golden.routing:
            self._flips(self.golden.routing, "recorded")
        elif not self.golden.layers:
            self._judge(MAIN, self.report.runs[MAIN])

    def _flips(self, theirs: dict[int, torch.Tensor], origin: str) -> None:
        """Count flips against the reference's experts; judge the free run, and a forced one where there are any."""
        differs = {i: (ids.cpu() != theirs[i]).any(-1) for i, (ids, _) in self.first.routing.items() if i in theirs}
        self.report.flips_by_layer = {i: int(d.sum()) for i, d in differs.items()}
        anywhere = torch.stack(list(differs.values())).any(0) if differs else torch.zeros(1, dtype=torch.bool)
        self.report.routing_flips, self.report.routing = int(anywhere.sum()), origin
        self.flipped = bool(anywhere.any())
        self._judge(MAIN, self.report.runs[MAIN], self._robust)
        if self.flipped:
            run = trace(self.model, self.golden.ids, force=theirs)
            self._judge("forced", compare_logits(run.logits, self.golden.logits))

    def layers(self, source: Any) -> None:
        """Every layer on the reference's inputs; names the first module that diverges."""
        golden, expected = self.golden, expected_of(self.golden)
        how: dict[str, Any] = {"teach": golden.hidden, "sketch": golden.sketch, "points": bool(golden.points)}
        taught = trace(self.model, golden.ids, against=golden.routing, **how)
        if not golden.routing:
            theirs = {i: ids.cpu() for i, (ids, _) in taught.routing.items()}
            if theirs:
                self._flips(theirs, "our own on the reference's inputs, as derived")
            else:
                self._judge(MAIN, self.report.runs[MAIN])
        elif any((ids.cpu() != golden.routing[i]).any() for i, (ids, _) in taught.routing.items() if i in golden.routing):
            gaps = taught.gaps
            taught = trace(self.model, golden.ids, force=golden.routing, **how)
            taught.gaps = gaps
        self._found(compare_layers(taught, golden, expected, self.limits), source)

    def _found(self, layers: Layers, source: Any) -> None:
        report = self.report
        report.layers = [p.data() for p in layers.points if p.name.count(".") <= 1]
        bad = [p for p in layers.points if p.beyond]
        report.not_finite = report.not_finite or any(plain(p.state.error) is None for p in bad)
        report.failed += [
            {"check": p.module, "figure": "module error", "value": p.state.error, "limit": self.limits.states[0]} for p in bad
        ]
        first = layers.first()
        if first is None:
            if report.failed:
                report.notes.append("every layer agrees when it gets the reference's inputs: look at what passes between layers")
            return
        report.first_divergence = first.module
        report.divergence = first.data() | suspects(first, self.golden, self.limits)
        if source is not None:
            said = testify(self.model, self.golden, first, source, self.limits)
            report.first_divergence = said.pop("first_divergence", report.first_divergence)
            report.notes += said.pop("notes", [])
            report.divergence |= said

    def masked(self) -> None:
        """With the mask, and rows alone without their padding, as far as the golden file has them."""
        golden = self.golden
        padded = golden.get("logits_padded")
        if padded is not None:
            run = trace(self.model, golden.ids, golden.mask)
            self._judge("padded", compare_logits(run.logits, padded, golden.mask), self._robust)
        for row in range(len(golden.ids)):
            alone = golden.get(f"logits_row{row}_unpadded")
            if alone is not None:
                run = trace(self.model, golden.ids[row : row + 1, : alone.shape[1]])
                self._judge(f"row{row}", compare_logits(run.logits, alone), self._robust)

    def decoded(self) -> None:
        """The last tokens one by one from a cache that the ones before filled: the cache path."""
        ids = self.golden.ids.to(next(self.model.parameters()).device)
        cut = ids.shape[1] - DECODED
        if cut < 1:
            raise KconvError(f"the cache path needs more than {DECODED} tokens", hint="capture a longer prompt")
        with torch.no_grad():
            out = self.model(input_ids=ids[:, :cut], use_cache=True)
            parts = []
            for t in range(cut, ids.shape[1]):
                cache = next(v for k, v in out.items() if k in ("cache", "past_key_values"))
                out = self.model(input_ids=ids[:, t : t + 1], past_key_values=cache, use_cache=True)
                parts.append(out.logits)
        # Of a few tokens only the worst is a figure to hold against limits that come from all of them.
        worst = () if self.flipped else ("max_abs", "max_kl")
        self._judge("cached", compare_logits(torch.cat(parts, 1), self.golden.logits[:, cut:]), worst)
