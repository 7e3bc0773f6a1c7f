"""The fixture `hub`: a running test Hub that the huggingface_hub of this process, and of children, talks to.

A conftest.py imports it: `from tests.hubserver.fixtures import hub, hub_token`. No token is set; `hub_token` sets one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_api
from huggingface_hub.utils._http import close_session

from tests.hubserver.server import WRITE_TOKEN, HubServer

CACHES = {"HF_HOME": "", "HF_HUB_CACHE": "hub", "HF_XET_CACHE": "xet", "HF_ASSETS_CACHE": "assets"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A fresh Hub; HF_ENDPOINT, caches and tokens point into the test, xet is off."""
    home = tmp_path / "hf-home"
    with HubServer(tmp_path / "hub-store") as server:
        environment = {"HF_ENDPOINT": server.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        environment |= {name: str(home / sub) for name, sub in CACHES.items()}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        # huggingface_hub reads its environment at import, which may be long past in this process.
        for name in ("HF_HUB_CACHE", "HF_XET_CACHE", "HF_ASSETS_CACHE", "HF_HOME"):
            monkeypatch.setattr(constants, name, environment[name])
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        _forget_clients(monkeypatch, server.url)
        yield server
        close_session()
        assert not server.errors, server.errors[0]


def _forget_clients(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Clients that were made for another address: huggingface_hub's own instance, Transformers' cached one."""
    monkeypatch.setattr(hf_api.api, "endpoint", url)
    transformers_hub = sys.modules.get("transformers.utils.hub")
    if hasattr(transformers_hub, "_hf_api"):
        monkeypatch.setattr(transformers_hub, "_hf_api", None)


@pytest.fixture
def xet_hub(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """The same Hub with xet on, as users of huggingface_hub have it by default."""
    pytest.importorskip("hf_xet")
    hub.enable_xet()
    monkeypatch.delenv("HF_HUB_DISABLE_XET")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    return hub


@pytest.fixture
def hub_token(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """A token that may write to `me/*` and `lab/*`, in HF_TOKEN."""
    monkeypatch.setenv("HF_TOKEN", WRITE_TOKEN)
    return WRITE_TOKEN
