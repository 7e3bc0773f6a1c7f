"""What `kconv verify` must find: any flipped bit in any file, a swapped expert, a missing file; and say where."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import kconv
from kconv.checkpoint import manifest as manifests
from kconv.checkpoint.reading import open_checkpoint
from kconv.cli import cli
from kconv.errors import KconvError
from kconv.storage.files import LocalFiles
from kconv.storage.hashing import digests_of, stated
from tests.reading import json_of

MOE = "language_model.model.layers.2.block_sparse_moe.experts."
FLIPS = 4


SHAPE: dict[str, Any] = {"hidden": 64, "experts": 4, "latent": 32, "expert_width": 32, "kda_head_dim": 8, "vocab": 300}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("verify") / "source"
    kconv.tiny("k3", folder, layers=4, **SHAPE, seed=5)
    return folder


@pytest.fixture(scope="module", params=("packed", "bf16"))
def converted(request, source) -> Path:
    """A converted folder with every kind of file: weights, vision, sidecar, indexes, tokenizer, manifest."""
    out = source.parent / request.param
    kconv.convert(source, out, experts=request.param, vision="keep", shard_size=200_000)
    return out


def verdict(out: Path, source: Path) -> tuple[int, str, dict]:
    """Exit code, everything said, and the JSON of `kconv verify --all`."""
    result = CliRunner().invoke(cli, ["verify", str(out), "--source", str(source), "--all", "--json"])
    data = json.loads(result.stdout)
    return result.exit_code, result.output, data


def flip(path: Path, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0] ^ (1 << bit % 8)
        file.seek(bit // 8)
        file.write(bytes([byte]))


def reseal(out: Path) -> None:
    """The manifest as if the conversion itself had written these bytes."""
    manifest = json_of(out / "kconv.json")
    for name, entry in manifest["files"].items():
        digest = stated(entry)
        assert digest, f"{name} has no digest"
        entry |= digests_of(LocalFiles(out), name, digest[0])
    (out / "kconv.json").write_bytes(manifests.dump(manifest))


@pytest.fixture
def spoilt(converted):
    """The converted folder, put back as it was after the test."""
    kept = {p: p.read_bytes() for p in converted.iterdir()}
    yield converted
    for path, blob in kept.items():
        path.write_bytes(blob)


def test_an_untouched_folder_is_identical(converted, source):
    code, _, data = verdict(converted, source)
    assert code == 0
    assert data["ok"] is True
    assert data["compared"] == len(open_checkpoint(source).entries)
    assert data["different"] == 0
    assert [data[k] for k in ("missing", "extra", "files", "differences")] == [[], [], [], []]


def test_one_flipped_bit_in_any_file_is_found_and_the_file_named(spoilt, source):
    rng = random.Random(11)
    kinds = {p.name.split("-")[0].split(".")[0] for p in spoilt.iterdir()}
    assert {"model", "vision", "config", "kconv", "tiktoken", "tokenizer_config", "generation_config"} <= kinds
    for path in sorted(spoilt.iterdir()):
        header = range(8 * 300) if path.suffix == ".safetensors" else ()
        places = [rng.randrange(8 * path.stat().st_size) for _ in range(FLIPS)]
        for bit in [*places, *rng.sample(header, 2 if header else 0)]:
            flip(path, bit)
            code, said, data = verdict(spoilt, source)
            flip(path, bit)
            assert code == 1, f"bit {bit} of {path.name}: {said}"
            assert data["ok"] is False
            assert path.name in said, f"bit {bit} of {path.name}: {said}"


def test_one_flipped_bit_in_every_tensor_is_found_by_comparing_alone(spoilt, source):
    rng = random.Random(12)
    made = open_checkpoint(spoilt)
    for name, entry in made.entries.items():
        if not name.endswith("_scale") or "packed" in spoilt.name:
            flip(spoilt / entry.file, 8 * entry.start + rng.randrange(8 * entry.spec.nbytes))
    reseal(spoilt)
    code, _, data = verdict(spoilt, source)
    assert code == 1
    assert data["files"] == []
    flipped = [n for n in made.entries if not n.endswith("_scale") or "packed" in spoilt.name]
    if spoilt.name == "packed":
        assert data["different"] == len(flipped)
    else:  # a changed value may have no code at its scale, and then codes and scale both count
        assert len(flipped) <= data["different"] <= 2 * len(flipped)


@pytest.mark.parametrize("converted", ("packed",), indirect=True)
def test_a_flipped_bit_is_said_with_tensor_and_position(spoilt, source):
    entry = open_checkpoint(spoilt).entries["model.layers.2.mlp.experts.gate_up_proj_packed"]
    assert entry.spec.shape == (4, 2 * 32, 16)
    expert, row, column = 3, 32 + 7, 5  # in the second half, which holds w3
    flip(spoilt / entry.file, 8 * (entry.start + (expert * 64 + row) * 16 + column))
    _, _, data = verdict(spoilt, source)
    assert data["different"] == 1
    assert f"{MOE}3.w3.weight_packed in model-00003-of-000007.safetensors: byte " in data["differences"][0]
    assert "at [7, 5]" in data["differences"][0]
    assert data["files"] == [f"{entry.file} has another xxh3-128 than the manifest"]


def test_a_swapped_expert_is_found(spoilt, source):
    name = "model.layers.2.mlp.experts.down_proj" + ("_packed" if spoilt.name == "packed" else "")
    entry = open_checkpoint(spoilt).entries[name]
    path, size = spoilt / entry.file, entry.spec.row_bytes
    blob = bytearray(path.read_bytes())
    one, two = (slice(entry.start + e * size, entry.start + (e + 1) * size) for e in (1, 2))
    blob[one], blob[two] = blob[two], blob[one]
    path.write_bytes(blob)
    reseal(spoilt)
    code, said, data = verdict(spoilt, source)
    assert code == 1
    assert data["different"] >= 2
    if spoilt.name == "packed":
        assert f"{MOE}1.w2.weight_packed" in said
        assert f"{MOE}2.w2.weight_packed" in said
    else:
        assert name in said or f"{MOE}1.w2.weight_packed" in said


def test_any_missing_file_is_found_and_named(spoilt, source):
    for path in sorted(spoilt.iterdir()):
        blob = path.read_bytes()
        path.unlink()
        if path.name == "kconv.json":
            with pytest.raises(KconvError, match=r"has no kconv\.json"):
                kconv.verify(spoilt, source)
        else:
            code, said, _ = verdict(spoilt, source)
            assert code == 1, path.name
            assert path.name in said, said
        path.write_bytes(blob)


def test_a_manifest_larger_than_any_machine_is_not_read(spoilt, source):
    os.truncate(spoilt / "kconv.json", 1 << 40)
    code, _, data = verdict(spoilt, source)
    assert code == 1
    assert data["files"] == ["kconv.json is not as kconv wrote it, so it cannot say what the other files should be"]


def test_another_source_is_not_the_one_it_was_made_from(converted, source, tmp_path):
    kconv.tiny("k3", tmp_path / "other", layers=4, **SHAPE, seed=6)
    code, _, data = verdict(converted, tmp_path / "other")
    assert code == 1
    assert data["different"] == data["compared"] == len(open_checkpoint(source).entries)
    kconv.tiny("k3", tmp_path / "bigger", layers=5, **SHAPE)
    code, said, data = verdict(converted, tmp_path / "bigger")
    assert code == 1
    assert any("plan digest differs" in line for line in data["files"])
    assert [n for n in data["missing"] if "layers.4." in n], said
