"""`kconv package`: every family packaged, loaded again, checked against its target, refused where it would fail in silence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

import kconv
import kconv.speculative
from kconv.adapters.drafts.adapter import read_source
from kconv.checkpoint.reading import open_checkpoint
from kconv.cli import cli
from kconv.errors import KconvError
from kconv.packaging import provenance, runtimes
from kconv.packaging.check import check
from kconv.packaging.package import package
from kconv.packaging.target_model import Target
from kconv.publishing import modelcard_rules
from kconv.synthesis.drafts import KINDS
from kconv.synthesis.families import tiny
from tests.hubserver import HubServer
from tests.publish.packaged import DECLARED, WHOSE, config_of, draft_of, packaged


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind(kind: str, tmp_path: Path, target: Path) -> None:
    """Loads again natively with the same numbers, fits its target exactly, has a valid card and a true manifest."""
    out, data = packaged(kind, tmp_path, target)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["draft", "out"], "nothing unfinished is left beside it"
    assert check(out, target, **WHOSE)["verdict"] == "exact"
    was, now = (
        kconv.load(f, dtype=torch.float32, **({"declared": DECLARED[kind]} if False else {})) for f in (tmp_path / "draft", out)
    )
    ours, theirs = was.state_dict(), now.state_dict()
    left_out = {n for n in ours if n not in theirs}
    assert left_out <= {"embed_tokens.weight", "lm_head.weight"}
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)
    readme = (out / "README.md").read_text()
    assert modelcard_rules.problems(readme) == []
    assert ModelCard(readme).data.to_dict()["base_model"] == "moonshotai/Tiny"
    assert "a" * 40 in readme
    manifest = config_of(out, "kconv.json")
    files = {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}
    assert set(manifest["files"]) | {"kconv.json"} == files
    assert set(data["runtimes"]) == set(manifest["runtimes"])
    for name, file in data["runtimes"].items():
        config = config_of(out, file)
        assert provenance.problems(config[provenance.KEY]) == []
        assert "auto_map" not in config
        assert "quantization_config" not in config
        for path in runtimes.needed(runtimes.RUNTIMES[name], read_source(open_checkpoint(out)).config):
            assert runtimes.lookup(config, path) is not None, (name, path)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_main_config_means_what_the_source_meant(kind: str, tmp_path: Path, target: Path) -> None:
    out, _ = packaged(kind, tmp_path, target)
    was = read_source(open_checkpoint(tmp_path / "draft"), DECLARED.get(kind)).config
    now = read_source(open_checkpoint(out)).config
    spoken = {"dialect", "owns_embed_tokens", "owns_lm_head", "kconv_provenance", "aux_layer_ids", "window_rule"}
    defaults = {"target_hidden_size": 128, "draft_vocab_size": 512}
    for key in (was.keys() | now.keys()) - spoken - {"is_causal", "layer_is_causal"}:
        before, after = (c.get(key, defaults.get(key)) or None for c in (was, now))
        assert before == after, key
    assert runtimes.configs.causal_layers(was) == runtimes.configs.causal_layers(now)


def test_conventions_of_each_runtime(tmp_path: Path, k25_target: Path) -> None:
    out, data = packaged("k25-dflash", tmp_path, k25_target)
    assert data["runtimes"] == {
        "vllm": "config.json", "sglang": "config.json", "trtllm": "config.json", "mlx": "config.json",
        "transformers": "config.json", "max": "runtimes/max/config.json", "speculators": "runtimes/speculators/config.json",
    }  # fmt: skip
    shared, modular = config_of(out), config_of(out, "runtimes/max/config.json")
    assert shared["dflash_config"]["target_layer_ids"] == [1, 4, 7]
    assert modular["dflash_config"]["target_layer_ids"] == [2, 5, 8], "MAX reads the layer before the one it is told"
    assert config_of(out, "runtimes/speculators/config.json")["aux_hidden_state_layer_ids"] == [2, 5, 8]
    assert shared["block_size"] == shared["dflash_config"]["block_size"] == 4
    assert shared["num_target_layers"] == 9
    assert shared["is_causal"] is False
    for key in ("rope_parameters", "rope_scaling"):
        assert shared[key]["attention_factor"] == 1.0
    assert shared["rope_theta"] == shared["rope_parameters"]["rope_theta"] == 50000.0
    assert shared["rope_scaling"]["type"] == "yarn"
    assert shared["aux_hidden_stream"] == "prefix"
    block = shared[provenance.KEY]["draft"]
    assert block["rope"]["attention_factor"] == 1.0
    assert block["block"] == {"size": 4, "counts": "positions_anchor_included", "drafted": 3}


def test_nemo_config_is_clean(tmp_path: Path, target: Path) -> None:
    """What NeMo's own config leaks from the target is gone: facts, section 5, defects a, b, d, e, f, g."""
    out, data = packaged("k3-dflash", tmp_path, target)
    config = config_of(out)
    assert data["runtimes"] == {"nemo": "config.json"}
    for key in ("auto_map", "quantization_config", "moe_intermediate_size", "num_experts_per_token", "routed_expert_hidden_size",
                "head_dim", "rope_theta", "rope_parameters", "rope_scaling"):  # fmt: skip
        assert key not in config, key
    assert config["is_causal"] is False
    assert config["target_hidden_size"] == 128
    assert config["aux_hidden_stream"] == "prefix"
    assert config[provenance.KEY]["draft"]["norm_eps"]["q_a_layernorm"] == 1e-6


def with_copies(draft: Path, target: Path, change: bool = False) -> None:
    """Give a draft copies of its target's tables, as speculators exports have them."""
    whole = Target.open(target)
    tensors = load_file(draft / "model.safetensors")
    for kind in ("embed_tokens", "lm_head"):
        name = whole.table(kind)
        assert name
        table = load_file(target / whole.entry(name).file)[name].clone()
        table[7, 3] += 1 if change else 0
        tensors[f"{kind}.weight"] = table
    save_file(tensors, draft / "model.safetensors")


def test_copies_are_compared_and_dropped_or_kept(tmp_path: Path, target: Path) -> None:
    source = draft_of("k25-dflash", tmp_path / "draft")
    with_copies(source, target)
    declared = DECLARED["k25-dflash"]
    dropped = package(source, target, tmp_path / "dropped", declared=declared)
    assert dropped["tables"] == {"embed_tokens": "borrowed", "lm_head": "borrowed"}
    assert "embed_tokens.weight" not in open_checkpoint(tmp_path / "dropped").entries
    assert any("is the target's, byte for byte, and left out" in note for note in dropped["notes"])
    (target / "LICENSE").write_text("the target's")
    kept = package(source, target, tmp_path / "kept", declared=declared, tables="keep")
    (target / "LICENSE").unlink()
    assert kept["tables"] == {"embed_tokens": "copy", "lm_head": "copy"}
    assert "embed_tokens.weight" in open_checkpoint(tmp_path / "kept").entries
    assert (tmp_path / "kept" / "LICENSE.target").read_text() == "the target's"
    with_copies(source, target, change=True)
    own = package(source, target, tmp_path / "own", declared=declared)
    assert own["tables"] == {"embed_tokens": "own", "lm_head": "own"}
    assert any("embed_tokens differs from the target's and is kept" in note for note in own["notes"])
    unread = package(source, target, tmp_path / "unread", declared=declared, read_tables=False)
    assert unread["tables"]["lm_head"] == "unknown"


def edit(folder: Path, **changes: Any) -> None:
    """Change config keys; None removes one."""
    config = config_of(folder) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def refused(draft: Path, target: Path, tmp_path: Path, **options: Any) -> str:
    options = {"declared": DECLARED["k25-dflash"]} | options
    with pytest.raises(KconvError) as error:
        package(draft, target, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))
    return str(error.value)


def test_mask_tokens(tmp_path: Path, target: Path) -> None:
    text = config_of(target)
    pad, media = text["pad_token_id"], text["media_placeholder_token_id"]
    draft = draft_of("k25-dflash", tmp_path / "draft")
    config = config_of(draft)
    for mask, key, allow in (
        (pad, "pad_token_id", "mask-is-pad"),
        (media, "media_placeholder_token_id", "mask-is-media-placeholder"),
    ):
        edit(draft, dflash_config=config["dflash_config"] | {"mask_token_id": mask})
        assert f"mask_token_id {mask} is the target's {key}; if it was trained so, --allow {allow}" in refused(
            draft, target, tmp_path
        )
        package(draft, target, tmp_path / f"out{mask}", declared=DECLARED["k25-dflash"], allow=[allow])
    edit(draft, dflash_config={"target_layer_ids": [1, 4, 7]})
    assert "no mask_token_id" in refused(draft, target, tmp_path)
    assert "nothing called mask-is-fine can be allowed; here: mask-is-bos" in refused(
        draft, target, tmp_path, allow=["mask-is-fine"]
    )
    edit(draft, dflash_config=config["dflash_config"] | {"mask_token_id": 600})
    assert "600" in refused(draft, target, tmp_path)


def test_block_size_taps_and_stream(tmp_path: Path, target: Path, k25_target: Path) -> None:
    draft = draft_of("k25-dflash", tmp_path / "draft")
    config = config_of(draft)
    edit(draft, block_size=None)
    assert "no block_size" in refused(draft, target, tmp_path)
    assert package(draft, target, tmp_path / "declared", declared={"block_size": 4, "capture_stream": "prefix"})
    edit(draft, block_size=4)
    assert "capture stream is not known" in refused(draft, target, tmp_path, declared={})
    edit(draft, dflash_config=config["dflash_config"] | {"target_layer_ids": [1, 4, 9]}, num_target_layers=10)
    said = refused(draft, target, tmp_path)
    assert "shape.taps: 9 in the draft, 9 in the target" in said
    assert "shape.num_hidden_layers: 10 in the draft, 9 in the target" in said
    edit(draft, dflash_config=config["dflash_config"] | {"target_layer_ids": [4, 1, 7]}, num_target_layers=9)
    assert "max: it concatenates in layer order, the draft was trained on [4, 1, 7]" in refused(
        draft, k25_target, tmp_path, runtime=["max"]
    )
    data = package(draft, k25_target, tmp_path / "unordered", declared=DECLARED["k25-dflash"])
    assert "max" not in data["runtimes"]
    assert any(note.startswith("not written for max: it concatenates in layer order") for note in data["notes"])
    assert any("not in layer order" in note for note in data["notes"])


def test_runtimes_that_cannot(tmp_path: Path, target: Path) -> None:
    draft = draft_of("k25-dflash", tmp_path / "draft")
    assert "no runtime is called foo" in refused(draft, target, tmp_path, runtime=["foo"])
    assert "nemo: it does not take dflash/gqa drafts" in refused(draft, target, tmp_path, runtime=["vllm", "nemo"])
    rope = config_of(draft)["rope_scaling"]
    edit(draft, rope_scaling={k: v for k, v in rope.items() if k != "mscale"})
    assert "max: it needs a complete YaRN block: mscale" in refused(draft, target, tmp_path, runtime=["max"])
    edit(draft, rope_scaling=rope, hidden_act="gelu")
    assert "hidden_act must be silu, not gelu" in refused(draft, target, tmp_path, runtime=["sglang"])
    alone = package(
        draft_of("k25-dflash", tmp_path / "d2"), target, tmp_path / "o2", runtime=["speculators"], declared=DECLARED["k25-dflash"]
    )
    assert alone["runtimes"] == {"speculators": "config.json"}


def test_max_is_offered_for_kimi_k25_targets_only(tmp_path: Path, target: Path, k25_target: Path) -> None:
    draft = draft_of("k25-dflash", tmp_path / "draft")
    said = refused(draft, target, tmp_path, runtime=["max"])
    assert "max: it drafts for kimi_k25 targets only, this one is kimi_k3" in said
    assert "max" not in package(draft, target, tmp_path / "k3", declared=DECLARED["k25-dflash"])["runtimes"]
    assert "max" in package(draft, k25_target, tmp_path / "k25", declared=DECLARED["k25-dflash"])["runtimes"]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_runtime_s_config_reads_back_to_the_same_draft(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    target = request.getfixturevalue("k25_target" if kind == "k25-dflash" else "target")
    out, data = packaged(kind, tmp_path, target)
    main = kconv.speculative.load_draft(out)
    for file in sorted(set(data["runtimes"].values()) - {"config.json"}):
        copied = tmp_path / "copied"
        shutil.copytree(out, copied)
        shutil.copy(out / file, copied / "config.json")
        other = kconv.speculative.load_draft(copied)
        assert other.config.target_layer_ids == main.config.target_layer_ids == data["provenance"]["draft"]["taps"]["layers"]
        assert other.config.causal_layers == main.config.causal_layers
        assert all(torch.equal(a, other.state_dict()[n]) for n, a in main.state_dict().items())
        assert check(copied, target, **WHOSE)["verdict"] == "exact"
        shutil.rmtree(copied)


def test_another_target(tmp_path: Path, target: Path) -> None:
    draft = draft_of("k25-dflash", tmp_path / "draft")
    other = tmp_path / "other"
    tiny("k3", other, hidden=64, vocab=1024)
    said = refused(draft, other, tmp_path)
    assert "shape.hidden_size: 128 in the draft, 64 in the target" in said
    assert "shape.vocab_size: 512 in the draft, 1024 in the target" in said


def test_strict_keys_both_ways(tmp_path: Path, target: Path) -> None:
    draft = draft_of("k25-dflash", tmp_path / "draft")
    tensors = load_file(draft / "model.safetensors")
    less = {k: v for k, v in tensors.items() if k != "layers.1.mlp.up_proj.weight"}
    save_file(less | {"layers.0.extra.weight": torch.zeros(3), "norm.weight": torch.zeros(5)}, draft / "model.safetensors")
    said = refused(draft, target, tmp_path)
    assert "missing: layers.1.mlp.up_proj.weight" in said
    assert "not explained by the config: layers.0.extra.weight" in said
    assert "norm.weight is [5], the config makes it [128]" in said


def test_reduced_vocabularies(tmp_path: Path, target: Path) -> None:
    """KB-124, KB-125: maps missing, maps that do not fit, a head of the wrong vocabulary."""
    declared = {**DECLARED["k3-eagle3"]}
    good = draft_of("k3-eagle3", tmp_path / "good", draft_vocab=32)
    assert package(good, target, tmp_path / "out-good", declared=declared)["tables"]["lm_head"] == "own"
    tensors = load_file(good / "model.safetensors")
    for name, change, said in [
        ("no-maps", lambda t: [t.pop("d2t"), t.pop("t2d")], "without d2t and t2d"),
        ("no-head", lambda t: t.pop("lm_head.weight"), "without lm_head.weight"),
        ("wrong-count", lambda t: t["t2d"].__setitem__(int((~t["t2d"].bool()).nonzero()[0]), True), "vocabulary maps"),
        ("out-of-range", lambda t: t["d2t"].__setitem__(0, 9999), "d2t leads draft token 0 to token 9999 of 512"),
    ]:
        bad = tmp_path / name
        shutil.copytree(good, bad)
        changed = {k: v.clone() for k, v in tensors.items()}
        change(changed)
        save_file(changed, bad / "model.safetensors")
        assert said in refused(bad, target, tmp_path, declared=declared)


def test_a_head_that_nobody_has(tmp_path: Path, target: Path) -> None:
    headless = tmp_path / "headless"
    shutil.copytree(target, headless)
    index = json.loads((headless / "model.safetensors.index.json").read_text())
    file = headless / index["weight_map"].pop("language_model.lm_head.weight")
    tensors = load_file(file)
    del tensors["language_model.lm_head.weight"]
    save_file(tensors, file, {"format": "pt"})
    (headless / "model.safetensors.index.json").write_text(json.dumps(index))
    draft = draft_of("k25-dflash", tmp_path / "draft")
    assert "nothing can be borrowed" in refused(draft, headless, tmp_path)


def test_the_block_holds_through_conversion_and_saving(tmp_path: Path, target: Path) -> None:
    """Names, files and the class that wrote them change; the draft and its target do not."""
    out, _ = packaged("k3-dspark", tmp_path, target)
    kconv.convert(out, tmp_path / "native")
    assert "context_proj.weight" in open_checkpoint(out).entries
    assert "fc.weight" in open_checkpoint(tmp_path / "native").entries
    assert check(tmp_path / "native", target, **WHOSE)["verdict"] == "exact"
    kconv.load(tmp_path / "native").save_pretrained(tmp_path / "saved")
    assert check(tmp_path / "saved", target, **WHOSE)["verdict"] == "exact"
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    tensors["fc.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "saved" / "model.safetensors", {"format": "pt"})
    assert [r["field"] for r in check(tmp_path / "saved", target, **WHOSE)["differences"]] == ["draft.weights"]


def test_results_on_the_card(tmp_path: Path, target: Path) -> None:
    parity, length = tmp_path / "parity.json", tmp_path / "acceptance.json"
    parity.write_text(json.dumps({"verdict": "pass", "reference": "golden", "dtype": "float32", "max_abs": 1.5e-6}))
    length.write_text(json.dumps({"command": "bench --prompts chat", "found": "acceptance length 2.1"}))
    out, _ = packaged("k25-dflash", tmp_path, target, results=[parity, length])
    card = (out / "README.md").read_text()
    assert "| `verify-parity` | verify-parity pass against golden in float32, max_abs 1.50e-06 |" in card
    assert "| `bench --prompts chat` | acceptance length 2.1 |" in card


def test_native_drafts_go_out_in_the_published_spelling(tmp_path: Path, target: Path) -> None:
    draft = draft_of("k3-dspark", tmp_path / "draft")
    kconv.convert(kconv.plan(draft, to="native"), tmp_path / "native")
    data = package(tmp_path / "native", target, tmp_path / "out", declared=DECLARED["k3-dspark"])
    names = set(open_checkpoint(draft).entries) - {"embed_tokens.weight"}
    assert set(open_checkpoint(tmp_path / "out").entries) - {"embed_tokens.weight"} == names
    assert any("embed_tokens" in note for note in data["notes"])
    assert config_of(tmp_path / "out")["architectures"] == ["K3DSparkModel"]


def test_overwrite_and_overlap(tmp_path: Path, target: Path) -> None:
    out, _ = packaged("k25-dflash", tmp_path, target)
    with pytest.raises(KconvError, match="not empty"):
        package(tmp_path / "draft", target, out, declared=DECLARED["k25-dflash"])
    assert package(tmp_path / "draft", target, out, declared=DECLARED["k25-dflash"], overwrite=True, title="Again")
    assert "# Again" in (out / "README.md").read_text()
    with pytest.raises(KconvError):
        package(tmp_path / "draft", target, tmp_path / "draft" / "inside", declared=DECLARED["k25-dflash"])
    with pytest.raises(KconvError, match="no draft that kconv knows"):
        package(target, target, tmp_path / "x")


def test_licences_are_carried(tmp_path: Path, target: Path) -> None:
    draft = draft_of("k25-dflash", tmp_path / "draft")
    (draft / "LICENSE").write_bytes(b"MIT\r\n")
    (draft / "README.md").write_text("---\nlicense: mit\n---\n# theirs\n")
    (draft / "dflash.py").write_text("raise SystemExit('never imported')")
    data = package(
        draft, target, tmp_path / "out", declared=DECLARED["k25-dflash"], training={"dataset": "lab/data", "trainer": "SpecForge"}
    )
    out = tmp_path / "out"
    assert (out / "LICENSE").read_bytes() == b"MIT\r\n"
    assert ModelCard((out / "README.md").read_text()).data.to_dict()["license"] == "mit"
    assert "licence: mit" in (out / "NOTICE.kconv.md").read_text()
    assert data["provenance"]["training"]["trainer"] == "SpecForge"
    assert "dflash.py" in (out / "README.md").read_text(), "what is not carried over is said"
    with pytest.raises(KconvError, match="training has no datset"):
        package(draft, target, tmp_path / "o2", declared=DECLARED["k25-dflash"], training={"datset": "x"})


def test_package_check_publish(hub: HubServer, hub_token: str, tmp_path: Path, target: Path) -> None:
    """The whole way over the Hub: target by ranges, package, check written down, publish with --require verified, check again."""
    commit = hub.seed_folder("lab/Tiny-K3", target)
    draft = draft_of("k25-dflash", tmp_path / "draft")
    out = tmp_path / "out"
    run = CliRunner()
    args = [
        "package",
        str(draft),
        "--target",
        "hf://lab/Tiny-K3",
        str(out),
        "--declare",
        "capture_stream=prefix",
        "--license",
        "mit",
    ]
    done = run.invoke(cli, [*args, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["target_revision"] == commit
    assert run.invoke(cli, ["publish", str(out), "me/d", "--require", "verified"]).exit_code == 1
    done = run.invoke(cli, ["check", str(out), "--target", "hf://lab/Tiny-K3", "--write"])
    assert done.exit_code == 0, done.output
    assert "exact: this draft was made for exactly this target" in done.stdout
    done = run.invoke(cli, ["publish", str(out), "me/d", "--require", "verified", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["verified_by"] == ["check: fits hf://lab/Tiny-K3"]
    before = hub.served()
    assert check("hf://me/d", "hf://lab/Tiny-K3")["verdict"] == "exact"
    assert hub.served() - before < (out / "model.safetensors").stat().st_size, "the Hub's sha256 of the draft's file is enough"
    hub.seed("lab/Tiny-K3", {"tiktoken.model": b"other ranks"})
    done = run.invoke(cli, ["check", "hf://me/d", "--target", "hf://lab/Tiny-K3"])
    assert done.exit_code == 1
    assert "target.tokenizer" in done.stdout
    assert "target.revision" in done.stdout


def test_cards_of_converted_checkpoints(hub: HubServer, hub_token: str, tmp_path: Path, target: Path) -> None:
    hub.seed_folder("lab/Tiny-K3", target)
    kconv.convert("hf://lab/Tiny-K3", tmp_path / "native")
    run = CliRunner()
    done = run.invoke(cli, ["publish", str(tmp_path / "native"), "me/native", "--card", "--json"])
    assert done.exit_code == 0, done.output
    card = ModelCard((tmp_path / "native" / "README.md").read_text()).data.to_dict()
    assert card["base_model"] == "lab/Tiny-K3"
    assert card["base_model_relation"] == "quantized"
    assert "exact" in hub.files("me/native")["README.md"].decode()
