"""Parity at full depth with one layer in memory: weights are loaded when a part of the model is called, and let go after it.

| reference | what is compared |
|---|---|
| a golden file | as without streaming: the runs and the layer-by-layer comparison are the same code over a streamed model |
| a second checkpoint, in either layout | run by the same code, streamed too, and written down as a golden file for the occasion |

The second form holds two sets of weights against each other at any size, for example a published checkpoint against its
conversion; what no golden file can hold of a full-size model then costs disk only. Memory is one layer, the hidden states of
the tokens compared, and the logits. Each run reads the checkpoint once: three runs, two more where routing differs.
"""

from __future__ import annotations

import copy
import ctypes
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kconv.conversion import default_workers, plan
from kconv.engine.run import execute
from kconv.engine.slabs import streams
from kconv.errors import KconvError
from kconv.loading import MemorySink, _storage, empty_model
from kconv.parity.capture_script import FORMAT, Refused, entries_of, inputs_of
from kconv.parity.comparison import beside, compare
from kconv.parity.golden import Golden
from kconv.parity.limits import FACTOR
from kconv.parity.report import Report
from kconv.parity.trace import DEVICE, PARTS, decoder_of
from kconv.parity.uncovered import same_form

EQUAL = dict.fromkeys(("max_abs", "p90_abs", "median_abs", "max_kl", "mean_kl"), 0.0) | {"top1_agreement": 1.0}
SKETCH = 16  # projections of each module output that a second checkpoint's run keeps


class _Part:
    """Hooks that fill a module before it runs and empty it afterwards."""

    def __init__(self, made: Any, module: nn.Module, name: str, device: str, stored: dict[str, str]) -> None:
        self.plan, self.module, self.name, self.device, self.stored = made, module, name, device, stored

    def fill(self, *_: Any) -> None:
        """Allocate the module's tensors and read them through the plan."""
        self.module.to_empty(device=self.device)
        names = {f"{self.name}.{n}": t for n, t in self.module.state_dict().items()}
        storage = {self.stored.get(n, n): t for n, t in names.items()}
        part = copy.copy(self.plan)
        part.edges = [self.plan.edges[i] for i in sorted({self.plan.targets[n].edge for n in storage})]
        sink = MemorySink(storage)
        kind = self.device.split(":")[0]
        execute(streams(part, sink.place), part.source.files, sink, workers=default_workers(), device=kind)

    def drop(self, *_: Any) -> None:
        """Give the memory back."""
        self.module.to("meta")
        trim()


def trim() -> None:
    """Have the C library hand freed memory back; what it would keep grows with every layer."""
    with suppress(OSError, AttributeError):  # glibc has it, others do not
        ctypes.CDLL(None).malloc_trim(0)


def load_streamed(source: Any, *, device: str = "cpu", dtype: Any = None, **options: Any) -> Any:
    """A native model whose embedding, layers and head are in memory only while they run.

    Arguments as for `kconv.load`. For inference: a layer's weights are read anew in every forward pass.
    """
    made = plan(source, "native", **options).check()
    model: Any = empty_model(made, "meta", dtype).eval()
    _storage(made, model)
    tied = {} if "lm_head.weight" in made.targets else {"lm_head.weight": "model.embed_tokens.weight"}
    stack = decoder_of(model)
    units = {"model.embed_tokens": stack.embed_tokens, "lm_head": model.lm_head}
    units |= {f"model.layers.{i}": layer for i, layer in enumerate(stack.layers)}
    parts = {name: _Part(made, module, name, device, tied) for name, module in units.items()}
    for part in parts.values():
        part.module.register_forward_pre_hook(part.fill)
        part.module.register_forward_hook(part.drop, always_call=True)
    for name, module in stack.named_children():  # the final norm and mixture: small, and partly read without being called
        if f"model.{name}" not in units and name != "layers":
            _Part(made, module, f"model.{name}", device, {}).fill()
    setattr(model, DEVICE, torch.device(device))
    setattr(model, PARTS, parts)
    return model


def streamed(
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
    **how: Any,
) -> Report:
    """Compare `converted` with a golden file or a second checkpoint, one layer in memory at a time; see `comparison.check`.

    Inputs for a second checkpoint: `ids`, or seeded random ones (`tokens`, `batch`, `seed`).
    """
    foreign = [k for k in ("trust_remote_code", "code", "python", "operators", "text") if how.get(k)]
    if foreign:
        raise KconvError(
            f"a streamed reference is a golden file, or a checkpoint that kconv runs itself: {', '.join(foreign)} has no effect",
            hint="capture the reference first: `kconv capture REF golden.safetensors ...`",
        )

    def load(path: Any, **options: Any) -> Any:
        model = load_streamed(path, device=device, dtype=getattr(torch, dtype), **options)
        model.set_attn_implementation(attention)
        return model

    def alike(path: Any, model: Any) -> Any:
        return load(path, **same_form(path, model))

    with _golden(reference, load, dtype, device, how) as (golden, equal):
        model = load(converted)
        calibration = equal if noise is None else noise
        source = source or beside(golden, converted)
        return compare(model, golden, source=source, noise=calibration, factor=factor, cached=cached, load=alike)


@contextmanager
def _golden(
    reference: str | Path, load: Any, dtype: str, device: str, how: dict[str, Any]
) -> Iterator[tuple[Golden, dict[str, float] | None]]:
    """The golden file, or one that the second checkpoint's run is written to; equal results are asked of the latter."""
    if Path(reference).suffix == ".safetensors":
        golden = Golden(reference)
        if not golden.layers:
            raise KconvError(f"{reference} holds no hidden states to go by layer by layer", hint="capture it with kconv")
        yield golden, None
        return
    with tempfile.TemporaryDirectory(prefix="kconv-parity-") as scratch:
        path = Path(scratch) / "twin.safetensors"
        _write_twin(load(reference), path, f"{Path(reference).name}", dtype, device, how)
        yield Golden(path), EQUAL


def _write_twin(model: Any, path: Path, name: str, dtype: str, device: str, how: dict[str, Any]) -> None:
    """Run a second checkpoint in the same precision and write its golden file, in that precision."""
    from safetensors.torch import save_file

    wanted = {k: how[k] for k in ("ids", "tokens", "batch", "seed") if how.get(k) is not None}
    try:
        ids, mask = inputs_of(model.config.vocab_size, **wanted)
    except Refused as e:
        raise KconvError(str(e)) from e

    def run(mask: torch.Tensor | None) -> torch.Tensor:
        with torch.no_grad():
            at = getattr(model, DEVICE)
            return model(input_ids=ids.to(at), attention_mask=None if mask is None else mask.to(at), use_cache=False).logits

    entries, order = entries_of(model, ids, mask, run, SKETCH)
    meta = {"format": FORMAT, "reference": type(model).__name__, "source": name, "dtype": dtype, "attention": "ours",
            "operators": "our", "device": device, "sketch": SKETCH, "points": order}  # fmt: skip
    kept = {n: t.cpu().contiguous() for n, t in entries.items()}
    save_file({"input_ids": ids, "attention_mask": mask, **kept}, path, metadata={"kconv_golden": json.dumps(meta)})
