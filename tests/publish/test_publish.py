"""`kconv publish` against the test Hub: what it sends, where, what it refuses, and what it never sends twice."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from huggingface_hub import HfApi, snapshot_download
from safetensors.torch import load_file

import kconv
from kconv.cli import cli
from kconv.errors import AnswerIsNo, EnvironmentLacks, KconvError, Problems
from kconv.publishing import upload
from kconv.publishing.folder_check import ALLOWABLE
from kconv.publishing.publish import publish
from kconv.storage import hub_http
from tests.hubserver import OTHER_TOKEN, READ_TOKEN, Fault, HubServer
from tests.hubserver.store import Commit
from tests.publish.conftest import CARD, write_manifest

SHARDS = [f"model-{k:05d}-of-00003.safetensors" for k in (1, 2, 3)]


def local(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def remote(hub: HubServer, repo: str, revision: str = "main") -> dict[str, bytes]:
    return {n: b for n, b in hub.files(repo, revision).items() if n != ".gitattributes"}


def test_publish_download_load(hub: HubServer, hub_token: str, model: Path, tmp_path: Path) -> None:
    data = publish(model, "me/m", private=True)
    assert remote(hub, "me/m") == local(model)
    assert hub.store.repos["me/m"].private
    assert data["commit"] == HfApi().model_info("me/m").sha
    assert data["url"] == f"{hub.url}/me/m/tree/{data['commit']}"
    assert sorted(data["sent_files"]) == sorted(local(model))
    got = Path(snapshot_download("me/m", local_dir=tmp_path / "got"))
    for shard in SHARDS:
        a, b = load_file(model / shard), load_file(got / shard)
        assert all((a[k] == b[k]).all() for k in a)


def test_second_run_sends_nothing(hub: HubServer, hub_token: str, model: Path) -> None:
    first = publish(model, "me/m")
    hub.log.clear()
    second = publish(model, "me/m")
    assert second["commit"] == first["commit"]
    assert second["sent_files"] == []
    assert hub.moved("PUT") == 0
    assert not hub.requests("POST", "/commit/")
    (model / "README.md").write_text(CARD + "\nmore\n")
    write_manifest(model)
    third = publish(model, "me/m")
    assert sorted(third["sent_files"]) == ["README.md", "kconv.json"]
    assert hub.moved("PUT") == 0


def test_weights_first_and_the_config_last(hub: HubServer, hub_token: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "BATCH_FILES", 2)
    publish(model, "me/m", message="Hello")
    repo = hub.store.repos["me/m"]
    commit = repo.resolve("main")
    history: list[Commit] = []
    while commit:
        history.insert(0, commit)
        commit = repo.commits[commit.parent] if commit.parent else None
    assert [c.title for c in history[1:]] == [f"Hello ({k}/5)" for k in (1, 2, 3, 4, 5)]
    assert set(history[1].tree) - {".gitattributes"} == set(SHARDS[:2])
    assert "config.json" not in history[2].tree
    assert "model.safetensors.index.json" not in history[2].tree


def test_dry_run_writes_nothing(hub: HubServer, hub_token: str, model: Path) -> None:
    data = publish(model, "me/m", dry_run=True)
    assert sorted(data["sent_files"]) == sorted(local(model))
    assert data["commit"] is None
    assert "me/m" not in hub.store.repos
    publish(model, "me/m")
    (model / "config.json").write_text('{"model_type": "y"}')
    write_manifest(model)
    before = hub.store.repos["me/m"].refs.copy()
    hub.log.clear()
    data = publish(model, "me/m", dry_run=True)
    assert sorted(data["sent_files"]) == ["config.json", "kconv.json"]
    assert hub.store.repos["me/m"].refs == before
    assert [r.path for r in hub.log if r.method not in ("GET", "HEAD")] == ["/api/validate-yaml"]


def test_pull_request(hub: HubServer, hub_token: str, model: Path) -> None:
    hub.seed("lab/m", {"old.txt": b"1"})
    main = hub.store.repos["lab/m"].refs["refs/heads/main"]
    data = publish(model, "lab/m", create_pr=True, message="New weights")
    assert data["revision"] == "refs/pr/1"
    assert data["pull_request"] == f"{hub.url}/lab/m/discussions/1"
    assert data["kept_on_hub"] == ["old.txt"]
    assert hub.store.repos["lab/m"].refs["refs/heads/main"] == main
    assert set(local(model)) <= set(remote(hub, "lab/m", "refs/pr/1"))
    again = publish(model, "lab/m", create_pr=True, message="New weights")
    assert again["sent_files"] == []
    assert again["commit"] == data["commit"]
    assert len(hub.store.repos["lab/m"].discussions) == 1
    other = publish(model, "lab/m", create_pr=True, message="Another")
    assert other["revision"] == "refs/pr/2"
    assert publish(model, "lab/m", revision="refs/pr/2")["sent_files"] == []


def test_a_stranger_may_open_a_pull_request(hub: HubServer, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.seed("lab/m", {"old.txt": b"1"})
    monkeypatch.setenv("HF_TOKEN", OTHER_TOKEN)
    data = publish(model, "lab/m", create_pr=True)
    assert set(local(model)) <= set(remote(hub, "lab/m", data["revision"]))
    with pytest.raises(KconvError, match=r"the Hub refused \(403\)"):
        publish(model, "lab/m")


def test_branches(hub: HubServer, hub_token: str, model: Path) -> None:
    hub.seed("me/m", {"old.txt": b"1"})
    hub.store.repos["me/m"].refs["refs/tags/v1"] = hub.store.repos["me/m"].refs["refs/heads/main"]
    for revision, said in [
        ("dev", "has no branch dev; it has main\n.*--create-branch"),
        ("refs/pr/7", "has no branch refs/pr/7"),
        ("v1", "v1 is a tag"),
        ("0" * 40, "is a commit"),
    ]:
        with pytest.raises(KconvError, match=said):
            publish(model, "me/m", revision=revision)
    assert hub.moved("PUT") == 0
    plan = publish(model, "me/m", revision="dev", create_branch=True, dry_run=True)
    assert "refs/heads/dev" not in hub.store.repos["me/m"].refs
    data = publish(model, "me/m", revision="dev", create_branch=True)
    assert data["sent_files"] == plan["sent_files"]
    assert set(local(model)) <= set(remote(hub, "me/m", "dev"))
    assert set(remote(hub, "me/m")) == {"old.txt"}
    with pytest.raises(KconvError, match="exclude each other"):
        publish(model, "me/m", revision="dev", create_pr=True)
    with pytest.raises(KconvError, match="does not exist"):
        publish(model, "me/nothing", revision="dev")
    with pytest.raises(KconvError, match="does not exist"):
        publish(model, "me/nothing", create_pr=True)


def test_tokens(hub: HubServer, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.seed("me/secret", {"a": b"1"}, private=True)
    with pytest.raises(EnvironmentLacks, match=r"no token to publish to me/secret with\n.*HF_TOKEN"):
        publish(model, "me/secret")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(KconvError, match="the token lacks the permission, or is wrong"):
        publish(model, "me/secret")
    monkeypatch.setenv("HF_TOKEN", READ_TOKEN)
    with pytest.raises(KconvError, match=r"the Hub refused \(403\)"):
        publish(model, "me/secret")
    monkeypatch.setenv("HF_TOKEN", OTHER_TOKEN)
    with pytest.raises(KconvError, match=r"the Hub refused \(403\)"):
        publish(model, "me/secret")
    assert hub.moved("PUT") == 0


def test_private_is_not_published_in_public(hub: HubServer, hub_token: str, model: Path) -> None:
    hub.seed("me/open", {"a": b"1"})
    with pytest.raises(KconvError, match="exists and is public, and --private"):
        publish(model, "me/open", private=True)
    assert hub.moved("PUT") == 0


def test_bad_metadata_is_refused_before_the_first_byte(hub: HubServer, hub_token: str, model: Path) -> None:
    (model / "README.md").write_text("---\nlicense: nonsense\nbase_model: a b\n---\n")
    write_manifest(model)
    with pytest.raises(Problems, match=r"license: 'nonsense'.*\n.*base_model: 'a b'"):
        publish(model, "me/m")
    assert hub.log == [], "the Hub was not even asked"
    (model / "README.md").write_text("---\nlicense: gpl-2.0\n---\n")  # fine here, unknown to the test Hub
    write_manifest(model)
    with pytest.raises(Problems, match="the Hub refuses the metadata"):
        publish(model, "me/m")
    assert hub.moved("PUT") == 0
    assert "me/m" not in hub.store.repos


def test_file_over_the_limit(hub: HubServer, hub_token: str, model: Path) -> None:
    with (model / "big.safetensors").open("wb") as f:
        f.truncate(47 * 2**30)
    with pytest.raises(Problems, match=r"50\.47 GB .* over the limit of 50\.00 GB a file.*--shard-size"):
        publish(model, "me/m")
    (model / "big.safetensors").unlink()
    assert hub.log == []
    hub.max_file_size = 100_000
    with pytest.raises(KconvError, match=r"the Hub refused: LFS batch .* files > 100000 bytes"):
        publish(model, "me/m")
    assert hub.moved("PUT") == 0


def test_rate_limits_are_waited_out(hub: HubServer, hub_token: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(hub_http, "sleep", waits.append)
    for path in ("whoami", "/api/models/me/m$", "validate-yaml", "repos/create", "/commit/", "/revision/"):
        hub.faults.add(Fault(path, status=429, headers={"Retry-After": "5"}))
    publish(model, "me/m")
    assert waits == [6.0] * 6
    assert remote(hub, "me/m") == local(model)


def test_a_lost_answer_makes_no_second_commit(
    hub: HubServer, hub_token: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_http, "sleep", lambda s: None)
    hub.faults.add(Fault("/commit/", cut_response=0, before=False))
    publish(model, "me/m")
    assert remote(hub, "me/m") == local(model)
    assert len(hub.store.repos["me/m"].commits) == 2, "the Hub's first and ours"


def test_a_hub_that_lost_a_file_is_noticed(hub: HubServer, hub_token: str, model: Path) -> None:
    def lose(repo_id: str) -> None:
        commit = hub.store.repos[repo_id].resolve("main")
        assert commit is not None
        tree = dict(commit.tree)
        del tree["tokenizer.json"]
        tree[SHARDS[0]] = hub.store.entry(SHARDS[0], hub.store.put(b"other"))
        hub.store.repos[repo_id].commits[commit.oid] = replace(commit, tree=tree)

    hub.faults.add(Fault("/revision/main", call=lambda: lose("me/m")))  # after the last commit, before the check
    with pytest.raises(Problems, match=rf"(?s){SHARDS[0]} has another hash.*tokenizer.json is missing.*sends what differs"):
        publish(model, "me/m")
    assert sorted(publish(model, "me/m")["sent_files"]) == [SHARDS[0], "tokenizer.json"]
    assert remote(hub, "me/m") == local(model)


def test_leftovers_stay_behind(hub: HubServer, hub_token: str, model: Path) -> None:
    for name in (".cache/x", ".git/config", "x.tmp", ".env", "run.log", "__pycache__/a.pyc", "notes.bin", "m.part"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text("x")
    data = publish(model, "me/m", ignore=["*.bin"])
    assert "notes.bin" in data["left_out"]
    assert len(data["left_out"]) == 8
    assert set(remote(hub, "me/m")) == set(json.loads((model / "kconv.json").read_text())["files"]) | {"kconv.json"}


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda m: (m / "tokenizer.json").unlink(), "no tokenizer"),
        (lambda m: (m / "README.md").unlink(), "README.md .* is missing; --card writes one"),
        (lambda m: (m / SHARDS[1]).unlink(), f"names .*{SHARDS[1]}"),
        (lambda m: (m / SHARDS[1]).write_bytes((m / SHARDS[1]).read_bytes()[:-9]), "truncated"),
        (lambda m: (m / "config.json").unlink(), "no config.json"),
        (lambda m: (m / "config.json").write_text('{"auto_map": {"AutoModel": "dflash.D"}}'), "auto_map names dflash.D"),
        (lambda m: (m / "notes.md").write_text("\n\nmy hf_" + "a" * 34), "notes.md line 3 looks like a Hugging Face token"),
        (lambda m: (m / "key").write_text("-----BEGIN PRIVATE KEY-----"), "key line 1 looks like a private key"),
        (lambda m: (m / "gone").symlink_to("nowhere"), "gone is a broken link"),
        (lambda m: [p.unlink() for p in m.glob("model*")], "no .safetensors file"),
    ],
)
def test_folders_that_are_not_fit(hub: HubServer, hub_token: str, model: Path, damage: object, said: str) -> None:
    damage(model)  # type: ignore[operator]
    with pytest.raises(Problems, match=said) as error:
        publish(model, "me/m")
    assert "hf_aaaa" not in str(error.value)
    assert hub.log == []


def test_allowed_problems_become_notes(hub: HubServer, hub_token: str, model: Path) -> None:
    (model / "tokenizer.json").unlink()
    write_manifest(model)
    data = publish(model, "me/m", allow=["no-tokenizer"])
    assert any(note.startswith("allowed: no tokenizer") for note in data["notes"])
    with pytest.raises(KconvError, match="nothing called x can be allowed"):
        publish(model, "me/m", allow=["x"])


def test_weights_changed_after_they_were_converted(hub: HubServer, hub_token: str, tmp_path: Path) -> None:
    """By the digest that a conversion states of weight files, which is not the Hub's."""
    kconv.tiny("k3", tmp_path / "src")
    kconv.convert(tmp_path / "src", tmp_path / "out")
    assert publish(tmp_path / "out", "me/m", allow=ALLOWABLE, dry_run=True)["files"]
    shard = next((tmp_path / "out").glob("*.safetensors"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(Problems, match=f"{shard.name} is not the file that kconv.json describes"):
        publish(tmp_path / "out", "me/m", allow=ALLOWABLE)


def test_changed_after_it_was_made(hub: HubServer, hub_token: str, model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "z"}')
    (model / "LICENSE").unlink()
    with pytest.raises(Problems, match=r"config.json is not the file that kconv.json describes\n.*LICENSE is in kconv.json"):
        publish(model, "me/m")
    assert hub.log == []


def test_require_verified(hub: HubServer, hub_token: str, model: Path, tmp_path: Path) -> None:
    from kconv.checkpoint import evidence

    with pytest.raises(AnswerIsNo, match="is not verified: no result"):
        publish(model, "me/m", require="verified")
    result = tmp_path / "verify.json"
    good = {"compared": 3, "different": 0, "ok": True, "subject": evidence.subject(model)}
    for bad, said in [
        ({**good, "ok": False, "different": 1}, "3 tensors compared, 1 different"),
        ({**good, "subject": "0" * 64}, "about other files"),
        ({**good, "compared": 0}, "0 tensors compared"),
        ({**good, "sample": 2}, "only a sample was"),
        ({"verdict": "fail", "subject": good["subject"], "reference": "r", "dtype": "float64"}, "verify-parity fail"),
    ]:
        result.write_text(json.dumps(bad))
        with pytest.raises(AnswerIsNo, match=said):
            publish(model, "me/m", require="verified", evidence=[result])
    assert hub.log == []
    result.write_text(json.dumps(good))
    assert publish(model, "me/m", require="verified", evidence=[result])["verified_by"] == [
        "verify: 3 tensors compared, 0 different"
    ]
    evidence.write(model, "kconv.parity.json", {"verdict": "pass", "reference": "g", "dtype": "float64", "max_abs": 1e-7})
    assert len(publish(model, "me/m", require="verified", evidence=[result])["verified_by"]) == 2
    (model / "config.json").write_text('{"model_type": "changed"}')
    write_manifest(model)
    with pytest.raises(AnswerIsNo, match="about other files"):
        publish(model, "me/m", require="verified", evidence=[result])


def test_notes_for_people(hub: HubServer, hub_token: str, model: Path) -> None:
    (model / "chat_template.jinja").write_text("A")
    (model / "tokenizer_config.json").write_text('{"chat_template": "B"}')
    line = "from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode\n"
    (model / "tokenization_kimi.py").write_text(line)
    notes = " ".join(publish(model, "me/m")["notes"])
    assert "two different templates" in notes
    assert "tokenization_kimi.py: Transformers 5 removed an import it uses; it is in transformers.convert_slow_tokenizer" in notes
    assert remote(hub, "me/m")["tokenization_kimi.py"] == line.encode()


def test_hashes_are_remembered_until_a_file_changes(model: Path) -> None:
    from kconv.publishing.hub_hashes import HashMemory

    read: list[int] = []
    shard = model / SHARDS[0]
    first = HashMemory(model).of(shard, reading=read.append)
    assert HashMemory(model).of(shard, reading=read.append) == first
    assert len(read) == 1
    shutil.copy2(shard, shard.with_suffix(".copy"))
    shard.with_suffix(".copy").replace(shard)  # same size and time, another inode
    assert HashMemory(model).of(shard, reading=read.append) == first
    assert len(read) == 2


def test_command_line(hub: HubServer, hub_token: str, model: Path) -> None:
    run = CliRunner()
    done = run.invoke(cli, ["publish", str(model), "me/m", "--dry-run", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["dry_run"] is True
    done = run.invoke(cli, ["publish", str(model), "me/m"])
    assert done.exit_code == 0, done.output
    assert "published and verified: hf://me/m@" in done.stdout
    assert run.invoke(cli, ["publish", str(model), "me/m", "--revision", "nope"]).exit_code == 2
    done = run.invoke(cli, ["publish", str(model), "me/m", "--require", "verified", "--json"])
    assert done.exit_code == 1
    assert "is not verified" in json.loads(done.stdout)["error"]["message"]
    (model / "README.md").unlink()
    done = run.invoke(cli, ["publish", str(model), "me/m", "--json"])
    assert done.exit_code == 2
    assert json.loads(done.stdout)["error"]["problems"]


def test_failing_puts_are_repeated(hub: HubServer, hub_token: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.faults.add(Fault("/objects/", method="PUT", status=500, times=2))
    hub.faults.add(Fault("/objects/", method="PUT", cut_request=1000, times=2))
    publish(model, "me/m")
    assert remote(hub, "me/m") == local(model)
    assert len(hub.requests("PUT")) == 7


def test_a_real_verify_is_evidence(hub: HubServer, hub_token: str, tmp_path: Path) -> None:
    from kconv.synthesis.families import tiny

    run = CliRunner()
    source, out = tmp_path / "source", tmp_path / "native"
    tiny("k3", source)
    assert run.invoke(cli, ["convert", str(source), str(out)]).exit_code == 0
    verified = run.invoke(cli, ["verify", str(out), "--source", str(source), "--json"])
    (tmp_path / "verify.json").write_text(verified.stdout)
    args = ["publish", str(out), "me/native", "--card", "--require", "verified", "--evidence", str(tmp_path / "verify.json")]
    done = run.invoke(cli, args)
    assert done.exit_code == 0, done.output
    assert "published and verified" in done.stdout
    sampled = run.invoke(cli, ["verify", str(out), "--source", str(source), "--sample", "1", "--json"])
    (tmp_path / "verify.json").write_text(sampled.stdout)
    assert run.invoke(cli, args).exit_code == 1
