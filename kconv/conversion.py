"""The three calls of a conversion: `plan`, `convert`, `verify`.

    plan = kconv.plan("hf://moonshotai/Kimi-K3", to="native")
    kconv.convert(plan, "out/")
    kconv.verify("out/", source="hf://moonshotai/Kimi-K3")
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kconv.adapters import layouts_for
from kconv.checkpoint import side_files
from kconv.checkpoint.claim import claim, out_path
from kconv.checkpoint.folder import check_left, check_names, discard, manifest_of, missing, partial_path
from kconv.checkpoint.headers import OutFile
from kconv.checkpoint.place import check_filled, check_place, check_room
from kconv.checkpoint.reading import Checkpoint, open_checkpoint, uncollected
from kconv.console import human
from kconv.engine.job import COMMAND, MOST_WARNINGS, Job, Settings, differing, stamps
from kconv.engine.linking import MADE, linked_shards
from kconv.engine.out_files import lay_out
from kconv.engine.preflight import check_beside, check_device, check_memory, check_padding, needed_bytes, peak_bytes
from kconv.engine.result import Conversion
from kconv.errors import Altered, AnswerIsNo, BadData, EnvironmentLacks, KconvError
from kconv.options import Options
from kconv.planning.plan import Plan
from kconv.storage.files import Files, LocalFiles, released
from kconv.storage.hashing import DEFAULT_DIGEST
from kconv.transforms.base import Grade

SHARD_SIZE = 5_000_000_000
MEMORY = 1_000_000_000
KEPT = "what was written is kept in {}; the same command with --resume goes on"


def default_workers() -> int:
    """Worker threads: half as many again as the cores this process may use, since some always wait for the disk."""
    return max(1, len(os.sched_getaffinity(0)) * 3 // 2)


def plan(source: Any, to: str = "native", *, follow_index: bool = False, **options: Any) -> Plan:
    """Plan a conversion from headers alone.

    Args:
        source: a folder, a `.safetensors` file, `hf://owner/name[@revision]`, or an opened `Checkpoint`.
        to: `native`, `hf` or `hf-text`.
        options: `experts`, `vision`, `dtype`, `sidecar`, `layers`, `tie` (see `kconv.options.Options`).

    Returns an unchecked `Plan`; `plan.check()` raises everything that is wrong with it.
    """
    with uncollected():
        checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source, follow_index=follow_index)
        asked = Options(to=to, **options)
        said = {k: v for k, v in asdict(asked).items() if v is not None}
        with released(checkpoint.files):
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
) -> Conversion:
    """Convert a checkpoint (or execute a `Plan`) into a new folder; returns what `convert --json` prints.

    Args:
        source: a `Plan`, or what `plan` takes with the same `options`.
        out: the folder to make; appears only when it is complete.
        shard_size: bytes of tensors a file holds at most, unless one tensor is larger.
        workers: threads; half as many again as the process's cores by default.
        device: where the transforms run, `cpu` or `cuda`.
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
    target, part = out_path(out), part or rank_part()
    _refuse_swapped(source, target, out)
    the_plan = (source if isinstance(source, Plan) else plan(source, **options)).check()
    _require(the_plan, require)
    check_device(device)
    settings = Settings(shard_size, allowed_workers(the_plan, workers, memory, device), device, digest, part, mmap, direct, link)
    check_place(the_plan.source.files, target, os.path.ismount(out))
    with claim(target, shared=part[1] > 1), released(the_plan.source.files):
        return _converted(the_plan, target, settings, overwrite=overwrite, resume=resume or part[1] > 1, quiet=quiet)


def _converted(the_plan: Plan, target: Path, settings: Settings, *, overwrite: bool, resume: bool, quiet: bool) -> Conversion:
    """`convert`, once nobody else makes `target`."""
    if resume and already(the_plan, target, overwrite=overwrite):
        notes = [f"{target} is already finished"]
        return Conversion(**vars(the_plan.summary()), seconds=0.0, bytes_read=0, bytes_written=0, slabs=0, resumed_slabs=0,
                          part=list(settings.part), notes=notes, finished=True)  # fmt: skip
    check_filled(target, overwrite=overwrite, resume=resume)
    linked = linked_shards(the_plan, target) if settings.link else []
    kept = {n for f in linked for n in f.starts}
    own = {n: t for n, t in the_plan.targets.items() if n not in kept}
    files, partial = lay_out(own, settings.shard_size, MADE if linked else ""), partial_path(target)
    left = check_left(partial, COMMAND, target, overwrite=overwrite, resume=resume)
    _check_means(the_plan, target, files, settings)
    job = Job(the_plan, partial, files, settings, linked)
    check_names(job.names())
    check_beside(the_plan)
    if left:
        discard(partial)
    return _run(job, target, overwrite=overwrite, quiet=quiet)


def _check_means(the_plan: Plan, target: Path, files: list[OutFile], settings: Settings) -> None:
    """Room, memory, and the little data that decides whether the plan can end well."""
    check_room(target, files, partial_path(target), needed_bytes(the_plan, files))
    check_memory(peak_bytes(the_plan, settings.workers, settings.device))
    check_padding(the_plan)


def _run(job: Job, target: Path, *, overwrite: bool, quiet: bool) -> Conversion:
    """Write and finish; what cannot be gone on with is removed, what can be is said."""
    try:
        done = job.run(quiet=quiet)
        return replace(done, finished=job.finish(target, overwrite=overwrite), links=dict(job.links))
    except KconvError as e:
        local = isinstance(job.plan.source.files, LocalFiles)
        refusal = job.begun and e.exit_code == KconvError.exit_code
        undone = refusal and (job.fresh if local else not job.journal.holds_work())
        if job.settings.part[1] == 1 and (undone or isinstance(e.__cause__, BadData)):
            discard(job.partial)  # nothing to resume: the source itself is at fault, or what was asked
        elif isinstance(e, Altered):
            hint = "what was converted before is kept: --resume fetches the file again and goes on, --overwrite starts again"
            raise EnvironmentLacks(e.message, hint=hint) from e  # 2 would say that nothing was written
        elif refusal and not local:  # a download that failed for good, after hours perhaps
            raise EnvironmentLacks(e.message, hint=KEPT.format(job.partial.name)) from e
        elif job.partial.exists() and "--resume" not in (e.hint or ""):
            e.hint = "; ".join(filter(None, (e.hint, KEPT.format(job.partial.name))))
        raise
    except OSError as e:
        where = f" ({e.filename})" if e.filename else ""
        raise EnvironmentLacks(f"{e.strerror or e}{where} while writing {target}", hint=KEPT.format(job.partial.name)) from e
    except Exception as e:
        e.add_note(KEPT.format(job.partial.name))
        raise


def _refuse_swapped(source: Any, target: Path, out: object) -> None:
    """Refuse arguments in the wrong order: a source that is not there, or is empty, and an output that holds weights."""
    if isinstance(source, Plan | Checkpoint | Files) or str(source).startswith("hf://") or not str(source) or not target.is_dir():
        return
    path = Path(source)
    empty = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    if empty and any(target.glob("*.safetensors")):
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


def already(the_plan: Plan, target: Path, *, overwrite: bool = False) -> bool:
    """Whether `target` is a finished conversion by the same plan and options of the same source; refuses where only the
    source is another now, or the folder is damaged (unless it may be replaced)."""
    found = manifest_of(target)
    if found is None or "plan_digest" not in found:
        return False
    then = {"plan": found["plan_digest"], "options": found.get("options")}
    now = {"plan": the_plan.digest, "options": json.loads(json.dumps(the_plan.options))}
    if then != now and overwrite:
        return False
    if then != now:
        raise KconvError(
            f"the output folder {target} is not empty: it holds a finished conversion, and {'; '.join(differing(then, now))}",
            hint="nothing is left to resume; --overwrite replaces it",
        )
    wrong = _outdated(found, the_plan.source) or [f"{n} is missing or of another size" for n in missing(target, found)]
    if wrong and not overwrite:
        raise KconvError(
            f"{target} is finished, but not as this command would make it now: {'; '.join(wrong[:MOST_WARNINGS])}",
            hint=f"kconv verify {target} --source {the_plan.source.where} tells whether it holds; --overwrite converts again",
        )
    return not wrong


def _outdated(manifest: dict[str, Any], source: Checkpoint) -> list[str]:
    """What of the source is not as a finished conversion found it."""
    then, now = manifest.get("inputs"), stamps(source)
    if not isinstance(then, dict):
        return ["it does not record when the files of its source were changed"]
    changed = sorted(n for n in {*then, *now} if then.get(n) != now.get(n))
    return [f"{n} of the source {'changed' if n in then and n in now else 'came or went'} since" for n in changed]


def _require(the_plan: Plan, require: str | None) -> None:
    if require and the_plan.grade > Grade.parse(require):
        worst = sorted({f"{e.rule.transform!r}" for e in the_plan.edges if e.rule.transform.grade > Grade.parse(require)})
        raise AnswerIsNo(
            f"the plan is {the_plan.grade}, --require asks for {require}; because of {', '.join(worst)}",
            hint="keep experts packed, or keep the sidecar",
        )
