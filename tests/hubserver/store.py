"""Repositories, commits and blobs of the test Hub: what the git and LFS side of the Hub would store.

| on the Hub | here |
|---|---|
| git blob id of a file | `Blob.sha1`: sha1 of "blob <size>\\0" + content; for an LFS file, of its pointer text |
| LFS object id | `Blob.sha256` |
| commit | `Commit`: a 40-hex id over parent, title and tree |
| branch, tag, pull request | entries of `Repo.refs`: `refs/heads/main`, `refs/tags/v1`, `refs/pr/1` |
"""

from __future__ import annotations

import fnmatch
import hashlib
import secrets
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

LFS_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.model", "*.gz", "*.npz", "*.parquet", "*.zip")
REGULAR_LIMIT = 10 * 1000 * 1000
GITATTRIBUTES = "".join(f"{p} filter=lfs diff=lfs merge=lfs -text\n" for p in LFS_PATTERNS).encode()


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file, read in 1 MiB pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while piece := f.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def git_sha1(content: bytes) -> str:
    """The git blob id of `content`."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def lfs_pointer(sha256: str, size: int) -> bytes:
    """The text git keeps in place of an LFS file."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


@dataclass(frozen=True)
class Entry:
    """One file of a commit: its object and whether it is an LFS file."""

    sha256: str
    size: int
    sha1: str
    lfs: bool


@dataclass(frozen=True)
class Commit:
    """An immutable tree with its history."""

    oid: str
    parent: str | None
    title: str
    tree: Mapping[str, Entry]


@dataclass
class Discussion:
    """A pull request."""

    num: int
    title: str
    author: str
    status: str = "draft"


@dataclass
class Repo:
    """A model repository."""

    id: str
    private: bool = False
    gated: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    discussions: list[Discussion] = field(default_factory=list)

    def resolve(self, revision: str) -> Commit | None:
        """The commit of a branch, tag, `refs/pr/N`, full ref or 40-hex id; None if there is none."""
        for ref in (f"refs/heads/{revision}", f"refs/tags/{revision}", revision):
            if ref in self.refs:
                return self.commits[self.refs[ref]]
        return self.commits.get(revision)

    def branch_of(self, revision: str) -> str | None:
        """The ref that a push to `revision` moves (branch or pull request); None for tags, commits, unknown names."""
        for ref in (f"refs/heads/{revision}", revision):
            if ref in self.refs and ref.startswith(("refs/heads/", "refs/pr/")):
                return ref
        return None

    def commit(self, ref: str, title: str, changes: Mapping[str, Entry | None]) -> Commit:
        """Advance `ref` by a commit that sets (or, for None, deletes) files."""
        parent = self.commits[self.refs[ref]] if ref in self.refs else None
        tree = dict(parent.tree) if parent else {}
        for path, entry in changes.items():
            if entry is None:
                tree.pop(path, None)
            else:
                tree[path] = entry
        text = f"{parent.oid if parent else ''}\n{title}\n{secrets.token_hex(8)}\n{sorted(tree.items())}"
        new = Commit(hashlib.sha1(text.encode()).hexdigest(), parent.oid if parent else None, title, tree)
        self.commits[new.oid] = new
        self.refs[ref] = new.oid
        return new


class Store:
    """All repositories and objects of one test Hub; objects lie in `folder` by sha256."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.repos: dict[str, Repo] = {}
        self.linked: dict[str, Path] = {}
        self.lock = threading.RLock()

    def path(self, sha256: str) -> Path:
        """Where an object's bytes are."""
        return self.linked.get(sha256, self.folder / sha256)

    def has(self, sha256: str) -> bool:
        """Whether the object was completely uploaded."""
        return self.path(sha256).is_file()

    def put(self, content: bytes) -> str:
        """Store bytes; returns their sha256."""
        sha256 = hashlib.sha256(content).hexdigest()
        if not self.has(sha256):
            (self.folder / sha256).write_bytes(content)
        return sha256

    def link(self, path: Path) -> str:
        """Serve a file of the disk as an object without copying it; returns its sha256."""
        sha256 = sha256_of(path)
        self.linked[sha256] = path
        return sha256

    def adopt(self, temporary: Path) -> str:
        """Move a received file into the store; returns its sha256."""
        sha256 = sha256_of(temporary)
        shutil.move(temporary, self.folder / sha256)
        return sha256

    def entry(self, path: str, sha256: str, lfs: bool | None = None) -> Entry:
        """The tree entry of an object under `path`; LFS as the Hub decides it if not given."""
        size = self.path(sha256).stat().st_size
        lfs = upload_mode(path, size) == "lfs" if lfs is None else lfs
        content = lfs_pointer(sha256, size) if lfs else self.path(sha256).read_bytes()
        return Entry(sha256, size, git_sha1(content), lfs)

    def create(self, repo_id: str, *, private: bool = False, gated: bool = False) -> Repo:
        """A new repository with the Hub's first commit (`.gitattributes`)."""
        with self.lock:
            repo = self.repos[repo_id] = Repo(repo_id, private, gated)
            entry = self.entry(".gitattributes", self.put(GITATTRIBUTES))
            repo.commit("refs/heads/main", "initial commit", {".gitattributes": entry})
            return repo


def upload_mode(path: str, size: int) -> str:
    """`lfs` or `regular`, as preupload answers."""
    name = path.rsplit("/", 1)[-1]
    return "lfs" if size > REGULAR_LIMIT or any(fnmatch.fnmatch(name, p) for p in LFS_PATTERNS) else "regular"
