"""Mutations of files as files: their bytes, their names, what they are.

| edit | what |
|---|---|
| bytes | flipped, cut, added, put in from elsewhere, the whole emptied |
| the file | removed, renamed, exchanged with another, doubled, a folder or a pipe in its place, a sparse giant |
| links | to itself, to nothing, out of the folder, to a neighbour |
| more | a file, a folder, a module, a name that is no UTF-8 |
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

GIANT, SMALLER = 2 << 30, 80 << 20
READ = ("config.json", "kconv.json", "model.safetensors.index.json", "vision.safetensors.index.json")
MORE = ("extra.safetensors", "model-00009-of-00009.safetensors", "tokenization_kimi.py", "notes.txt", ".hidden",
        "pytorch_model.bin", "model.safetensors.index.json", "vision.safetensors.index.json", "chat_template.jinja",
        "kconv.json", "LICENSE")  # fmt: skip


def edit_bytes(path: Path, rng: Random) -> str:
    """Flip, cut, add or overwrite bytes of one file."""
    blob = bytearray(path.read_bytes())
    at = rng.randrange(len(blob) + 1)
    way = rng.choice(["flip", "flip", "flip", "cut", "insert", "delete", "tail", "noise", "empty"])
    if way == "flip" and blob:
        blob[min(at, len(blob) - 1)] ^= 1 << rng.randrange(8)
    elif way == "cut":
        del blob[at:]
    elif way == "insert":
        blob[at:at] = rng.randbytes(rng.choice([1, 8, 100]))
    elif way == "delete":
        del blob[at : at + rng.choice([1, 8, 100])]
    elif way == "tail":
        blob += rng.choice([b"\0", b"\n", b"{}", rng.randbytes(9)])
    elif way == "noise":
        blob[at : at + 16] = rng.randbytes(16)
    else:
        blob.clear()
    path.write_bytes(blob)
    return f"bytes: {way} at {at}"


def edit_file(path: Path, rng: Random, decoy: Path) -> str:
    """Do something to one file as a file; what was done."""
    way = rng.choice(WAYS)
    said = way(path, rng, decoy)
    return f"file: {said}"


def _remove(path: Path, _rng: Random, _decoy: Path) -> str:
    path.unlink()
    return "removed"


def _rename(path: Path, rng: Random, _decoy: Path) -> str:
    before = rng.choice([".", "sub/", "\udcff", "\x1b[31m", "x"])
    new = rng.choice([path.name + "x", path.name.upper(), before + path.name])
    (path.parent / new).parent.mkdir(exist_ok=True)
    path.rename(path.parent / new)
    return f"called {new!r}"


def _exchange(path: Path, rng: Random, _decoy: Path) -> str:
    other = rng.choice([p for p in path.parent.iterdir() if p.is_file()])
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)
    return f"exchanged with {other.name}"


def _double(path: Path, rng: Random, _decoy: Path) -> str:
    new = rng.choice([*MORE, "copy-" + path.name])
    if not (path.parent / new).exists():
        shutil.copy(path, path.parent / new)
    return f"copied to {new}"


def _folder(path: Path, rng: Random, _decoy: Path) -> str:
    path.unlink()
    path.mkdir()
    if rng.random() < 0.5:
        (path / "config.json").write_text("{}")
    return "a folder in its place"


def _pipe(path: Path, _rng: Random, _decoy: Path) -> str:
    path.unlink()
    os.mkfifo(path)
    return "a pipe in its place"


def _giant(path: Path, rng: Random, _decoy: Path) -> str:
    if rng.random() < 0.5:
        path.write_bytes(b"")
    read = path.suffix == ".safetensors" or path.name in READ or path.name.startswith(".kconv")
    os.truncate(path, GIANT if read else SMALLER)  # what is copied unread is written in full
    return "a sparse giant"


def _link(path: Path, rng: Random, decoy: Path) -> str:
    names = [p.name for p in path.parent.iterdir() if p != path]
    targets = [path.name, "absent", str(decoy / "keep.json"), "../../decoy/keep.json", str(decoy), ".", "..", "/", "/dev/zero",
               "/dev/null", rng.choice(names or ["absent"])]  # fmt: skip
    path.unlink()
    to = rng.choice(targets)
    path.symlink_to(to)
    return f"a link to {'the decoy' if str(decoy) in to else to}"


def _outside(path: Path, _rng: Random, decoy: Path) -> str:
    """The same content through a link that leads out."""
    there = decoy / f"held-{path.name}"
    path.rename(there)
    path.symlink_to(there)
    return "a link to itself, moved out"


def _locked(path: Path, _rng: Random, _decoy: Path) -> str:
    path.chmod(0)
    return "without rights"


def _more(path: Path, rng: Random, _decoy: Path) -> str:
    name = rng.choice([*MORE, "\udcfe.json", "sub/deep/file.json", "a\nb.json"])
    new = path.parent / name
    if not new.exists():
        new.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(rng.choice([b"", b"{}", rng.randbytes(50)]))
    return f"a file more, {name!r}"


def _folder_more(path: Path, rng: Random, _decoy: Path) -> str:
    name = rng.choice(["more", ".kconv-stage-1", "model.safetensors", ".partial", "\udcfd"])
    (path.parent / name).mkdir(exist_ok=True)
    return f"a folder more, {name!r}"


Way = Callable[[Path, Random, Path], str]
WAYS: list[Way] = [_remove, _remove, _rename, _exchange, _double, _folder, _pipe, _giant, _link, _link, _outside, _locked,
                   _more, _more, _folder_more]  # fmt: skip
