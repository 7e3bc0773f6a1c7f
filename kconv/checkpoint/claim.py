"""One maker of a folder at a time: the lock beside OUT that every command holds while it makes OUT.

| who | holds `.OUT.kconv-lock` |
|---|---|
| a conversion in one process, `package`, `tiny` | alone, from before the first look at OUT until it is in place |
| part I of N of a conversion | together with other parts; that they are parts of one job, the partial folder's identity says |
| whoever comes second | not at all: it is refused at once and writes nothing |

The lock is the kernel's: it ends with its process, however that ends. The file itself goes with the last who held it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kconv.checkpoint.folder import recover
from kconv.errors import EnvironmentLacks, KconvError

TRIES, PAUSE = 20, 0.05  # a part that ends holds the lock alone for an instant; parts that begin just then try again


def out_path(out: str | os.PathLike[str]) -> Path:
    """The folder to make, as an absolute path without links; raises KconvError where it cannot be one."""
    if not str(out) or "\0" in str(out):
        raise KconvError(f"the output {str(out)!r} is no path", hint="give a folder that does not exist yet")
    try:
        return Path(out).resolve()
    except (OSError, RuntimeError) as e:
        raise KconvError(f"the output {out} cannot be followed: its links go in circles", hint="give another folder") from e


def lock_path(out: Path) -> Path:
    """The lock file of whoever makes `out`."""
    return out.parent / f".{out.name}.kconv-lock"


@contextmanager
def claim(out: Path, *, shared: bool = False) -> Iterator[None]:
    """Make `out` alone inside the block, or beside other parts; refuses at once where another process is at it.

    Folders on the way that had to be made, and that hold nothing in the end, are removed again.
    """
    made: list[Path] = []
    try:
        fd = _locked(out, shared, made)
        try:
            recover(out, alone=not shared)
            yield
        finally:
            _release(lock_path(out), fd)
    finally:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def _locked(out: Path, shared: bool, made: list[Path]) -> int:
    """A descriptor of the lock file, locked; `made` gets the folders that were missing, innermost first."""
    path, mode = lock_path(out), (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
    tries = TRIES if shared else 1
    while True:
        fd = _opened(path, made)
        try:
            fcntl.flock(fd, mode)
            if _is(path, fd):
                return fd
        except BlockingIOError:
            tries -= 1
            if not tries:
                os.close(fd)
                raise KconvError(
                    f"another kconv process is making {out}", hint="wait until it ends, or give another folder"
                ) from None
            time.sleep(PAUSE)
        except OSError as e:
            os.close(fd)
            raise EnvironmentLacks(f"{path.parent} lies on a file system without locks: {e.strerror}",
                                   hint="give a folder on another file system") from e  # fmt: skip
        os.close(fd)


def _opened(path: Path, made: list[Path]) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        try:
            missing = [p for p in (path.parent, *path.parent.parents) if not p.exists()]
            made[:0] = [p for p in missing if p not in made]
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, flags, 0o644)
        except FileNotFoundError:
            continue  # another process that ends has just removed the folder that it had made
        except OSError as e:
            hint = "choose another folder or change its permissions"
            raise EnvironmentLacks(f"cannot make {path}: {e.strerror}", hint=hint) from e
        if os.fstat(fd).st_size:
            os.close(fd)
            raise KconvError(f"{path} is in the way: it is not kconv's lock, which is empty", hint="move it elsewhere")
        return fd


def _is(path: Path, fd: int) -> bool:
    """Whether the name still leads to the open file."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _release(path: Path, fd: int) -> None:
    """Give the lock back; the last holder removes the file."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is(path, fd):
            os.unlink(path)
    except OSError:
        pass  # other parts hold it still
    finally:
        os.close(fd)
