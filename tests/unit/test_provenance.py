"""Provenance: what the block holds, that it survives Transformers, and that `check` tells sister targets apart."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from kconv.adapters.drafts import seal
from kconv.adapters.drafts.adapter import read_source
from kconv.checkpoint.reading import open_checkpoint
from kconv.cli import cli
from kconv.errors import KconvError, Problems
from kconv.packaging import digests, provenance
from kconv.packaging.check import check
from kconv.packaging.problems import native_names
from kconv.packaging.target_model import UNKNOWN, Target, facts
from kconv.storage.opening import open_files
from kconv.text.canonical import canonical_json
from tests.hubserver.fixtures import hub
from tests.hubserver.server import HubServer

__all__ = ["hub"]
GOLDEN = Path(__file__).parents[1] / "data" / "golden"
ROPE = {"rope_type": "default", "rope_theta": 1e4, "attention_factor": 1.0, "interleaved": False}
LAST = "model-00004-of-000004.safetensors"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """tiny-k3 with tokenizer files."""
    folder = tmp_path / "target"
    shutil.copytree(GOLDEN / "tiny-k3", folder, ignore=shutil.ignore_patterns("golden*"))
    (folder / "tiktoken.model").write_bytes(b"ranks")
    added = {"508": {"content": "<|mask|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    (folder / "encoding_k3.py").write_text("# renders conversations\n")
    return folder


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """The NeMo draft golden, without provenance."""
    folder = tmp_path / "draft"
    shutil.copytree(GOLDEN / "k3-dflash-draft", folder, ignore=shutil.ignore_patterns("golden*"))
    return folder


def record(draft: Path, target: Any, **options: Any) -> dict[str, Any]:
    """Put the block into the draft's config."""
    files = open_checkpoint(draft)
    source = read_source(files)
    block = provenance.build(files, source.config, Target.open(target, **options), names=native_names(source))
    config = json.loads((draft / "config.json").read_text())
    block = seal.sealed(block, config, source.config)
    (draft / "config.json").write_text(json.dumps(config | {provenance.KEY: block}))
    return block


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache-home"))


def edit_tensor(folder: Path, name: str, change: Any) -> None:
    """Rewrite one tensor of a sharded checkpoint."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = folder / index["weight_map"][name]
    tensors = load_file(file)
    tensors[name] = change(tensors[name].clone()).contiguous()
    save_file(tensors, file, {"format": "pt"})


def embed_of(folder: Path) -> str:
    name = Target.open(folder).table("embed_tokens")
    assert name
    return name


def test_the_block_says_everything(draft: Path, target: Path) -> None:
    block = record(draft, target, repo="moonshotai/Tiny", revision="a" * 40)
    assert provenance.problems(block) == []
    about = block["target"]
    assert about["repo"] == "moonshotai/Tiny"
    assert about["revision"] == "a" * 40
    assert about["num_hidden_layers"] == 9
    assert about["quantization"] == "compressed-tensors mxfp4-pack-quantized"
    assert set(about["tokenizer"]["files"]) == {"tiktoken.model", "tokenizer_config.json"}
    assert set(about["prompt"]["files"]) == {"encoding_k3.py"}
    assert len(about["spots"]["tensors"]) == 2 * 3, "attention and MLP of each tapped layer"
    said = block["draft"]
    assert said["taps"] == {
        "layers": [1, 4, 7], "convention": "output_of_layer_0_based", "order": "as_listed", "stream": "prefix",
    }  # fmt: skip
    assert said["mask_token"]["string"] == "<|mask|>"
    assert said["block"] == {"size": 4, "counts": "positions_anchor_included", "drafted": 3}
    assert said["rope"] == "none"
    assert said["norm_eps"] == {"default": 1e-5, "q_a_layernorm": 1e-6, "kv_a_layernorm": 1e-6}
    assert block["training"]["dataset"] == UNKNOWN
    hashes = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in target.glob("*.safetensors")}
    assert about["weights"]["sha256"] == digests.files_digest(hashes)


def test_digest_forms_are_what_they_say(target: Path) -> None:
    whole = Target.open(target)
    entry = whole.entry(embed_of(target))
    table = load_file(target / entry.file)[embed_of(target)].view(torch.uint8).numpy().tobytes()
    rows, width = entry.spec.shape[0], entry.spec.row_bytes
    step = -(-rows // 16)
    runs = [hashlib.sha256(table[i * width : (i + step) * width]).hexdigest() for i in range(0, rows, step)]
    head = f"rows-1 BF16 {rows}x{entry.spec.shape[1]}"
    found = digests.rows_digest(whole.files, entry)
    assert found["runs"] == runs
    assert found["sha256"] == hashlib.sha256(("\n".join([head, *runs]) + "\n").encode()).hexdigest()
    assert digests.row_digest(whole.files, entry, 5) == hashlib.sha256(table[5 * width : 6 * width]).hexdigest()
    assert canonical_json({"b": 1, "a": {"transformers_version": "x", "é": [1, 2.5, None]}}) == (
        '{"a":{"é":[1,2.5,null]},"b":1}'.encode()
    )
    assert [digests.row_runs(n) for n in (0, 1, 17)] == [[], [(0, 1)], [(k, min(2, 17 - k)) for k in range(0, 17, 2)]]


def test_exact_and_every_way_to_differ(draft: Path, target: Path) -> None:
    ours: dict[str, Any] = {"target_repo": "moonshotai/Tiny", "target_revision": "a" * 40}
    record(draft, target, repo="moonshotai/Tiny", revision="a" * 40)
    result = check(draft, target, **ours)
    assert (result["fits"], result["verdict"], result["differences"]) == (True, "exact", [])
    assert check(draft, target)["verdict"] == "same-content", "a folder does not say its revision"

    def named(**options: Any) -> list[str]:
        result = check(draft, target, **(ours | options))
        assert not result["fits"]
        return [row["field"] for row in result["differences"]]

    assert named(target_revision="b" * 40) == ["target.revision"]
    assert named(target_repo="other/Tiny") == ["target.repo"]
    assert check(draft, target, content=True, target_repo="other/Tiny", target_revision="b" * 40)["verdict"] == "same-content"
    (target / "tiktoken.model").write_bytes(b"other ranks")
    assert named() == ["target.tokenizer"]
    assert named(content=True) == ["target.tokenizer"]


@pytest.mark.parametrize(("field", "value"), [
    ("target.vocab_size", 1024), ("target.num_hidden_layers", 18), ("target.hidden_size", 256), ("target.dtype", "float16"),
    ("target.architecture", "Other"), ("target.model_type", "other"), ("target.quantization", "fp8"),
    ("draft.taps.layers", [1, 4, 6]), ("draft.mask_token.id", 507), ("draft.mask_token.string", "<|pad|>"),
    ("draft.mask_token.row_sha256", "0" * 64), ("draft.block.size", 8), ("draft.norm_eps.default", 1e-6),
    ("draft.causality.sliding_window", 16), ("draft.rope", ROPE),
])  # fmt: skip
def test_a_recorded_statement_that_the_configs_contradict_differs(draft: Path, target: Path, field: str, value: Any) -> None:
    record(draft, target)
    config = json.loads((draft / "config.json").read_text())
    *path, key = field.split(".")
    part = config[provenance.KEY]
    for step in path:
        part = part[step]
    assert part[key] != value
    part[key] = value
    (draft / "config.json").write_text(json.dumps(config))
    done = CliRunner().invoke(cli, ["check", str(draft), "--target", str(target), "--json"])
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found["verdict"] == "different"
    sealed = f"{provenance.KEY}.{'.'.join(field.split('.')[:2])}"
    assert [row["field"] for row in found["differences"]] == [field, sealed]


def test_one_changed_embedding_row(draft: Path, target: Path) -> None:
    record(draft, target)

    def bump(table: torch.Tensor) -> torch.Tensor:
        table[200, 3] += 1
        return table

    edit_tensor(target, embed_of(target), bump)
    result = check(draft, target)
    rows = {row["field"]: row for row in result["differences"]}
    assert rows.keys() == {"target.weights", "target.tensors.embed_tokens"}
    assert rows["target.tensors.embed_tokens"]["detail"] == "they differ in rows 192-223"


def test_a_layer_trained_further(draft: Path, target: Path) -> None:
    """embed_tokens and lm_head frozen, as fine-tunes often leave them; attention of a tapped layer moved."""
    record(draft, target)
    name = next(n for n in Target.open(target).weight_map if n.endswith("layers.4.self_attn.o_proj.weight"))
    edit_tensor(target, name, lambda t: t * 1.01)
    fields = [row["field"] for row in check(draft, target)["differences"]]
    assert fields == ["target.weights", f"target.spots {name}"]
    fields = [row["field"] for row in check(draft, target, quick=True)["differences"]]
    assert fields == [f"target.spots {name}"]


def test_config_and_draft_changes(draft: Path, target: Path) -> None:
    record(draft, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"transformers_version": "9.9"}, indent=8))
    assert check(draft, target)["fits"], "another version or layout of the file is no other config"
    (target / "config.json").write_text(json.dumps(config | {"bos_token_id": 7}))
    assert [r["field"] for r in check(draft, target)["differences"]] == ["target.config"]
    (target / "config.json").write_text(json.dumps(config))
    tensors = load_file(draft / "model.safetensors")
    tensors["norm.weight"] = tensors["norm.weight"] + 1
    save_file(tensors, draft / "model.safetensors")
    assert [r["field"] for r in check(draft, target)["differences"]] == ["draft.weights"]


def test_shapes_that_do_not_fit(draft: Path, target: Path) -> None:
    config = json.loads((target / "config.json").read_text())
    config["text_config"] |= {"hidden_size": 64, "num_hidden_layers": 5, "vocab_size": 100}
    (target / "config.json").write_text(json.dumps(config))
    rows = {row["field"]: row for row in check(draft, target)["differences"]}
    assert (rows["shape.hidden_size"]["recorded"], rows["shape.hidden_size"]["found"]) == (128, 64)
    assert rows["shape.vocab_size"]["found"] == 100
    assert rows["shape.taps"]["detail"] == "layer 7 of 5 (0..4)"


def test_without_provenance_equal_shapes_prove_nothing(draft: Path, target: Path) -> None:
    result = check(draft, target)
    assert (result["fits"], result["verdict"]) == (False, "unknown")
    embed = load_file(target / Target.open(target).entry(embed_of(target)).file)[embed_of(target)]
    tensors = load_file(draft / "model.safetensors")
    save_file(tensors | {"embed_tokens.weight": embed}, draft / "model.safetensors")
    result = check(draft, target)
    assert (result["verdict"], "copy of embed_tokens" in result["compared"]) == ("unknown", True)
    other = embed.clone()
    other[3] += 1
    save_file(tensors | {"embed_tokens.weight": other}, draft / "model.safetensors")
    result = check(draft, target)
    assert (result["verdict"], result["differences"][0]["field"]) == ("different", "copy of embed_tokens")


def test_survives_transformers(draft: Path, target: Path, tmp_path: Path) -> None:
    """Read and written by Transformers 5.24: as a plain config, and with the native model and its weights."""
    from transformers import PreTrainedConfig

    import kconv

    block = record(draft, target)
    plain = PreTrainedConfig.from_pretrained(draft)
    plain.save_pretrained(tmp_path / "plain")
    assert json.loads((tmp_path / "plain" / "config.json").read_text())[provenance.KEY] == block
    kconv.convert(draft, tmp_path / "native")
    carried = json.loads((tmp_path / "native" / "config.json").read_text()).get(provenance.KEY)
    assert carried == block, "conversion carries the block"
    model = kconv.load(tmp_path / "native")
    model.save_pretrained(tmp_path / "again")
    again = type(model).from_pretrained(tmp_path / "again")
    again.save_pretrained(tmp_path / "twice")
    assert json.loads((tmp_path / "twice" / "config.json").read_text())[provenance.KEY] == block


def test_converted_targets_speak_for_their_source(draft: Path, target: Path, tmp_path: Path) -> None:
    import kconv

    record(draft, target, repo="moonshotai/Tiny", revision="a" * 40)
    kconv.convert(target, tmp_path / "native")
    result = check(draft, tmp_path / "native", target_repo="moonshotai/Tiny", target_revision="a" * 40)
    assert result["fits"], result["differences"]
    for field in ("target.config", "target.tokenizer", "target.tensors.embed_tokens", "target.tensors.lm_head"):
        assert field in result["compared"]


def test_from_the_hub_with_ranges_only(hub: HubServer, draft: Path, target: Path) -> None:
    commit = hub.seed_folder("moonshotai/Tiny", target)
    block = record(draft, "hf://moonshotai/Tiny")
    assert (block["target"]["repo"], block["target"]["revision"]) == ("moonshotai/Tiny", commit)
    assert block["target"]["weights"]["sha256"] != UNKNOWN, "the Hub states every file's sha256"
    before = hub.served()
    result = check(draft, "hf://moonshotai/Tiny")
    assert result["verdict"] == "exact"
    spots, tables = 6 * digests.SPOT, sum(2 * 512 * 128 for _ in range(2))
    assert hub.served() - before <= spots + tables // 8, "the tables were not read: the weight files' sha256 prove them"
    assert check(draft, target, target_repo="moonshotai/Tiny", target_revision=commit)["verdict"] == "exact"
    hub.seed("moonshotai/Tiny", {"README.md": b"new"})
    result = check(draft, "hf://moonshotai/Tiny")
    assert [row["field"] for row in result["differences"]] == ["target.revision"]
    assert check(draft, f"hf://moonshotai/Tiny@{commit}")["verdict"] == "exact"
    assert check(draft, "hf://moonshotai/Tiny", content=True)["verdict"] == "same-content"


def test_cost_does_not_grow_with_the_checkpoint(hub: HubServer, tmp_path: Path) -> None:
    """Twice the experts in four times the layers: the same ranges, but for longer headers."""
    from kconv.synthesis.families import tiny

    served, sizes = [], []
    for n, (layers, experts) in enumerate([(4, 8), (16, 16)]):
        folder = tmp_path / f"t{n}"
        tiny("k3", folder, layers=layers, experts=experts, vocab=4096, hidden=256, expert_width=256)
        sizes.append(sum(p.stat().st_size for p in folder.glob("*.safetensors")))
        hub.seed_folder(f"lab/t{n}", folder)
        before = hub.served()
        facts(Target.open(f"hf://lab/t{n}"), [1, 2])
        served.append(hub.served() - before)
    assert sizes[1] > 3 * sizes[0]
    assert served[1] < 1.2 * served[0]


def test_damaged_blocks_are_refused(draft: Path, target: Path) -> None:
    block = record(draft, target)
    config = json.loads((draft / "config.json").read_text())

    def put(changed: Any) -> None:
        (draft / "config.json").write_text(json.dumps(config | {provenance.KEY: changed}))

    put(block | {"format": 3})
    with pytest.raises(KconvError, match="has the format 3, this kconv reads 1 and 2"):
        check(draft, target)
    put(block | {"target": block["target"] | {"revision": "main"}})
    with pytest.raises(Problems, match=r"target.revision: 'main' does not match"):
        check(draft, target)
    for part in ("target", "draft", "training", "made_by"):
        for key in block[part]:
            less = {k: v for k, v in block[part].items() if k != key}
            assert provenance.problems(block | {part: less}), f"{part}.{key} may not be left out"


@pytest.mark.parametrize(
    ("path", "value"),
    [(("tensors", "norm", "runs"), ["0" * 64]), (("tensors", "embed_tokens", "dtype"), "F32"),
     (("tensors", "lm_head", "shape"), [256, 64]), (("tensors", "norm", "sha256"), "0" * 64),
     (("tokenizer", "sha256"), "0" * 64), (("tokenizer", "files"), {})],
)  # fmt: skip
def test_a_digest_that_is_not_that_of_its_recorded_parts_is_damage(
    draft: Path, target: Path, path: tuple[str, ...], value: Any
) -> None:
    record(draft, target)
    assert check(draft, target)["fits"]
    config = json.loads((draft / "config.json").read_text())
    held = config[provenance.KEY]["target"]
    for key in path[:-1]:
        held = held[key]
    held[path[-1]] = value
    (draft / "config.json").write_text(json.dumps(config))
    with pytest.raises(Problems, match=f"{provenance.KEY}.target.{'.'.join(path[:-1])}: the sha256 is not that of its"):
        check(draft, target)


def test_command_line(draft: Path, target: Path) -> None:
    record(draft, target)
    run = CliRunner()
    done = run.invoke(cli, ["check", str(draft), "--target", str(target), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["fits"] is True
    (target / "tiktoken.model").write_bytes(b"other")
    done = run.invoke(cli, ["check", str(draft), "--target", str(target)])
    assert done.exit_code == 1
    assert "target.tokenizer" in done.stdout
    assert "tiktoken.model differs" in done.stdout
    assert run.invoke(cli, ["check", str(target), "--target", str(target)]).exit_code == 2
    assert run.invoke(cli, ["check", str(draft), "--target", str(draft / "nothing")]).exit_code == 2


def test_open_files_is_enough(target: Path) -> None:
    assert Target(open_files(target)).table("lm_head") == "language_model.lm_head.weight"
