"""Credentials kept out of whatever is said: errors, `--json`, logs; the one place.

| in a text | becomes |
|---|---|
| a token that this process uses, as it is or quoted for a URL | `[redacted]` |
| anything that looks like a Hugging Face token | `[redacted]` |
| `Authorization: ...`, `Bearer ...` | `Bearer [redacted]` |
| `https://user:password@host` | `https://[redacted]@host` |
| the query of a URL (signed links of the content store) | `?[redacted]` |
"""

from __future__ import annotations

import logging
import os
import re
from urllib.parse import quote

GONE = "[redacted]"
SHORTEST = 4
VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
PATTERNS = (
    (re.compile(r"(?i)(\bauthorization[\"']?\s*[:=]\s*[\"']?)(?:\w+ +)?[^\s\"',;]+"), rf"\1{GONE}"),
    (re.compile(r"(?i)\b(bearer)\s+[A-Za-z0-9._~+/=-]{4,}"), rf"\1 {GONE}"),
    (re.compile(r"\b([a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s\"'<>@]*@"), rf"\1{GONE}@"),
    (re.compile(r"\b([a-zA-Z][a-zA-Z0-9+.-]*://[^\s\"'<>?]*)\?[^\s\"'<>)]+"), rf"\1?{GONE}"),
    (re.compile(r"\bhf_[A-Za-z0-9_]{8,}"), GONE),
)
_known: set[str] = set()


def remember(secret: str | None) -> None:
    """Keep a token out of everything said from now on."""
    if secret and len(secret) >= SHORTEST:
        _known.add(secret)


def redacted(text: str) -> str:
    """`text` without a credential."""
    secrets = {*_known, *(os.environ.get(name, "").strip() for name in VARIABLES)}
    for secret in sorted((s for s in secrets if len(s) >= SHORTEST), key=len, reverse=True):
        text = text.replace(secret, GONE).replace(quote(secret, safe=""), GONE)
    for pattern, instead in PATTERNS:
        text = pattern.sub(instead, text)
    return text


class _Quiet(logging.Filter):
    """Redacts what a library logs."""

    def filter(self, record: logging.LogRecord) -> bool:
        from kconv.text.printable import printable

        record.msg, record.args = printable(redacted(record.getMessage())), ()
        return True


def guard_logs() -> None:
    """Let huggingface_hub log no credential; its handlers are there once it is imported."""
    for handler in logging.getLogger("huggingface_hub").handlers:
        if not any(isinstance(f, _Quiet) for f in handler.filters):
            handler.addFilter(_Quiet())
