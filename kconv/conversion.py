"""The three calls of a conversion: `plan`, `convert`, `verify`.

    plan = kconv.plan("hf://moonshotai/Kimi-K3", to="native")
    kconv.convert(plan, "out/")
    kconv.verify("out/", source="hf://moonshotai/Kimi-K3")
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kconv import manifest as manifests
from kconv.adapters import Options, layouts_for
from kconv.errors import AnswerIsNo, KconvError
from kconv.isos.base import Grade
from kconv.journal import Journal
from kconv.layout import OutFile, indexes, lay_out
from kconv.plans import Plan
from kconv.preflight import check_folders, check_room, peak_bytes, stored_bytes
from kconv.report import Meter
from kconv.run import execute
from kconv.slabs import Slab, streams
from kconv.source import JOURNAL, MANIFEST, Checkpoint, open_checkpoint, uncollected
from kconv.writer import FileSink, partial_path, publish, slab_checksum, sync_folder, write_file

SHARD_SIZE = 5_000_000_000
SYNC_EVERY = 4 << 30
COPY_BLOCK = 16 << 20


def default_workers() -> int:
    """Worker threads: the cores this process may use."""
    return max(1, len(os.sched_getaffinity(0)))


def plan(source: Any, to: str = "native", *, follow_index: bool = False, **options: Any) -> Plan:
    """Plan a conversion from headers alone.

    Args:
        source: a folder, a `.safetensors` file, `hf://owner/name[@revision]`, or an opened `Checkpoint`.
        to: `native`, `hf` or `hf-text`.
        options: `experts`, `vision`, `dtype`, `sidecar`, `layers`, `tie` (see `kconv.adapters.Options`).

    Returns an unchecked `Plan`; `plan.check()` raises everything that is wrong with it.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source, follow_index=follow_index)
    asked = Options(to=to, **options)
    said = {k: v for k, v in asdict(asked).items() if v is not None}
    with uncollected():
        return Plan(checkpoint, layouts_for(checkpoint, asked), said)


def convert(
    source: Any,
    out: str | os.PathLike[str],
    *,
    shard_size: int = SHARD_SIZE,
    workers: int | None = None,
    device: str = "cpu",
    resume: bool = False,
    overwrite: bool = False,
    require: str | None = None,
    hashes: bool = True,
    quiet: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Convert a checkpoint (or execute a `Plan`) into a new folder; returns what `convert --json` prints.

    Args:
        source: a `Plan`, or what `plan` takes with the same `options`.
        out: the folder to make; appears only when it is complete.
        shard_size: bytes of tensors a file holds at most, unless one tensor is larger.
        workers: threads; the process's cores by default.
        device: where the isos run, `cpu` or `cuda`.
        resume: go on with what an interrupted run left.
        overwrite: replace a finished folder that kconv made, or start an unfinished one again.
        require: refuse a plan of a worse grade than this.
        hashes: record the sha256 of the weight files in the manifest.
    """
    the_plan = (source if isinstance(source, Plan) else plan(source, **options)).check()
    _require(the_plan, require)
    target = Path(out)
    check_folders(the_plan.source.files, target, overwrite=overwrite, resume=resume)
    files = lay_out(the_plan.targets, shard_size)
    partial = _partial(target, resume=resume, overwrite=overwrite)
    check_room(target, files, partial, stored_bytes(the_plan))
    job = _Job(the_plan, partial, files, shard_size, workers or default_workers(), device, hashes)
    result = job.run(quiet)
    publish(partial, target, overwrite=overwrite)
    return result


def _require(the_plan: Plan, require: str | None) -> None:
    if require and the_plan.grade > Grade.parse(require):
        worst = sorted({f"{e.rule.iso!r}" for e in the_plan.edges if e.rule.iso.grade > Grade.parse(require)})
        raise AnswerIsNo(
            f"the plan is {the_plan.grade}, --require asks for {require}; because of {', '.join(worst)}",
            hint="keep experts packed, or keep the sidecar",
        )


def _partial(target: Path, *, resume: bool, overwrite: bool) -> Path:
    partial = partial_path(target.resolve())
    if partial.exists() and any(partial.iterdir()):
        if overwrite and not resume:
            shutil.rmtree(partial)
        elif not resume:
            raise KconvError(
                f"an unfinished conversion to {target} lies in {partial.name}", hint="--resume goes on, --overwrite starts again"
            )
    return partial


class _Job:
    """One execution of a plan into a partial folder."""

    def __init__(self, the_plan: Plan, partial: Path, files: list[OutFile], shard_size: int, workers: int,
                 device: str, hashes: bool) -> None:  # fmt: skip
        self.plan, self.partial, self.files, self.device, self.workers = the_plan, partial, files, device, workers
        self.shard_size = shard_size
        self.sink = FileSink(partial, files, hashes=hashes)
        self.resumed = 0
        self._fingerprints = fingerprints(the_plan.source)
        self.journal = Journal(partial / JOURNAL, {
            "plan": the_plan.digest, "options": the_plan.options, "shard_size": shard_size, "source": self._fingerprints,
        })  # fmt: skip
        self._since_sync = 0

    def run(self, quiet: bool) -> dict[str, Any]:
        started = time.monotonic()
        self.partial.mkdir(parents=True, exist_ok=True)
        self.journal.open()
        self.sink.prepare()
        try:
            with Meter("convert", self.plan.output_bytes, quiet=quiet) as meter:
                progress = execute(
                    map(self._todo, streams(self.plan, self.sink.place)), self.plan.source.files, self.sink,
                    workers=self.workers, device=self.device, done=self._done, tick=meter,
                )  # fmt: skip
            self._finish()
        finally:
            self.sink.close()
            self.journal.close()
        self.journal.path.unlink()
        return {
            **self.plan.summary(),
            "peak_bytes": peak_bytes(self.plan, self.workers),
            "seconds": round(time.monotonic() - started, 3),
            "bytes_read": progress.bytes_read,
            "bytes_written": self.sink.bytes_written,
            "resumed_slabs": self.resumed,
            "notes": self.plan.layouts.notes,
        }

    def _todo(self, stream: Iterator[Slab]) -> Iterator[Slab]:
        """Slabs that no earlier run finished; those recorded since the last sync are read back first."""
        for slab in stream:
            known = self.journal.durable.get(slab.number)
            if known is None and (claimed := self.journal.claimed.get(slab.number)):
                digests = [self.sink.reread(w) for part in slab.parts for w in part.writes]
                known = claimed if slab_checksum(digests) == claimed else None
            if known is None:
                yield slab
            else:
                self.resumed += 1
                self.sink.finished(slab)

    def _done(self, slab: Slab, checksum: str) -> None:
        self.journal.finished(slab.number, checksum)
        self._since_sync += sum(w.spec.nbytes for part in slab.parts for w in part.writes)
        if self._since_sync >= SYNC_EVERY:
            self._since_sync = 0
            self.sink.sync()
            self.journal.synced()

    def _finish(self) -> None:
        """Everything beside the weights, then syncs; the manifest is last."""
        if fingerprints(self.plan.source) != self._fingerprints:
            raise KconvError("the source changed while it was converted", hint="convert again with --overwrite")
        made: dict[str, dict[str, Any]] = {}
        config = {**self.plan.layouts.config}
        blobs = {**indexes(self.files, self.plan.targets), "config.json": json.dumps(config, indent=2).encode() + b"\n"}
        for name, blob in blobs.items():
            write_file(self.partial / name, blob)
            made[name] = _entry(self.partial / name)
        for name in self.plan.source.other_files():
            copy_file(self.plan.source, name, self.partial / name)
            made[name] = _entry(self.partial / name)
        self.sink.sync()
        for f in self.files:
            made[f.name] = {"size": f.size}
            if f.name in self.sink.hashes:
                made[f.name]["sha256"] = self.sink.hashes[f.name].hexdigest()
        write_file(self.partial / MANIFEST, manifests.dump(manifests.build(self.plan, made)))
        sync_folder(self.partial)


def fingerprints(checkpoint: Checkpoint) -> dict[str, str]:
    """What changes when a source file does."""
    return {name: checkpoint.files.fingerprint(name) for name in checkpoint.shards}


def _entry(path: Path) -> dict[str, Any]:
    from kconv.hashing import sha256_file

    return {"size": path.stat().st_size, "sha256": sha256_file(path)}


def copy_file(checkpoint: Checkpoint, name: str, path: Path) -> None:
    """Copy one file of the source byte for byte."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size = checkpoint.files.size(name)
    with open(path, "wb") as handle:
        for at in range(0, size, COPY_BLOCK):
            handle.write(checkpoint.files.read(name, at, min(COPY_BLOCK, size - at)))
        handle.flush()
        os.fsync(handle.fileno())
