"""The tensors of a draft, as a table: native name, shape in terms of the config, and when it exists.

Sizes: V target vocabulary, D draft vocabulary, C hidden, W target hidden, T taps * W, N attention input (C, or 2C where Eagle3
joins embedding and state), I MLP width, A query heads, G key/value heads, h head dim, Q q_lora, R kv_lora, rope, QK, B, O as
for Kimi K3, K conv taps, P conv projection width, S selector rank, M markov rank, F confidence features, J, L its joint widths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

FAMILIES = ("dflash", "dflash_kimi_k25", "kimi_k3_dflash", "dflash2", "dspark", "eagle3")
Config = Mapping[str, Any]
Symbols = tuple[str | int, ...]


@dataclass(frozen=True)
class Row:
    """One pattern: name, shape symbols, index it runs over (None, `layer`, `tap`), dtype if not a float, and when it exists."""

    name: str
    shape: Symbols
    index: str | None = None
    dtype: str | None = None
    when: Callable[[Config], bool] = lambda c: True


def family(*names: str) -> Callable[[Config], bool]:
    """True for configs of these families."""
    return lambda c: c["model_type"] in names


def flag(key: str) -> Callable[[Config], bool]:
    """True where a key is truthy."""
    return lambda c: bool(c.get(key))


def reduced(c: Config) -> bool:
    """Whether the draft predicts over fewer tokens than the target has."""
    return (c.get("draft_vocab_size") or c["vocab_size"]) < c["vocab_size"]


def gqa(c: Config) -> bool:
    """Grouped-query attention with separate projections."""
    return c["attention_mode"] == "gqa" and not c.get("stacked_qkv")


def mla(c: Config) -> bool:
    """Latent attention."""
    return c["attention_mode"] == "mla"


def qk_norm(c: Config) -> bool:
    """Grouped-query attention with normed heads."""
    return c["attention_mode"] == "gqa" and c.get("use_qk_norm", True)


def _bias(c: Config) -> bool:
    return gqa(c) and bool(c.get("attention_bias"))


EAGLE, CONV, SPARK = family("eagle3"), family("dflash2"), family("dspark")

ROWS: tuple[Row, ...] = (
    Row("embed_tokens.weight", ("V", "C"), when=flag("owns_embed_tokens")),
    Row("fc_norm.{tap}.weight", ("W",), "tap", when=flag("fc_norm")),
    Row("input_norm.weight", ("T",), when=flag("norm_before_fc")),
    Row("fc.weight", ("C", "T")),
    Row("hidden_norm.weight", ("C",), when=lambda c: not EAGLE(c)),
    Row("layers.{layer}.input_layernorm.weight", ("C",), "layer"),
    Row("layers.{layer}.hidden_norm.weight", ("C",), "layer", when=EAGLE),
    Row("layers.{layer}.attention_conv.base_kernel", (2, "K", "C"), "layer", when=CONV),
    Row("layers.{layer}.attention_conv.kernel_projection.weight", ("P", "C"), "layer", when=CONV),
    Row("layers.{layer}.self_attn.q_proj.weight", ("A*h", "N"), "layer", when=gqa),
    Row("layers.{layer}.self_attn.k_proj.weight", ("G*h", "N"), "layer", when=gqa),
    Row("layers.{layer}.self_attn.v_proj.weight", ("G*h", "N"), "layer", when=gqa),
    Row("layers.{layer}.self_attn.q_proj.bias", ("A*h",), "layer", when=_bias),
    Row("layers.{layer}.self_attn.k_proj.bias", ("G*h",), "layer", when=_bias),
    Row("layers.{layer}.self_attn.v_proj.bias", ("G*h",), "layer", when=_bias),
    Row("layers.{layer}.self_attn.o_proj.bias", ("C",), "layer", when=_bias),
    Row("layers.{layer}.self_attn.qkv_proj.weight", ("qkv", "N"), "layer", when=flag("stacked_qkv")),
    Row("layers.{layer}.self_attn.q_norm.weight", ("h",), "layer", when=qk_norm),
    Row("layers.{layer}.self_attn.k_norm.weight", ("h",), "layer", when=qk_norm),
    Row("layers.{layer}.self_attn.q_a_proj.weight", ("Q", "N"), "layer", when=lambda c: mla(c) and bool(c.get("q_lora_rank"))),
    Row("layers.{layer}.self_attn.q_a_layernorm.weight", ("Q",), "layer", when=lambda c: mla(c) and bool(c.get("q_lora_rank"))),
    Row("layers.{layer}.self_attn.q_b_proj.weight", ("A*QK", "Q"), "layer", when=lambda c: mla(c) and bool(c.get("q_lora_rank"))),
    Row("layers.{layer}.self_attn.q_proj.weight", ("A*QK", "N"), "layer", when=lambda c: mla(c) and not c.get("q_lora_rank")),
    Row("layers.{layer}.self_attn.kv_a_proj_with_mqa.weight", ("R+rope", "N"), "layer", when=mla),
    Row("layers.{layer}.self_attn.kv_a_layernorm.weight", ("R",), "layer", when=mla),
    Row("layers.{layer}.self_attn.kv_b_proj.weight", ("A*B", "R"), "layer", when=mla),
    Row(
        "layers.{layer}.self_attn.g_proj.weight",
        ("O", "N"),
        "layer",
        when=lambda c: mla(c) and bool(c.get("mla_use_output_gate")),
    ),
    Row("layers.{layer}.self_attn.o_proj.weight", ("C", "O"), "layer"),
    Row("layers.{layer}.post_attention_layernorm.weight", ("C",), "layer"),
    Row("layers.{layer}.mlp_conv.base_kernel", (2, "K", "C"), "layer", when=CONV),
    Row("layers.{layer}.mlp_conv.kernel_projection.weight", ("P", "C"), "layer", when=CONV),
    Row("layers.{layer}.mlp.gate_proj.weight", ("I", "C"), "layer"),
    Row("layers.{layer}.mlp.up_proj.weight", ("I", "C"), "layer"),
    Row("layers.{layer}.mlp.down_proj.weight", ("C", "I"), "layer"),
    Row("norm.weight", ("C",)),
    Row("lm_head.weight", ("D", "C"), when=flag("owns_lm_head")),
    Row("markov_head.markov_w1.weight", ("V", "M"), when=lambda c: SPARK(c) and c.get("markov_rank", 256) > 0),
    Row("markov_head.markov_w2.weight", ("D", "M"), when=lambda c: SPARK(c) and c.get("markov_rank", 256) > 0),
    Row("markov_head.gate_proj.weight", ("M", "F"), when=lambda c: SPARK(c) and c.get("markov_head_type") == "gated"),
    Row("markov_head.gate_proj.bias", ("M",), when=lambda c: SPARK(c) and c.get("markov_head_type") == "gated"),
    Row("markov_head.joint_proj.weight", ("L", "J"), when=lambda c: SPARK(c) and c.get("markov_head_type") == "rnn"),
    Row("markov_head.joint_proj.bias", ("L",), when=lambda c: SPARK(c) and c.get("markov_head_type") == "rnn"),
    Row("confidence_head.proj.weight", (1, "X"), when=lambda c: SPARK(c) and c.get("enable_confidence_head", True)),
    Row("confidence_head.proj.bias", (1,), when=lambda c: SPARK(c) and c.get("enable_confidence_head", True)),
    Row("candidate_selector.predecessor_codebook", ("V", "S"), when=CONV),
    Row("candidate_selector.successor_codebook", ("V", "S"), when=CONV),
    Row("candidate_selector.hidden_projection.weight", ("S", "C"), when=CONV),
    Row("d2t", ("D",), dtype="I64", when=flag("owns_vocab_maps")),
    Row("t2d", ("V",), dtype="BOOL", when=flag("owns_vocab_maps")),
)


def sizes(c: Config) -> dict[str, int]:
    """The symbols' values under a native config."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    head_dim = c.get("head_dim") or hidden // heads
    rope, nope, value = (c.get(k) or 0 for k in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    spark: Config = c if SPARK(c) else {}
    conv: Config = c if CONV(c) else {}
    markov, taps = spark.get("markov_rank", 256), kinds_of_taps(c)
    width = c.get("target_hidden_size") or hidden
    kernel, group = conv.get("conv_kernel_size", 2), conv.get("conv_group_size", 16)
    grouped = c.get("num_key_value_heads") or heads
    return {
        "V": c["vocab_size"], "D": c.get("draft_vocab_size") or c["vocab_size"], "C": hidden, "W": width, "T": taps * width,
        "N": 2 * hidden if EAGLE(c) else hidden, "I": c["intermediate_size"], "A": heads, "G": grouped, "h": head_dim,
        "qkv": (heads + 2 * grouped) * head_dim, "Q": c.get("q_lora_rank") or 0, "R": c.get("kv_lora_rank") or 0, "rope": rope,
        "QK": nope + rope, "B": nope + value, "O": heads * (value if mla(c) else head_dim), "K": kernel,
        "P": 2 * kernel * (hidden // group), "S": conv.get("selector_rank", 256), "M": markov,
        "F": hidden + markov, "J": hidden + 2 * markov, "L": 3 * markov,
        "X": hidden + (markov if spark.get("confidence_head_with_markov", True) else 0),
    }  # fmt: skip


def kinds_of_taps(c: Config) -> int:
    """Number of taps; Eagle3 heads that do not list them have three."""
    ids = c.get("target_layer_ids") or c.get("aux_layer_ids")
    return len(ids) if ids else c.get("num_aux_hidden_states", 3) if EAGLE(c) else 3


def shape(symbols: Symbols, values: Mapping[str, int]) -> tuple[int, ...]:
    """A shape with its symbols replaced."""
    return tuple(s if isinstance(s, int) else _value(s, values) for s in symbols)


def _value(symbol: str, values: Mapping[str, int]) -> int:
    if "+" in symbol:
        return sum(values[s] for s in symbol.split("+"))
    return math.prod(values[s] for s in symbol.split("*"))


def rows_of(config: Config) -> list[Row]:
    """The rows that a native config has."""
    return [row for row in ROWS if row.when(config)]
