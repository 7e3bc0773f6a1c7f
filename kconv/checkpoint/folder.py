"""Making a folder: under a temporary name, put in place by one rename, and without touching what kconv did not make.

| beside or in OUT | meaning |
|---|---|
| `.OUT.partial/` | the unfinished folder, or (for an instant) the replaced one that is about to be removed |
| `.kconv-identity.json` in it | the command and job that made it, and the names of its files |
| `.kconv-replaces` in it | the folder that it takes the place of, known again by its inode after a crash |
| `.OUT.kconv-old-*/` | the replaced folder, where the file system cannot exchange two names at once |

A folder is used or removed only when it has an identity or a manifest that names all that lies in it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from kconv.checkpoint.reading import IDENTITY, MANIFEST, OURS
from kconv.errors import EnvironmentLacks, KconvError
from kconv.storage.json_text import MOST, parse

REPLACES = f"{OURS}replaces"
WORDS = {"kconv convert": "conversion", "kconv package": "package"}
MOST_NAMED = 4
DOWNLOAD = re.compile(r"(\.[0-9a-f]{12})?\.part$")  # a file of the Hub that is not here whole yet
RENAME_EXCHANGE, AT_FDCWD = 2, -100
NO_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
_libc = ctypes.CDLL(None, use_errno=True)


def partial_path(out: Path) -> Path:
    """Where the unfinished folder `out` lives."""
    return out.parent / f".{out.name}.partial"


def sync_folder(path: Path) -> None:
    """fsync a folder, so that names in it survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: Path, data: bytes) -> None:
    """Write a small file and sync it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())


def check_names(names: Iterable[str]) -> None:
    """Refuse names of which two are one file, or one is a file and a folder of another; says which."""
    seen: set[str] = set()
    ordered = list(names)
    for name in ordered:
        if name in seen:
            raise KconvError(f"two files of the output would be called {name}", hint="rename the one beside the source's weights")
        seen.add(name)
    for name in ordered:
        if clash := next((str(p) for p in PurePosixPath(name).parents if str(p) in seen), None):
            raise KconvError(
                f"{name} of the source cannot go along: the output has a file {clash}",
                hint=f"move the folder {clash} out of the source",
            )


# What is there already


def identity_of(partial: Path) -> dict[str, Any] | None:
    """What an unfinished folder says of itself; None where nothing is there; refuses a folder that kconv did not make."""
    if not partial.exists() and not partial.is_symlink():
        return None
    if partial.is_symlink() or not partial.is_dir():
        raise _not_ours(partial, "a link" if partial.is_symlink() else "a file")
    if odd := _no_file(partial):
        raise _not_ours(partial, f"a folder in which {odd} is a link or no file")
    path = partial / IDENTITY
    if not path.exists():
        left = [p.name for p in partial.iterdir() if not p.name.startswith(f"{IDENTITY}.")]
        if left:
            raise _not_ours(partial, f"a folder that holds {_named(left)}")
        return {}
    try:
        found = _object(path)
    except ValueError as e:
        raise _not_ours(partial, f"a folder with a damaged identity ({e})") from None
    files = found.get("files")
    named = isinstance(files, list) and all(isinstance(name, str) for name in files)
    if not isinstance(found.get("made_by"), str) or not isinstance(found.get("job"), dict) or not named:
        raise _not_ours(partial, "a folder with an identity of another form")
    return found


def _no_file(folder: str | os.PathLike[str]) -> str | None:
    """An entry below a folder that is neither a file nor a folder of its own: what is written to it would land elsewhere."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if inside := _no_file(entry.path):
                    return f"{entry.name}/{inside}"
            elif not entry.is_file(follow_symlinks=False):
                return entry.name
    return None


def _not_ours(partial: Path, what: str) -> KconvError:
    return KconvError(f"{partial} is in the way: {what}, not an unfinished run of this kconv",
                      hint="kconv neither removes nor uses it: move it elsewhere")  # fmt: skip


def check_left(partial: Path, command: str, out: Path, *, overwrite: bool, resume: bool) -> bool:
    """Whether an unfinished run of `command` is there that is to be removed; refuses what is in the way."""
    found = identity_of(partial)
    if not found:
        return False
    if found["made_by"] != command:
        raise KconvError(f"{partial} is in the way: an unfinished run of {found['made_by']} left it",
                         hint=f"finish that run, or remove {partial.name} yourself")  # fmt: skip
    if resume:
        return False
    if not overwrite:
        hint = ("--resume goes on, " if command == "kconv convert" else "") + "--overwrite starts again"
        raise KconvError(f"an unfinished {WORDS.get(command, command)} to {out} lies in {partial.name}", hint=hint)
    check_own(partial, found["files"])
    return True


def check_own(folder: Path, own: Collection[str]) -> None:
    """Refuse to replace or remove a folder that holds more than its own files."""
    if others := foreign(folder, own):
        raise KconvError(
            f"{folder} also holds {_named(others)}, which kconv did not write there, so it is not removed",
            hint="move what you want to keep elsewhere",
        )


def foreign(folder: Path, own: Collection[str]) -> list[str]:
    """What lies in a folder beside the files named `own`, kconv's records and the results of its checks."""
    known, parents = set(own), {str(p) for name in own for p in PurePosixPath(name).parents}
    found = []
    for base, folders, files in os.walk(folder):
        here = PurePosixPath(Path(base).relative_to(folder).as_posix())
        top = str(here) == "."
        folders[:] = [f for f in folders if not (top and f.startswith(OURS))]
        found += [str(here / f) for f in files if DOWNLOAD.sub("", str(here / f)) not in known and not (top and _record(f))]
        found += [f"{here / f}/" for f in folders if str(here / f) not in parents or Path(base, f).is_symlink()]
    return sorted(found)


def _record(name: str) -> bool:
    return name.startswith(OURS) or (name.startswith("kconv.") and name.endswith(".json"))


def _named(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:MOST_NAMED]) + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")


def manifest_of(out: Path) -> dict[str, Any] | None:
    """The manifest of a finished folder; None where kconv did not make it or its manifest cannot be read."""
    try:
        found = _object(out / MANIFEST)
    except (OSError, ValueError):
        return None
    files = found.get("files")
    well = isinstance(files, dict) and all(isinstance(known, dict) for known in files.values())
    return found if well and "format" in found else None


def _object(path: Path) -> dict[str, Any]:
    """A small JSON object; raises ValueError where it is none."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path.name} is no file")  # a pipe would be waited for
    with open(path, "rb") as handle:
        text = handle.read(MOST + 1)
    if len(text) > MOST:
        raise ValueError(f"{path.name} has more than {MOST:,} bytes")
    return parse(text, path.name)


def missing(out: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Files of a manifest that are not there at their sizes."""
    sizes = contents(out)
    return [name for name, known in manifest["files"].items() if sizes.get(name) != known.get("size")]


def contents(folder: Path) -> dict[str, int]:
    """Name -> bytes of every file of a folder but kconv's records of the making."""
    found = {}
    for base, _, files in os.walk(folder):
        for path in (Path(base, f) for f in files):
            name = path.relative_to(folder).as_posix()
            if not name.startswith(OURS):
                found[name] = path.stat().st_size
    return found


# Begin, give up, put in place


def begin(partial: Path, command: str, job: Mapping[str, Any], files: Iterable[str]) -> dict[str, Any] | None:
    """Make the unfinished folder; returns the job of an earlier run that left one, None where this run is the first."""
    identity = {"made_by": command, "job": job, "files": sorted({*files, MANIFEST})}
    partial.mkdir(parents=True, exist_ok=True)
    path, draft = partial / IDENTITY, partial / f"{IDENTITY}.{os.getpid()}"
    if not path.exists():
        write_file(draft, json.dumps(identity).encode())
        try:
            os.link(draft, path)
            return None
        except FileExistsError:
            pass  # another part was faster
        finally:
            draft.unlink()
    return (identity_of(partial) or {}).get("job", {})


def discard(partial: Path) -> None:
    """Remove an unfinished folder, its identity last, so that a half-removed one is still known for what it is."""
    found = identity_of(partial)
    if found is None:
        return
    check_own(partial, found.get("files", []))
    for path in [p for p in partial.iterdir() if p.name != IDENTITY]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(partial)


@contextmanager
def unfinished(out: Path, command: str, files: Iterable[str], *, overwrite: bool = False) -> Iterator[Path]:
    """A fresh folder to write, put in place at the end of the block, removed when the block raises."""
    partial, names = partial_path(out), list(files)
    check_names(names)
    if check_left(partial, command, out, overwrite=overwrite, resume=False):
        discard(partial)
    try:
        begin(partial, command, {}, names)
        yield partial
        publish(partial, out, overwrite=overwrite)
    except BaseException:
        with suppress(KconvError, OSError):
            discard(partial)
        raise


def publish(partial: Path, out: Path, *, overwrite: bool) -> None:
    """Put a finished folder in the place of OUT, which is empty or (`overwrite`) made by kconv, and read back what is there."""
    expected, old = contents(partial), None
    if out.exists() and any(out.iterdir()):
        check_replaceable(out, overwrite=overwrite)
        s = out.stat()
        write_file(partial / REPLACES, f"{s.st_dev} {s.st_ino}".encode())
        old = _exchange(partial, out)
    else:
        _rename(partial, out)
    sync_folder(out.parent)
    _read_back(out, expected)
    if old:
        shutil.rmtree(old)
    tidy(out)


def check_replaceable(out: Path, *, overwrite: bool) -> None:
    """Refuse to put a folder in the place of one that somebody filled or put something into while it was made."""
    manifest = manifest_of(out)
    if not overwrite or manifest is None:
        raise EnvironmentLacks(f"{out} was filled meanwhile by another program", hint="move it elsewhere")
    try:
        check_own(out, manifest["files"].keys() | {MANIFEST})
    except KconvError as e:
        raise EnvironmentLacks(e.message, hint=e.hint) from e


def _exchange(partial: Path, out: Path) -> Path:
    """Swap the two names in one step, or (where the file system cannot) in two; returns where the old folder is."""
    if _swapped(partial, out):
        return partial
    old = Path(tempfile.mkdtemp(prefix=f".{out.name}.kconv-old-", dir=out.parent))
    os.rename(out, old)
    _rename(partial, out)
    return old


def _swapped(one: Path, other: Path) -> bool:
    """Whether the file system exchanged two names; raises OSError where it can but did not."""
    if not hasattr(_libc, "renameat2"):
        return False
    if _libc.renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(other))


def _rename(partial: Path, out: Path) -> None:
    try:
        os.rename(partial, out)
    except OSError as e:
        if e.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise EnvironmentLacks(f"{out} was made meanwhile by another program", hint="move it elsewhere") from e


def _read_back(out: Path, expected: Mapping[str, int]) -> None:
    """Hold the folder in place against what was written: every name, every size, and the manifest against both."""
    found = contents(out)
    manifest = manifest_of(out) or {"files": {}}
    wrong = [n for n in {*expected, *found} if expected.get(n) != found.get(n)] or missing(out, manifest)
    if wrong:
        raise EnvironmentLacks(f"{out} is not as it was written: {_named(wrong)}",
                               hint="another program changes it; do it again with --overwrite")  # fmt: skip


def tidy(folder: Path) -> None:
    """Remove kconv's records of the making of a finished folder, the identity last: `recover` knows by it that some are left."""
    paths = [p for p in folder.iterdir() if p.name.startswith(OURS)]
    for path in sorted(paths, key=lambda p: p.name == IDENTITY):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def recover(out: Path, *, alone: bool) -> None:
    """Finish what a process had begun that was killed while it put `out` in place."""
    partial = partial_path(out)
    if (out / REPLACES).exists() and (old := _replaced(out, out / REPLACES)):
        shutil.rmtree(old, ignore_errors=True)
    if alone:
        _forget_empty(out)
    if alone and not out.exists() and (partial / REPLACES).exists() and (old := _replaced(out, partial / REPLACES)):
        os.rename(old, out)
    if (out / IDENTITY).exists() and (out / MANIFEST).exists():
        tidy(out)


def _forget_empty(out: Path) -> None:
    """Remove the folder that an old one was about to be moved to."""
    for path in _olds(out):
        with suppress(OSError):
            path.rmdir()


def _olds(out: Path) -> list[Path]:
    return [p for p in out.parent.iterdir() if p.name.startswith(f".{out.name}.kconv-old-") and not p.is_symlink()]


def _replaced(out: Path, note: Path) -> Path | None:
    """The folder beside `out` whose inode the note holds."""
    for path in [partial_path(out), *_olds(out)]:
        with suppress(OSError):
            s = path.lstat()
            if f"{s.st_dev} {s.st_ino}" == note.read_text():
                return path
    return None
