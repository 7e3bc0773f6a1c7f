"""Every single edit of a package, of its provenance or of its target is found: none is accepted as exact."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import kconv.speculative
from kconv.cli import cli
from kconv.errors import KconvError, Problems
from kconv.packaging import provenance
from kconv.packaging.check import check
from kconv.packaging.package import package
from kconv.storage.files import LocalFiles
from kconv.storage.known_hashes import sha256_of_files
from kconv.synthesis.drafts import KINDS
from tests.publish.packaged import DECLARED, WHOSE, config_of, packaged

Path_ = tuple[str, ...]
BULK = ("keys", "runs", "files")


@pytest.fixture(params=sorted(KINDS))
def package_of(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A package of each kind, for a K2.5 target where it drafts for one; and the target."""
    target = request.getfixturevalue("k25_target" if request.param == "k25-dflash" else "target")
    return packaged(request.param, tmp_path, target)[0], target


def leaves(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Every value of an object by its path; of long tables of digests one."""
    if not isinstance(value, dict) or not value:
        yield path
        return
    keys = list(value)
    for key in keys[:1] if path and path[-1] in BULK else keys:
        yield from leaves(value[key], (*path, key))


def other(value: Any) -> Any:
    """Another value of the same type, as far as there is one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 1.5 + 0.25
    if isinstance(value, list):
        return [other(value[0]), *value[1:]] if value else [1]
    if isinstance(value, str):
        return value.replace(value[-1], "0" if value[-1] != "0" else "1") if value else "x"
    return 1 if value is None else {"new": 1}


def put(config: dict[str, Any], path: Path_, value: Any) -> dict[str, Any]:
    """A copy of a config with one value changed."""
    changed = json.loads(json.dumps(config))
    part = changed
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return changed


def said(out: Path, target: Path) -> set[str] | str:
    """The fields that `check` names, or why it refuses to read the package at all."""
    try:
        result = check(out, target, **WHOSE, quick=True, tables=False)
    except KconvError as e:
        return str(e)
    assert result["verdict"] == "different"
    return {row["field"] for row in result["differences"]}


def test_every_edited_field_of_config_and_provenance_is_found_and_named(package_of: tuple[Path, Path]) -> None:
    out, target = package_of
    assert check(out, target, **WHOSE)["verdict"] == "exact"
    config = config_of(out)
    for path in list(leaves(config)):
        (out / "config.json").write_text(json.dumps(put(config, path, other(_at(config, path)))))
        found = said(out, target)
        names = {path[1], path[-1]} if path[0] == provenance.KEY else {path[0]}
        if isinstance(found, set):
            assert any(name in field for field in found for name in names), (path, found)
        elif path[0] == provenance.KEY:
            assert provenance.KEY in found, (path, found)


def test_every_removed_field_of_config_is_found(package_of: tuple[Path, Path]) -> None:
    out, target = package_of
    config = config_of(out)
    for key in config.keys() - {provenance.KEY}:
        (out / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != key}))
        assert said(out, target)
    (out / "config.json").write_text(json.dumps(config | {"surplus": None}))
    assert said(out, target) == {"config.surplus"}


def test_an_edited_package_is_neither_loaded_nor_packaged_again(package_of: tuple[Path, Path], tmp_path: Path) -> None:
    out, target = package_of
    config = config_of(out)
    kconv.speculative.load_draft(out)
    (out / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with pytest.raises(Problems, match="contradicts its own kconv_provenance"):
        kconv.speculative.load_draft(out)
    with pytest.raises(Problems, match=r"draft.config.rms_norm_eps is 0.5, 1e-0. was recorded"):
        package(out, target, tmp_path / "again")
    assert not (tmp_path / "again").exists()
    (out / "config.json").write_text(json.dumps(put(config, (provenance.KEY, "training", "dataset"), "another")))
    with pytest.raises(Problems, match=r"kconv_provenance.training.dataset"):
        kconv.speculative.load_draft(out)


def test_a_package_without_a_seal_can_be_checked_and_is_never_exact(package_of: tuple[Path, Path]) -> None:
    out, target = package_of
    config = config_of(out)
    earlier = {k: v for k, v in config[provenance.KEY].items() if k not in ("contract", "config", "seal")} | {"format": 1}
    (out / "config.json").write_text(json.dumps(config | {provenance.KEY: earlier}))
    result = check(out, target, **WHOSE)
    assert [row["field"] for row in result["differences"]] == ["kconv_provenance.seal"], "kconv.json still states one"
    (out / "kconv.json").unlink()
    result = check(out, target, **WHOSE)
    assert (result["fits"], result["verdict"]) == (True, "same-content")
    assert {row["field"] for row in result["not_compared"]} >= {"draft.config", provenance.KEY}


def test_a_block_that_was_sealed_again_is_not_the_one_that_the_manifest_states(tmp_path: Path, target: Path) -> None:
    from kconv.adapters.drafts import seal
    from kconv.adapters.drafts.adapter import read_source
    from kconv.checkpoint.reading import open_checkpoint

    out, _ = packaged("k3-dflash", tmp_path, target)
    config = config_of(out) | {"rms_norm_eps": 1e-3}
    block = config[provenance.KEY]
    block["draft"]["norm_eps"]["default"] = 1e-3
    (out / "config.json").write_text(json.dumps(config))
    native = read_source(open_checkpoint(out)).config
    (out / "config.json").write_text(json.dumps(config | {provenance.KEY: seal.sealed(block, config, native)}))
    result = check(out, target, **WHOSE)
    assert [row["field"] for row in result["differences"]] == ["kconv_provenance.seal"]


def test_a_converted_package_is_held_against_the_same_contract(tmp_path: Path, target: Path) -> None:
    out, _ = packaged("k3-dflash2", tmp_path, target)
    native = tmp_path / "native"
    kconv.convert(out, native)
    assert check(native, target, **WHOSE)["verdict"] == "exact"
    config = config_of(native)
    (native / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert "draft.config.rms_norm_eps" in {row["field"] for row in check(native, target, **WHOSE)["differences"]}


@pytest.mark.parametrize("family", ["target", "k25_target"])
def test_one_bit_anywhere_in_the_target_is_found(family: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    given = request.getfixturevalue(family)
    target = tmp_path / "target"
    shutil.copytree(given, target)
    out, _ = packaged("k3-dflash" if family == "target" else "k25-dflash", tmp_path, target)
    assert check(out, target, **WHOSE)["verdict"] == "exact"
    files, generator = sorted(target.glob("*.safetensors")), random.Random(4)
    for _ in range(24):
        file = generator.choice(files)
        raw = bytearray(file.read_bytes())
        at = generator.randrange(8 + int.from_bytes(raw[:8], "little"), len(raw))
        raw[at] ^= 1
        file.write_bytes(raw)
        result = check(out, target, **WHOSE)
        assert not result["fits"]
        assert "target.weights" in {row["field"] for row in result["differences"]}
        raw[at] ^= 1
        file.write_bytes(raw)
    assert check(out, target, **WHOSE)["verdict"] == "exact"


def test_a_pipe_for_a_weight_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(KconvError, match="is no regular file"):
        sha256_of_files(LocalFiles(tmp_path), ["model.safetensors"], "target")


def test_quick_says_what_was_not_read_and_is_never_exact(tmp_path: Path, target: Path) -> None:
    out, _ = packaged("k3-dflash", tmp_path, target)
    copied = tmp_path / "target"
    shutil.copytree(target, copied)
    shard = sorted(copied.glob("*.safetensors"))[1]
    tensors = load_file(shard)
    name = next(n for n, t in tensors.items() if t.dim() == 1 and t.is_floating_point())
    tensors[name] = torch.nextafter(tensors[name], torch.full_like(tensors[name], 9.0))
    save_file(tensors, shard, {"format": "pt"})
    args = ["check", str(out), "--target", str(copied), "--target-repo", "moonshotai/Tiny", "--target-revision", "a" * 40]
    run = CliRunner()
    assert run.invoke(cli, args).exit_code == 1
    quick = run.invoke(cli, [*args, "--quick"])
    assert quick.exit_code == 0
    assert "not compared: target.weights (--quick: of " in quick.stdout
    assert "same-content" in quick.stdout
    unread = tmp_path / "quick"
    package(tmp_path / "draft", target, unread, declared=DECLARED.get("k3-dflash"), quick=True, **WHOSE)
    assert check(unread, target, **WHOSE)["verdict"] == "same-content", "what was not recorded cannot be compared"


def _at(config: dict[str, Any], path: Path_) -> Any:
    value: Any = config
    for key in path:
        value = value[key]
    return value
