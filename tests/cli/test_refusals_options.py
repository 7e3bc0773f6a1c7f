"""Options that would have no effect, or contradict the source: refused instead of ignored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.builders import Draft, dense_experts, small_k3
from tests.cli.refusing import done, error_of, refused, run


def refusal(draft: Draft, tmp_path: Path, *args: str, code: int = 2) -> str:
    return refused(draft.write(tmp_path / "src"), tmp_path / "out", *args, code=code)


def without_experts() -> Draft:
    """A K3 whose four layers are all dense."""
    draft = small_k3()
    for layer in (1, 2, 3):
        names = [n for n in draft.tensors if f"layers.{layer}.block_sparse_moe." in n]
        for part in ("gate", "up", "down"):
            name = f"language_model.model.layers.0.mlp.{part}_proj.weight"
            draft.tensors[name.replace("layers.0", f"layers.{layer}")] = draft.tensors[name].clone()
        draft.pop(*names)
    draft.text["num_experts"] = 0
    return draft


def test_sidecar_left_out_where_there_is_none(tmp_path: Path) -> None:
    message = refusal(small_k3(), tmp_path, "--no-sidecar")
    assert "--no-sidecar: no quantised weight is decoded here" in message
    assert "--experts bf16" in message


def test_no_sidecar_is_effective_where_experts_are_decoded(tmp_path: Path) -> None:
    src = small_k3().write(tmp_path / "src")
    assert done("plan", src, "--experts", "bf16", "--no-sidecar")["grade"] == "value-exact"
    assert done("plan", src, "--experts", "bf16")["grade"] == "exact-with-sidecar"


def test_experts_of_a_model_that_has_none(tmp_path: Path) -> None:
    assert "--experts bf16: the checkpoint has no routed experts" in refusal(without_experts(), tmp_path, "--experts", "bf16")


def test_packed_experts_from_plain_ones(tmp_path: Path) -> None:
    message = refusal(dense_experts(small_k3()), tmp_path, "--experts", "packed")
    assert "--experts packed: the source's experts are not quantised" in message


def test_unpacked_experts_on_the_way_back_from_packed(tmp_path: Path) -> None:
    done("convert", small_k3().write(tmp_path / "src"), tmp_path / "native")
    made = done("convert", tmp_path / "native", tmp_path / "out", "--to", "hf", "--experts", "bf16")
    assert made["grade"] == "value-exact"  # nothing is carried along in the published layout


def test_vision_kept_where_there_is_none(tmp_path: Path) -> None:
    assert "--vision keep: the source holds no vision tensors" in refusal(small_k3(), tmp_path, "--vision", "keep")


def test_vision_kept_in_a_text_only_layout(tmp_path: Path) -> None:
    message = refusal(small_k3(vision=True), tmp_path, "--vision", "keep", "--to", "hf-text")
    assert "--vision keep: hf-text is text-only" in message


def test_tie_of_a_model_with_a_head_of_its_own(tmp_path: Path) -> None:
    message = refusal(small_k3(), tmp_path, "--tie")
    assert "--tie: language_model.lm_head.weight is stored in model-00001-of-00002.safetensors" in message
    assert "config.json says untied" in message


def test_layers_that_the_model_does_not_have(tmp_path: Path) -> None:
    message = refusal(small_k3(), tmp_path, "--layers", "2-9")
    assert "--layers 2-9: the checkpoint has layers 0-3" in message


def test_grade_that_a_plan_does_not_reach(tmp_path: Path) -> None:
    message = refusal(small_k3(), tmp_path, "--experts", "bf16", "--require", "exact", code=1)
    assert "the plan is exact-with-sidecar, --require asks for exact; because of Mxfp4(" in message


def test_gpu_that_is_not_there(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "can use no GPU here" in refusal(small_k3(), tmp_path, "--device", "cuda", code=3)


def test_memory_that_no_piece_fits(tmp_path: Path) -> None:
    message = refusal(small_k3(), tmp_path, "--memory", "1kB", code=3)
    assert "--memory 1.00 kB is less than the" in message
    assert "that the largest piece needs" in message


@pytest.mark.parametrize("args", [
    ["--sample", "3", "--all"], ["--sample", "0"], ["--layers", "0-1"], ["--workers", "0"],
])  # fmt: skip
def test_verify_options_that_exclude_each_other_or_are_none(args: list[str], tmp_path: Path) -> None:
    error_of(run("verify", tmp_path, "--source", tmp_path, *args, "--json"), 2)


@pytest.mark.parametrize("args", [
    ["--shard-size", "5 furlongs"], ["--shard-size", "0"], ["--shard-size", "-5GB"], ["--layers", "3-1"], ["--layers", "a-b"],
    ["--workers", "0"], ["--to", "gguf"], ["--experts", "int3"], ["--dtype", "int8"], ["--part", "3/2"], ["--part", "0/2"],
    ["--require", "perfect"], ["--bogus"], ["extra"],
])  # fmt: skip
def test_option_values_that_are_none(args: list[str], tmp_path: Path) -> None:
    src = small_k3().write(tmp_path / "src")
    result = run("convert", src, tmp_path / "out", *args, "--json")
    assert error_of(result, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]


@pytest.mark.parametrize("options", [
    {"to": "gguf"}, {"experts": "int3"}, {"vision": "maybe"}, {"dtype": "int8"}, {"layers": (3, 1)}, {"layers": (0,)},
])  # fmt: skip
def test_python_refuses_the_same_values(options: dict[str, object], tmp_path: Path) -> None:
    import kconv
    from kconv.errors import KconvError

    with pytest.raises(KconvError, match=r"unknown|no range"):
        kconv.plan(small_k3().write(tmp_path / "src"), **options)  # type: ignore[arg-type]


def test_plan_options_without_an_output(tmp_path: Path) -> None:
    src = small_k3().write(tmp_path / "src")
    assert "--shard-size has no effect without --out" in error_of(run("plan", src, "--shard-size", "1MB", "--json"), 2)


EFFECTS: dict[str, list[str]] = {
    "to": ["--to", "hf-text"], "experts": ["--experts", "bf16"], "vision": ["--vision", "keep"], "dtype": ["--dtype", "float32"],
    "layers": ["--layers", "0-1"], "no_sidecar": ["--experts", "bf16", "--no-sidecar"],
}  # fmt: skip


def test_every_plan_option_has_an_effect(tmp_path: Path) -> None:
    """Each option alone changes the plan: none is ignored on the way from the command line to the rules."""
    src = small_k3(vision=True).write(tmp_path / "src")
    digests = {name: done("plan", src, *args)["plan_digest"] for name, args in EFFECTS.items()}
    digests["default"] = done("plan", src)["plan_digest"]
    assert len(set(digests.values())) == len(digests), digests


@pytest.mark.parametrize("args, files", [(["--shard-size", "100kB"], 16), ([], 1)])
def test_shard_size_is_effective(args: list[str], files: int, tmp_path: Path) -> None:
    done("convert", small_k3().write(tmp_path / "src"), tmp_path / "out", *args)
    shards = list((tmp_path / "out").glob("model-*.safetensors"))
    assert len(shards) >= files if args else len(shards) == files


def test_no_digest_is_effective(tmp_path: Path) -> None:
    done("convert", small_k3().write(tmp_path / "src"), tmp_path / "out", "--digest", "none")
    files = json.loads((tmp_path / "out" / "kconv.json").read_text())["files"]
    assert all(("sha256" in known) != name.endswith(".safetensors") for name, known in files.items())


@pytest.mark.parametrize("digest", ["xxh3-128", "sha256"])
def test_the_digest_of_the_weight_files_is_as_asked(digest: str, tmp_path: Path) -> None:
    src = small_k3().write(tmp_path / "src")
    done("convert", src, tmp_path / "out", "--digest", digest)
    files = json.loads((tmp_path / "out" / "kconv.json").read_text())["files"]
    assert {digest} == {key for name, known in files.items() if name.endswith(".safetensors") for key in known} - {"size"}
    assert done("verify", tmp_path / "out", "--source", src)["files"] == []
    shard = next((tmp_path / "out").glob("*.safetensors"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert f"{shard.name} has another {digest} than the manifest" in run("verify", tmp_path / "out", "--source", src).output


@pytest.mark.parametrize("way", ["--direct", "--no-direct"])
def test_the_way_of_writing_changes_no_byte(way: str, tmp_path: Path) -> None:
    src = small_k3().write(tmp_path / "src")
    done("convert", src, tmp_path / "one")
    done("convert", src, tmp_path / "other", way)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "other" / path.name).read_bytes(), path.name
