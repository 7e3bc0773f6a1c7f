"""Reading from the Hub: a revision pinned to a commit, byte ranges that survive cut connections, resumable downloads.

| what happens | what is done |
|---|---|
| a branch moves while we read | it was resolved to a commit once; every request names the commit |
| the connection is cut after k bytes | the rest is asked for from byte k; only attempts without progress add up |
| 429 | `Retry-After` or the `RateLimit` header is waited out |
| 408, 5xx, no connection | retried with growing pauses, up to `hub_http.RETRIES` times in a row |
| the standard cache holds a file of this commit | it is read there; a copy of it only when it has the stated hash |
| a signed link of the content store has run out (403) | a new one is fetched from the Hub |
| 401, 403, 404 | one clear error at once: no such repository, revision or file, no token, gated |
| the listing has a name, size or hash that cannot be one | refused before anything is read or written |
| a file has another hash than the Hub states, or other bytes than were read of it before | fetched once more, then refused |
| a server sends more than was asked for, or packs it | refused |
| a server ignores Range | refused: reading 8 bytes must not fetch 16 GB |

huggingface_hub 2.4 downloads into a unique temporary file and deletes it on failure, so a killed download of a 16 GB
shard starts again from nothing (read in its `file_download._download_to_tmp_and_move`); `HubFiles.download` keeps the
part file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kconv.errors import Altered, EnvironmentLacks, KconvError, Problems
from kconv.storage import hub_cache, safe_paths
from kconv.storage.files import Files, LocalFiles, RemoteFiles
from kconv.storage.hub_answers import field, get_json, headers_for, origin, pages, refusal
from kconv.storage.hub_http import RETRY_STATUS, TIMEOUT, Again, explain, hopeless, pause, stated_pause, transport_error
from kconv.text.printable import printable
from kconv.text.redaction import guard_logs

SOURCE = re.compile(r"hf://(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[^@]+))?/?")

BLOCK = 4 << 20
LARGEST_FILE = 1 << 50
MOST_SHOWN = 10


@dataclass(frozen=True)
class HubFile:
    """A file of a revision: `sha256` is stated for LFS files, `git_sha1` (the blob id) for all."""

    path: str
    size: int
    sha256: str | None
    git_sha1: str


def parse_source(source: str) -> tuple[str, str | None]:
    """(repo_id, revision or None) of `hf://owner/name[@revision]`; raises KconvError on another form."""
    match = SOURCE.fullmatch(source)
    if not match:
        raise KconvError(f"not a Hub source: {source!r}", hint="write hf://owner/name or hf://owner/name@revision")
    return match["repo"], match["revision"]


class HubFiles(RemoteFiles):
    """The files of a Hub repository at one commit. Safe to use from threads.

    Args:
        source: `hf://owner/name[@revision]`; a branch or tag is resolved to its commit, once.
        token: a token to use instead of the environment's.

    `revision` is the 40-hex commit. Raises KconvError for what does not exist or may not be seen, EnvironmentLacks when
    the Hub cannot be reached.
    """

    def __init__(self, source: str, *, token: str | None = None) -> None:
        from huggingface_hub import HfApi

        guard_logs()
        self.repo_id, self.requested = parse_source(source)
        self.where = f"hf://{self.repo_id}" + (f"@{self.requested}" if self.requested else "")
        self.api = HfApi(token=token)
        self._headers = headers_for(token)
        self._address = f"{self.api.endpoint}/api/models/{self.repo_id}"
        at = f"/revision/{quote(self.requested, safe='')}" if self.requested else ""
        info = get_json(self._address + at, self._headers, self.where)
        self.private, self.revision = bool(field(info, "private", bool, self.where)), field(info, "sha", str, self.where)
        if not re.fullmatch(r"[0-9a-f]{40}", self.revision):
            raise KconvError(f"{self.where}: the Hub named no commit for this revision", hint="check HF_ENDPOINT")
        self._links: dict[str, str] = {}
        self._seen: dict[str, dict[tuple[int, int], bytes]] = {}
        self._distrusted: set[str] = set()

    @cached_property
    def files(self) -> dict[str, HubFile]:
        """All files by path (one paginated request); raises KconvError when a name, size or hash cannot be one."""
        url = f"{self._address}/tree/{self.revision}?recursive=true"
        return listing(pages(url, self._headers, self.where), self.where)

    def names(self) -> list[str]:
        """Names of all files, sorted; hidden ones are no part of a checkpoint."""
        return sorted(n for n in self.files if not any(part.startswith(".") for part in n.split("/")))

    def file(self, name: str) -> HubFile:
        """What the Hub states about a file; raises KconvError if there is none."""
        if name not in self.files:
            near = [n for n in self.names() if n.endswith(Path(name).suffix)][:5]
            raise KconvError(
                f"{self.where} has no file {name}", hint=f"it has {', '.join(near)}, ..." if near else None
            )
        return self.files[name]

    def size(self, name: str) -> int:
        """Bytes of one file."""
        return self.file(name).size

    def fingerprint(self, name: str) -> str:
        """The hash the Hub states."""
        return self.file(name).sha256 or self.file(name).git_sha1

    def sha256(self, name: str) -> str | None:
        """What the Hub states of an LFS file."""
        return self.files[name].sha256 if name in self.files else None

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """`length` bytes from `offset` (to the end by default); raises KconvError when the file has fewer.

        A file that is read whole is held against its hash; of a part the digest is kept, and `download` holds the file
        against it.
        """
        n = self.size(name) - offset if length is None else length
        cached = self._cached(name) if (offset, n) == (0, self.size(name)) else None
        if cached and not self.states(name, cached):
            self._distrusted.add(name)
        data = b"".join(self.stream(name, offset, n))
        if (offset, n) == (0, self.size(name)):
            digest = self.digest(name)
            digest.update(data)
            self._hold(name, digest.hexdigest())
        else:
            self._seen.setdefault(name, {})[offset, n] = hashlib.sha256(data).digest()
        return data

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`."""
        done = 0
        for piece in self.stream(name, offset, len(buffer)):
            buffer[done : done + len(piece)] = piece
            done += len(piece)

    def digest(self, name: str) -> Any:
        """A new hash of the kind that the Hub states of a file."""
        file = self.file(name)
        return hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % file.size)

    def _hold(self, name: str, found: str) -> None:
        if found != self.fingerprint(name):
            raise Altered(
                f"{self.where}/{name}: what arrived has another hash than the Hub states",
                hint="nothing of it was kept; the file was altered on the way or at the Hub: check HF_ENDPOINT and proxies, "
                "then run the same command again",
            )

    def stream(self, name: str, offset: int, n: int) -> Iterator[bytes]:
        """Exactly `n` bytes from `offset`, in pieces as they arrive."""
        file = self.file(name)
        if offset < 0 or n < 0 or offset + n > file.size:
            raise KconvError(
                f"{self.where}/{name}: bytes {offset}..{offset + n} asked for, the file has {file.size}",
                hint="the file is cut short, or its header is damaged",
            )
        if cached := self._cached(name):
            for at in range(offset, offset + n, BLOCK):
                yield cached.read(name, at, min(BLOCK, offset + n - at))
            return
        failures = 0
        while n:
            left = n
            error: Exception = Again(200, None)
            try:
                with closing(self._open(file, offset, n)) as pieces:
                    for piece in pieces:
                        if len(piece) > n:
                            raise _more(f"{self.where}/{name}")
                        offset, n = offset + len(piece), n - len(piece)
                        yield piece
            except Exception as e:
                if hopeless(e):
                    raise explain(e, f"{self.where}/{name}") from None
                if not isinstance(e, Again | transport_error()):
                    raise
                error = e
            if n:
                failures = failures + 1 if n == left else 1
                pause(error, failures, f"{self.where}/{name}")

    def _open(self, file: HubFile, offset: int, n: int) -> Generator[bytes, None, None]:
        """One request for `n` bytes; raises Again or a transport error when another may succeed."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import get_session, hf_raise_for_status

        url = hf_hub_url(self.repo_id, file.path, revision=self.revision, endpoint=self.api.endpoint)
        link = self._links.get(file.path)
        headers = {"Range": f"bytes={offset}-{offset + n - 1}", "Accept-Encoding": "identity"}
        if link is None:
            headers = self._headers | headers
        with get_session().stream("GET", link or url, headers=headers, follow_redirects=True, timeout=TIMEOUT) as r:
            if r.status_code in RETRY_STATUS:
                raise Again(r.status_code, stated_pause(r.headers))
            if link is not None and r.status_code in (400, 401, 403, 404):
                self._links.pop(file.path, None)
                raise Again(r.status_code, 0.0)
            try:
                hf_raise_for_status(refusal(r) if r.status_code >= 400 else r)
            except Exception as e:
                raise explain(e, f"{self.where}/{file.path}") from None
            self._check(r, file, offset, n)
            if origin(str(r.url)) != origin(url):
                # A link to the content store is signed and needs no token; the Hub's own redirects do need one.
                self._links[file.path] = str(r.url)
            yield from r.iter_raw()

    def _check(self, response: Any, file: HubFile, offset: int, n: int) -> None:
        """Refuse an answer that is not the range that was asked for."""
        stated = response.headers.get("Content-Range", "")
        total = stated.rpartition("/")[2]
        if response.status_code == 206 and total != str(file.size) and re.fullmatch("[0-9]{1,20}", total):
            raise Altered(
                f"{self.where}/{file.path}: {file.size} bytes by the listing, {total} by the file",
                hint="check HF_ENDPOINT and proxies, then run the same command again",
            )
        packed = response.headers.get("Content-Encoding", "identity").lower()
        if packed != "identity":
            raise EnvironmentLacks(
                f"{self.where}/{file.path}: the server packs what it sends ({printable(packed)[:40]})",
                hint="a proxy between here and the Hub changes bytes; download the files first",
            )
        if response.status_code == 200 and (offset, n) == (0, file.size):
            return
        if response.status_code != 206 or not stated.startswith(f"bytes {offset}-{offset + n - 1}/"):
            raise EnvironmentLacks(
                f"{self.where}/{file.path}: asked for {n} bytes at {offset}, "
                f"the server answered {response.status_code} {printable(stated)[:80]!r}",
                hint="a proxy between here and the Hub ignores Range; download the files first",
            )

    def _cached(self, name: str) -> LocalFiles | None:
        """The snapshot of this commit in the standard cache, if it holds a file with this name and size that may be used."""
        if self._snapshot is None or name in self._distrusted:
            return None
        try:
            return self._snapshot if self._snapshot.size(name) == self.size(name) else None
        except OSError:
            return None

    @cached_property
    def _snapshot(self) -> LocalFiles | None:
        folder = hub_cache.cached_snapshot(self.repo_id, self.revision)
        files = LocalFiles(folder) if folder else None
        return None if files is None or files.unsafe_links() else files

    def download(
        self, name: str, dest: Path, *, progress: Callable[[int], None] | None = None, link: bool = False
    ) -> Path:
        """Download a file to `dest` and hold it against its hash, once more from the start when that is wrong.

        What the standard cache holds with the stated hash is copied from there (`link`: as a hard link, where `dest` is only
        read). `progress` is called with the number of bytes of each piece from the Hub. Raises Altered when the hash is wrong
        again, or when the file differs from what was read of it before.
        """
        if cached := self._cached(name):
            if self.states(name, cached):
                dest.parent.mkdir(parents=True, exist_ok=True)
                bring(cached.path(name), dest, link)
                self._hold_parts(name, dest)
                return dest
            self._distrusted.add(name)
        try:
            return self._download(name, dest, progress)
        except Altered:
            return self._download(name, dest, progress)

    def _download(self, name: str, dest: Path, progress: Callable[[int], None] | None) -> Path:
        """Download a file, going on from an earlier part file, which goes when its content is wrong."""
        file = self.file(name)
        part = dest.with_name(f"{dest.name}.{self.fingerprint(name)[:12]}.part")
        dest.parent.mkdir(parents=True, exist_ok=True)
        digest = self.digest(name)
        with part.open("ab+") as f:
            f.truncate(min(part.stat().st_size, file.size))
            f.seek(0)
            while piece := f.read(1 << 20):
                digest.update(piece)
            for piece in self.stream(name, f.tell(), file.size - f.tell()):
                f.write(piece)
                digest.update(piece)
                if progress:
                    progress(len(piece))
        try:
            self._hold(name, digest.hexdigest())
            self._hold_parts(name, part)
        except Altered:
            part.unlink()
            raise
        os.replace(part, dest)
        return dest

    def holds(self, name: str, path: Path) -> bool:
        """Whether a local file has the hash that the Hub states."""
        if not path.is_file():
            return False
        local = LocalFiles(path.parent)
        try:
            return self.states(name, local, path.name)
        finally:
            local.close()

    def states(self, name: str, files: Files, theirs: str | None = None) -> bool:
        """Whether a file of other files has the hash that the Hub states for `name`."""
        theirs, size = theirs or name, self.size(name)
        if files.size(theirs) != size:
            return False
        digest = self.digest(name)
        for at in range(0, size, BLOCK):
            digest.update(files.read(theirs, at, min(BLOCK, size - at)))
        return bool(digest.hexdigest() == self.fingerprint(name))

    def _hold_parts(self, name: str, path: Path) -> None:
        with path.open("rb") as f:
            for (offset, n), known in self._seen.get(name, {}).items():
                f.seek(offset)
                if hashlib.sha256(f.read(n)).digest() != known:
                    raise Altered(
                        f"{self.where}/{name}: bytes {offset}..{offset + n} were others when they were read alone",
                        hint="the server gives two contents for one file: check HF_ENDPOINT and proxies",
                    )


def bring(source: Path, dest: Path, link: bool) -> None:
    """A copy of a local file at `dest`, complete when it appears; with `link` a hard link where that can be."""
    with contextlib.suppress(OSError):
        if link:
            os.link(source.resolve(), dest)
            return
    part = dest.with_name(f"{dest.name}.part")
    shutil.copyfile(source, part)
    os.replace(part, dest)


def open_hub(source: str) -> Files:
    """The files of an `hf://` source: of the Hub, or of the cache while HF_HUB_OFFLINE is set."""
    repo_id, revision = parse_source(source)
    if hub_cache.is_offline():
        return hub_cache.offline(source, repo_id, revision)
    try:
        return HubFiles(source)
    except EnvironmentLacks as e:
        folder = hub_cache.cached_snapshot(repo_id, revision)
        if folder is None:
            raise
        raise EnvironmentLacks(e.message, hint=f"the cache holds {folder}; HF_HUB_OFFLINE=1 reads that") from None


def listing(rows: list[Any], where: str) -> dict[str, HubFile]:
    """The files of a listing by path; raises Problems with every entry whose name, size or hash cannot be one."""
    files = [r for r in rows if not (isinstance(r, dict) and r.get("type") == "directory")]
    names = [r.get("path") if isinstance(r, dict) else None for r in files]
    wrong = safe_paths.faults(names)
    wrong += [f"{safe_paths.shown(n)} is listed {k} times" for n, k in Counter(map(str, names)).items() if k > 1]
    if not wrong:
        wrong = [f"{safe_paths.shown(r['path'])} {why}" for r in files if (why := _entry_fault(r))]
    if wrong:
        more = [f"and {len(wrong) - MOST_SHOWN} more"] if len(wrong) > MOST_SHOWN else []
        hint = "do not trust this repository or this server (HF_ENDPOINT); nothing was written"
        raise Problems(f"{where}: the Hub lists files that cannot be used:", wrong[:MOST_SHOWN] + more, hint=hint)
    return {r["path"]: HubFile(r["path"], r["size"], (r.get("lfs") or {}).get("oid"), r["oid"]) for r in files}


def _entry_fault(row: dict[str, Any]) -> str | None:
    size, lfs = row.get("size"), row.get("lfs")
    if type(size) is not int or not 0 <= size <= LARGEST_FILE:
        return f"has the size {printable(size)[:40]}"
    if not re.fullmatch(r"[0-9a-f]{40}", str(row.get("oid"))):
        return f"has the blob id {printable(row.get('oid'))[:80]!r}"
    if lfs and not (isinstance(lfs, dict) and re.fullmatch(r"[0-9a-f]{64}", str(lfs.get("oid")))):
        return f"has the LFS entry {printable(lfs)[:80]!r}"
    if lfs and lfs.get("size", size) != size:
        return f"has {size} bytes and {printable(lfs['size'])[:40]} in LFS"
    return None


def _more(name: str) -> EnvironmentLacks:
    return EnvironmentLacks(
        f"{name}: the server sent more bytes than were asked for",
        hint="a proxy between here and the Hub changes what it passes on; download the files first",
    )
