"""What a Hub may lie about, one row a lie: what it does, and the exit code that has to come of `kconv convert`.

| exit code | when |
|---|---|
| 0 | the lie does no harm: the output is that of the honest Hub |
| 2 | what it says or sends cannot be right: nothing is written, nothing is left |
| 3 | it does not answer as a Hub does: something between here and there, or another time |
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.hubserver.faults import Answer, Fault

Change = Callable[[Answer], None]
INFO, TREE = r"^/api/models/[^/]+/[^/]+(/revision/[^/]+)?$", r"/tree/"
SHARD = r"^/objects/"
ANSI = "\x1b]0;owned\x07\x1b[31m"
DEEP = "[" * 100_000 + "]" * 100_000


@dataclass(frozen=True)
class Lie:
    """One row: `files` are seeded besides, `faults` answer, `env` is set; `{outside}` in a path is a folder beside OUT."""

    name: str
    code: int
    make: tuple[Callable[[], Fault], ...] = ()
    files: dict[str, bytes] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    says: str = ""


def told(path: str, change: Change, *, chunked: bool = False, method: str = "GET") -> Callable[[], Fault]:
    """A fault that changes every answer to requests that match."""
    return lambda: Fault(path, method=method, lie=change, chunked=chunked, times=None)


def entry(name: str, **changes: Any) -> Change:
    """Other values in the listing's entry of a file; `lfs` values go into its LFS entry."""

    def edit(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if row["path"].endswith(name):
                row.update({k: v for k, v in changes.items() if k != "lfs"})
                if isinstance(changes.get("lfs"), dict):
                    row["lfs"].update(changes["lfs"])
                elif "lfs" in changes:
                    row["lfs"] = changes["lfs"]

    return lambda answer: answer.edit(edit)


def more(extra: Any) -> Change:
    """One more item in the listing."""
    return lambda answer: answer.edit(lambda rows: [*rows, extra])


def listed(path: Any) -> Any:
    """An item of a listing."""
    return {"type": "file", "path": path, "size": 1, "oid": "0" * 40}


def body(data: bytes, kind: str = "application/json") -> Change:
    """Another body."""

    def change(answer: Answer) -> None:
        answer.body, answer.headers["Content-Type"] = data, kind

    return change


def flipped(answer: Answer) -> None:
    """The last byte of the body is another."""
    answer.body = answer.body[:-1] + bytes([answer.body[-1] ^ 1]) if answer.body else b""


def flipped_when(least: int) -> Change:
    """The last byte is another in bodies of at least so many bytes: in data, not in headers."""
    return lambda answer: flipped(answer) if len(answer.body) >= least else None


def headed(**headers: str) -> Change:
    """Other headers; underscores stand for hyphens."""
    return lambda answer: answer.headers.update({k.replace("_", "-"): v for k, v in headers.items()})


def sent(status: int, data: bytes = b"{}", **headers: str) -> Change:
    """Another answer altogether."""

    def change(answer: Answer) -> None:
        answer.status, answer.body = status, data.replace(b"{auth}", str(answer.authorization).encode())
        answer.headers.clear()
        named = {k.replace("_", "-"): v for k, v in headers.items()}
        answer.headers.update({k: v.format(other=answer.other, path=answer.path, url=answer.url) for k, v in named.items()})

    return change


def longer(answer: Answer) -> None:
    """More bytes than were asked for."""
    if answer.status in (200, 206):
        answer.body += b"\0" * 93


def packed(answer: Answer) -> None:
    """The body packed with gzip, as the answer says."""
    answer.body, answer.headers["Content-Encoding"] = gzip.compress(answer.body), "gzip"


def bomb(answer: Answer) -> None:
    """600 KB that unpack to 600 MB."""
    answer.body, answer.headers["Content-Encoding"] = BOMB, "gzip"


def failing_bomb(answer: Answer) -> None:
    """The same as an error."""
    answer.status = 400
    bomb(answer)


BOMB = gzip.compress(b" " * (600 << 20), 9)


def ranged(text: str) -> Change:
    """Another Content-Range."""
    return lambda answer: headed(Content_Range=text)(answer) if answer.status == 206 else None


def _paths() -> list[Lie]:
    seeded = {
        "absolute": "{outside}/written", "absolute, in a new folder": "{outside}/new/written",
        "up": "../outside/written", "up from within": "a/../../outside/written", "doubled slash": "/{outside}/written",
        "below a file": "config.json/x", "below what is written": "model.safetensors.index.json/x",
        "backslash": "a\\b", "drive": "C:x", "too long": "x" * 300,
    }  # fmt: skip
    rows = [Lie(f"path {what}", 2, files={path: b"evil"}) for what, path in seeded.items()]
    bare = {
        "empty": "", "dot": ".", "dots": "..", "folder": "a/", "nothing within": "a//b", "//tmp/..": "//tmp/..",
        "NUL": "a\0b", "surrogate": "\ud800", "number": 7, "none": None, "list": ["a"], "escape": f"../{ANSI}",
    }  # fmt: skip
    rows += [Lie(f"path {what}", 2, (told(TREE, more(listed(path))),)) for what, path in bare.items()]
    return [*rows, Lie("a path twice", 2, (told(TREE, more(listed("config.json"))),), says="2 times")]


def _entries() -> list[Lie]:
    sizes = {"negative": -1, "fraction": 1.5, "text": "7", "none": None, "true": True, "huge": 10**30, "inexpressible": 1e999}
    rows = [Lie(f"size {what}", 2, (told(TREE, entry("tokenizer_config.json", size=size)),)) for what, size in sizes.items()]
    rows += [Lie(f"size off by {by} of {name}", code, (told(TREE, off(name, by)),))
             for by, code in ((1, 2), (-1, 2)) for name in ("config.json", "tiktoken.model")]  # fmt: skip
    oids = {"a path": "../../x", "none": None, "number": 3, "short": "ab", "upper case": "A" * 40}
    rows += [Lie(f"blob id {what}", 2, (told(TREE, entry("tokenizer_config.json", oid=oid)),)) for what, oid in oids.items()]
    hashes = {"a path": {"oid": "/../../x"}, "none": {"oid": None}, "other size": {"size": 3}}
    rows += [Lie(f"LFS {what}", 2, (told(TREE, entry("tiktoken.model", lfs=lfs)),)) for what, lfs in hashes.items()]
    rows += [Lie(f"LFS as {lfs!r}", 2, (told(TREE, entry("tiktoken.model", lfs=lfs)),)) for lfs in ([1], "x", 7)]
    for name in ("config.json", "tokenizer_config.json", "tokenization_kimi.py"):
        rows.append(Lie(f"wrong git hash of {name}", 2, (told(TREE, entry(name, oid="1" * 40)),), says="another hash"))
    for name in ("tiktoken.model", ".safetensors"):
        rows.append(Lie(f"wrong sha256 of {name}", 2, (told(TREE, entry(name, lfs={"oid": "1" * 64})),), says="another hash"))
    return rows


def off(name: str, by: int) -> Change:
    """A size that is a byte more or less than the file has."""

    def edit(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if row["path"] == name:
                row["size"] += by
                if "lfs" in row:
                    row["lfs"]["size"] += by

    return lambda answer: answer.edit(edit)


def _contents() -> list[Lie]:
    texts = ("config.json", "tokenizer_config.json", "tokenization_kimi.py")
    rows = [Lie(f"altered {n}", 2, (told(rf"resolve-cache.*/{n}", flipped),), says="another hash") for n in texts]
    return [
        *rows,
        Lie("altered objects", 2, (told(SHARD, flipped_when(60_000)),), says="another hash"),
        Lie("altered headers of shards", 2, (told(SHARD, lambda a: setattr(a, "body", a.body.replace(b'"BF16"', b'"F16" '))),)),
        Lie("more bytes, counted", 3, (told(SHARD, longer),), says="more bytes than were asked for"),
        Lie("more bytes, in chunks", 3, (told(SHARD, longer, chunked=True),), says="more bytes than were asked for"),
        Lie("more bytes of config.json, in chunks", 3, (told(r"resolve-cache.*/config\.json", longer, chunked=True),)),
        Lie("packed files", 3, (told(SHARD, packed),), says="packs what it sends"),
        Lie("packed config.json", 3, (told(r"resolve-cache.*/config\.json", packed),), says="packs what it sends"),
        Lie("files packed as br", 3, (told(SHARD, headed(Content_Encoding="br")),), says="packs what it sends"),
        Lie("another range", 3, (told(SHARD, ranged("bytes 1-8/*")),)),
        Lie("a range that is none", 3, (told(SHARD, ranged(f"bytes {ANSI}")),)),
        Lie("another total", 2, (told(SHARD, lambda a: ranged(f"{a.headers.get('Content-Range', '').split('/')[0]}/3")(a)),)),
        Lie("nothing at all", 3, (told(SHARD, lambda a: setattr(a, "body", b"")),), says="gave up"),
        Lie("honest bytes in chunks", 0, (told(SHARD, lambda a: None, chunked=True),)),
    ]


def _answers() -> list[Lie]:
    junk = {
        "HTML": b"<html><body>log in</body></html>", "nothing": b"", "null": b"null", "a number": b"7", "a text": b'"x"',
        "no UTF-8": b"\xff\xfe{", "an endless nest": DEEP.encode(), "a number of 5,000 digits": b"9" * 5000,
    }  # fmt: skip
    rows = [Lie(f"{where} is {what}", 2, (told(path, body(data)),))
            for where, path in (("information", INFO), ("listing", TREE)) for what, data in junk.items()]  # fmt: skip
    shas: dict[str, Any] = {"missing": ..., "none": None, "a path": "../../etc", "short": "abc", "a number": 7, "a list": ["a"]}
    rows += [Lie(f"commit {what}", 2, (told(INFO, commit(sha)),)) for what, sha in shas.items()]
    return [
        *rows,
        Lie("information is a list", 2, (told(INFO, body(b"[]")),)),
        Lie("listing is an object", 2, (told(TREE, body(b"{}")),)),
        Lie("listing is empty", 2, (told(TREE, body(b"[]")),)),
        Lie("listing of texts", 2, (told(TREE, body(b'["config.json"]')),)),
        Lie("listing of lists", 2, (told(TREE, body(b"[[[]]]")),)),
        Lie("information packed", 0, (told(INFO, packed),)),
        Lie("information packed falsely", 2, (told(INFO, headed(Content_Encoding="gzip")),)),
        Lie("information unpacks to 600 MB", 2, (told(INFO, bomb),), says="larger than"),
        Lie("listing unpacks to 600 MB", 2, (told(TREE, bomb),), says="larger than"),
        Lie("information packed as zstd", 2, (told(INFO, headed(Content_Encoding="zstd")),)),
    ]


def commit(sha: Any) -> Change:
    """Another commit in a repository's information; ... for none."""
    return lambda a: a.edit(lambda data: {k: v for k, v in {**data, "sha": sha}.items() if v is not ...})


def _links() -> list[Lie]:
    next_page = {
        "another host": "{other}/more", "itself": "{url}{path}", "a file": "file:///etc/passwd", "no URL": "http://[",
        "another scheme": "ftp://127.0.0.1/x",
    }  # fmt: skip
    rows = [Lie(f"next page on {what}", 2, (told(TREE, paged(link)),)) for what, link in next_page.items()]
    goals = {"itself": "{url}{path}", "a file": "file:///etc/passwd", "another protocol": "gopher://127.0.0.1/"}
    for where, path in (("information", INFO), ("listing", TREE), ("config.json", r"/resolve/.*config\.json")):
        rows += [Lie(f"{where} redirects to {what}", 2, (told(path, sent(302, Location=goal)),)) for what, goal in goals.items()]
        rows.append(Lie(f"{where} redirects to another host", 2, (told(path, sent(302, Location="{other}/x?Signature=s3cr3t")),)))
    return rows


def paged(link: str) -> Change:
    """A link to a further page."""
    return lambda a: a.headers.update(Link=f'<{link.format(other=a.other, url=a.url, path=a.path)}>; rel="next"')


def _errors() -> list[Lie]:
    said = {
        "errors that are no list": b'{"errors": 7}', "errors of numbers": b'{"errors": [1, 2]}', "a list": b"[1]",
        "an endless nest": DEEP.encode(), "terminal commands": json.dumps({"error": ANSI}).encode(),
        "the token": b'{"error": "got {auth}"}', "the bare header": b"authorization: {auth}", "no UTF-8": b"\xff\xfe",
    }  # fmt: skip
    rows = [Lie(f"400 with {what}", 2, (told(INFO, sent(400, data)),)) for what, data in said.items()]
    rows += [Lie(f"{status} of the listing with the token", 2, (told(TREE, sent(status, b'{"error": "{auth}"}')),))
             for status in (401, 403, 404, 418)]  # fmt: skip
    rows.append(Lie("an error that unpacks to 600 MB", 2, (told(INFO, failing_bomb),)))
    waits = {"a fraction": "0.5", "a negative": "-5", "a word": "soon", "a date": "Wed, 21 Oct 2015 07:28:00 GMT",
             "a power": "²", "nothing": ""}  # fmt: skip
    rows += [Lie(f"429 for good, Retry-After {w}", 3, (told(INFO, sent(429, Retry_After=v)),)) for w, v in waits.items()]
    longest = {"ages": "9" * 200, "a far date": "Wed, 21 Oct 2065 07:28:00 GMT", "no date": "Wed, 99 Oct 99999 07:28:00 GMT"}
    rows += [Lie(f"429 for good, Retry-After {w}", 3, (told(INFO, sent(429, Retry_After=v)),)) for w, v in longest.items()]
    rows.append(Lie("signed links that are refused", 2, (told(SHARD, sent(404, b"<Error>https://store.example/x?Signature=s3cr3t&Expires=9</Error>")),)))
    rows.append(Lie("500 for good", 3, (told(TREE, sent(500)),)))
    rows.append(Lie("header with terminal commands", 2, (told(INFO, sent(403, X_Error_Message=ANSI)),)))
    return rows


def _environment() -> list[Lie]:
    return [
        Lie("a token that is not ASCII", 2, env={"HF_TOKEN": "hf_geheim€ä"}, says="token"),
        Lie("a token with a newline inside", 2, env={"HF_TOKEN": "hf_geheim\x0bx"}, says="token"),
        Lie("an unknown token", 2, env={"HF_TOKEN": "hf_nobody_knows_it"}),
    ]


ACCOUNT, CARD, REFS = r"/whoami-v2", r"/validate-yaml", r"/refs"
PUBLISHING = [
    Lie(f"{where}: {what}", 2, (told(path, body(data), method="*"),))
    for where, path in (("account", ACCOUNT), ("card", CARD), ("refs", REFS), ("information", INFO), ("listing", TREE))
    for what, data in {
        "HTML": b"<html>", "a list of texts": b'["x"]', "null": b"null", "an endless nest": DEEP.encode(), "a text": b'"x"',
    }.items()
] + [
    Lie(f"{where}: 403 with the token", 2, (told(path, sent(403, b'{"error": "{auth} \x1b[31m"}'), method="*"),))
    for where, path in (("account", ACCOUNT), ("card", CARD), ("refs", REFS), ("listing", TREE))
] + [
    Lie("card: errors that are no list", 2, (told(CARD, sent(400, b'{"errors": 7}'), method="*"),)),
    Lie("card: an error with terminal commands", 2,
        (told(CARD, sent(400, json.dumps({"errors": [{"message": ANSI}]}).encode()), method="*"),)),
]  # fmt: skip

LIES = [*_paths(), *_entries(), *_contents(), *_answers(), *_links(), *_errors(), *_environment()]
