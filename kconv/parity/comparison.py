"""Does a converted checkpoint compute what its reference computes? `check` for paths, `compare` for a model in memory.

| run | compared with | fails when |
|---|---|---|
| `logits` | the reference without a mask | a figure is beyond its limit (with routing flips: the median token) |
| `forced` | the same, experts forced to the reference's; only with routing flips | any figure is beyond its limit |
| `padded`, `rowN` | with the mask, where it is 1; a row alone, without its padding | as `logits` |
| `cached` | the last tokens, decoded from a cache; on request | as `logits` |
| layer by layer | every module, each layer on the reference's inputs | any place is beyond its limits |
| uncovered | tensors that no token touched, with those of the source | their bits differ |

A value that is not finite fails, on either side; so does a comparison of nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kconv.errors import KconvError
from kconv.parity.capturing import capture
from kconv.parity.culprit import find_culprit
from kconv.parity.golden import Golden
from kconv.parity.layerwise import compare_layers, expected_of
from kconv.parity.limits import FACTOR
from kconv.parity.measures import compare_logits
from kconv.parity.report import MAIN, Report
from kconv.parity.trace import ByLayer, Trace, decoder_of, device_of, trace
from kconv.parity.uncovered import different, same_form, uncovered
from kconv.parity.verdict import DERIVED, Verdict, open_report

if TYPE_CHECKING:
    from kconv.parity.drafts import DraftReport

Loader = Callable[[Any, Any], Any]
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
) -> Report | DraftReport:
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
    from kconv.parity.drafts import check_draft, concerns_draft

    if concerns_draft(converted, reference):
        return check_draft(converted, reference, dtype=dtype, device=device)
    with reference_of(reference, dtype=dtype, device=device, reference_dtype=reference_dtype, python=python,
                      noise=noise, **live) as (golden, its_noise):  # fmt: skip
        model = load(converted, device=device, dtype=getattr(torch, dtype))
        model.set_attn_implementation(attention)
        return compare(model, golden, source=source or beside(golden, converted), noise=its_noise, factor=factor, cached=cached)


def beside(golden: Golden, converted: str | Path) -> Path | None:
    """The checkpoint that a golden file lies in, if there is one that kconv reads and it is not the one in question."""
    from kconv.conversion import plan

    folder = golden.path.resolve().parent
    if not (folder / "config.json").exists() or folder == Path(str(converted)).resolve():
        return None
    try:
        plan(str(folder), "native").check()
    except KconvError:
        return None
    return folder


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
        live = {k: v for k, v in live.items() if v is not None}
        exact = {"operators": "torch"} if reference_dtype == "float64" else {}  # fla's kernels have no float64
        capture(reference, out, dtype=reference_dtype, also=also, **{**exact, **how, **live})
        if gpu and noise is None and dtype != reference_dtype:
            noise = Path(scratch) / "noise.safetensors"
            again = {k: v for k, v in live.items() if k not in ("ids", "text")}
            capture(reference, noise, dtype=dtype, also=(), modules="none", ids=out, **how, **again)
        yield Golden(out), noise


def compare(
    model: Any,
    golden: Golden | str | Path,
    *,
    source: Any = None,
    noise: str | Path | dict[str, float] | None = None,
    factor: float = FACTOR,
    cached: bool = False,
    load: Loader | None = None,
) -> Report:
    """Compare a native model in memory with a golden file; arguments as for `check`, `load` is how `source` is loaded."""
    golden = golden if isinstance(golden, Golden) else Golden(golden)
    dtype, device = str(model.dtype).removeprefix("torch."), str(device_of(model))
    verdict = Verdict(open_report(golden, dtype, device, noise, factor))
    ours = getattr(model.config, "_attn_implementation", None)
    verdict.report.attention = {"ours": ours, "reference": golden.meta.get("attention")}
    _fits(model, golden)
    run = _Comparison(model, golden, verdict)
    run.free()
    if golden.layers:
        run.layers(source, load or like)
    else:
        verdict.report.notes.append("the golden file holds no hidden states: no layer can be named")
    run.masked()
    if cached:
        run.decoded()
    run.uncovered(source)
    return verdict.close()


def _fits(model: Any, golden: Golden) -> None:
    layers = len(decoder_of(model).layers)
    if golden.layers and golden.layers != layers:
        raise KconvError(f"the model has {layers} layers, the reference {golden.layers}", hint="is this the same model?")
    vocab = model.get_input_embeddings().weight.shape[0]
    if golden.logits.shape[-1] != vocab or int(golden.ids.max()) >= vocab:
        raise KconvError(f"the model's vocabulary is {vocab}, the reference's {golden.logits.shape[-1]}")


def like(source: Any, model: Any) -> Any:
    """`source` loaded as `model` was: same device, dtype, form of experts and attention."""
    from kconv.loading import load

    other = load(source, device=device_of(model), dtype=model.dtype, **same_form(source, model))
    other.set_attn_implementation(model.config._attn_implementation)
    return other


class _Comparison:
    """The runs of one comparison; each adds to the verdict."""

    def __init__(self, model: Any, golden: Golden, verdict: Verdict) -> None:
        self.model, self.golden, self.verdict = model, golden, verdict
        self.first: Trace

    def free(self) -> None:
        """What a user gets; judged at once unless its routing may differ from the reference's."""
        self.first = trace(self.model, self.golden.ids)
        self.verdict.report.runs[MAIN] = compare_logits(self.first.logits, self.golden.logits)
        if self.golden.routing:
            self._flips(self.golden.routing, "recorded")
        elif not self.golden.layers:
            self.verdict.judge(MAIN, self.verdict.report.runs[MAIN])

    def _flips(self, theirs: ByLayer, origin: str) -> None:
        """Judge the free run, and where its experts differ one with the reference's forced on it."""
        ours = {i: ids for i, (ids, _) in self.first.routing.items()}
        if self.verdict.flips(ours, theirs, origin):
            run = trace(self.model, self.golden.ids, force=theirs)
            self.verdict.judge("forced", compare_logits(run.logits, self.golden.logits))

    def layers(self, source: Any, load: Loader) -> None:
        """Every layer on the reference's inputs; names the first module that diverges."""
        golden, limits = self.golden, self.verdict.limits
        how: dict[str, Any] = {"teach": golden.hidden, "sketch": golden.sketch, "points": bool(golden.points)}
        taught = trace(self.model, golden.ids, against=golden.routing, **how)
        ours = {i: ids.cpu() for i, (ids, _) in taught.routing.items()}
        if not golden.routing and ours:
            self._flips(ours, DERIVED)
        elif not golden.routing:
            self.verdict.judge(MAIN, self.verdict.report.runs[MAIN])
        elif any((ids != golden.routing[i]).any() for i, ids in ours.items() if i in golden.routing):
            gaps, taught = taught.gaps, trace(self.model, golden.ids, force=golden.routing, **how)
            taught.gaps = gaps
        first = self.verdict.layers(compare_layers(taught, golden, expected_of(golden), limits), golden.routing)
        if first is not None and source is not None:
            self.verdict.hear(find_culprit(self.model, golden, first, load(source, self.model), limits))

    def masked(self) -> None:
        """With the mask, and rows alone without their padding, as far as the golden file has them."""
        golden = self.golden
        padded = golden.get("logits_padded")
        if padded is not None:
            run = trace(self.model, golden.ids, golden.mask)
            self.verdict.judge_free("padded", compare_logits(run.logits, padded, golden.mask))
        for row in range(len(golden.ids)):
            alone = golden.get(f"logits_row{row}_unpadded")
            if alone is not None:
                run = trace(self.model, golden.ids[row : row + 1, : alone.shape[1]])
                self.verdict.judge_free(f"row{row}", compare_logits(run.logits, alone))

    def uncovered(self, source: Any) -> None:
        """What took no part in the runs: compared with the source's bits, or said to be unjudged."""
        names = uncovered(self.model, {i: ids for i, (ids, _) in self.first.routing.items()}, self.golden.ids)
        if names:
            self.verdict.uncovered(names, None if source is None else different(self.model, source, names))

    def decoded(self) -> None:
        """The last tokens one by one from a cache that the ones before filled: the cache path."""
        ids = self.golden.ids.to(device_of(self.model))
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
        worst = () if self.verdict.flipped else ("max_abs", "max_kl")
        self.verdict.judge("cached", compare_logits(torch.cat(parts, 1), self.golden.logits[:, cut:]), worst)
