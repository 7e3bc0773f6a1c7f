"""No credential in what is said."""

from __future__ import annotations

import logging

import pytest

from kconv.cli.common import Outcome, execute
from kconv.errors import KconvError, Problems
from kconv.text.redaction import guard_logs, redacted, remember


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("GET https://me:pass@hub.example/a failed", "GET https://[redacted]@hub.example/a failed"),
        ("https://s3.example/x?X-Amz-Signature=abc&Expires=1 is gone", "https://s3.example/x?[redacted] is gone"),
        ("Authorization: Bearer abcdefgh", "Authorization: [redacted]"),
        ("{'authorization': 'Basic QWxhZGRpbg=='}", "{'authorization': '[redacted]'}"),
        ("bearer abc.def-123", "bearer [redacted]"),
        ("the token hf_abcdefghijkl is", "the token [redacted] is"),
        ("hf://lab/model@main has no file x", "hf://lab/model@main has no file x"),
        ("hf_hub is a module", "hf_hub is a module"),
    ],
)
def test_what_looks_like_a_credential_is_not_said(text: str, said: str) -> None:
    assert redacted(text) == said


def test_a_token_in_use_is_not_said_in_any_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "odd/token")
    remember("given")
    assert redacted("odd/token odd%2Ftoken given") == "[redacted] [redacted] [redacted]"
    error = Problems("odd/token", ["given"], hint="https://a?sig=b")
    assert "odd" not in str(error)
    assert error.problems == ["[redacted]"]
    assert str(KconvError("x", hint="given")) == "x\n  next: [redacted]"


def test_an_unforeseen_error_says_no_credential(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> Outcome:
        raise RuntimeError("GET https://me:pass@hub.example/x?Signature=s3cr3t")

    assert execute(fails, True) == 3
    said = capsys.readouterr()
    assert not [s for s in ("pass@", "s3cr3t") if s in said.out + said.err]


def test_huggingface_hub_logs_no_signed_link(capfd: pytest.CaptureFixture[str]) -> None:
    import huggingface_hub  # noqa: F401

    guard_logs()
    logging.getLogger("huggingface_hub.utils._http").warning("thrown while requesting %s", "PUT https://s3/x?Signature=s3cr3t\x1b")
    logged = [h.filter(logging.makeLogRecord({"msg": "https://s3/x?Signature=s3cr3t"})) for h in handlers()]
    assert all(logged)
    assert "s3cr3t" not in capfd.readouterr().err


def handlers() -> list[logging.Handler]:
    return logging.getLogger("huggingface_hub").handlers
