"""`kconv verify` of what stands beside the weights: against the source, whatever the manifest says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import kconv
from kconv.checkpoint import manifest as manifests
from kconv.cli import cli
from kconv.storage.files import LocalFiles
from kconv.storage.hashing import digests_of
from tests.builders import small_k3
from tests.reading import json_of

SIDE = {"tokenizer_config.json": b'{"a": 1}', "tiktoken.model": b"IQ== 0\n" * 20, "assets/x.png": b"png"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = small_k3().write(tmp_path_factory.mktemp("beside") / "src")
    for name, content in SIDE.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / ".gitattributes").write_text("x")
    kconv.convert(folder, folder.parent / "out")
    return folder.parent


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "out", tmp_path / "out"))


def verify(made: Path, out: Path) -> tuple[int, list[str]]:
    ran = CliRunner().invoke(cli, ["verify", str(out), "--source", str(made / "src"), "--json"])
    return ran.exit_code, json.loads(ran.stdout)["files"]


def reseal(out: Path) -> None:
    """A manifest that describes the folder as it is now, sealed as kconv seals it."""
    manifest = json_of(out / "kconv.json")
    files = LocalFiles(out)
    names = [n for n in files.names() if n != "kconv.json"]
    manifest["files"] = {n: {"size": files.size(n), **digests_of(files, n, "sha256")} for n in names}
    (out / "kconv.json").write_bytes(manifests.dump(manifest))


def true_for_one(out: Path) -> None:
    """Python's json takes `true` for 1; other readers do not."""
    text = (out / "config.json").read_text()
    assert '"num_expert_group": 1' in text
    (out / "config.json").write_text(text.replace('"num_expert_group": 1', '"num_expert_group": true'))


def edit_index(out: Path) -> None:
    path = out / "model.safetensors.index.json"
    path.write_text(json.dumps(json_of(path) | {"metadata": {"total_size": 768}}))


def edit_config(out: Path) -> None:
    config = json_of(out / "config.json")
    (out / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))


CHANGES: list[tuple[str, Callable[[Path], Any], str]] = [
    ("a swapped tokenizer", lambda out: (out / "tiktoken.model").write_bytes(b"IQ== 1\n" * 20), "tiktoken.model differs"),
    ("a longer file", lambda out: (out / "assets/x.png").write_bytes(b"pngs"), "assets/x.png differs"),
    ("a removed file", lambda out: (out / "tokenizer_config.json").unlink(), "tokenizer_config.json of the source is not there"),
    ("a config with true for 1", true_for_one, "config.json is not what the source's config makes: num_expert_group"),
    ("an index of other bytes", edit_index, "model.safetensors.index.json is not the index of its files"),
    ("an edited config", edit_config, "config.json is not what the source's config makes: rms_norm_eps"),
]
ADDED = ["tokenization_kimi.py", "extra.safetensors", "assets/more.txt"]


@pytest.mark.parametrize(("what", "change", "said"), CHANGES, ids=[c[0] for c in CHANGES])
def test_a_change_that_the_manifest_agrees_with_is_found(
    made: Path, out: Path, what: str, change: Callable[[Path], Any], said: str
) -> None:
    change(out)
    reseal(out)
    code, files = verify(made, out)
    assert code == 1
    assert len(files) == 1
    assert said in files[0]


@pytest.mark.parametrize("name", ADDED)
def test_a_file_that_was_added_is_named(made: Path, out: Path, name: str) -> None:
    (out / name).write_bytes(b"x")
    code, files = verify(made, out)
    assert code == 1
    assert files == [f"{name} was added: the manifest does not know it"]


@pytest.mark.parametrize("name", [".gitattributes", ".cache/huggingface/x", "kconv.verify.json", "README.md", "x.lock"])
def test_what_is_no_part_of_a_conversion_is_no_difference(made: Path, out: Path, name: str) -> None:
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).write_text("x")
    assert verify(made, out) == (0, [])


def test_files_that_the_adapter_rewrites_are_not_held_against_the_source(made: Path, tmp_path: Path) -> None:
    """The way back: kconv's own files are left out, the published ones stand there again."""
    plan = kconv.plan(made / "out", to="hf")
    kconv.convert(plan, tmp_path / "back")
    assert kconv.verify(tmp_path / "back", made / "out")["ok"]
