from __future__ import annotations

import base64
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import kconv
from kconv.errors import KconvError, Problems
from kconv.spec import Spec
from kconv.synthesis.families import FAMILIES, family, synthesize
from tests.reading import GOLDEN, json_of, stored_tensors, tensor, weight_map

SMALL: dict[str, Any] = {
    "layers": 4, "hidden": 64, "dense_width": 48, "experts": 3, "expert_width": 32, "latent": 32, "kda_head_dim": 8,
}  # fmt: skip
MOE = "language_model.model.layers.1.block_sparse_moe."
# E2M1 as the OCP Microscaling specification lists its sixteen values.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def made(folder: Path, family_name: str = "k3", **options) -> Path:
    kconv.tiny(family_name, folder, **options)
    return folder


def test_default_shape_has_the_tensors_of_a_checkpoint_made_with_the_official_code():
    golden = {n: Spec(t.dtype, t.shape) for n, t in stored_tensors(GOLDEN / "tiny-k3").items()}
    assert synthesize("k3").specs == golden


def test_default_config_is_that_checkpoint_s_but_for_the_places_of_special_tokens():
    ours, golden = synthesize("k3").config, json_of(GOLDEN / "tiny-k3" / "config.json")
    for config in (ours, golden):
        for level in (config, config["text_config"]):
            for key in ("bos_token_id", "eos_token_id", "media_placeholder_token_id"):
                level.pop(key, None)
    assert ours == golden


def test_files_are_a_sharded_checkpoint(tmp_path):
    folder = made(tmp_path / "k3", **SMALL)
    files = weight_map(folder)
    total = 4 + 3
    assert set(files.values()) == {f"model-{i:05d}-of-{total:06d}.safetensors" for i in range(1, total + 1)}
    assert sorted(p.name for p in folder.iterdir() if p.suffix == ".safetensors") == sorted(set(files.values()))
    stored = stored_tensors(folder)
    assert set(stored) == set(files)
    assert json_of(folder / "model.safetensors.index.json")["metadata"]["total_size"] == sum(len(t.data) for t in stored.values())
    for name, file in files.items():
        if ".layers." in name:
            assert file.startswith(f"model-{int(name.split('layers.')[1].split('.')[0]) + 1:05d}-")


def test_split_experts_lie_in_different_files(tmp_path):
    files = weight_map(made(tmp_path / "k3", split_experts=True, **SMALL))
    parts = [n for n in files if n.startswith(f"{MOE}experts.2.")]
    assert len(parts) == 6
    assert len({files[n] for n in parts}) == 6


def test_mxfp4_experts_hold_both_zeros_and_plausible_scales(tmp_path):
    stored = stored_tensors(made(tmp_path / "k3", **SMALL))
    packed = {n: tensor(t) for n, t in stored.items() if n.endswith("weight_packed")}
    assert packed
    for name, codes in packed.items():
        nibbles = torch.stack([codes & 15, codes >> 4], -1)
        assert (nibbles == 0).any(), name
        assert (nibbles == 8).any(), name
        scales = tensor(stored[name.replace("packed", "scale")])
        assert (scales > 100).all()
        assert (scales < 127).all()
        rows = E2M1[nibbles.long()].reshape(codes.shape[0], -1, 32)
        values = rows * torch.exp2(scales.float() - 127).unsqueeze(-1)
        columns = values.shape[1] * 32
        assert 0.5 < values.std() * columns**0.5 < 2


def test_a_log_is_padded_with_exact_zeros(tmp_path):
    stored = stored_tensors(made(tmp_path / "k3", **SMALL, kda_heads=5))
    vectors = [tensor(t) for n, t in stored.items() if n.endswith("A_log")]
    assert len(vectors) == 3
    for a_log in vectors:
        assert a_log.shape == (128,)
        assert a_log[5:].view(torch.int32).eq(0).all()
        assert (a_log[:5] != 0).all()


def test_more_heads_than_one_padding():
    assert synthesize("k3", kda_heads=129).specs["language_model.model.layers.0.self_attn.A_log"] == Spec("F32", (256,))


def test_a_hundred_seeds_are_finite_and_set():
    shape = {"layers": 4, "hidden": 32, "dense_width": 16, "latent": 32, "expert_width": 32, "experts": 2, "kda_head_dim": 8}
    for seed in range(100):
        checkpoint = synthesize("k3", seed=seed, vocab=280, heads=2, calm=seed % 2 == 0, **shape)
        assert checkpoint.value is not None
        for name, spec in checkpoint.specs.items():
            values = checkpoint.value(name)
            assert tuple(values.shape) == spec.shape
            if name.endswith("weight_scale"):
                assert ((values > 100) & (values < 127)).all(), (seed, name)
            elif values.is_floating_point():
                assert values.isfinite().all(), (seed, name)
                assert values.any(), (seed, name)
                assert values.float().abs().max() < 20, (seed, name)


def test_the_same_seed_makes_the_same_bytes(tmp_path):
    first, second = made(tmp_path / "a", seed=7, **SMALL), made(tmp_path / "b", seed=7, **SMALL)
    other = made(tmp_path / "c", seed=8, **SMALL)
    assert {p.name: p.read_bytes() for p in first.iterdir()} == {p.name: p.read_bytes() for p in second.iterdir()}
    a, c = stored_tensors(first), stored_tensors(other)
    assert set(a) == set(c)
    assert all(a[n].data != c[n].data for n in a)


def canonical(folder: Path) -> dict[str, bytes]:
    """Tensors under one spelling: no root, no padding of A_log, plain residual names."""
    found = {}
    for name, stored in stored_tensors(folder).items():
        short = name.removeprefix("language_model.").removeprefix("model.").removeprefix("language_model.")
        short = short.removeprefix("model.").replace("_res.norm_weight", "_res_norm.weight")
        short = short.replace("_res.proj_weight", "_res_proj.weight")
        found[short] = stored.data[: 3 * 4] if name.endswith("A_log") else stored.data
    return found


@pytest.mark.parametrize(
    "options",
    (
        {"root": "model.language_model."},
        {"root": "model."},
        {"a_log": "heads"},
        {"a_log": "broadcast"},
        {"dotted_res": True},
        {"split_experts": True},
    ),
)
def test_spellings_hold_the_same_values(tmp_path, options):
    plain = canonical(made(tmp_path / "plain", **SMALL))
    if options.get("root") == "model.":
        plain = {n: d for n, d in plain.items() if not n.startswith(("vision_tower", "mm_projector"))}
    assert canonical(made(tmp_path / "other", **SMALL, **options)) == plain


def test_spellings_are_those_of_the_options():
    names = synthesize("k3", **SMALL, root="model.language_model.", dotted_res=True, a_log="broadcast").specs
    assert "model.language_model.layers.0.self_attention_res.norm_weight" in names
    assert "model.vision_tower.patch_embed.proj.weight" in names
    assert "lm_head.weight" in names
    flat = synthesize("k3", **SMALL, root="model.")
    assert "model.layers.0.self_attention_res_norm.weight" in flat.specs
    assert flat.config["architectures"] == ["KimiLinearForCausalLM"]
    assert flat.config["quantization_config"]["format"] == "mxfp4-pack-quantized"


def test_plain_experts_and_counts_by_layer():
    checkpoint = synthesize("k3", **SMALL | {"expert_counts": (4, 2, 3)}, plain_experts=True)
    experts = [n for n in checkpoint.specs if n.endswith("w1.weight")]
    assert sorted(experts) == sorted(
        f"language_model.model.layers.{layer}.block_sparse_moe.experts.{e}.w1.weight"
        for layer, count in ((1, 4), (2, 2), (3, 3)) for e in range(count)
    )  # fmt: skip
    assert checkpoint.specs["language_model.model.layers.2.block_sparse_moe.gate.weight"] == Spec("BF16", (2, 64))
    assert checkpoint.config["text_config"]["num_experts"] == 4
    assert "quantization_config" not in checkpoint.config["text_config"]


def test_kimi_linear_has_its_own_oddities():
    checkpoint = synthesize("kimi-linear", hidden=64, heads=2, kda_heads=4, kda_head_dim=16)
    specs, first = checkpoint.specs, "model.layers.0.self_attn."
    assert specs[first + "A_log"] == Spec("F32", (1, 1, 4, 1))
    assert specs[first + "dt_bias"] == Spec("F32", (64,))
    assert {n for n, s in specs.items() if s.dtype == "F32"} == {n for n in specs if n.endswith(("A_log", "dt_bias"))}
    assert specs[first + "g_a_proj.weight"].shape == (16, 64)
    assert specs[first + "g_b_proj.weight"].shape == (64, 16)
    assert specs["model.layers.3.self_attn.q_proj.weight"].shape == (2 * 24, 64)
    assert specs["model.layers.1.block_sparse_moe.experts.0.w2.weight"] == Spec("BF16", (64, 64))
    absent = ("res_proj", "routed_expert", "q_a_proj", "layers.3.self_attn.g_proj", "vision_tower")
    assert not [n for n in specs if any(part in n for part in absent)]
    assert "text_config" not in checkpoint.config
    assert set(checkpoint.shards.values()) == {f"model-{i:05d}-of-00006.safetensors" for i in range(1, 7)}


def test_the_tokenizer_fills_the_vocabulary(tmp_path):
    folder = made(tmp_path / "k3", **SMALL, vocab=600)
    lines = [line.split() for line in (folder / "tiktoken.model").read_bytes().splitlines()]
    ranks = {base64.b64decode(word): int(rank) for word, rank in lines}
    assert sorted(ranks.values()) == list(range(600 - 24))
    tiktoken = pytest.importorskip("tiktoken")
    encoding = tiktoken.Encoding("tiny", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"[PAD]": 599})
    assert encoding.decode(encoding.encode("Grüße, Kimi!")) == "Grüße, Kimi!"
    config = json_of(folder / "config.json")
    assert json_of(folder / "generation_config.json")["eos_token_id"] == config["eos_token_id"] == 600 - 24 + 2
    added = json_of(folder / "tokenizer_config.json")["added_tokens_decoder"]
    assert added[str(config["bos_token_id"])]["content"] == "[BOS]"
    assert added[str(config["pad_token_id"])]["content"] == "[PAD]"


@pytest.mark.parametrize(
    ("options", "said"),
    (
        ({"expert_width": 48}, "expert_width 48 is no multiple of 32, which MXFP4 needs"),
        ({"latent": 0, "hidden": 80}, "hidden 80 is no multiple of 32"),
        ({"top_k": 9}, "top_k 9 exceeds the 8 experts that a token can reach"),
        ({"expert_groups": 4, "topk_groups": 1, "top_k": 3}, "top_k 3 exceeds the 2 experts"),
        ({"expert_groups": 3}, "8 experts do not divide into 3 groups"),
        ({"topk_groups": 2}, "topk_groups 2 exceeds expert_groups 1"),
        ({"expert_counts": (8, 8)}, "expert_counts has 2 numbers, 8 layers have experts"),
        ({"mla_layers": (4, 12)}, "mla_layers [4, 12] are not distinct layers of 1-9"),
        ({"dense_layers": 10}, "dense_layers 10 exceeds layers 9"),
        ({"vocab": 279}, "vocab 279 is too small"),
        ({"layers": 0}, "layers is 0; whole numbers of at least 1 are expected"),
        ({"layers": "4"}, "layers is '4'"),
        ({"root": "text."}, "root is 'text.', not one of language_model.model."),
        ({"calm": "yes"}, "calm is 'yes', not true or false"),
        ({"depth": 3}, "k3 has no option depth"),
    ),
)
def test_impossible_shapes_are_refused_before_anything_is_written(tmp_path, options, said):
    with pytest.raises(KconvError) as caught:
        kconv.tiny("k3", tmp_path / "out", **options)
    assert said in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_every_problem_of_a_shape_is_said_at_once():
    with pytest.raises(Problems) as caught:
        synthesize("k3", expert_width=48, latent=40, dense_layers=12, vocab=100)
    assert len(caught.value.problems) == 4


def test_refuses_unknown_families_full_folders_and_what_full_size_does_not_take(tmp_path):
    with pytest.raises(KconvError, match="no family is called 'k4'"):
        kconv.tiny("k4", tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(KconvError, match="is not empty"):
        kconv.tiny("k3", tmp_path / "full")
    with pytest.raises(KconvError, match="--full-size takes no other option, layers given"):
        kconv.tiny("k3", tmp_path / "out", full_size=True, layers=4)
    with pytest.raises(KconvError, match="kimi-linear has no card"):
        kconv.tiny("kimi-linear", tmp_path / "out", full_size=True)
    assert [p.name for p in tmp_path.iterdir()] == ["full"]


def test_a_failed_run_leaves_nothing(tmp_path, monkeypatch):
    def full_disk(self, blob):
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(OSError, match="No space left"):
        kconv.tiny("k3", tmp_path / "out", **SMALL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_explains_its_options(name):
    chosen = family(name)
    assert chosen.title
    assert all(f.metadata["help"].endswith(".") for f in dataclasses.fields(chosen.shape))
