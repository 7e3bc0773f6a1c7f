"""The tensors of a Kimi K2 text model (DeepSeek-V3's layout) and of its vision tower, as tables.

Sizes (K2 in brackets): C hidden [7168], A attention heads [64], Q q_lora [1536], R kv_lora [512], QK = nope+rope head dim
[192], B = nope+v head dim [256], O = A*v [8192], I dense width [18432], M expert width [2048], S shared width [2048],
E experts [384], V vocabulary [163840]; of the tower W width [1152], F width of an MLP [4304], N four neighbours [4608].

| published, K2.5 and later | Transformers 5 (`native`) |
|---|---|
| `language_model.model.layers.{l}.*`, `language_model.lm_head.weight` | `model.language_model.layers.{l}.*`, `lm_head.weight` |
| `...mlp.experts.{e}.{gate,up,down}_proj.weight` | `...mlp.experts.gate_up_proj` [E, 2M, C], `down_proj` [E, C, M] |
| `vision_tower.encoder.blocks.{b}.wqkv` | `model.vision_tower.layers.{b}.attn.{q,k,v}_proj`, rows of q and k reordered |

Text alone has the root `model.` in both. Source: Transformers 5.24's `kimi_k25` and `deepseek_v3` classes and mapping.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kconv.adapters.tables.rows import MEANING, MOST, Row, Table, q_lora
from kconv.errors import KconvError

Config = dict[str, Any]


def _shared(c: Config) -> bool:
    return bool(c.get("n_shared_experts"))


ROWS: tuple[Row, ...] = (
    Row("embed_tokens.weight", "model", ("V", "C")),
    Row("input_layernorm.weight", "layer", ("C",)),
    Row("self_attn.q_a_proj.weight", "layer", ("Q", "C"), when=q_lora),
    Row("self_attn.q_a_layernorm.weight", "layer", ("Q",), when=q_lora),
    Row("self_attn.q_b_proj.weight", "layer", ("A*QK", "Q"), when=q_lora),
    Row("self_attn.q_proj.weight", "layer", ("A*QK", "C"), when=lambda c: not q_lora(c)),
    Row("self_attn.kv_a_proj_with_mqa.weight", "layer", ("R+rope", "C")),
    Row("self_attn.kv_a_layernorm.weight", "layer", ("R",)),
    Row("self_attn.kv_b_proj.weight", "layer", ("A*B", "R")),
    Row("self_attn.o_proj.weight", "layer", ("C", "O")),
    Row("post_attention_layernorm.weight", "layer", ("C",)),
    Row("mlp.gate_proj.weight", "dense", ("I", "C")),
    Row("mlp.up_proj.weight", "dense", ("I", "C")),
    Row("mlp.down_proj.weight", "dense", ("C", "I")),
    Row("mlp.gate.weight", "moe", ("E", "C")),
    Row("mlp.gate.e_score_correction_bias", "moe", ("E",), fp32=True),
    Row("mlp.shared_experts.gate_proj.weight", "moe", ("S", "C"), when=_shared),
    Row("mlp.shared_experts.up_proj.weight", "moe", ("S", "C"), when=_shared),
    Row("mlp.shared_experts.down_proj.weight", "moe", ("C", "S"), when=_shared),
    Row("norm.weight", "model", ("C",)),
    Row("lm_head.weight", "head", ("V", "C")),
)
EXPERTS: dict[str, tuple[str, ...]] = {"gate_proj": ("M", "C"), "up_proj": ("M", "C"), "down_proj": ("C", "M")}
STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
COUNTS = ("num_hidden_layers", "vocab_size", "hidden_size", "num_attention_heads", "intermediate_size", "qk_rope_head_dim",
          "qk_nope_head_dim", "v_head_dim", "kv_lora_rank")  # fmt: skip
OPTIONAL_COUNTS = ("q_lora_rank", "moe_intermediate_size", "n_shared_experts", "n_routed_experts", "first_k_dense_replace",
                   "moe_layer_freq", "num_nextn_predict_layers")  # fmt: skip
VISION_ROOTS = ("vision_tower.", "mm_projector.", "model.vision_tower.", "model.mm_projector.")


@dataclass(frozen=True)
class VisionRow:
    """Tensors of the tower or the projector: published name, native names, and shape; `{block}` counts encoder blocks."""

    published: str
    native: tuple[str, ...]
    shape: tuple[str | int, ...]


def _both(published: str, native: str | tuple[str, ...], rows: str | int, columns: str | int) -> tuple[VisionRow, VisionRow]:
    """Weight and bias of a linear map."""
    names = (native,) if isinstance(native, str) else native
    return (
        VisionRow(f"{published}.weight", tuple(f"{n}.weight" for n in names), (rows, columns)),
        VisionRow(f"{published}.bias", tuple(f"{n}.bias" for n in names), (rows,)),
    )


def _norm(published: str, native: str) -> tuple[VisionRow, VisionRow]:
    """Weight and bias of a LayerNorm."""
    weight, bias = (VisionRow(f"{published}.{part}", (f"{native}.{part}",), ("W",)) for part in ("weight", "bias"))
    return weight, bias


_BLOCK, _LAYER = "vision_tower.encoder.blocks.{block}.", "model.vision_tower.layers.{block}."
_PATCH = ("vision_tower.patch_embed.", "model.vision_tower.patch_embed.")
QKV = tuple(f"{_LAYER}attn.{p}_proj" for p in "qkv")
VISION: tuple[VisionRow, ...] = (
    VisionRow(_PATCH[0] + "proj.weight", (_PATCH[1] + "proj.weight",), ("W", 3, "patch", "patch")),
    VisionRow(_PATCH[0] + "proj.bias", (_PATCH[1] + "proj.bias",), ("W",)),
    VisionRow(_PATCH[0] + "pos_emb.weight", (_PATCH[1] + "pos_emb.position_embeddings",), ("height", "width", "W")),
    *_norm(_BLOCK + "norm0", _LAYER + "norm1"),
    *_both(_BLOCK + "wqkv", QKV, "3W", "W"),
    *_both(_BLOCK + "wo", _LAYER + "attn.proj", "W", "W"),
    *_norm(_BLOCK + "norm1", _LAYER + "norm2"),
    *_both(_BLOCK + "mlp.fc0", _LAYER + "mlp.fc1", "F", "W"),
    *_both(_BLOCK + "mlp.fc1", _LAYER + "mlp.fc2", "W", "F"),
    *_norm("vision_tower.encoder.final_layernorm", "model.vision_tower.final_layernorm"),
    *_norm("mm_projector.pre_norm", "model.mm_projector.pre_norm"),
    *_both("mm_projector.proj.0", "model.mm_projector.in_proj", "N", "N"),
    *_both("mm_projector.proj.2", "model.mm_projector.out_proj", "C", "N"),
)


def k2_table(config: Config) -> Table:
    """The layout of a text config; raises KconvError where a size is missing or no count."""
    lacking = [key for key in COUNTS if config.get(key) is None]
    if lacking:
        raise KconvError(f"config.json lacks {', '.join(lacking)}", hint="give the checkpoint's own config.json")
    for key in (*COUNTS, *OPTIONAL_COUNTS):
        value = config.get(key)
        if value is not None and (type(value) is not int or not 0 <= value < MOST):
            raise KconvError(f"config.json: {key} is {value!r}, which is no count", hint="give the checkpoint's own config.json")
    n, first, every = config["num_hidden_layers"], config.get("first_k_dense_replace") or 0, config.get("moe_layer_freq") or 1
    moe = tuple(i for i in range(n) if config.get("n_routed_experts") and i >= first and i % every == 0)
    kinds = {"layer": tuple(range(n)), "moe": moe, "dense": tuple(i for i in range(n) if i not in moe)}
    return Table(config, kinds, _sizes(config), ROWS, EXPERTS)


def _sizes(c: Config) -> dict[str, int]:
    width = c.get("moe_intermediate_size") or 0
    sizes = {
        "V": c["vocab_size"], "C": c["hidden_size"], "A": c["num_attention_heads"], "Q": c.get("q_lora_rank") or 0,
        "R": c["kv_lora_rank"], "rope": c["qk_rope_head_dim"], "QK": c["qk_nope_head_dim"] + c["qk_rope_head_dim"],
        "B": c["qk_nope_head_dim"] + c["v_head_dim"], "O": c["num_attention_heads"] * c["v_head_dim"],
        "I": c["intermediate_size"], "M": width, "S": width * (c.get("n_shared_experts") or 0),
        "E": c.get("n_routed_experts") or 0,
    }  # fmt: skip
    assert set(sizes) <= set(MEANING)
    return sizes

