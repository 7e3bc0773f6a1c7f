"""Kimi K3.1, as far as it is known: Kimi K3 with an indexer in each MLA layer and a `dsa_config`.

The key names of the published `dsa_config` were not seen; those here are DeepSeek-V3.2's, and like the published block it
names no eps. Top-k is small, so that a short prompt is sparse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kconv.adapters.k3.table import k3_table
from kconv.synthesis.configs import k3_config, k3_text_config
from kconv.synthesis.family import Family, knob
from kconv.synthesis.k3 import k3_like
from kconv.synthesis.shapes import K3Shape
from kconv.synthesis.writing import Synthetic


@dataclass(frozen=True)
class K31Shape(K3Shape):
    """Kimi K3.1."""

    index_heads: int = knob(16, "Indexer: heads.")
    index_dim: int = knob(16, "Indexer: width of a key.")
    index_topk: int = knob(16, "Indexer: keys that a query reads.")
    index_bias: bool = knob(True, "Indexer: bias of k_norm.")
    dsa_config: bool = knob(True, "The config's block that names top-k and layers.")


def make_k31(shape: K31Shape, seed: int) -> Synthetic:
    """A Kimi K3.1 checkpoint."""
    shape.check()
    indexer = {"num_heads": shape.index_heads, "head_dim": shape.index_dim, "norm_bias": shape.index_bias, "layers": shape.mla}
    layout = k3_table(k3_text_config(shape) | {"indexer_config": indexer})
    return k3_like(shape, layout, k31_config(shape), seed)


def k31_config(shape: K31Shape) -> dict[str, Any]:
    """Kimi K3.1's config.json."""
    config = k3_config(shape)
    text = config.get("text_config", config)
    config |= {"model_type": "kimi_k31", "architectures": ["KimiK31ForConditionalGeneration"]}
    if shape.dsa_config:
        text["dsa_config"] = {
            "index_n_heads": shape.index_heads, "index_head_dim": shape.index_dim, "index_topk": shape.index_topk,
            "layers": shape.mla,
        }  # fmt: skip
    return config


K31 = Family("Kimi K3.1: Kimi K3 with a sparse-attention indexer, unverified", K31Shape, make_k31)
