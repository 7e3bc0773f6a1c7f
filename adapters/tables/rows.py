"""Rows of a family's table: name, kind of layer, shape in terms of the config; and the table with a config's sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Config = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One pattern: name below the layer (or the model), kind, shape symbols, whether it must stay fp32, and when it exists."""

    name: str
    kind: str
    shape: tuple[str | int, ...]
    fp32: bool = False
    when: Callable[[Config], bool] = field(default=lambda c: True)


def q_lora(c: Config) -> bool:
    """Whether MLA compresses queries."""
    return bool(c.get("q_lora_rank"))


# How each size follows from the config, for people.
MEANING = {
    "V": "vocab_size", "C": "hidden_size", "H": "KDA num_heads", "D": "KDA head_dim", "P": "KDA num_heads*head_dim",
    "K": "short_conv_kernel_size", "A": "num_attention_heads", "G": "num_key_value_heads", "Q": "q_lora_rank",
    "R": "kv_lora_rank", "rope": "qk_rope_head_dim", "QK": "qk_nope_head_dim+qk_rope_head_dim",
    "B": "qk_nope_head_dim+v_head_dim", "O": "num_attention_heads*v_head_dim", "I": "intermediate_size",
    "M": "moe_intermediate_size", "S": "moe_intermediate_size*num_shared_experts", "L": "routed_expert_hidden_size",
    "E": "experts by the router's rows", "N": "indexer heads by weights_proj's rows", "T": "indexer width by wk's rows",
}  # fmt: skip
MOST = 1 << 31


@dataclass(frozen=True)
class Table:
    """A family's table with the layer kinds (0-based) and sizes that were read from a text config."""

    config: Config
    kinds: dict[str, tuple[int, ...]]
    sizes: dict[str, int]
    table: tuple[Row, ...]
    experts: Mapping[str, tuple[str, ...]]
    """Projections of an expert, the two that become one first, with their shapes."""

    def rows(self) -> list[Row]:
        """The rows of the table that this config has."""
        return [row for row in self.table if row.when(self.config)]

    def shape(self, symbols: tuple[str | int, ...], **override: int) -> tuple[int, ...]:
        """A shape with its symbols replaced by this config's sizes."""
        sizes = self.sizes | override
        return tuple(s if isinstance(s, int) else _value(s, sizes) for s in symbols)

    def formula(self, symbols: tuple[str | int, ...], **override: int) -> str:
        """A shape in the words of the config: `[(num_attention_heads = 4) x (v_head_dim = 16), (hidden_size = 128)]`."""
        sizes = self.sizes | override
        return f"[{', '.join(str(s) if isinstance(s, int) else _words(s, sizes) for s in symbols)}]"


def _words(symbol: str, sizes: dict[str, int]) -> str:
    sign = "+" if "+" in symbol else "*"
    terms = [f"({MEANING[s]} = {sizes[s]})" for s in symbol.split(sign)]
    return {"+": " + ", "*": " x "}[sign].join(terms)


def _value(symbol: str, sizes: dict[str, int]) -> int:
    if "+" in symbol:
        return sum(sizes[s] for s in symbol.split("+"))
    return math.prod(sizes[s] for s in symbol.split("*"))
