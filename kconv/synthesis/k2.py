"""Kimi K2 and K2.5 as published: names and shapes from the adapter's tables, values by name.

| family | form |
|---|---|
| k2 | flat config, root `model.`; FP8 blocks with `weight_scale_inv` F32 (K2-Instruct), INT4 experts (K2-Thinking), or bf16 |
| k25 | two-level config, root `language_model.model.`, vision tower; the quantisation block lies in `text_config` |

INT4 is compressed-tensors' pack-quantized: `weight_packed` I32, `weight_scale` BF16 per 32, `weight_shape` I64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kconv.adapters.k2.config import vision_config
from kconv.adapters.k2.source import ROOTS, Side
from kconv.adapters.k2.table import EXPERTS, VISION, k2_table
from kconv.adapters.k2.vision import vision_sizes
from kconv.adapters.tables.rows import Table
from kconv.errors import Problems
from kconv.spec import Spec, dtype_name
from kconv.synthesis.configs import END_OF_MESSAGE, EOS, MEDIA, generation_config, tokenizer_files
from kconv.synthesis.family import Family, knob
from kconv.synthesis.shapes import BYTES, FIRST_SPECIALS, GROUP
from kconv.synthesis.writing import Synthetic

if TYPE_CHECKING:
    from torch import Tensor

Json = dict[str, Any]
WORD = 8  # codes of an I32
NOT_PACKED = ("self_attn", "shared_experts", r"mlp\.(gate|up|gate_up|down)_proj", "lm_head")


@dataclass(frozen=True)
class K2Shape:
    """Kimi K2, text alone."""

    layers: int = knob(4, "Decoder layers.")
    dense_layers: int = knob(1, "First layers with a dense MLP.", least=0)
    hidden: int = knob(128, "Hidden width.")
    dense_width: int = knob(192, "Width of a dense MLP.")
    heads: int = knob(4, "Attention heads.")
    q_lora: int = knob(48, "Width of the compressed queries; 0 for a direct projection.", least=0)
    kv_lora: int = knob(32, "Width of the compressed keys and values.")
    nope_dim: int = knob(16, "Own dimensions of a key head.")
    rope_dim: int = knob(8, "Rotated key dimensions that all heads share.", least=2)
    v_dim: int = knob(16, "Dimensions of a value head.")
    experts: int = knob(8, "Routed experts of a layer.")
    top_k: int = knob(2, "Experts a token goes to.")
    shared_experts: int = knob(1, "Shared experts, fused into one MLP.", least=0)
    expert_width: int = knob(64, "Width of an expert.")
    vocab: int = knob(512, "Vocabulary.")
    special_tokens: int = knob(FIRST_SPECIALS, "Ids at the end of the vocabulary kept for special tokens.", least=FIRST_SPECIALS)
    format: str = knob("fp8", "Quantisation: FP8 blocks, INT4 experts, or none.", choices=("fp8", "int4", "bf16"))
    block: int = knob(32, "Side of an FP8 block; 128 as published.")

    root = "model."
    vision = False
    dtype = "bfloat16"

    @property
    def first_special(self) -> int:
        """Id of the first special token."""
        return self.vocab - self.special_tokens

    def check(self) -> None:
        """Raise `Problems` with everything that cannot be."""
        found = []
        if self.first_special < BYTES:
            needs = f"{BYTES} bytes and {self.special_tokens} special tokens need an id each"
            found.append(f"vocab {self.vocab} is too small: {needs}")
        if self.top_k > self.experts:
            found.append(f"top_k {self.top_k} exceeds the {self.experts} experts")
        if self.dense_layers > self.layers:
            found.append(f"dense_layers {self.dense_layers} exceeds layers {self.layers}")
        if self.rope_dim % 2:
            found.append(f"rope_dim {self.rope_dim} is odd: dimensions are rotated in pairs")
        if self.format == "int4":
            widths = {"hidden": self.hidden, "expert_width": self.expert_width}
            found += [f"{k} {v} is no multiple of {GROUP}, which INT4 in groups needs" for k, v in widths.items() if v % GROUP]
        if found:
            raise Problems("this shape cannot be:", found, hint="`kconv tiny FAMILY --help` lists the options")


@dataclass(frozen=True)
class K25Shape(K2Shape):
    """Kimi K2.5 and later: the same text model with a vision tower."""

    format: str = knob("int4", "Quantisation: FP8 blocks, INT4 experts, or none.", choices=("fp8", "int4", "bf16"))
    vision_layers: int = knob(2, "Vision: blocks.")
    vision_hidden: int = knob(32, "Vision: hidden width.")
    vision_width: int = knob(64, "Vision: width of an MLP.")
    vision_heads: int = knob(2, "Vision: heads.")
    vision_grid: int = knob(4, "Vision: rows and columns of the position embedding.")

    root = "language_model.model."
    vision = True


def text_config(s: K2Shape) -> Json:
    """The text model's config, with its quantisation block."""
    config: Json = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "torch_dtype": s.dtype, "attention_bias": False,
        "attention_dropout": 0.0, "aux_loss_alpha": 0.001, "bos_token_id": s.first_special, "ep_size": 1,
        "eos_token_id": s.first_special + (EOS if s.vision else END_OF_MESSAGE), "first_k_dense_replace": s.dense_layers,
        "hidden_act": "silu", "hidden_size": s.hidden, "initializer_range": 0.02, "intermediate_size": s.dense_width,
        "kv_lora_rank": s.kv_lora, "max_position_embeddings": 262144, "moe_intermediate_size": s.expert_width,
        "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": s.experts, "n_shared_experts": s.shared_experts or None,
        "norm_topk_prob": True,
        "num_attention_heads": s.heads, "num_experts_per_tok": s.top_k, "num_hidden_layers": s.layers,
        "num_key_value_heads": s.heads, "num_nextn_predict_layers": 0, "pad_token_id": s.vocab - 1,
        "q_lora_rank": s.q_lora or None, "qk_nope_head_dim": s.nope_dim,
        "qk_rope_head_dim": s.rope_dim, "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc",
        "use_cache": True, "v_head_dim": s.v_dim, "vocab_size": s.vocab,
        "rope_scaling": {
            "beta_fast": 32.0 if s.vision else 1.0, "beta_slow": 1.0, "factor": 64.0 if s.vision else 32.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn",
        },
    }  # fmt: skip
    block = _block(s)
    return config | ({"quantization_config": block} if block else {})


def _block(s: K2Shape) -> Json | None:
    if s.format == "fp8":
        return {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [s.block, s.block]}
    if s.format == "bf16":
        return None
    weights: Json = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": GROUP, "num_bits": 4, "observer": "minmax",
        "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
    }  # fmt: skip
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "config_groups": {"group_0": group}, "format": "pack-quantized", "ignore": [f"re:.*{n}.*" for n in NOT_PACKED],
        "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed",
    }  # fmt: skip


def config_of(s: K2Shape) -> Json:
    """config.json."""
    text = text_config(s)
    if not isinstance(s, K25Shape):
        return text
    grid = {"init_pos_emb_height": s.vision_grid, "init_pos_emb_time": 4, "init_pos_emb_width": s.vision_grid}
    vision = {
        **grid, "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool", "mm_hidden_size": s.vision_hidden,
        "mm_projector_type": "patchmerger", "patch_size": 14, "pos_emb_type": "divided_fixed", "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5, "text_hidden_size": s.hidden, "video_attn_type": "spatial_temporal",
        "vt_hidden_size": s.vision_hidden, "vt_intermediate_size": s.vision_width, "vt_num_attention_heads": s.vision_heads,
        "vt_num_hidden_layers": s.vision_layers,
    }  # fmt: skip
    return {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": s.dtype,
        "bos_token_id": text["bos_token_id"], "eos_token_id": text["eos_token_id"], "pad_token_id": text["pad_token_id"],
        "ignore_index": -100, "media_placeholder_token_id": s.first_special + MEDIA, "tie_word_embeddings": False,
        "text_config": text, "vision_config": vision,
    }  # fmt: skip


def make(s: K2Shape, seed: int) -> Synthetic:
    """A Kimi K2 checkpoint."""
    s.check()
    config = config_of(s)
    found = {name: (spec, layer) for name, spec, layer in _tensors(s, k2_table(text_config(s)), config)}
    total = s.layers + 1 + s.vision
    shards = {n: f"model-{_shard(n, layer, s):05d}-of-{total:06d}.safetensors" for n, (_, layer) in found.items()}
    files = generation_config(s) | tokenizer_files(s)  # type: ignore[arg-type]
    specs = {n: spec for n, (spec, _) in found.items()}
    return Synthetic(config, specs, shards, lambda n: _value(n, specs, seed), files)


def _shard(name: str, layer: int | None, s: K2Shape) -> int:
    if layer is not None:
        return layer + 1
    return s.layers + (2 if name.startswith(("vision_tower", "mm_projector")) else 1)


def _tensors(s: K2Shape, layout: Table, config: Json) -> Iterator[tuple[str, Spec, int | None]]:
    side = Side("hf", s.root, dict(ROOTS)[s.root])
    plain = dtype_name(s.dtype)
    for row in layout.rows():
        shape = layout.shape(row.shape)
        for layer in layout.kinds.get(row.kind, (None,)):
            name = side.name_of(row).format_map({"layer": layer})
            if s.format == "fp8" and len(shape) == 2 and "_proj" in name:
                yield from _fp8(name, shape, s.block, layer)
            else:
                yield name, Spec("F32" if row.fp32 else plain, shape), layer
    for layer in layout.kinds["moe"]:
        for expert in range(s.experts):
            for part, symbols in EXPERTS.items():
                name = side.expert(part)("weight").format_map({"layer": layer, "expert": expert})
                yield from _expert(name, layout.shape(symbols), s, layer)
    if s.vision:
        yield from _vision(config, layout.sizes["C"], plain)


def _expert(name: str, shape: tuple[int, ...], s: K2Shape, layer: int) -> Iterator[tuple[str, Spec, int | None]]:
    rows, columns = shape
    if s.format == "fp8":
        yield from _fp8(name, shape, s.block, layer)
    elif s.format == "int4":
        yield name + "_packed", Spec("I32", (rows, columns // WORD)), layer
        yield name + "_scale", Spec("BF16", (rows, columns // GROUP)), layer
        yield name + "_shape", Spec("I64", (2,)), layer
    else:
        yield name, Spec(dtype_name(s.dtype), shape), layer


def _fp8(name: str, shape: tuple[int, ...], block: int, layer: int | None) -> Iterator[tuple[str, Spec, int | None]]:
    yield name, Spec("F8_E4M3", shape), layer
    yield name + "_scale_inv", Spec("F32", tuple(-(-n // block) for n in shape)), layer


def _vision(config: Json, hidden: int, dtype: str) -> Iterator[tuple[str, Spec, int | None]]:
    tower = vision_config(config)
    sizes = vision_sizes(tower, hidden)
    for row in VISION:
        shape = tuple(n if isinstance(n, int) else sizes[n] for n in row.shape)
        for block in range(tower["num_hidden_layers"] if "{block}" in row.published else 1):
            yield row.published.format_map({"block": block}), Spec(dtype, shape), None


def _value(name: str, specs: dict[str, Spec], seed: int) -> Tensor:
    import torch

    from kconv.synthesis import values

    spec = specs[name]
    if name.endswith("weight_packed"):
        return values.int4_words(name, spec, seed)
    if spec.dtype == "F8_E4M3":
        return values.fp8_codes(name, spec, seed)
    if name.endswith("weight_scale_inv"):
        return values.scales(name, spec, seed, specs[name.removesuffix("_scale_inv")].shape[1], values.FP8_DEVIATION)
    if name.endswith(("weight_scale", "weight_shape")):
        rows, words = specs[name.rpartition("_")[0] + "_packed"].shape
        if name.endswith("shape"):
            return torch.tensor([rows, words * WORD])
        return values.scales(name, spec, seed, words * WORD, values.INT4_DEVIATION)
    return values.weights(name, spec, seed)


K2 = Family("Kimi K2: FP8 blocks, INT4 experts or bf16, flat config", K2Shape, make)
K25 = Family("Kimi K2.5: INT4 experts, vision tower, two-level config", K25Shape, make)
