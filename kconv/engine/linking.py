"""`--link`: what a conversion leaves unchanged is linked, not copied: whole source shards, and the files beside them.

| a file is linked | as |
|---|---|
| where the file system shares blocks (XFS, Btrfs) | a reflink: its own file, which takes room only where one of the two changes |
| elsewhere | a hard link: the same file under a second name, so that who writes into one writes into the other |

A shard is unchanged when each of its tensors is a target of the same name and spec that the plan only moves.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from kconv.checkpoint.headers import OutFile
from kconv.checkpoint.place import existing
from kconv.errors import EnvironmentLacks, KconvError
from kconv.planning.edges import Edge
from kconv.planning.plan import Plan
from kconv.storage.files import LocalFiles

FICLONE = 0x40049409
MADE = "-made"
"""In the names of the files that are written beside linked ones, so that no two files want one name."""


def linked_shards(plan: Plan, out: Path) -> list[OutFile]:
    """The source's shards that can stand in the output as they are, with their tensors; refuses where nothing can be linked."""
    check_links(plan, out)
    same = {name for edge in plan.edges for name in _unchanged(plan, edge)}
    by_file: dict[str, list[str]] = {}
    for name, entry in plan.source.entries.items():
        by_file.setdefault(entry.file, []).append(name)
    candidates = [_as_it_is(plan, shard, names) for shard, names in sorted(by_file.items()) if same.issuperset(names)]
    return [file for file in candidates if file]


def _unchanged(plan: Plan, edge: Edge) -> list[str]:
    """The targets of an edge that are a source tensor of the same name and spec, byte for byte."""
    lefts = edge.rule.left_names(edge.binding, edge.rule.domain[0])
    rights = edge.rule.right_names(edge.binding)
    if (
        not edge.rule.transform.moves_bytes()
        or len(edge.rule.domain) != 1
        or [tuple(rights)] != [tuple(piece) for piece in lefts]
    ):
        return []
    return [n for n in rights if n in plan.targets and n in plan.source.entries and plan.targets[n].spec == plan.entry(n).spec]


def _as_it_is(plan: Plan, shard: str, names: list[str]) -> OutFile | None:
    """A shard as an output file; None where it holds more than its tensors, several groups, or has a name that may be taken."""
    starts = {n: plan.entry(n).start for n in sorted(names, key=lambda n: plan.entry(n).start)}
    size, groups = plan.source.files.size(shard), {plan.targets[n].group for n in names}
    whole = min(starts.values()) + sum(plan.entry(n).spec.nbytes for n in names) == size
    if not whole or len(groups) != 1 or MADE in shard or "/" in shard:
        return None
    return OutFile(shard, groups.pop(), b"", size, starts)


def check_links(plan: Plan, out: Path) -> None:
    """Refuse `--link` where nothing can be linked: a source on the Hub, or on another file system than the output."""
    files = plan.source.files
    if not isinstance(files, LocalFiles):
        raise KconvError(f"--link needs a local source, {plan.source.where} is not", hint="leave --link out")
    if os.stat(files.root).st_dev != os.stat(existing(out.parent)).st_dev:
        raise EnvironmentLacks(
            f"--link: {out} lies on another file system than {plan.source.where}",
            hint="give a folder on the same one, or leave --link out",
        )


def link(source: Path, target: Path) -> str:
    """Make `target`, which must not exist, a reflink or a hard link of `source`; says which, empty where neither can be."""
    source = source.resolve()  # in the Hub's cache a shard is a symbolic link
    with open(source, "rb") as old, open(target, "xb") as new:
        try:
            fcntl.ioctl(new.fileno(), FICLONE, old.fileno())
        except OSError:
            pass
        else:
            os.fsync(new.fileno())
            return "reflink"
    target.unlink()
    try:
        os.link(source, target)
    except OSError:
        return ""
    return "hard link"
