"""Kimi K3.1: recognised, converted with its indexers, computed by the stated rule; what is not known is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import kconv
from kconv.cli import cli
from kconv.errors import KconvError, Problems
from tests.modeling.test_indexer import by_hand
from tests.reading import json_of, stored_tensors

EPS = {"indexer_eps": 1e-6}
BASE = "language_model.model.layers.{}.self_attn.indexer."
PARTS = ("wq_b.weight", "wk.weight", "weights_proj.weight", "k_norm.weight", "k_norm.bias")


@pytest.fixture(scope="module", params=(True, False), ids=("k_norm with bias", "without"))
def k31(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("k31") / "k31"
    kconv.tiny("k31", folder, calm=True, index_bias=request.param)
    return folder


def ids(length: int) -> torch.Tensor:
    return torch.randint(3, 480, (2, length), generator=torch.Generator().manual_seed(2))


def rewritten(folder: Path, out: Path, config: Any = None, drop: str = "") -> Path:
    """A copy with another config, and without the tensors whose name holds `drop`; one file, no index."""
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("model-*.safetensors")):
        tensors |= load_file(shard)
    out.mkdir()
    save_file({n: t for n, t in tensors.items() if not (drop and drop in n)}, out / "model.safetensors")
    original = json_of(folder / "config.json")
    (out / "config.json").write_text(json.dumps(config(original) or original if config else original))
    return out


def with_block(block: dict[str, Any] | None, **top: Any) -> Any:
    """A change of the config: this `dsa_config` in `text_config` (None: none), and these keys at the top."""

    def change(config: dict[str, Any]) -> dict[str, Any]:
        text = {k: v for k, v in config["text_config"].items() if k != "dsa_config"}
        return {**config, **top, "text_config": text | ({} if block is None else {"dsa_config": block})}

    return change


def test_native_holds_the_indexers(k31, tmp_path):
    kconv.convert(k31, tmp_path / "native", **EPS)
    native, published = stored_tensors(tmp_path / "native"), stored_tensors(k31)
    parts = [p for p in PARTS if BASE.format(3) + p in published]
    assert len(parts) == (5 if "k_norm.bias" in parts else 4)
    for layer in (3, 7, 8):
        for part in parts:
            name = BASE.format(layer) + part
            assert native[name.removeprefix("language_model.")] == published[name]
    assert sum(".indexer." in n for n in native) == 3 * len(parts)
    block = json_of(tmp_path / "native" / "config.json")["indexer_config"]
    assert block == {
        "num_heads": 16, "head_dim": 16, "topk": 16, "norm_eps": 1e-6, "norm_bias": "k_norm.bias" in parts, "layers": [4, 8, 9],
    }  # fmt: skip
    assert any("unverified" in n for n in json_of(tmp_path / "native" / "kconv.json")["notes"])
    assert kconv.verify(tmp_path / "native", k31)["ok"]


def test_it_comes_back_byte_for_byte(k31, tmp_path):
    kconv.convert(k31, tmp_path / "native", vision="keep", experts="bf16", **EPS)
    kconv.convert(tmp_path / "native", tmp_path / "back", to="hf")
    assert stored_tensors(tmp_path / "back") == stored_tensors(k31)
    assert json_of(tmp_path / "back" / "config.json") == json_of(k31 / "config.json")


def test_text_alone_keeps_its_own_words(k31, tmp_path):
    kconv.convert(k31, tmp_path / "native", **EPS)
    for source in (k31, tmp_path / "native"):
        kconv.convert(source, tmp_path / f"text of {source.name}", to="hf-text")
        config = json_of(tmp_path / f"text of {source.name}" / "config.json")
        assert config["dsa_config"] == json_of(k31 / "config.json")["text_config"]["dsa_config"]
        assert "indexer_config" not in config
        assert config["model_type"] == "kimi_linear"


def test_every_sparse_layer_follows_the_rule(k31):
    """Outputs of the MLA layers in a whole forward pass, against keys chosen by Transformers' indexer."""
    pytest.importorskip("transformers.models.deepseek_v32")
    if not any(n.endswith("k_norm.bias") for n in stored_tensors(k31)):
        pytest.skip("Transformers' indexer always has the bias")
    model = kconv.load(k31, dtype=torch.float32, **EPS)
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for i, layer in enumerate(model.model.layers):
        if layer.kind == "mla":
            layer.self_attn.register_forward_hook(lambda m, args, out, i=i: seen.update({i: (args[0], out)}))
    with torch.no_grad():
        model(ids(60), use_cache=False)
        for i, (x, out) in seen.items():
            torch.testing.assert_close(out, by_hand(model.model.layers[i], x), rtol=0, atol=1e-5)
    assert sorted(seen) == [3, 7, 8]


def test_up_to_top_k_it_is_kimi_k3(k31, tmp_path):
    """The same weights without indexers are a Kimi K3; sixteen tokens are dense in both, more are not."""
    dense = rewritten(k31, tmp_path / "k3", with_block(None, model_type="kimi_k3"), drop=".indexer.")
    sparse, plain = kconv.load(k31, dtype=torch.float32, **EPS), kconv.load(dense, dtype=torch.float32)
    with torch.no_grad():
        a, b = (m(ids(16), use_cache=False).logits for m in (sparse, plain))
        c, d = (m(ids(60), use_cache=False).logits for m in (sparse, plain))
    assert torch.equal(a, b)
    torch.testing.assert_close(c[:, :16], d[:, :16], rtol=0, atol=3e-5)
    assert (c[:, 20:] - d[:, 20:]).abs().max() > 1e-2


def test_a_native_checkpoint_needs_no_option_again(k31, tmp_path):
    kconv.convert(k31, tmp_path / "native", **EPS)
    again, first = kconv.load(tmp_path / "native", dtype=torch.float32), kconv.load(k31, dtype=torch.float32, **EPS)
    with torch.no_grad():
        assert torch.equal(again(ids(40)).logits, first(ids(40)).logits)


@pytest.mark.parametrize(
    "change",
    [
        with_block({"index_topk": 16}, model_type="kimi_k31"),
        with_block({"index_topk": 16}, model_type="kimi_k3"),
        with_block({"index_topk": 16}, model_type="something_else"),
    ],
    ids=("by its type", "by its tensors", "by its block"),
)
def test_it_is_recognised(k31, tmp_path, change):
    made = kconv.plan(rewritten(k31, tmp_path / "copy", change), **EPS).check()
    assert made.layouts.family == "Kimi K3.1"
    assert made.layouts.config["indexer_config"]["topk"] == 16


def test_it_is_recognised_by_its_tensors_alone(k31, tmp_path):
    def change(config: dict[str, Any]) -> dict[str, Any]:
        text = {k: v for k, v in config["text_config"].items() if k != "dsa_config"}
        return {**config, "model_type": "unheard_of", "text_config": text | {"model_type": "unheard_of_text"}}

    made = kconv.plan(rewritten(k31, tmp_path / "copy", change), dsa_topk=16, **EPS).check()
    assert made.layouts.family == "Kimi K3.1"


@pytest.mark.parametrize("key", ("index_topk", "topk", "dsa_top_k"))
@pytest.mark.parametrize("eps", ("eps", "indexer_norm_eps"))
def test_values_are_read_where_one_key_can_mean_them(k31, tmp_path, key, eps):
    made = kconv.plan(rewritten(k31, tmp_path / "copy", with_block({key: 24, eps: 1e-5}))).check()
    assert {k: made.layouts.config["indexer_config"][k] for k in ("topk", "norm_eps")} == {"topk": 24, "norm_eps": 1e-5}
    assert f"the indexer's top-k is 24, read from dsa_config.{key}" in made.layouts.notes


@pytest.mark.parametrize(
    "block, options, message",
    [
        (None, EPS, "give it with --dsa-topk"),
        ({"index_topk": 16}, {}, "give it with --indexer-eps"),
        ({"index_topk": 16, "topk_heads": 2}, EPS, "dsa_config.index_topk, dsa_config.topk_heads"),
        ({"index_topk": 16}, {"dsa_topk": 8, **EPS}, "--dsa-topk 8 contradicts config.json: dsa_config.index_topk 16"),
        ({"index_topk": 16, "layers": [4, 8]}, EPS, "names layers 4,8, an indexer is in layers 4,8-9"),
    ],
)
def test_what_is_not_known_is_asked_for(k31, tmp_path, block, options, message):
    folder = rewritten(k31, tmp_path / "copy", with_block(block))
    with pytest.raises(Problems, match=message):
        kconv.plan(folder, **options).check()


def test_other_targets_need_neither(k31, tmp_path):
    kconv.convert(rewritten(k31, tmp_path / "copy", with_block(None)), tmp_path / "hf", to="hf")
    assert stored_tensors(tmp_path / "hf") == stored_tensors(k31)


def test_given_values_are_used(k31, tmp_path):
    made = kconv.plan(rewritten(k31, tmp_path / "copy", with_block(None)), dsa_topk=7, indexer_eps=1e-5).check()
    assert {k: made.layouts.config["indexer_config"][k] for k in ("topk", "norm_eps")} == {"topk": 7, "norm_eps": 1e-5}


@pytest.mark.parametrize(
    "drop, message",
    [
        (".indexer.", "no tensor is an indexer's"),
        ("layers.7.self_attn.indexer.wk.", r"missing from the source: language_model.model.layers.7.self_attn.indexer.wk.weight"),
        ("layers.8.self_attn.indexer.", "dsa_config.layers names layers 4,8-9, an indexer is in layers 4,8"),
    ],
)
def test_missing_indexers_are_refused(k31, tmp_path, drop, message):
    with pytest.raises(Problems, match=message):
        kconv.plan(rewritten(k31, tmp_path / "copy", drop=drop), **EPS).check()


def test_options_without_an_indexer_are_refused(tmp_path):
    kconv.tiny("k3", tmp_path / "k3", layers=4)
    with pytest.raises(KconvError, match="has no indexer"):
        kconv.plan(tmp_path / "k3", dsa_topk=8)


def test_command_line(tmp_path):
    run = CliRunner().invoke
    made = run(cli, ["tiny", "k31", str(tmp_path / "k31"), "--layers", "4", "--json"])
    assert made.exit_code == 0, made.output
    asked = run(cli, ["convert", str(tmp_path / "k31"), str(tmp_path / "native")])
    assert asked.exit_code == 2
    assert "--indexer-eps 1e-6" in asked.output
    assert not (tmp_path / "native").exists()
    done = run(cli, ["convert", str(tmp_path / "k31"), str(tmp_path / "native"), "--indexer-eps", "1e-6", "--json"])
    assert done.exit_code == 0, done.output
    checked = run(cli, ["verify", str(tmp_path / "native"), "--source", str(tmp_path / "k31"), "--json"])
    assert checked.exit_code == 0, checked.output
