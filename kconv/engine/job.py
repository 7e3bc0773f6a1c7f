"""One execution of a plan into a partial folder, alone or as part I of N, resumable and finished by whoever comes last.

| file of `.OUT.partial/` | made by | meaning |
|---|---|---|
| `.kconv-identity.json` | the first process, atomically | plan, options, source fingerprints, N; another job is refused |
| `.kconv-journal-I-of-N` | part I | finished slabs, `sync` points, `done` |
| `.kconv-stage-I/` | part I of a conversion from the Hub | the few shards that lie on disk at a time |
| `.kconv-finisher` | the last part | locked while the folder is finished; the lock dies with its process |

All parts write their own byte ranges of the same pre-sized files, so the result does not depend on N.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kconv.checkpoint import manifest as manifests
from kconv.checkpoint.folder import begin, publish, sync_folder, write_file
from kconv.checkpoint.headers import OutFile
from kconv.checkpoint.reading import GROUPS, MANIFEST, OURS, Checkpoint, index_name
from kconv.console import Meter
from kconv.engine import manifest as engine_manifest
from kconv.engine.file_sink import FileSink
from kconv.engine.journal import Journal
from kconv.engine.linking import link
from kconv.engine.out_files import indexes
from kconv.engine.preflight import peak_bytes, total_memory
from kconv.engine.result import Conversion
from kconv.engine.run import execute
from kconv.engine.slabs import Slab, part_bytes, slab_checksum, streams
from kconv.engine.worker import Progress
from kconv.errors import KconvError
from kconv.planning.plan import Plan
from kconv.storage.files import Files, LocalFiles, MappedFiles, RemoteFiles
from kconv.storage.hashing import DEFAULT_DIGEST, digests_of, sha256_file
from kconv.storage.safe_paths import inside
from kconv.storage.staging import StagedFiles
from kconv.transforms.notes import Notes

COMMAND = "kconv convert"
SYNC_EVERY = 4 << 30
COPY_BLOCK = 16 << 20
MOST_WARNINGS = 8
FINISHER = f"{OURS}finisher"
JOURNAL = f"{OURS}journal"
STAGE = f"{OURS}stage"


@dataclass(frozen=True)
class Settings:
    """How to execute: nothing here changes a byte of the weights."""

    shard_size: int
    workers: int
    device: str = "cpu"
    digest: str | None = DEFAULT_DIGEST
    part: tuple[int, int] = (1, 1)
    mmap: bool = False
    direct: bool | None = None
    link: bool = False


class Job:
    """A plan, its output files, and the partial folder they are written to."""

    def __init__(
        self, plan: Plan, partial: Path, files: list[OutFile], settings: Settings, linked: Sequence[OutFile] = ()
    ) -> None:
        self.plan, self.partial, self.files, self.settings, self.linked = plan, partial, files, settings, linked
        self.sink = FileSink(partial, files, settings.digest if settings.part[1] == 1 else None, settings.direct)
        self.resumed = 0
        self.fresh, self.begun = False, False
        self.links: Counter[str] = Counter()
        self._fingerprints = fingerprints(plan.source)
        self._started = time.monotonic()
        self._since_sync = 0
        self._syncing = threading.Lock()
        self._staged: StagedFiles | None = None
        part, parts = settings.part
        self.journals = [Journal(partial / f"{JOURNAL}-{i}-of-{parts}") for i in range(1, parts + 1)]
        self.journal = self.journals[part - 1]

    def names(self) -> list[str]:
        """Names of all files of the output."""
        own, weights = self.plan.layouts.files, [*self.files, *self.linked]
        groups = dict.fromkeys(f.group for f in weights)
        beside = [n for n in self.plan.source.other_files() if n not in own]
        made = [name for name, blob in own.items() if blob is not None and name != "config.json"]
        return [*(f.name for f in weights), *map(index_name, groups), "config.json", *made, *beside, MANIFEST]

    def run(self, *, quiet: bool) -> Conversion:
        """Do this part's slabs; returns the figures. `finish` does the rest, when all parts are done."""
        self._identify()
        self.journal.open()
        try:
            self._fetch_beside()
            self.sink.prepare()
            kept = {n for f in self.linked for n in f.starts}
            total = sum(t.spec.nbytes for n, t in self.plan.targets.items() if n not in kept) // self.settings.part[1]
            with Meter("convert", total, quiet=quiet) as meter:
                todo = map(self._todo, streams(self.plan, self.sink.place, self.settings.device, kept))
                progress = execute(
                    todo, self.source_files(), self.sink, workers=self.settings.workers,
                    device=self.settings.device, done=self._done, tick=meter,
                )  # fmt: skip
            self._unchanged()
            self.sink.sync()
            if self._staged:
                self._staged.clear()
            self.journal.synced(last=True)
        finally:
            self.sink.close()
            self.journal.close()
        return self._figures(progress)

    def _fetch_beside(self) -> None:
        """From the Hub, what goes along comes first: a file that is not what the Hub states is found before the long work."""
        if self.settings.part[0] == 1 and isinstance(self.plan.source.files, RemoteFiles):
            for name in self._taken_over():
                self._take_over(name)

    def _taken_over(self) -> list[str]:
        """The source's files beside the weights that are copied as they are."""
        return [n for n in self.plan.source.other_files() if n not in self.plan.layouts.files]

    def source_files(self) -> Files:
        """The source's files as this job reads them: mapped, staged from the Hub, or with `pread`."""
        files = self.plan.source.files
        if isinstance(files, LocalFiles):
            if self.settings.mmap:
                return MappedFiles(files.root / files.single if files.single else files.root)
            files.drop_pages = self.plan.source.nbytes > total_memory() // 2
        elif isinstance(files, RemoteFiles):
            stage = self.partial / f"{STAGE}-{self.settings.part[0]}"
            self._staged = StagedFiles(files, stage, self.settings.workers + 2)
            return self._staged
        return files

    def finish(self, out: Path, *, overwrite: bool) -> bool:
        """Write what stands beside the weights and rename the folder, if all parts are done and no other process is at it."""
        if not self.partial.exists():
            return False
        with open(self.partial / FINISHER, "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            if not self.partial.exists() or not all(journal.is_done() for journal in self.journals):
                return False
            self._finish()
            publish(self.partial, out, overwrite=overwrite)
            return True

    def _identify(self) -> None:
        """Leave the run's identity, or refuse to go on with another run's folder."""
        job = json.loads(json.dumps({
            "plan": self.plan.digest, "options": self.plan.options, "shard_size": self.settings.shard_size,
            "pieces": part_bytes(self.settings.device), "linked": [f.name for f in self.linked],
            "parts": self.settings.part[1], "source": self._fingerprints,
        }))  # fmt: skip
        earlier = begin(self.partial, COMMAND, job, self.names())
        self.fresh = earlier is None
        if earlier is not None and earlier != job:
            raise KconvError(
                f"{self.partial} was begun by another run: {'; '.join(differing(earlier, job))}",
                hint="the same source and options resume it, --overwrite starts again",
            )
        self.begun = True

    def _todo(self, stream: Iterator[Slab]) -> Iterator[Slab]:
        """This part's slabs that no earlier run finished; those recorded since the last sync are read back first."""
        part, parts = self.settings.part
        for slab in stream:
            file, count = map(int, slab.number.split("."))
            if (file + count) % parts != part - 1:
                continue
            known = self.journal.durable.get(slab.number)
            if known is None and (claimed := self.journal.claimed.get(slab.number)):
                digests = [self.sink.reread(w) for p in slab.parts for w in p.writes]
                known = claimed if slab_checksum(digests) == claimed else None
            if known is None:
                yield slab
            else:
                self.resumed += 1
                self.sink.finished(slab)

    def _done(self, slab: Slab, checksum: str) -> None:
        self.journal.finished(slab.number, checksum)
        with self._syncing:
            self._since_sync += sum(w.spec.nbytes for part in slab.parts for w in part.writes)
            due = self._since_sync >= SYNC_EVERY
            if due:
                self._since_sync = 0
        if due:
            self.journal.synced_by(self.sink.sync)

    def _unchanged(self) -> None:
        if fingerprints(self.plan.source) != self._fingerprints:
            raise KconvError("the source changed while it was converted", hint="convert again with --overwrite")

    def _finish(self) -> None:
        """Side files, config, indexes; syncs; the manifest is last."""
        made: dict[str, dict[str, Any]] = {}
        for f in self.linked:
            self._take_over(f.name)
            made[f.name] = {"size": f.size, **self._digest(f.name)}
        blobs = indexes([*self.files, *self.linked], self.partial)
        blobs["config.json"] = json.dumps(self.plan.layouts.config, indent=2).encode() + b"\n"
        own = self.plan.layouts.files
        blobs |= {name: blob for name, blob in own.items() if blob is not None}
        for name, blob in blobs.items():
            write_file(inside(self.partial, name), blob)
            made[name] = _entry(self.partial / name)
        for name in self._taken_over():
            self._take_over(name)
            made[name] = _entry(self.partial / name)
        for f in self.files:
            made[f.name] = {"size": f.size, **self._digest(f.name)}
        write_file(self.partial / MANIFEST, manifests.dump(engine_manifest.build(self.plan, made, stamps(self.plan.source))))
        sync_folder(self.partial)

    def _take_over(self, name: str) -> None:
        """Bring a file of the source into the folder as it is: linked where that is asked for and possible, else copied."""
        source, target = self.plan.source, inside(self.partial, name)
        if isinstance(source.files, RemoteFiles):
            return fetch_file(source.files, name, target)
        target.unlink(missing_ok=True)  # an earlier run may have left a hard link: writing into it would write into the source
        target.parent.mkdir(parents=True, exist_ok=True)
        if self.settings.link and isinstance(source.files, LocalFiles) and (way := link(source.files.path(name), target)):
            self.links[way] += 1
        else:
            copy_file(source, name, target)
        return None

    def _digest(self, name: str) -> dict[str, str]:
        """A weight file's digest under its algorithm's name: from the writing, or (several parts) by reading it."""
        algorithm = self.settings.digest
        if algorithm is None:
            return {}
        known = self.sink.hashes.get(name)
        return {algorithm: known.hexdigest()} if known else digests_of(LocalFiles(self.partial), name, algorithm)

    def _figures(self, progress: Progress) -> Conversion:
        return Conversion(
            **vars(self.plan.summary()),
            peak_bytes=peak_bytes(self.plan, self.settings.workers, self.settings.device),
            seconds=round(time.monotonic() - self._started, 3),
            bytes_read=progress.bytes_read,
            bytes_written=self.sink.bytes_written,
            slabs=progress.slabs,
            resumed_slabs=self.resumed,
            part=list(self.settings.part),
            errors={step: error.figures() for step, error in progress.notes.errors.items()},
            notes=[*self.plan.layouts.notes, *lines_of(progress.notes)],
        )


def lines_of(notes: Notes) -> list[str]:
    """What the conversion itself had to say: how much re-encoding lost, and suspicious data."""
    lines = [f"re-encoded to {step}: {error}" for step, error in notes.errors.items()]
    more = len(notes.warnings) - MOST_WARNINGS
    return lines + notes.warnings[:MOST_WARNINGS] + ([f"and {more} more tensors like these"] if more > 0 else [])


def differing(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What two runs differ in, as `key differ (details)`; the plan only where nothing else explains it."""
    lines = []
    for key in sorted(k for k in {*then, *now} - {"plan"} if then.get(k) != now.get(k)):
        before, after = then.get(key), now.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            names = sorted(k for k in {*before, *after} if before.get(k) != after.get(k))
            said = [f"{n}: {_said(before.get(n))} then, {_said(after.get(n))} now" for n in names] if key == "options" else names
            lines.append(f"{key} differ ({', '.join(said[:MOST_WARNINGS])}{', ...' if len(said) > MOST_WARNINGS else ''})")
        else:
            lines.append(f"{key} differ ({_said(before)} then, {_said(after)} now)")
    return lines or ["the plan differs, though options and source are the same: another version of kconv made it"]


def _said(value: Any) -> str:
    return "not given" if value is None else str(value)


def fingerprints(checkpoint: Checkpoint) -> dict[str, str]:
    """What changes when a file does that a conversion reads."""
    return {name: checkpoint.files.fingerprint(name) for name in inputs(checkpoint)}


def stamps(checkpoint: Checkpoint) -> dict[str, str]:
    """Of each input what a later run can hold it against, wherever it lies by then: size and time, or the Hub's hash."""
    files = checkpoint.files
    stamp = files.stamp if isinstance(files, LocalFiles) else files.fingerprint
    return {name: stamp(name) for name in inputs(checkpoint)}


def inputs(checkpoint: Checkpoint) -> list[str]:
    """Names of the source's files that decide what a conversion writes."""
    beside = {"config.json", MANIFEST, *map(index_name, GROUPS)} & {*checkpoint.files.names()}
    return [*checkpoint.shards, *sorted(beside), *checkpoint.other_files()]


def _entry(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": sha256_file(path)}


def fetch_file(hub: RemoteFiles, name: str, path: Path) -> None:
    """Bring a file of the Hub to `path`, unless it is there, and hold it against the hash that the Hub states."""
    if not hub.holds(name, path):
        hub.download(name, path)
        with open(path, "rb+") as handle:
            os.fsync(handle.fileno())


def copy_file(checkpoint: Checkpoint, name: str, path: Path) -> None:
    """Copy one file of the source byte for byte."""
    size = checkpoint.files.size(name)
    with open(path, "wb") as handle:
        for at in range(0, size, COPY_BLOCK):
            handle.write(checkpoint.files.read(name, at, min(COPY_BLOCK, size - at)))
        handle.flush()
        os.fsync(handle.fileno())
