"""A Hub that lies: every row of `tests.hubserver.lies` against `kconv convert`, and what must hold whatever it says."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import kconv
from kconv.cli import cli
from kconv.errors import KconvError
from kconv.storage import hub_http
from tests.adapters.test_verify_beside import reseal
from tests.builders import small_k3
from tests.engine.faults import tree
from tests.hubserver.fixtures import hub, hub_token
from tests.hubserver.lies import BOMB, INFO, LIES, SHARD, TREE, Lie, entry, flipped_when, sent, told
from tests.hubserver.server import HubServer

__all__ = ["hub", "hub_token"]

REPO = "lab/k3"
SIDE = {"tokenizer_config.json": b'{"a": 1}', "tiktoken.model": b"IQ== 0\n" * 20, "tokenization_kimi.py": b"x = 1\n"}
SECRETS = ("s3cr3t", "geheim", "nobody_knows", "hf_test")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = small_k3().write(tmp_path_factory.mktemp("lies") / "k3")
    for name, content in SIDE.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def honest(published: Path) -> dict[str, str]:
    """The hashes of the honest output."""
    out = published.parent / "honest"
    assert CliRunner().invoke(cli, ["convert", str(published), str(out)]).exit_code == 0
    return tree(out)


def lie_to(hub: HubServer, lie: Lie, outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the Hub tell the row's lies."""
    if lie.files:
        hub.seed(REPO, {path.format(outside=outside): content for path, content in lie.files.items()})
    for make in lie.make:
        hub.faults.add(make())
    for name, value in lie.env.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.name)
def test_a_lie_is_refused_or_does_no_harm(
    lie: Lie, hub: HubServer, hub_token: str, published: Path, honest: dict[str, str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(hub_http, "sleep", lambda seconds: None)
    hub.seed_folder(REPO, published)
    work, outside = tmp_path / "work", tmp_path / "work" / "outside"
    outside.mkdir(parents=True)
    (outside / "mine").write_text("precious")
    monkeypatch.chdir(work)
    lie_to(hub, lie, outside, monkeypatch)
    tracemalloc.start()
    ran = CliRunner().invoke(cli, ["convert", f"hf://{REPO}", "out", "--json"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert ran.exit_code == lie.code, ran.output
    left = {p.relative_to(work).as_posix() for p in work.rglob("*") if p.relative_to(work).parts[0] != "out"}
    partial = {p for p in left if p.startswith(".out.partial")}
    assert left - partial == {"outside", "outside/mine"}
    assert not (partial and lie.code == 2), "nothing is left of what was refused"
    assert (work / "out").exists() == (lie.code == 0)
    if lie.code == 0:
        made = tree(work / "out")
        assert {n: h for n, h in made.items() if n != "kconv.json"} == {n: h for n, h in honest.items() if n != "kconv.json"}
    else:
        error = json.loads(ran.stdout)["error"]
        assert error["exit_code"] == lie.code
        assert lie.says in error["message"]
        assert not any(c in ran.output for c in "\x1b\x07")
    assert not [s for s in SECRETS if s in ran.output], ran.output
    assert not [r for r in hub.log if r.origin == "store" and r.authorization], "the token went to another host"
    assert peak < 250 << 20


def test_the_bombs_are_bombs() -> None:
    assert len(BOMB) < 1 << 20


def test_the_same_command_works_once_the_hub_is_honest_again(hub: HubServer, published: Path, tmp_path: Path) -> None:
    hub.seed_folder(REPO, published)
    args = ["convert", f"hf://{REPO}", str(tmp_path / "out")]
    for name in (".safetensors", "tiktoken.model"):
        hub.faults.add(told(TREE, entry(name, lfs={"oid": "1" * 64}))())
        refused = CliRunner().invoke(cli, args)
        assert (refused.exit_code, "another hash" in refused.output) == (2, True), refused.output
        assert "run the same command again" in refused.output
        hub.faults.clear()
    assert CliRunner().invoke(cli, args).exit_code == 0


def test_one_altered_download_is_fetched_again(hub: HubServer, published: Path, honest: dict[str, str], tmp_path: Path) -> None:
    """A bit that flipped on the way costs a second download, not the conversion."""
    hub.seed_folder(REPO, published)
    fault = told(SHARD, flipped_when(60_000))()
    fault.skip, fault.times = 6, 1
    hub.faults.add(fault)
    ran = CliRunner().invoke(cli, ["convert", f"hf://{REPO}", str(tmp_path / "out")])
    assert ran.exit_code == 0, ran.output
    assert fault.hits == 1
    made = tree(tmp_path / "out")
    assert {n: h for n, h in made.items() if n != "kconv.json"} == {n: h for n, h in honest.items() if n != "kconv.json"}


def test_work_that_was_done_is_kept_when_a_later_shard_is_altered(hub: HubServer, published: Path, tmp_path: Path) -> None:
    hub.seed_folder(REPO, published)
    last = hub.files(REPO)["model-00002-of-00002.safetensors"]
    hub.faults.add(told(rf"/objects/{hashlib.sha256(last).hexdigest()}", flipped_when(60_000))())
    options: dict[str, Any] = {"workers": 1, "shard_size": 100_000}
    with pytest.raises(KconvError, match="--resume") as raised:
        kconv.convert(f"hf://{REPO}", tmp_path / "out", **options)
    assert raised.value.exit_code == 3, "2 says that nothing was written"
    assert (tmp_path / ".out.partial").exists()
    hub.faults.clear()
    assert kconv.convert(f"hf://{REPO}", tmp_path / "out", resume=True, **options)["resumed_slabs"] > 0


def test_verify_holds_side_files_against_the_hashes_of_the_hub(hub: HubServer, published: Path, tmp_path: Path) -> None:
    hub.seed_folder(REPO, published)
    out = tmp_path / "out"
    kconv.convert(f"hf://{REPO}", out)
    assert kconv.verify(out)["ok"]
    served = hub.served()
    (out / "tiktoken.model").write_bytes(SIDE["tiktoken.model"].replace(b"0", b"1"))
    reseal(out)
    ran = CliRunner().invoke(cli, ["verify", str(out), "--json"])
    assert ran.exit_code == 1
    assert json.loads(ran.stdout)["files"] == ["tiktoken.model differs from the source's"]
    assert hub.served() - served < sum(p.stat().st_size for p in published.iterdir())


def test_a_password_in_the_address_is_not_said(hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    address = hub.url.replace("http://", "http://someone:s3cr3t@")
    monkeypatch.setattr(constants, "ENDPOINT", address)
    for fault in (told(INFO, sent(418, b'{"error": "see {auth}"}')), told(INFO, sent(302, Location="file:///x"))):
        hub.faults.clear()
        hub.faults.add(fault())
        ran = CliRunner().invoke(cli, ["convert", f"hf://{REPO}", str(tmp_path / "out"), "--json"])
        assert ran.exit_code == 2, ran.output
        assert not [s for s in ("s3cr3t", "someone") if s in ran.output], ran.output
