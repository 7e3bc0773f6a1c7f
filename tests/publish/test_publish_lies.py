"""Publishing to a Hub that lies: refused before anything is sent, without a traceback and without a credential."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kconv.cli import cli
from kconv.storage import hub_http
from tests.hubserver import HubServer
from tests.hubserver.lies import PUBLISHING, Lie


@pytest.mark.parametrize("lie", PUBLISHING, ids=lambda lie: lie.name)
def test_a_lie_is_refused_before_anything_is_sent(
    lie: Lie, hub: HubServer, hub_token: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_http, "sleep", lambda seconds: None)
    hub.seed("me/m", {"old.txt": b"1"})
    for make in lie.make:
        hub.faults.add(make())
    ran = CliRunner().invoke(cli, ["publish", str(model), "me/m", "--json"])
    assert ran.exit_code == lie.code, ran.output
    assert json.loads(ran.stdout)["error"]["exit_code"] == lie.code
    assert hub_token not in ran.output
    assert not any(c in ran.output for c in "\x1b\x07")
    assert hub.requests("PUT") == []
    assert hub.requests("POST", "/commit/") == []
