"""The three calls of a conversion: `plan`, `convert`, `verify`.

    plan = kconv.plan("hf://moonshotai/Kimi-K3", to="native")
    kconv.convert(plan, "out/")
    kconv.verify("out/", source="hf://moonshotai/Kimi-K3")
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kconv import side_files
from kconv.adapters import Options, layouts_for
from kconv.errors import Altered, AnswerIsNo, BadData, EnvironmentLacks, KconvError
from kconv.files import Files
from kconv.hashing import DEFAULT_DIGEST
from kconv.isos.base import Grade
from kconv.job import Job, Settings, discard, tidy
from kconv.layout import OutFile, lay_out
from kconv.linking import MADE, linked_shards
from kconv.plans import Plan
from kconv.preflight import check_device, check_folders, check_memory, check_padding, check_room, needed_bytes, peak_bytes
from kconv.report import human
from kconv.source import MANIFEST, Checkpoint, open_checkpoint, uncollected
from kconv.writer import partial_path

SHARD_SIZE = 5_000_000_000
MEMORY = 1_000_000_000


def default_workers() -> int:
    """Worker threads: half as many again as the cores this process may use, since some always wait for the disk."""
    return max(1, len(os.sched_getaffinity(0)) * 3 // 2)


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
        layouts = layouts_for(checkpoint, asked)
        layouts.notes += side_files.notes(checkpoint)
        return Plan(checkpoint, layouts, said)


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
    digest: str | None = DEFAULT_DIGEST,
    memory: int = MEMORY,
    part: tuple[int, int] | None = None,
    mmap: bool = False,
    direct: bool | None = None,
    link: bool = False,
    quiet: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Convert a checkpoint (or execute a `Plan`) into a new folder; returns what `convert --json` prints.

    Args:
        source: a `Plan`, or what `plan` takes with the same `options`.
        out: the folder to make; appears only when it is complete.
        shard_size: bytes of tensors a file holds at most, unless one tensor is larger.
        workers: threads; half as many again as the process's cores by default.
        device: where the isos run, `cpu` or `cuda`.
        resume: go on with what an interrupted run left.
        overwrite: replace a finished folder that kconv made, or start an unfinished one again.
        require: refuse a plan of a worse grade than this.
        digest: what the manifest records of the weight files: `xxh3-128`, `sha256` (what the Hub states; slower), or None.
        memory: bytes that the workers' buffers may take together.
        part: `(i, n)`: do only the i-th (from 1) of n shares, beside other processes on the same file system; the process
            that ends last finishes the folder. Under torchrun rank and world size are taken. Implies `resume`.
        mmap: read through memory maps instead of `pread`; for local NVMe only.
        link: link unchanged shards and side files to the source's (reflinks, else hard links) instead of copying them.
        direct: write past the page cache; by default where the file system is known to be fast so.
    """
    _refuse_swapped(source, Path(out))
    the_plan = (source if isinstance(source, Plan) else plan(source, **options)).check()
    _require(the_plan, require)
    check_device(device)
    target, part = Path(out).resolve(), part or rank_part()
    settings = Settings(shard_size, allowed_workers(the_plan, workers, memory, device), device, digest, part, mmap, direct, link)
    resume = resume or part[1] > 1
    if resume and already(the_plan, target):
        return {**the_plan.summary(), "finished": True, "seconds": 0.0, "bytes_read": 0, "bytes_written": 0, "resumed_slabs": 0,
                "slabs": 0, "part": list(part), "links": {}, "notes": [f"{target} is already finished"]}  # fmt: skip
    check_folders(the_plan.source.files, target, overwrite=overwrite, resume=resume)
    linked = linked_shards(the_plan, target) if link else []
    kept = {n for f in linked for n in f.starts}
    own = {n: t for n, t in the_plan.targets.items() if n not in kept}
    files, partial = lay_out(own, shard_size, MADE if linked else ""), partial_path(target)
    left = partial.exists() and any(partial.iterdir()) and not resume
    if left and not overwrite:
        hint = "--resume goes on, --overwrite starts again"
        raise KconvError(f"an unfinished conversion to {target} lies in {partial.name}", hint=hint)
    _check_means(the_plan, target, files, settings)
    if left:
        discard(partial)
    job = Job(the_plan, partial, files, settings, linked)
    return {**_run(job, quiet), "finished": job.finish(target, overwrite=overwrite), "links": dict(job.links)}


def _check_means(the_plan: Plan, target: Path, files: list[OutFile], settings: Settings) -> None:
    """Room, memory, and the little data that decides whether the plan can end well."""
    check_room(target, files, partial_path(target), needed_bytes(the_plan, files))
    check_memory(peak_bytes(the_plan, settings.workers, settings.device))
    check_padding(the_plan)


def _run(job: Job, quiet: bool) -> dict[str, Any]:
    try:
        return job.run(quiet=quiet)
    except KconvError as e:
        useless = isinstance(e.__cause__, BadData) or (isinstance(e, Altered) and not job.journal.holds_work())
        if useless and job.settings.part[1] == 1:
            discard(job.partial)  # the source itself is at fault: there is nothing to resume
        elif isinstance(e, Altered):
            hint = "what was converted before is kept: --resume fetches the file again and goes on, --overwrite starts again"
            raise Altered(e.message, hint=hint) from None
        raise


def _refuse_swapped(source: Any, out: Path) -> None:
    """Refuse arguments in the wrong order: a source that is not there, or is empty, and an output that holds weights."""
    if isinstance(source, Plan | Checkpoint | Files) or str(source).startswith("hf://") or not out.is_dir():
        return
    path = Path(source)
    empty = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    if empty and any(out.glob("*.safetensors")):
        raise KconvError(
            f"{source} {'is empty' if path.exists() else 'does not exist'}, and {out} holds weights: are the two swapped?",
            hint=f"the source comes first: kconv convert {out} {source}",
        )


def rank_part() -> tuple[int, int]:
    """The part that torchrun's environment gives this process: rank + 1 of the world size; 1 of 1 outside of it."""
    return int(os.environ.get("RANK", 0)) + 1, int(os.environ.get("WORLD_SIZE", 1))


def allowed_workers(the_plan: Plan, workers: int | None, memory: int, device: str) -> int:
    """As many threads as asked for whose buffers fit the memory budget; refuses when not even one's do."""
    each = peak_bytes(the_plan, 1, device)
    if each > memory:
        raise EnvironmentLacks(
            f"--memory {human(memory)} is less than the {human(each)} that the largest piece needs in and out",
            hint=f"give --memory {human(each)} or more",
        )
    return max(1, min(workers or default_workers(), memory // max(1, each)))


def already(the_plan: Plan, target: Path) -> bool:
    """Whether `target` is a finished conversion by the same plan and options."""
    path = target / MANIFEST
    if not path.exists():
        return False
    found = json.loads(path.read_bytes())
    tidy(target)
    return found.get("plan_digest") == the_plan.digest and found.get("options") == json.loads(json.dumps(the_plan.options))


def _require(the_plan: Plan, require: str | None) -> None:
    if require and the_plan.grade > Grade.parse(require):
        worst = sorted({f"{e.rule.iso!r}" for e in the_plan.edges if e.rule.iso.grade > Grade.parse(require)})
        raise AnswerIsNo(
            f"the plan is {the_plan.grade}, --require asks for {require}; because of {', '.join(worst)}",
            hint="keep experts packed, or keep the sidecar",
        )
