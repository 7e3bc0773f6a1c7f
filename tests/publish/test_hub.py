"""kconv.storage.hub against the test Hub: pinned revisions, ranges under fire, resumed downloads, errors in plain words."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from kconv.errors import EnvironmentLacks, KconvError
from kconv.storage import hub_http
from kconv.storage.files import Files
from kconv.storage.hub import HubFiles, parse_source
from kconv.storage.opening import open_files
from tests.hubserver import OTHER_TOKEN, Fault, HubServer

CONTENT = random.Random(0).randbytes(1_000_000)
W = "w.safetensors"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses are recorded instead of slept."""
    slept: list[float] = []
    monkeypatch.setattr(hub_http, "sleep", slept.append)
    return slept


def test_pins_a_moving_branch(hub: HubServer) -> None:
    first = hub.seed("lab/m", {"config.json": b"1", W: CONTENT})
    files = HubFiles("hf://lab/m")
    hub.seed("lab/m", {"config.json": b"2", "new": b"n"})
    assert files.revision == first
    assert files.read("config.json") == b"1"
    assert files.names() == ["config.json", W]
    assert files.files[W].sha256 == files.fingerprint(W)
    assert files.files["config.json"].sha256 is None
    assert HubFiles(f"hf://lab/m@{first}").read("config.json") == b"1"
    later = open_files("hf://lab/m@main")
    assert isinstance(later, Files)
    assert later.read("config.json") == b"2"


def test_ranges_cost_what_they_read(hub: HubServer) -> None:
    hub.seed("lab/m", {W: CONTENT})
    files = HubFiles("hf://lab/m")
    for offset, n in [(0, 8), (500_000, 100), (999_999, 1), (0, 0)]:
        assert files.read(W, offset, n) == CONTENT[offset : offset + n]
    buffer = bytearray(50)
    files.read_into(W, 7, memoryview(buffer))
    assert bytes(buffer) == CONTENT[7:57]
    assert hub.served() == 159
    assert len(hub.requests("GET", "/resolve/")) == 1, "the signed link is used again"
    hub.expire_links()
    assert files.read(W, 3, 4) == CONTENT[3:7]
    assert len(hub.requests("GET", "/resolve/")) == 2
    for offset, n in [(999_999, 2), (-1, 2), (2_000_000, 1)]:
        with pytest.raises(KconvError, match="the file has 1000000"):
            files.read(W, offset, n)


def test_cut_connections_lose_no_byte(hub: HubServer, waits: list[float]) -> None:
    hub.seed("lab/m", {W: CONTENT})
    files = HubFiles("hf://lab/m")
    hub.faults.add(Fault("/objects/", cut_response=70_000, times=12))
    assert files.read(W, 1000, 990_000) == CONTENT[1000:991_000]
    assert hub.served() == 990_000, "every byte came once"
    assert waits == [1.0] * 12, "each cut came after progress"


def test_busy_and_rate_limited(hub: HubServer, waits: list[float]) -> None:
    hub.seed("lab/m", {W: CONTENT})
    hub.faults.add(Fault("/api/models/", status=503, times=2))
    hub.faults.add(Fault("/resolve/", status=429, headers={"RateLimit": '"resolvers";r=0;t=55'}))
    hub.faults.add(Fault("/objects/", status=500, times=3))
    assert HubFiles("hf://lab/m").read(W, 0, 10) == CONTENT[:10]
    assert waits == [1.0, 2.0, 56.0, 2.0, 4.0, 8.0]
    waits.clear()
    hub.faults.clear()
    hub.faults.add(Fault("/api/models/", status=429, headers={"Retry-After": "7"}))
    HubFiles("hf://lab/m")
    assert waits == [8.0]


def test_gives_up_with_a_next_step(hub: HubServer, waits: list[float]) -> None:
    hub.seed("lab/m", {W: CONTENT})
    files = HubFiles("hf://lab/m")
    hub.faults.add(Fault("/objects/", cut_response=0, times=None))
    with pytest.raises(EnvironmentLacks, match=r"w.safetensors: gave up after 8 attempts.*\n.*run the same command"):
        files.read(W, 0, 10)
    assert sum(waits) == 1 + 2 + 4 + 8 + 16 + 30 * 3
    hub.faults.clear()
    hub.faults.add(Fault("/objects/", status=429, headers={"Retry-After": "3600"}))
    with pytest.raises(EnvironmentLacks, match="rate limited for 3601 s"):
        files.read(W, 0, 10)


def test_a_server_that_ignores_ranges_is_refused(hub: HubServer) -> None:
    hub.seed("lab/m", {W: CONTENT})
    files = HubFiles("hf://lab/m")
    hub.ignore_ranges = True
    with pytest.raises(EnvironmentLacks, match="ignores Range"):
        files.read(W, 4, 4)


def test_threads_share_the_files(hub: HubServer, waits: list[float]) -> None:
    hub.seed("lab/m", {W: CONTENT})
    files = HubFiles("hf://lab/m")
    hub.faults.add(Fault("/objects/", cut_response=100, times=20))
    got: dict[int, bytes] = {}

    def work(k: int) -> None:
        got[k] = files.read(W, k * 100_000, 100_000)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(10)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert b"".join(got[k] for k in range(10)) == CONTENT


def test_download_goes_on_where_it_was_stopped(hub: HubServer, tmp_path: Path, waits: list[float]) -> None:
    hub.seed("lab/m", {"sub/w.safetensors": CONTENT, "config.json": b"{}"})
    files = HubFiles("hf://lab/m")
    dest = tmp_path / "out" / W
    fault = hub.faults.add(Fault("/objects/", cut_response=300_000, times=None))
    seen: list[int] = []

    def stop(n: int) -> None:
        seen.append(n)
        if sum(seen) > 250_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.download("sub/w.safetensors", dest, progress=stop)
    assert not dest.exists()
    fault.times = 0
    kept = next(dest.parent.glob("*.part")).stat().st_size
    before = hub.served()
    assert files.download("sub/w.safetensors", dest).read_bytes() == CONTENT
    assert hub.served() - before == len(CONTENT) - kept
    assert kept > 200_000
    assert os.listdir(dest.parent) == [W]
    assert files.download("config.json", tmp_path / "c.json").read_bytes() == b"{}"


def test_download_checks_the_hash(hub: HubServer, tmp_path: Path) -> None:
    hub.seed("lab/m", {W: CONTENT})
    files = HubFiles("hf://lab/m")
    (hub.store.folder / files.fingerprint(W)).write_bytes(CONTENT[:-1] + b"!")
    with pytest.raises(KconvError, match="another hash"):
        files.download(W, tmp_path / "w")
    assert not list(tmp_path.glob("w*"))


def test_errors_say_what_to_do(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.seed("me/private", {"a": b"1"}, private=True)
    hub.seed("lab/gated", {"a.safetensors": b"1"}, gated=True)
    hub.seed("lab/open", {"a": b"1"})
    with pytest.raises(KconvError, match=r"hf://me/private does not exist, or is private and no token is set\n.*HF_TOKEN"):
        HubFiles("hf://me/private")
    with pytest.raises(KconvError, match="hf://lab/open@v9: no such branch, tag or commit"):
        HubFiles("hf://lab/open@v9")
    with pytest.raises(KconvError, match=r"lab/open has no file b"):
        HubFiles("hf://lab/open").read("b")
    with pytest.raises(KconvError, match="is gated"):
        HubFiles("hf://lab/gated").read("a.safetensors")
    monkeypatch.setenv("HF_TOKEN", OTHER_TOKEN)
    with pytest.raises(KconvError, match="does not exist, or your token may not see it"):
        HubFiles("hf://me/private")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(KconvError, match="the token lacks the permission, or is wrong"):
        HubFiles("hf://lab/open")
    for bad in ("hf://a", "hf://a/b/c", "hf://a/b@", "https://huggingface.co/a/b"):
        with pytest.raises(KconvError, match="hf://owner/name"):
            parse_source(bad)


def test_nobody_listens(hub: HubServer, waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(EnvironmentLacks, match="gave up after 8 attempts"):
        HubFiles("hf://lab/open")


def test_headers_of_a_checkpoint_over_ranges(hub: HubServer) -> None:
    from kconv.checkpoint.reading import open_checkpoint

    golden = Path(__file__).parents[1] / "data" / "golden" / "tiny-k3"
    hub.seed_folder("lab/tiny", golden)
    remote, local = open_checkpoint("hf://lab/tiny"), open_checkpoint(golden)
    assert {n: (e.spec, e.start) for n, e in remote.entries.items()} == {n: (e.spec, e.start) for n, e in local.entries.items()}
    weights = sum(p.stat().st_size for p in golden.glob("*.safetensors"))
    assert hub.served() < weights / 10
