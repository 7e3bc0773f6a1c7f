"""HTTP below the Hub's protocol: requests, responses (bytes or file ranges), faults, and the log of what moved."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from tests.hubserver.faults import Answer, Fault

if TYPE_CHECKING:
    from tests.hubserver.server import HubServer

PIECE = 1 << 16


@dataclass
class Record:
    """One request as it happened: `received` and `sent` count body bytes, `status` 0 means the connection was cut."""

    origin: str
    method: str
    path: str
    authorization: str | None
    status: int = 0
    received: int = 0
    sent: int = 0


@dataclass
class Response:
    """An answer; `file` sends a slice of a file, with Range honoured."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    file: Path | None = None

    @classmethod
    def json(cls, data: Any, status: int = 200, **headers: str) -> Response:
        """A JSON answer; header names are given with underscores."""
        named = {k.replace("_", "-"): v for k, v in headers.items()}
        return cls(status, json.dumps(data).encode(), {"Content-Type": "application/json", **named})

    @classmethod
    def error(cls, status: int, message: str, code: str | None = None) -> Response:
        """An error as the Hub words it: `error` in the body, X-Error-Code and X-Error-Message."""
        headers = {"X_Error_Message": message} | ({"X_Error_Code": code} if code else {})
        return cls.json({"error": message}, status, **headers)


class Cut(Exception):
    """The connection was closed on purpose."""


@dataclass
class Request:
    """One request; the body is read once, by `body()` or `save()`."""

    method: str
    path: str
    query: dict[str, str]
    headers: Message
    handler: Handler
    groups: dict[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        """The whole body."""
        return b"".join(self.handler.pieces())

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body() or b"null")

    def save(self, path: Path) -> int:
        """The body, written to `path`; its size."""
        with path.open("wb") as f:
            for piece in self.handler.pieces():
                f.write(piece)
            return f.tell()


class Handler(BaseHTTPRequestHandler):
    """Dispatches to the application's routes, applies faults, records."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # 40 ms a request otherwise
    server: Origin
    record: Record
    fault: Fault | None
    consumed: bool

    def pieces(self) -> Iterator[bytes]:
        """The body in pieces, with or without Content-Length; raises Cut when a fault or the client ends it early."""
        if self.consumed:
            return
        self.consumed = True
        for piece in self._chunks() if self.headers.get("Transfer-Encoding") == "chunked" else self._counted():
            self.record.received += len(piece)
            yield piece
            limit = self.fault.cut_request if self.fault else None
            if limit is not None and self.record.received >= limit:
                raise Cut

    def _counted(self) -> Iterator[bytes]:
        left = int(self.headers.get("Content-Length") or 0)
        while left:
            size = PIECE if self.fault is None or self.fault.cut_request is None else max(1, self.fault.cut_request)
            piece = self.rfile.read(min(left, size))
            if not piece:
                raise Cut
            left -= len(piece)
            yield piece

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline().split(b";")[0] or b"0", 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        query = {k: v[-1] for k, v in parse_qs(parts.query, keep_blank_values=True).items()}
        request = Request(self.command, parts.path, query, self.headers, self)
        self.record = Record(self.server.name, self.command, self.path, self.headers.get("Authorization"))
        self.server.app.log.append(self.record)
        self.fault = self.server.app.faults.pick(self.command, self.path)
        self.consumed = False
        try:
            response = self._answer(request)
            request.body()  # what no route read would be taken for the next request
            if self.fault is not None and self.fault.call and not self.fault.before:
                self.fault.call()
            self._send(response)
        except (Cut, ConnectionError):
            self.close_connection = True
            with suppress(OSError):  # the client may be gone already
                self.connection.shutdown(socket.SHUT_RDWR)

    def _answer(self, request: Request) -> Response:
        fault = self.fault
        if fault is not None:
            if fault.call and fault.before:
                fault.call()
            time.sleep(fault.delay)
            if fault.status is not None:
                request.body()
                headers = {k.replace("-", "_"): v for k, v in fault.headers.items()}
                return Response.json({"error": fault.error}, fault.status, **headers)
            if fault.cut_response == 0 and fault.before:
                raise Cut
        for method, pattern, function in self.server.routes:
            match = re.fullmatch(pattern, request.path)
            if match and request.method in method.split("|"):
                request.groups = match.groupdict()
                return function(self.server.app, request)
        return Response.error(404, f"no route {request.method} {request.path}")

    def _send(self, response: Response) -> None:
        if self.fault is not None and self.fault.cut_response == 0:
            raise Cut
        start, end = self._slice(response)
        if self.fault is not None and self.fault.lie:
            response = self._lied(response, start, end)
            start, end = 0, len(response.body)
        self.record.status = response.status
        self.send_response(response.status)
        for name, value in response.headers.items():
            self.send_header(name, value)
        chunked = self.fault is not None and self.fault.chunked
        self.send_header(*(("Transfer-Encoding", "chunked") if chunked else ("Content-Length", str(end - start))))
        self.end_headers()
        if self.command == "HEAD":
            return
        source = _file_pieces(response.file, start, end) if response.file else iter([response.body] if end else [])
        for piece in source:
            self._write(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
        if chunked:
            self.wfile.write(b"0\r\n\r\n")

    def _lied(self, response: Response, start: int, end: int) -> Response:
        """The answer as the fault's lie tells it."""
        assert self.fault is not None
        assert self.fault.lie is not None
        body = b"".join(_file_pieces(response.file, start, end)) if response.file else response.body
        app, sent = self.server.app, self.headers.get("Authorization")
        answer = Answer(response.status, dict(response.headers), body, app.url, app.cdn.url, self.path, sent)
        self.fault.lie(answer)
        return Response(answer.status, answer.body, answer.headers)

    def _slice(self, response: Response) -> tuple[int, int]:
        if response.file is None:
            return 0, len(response.body)
        size = response.file.stat().st_size
        response.headers["Accept-Ranges"] = "bytes"
        match = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or "")
        if not match or self.server.app.ignore_ranges:
            return 0, size
        start = int(match[1]) if match[1] else max(0, size - int(match[2]))
        end = min(size, int(match[2]) + 1) if match[1] and match[2] else size
        if start >= size:
            response.status, response.file, response.body = 416, None, b""
            response.headers["Content-Range"] = f"bytes */{size}"
            return 0, 0
        response.status = 206
        response.headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        return start, end

    def _write(self, piece: bytes) -> None:
        limit = self.fault.cut_response if self.fault else None
        if limit is not None:
            piece = piece[: max(0, limit - self.record.sent)]
        self.record.sent += len(piece)  # before the client can have it, so that a test that counts is never early
        self.wfile.write(piece)
        if limit is not None and self.record.sent >= limit:
            self.wfile.flush()
            raise Cut

    def log_message(self, *args: object) -> None:
        """Nothing on stderr; the application keeps its own log."""

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve


def _file_pieces(path: Path, start: int, end: int) -> Iterator[bytes]:
    with path.open("rb") as f:
        f.seek(start)
        while start < end and (piece := f.read(min(PIECE, end - start))):
            start += len(piece)
            yield piece


class Origin(ThreadingHTTPServer):
    """One listening address: the Hub itself or its content store."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, app: HubServer, name: str, routes: list[Any]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.app, self.name, self.routes = app, name, routes

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keep a server-side traceback where the test can see it."""
        import sys
        import traceback

        if isinstance(sys.exception(), ConnectionError):
            return
        self.app.errors.append(traceback.format_exc())


__all__ = ["Cut", "Fault", "Handler", "Origin", "Record", "Request", "Response"]
