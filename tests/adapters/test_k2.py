"""Kimi K2 and K2.5: models made by Transformers, quantised as published, converted, and loaded by Transformers' own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kconv
from kconv.errors import KconvError
from tests.adapters import k2_published as published
from tests.adapters.live import lively, loaded
from tests.reading import json_of, stored_tensors

transformers = pytest.importorskip("transformers", minversion="5.24")
FORMATS = ("bf16", "int4", "fp8")
BLOCK = (16, 32)  # tiles of which the last of a side is partial, as 128 x 128 would be one tile of these sizes


def k25_model() -> Any:
    """A random multimodal Kimi K2.5 of Transformers, in bf16."""
    config = transformers.Kimi_K25Config(
        text_config={"model_type": "kimi_k2", **published.TEXT}, vision_config=published.OWN_VISION, projection_hidden_size=32,
        image_token_id=published.IMAGE, tie_word_embeddings=False,
    )  # fmt: skip
    return lively(transformers.Kimi_K25ForConditionalGeneration(config)).to(torch.bfloat16)


def k2_model() -> Any:
    """A random text-only Kimi K2 of Transformers, in bf16."""
    return lively(transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**published.TEXT))).to(torch.bfloat16)


def quantised(tensors: dict[str, torch.Tensor], form: str) -> tuple[dict, dict, dict | None]:
    """What is stored, what it stands for, and the config's block."""
    if form == "int4":
        return *published.int4(tensors), published.block_int4()
    if form == "fp8":
        block = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
        return *published.fp8(tensors, BLOCK), block
    return tensors, tensors, None


@pytest.fixture(scope="module", params=FORMATS)
def k25(request, tmp_path_factory) -> tuple[Path, Any]:
    """A published K2.5 in a format, and Transformers' model with the values that it stands for."""
    model = k25_model()
    stored, values, block = quantised(published.published_tensors(model.state_dict()), request.param)
    text = {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "dtype": "bfloat16", **published.TEXT}
    text |= {"max_length": 20, "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": "bfloat16", "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 3, "media_placeholder_token_id": published.IMAGE, "tie_word_embeddings": False,
        "text_config": text | ({"quantization_config": block} if block else {}), "vision_config": published.VISION,
    }  # fmt: skip
    folder = published.write(tmp_path_factory.mktemp("k25") / request.param, stored, config)
    return folder, with_values(model, values)


@pytest.fixture(scope="module", params=FORMATS)
def k2(request, tmp_path_factory) -> tuple[Path, Any]:
    """A published K2 (text alone, no prefix) in a format, and Transformers' model with the values that it stands for."""
    model = k2_model()
    stored, values, block = quantised(published.published_tensors(model.state_dict()), request.param)
    stored = {n.removeprefix("language_model."): t for n, t in stored.items()}
    config = {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "torch_dtype": "bfloat16", **published.TEXT}
    folder = published.write(
        tmp_path_factory.mktemp("k2") / request.param, stored, config | ({"quantization_config": block} if block else {})
    )
    return folder, with_values(model, values)


def with_values(model: Any, values: dict[str, torch.Tensor]) -> Any:
    """A new model in fp32 (rounded to bf16, rotary frequencies do not come back) with the values that are stored."""
    state = {n: t.clone() for n, t in model.state_dict().items()}
    for name, t in state.items():
        grouped = name.endswith((".experts.gate_up_proj", ".experts.down_proj"))
        for target, x in (published.split(name, t) if grouped else {name: t}).items():
            key = next((k for k in candidates(target) if k in values), None)
            if key is not None and values[key].shape == x.shape:
                x.copy_(values[key])
    made = type(model)(model.config).float()
    made.load_state_dict(state, strict=True)
    return made.eval()


def candidates(name: str) -> tuple[str, ...]:
    return name.replace("model.language_model.", "language_model.model."), "language_" + name, "language_model." + name, name


def ids(length: int = 40) -> torch.Tensor:
    return torch.randint(4, 300, (2, length), generator=torch.Generator().manual_seed(5))


def answers(model: Any, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids(), use_cache=False, **inputs).logits


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert theirs.std() > 0.3
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 * float(theirs.abs().max()))


def test_the_text_model_of_k25_loads_into_deepseek_v3(k25, tmp_path):
    folder, model = k25
    kconv.convert(folder, tmp_path / "native")
    config = json_of(tmp_path / "native" / "config.json")
    assert (config["model_type"], config["architectures"]) == ("deepseek_v3", ["DeepseekV3ForCausalLM"])
    assert not {"quantization_config", "auto_map", "max_length"} & set(config)
    ours = loaded(transformers.AutoModelForCausalLM, tmp_path / "native")
    assert type(ours) is transformers.DeepseekV3ForCausalLM
    assert_same(answers(ours), answers(model))


def test_all_of_k25_loads_into_its_own_class(k25, tmp_path):
    """With the tower: text, and an image of 4 x 6 patches in the place of six tokens."""
    folder, model = k25
    kconv.convert(folder, tmp_path / "native", vision="keep")
    ours = loaded(transformers.AutoModelForImageTextToText, tmp_path / "native")
    assert type(ours) is transformers.Kimi_K25ForConditionalGeneration
    assert ours.config.vision_config.to_dict() | {"dtype": None} == model.config.vision_config.to_dict()
    assert ours.config.image_token_id == published.IMAGE
    assert_same(answers(ours), answers(model))
    pixels = torch.randn(24, 3, 14, 14, generator=torch.Generator().manual_seed(1))
    x = ids()[:1]
    x[0, 3:9] = published.IMAGE
    with torch.no_grad():
        seen = [m(input_ids=x, pixel_values=pixels, image_grid_thw=torch.tensor([[1, 4, 6]])).logits for m in (ours, model)]
        blind = model(input_ids=x).logits
    assert_same(*seen)
    assert (seen[1] - blind).abs().max() > 0.1


def test_k2_loads_into_deepseek_v3(k2, tmp_path):
    folder, model = k2
    kconv.convert(folder, tmp_path / "native")
    assert kconv.verify(tmp_path / "native", folder)["ok"]
    assert_same(answers(loaded(transformers.DeepseekV3ForCausalLM, tmp_path / "native")), answers(model))


@pytest.mark.parametrize("vision", ("keep", "drop"))
def test_k25_comes_back_byte_for_byte(k25, tmp_path, vision):
    folder, _ = k25
    kconv.convert(folder, tmp_path / "native", vision=vision)
    kconv.convert(tmp_path / "native", tmp_path / "back", to="hf")
    before, after = stored_tensors(folder), stored_tensors(tmp_path / "back")
    if vision == "drop":
        before = {n: t for n, t in before.items() if not n.startswith(("vision_tower.", "mm_projector."))}
    assert after == before
    assert json_of(tmp_path / "back" / "config.json") == json_of(folder / "config.json")


def test_k2_comes_back_byte_for_byte(k2, tmp_path):
    folder, _ = k2
    kconv.convert(folder, tmp_path / "native")
    kconv.convert(tmp_path / "native", tmp_path / "back", to="hf")
    assert stored_tensors(tmp_path / "back") == stored_tensors(folder)
    assert json_of(tmp_path / "back" / "config.json") == json_of(folder / "config.json")


def test_layers_without_experts_come_back_byte_for_byte(tmp_path):
    kconv.tiny("k2", tmp_path / "source", layers=2, experts=2)
    made = kconv.convert(tmp_path / "source", tmp_path / "out", layers=(0, 0))
    assert made["grade"] == "exact-with-sidecar"
    kconv.convert(tmp_path / "out", tmp_path / "back", to="hf")
    source, back = stored_tensors(tmp_path / "source"), stored_tensors(tmp_path / "back")
    assert back == {n: t for n, t in source.items() if ".layers.1." not in n}


def test_native_names_and_bytes_are_those_that_transformers_saves(tmp_path):
    """The same model, by kconv and by `save_pretrained` in the names of the modules."""
    model = k25_model()
    config = {
        "model_type": "kimi_k25", "dtype": "bfloat16", "vision_config": published.VISION, "tie_word_embeddings": False,
        "text_config": {"model_type": "kimi_k2", **published.TEXT},
    }  # fmt: skip
    published.write(tmp_path / "published", published.published_tensors(model.state_dict()), config)
    kconv.convert(tmp_path / "published", tmp_path / "native", vision="keep")
    model.save_pretrained(tmp_path / "theirs", save_original_format=False)
    assert stored_tensors(tmp_path / "native") == stored_tensors(tmp_path / "theirs")


def test_published_in_bf16_with_the_published_names(k25, tmp_path):
    """`--to hf --experts bf16 --dtype bfloat16`: split experts, no scale and no quantisation block left."""
    folder, model = k25
    kconv.convert(folder, tmp_path / "bf16", to="hf", experts="bf16", dtype="bfloat16", sidecar=True)
    tensors = stored_tensors(tmp_path / "bf16")
    main = {n: t for n, t in tensors.items() if "scale" not in n and "zero" not in n}
    assert {t.dtype for t in main.values()} == {"BF16"}
    assert "language_model.model.layers.1.mlp.experts.5.down_proj.weight" in main
    config = json_of(tmp_path / "bf16" / "config.json")
    assert "quantization_config" not in config
    assert "quantization_config" not in config["text_config"]
    kconv.convert(tmp_path / "bf16", tmp_path / "native")
    assert_same(answers(loaded(transformers.DeepseekV3ForCausalLM, tmp_path / "native")), answers(model))


def test_text_alone_in_the_published_names(k25, tmp_path):
    folder, model = k25
    kconv.convert(folder, tmp_path / "text", to="hf-text")
    config = json_of(tmp_path / "text" / "config.json")
    assert config["model_type"] == "kimi_k2"
    assert all(n.startswith(("model.", "lm_head.")) for n in stored_tensors(tmp_path / "text"))
    kconv.convert(tmp_path / "text", tmp_path / "native")
    assert_same(answers(loaded(transformers.DeepseekV3ForCausalLM, tmp_path / "native")), answers(model))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family, options", [("k2", {}), ("k25", {}), ("k25", {"vision": "keep"})])
def test_tiny(tmp_path, family, options, form):
    """`kconv tiny` makes what is published: it loads, answers with finite numbers, and comes back."""
    kconv.tiny(family, tmp_path / "source", format=form, block=48)
    kconv.convert(tmp_path / "source", tmp_path / "native", **options)
    vision = bool(options)
    cls = transformers.Kimi_K25ForConditionalGeneration if vision else transformers.DeepseekV3ForCausalLM
    logits = answers(loaded(cls, tmp_path / "native"))
    assert logits.isfinite().all()
    assert 0.3 < logits.std() < 10
    kconv.convert(tmp_path / "native", tmp_path / "back", to="hf")
    tower = () if vision else ("vision_tower.", "mm_projector.")
    before = {n: t for n, t in stored_tensors(tmp_path / "source").items() if not n.startswith(tower)}
    assert stored_tensors(tmp_path / "back") == before
    assert kconv.verify(tmp_path / "native", tmp_path / "source")["ok"]


def test_from_all_to_text_alone_and_back(tmp_path):
    """Native with the tower -> native text -> published: the sidecar goes along, and the published config comes back."""
    kconv.tiny("k25", tmp_path / "source", format="fp8")
    kconv.convert(tmp_path / "source", tmp_path / "all", vision="keep")
    kconv.convert(tmp_path / "all", tmp_path / "text")
    assert json_of(tmp_path / "text" / "config.json")["model_type"] == "deepseek_v3"
    kconv.convert(tmp_path / "text", tmp_path / "back", to="hf")
    published_text = {n: t for n, t in stored_tensors(tmp_path / "source").items() if n.startswith("language_model.")}
    assert stored_tensors(tmp_path / "back") == published_text
    assert json_of(tmp_path / "back" / "config.json") == json_of(tmp_path / "source" / "config.json")


def test_companions_are_consumed_with_their_weights(tmp_path):
    # KB-016: scales are no weights of their own, neither in the output nor among what no rule claims.
    kconv.tiny("k25", tmp_path / "source", format="fp8")
    made = kconv.plan(tmp_path / "source", sidecar=False, experts="bf16").check()
    scales = [n for n in made.source.entries if n.endswith("_scale_inv")]
    assert scales
    assert made.claimed == len(made.source.entries) - len(made.dropped)
    assert not [n for n in made.targets if "scale" in n]


def test_impossible_shapes_are_refused(tmp_path):
    with pytest.raises(KconvError) as refused:
        kconv.tiny("k25", tmp_path / "no", vocab=100, top_k=9, rope_dim=3, expert_width=40)
    for word in ("vocab", "top_k", "rope_dim", "expert_width"):
        assert word in str(refused.value)
    assert not (tmp_path / "no").exists()


def test_one_half_decoded_is_refused(k2, tmp_path):
    folder, _ = k2
    if folder.name != "fp8":
        pytest.skip("only FP8 quantises more than the experts")
    with pytest.raises(KconvError, match="only one of them"):
        kconv.plan(folder, "hf", experts="bf16")


def test_vision_keep_without_vision_is_refused(k2):
    with pytest.raises(KconvError, match="no vision"):
        kconv.plan(k2[0], vision="keep")


def test_kconv_load_names_the_class_that_loads_it(k2):
    with pytest.raises(KconvError, match="no module of kconv's own") as refused:
        kconv.load(k2[0])
    assert "from_pretrained" in (refused.value.hint or "")


def test_another_router_is_refused(tmp_path):
    config = {"model_type": "kimi_k2", "dtype": "bfloat16", **published.TEXT, "scoring_func": "softmax"}
    published.write(tmp_path / "softmax", published.published_tensors(k2_model().state_dict()), config)
    with pytest.raises(KconvError, match="scoring_func"):
        kconv.plan(tmp_path / "softmax")
