"""A Hub that answers wrongly: the test Hub with some of its answers altered on the way out.

| lie | about |
|---|---|
| a row of `tests.hubserver.lies` | as that table has it |
| json | an answer of the API, mutated as any JSON |
| path, more, size, hash | a row of the listing: a name out of the folder, a row more, another size or hash |
| page | the link to the next page: the same page, another host, no address |
| status | a status of any kind, with odd headers, echoing what was sent |
| text | an answer that is no JSON, or not of the shape that was asked for |
| content | a file's bytes altered, cut, longer, or compressed |
| header | of a file: range, length, encoding, type, redirects in a circle |
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.edits_json import edit_text, paths_out
from tests.fuzz.trial import TOKEN
from tests.hubserver import lies as tabled
from tests.hubserver.server import HubServer
from tests.hubserver.wire import Request, Response

STATUSES = (200, 204, 206, 300, 301, 302, 304, 307, 308, 400, 401, 403, 404, 405, 408, 409, 410, 416, 418, 429, 451,
            500, 502, 503, 504, 599)  # fmt: skip
ODD = {
    "Retry-After": ["-5", "soon", "1e9", "99999999999999", "Wed, 99 Foo 2026 99:99:99 GMT", "²"],
    "RateLimit": ['"api";r=0;t=999999999999999', "r=;t=", "\x7f"],
    "Location": ["/", "http://127.0.0.1:1/x", "//", "http://[::1", "file:///etc/passwd", ""],
    "X-Error-Code": ["RepoNotFound", "GatedRepo", "EntryNotFound", "RevisionNotFound", "\x1b[31m"],
    "X-Error-Message": ["\x1b[31mred", f"token {TOKEN}", "x" * 5000],
    "Link": ['<>; rel="next"', "rubbish"],
}  # fmt: skip


class LyingHub(HubServer):
    """The test Hub whose answers to some requests are altered by `lies`."""

    def __init__(self, folder: Path, rng: Random, decoy: Path) -> None:
        super().__init__(folder)
        self.rng, self.decoy = rng, decoy
        self.lies: list[Lie] = []
        self.tokens[TOKEN] = {"name": "me", "orgs": ["lab"], "role": "write"}
        self.held = folder.parent / "held"
        self.held.mkdir()

    def __enter__(self) -> LyingHub:
        super().__enter__()
        for origin in (self.hub, self.cdn):
            origin.routes = [(m, p, self._altered(f)) for m, p, f in origin.routes]
        return self

    def lie(self) -> str:
        """Begin to lie in one more way; which. A third of them are rows of the table `tests.hubserver.lies`."""
        return self._tabled() if self.rng.random() < 0.35 else self._diced()

    def _tabled(self) -> str:
        row = self.rng.choice(TABLED)
        for make in row.make:
            self.faults.add(make())
        if row.files:
            self.seed("lab/model", {path.format(outside=self.decoy): data for path, data in row.files.items()})
        os.environ |= row.env
        return f"the table's {row.name!r}"

    def _diced(self) -> str:
        name = self.rng.choice(list(LIES))
        where = self.rng.choice(WHERE[name])
        lie = Lie(name, where, Random(self.rng.random()), self.rng.choice([1, 1, 2, 10**9]), self.rng.choice([0, 0, 0, 1, 2]))
        self.lies.append(lie)
        return f"{name} about {where!r}, {lie.times} times after {lie.skip}"

    def _altered(self, function: Callable[..., Response]) -> Callable[..., Response]:
        def answer(app: Any, request: Request) -> Response:
            response = function(app, request)
            for lie in self.lies:
                if lie.fires(request):
                    response = LIES[lie.name](self, request, response, lie.rng)
            return response

        return answer


class Lie:
    """One way of lying: what, about which requests, from which match on, how often."""

    def __init__(self, name: str, where: str, rng: Random, times: int, skip: int) -> None:
        self.name, self.where, self.rng, self.times, self.skip = name, where, rng, times, skip

    def fires(self, request: Request) -> bool:
        """Whether this request is answered with it."""
        if not re.search(self.where, request.path):
            return False
        self.skip, self.times = (self.skip - 1, self.times) if self.skip > 0 else (0, self.times - 1)
        return self.skip == 0 and self.times >= 0


def _json(hub: LyingHub, request: Request, response: Response, rng: Random) -> Response:
    response.body, _ = edit_text(response.body, rng, hub.decoy) if response.body else (b"", "")
    return response


def _row(change: Callable[[LyingHub, list[Any], Random], None]) -> Callable[..., Response]:
    def lie(hub: LyingHub, request: Request, response: Response, rng: Random) -> Response:
        try:
            rows = json.loads(response.body)
            change(hub, rows, rng)
        except (ValueError, LookupError, TypeError, AttributeError):
            return response
        response.body = json.dumps(rows).encode()
        return response

    return lie


def _path(hub: LyingHub, rows: list[Any], rng: Random) -> None:
    row = rng.choice(rows)
    row["path"] = rng.choice(paths_out(hub.decoy))


def _more(hub: LyingHub, rows: list[Any], rng: Random) -> None:
    row = dict(rng.choice(rows))
    row["path"] = rng.choice([*paths_out(hub.decoy), "more.json", "LICENSE", "model-00099-of-00099.safetensors", row["path"]])
    rows.append(row)


def _size(hub: LyingHub, rows: list[Any], rng: Random) -> None:
    row = rng.choice(rows)
    new = rng.choice([0, -1, row["size"] + 1, row["size"] - 1, 10**15, 2**70, str(row["size"]), None, 1.5])
    row["size"] = new
    if "lfs" in row and rng.random() < 0.7:
        row["lfs"]["size"] = new


def _hash(hub: LyingHub, rows: list[Any], rng: Random) -> None:
    row = rng.choice(rows)
    holder = row["lfs"] if "lfs" in row and rng.random() < 0.6 else row
    holder["oid"] = rng.choice(["0" * 64, "", None, "x", holder["oid"][::-1], "../" * 8, 7])
    if rng.random() < 0.2:
        row.pop("lfs", None)


def _page(hub: LyingHub, request: Request, response: Response, rng: Random) -> Response:
    here = f"{hub.url}{request.path}?recursive=true"
    there = f"{hub.cdn.url}{request.path}?recursive=true"
    target = rng.choice([here, there, "", "/", "ftp://x/y", "http://127.0.0.1:1/", "http://[::1", "\x1b]0;x"])
    response.headers["Link"] = f'<{target}>; rel="next"'.encode("latin-1", "replace").decode("latin-1")
    return response


def _status(hub: LyingHub, request: Request, response: Response, rng: Random) -> Response:
    sent = request.headers.get("Authorization") or ""
    said = rng.choice(["no", f"you sent {sent}", "\x1b[31mred", "see http://x/y?X-Amz-Signature=abcdef0123456789", "\ud800"])
    made = Response.json({"error": said}, rng.choice(STATUSES))
    return _headers(hub, request, made, rng) if rng.random() < 0.7 else made


def _headers(hub: LyingHub, request: Request, response: Response, rng: Random) -> Response:
    for name in rng.sample(list(ODD), 2):
        value = rng.choice([*ODD[name], hub.url + request.path])
        response.headers[name] = value.encode("latin-1", "replace").decode("latin-1")
    return response


def _text(hub: LyingHub, request: Request, response: Response, rng: Random) -> Response:
    short = [b"", b"null", b"[]", b"{}", b"7", b'"x"', b"\xff\xfe", b"[null]", b"[[]]"]
    response.body = rng.choice([*short, b"<html>busy</html>", b"[" * 100_000])
    return response


def _content(hub: LyingHub, request: Request, response: Response, rng: Random) -> Response:
    if response.file is None:
        return response
    blob = bytearray(response.file.read_bytes())
    at = rng.randrange(len(blob)) if blob else 0
    way = rng.choice(["flip", "cut", "longer", "gzip", "other"])
    if way == "flip" and blob:
        blob[at] ^= 1
    elif way == "cut":
        del blob[at:]
    elif way == "gzip":
        response.headers["Content-Encoding"] = "gzip"
        blob = bytearray(gzip.compress(rng.choice([bytes(blob), bytes(50 << 20)])))
    else:
        blob += bytes(rng.choice([1, 100, 100_000]))
    altered = hub.held / f"{len(list(hub.held.iterdir()))}"
    altered.write_bytes(blob)
    response.file = altered
    return response


def _header(hub: LyingHub, request: Request, response: Response, rng: Random) -> Response:
    options = {
        "Content-Range": ["bytes 0-7/8", "bytes */*", "bytes 5-1/3", "x", "bytes 0-99999999999/99999999999"],
        "Content-Encoding": ["gzip", "br", "zstd", "rubbish", "identity"],
        "Content-Type": ["text/html", "application/json; charset=utf-99"],
        "Location": [f"{hub.url}{request.path}", "//", "file:///etc/passwd"],
        "ETag": ["", '"x"'], "X-Repo-Commit": ["../..", "0" * 40], "X-Linked-Size": ["-1", "x"], "X-Linked-Etag": ["/../.."],
    }  # fmt: skip
    for name in rng.sample(list(options), 2):
        response.headers[name] = rng.choice(options[name])
    if "Location" in response.headers and rng.random() < 0.5:
        response.status, response.file = 302, None
    return response


TABLED = tabled.LIES
LIES: dict[str, Callable[..., Response]] = {
    "json": _json, "path": _row(_path), "more": _row(_more), "size": _row(_size), "hash": _row(_hash), "page": _page,
    "status": _status, "text": _text, "content": _content, "header": _header,
}  # fmt: skip
LISTING, ANY = ["/tree/"], ["", "/api/models", "/tree/", "/resolve/", "/revision/"]
FILES = ["/objects/|/resolve/", "tiktoken|tokenizer|config", "/objects/"]
WHERE = dict.fromkeys(LIES, LISTING) | {"status": ANY, "text": ANY, "content": FILES, "header": FILES}
WHERE["json"] = ["/api/models", "/tree/", "/revision/|models/[^/]+/[^/]+$"]
