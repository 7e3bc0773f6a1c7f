"""What can go wrong on demand: statuses, rate limits, cut connections, delays, and calls at a chosen request.

| Fault(...) | effect on the matching request |
|---|---|
| `status=503` | that answer instead of the real one, `headers` and `error` with it |
| `status=429, headers={"Retry-After": "2"}` | the rate limit |
| `cut_request=N` | N bytes of the body are read, then the connection is closed |
| `cut_response=N` | N bytes of the answer's body are sent, then the connection is closed |
| `cut_response=0, before=False` | the request is carried out, its answer is lost |
| `delay=S` | S seconds pass first |
| `call=f` | f() runs first (a test kills its client there) |
| `call=f, before=False` | f() runs when the request was carried out, before it is answered |
| `lie=f` | f(Answer) may change the true answer: status, headers, JSON (`tests.hubserver.lies`) or bytes |
| `chunked=True` | the body goes out in chunks, without Content-Length |

`skip` lets the first matches pass, `times` bounds how often it fires (None: always).
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answer:
    """A true answer that a lie may change; `url` is the Hub's address, `other` another host's."""

    status: int
    headers: dict[str, str]
    body: bytes
    url: str
    other: str
    path: str
    authorization: str | None

    def edit(self, change: Callable[[Any], Any]) -> None:
        """Put `change(JSON)` in the place of the body's JSON; None keeps the object that `change` edited."""
        data = json.loads(self.body)
        changed = change(data)
        self.body = json.dumps(data if changed is None else changed).encode()


@dataclass
class Fault:
    """One rule; `path` is a regular expression searched in the path with its query, `method` is exact or '*'."""

    path: str = ""
    method: str = "*"
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    error: str = "injected"
    cut_request: int | None = None
    cut_response: int | None = None
    before: bool = True
    delay: float = 0.0
    call: Callable[[], None] | None = None
    lie: Callable[[Answer], None] | None = None
    chunked: bool = False
    skip: int = 0
    times: int | None = 1
    hits: int = 0

    def matches(self, method: str, path: str) -> bool:
        """Whether the rule is about this request."""
        return self.method in ("*", method) and re.search(self.path, path) is not None


class Faults:
    """The active rules; the first that matches and has shots left fires."""

    def __init__(self) -> None:
        self.rules: list[Fault] = []
        self.lock = threading.Lock()

    def add(self, fault: Fault) -> Fault:
        """Activate a rule."""
        with self.lock:
            self.rules.append(fault)
        return fault

    def clear(self) -> None:
        """Forget all rules."""
        with self.lock:
            self.rules.clear()

    def pick(self, method: str, path: str) -> Fault | None:
        """The rule that fires on this request, if any."""
        with self.lock:
            for fault in self.rules:
                if not fault.matches(method, path):
                    continue
                if fault.skip:
                    fault.skip -= 1
                    continue
                if fault.times is None or fault.hits < fault.times:
                    fault.hits += 1
                    return fault
        return None
