"""A checkpoint as its headers describe it: every tensor's name, spec, file and offset, and everything wrong with them.

| checked before any data is read | refused when |
|---|---|
| folder | a link leads out of it or nowhere, it holds only pickle files, it is an unfinished conversion |
| index | not JSON, names a missing file, an unsafe path, a pickle file, a tensor its shard lacks |
| header | longer than 100 MB or than the file, not JSON, unknown dtype, a name twice (`kconv.checkpoint.headers`) |
| data | offsets overlap, leave holes, overrun or fall short of the file, differ from dtype x shape |
| names | in a shard but not in the index; in two shards |

All problems are collected and raised once. A folder may hold several groups of shards, each with its own index:
`model` (what Transformers reads), `vision` and `sidecar` (what kconv carries so that the way back is exact).
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kconv.checkpoint import headers
from kconv.checkpoint.manifest import checked
from kconv.errors import KconvError, Problems, Unreadable
from kconv.names import folded, number
from kconv.spec import Spec
from kconv.storage import json_text, safe_paths
from kconv.storage.files import Files
from kconv.storage.opening import open_files
from kconv.text.printable import hidden, printable

GROUPS = ("model", "vision", "sidecar")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".bin.index.json")
MANIFEST = "kconv.json"
OURS = ".kconv-"
IDENTITY = f"{OURS}identity.json"
MOST_SHOWN = 20

NEXT = {
    "file": "fetch the named files again",
    "index": "fetch the index that belongs to these shards, or remove it: the shards are then read by their own headers",
    "name": "rename or remove what has such a name",
    "path": "do not trust where these names come from: a checkpoint's files lie in its own folder",
    "link": "copy the file into the folder, or give the folder it leads to (KCONV_FOLLOW_LINKS=1 reads through links)",
    "twice": "--follow-index reads each tensor from the file its index names",
    "two": "remove the file that does not belong, or write an index that says which one counts",
    "stray": "remove the file, or the index if that is out of date",
}


@dataclass(slots=True)
class Entry:
    """One stored tensor: its spec, its file, and the absolute offset of its first byte there."""

    spec: Spec
    file: str
    start: int


@dataclass(slots=True)
class Alike:
    """Tensors whose names differ only in an expert's number, of one spec and in one file: the first, all names, the numbers."""

    name: str
    entry: Entry
    names: list[str]
    numbers: list[int]


@dataclass
class Checkpoint:
    """What the headers, the config and the manifest of a checkpoint say; no tensor data."""

    files: Files
    config: dict[str, Any]
    entries: dict[str, Entry]
    shards: list[str]
    index_metadata: dict[str, Any]
    manifest: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def where(self) -> str:
        """The path or address it was opened from."""
        return self.files.where

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(group.entry.spec.nbytes * len(group.names) for group in self.alike)

    @cached_property
    def alike(self) -> list[Alike]:
        """All tensors, those of a layer's experts taken together: what holds of one name's words holds of its group's."""
        groups: dict[tuple[str, str, str, int], Alike] = {}
        known: dict[str, tuple[int | None, str]] = {"": (None, "")}
        for name, entry in self.entries.items():
            head, _, rest = name.partition(".experts.")
            split = known.get(rest)
            if split is None:
                expert, _, tail = rest.partition(".")
                split = known[rest] = number(expert), tail
            which, tail = split
            key = (name, "", "", -1) if which is None else (head, tail, entry.file, id(entry.spec))
            group = groups.get(key)
            if group is None:
                group = groups[key] = Alike(name, entry, [], [])
            group.names.append(name)
            if which is not None:
                group.numbers.append(which)
        return list(groups.values())

    def json(self, name: str) -> dict[str, Any] | None:
        """The object in a JSON file beside the weights, None where there is no such file."""
        return read_json(self.files, name) if name in self.files.names() else None

    def text(self, name: str) -> str | None:
        """A small text file beside the weights, None where there is none."""
        return self.files.read(name).decode("utf-8", "replace") if name in self.files.names() else None

    def other_files(self) -> list[str]:
        """Names of the files that go along: neither weights, index, config, manifest, pickles nor leftovers."""
        skip = {*self.shards, "config.json", MANIFEST, *(index_name(g) for g in GROUPS)}
        never = (".safetensors", ".safetensors.index.json", *PICKLES)
        return [n for n in self.files.names() if n not in skip and not n.endswith(never) and not safe_paths.is_leftover(n)]


class Faults:
    """What is wrong with a checkpoint's files, collected with the next step of each kind, raised once."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.lines: list[str] = []
        self.kinds: list[str] = []

    def add(self, kind: str, lines: Iterable[str]) -> None:
        """Note lines of a kind of `NEXT`."""
        before = len(self.lines)
        self.lines += lines
        if len(self.lines) > before and kind not in self.kinds:
            self.kinds.append(kind)

    def raise_any(self) -> None:
        """Raise `Problems` with everything noted so far, if anything was."""
        if self.lines:
            hint = "; ".join(NEXT[k] for k in self.kinds) + "; nothing was written"
            raise Problems(f"{self.where} is not a sound checkpoint:", self.lines, hint=hint)


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection inside: half a million new objects without a cycle make it search 40% of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def index_name(group: str) -> str:
    """File name of a group's index."""
    return f"{group}.safetensors.index.json"


def open_checkpoint(source: Any, *, follow_index: bool = False) -> Checkpoint:
    """Read the headers of a checkpoint; raises `Problems` with everything that is wrong with them.

    `follow_index` reads a tensor that lies in two shards from the one its index names, instead of refusing.
    """
    files = source if isinstance(source, Files) else open_files(source)
    names, faults = files.names(), Faults(files.where)
    _refuse_unfinished(files, names)
    faults.add("path", safe_paths.faults(n for n in names if not safe_paths.is_leftover(n))[:MOST_SHOWN])
    faults.add("link", files.unsafe_links())
    faults.add("name", (f"the name of {printable(n)} holds control characters or is no text" for n in names if printable(n) != n))
    faults.raise_any()
    config = read_json(files, "config.json") if "config.json" in names else {}
    with uncollected():
        index, metadata = _indexed(files, names, faults)
    shards = sorted(set(index.values())) if index is not None else _unindexed(names)
    if not shards and not faults.lines:
        _refuse_no_weights(files, names)
    faults.raise_any()
    notes = [*files.notes, *_left_out(names, shards)]
    with uncollected():
        entries = _entries(files, shards, index, faults, follow_index, notes)
    if index is not None or shards == ["model.safetensors"]:
        stray = [n for n in names if _is_weights(n) and n not in shards and n.startswith("model")]
        faults.add("stray", (f"{n} lies beside {', '.join(shards[:3])}, but no index names it" for n in stray))
    faults.raise_any()
    if not entries:
        raise KconvError(f"{files.where} holds no tensors: the headers are empty", hint="fetch the checkpoint again")
    manifest = checked(read_json(files, MANIFEST), f"{files.where}/{MANIFEST}") if MANIFEST in names else None
    return Checkpoint(files, config, entries, shards, metadata, manifest, notes)


def _entries(files: Files, shards: list[str], index: Mapping[str, str] | None, faults: Faults,
             follow_index: bool, notes: list[str]) -> dict[str, Entry]:  # fmt: skip
    """Every tensor of the shards where the index places it; what does not agree with the index becomes a fault."""
    entries: dict[str, Entry] = {}
    unreadable: set[str] = set()
    elsewhere: list[tuple[str, str]] = []
    specs: headers.Seen = {}
    for shard in shards:
        header = _header(files, shard, faults, specs)
        if header is None:
            unreadable.add(shard)
            continue
        for name, spec, start in header.tensors:
            if index is not None and index.get(name) != shard:
                elsewhere.append((name, shard))
            elif name in entries:
                faults.add("two", [f"{name} lies in two files: {entries[name].file} and {shard}"])
            else:
                entries[name] = Entry(spec, shard, start)
    if index is not None:
        whole = len(entries) == len(index)  # every entry is where the index places it
        lacking = [] if whole else [n for n, shard in index.items() if n not in entries and shard not in unreadable]
        _misplaced(index, lacking, elsewhere, faults)
        _copies([(n, s) for n, s in elsewhere if n in entries], index, follow_index, faults, notes)
    return entries


def _header(files: Files, shard: str, faults: Faults, specs: headers.Seen) -> headers.Header | None:
    try:
        header = headers.read_tensors(files, shard, specs)
    except ValueError as e:
        faults.add("file", [f"{shard}: {e}"])
        return None
    except OSError as e:
        raise Unreadable(f"{files.where}/{shard}", e) from e
    if header.problem:
        faults.add("file", [f"{shard} {header.problem}"])
    return header


def _misplaced(index: Mapping[str, str], lacking: list[str], elsewhere: list[tuple[str, str]], faults: Faults) -> None:
    """Tensors that the index places in a shard that lacks them, and tensors that it does not know."""
    found = dict(elsewhere)
    moved = [n for n in lacking if n in found]
    faults.add("index", (f"the index places {n} in {index[n]}, but it lies in {found[n]}" for n in moved[:MOST_SHOWN]))
    nowhere = [(n, index[n]) for n in lacking if n not in found]
    faults.add("index", _by_file("the index names {} in {}, which lacks it", nowhere))
    unknown = [(n, s) for n, s in elsewhere if n not in index]
    faults.add("index", _by_file("the index does not name {}, which lies in {}", unknown))


def _copies(copies: list[tuple[str, str]], index: Mapping[str, str], follow: bool, faults: Faults, notes: list[str]) -> None:
    """Tensors that lie both where the index places them and elsewhere."""
    if follow and copies:
        shown = ", ".join(f"{n} in {s}" for n, s in copies[:3]) + (", ..." if len(copies) > 3 else "")
        count = f"{len(copies)} unindexed tensor{'s' * (len(copies) > 1)}"
        notes.append(f"{count} ignored, the index places the same names elsewhere: {shown}")
    elif copies:
        text = "{} lies in two files: {}, where the index places it, and {}"
        faults.add("twice", (text.format(n, index[n], s) for n, s in copies[:MOST_SHOWN]))


def _by_file(text: str, rows: list[tuple[str, str]]) -> list[str]:
    """`text` for each file's names, folded."""
    mine: dict[str, list[str]] = {}
    for name, shard in rows:
        mine.setdefault(shard, []).append(name)
    return [text.format(line, shard) for shard, names in mine.items() for line in folded(names)]


def _unindexed(names: list[str]) -> list[str]:
    """Without an index: `model.safetensors` alone, as Transformers reads a folder, otherwise every weight file."""
    weights = [n for n in names if _is_weights(n)]
    return ["model.safetensors"] if "model.safetensors" in weights else weights


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors") and "/" not in name


def _left_out(names: list[str], shards: list[str]) -> list[str]:
    """A note for every file that is neither part of the checkpoint nor carried along."""
    weights = [n for n in names if n.endswith(".safetensors") and n not in shards]
    strays = [n for n in weights if "/" in n or not n.startswith("model")]
    notes = [f"{n} is no part of the checkpoint (no index names it) and is left out" for n in strays]
    pickles = [n for n in names if n.endswith(PICKLES)]
    return notes + ([f"pickle files are never opened and are left out: {', '.join(pickles)}"] if pickles else [])


def _refuse_unfinished(files: Files, names: list[str]) -> None:
    if IDENTITY in names and MANIFEST not in names:
        raise KconvError(
            f"{files.where} is an unfinished conversion, not a checkpoint",
            hint="finish it with `kconv convert ... --resume`, then use the folder that appears",
        )


def _refuse_no_weights(files: Files, names: list[str]) -> None:
    pickles = [n for n in names if n.endswith(PICKLES)]
    if pickles:
        raise KconvError(
            f"{files.where} holds only pickle files ({', '.join(pickles[:4])}), which are never opened",
            hint="a pickle can run code; convert it to safetensors in an environment you trust",
        )
    folders = [n for n in files.folders() if n.endswith(".safetensors")]
    if folders:
        raise KconvError(
            f"{files.where} holds no .safetensors file: {', '.join(folders)} is a folder",
            hint="give that folder as SOURCE, or fetch the file",
        )
    what = "is empty" if not names else "holds no .safetensors file"
    raise KconvError(f"{files.where} {what}", hint="give the folder that holds the weights")


def read_json(files: Files, name: str) -> dict[str, Any]:
    """A JSON object of a source; raises KconvError where it cannot be read, is too large, or is none (`json_text`)."""
    most = json_text.MOST_INDEX if name.endswith(".index.json") else json_text.MOST
    try:
        size = files.size(name)
        if size > most:
            what = f"{files.where}/{name} has {size:,} bytes; no such file has more than {most:,}"
            raise KconvError(what, hint="fetch the file again")
        return json_text.parse(files.read(name, 0, size), f"{files.where}/{name}")
    except OSError as e:
        raise Unreadable(f"{files.where}/{name}", e) from e
    except ValueError as e:
        raise KconvError(str(e), hint="fetch the file again") from None


def _indexed(files: Files, names: list[str], faults: Faults) -> tuple[dict[str, str] | None, dict[str, Any]]:
    """The union of the groups' weight maps, checked (None without an index), and the metadata of the main index."""
    merged: dict[str, str] | None = None
    metadata: dict[str, Any] = {}
    for group in GROUPS:
        name = index_name(group)
        if name not in names:
            continue
        merged = {} if merged is None else merged
        index = read_json(files, name)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map or {*map(type, weight_map.values())} != {str}:
            faults.add("index", [f"{name} has no weight_map from tensor names to file names"])
            continue
        if group == "model" and isinstance(index.get("metadata"), dict):
            metadata = index["metadata"]
        unclear = [*hidden(weight_map), *hidden(set(weight_map.values()))][:MOST_SHOWN]
        faults.add("name", (f"{name} names {printable(n)}, which holds control characters" for n in unclear))
        twice = [n for n in weight_map if n in merged] if merged else []
        faults.add("index", (f"{n} is named by two indexes, {name} is one" for n in twice[:MOST_SHOWN]))
        _check_shards(files, names, name, set(weight_map.values()), faults)
        merged.update(weight_map)
    return merged, metadata


def _check_shards(files: Files, names: list[str], index: str, shards: Iterable[str], faults: Faults) -> None:
    missing, folders = [], set(files.folders())
    for shard in sorted(shards):
        if safe_paths.fault(shard) or "/" in shard:
            faults.add("path", [f"{index} names the file {shard!r}: only plain names inside the folder are allowed"])
        elif not shard.endswith(".safetensors"):
            faults.add("path", [f"{index} names {shard}, which is no .safetensors file; pickle files are never opened"])
        elif shard in folders:
            faults.add("file", [f"{index} names {shard}, which is a folder"])
        elif shard not in names:
            missing.append(shard)
    if missing:
        others = [n for n in names if _is_weights(n) and n not in shards]
        stale = f"; other .safetensors files are ({', '.join(others[:3])}): the index looks stale" if others else ""
        shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        what = "a file that is" if len(missing) == 1 else f"{len(missing)} files that are"
        faults.add("index" if others else "file", [f"{index} names {what} not there: {shown}{stale}"])
