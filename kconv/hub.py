"""Reading from the Hub: a revision pinned to a commit, byte ranges that survive cut connections, resumable downloads.

| what happens | what is done |
|---|---|
| a branch moves while we read | it was resolved to a commit once; every request names the commit |
| the connection is cut after k bytes | the rest is asked for from byte k; only attempts without progress add up |
| 429 | `Retry-After` or the `RateLimit` header is waited out |
| 408, 5xx, no connection | retried with growing pauses, up to `hub_http.RETRIES` times in a row |
| a signed link of the content store has run out (403) | a new one is fetched from the Hub |
| 401, 403, 404 | one clear error at once: no such repository, revision or file, no token, gated |
| a server ignores Range | refused: reading 8 bytes must not fetch 16 GB |

huggingface_hub 2.4 downloads into a unique temporary file and deletes it on failure, so a killed download of a 16 GB
shard starts again from nothing (read in its `file_download._download_to_tmp_and_move`); `HubFiles.download` keeps the
part file.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kconv.errors import EnvironmentLacks, KconvError
from kconv.hub_http import RETRY_STATUS, TIMEOUT, Again, explain, patiently, pause, stated_pause, transport_error

SOURCE = re.compile(r"hf://(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[^@]+))?/?")


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


class HubFiles:
    """The files of a Hub repository at one commit; offers what `kconv.files.Files` asks for. Safe to use from threads.

    Args:
        source: `hf://owner/name[@revision]`; a branch or tag is resolved to its commit, once.
        token: a token to use instead of the environment's.

    `revision` is the 40-hex commit. Raises KconvError for what does not exist or may not be seen, EnvironmentLacks when
    the Hub cannot be reached.
    """

    def __init__(self, source: str, *, token: str | None = None) -> None:
        from huggingface_hub import HfApi

        self.repo_id, self.requested = parse_source(source)
        self.where = f"hf://{self.repo_id}" + (f"@{self.requested}" if self.requested else "")
        self.api = HfApi(token=token)
        info = patiently(
            lambda: self.api.model_info(self.repo_id, revision=self.requested, timeout=TIMEOUT), self.where
        )
        self.private, self.revision = bool(info.private), info.sha or ""
        if not re.fullmatch(r"[0-9a-f]{40}", self.revision):
            raise KconvError(f"{self.where}: the Hub named no commit for this revision")
        self._links: dict[str, str] = {}

    @cached_property
    def files(self) -> dict[str, HubFile]:
        """All files by path (one paginated request)."""
        from huggingface_hub.hf_api import RepoFile

        listed = patiently(
            lambda: list(self.api.list_repo_tree(self.repo_id, recursive=True, revision=self.revision)), self.where
        )
        rows = [f for f in listed if isinstance(f, RepoFile)]
        return {f.path: HubFile(f.path, f.size, f.lfs.sha256 if f.lfs else None, f.blob_id) for f in rows}

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

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """`length` bytes from `offset` (to the end by default); raises KconvError when the file has fewer."""
        return b"".join(self.stream(name, offset, self.size(name) - offset if length is None else length))

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`."""
        done = 0
        for piece in self.stream(name, offset, len(buffer)):
            buffer[done : done + len(piece)] = piece
            done += len(piece)

    def stream(self, name: str, offset: int, n: int) -> Iterator[bytes]:
        """Exactly `n` bytes from `offset`, in pieces as they arrive."""
        file = self.file(name)
        if offset < 0 or n < 0 or offset + n > file.size:
            raise KconvError(
                f"{self.where}/{name}: bytes {offset}..{offset + n} asked for, the file has {file.size}",
                hint="the file is cut short, or its header is damaged",
            )
        failures = 0
        while n:
            left = n
            error: Exception = Again(200, None)
            try:
                with closing(self._open(file, offset, n)) as pieces:
                    for piece in pieces:
                        offset, n = offset + len(piece), n - len(piece)
                        yield piece
            except (Again, transport_error()) as e:
                error = e
            if n:
                failures = failures + 1 if n == left else 1
                pause(error, failures, f"{self.where}/{name}")

    def _open(self, file: HubFile, offset: int, n: int) -> Generator[bytes, None, None]:
        """One request for `n` bytes; raises Again or a transport error when another may succeed."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        url = hf_hub_url(self.repo_id, file.path, revision=self.revision, endpoint=self.api.endpoint)
        link = self._links.get(file.path)
        headers = {"Range": f"bytes={offset}-{offset + n - 1}", "Accept-Encoding": "identity"}
        if link is None:
            headers = build_hf_headers(token=self.api.token, headers=headers)
        with get_session().stream("GET", link or url, headers=headers, follow_redirects=True, timeout=TIMEOUT) as r:
            if r.status_code in RETRY_STATUS:
                raise Again(r.status_code, stated_pause(r.headers))
            if link is not None and r.status_code in (400, 401, 403, 404):
                self._links.pop(file.path, None)
                raise Again(r.status_code, 0.0)
            try:
                hf_raise_for_status(r)
            except Exception as e:
                raise explain(e, f"{self.where}/{file.path}") from e
            self._check(r, file, offset, n)
            if _origin(str(r.url)) != _origin(url):
                # A link to the content store is signed and needs no token; the Hub's own redirects do need one.
                self._links[file.path] = str(r.url)
            yield from r.iter_raw()

    def _check(self, response: Any, file: HubFile, offset: int, n: int) -> None:
        """Refuse an answer that is not the range that was asked for."""
        stated = response.headers.get("Content-Range", "")
        if response.status_code == 200 and (offset, n) == (0, file.size):
            return
        if response.status_code != 206 or not stated.startswith(f"bytes {offset}-{offset + n - 1}/"):
            raise EnvironmentLacks(
                f"{self.where}/{file.path}: asked for {n} bytes at {offset}, "
                f"the server answered {response.status_code} {stated!r}",
                hint="a proxy between here and the Hub ignores Range; download the files first",
            )
        total = stated.rsplit("/", 1)[1]
        if total not in ("*", str(file.size)):
            raise KconvError(f"{self.where}/{file.path}: {file.size} bytes by the listing, {total} by the file")

    def download(self, name: str, dest: Path, *, progress: Callable[[int], None] | None = None) -> Path:
        """Download a file to `dest`, going on from an earlier part file; the content's hash is checked.

        `progress` is called with the number of bytes of each piece. Raises KconvError when the hash is wrong.
        """
        file = self.file(name)
        part = dest.with_name(f"{dest.name}.{self.fingerprint(name)[:12]}.part")
        dest.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % file.size)
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
        if digest.hexdigest() != self.fingerprint(name):
            part.unlink()
            raise KconvError(
                f"{self.where}/{name}: what arrived has another hash than the Hub states", hint="run again"
            )
        os.replace(part, dest)
        return dest


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc
