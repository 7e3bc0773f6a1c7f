"""Parity of a draft with a golden file of drafts: hidden states of whole blocks behind given context, both ways in.

| entry of the file | shape | |
|---|---|---|
| `target_hidden` | [B, S, taps * width] | the tapped states, concatenated |
| `noise_embedding` | [B, Q, hidden] | embedded blocks |
| `attention_mask`, `position_ids` | [B, 1, Q, S + Q], [B, S + Q] | of `output`; may be missing |
| `output` | [B, Q, hidden] | all blocks at once |
| `output_one_block` | [B, block, hidden] | the first block right behind all of the context, without a mask; may be missing |

Runs: `output`, `output_one_block`, and `cached`: the last one again by `materialize` and `forward_block`, as in decoding.
Drafts own no head in most files, so hidden states are compared and the figures of distributions are null.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kconv.adapters.drafts.adapter import is_draft
from kconv.errors import KconvError

LIMIT = 2e-5  # max abs, for answers in fp32: what summation in another order costs
NEEDED = ("target_hidden", "noise_embedding", "output")
DTYPES = ("float32", "float64")


@dataclass
class DraftReport:
    """What a parity check of a draft found; `runs` has for each run its figures and its worst place."""

    reference: str
    dtype: str
    device: str
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def failed(self) -> list[dict[str, Any]]:
        """The runs beyond the limit; one that is not finite is."""
        return [
            {"check": name, "figure": "max_abs", "value": run["max_abs"], "limit": LIMIT}
            for name, run in self.runs.items()
            if run["max_abs"] is None or run["max_abs"] > LIMIT
        ]

    @property
    def passed(self) -> bool:
        """Whether something was compared and nothing failed."""
        return bool(self.runs) and not self.failed

    def data(self) -> dict[str, Any]:
        """The JSON object of `kconv verify-parity --json`."""
        worst = max(self.runs.values(), key=lambda run: float("inf") if run["max_abs"] is None else run["max_abs"])
        return {
            "verdict": "pass" if self.passed else "fail",
            "max_abs": worst["max_abs"],
            **dict.fromkeys(("max_kl", "mean_kl", "top1_agreement")),
            "worst_token": worst["worst"],
            **dict.fromkeys(("routing_flips", "first_divergence")),
            "nan": any(run["max_abs"] is None for run in self.runs.values()),
            "reference": self.reference,
            "dtype": self.dtype,
            "device": self.device,
            "failed": self.failed,
            "runs": self.runs,
            "limits": {"from": f"fixed for {self.dtype}, answers in float32", "max_abs": LIMIT},
        }

    def lines(self) -> list[str]:
        """The report for people, line by line."""
        out = [f"reference  {self.reference}", f"ours       {self.dtype} on {self.device}", "hidden states of a draft's blocks"]
        out += [f"  {'run':18} {'tokens':>7} {'max abs':>10} {'median':>10}"]
        for name, run in self.runs.items():
            cells = " ".join(f"{'not finite':>10}" if run[k] is None else f"{run[k]:10.2e}" for k in ("max_abs", "median_abs"))
            out.append(f"  {name:18} {run['tokens']:7d} {cells}")
        out.append(f"  {'limit':18} {'':7} {LIMIT:10.2e}")
        for run in self.failed:
            at = self.runs[run["check"]]["worst"]
            out.append(f"failed: {run['check']} at row {at['row']}, position {at['position']}")
        return [*out, f"verdict: {'pass' if self.passed else 'fail'}"]


def is_draft_golden(path: str | Path) -> bool:
    """Whether a file holds a draft's answers; False for anything that is no safetensors file."""
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        return False
    try:
        with safe_open(str(path), framework="pt") as file:
            return set(NEEDED) <= set(file.keys())
    except (SafetensorError, OSError):
        return False


def concerns_draft(*paths: Any) -> bool:
    """Whether one of these is a draft's golden file or a local folder with a draft in it."""
    return any(is_draft_golden(p) or _is_draft_folder(p) for p in paths if isinstance(p, str | Path))


def _is_draft_folder(path: str | Path) -> bool:
    try:
        config = json.loads((Path(path) / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and is_draft(config)


def check_draft(draft: Any, golden: str | Path, *, dtype: str = "float32", device: str = "cpu") -> DraftReport:
    """Compare a draft (a path to any layout, or a native module) with a golden file of the form above.

    Raises KconvError when it is no draft, does not fit the file's shapes, or `dtype` is too coarse for answers in fp32.
    """
    from kconv.speculative.loading import load_draft

    if not is_draft_golden(golden):
        raise KconvError(
            f"{golden} is no golden file of a draft",
            hint=f"a draft is compared with a .safetensors file that holds {', '.join(NEEDED)}",
        )
    if dtype not in DTYPES:
        raise KconvError(
            f"a draft's golden file holds answers in fp32, which says nothing of {dtype}", hint="use --dtype float32"
        )
    if isinstance(draft, str | Path):
        draft = load_draft(draft, device=device, dtype=dtype)
    entries = {n: t.to(device) for n, t in _entries(golden, draft).items()}
    inputs = {n: t.to(draft.dtype) if t.is_floating_point() else t for n, t in entries.items()}
    report = DraftReport(f"{Path(golden).parent.name}/{Path(golden).name}", dtype, device)
    for name, run in (("output", _blocks), ("output_one_block", _one), ("cached", _cached)):
        expected = entries.get("output" if name == "output" else "output_one_block")
        if expected is not None:
            with torch.no_grad():
                report.runs[name] = _figures(run(draft, inputs, expected.shape[1]), expected)
    return report


def _entries(path: str | Path, draft: Any) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    entries = load_file(str(path))
    wanted = {"target_hidden": draft.fc.in_features, "noise_embedding": draft.config.hidden_size}
    wanted |= {name: draft.config.hidden_size for name in ("output", "output_one_block") if name in entries}
    for name, width in wanted.items():
        if entries[name].ndim != 3 or entries[name].shape[-1] != width or 0 in entries[name].shape:
            raise KconvError(
                f"{path}: {name} is {list(entries[name].shape)}, this draft takes [B, tokens, {width}]",
                hint="is this the golden file of this draft?",
            )
    return entries


def _blocks(draft: Any, entries: dict[str, Tensor], _: int) -> Tensor:
    given = ("target_hidden", "noise_embedding", "attention_mask", "position_ids")
    return draft(**{n: entries[n] for n in given if n in entries})


def _one(draft: Any, entries: dict[str, Tensor], length: int) -> Tensor:
    return draft(noise_embedding=entries["noise_embedding"][:, :length], target_hidden=entries["target_hidden"])


def _cached(draft: Any, entries: dict[str, Tensor], length: int) -> Tensor:
    cache, context = draft.new_cache(), entries["target_hidden"]
    half = context.shape[1] // 2
    for part in (context[:, :half], context[:, half:]):
        if part.shape[1]:
            draft.materialize(part, cache)
    return draft.forward_block(entries["noise_embedding"][:, :length], cache)


def _figures(ours: Tensor, theirs: Tensor) -> dict[str, Any]:
    if ours.shape != theirs.shape:
        raise KconvError(f"the draft computes {list(ours.shape)}, the golden file has {list(theirs.shape)}")
    apart = (ours.double() - theirs.double()).abs().amax(-1)
    finite = bool(apart.isfinite().all())
    row, position = divmod(int(torch.where(apart.isfinite(), apart, torch.inf).argmax()), apart.shape[1])
    return {
        "tokens": apart.numel(),
        "max_abs": float(apart.max()) if finite else None,
        "median_abs": float(apart.median()) if finite else None,
        "worst": {"row": row, "position": position},
    }
