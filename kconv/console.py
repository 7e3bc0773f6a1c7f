"""What people read: folded plan tables, sizes, and the progress line.

A terminal gets a live bar; a pipe or a file gets a plain line at once and then every few seconds, without carriage
returns.
"""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kconv.names import ranges

if TYPE_CHECKING:
    from rich.console import Console

    from kconv.planning.plan import Edge, Plan
    from kconv.spec import Spec
    from kconv.transforms.base import Iso

PLAIN_EVERY = 5.0


def human(nbytes: float) -> str:
    """Bytes in decimal units: `1.56 TB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(nbytes) < 1000 or unit == "TB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    raise AssertionError


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss."""
    m, s = divmod(int(seconds), 60)
    h, m = divmod(m, 60)
    return f"{h}:{m:02}:{s:02}" if h else f"{m}:{s:02}"


def few(numbers: Sequence[int]) -> str:
    """Ranges of integers, the middle left out when there are many: `0-2,4-6,..,88-90`."""
    parts = ranges(numbers).split(",")
    return ",".join(parts if len(parts) <= 4 else [*parts[:2], "..", parts[-1]])


def plan_rows(edges: Sequence[Edge], backward: bool) -> list[tuple[str, str, str, str]]:
    """One row a rule and kind of spec: tensors made, target template, spec, and where they come from and how."""
    groups: dict[tuple, list[Edge]] = {}
    for edge in edges:
        key = (*_templates(edge, backward), edge.right, tuple(edge.lefts))
        groups.setdefault(key, []).append(edge)
    rows = []
    for (source, target, *_), alike in groups.items():
        for name, spec, count in _outputs(alike, backward, target):
            rows.append((f"{count:,}", _filled(name, alike), str(spec), _how(alike[0], backward, source, target)))
    return rows


def _templates(edge: Edge, backward: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    left = tuple(name for piece in edge.rule.left for name in piece)
    return (edge.rule.right, left) if backward else (left, edge.rule.right)


def _outputs(edges: list[Edge], backward: bool, target: tuple[str, ...]) -> list[tuple[str, Spec, int]]:
    """Each target template of a group of edges, with its spec and how many tensors it makes."""
    if backward:
        specs = [s for piece in edges[0].lefts for s in piece]
        return [(n, s, len(edges) * len(edges[0].rule.domain)) for n, s in zip(target, specs, strict=True)]
    return [(n, s, len(edges)) for n, s in zip(target, edges[0].right_full(), strict=True)]


def _filled(template: str, edges: list[Edge]) -> str:
    """A template with the ranges of its indices."""
    rule = edges[0].rule
    domains = dict(rule.over) | (dict([rule.stack]) if rule.stack else {})
    for name in domains:
        seen = {e.binding[name] for e in edges} if name in edges[0].binding else set(domains[name])
        text = few(sorted(seen))
        template = template.replace("{" + name + "}", text if len(seen) == 1 else "{" + text + "}")
    return template


def _how(edge: Edge, backward: bool, source: tuple[str, ...], target: tuple[str, ...]) -> str:
    rule = edge.rule
    steps = [] if type(rule.iso).__name__ == "Same" else [brief(rule.iso)]
    if rule.stack:
        steps.append(("split over " if backward else "stack over ") + f"{len(rule.domain)} {rule.stack[0]}s")
    if len(rule.left) > 1:
        steps.append(("split into " if backward else "join ") + f"{len(rule.left)} parts")
    if steps:
        return ", ".join(steps)
    return "same" if source[0].split("layer}")[-1] == target[0].split("layer}")[-1] else "renamed"


def brief(iso: Iso) -> str:
    """An iso with the arguments that are not its defaults: `Mxfp4(BF16)`; steps one after the other, or side by side."""
    steps = getattr(iso, "steps", None)
    if steps:
        return (" | " if type(iso).__name__ == "Par" else ", then ").join(map(brief, steps))
    fields = {f.name: (getattr(iso, f.name), f.default) for f in dataclasses.fields(iso)}  # type: ignore[arg-type]
    shown = [value for name, (value, default) in fields.items() if default != value or name == "dtype"]
    words = [brief(v) if dataclasses.is_dataclass(v) else str(v) for v in shown]  # type: ignore[arg-type]
    return f"{type(iso).__name__}({', '.join(words)})" if words else type(iso).__name__


def print_plan(plan: Plan, console: Console, extra: dict[str, str]) -> None:
    """The folded table, the totals, the notes."""
    layouts = plan.layouts
    rows = plan.table()
    widths = [max((len(r[i]) for r in rows), default=0) for i in range(3)]
    console.print(f"{layouts.family}: {layouts.source_layout} -> {layouts.target_layout}, from {plan.source.where}", markup=False)
    for count, target, spec, how in rows:
        console.print(f"{count:>{widths[0]}}  {target:<{widths[1]}}  {spec:<{widths[2]}}  {how}", markup=False)
    for drop in layouts.drops:
        console.print(f"{len(drop.names):>{widths[0]},}  dropped: {drop.reason}", markup=False)
    for note in layouts.notes:
        console.print(f"note: {note}", markup=False)
    totals = {
        "source": f"{len(plan.source.entries):,} tensors, {human(plan.source.nbytes)}; "
        f"{plan.claimed:,} claimed, {len(plan.dropped):,} dropped",
        "target": f"{len(plan.targets):,} tensors, {human(plan.output_bytes)}",
        "grade": str(plan.grade),
        **extra,
    }
    for key, value in totals.items():
        console.print(f"{key:>10}: {value}", markup=False)


def rss() -> int:
    """Resident memory of this process at its peak, bytes."""
    try:  # `ru_maxrss` begins at what the parent held
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Meter:
    """Shows the progress of a run on stderr; call it with the bytes made so far."""

    def __init__(self, label: str, total_bytes: int, *, quiet: bool = False) -> None:
        self._label, self._total, self._quiet = label, max(1, total_bytes), quiet
        self._start = self._last = 0.0
        self._update: Callable[[int], None] = lambda done: None
        self._bar: Any = None

    def __enter__(self) -> Meter:
        self._start = time.monotonic()
        if self._quiet:
            return self
        if sys.stderr.isatty():
            self._begin_bar()
        else:
            self._plain(0)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, done: int) -> None:
        if self._quiet:
            return
        if self._bar:
            self._bar.update(self._task, completed=done, memory=human(rss()))
        elif time.monotonic() - self._last >= PLAIN_EVERY:
            self._plain(done)

    def _begin_bar(self) -> None:
        from rich import progress as p
        from rich.console import Console

        columns = (
            p.TextColumn("{task.description}"), p.BarColumn(), p.DownloadColumn(), p.TransferSpeedColumn(),
            p.TimeRemainingColumn(), p.TextColumn("{task.fields[memory]}"),
        )  # fmt: skip
        self._bar = p.Progress(*columns, console=Console(stderr=True), refresh_per_second=4)
        self._task = self._bar.add_task(self._label, total=self._total, memory="")
        self._bar.start()

    def _plain(self, done: int) -> None:
        self._last = time.monotonic()
        elapsed = self._last - self._start
        rate = done / elapsed if elapsed > 0 else 0.0
        eta = clock((self._total - done) / rate) if rate else "?"
        line = f"{self._label}: {human(done)} of {human(self._total)}, {human(rate)}/s, {eta} left, memory {human(rss())}"
        print(line, file=sys.stderr, flush=True)
