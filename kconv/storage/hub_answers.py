"""Asking the Hub's API: one JSON answer or a list over pages, bounded in size, of the right form, from the Hub's own address.

| an answer | what is done |
|---|---|
| larger than `LARGEST` once unpacked, or in over `MOST_PAGES` pages | refused before more of it is read |
| no JSON, or JSON of another form | refused, with what came instead |
| the next page on another host, or one that was there before | refused: a token must not go there |
| redirects in a circle, or to no web address | refused at once, not repeated |
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urljoin, urlsplit

from kconv.errors import KconvError
from kconv.storage.hub_http import TIMEOUT, patiently
from kconv.text.printable import printable
from kconv.text.redaction import remember

LARGEST = 64 << 20
LARGEST_ERROR = 1 << 16
MOST_SAID = 500
MOST_PAGES = 2_000
MOST_ITEMS = 500_000


def origin(url: str) -> tuple[str, str]:
    """Scheme and host of a URL: where a token may go."""
    parts = urlsplit(url)
    return parts.scheme, parts.netloc.rpartition("@")[2]


def headers_for(token: str | bool | None) -> dict[str, str]:
    """The request headers of huggingface_hub with the user's token, which is kept out of all output from now on."""
    from huggingface_hub.utils import build_hf_headers

    headers = build_hf_headers(token=token)
    sent = headers.get("authorization", "").removeprefix("Bearer ")
    remember(sent)
    if not sent.isascii() or not sent.isprintable():
        raise KconvError(
            "the Hub token holds characters that no token has", hint="set HF_TOKEN again, copied from the Hub's settings page"
        )
    return headers


def get_json(url: str, headers: dict[str, str], where: str) -> Any:
    """The JSON that a URL answers; raises KconvError where it answers something else."""
    return patiently(lambda: _ask(url, headers, where), where)[0]


def pages(url: str, headers: dict[str, str], where: str) -> list[Any]:
    """All items of a list over its pages."""
    items: list[Any] = []
    for page in _each_page(url, headers, where):
        if not isinstance(page, list):
            raise _unexpected(where, page)
        items += page
        if len(items) > MOST_ITEMS:
            raise KconvError(f"{where}: the Hub's list goes on beyond {MOST_ITEMS:,} files", hint="no checkpoint has so many")
    return items


def _each_page(url: str, headers: dict[str, str], where: str) -> Iterator[Any]:
    seen: set[str] = set()
    following: str | None = url
    while following is not None:
        seen.add(following)
        page, link = patiently(lambda at=following: _ask(at, headers, where), where)  # type: ignore[misc]
        yield page
        following = _next_page(url, following, link, where)
        if following in seen or len(seen) > MOST_PAGES:
            raise KconvError(f"{where}: the Hub's list has no end", hint="check HF_ENDPOINT")


def _next_page(first: str, url: str, link: str | None, where: str) -> str | None:
    """The address of the page after `url`; raises KconvError when it is not the Hub's own."""
    if not link:
        return None
    try:
        following = urljoin(url, link)
        if origin(following) == origin(first):
            return following
    except ValueError:
        pass
    raise KconvError(
        f"{where}: the Hub's list goes on at another host, {printable(link)[:80]}",
        hint="nothing was sent there; check HF_ENDPOINT",
    )


def _ask(url: str, headers: dict[str, str], where: str) -> tuple[Any, str | None]:
    """The JSON of one request, and the link to the next page."""
    from huggingface_hub.utils import get_session, hf_raise_for_status

    wanted = {**headers, "Accept-Encoding": "gzip, identity"}
    with get_session().stream("GET", url, headers=wanted, follow_redirects=True, timeout=TIMEOUT) as response:
        hf_raise_for_status(refusal(response) if response.status_code >= 400 else response)
        body = bounded(response, LARGEST)
        if body is None:
            raise KconvError(f"{where}: the Hub's answer is larger than {LARGEST:,} bytes", hint="check HF_ENDPOINT")
        link = response.links.get("next", {}).get("url")
    try:
        return json.loads(body), link
    except (ValueError, RecursionError):
        raise _unexpected(where, body[:80].decode("utf-8", "replace")) from None


def bounded(response: Any, most: int) -> bytes | None:
    """The unpacked body of a streamed response; None when it is larger than `most` bytes."""
    body = bytearray()
    if response.headers.get("Content-Encoding", "identity").lower() not in ("identity", "gzip", "deflate"):
        return None  # others unpack a few KB to gigabytes in one step
    for piece in response.iter_bytes():
        body += piece
        if len(body) > most:
            return None
    return bytes(body)


def refusal(response: Any) -> Any:
    """A streamed error as huggingface_hub expects one: read, of bounded size, its text in the field `error`.

    The client takes the form of an error's body for granted and fails on any other.
    """
    headers = [(k, v) for k, v in response.headers.raw if not k.lower().startswith((b"content-", b"transfer-"))]
    body = json.dumps({"error": _said(response)}).encode()
    return type(response)(response.status_code, headers=headers, content=body, request=response.request)


def _said(response: Any) -> str:
    body = (bounded(response, LARGEST_ERROR) or b"").decode("utf-8", "replace")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return "" if "html" in response.headers.get("Content-Type", "") else printable(body[:MOST_SAID])
    said = value.get("error") or value.get("errors") or value.get("error_description") if isinstance(value, dict) else value
    return printable(said if isinstance(said, str) else json.dumps(said))[:MOST_SAID] if said else ""


def _unexpected(where: str, found: Any) -> KconvError:
    text = printable(found if isinstance(found, str) else json.dumps(found))[:80]
    return KconvError(
        f"{where}: the Hub answered something else than was asked for: {text!r}",
        hint="check HF_ENDPOINT, and whether a proxy or a login page stands between",
    )


def field(answer: Any, name: str, kind: type, where: str) -> Any:
    """A field of an answer; raises KconvError where it is not there or of another type."""
    value = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise _unexpected(where, answer)
    return value
