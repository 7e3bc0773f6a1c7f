"""Proof that nothing was lost: the plan run backwards over the written files and compared bit for bit with the source.

| checked | how |
|---|---|
| every source tensor that was claimed | the inverse of the plan, computed from the written files, against the source's bytes |
| plans that have no exact inverse (no sidecar, a lossy cast) | the plan run forward again, against the written bytes |
| every file of the folder | size and digest against the manifest, and the manifest against its own seal |
| config, tokenizer and other side files; files that were added | against the source (`kconv.engine.beside`) |
| what the plan left out | named with its reason, and counted as dropped, not as missing |
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kconv.checkpoint import manifest as manifests
from kconv.checkpoint.manifest import checked
from kconv.checkpoint.reading import MANIFEST, Checkpoint, open_checkpoint, read_json
from kconv.console import Meter
from kconv.conversion import default_workers, plan
from kconv.engine import beside
from kconv.engine.run import execute
from kconv.engine.sink import Sink, located
from kconv.engine.slabs import Part, Region, Slab, streams
from kconv.errors import BadData, KconvError, Unreadable
from kconv.json_types import OPTIONAL, Result
from kconv.names import folded
from kconv.planning.plan import Plan
from kconv.storage.files import Files, released
from kconv.storage.hashing import digests_of, stated
from kconv.storage.opening import open_files
from kconv.transforms.base import Grade

if TYPE_CHECKING:
    import numpy as np

MOST_SHOWN = 50


@dataclass
class Difference:
    """One tensor that is not what it should be."""

    tensor: str
    file: str
    position: list[int]
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.tensor} in {self.file}: byte {self.found} at {self.position}, {self.expected} in the source"


@dataclass
class CompareSink(Sink):
    """A sink that holds converted regions against stored ones."""

    files: Files
    checkpoint: Checkpoint
    differences: dict[str, Difference] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def place(self, name: str) -> tuple[str, int]:
        """Where the stored tensor lies."""
        entry = self.checkpoint.entries[name]
        return entry.file, entry.start

    def put(self, region: Region, data: np.ndarray) -> str:
        import numpy as np

        stored = np.empty(data.nbytes, np.uint8)
        self.files.read_into(region.file, region.offset, stored.data)
        with self.lock:
            self.seen.add(region.name)
        if not np.array_equal(stored, data):
            self._differ(region, data, stored, int(np.argmax(stored != data)))
        return ""

    def put_zeros(self, region: Region) -> str | None:
        """A hole that makes zeros is equal to a hole; anything else is read."""
        if not self.files.is_hole(region.file, region.offset, region.spec.nbytes):
            return None
        with self.lock:
            self.seen.add(region.name)
        return ""

    def refused(self, part: Part, error: BadData) -> None:
        """What was written cannot have come from any source: its tensors differ."""
        with self.lock:
            for region in part.writes:
                self.refusals.setdefault(region.name, located(error, part))

    def _differ(self, region: Region, data: np.ndarray, stored: np.ndarray, at: int) -> None:
        spec, element = region.spec, at * max(1, region.spec.numel) // max(1, region.spec.nbytes)
        position: list[int] = []
        for size in reversed(spec.shape):
            position.insert(0, element % size)
            element //= size
        if position:
            position[0] += region.first_row
        with self.lock:
            known = self.differences.get(region.name)
            if known is None or position < known.position:
                found, expected = f"0x{data[at]:02x}", f"0x{stored[at]:02x}"
                self.differences[region.name] = Difference(region.name, region.file, position, expected, found)


@dataclass(frozen=True, eq=False)
class Verification(Result):
    """What `verify` found; `subject` ties it to the files (`kconv publish --require verified` reads it).

    `direction` and `dropped` are left out where the weights could not be compared, `subject` and `sample` where the manifest
    could not be read.
    """

    ok: bool = False
    compared: int = 0
    different: int = 0
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    subject: str | None = field(default=None, metadata=OPTIONAL)
    sample: int | None = None
    direction: str | None = field(default=None, metadata=OPTIONAL)
    dropped: list[str] | None = field(default=None, metadata=OPTIONAL)

    def to_json(self) -> dict[str, Any]:
        found = super().to_json()
        return found if self.subject else {k: v for k, v in found.items() if k != "sample"}


def verify(out: Any, source: Any = None, *, sample: int | None = None, workers: int | None = None, seed: int = 0,
           quiet: bool = True) -> Verification:  # fmt: skip
    """Compare a converted checkpoint with its source, bit for bit.

    Args:
        out: the converted folder.
        source: what it was converted from.
        sample: compare so many random slabs (about 32 MB each) instead of everything, and skip the weight files' digests.

    Returns `ok`, `compared`, `different`, `missing`, `extra`, `differences` (tensor, file, position), `files`, `dropped`.
    """
    files = out if isinstance(out, Files) else open_files(out)
    manifest = _sealed(files)
    if manifest is None:
        said = f"{MANIFEST} is not as kconv wrote it, so it cannot say what the other files should be"
        return Verification(files=[said])
    result = Verification(subject=hashlib.sha256(files.read(MANIFEST)).hexdigest(), sample=sample)
    wrong = check_files(files, manifest, weights=sample is None)
    try:
        made = open_checkpoint(files)
    except Unreadable:
        raise
    except KconvError as e:
        return replace(result, files=[*wrong, e.message])
    forward = _same_plan(made, source)
    changed = forward.digest != manifest["plan_digest"]
    if changed:
        wrong.append("the source's tensors or the options are not those of the manifest: its plan digest differs")
    wrong += [line for line in beside.differences(files, manifest, forward) if line not in wrong]
    exact = forward.grade <= Grade.EXACT_WITH_SIDECAR
    checked = inverse(forward, made) if exact else forward
    against = forward.source if exact else made
    dropped = [f"{len(d.names)} tensors: {d.reason}" for d in forward.layouts.drops]
    result = replace(result, files=wrong, direction="backward" if exact else "forward", dropped=dropped)
    return _compare(result, checked, against, workers or default_workers(), seed, quiet)


def _sealed(files: Files) -> dict[str, Any] | None:
    """The manifest of a converted folder; None when a byte of it was changed."""
    if MANIFEST not in files.names():
        raise KconvError(f"{files.where} has no {MANIFEST}", hint="verify needs a folder that `kconv convert` made")
    try:
        manifest = checked(read_json(files, MANIFEST), MANIFEST)
    except Unreadable:
        raise
    except KconvError:
        return None
    return manifest if files.read(MANIFEST) == manifests.dump(manifest) else None


def inverse(forward: Plan, made: Checkpoint) -> Plan:
    """The same rules over the written files, in the other direction."""
    layouts = replace(
        forward.layouts, backward=not forward.backward, drops=[], problems=[],
        source_layout=forward.layouts.target_layout, target_layout=forward.layouts.source_layout,
    )  # fmt: skip
    return Plan(made, layouts, forward.options)


def _same_plan(made: Checkpoint, source: Any) -> Plan:
    assert made.manifest is not None
    if "options" not in made.manifest:
        raise KconvError(f"{made.where} was not made by `kconv convert`", hint="kconv check says whose draft a packaged one is")
    options = {**made.manifest["options"]}
    if "layers" in options:
        options["layers"] = tuple(options["layers"])
    return plan(source or _recorded(made.manifest), options.pop("to"), **options).check()


def _recorded(manifest: dict[str, Any]) -> str:
    """The Hub address of the source at its revision; a local folder is recorded by name only and has to be given."""
    source = manifest["source"]
    if not str(source.get("name", "")).startswith("hf://") or not source.get("revision"):
        raise KconvError("verify needs the source", hint="--source SOURCE: the folder that it was converted from")
    return f"{source['name'].split('@')[0]}@{source['revision']}"


def _compare(result: Verification, checked: Plan, against: Checkpoint, workers: int, seed: int, quiet: bool) -> Verification:
    """The result with what the weights say, and so with the answer."""
    sink = CompareSink(against.files, against)
    missing = list(checked.findings.missing) + [n for n in checked.targets if n not in against.entries]
    wrong = [n for n, t in checked.targets.items() if n in against.entries and against.entries[n].spec != t.spec]
    usable = {n for n in checked.targets if n in against.entries and n not in set(wrong)}
    total = sum(checked.targets[n].spec.nbytes for n in usable)
    with released(against.files, checked.source.files), Meter("verify", total, quiet=quiet) as meter:
        execute(_chosen(checked, sink, usable, result.sample, seed), checked.source.files, sink, workers=workers, tick=meter)
    shown = list(dict.fromkeys([*map(str, sink.differences.values()), *sink.refusals.values()]))[:MOST_SHOWN]
    shown += [f"{n} is {checked.targets[n].spec}, {against.entries[n].spec} in {against.where}" for n in wrong][:MOST_SHOWN]
    shown += checked.findings.other
    different, extra = len({*sink.differences, *sink.refusals}) + len(wrong), list(checked.findings.unclaimed)
    return replace(
        result, ok=not (different or missing or extra or result.files), compared=len(sink.seen), different=different,
        missing=missing, extra=extra, differences=shown,
    )  # fmt: skip


def _chosen(checked: Plan, sink: CompareSink, usable: set[str], sample: int | None, seed: int) -> list[Iterator[Slab]]:
    """The slabs to compare, without the parts whose counterpart is missing."""

    def place(name: str) -> tuple[str, int]:
        return sink.place(name) if name in usable else ("", 0)

    chosen: set[str] | None = None
    if sample is not None:
        numbers = [s.number for stream in streams(checked, place) for s in stream]
        chosen = set(random.Random(seed).sample(numbers, min(sample, len(numbers))))

    def reduced(stream: Iterator[Slab]) -> Iterator[Slab]:
        for slab in stream:
            if chosen is None or slab.number in chosen:
                yield Slab(slab.number, [p for p in slab.parts if _usable(p, usable)])

    return [reduced(stream) for stream in streams(checked, place)]


def _usable(part: Part, usable: set[str]) -> bool:
    return all(w.name in usable for w in part.writes)


def check_files(files: Files, manifest: dict[str, Any], *, weights: bool) -> list[str]:
    """What is wrong with the files of a converted folder, by its manifest's sizes and digests."""
    problems = []
    present = set(files.names())
    for name, known in manifest["files"].items():
        if name not in present:
            problems.append(f"{name} is missing")
        elif files.size(name) != known["size"]:
            problems.append(f"{name} has {files.size(name):,} bytes, {known['size']:,} by the manifest")
        elif (weights or not name.endswith(".safetensors")) and (digest := stated(known)):
            problems += _changed(files, name, *digest)
    return problems


def _changed(files: Files, name: str, algorithm: str, digest: str) -> list[str]:
    same = digests_of(files, name, algorithm)[algorithm] == digest
    return [] if same else [f"{name} has another {algorithm} than the manifest"]


def lines(result: Verification) -> list[str]:
    """What a person reads of a result, worst first."""
    text = [f"{name} is missing" for name in folded(result.missing)]
    text += [f"{name} is not in the source" for name in folded(result.extra)]
    return result.differences + text + result.files
