"""Config keys of Transformers' own `KimiLinearConfig` in the words of the published Kimi-Linear config.

`save_pretrained` of Transformers 5.24 writes the published tensor names and most of the published keys, but:

| Transformers | published |
|---|---|
| `layer_types`, where no `linear_attn_config` was given | `linear_attn_config` with `full_attn_layers`, `kda_layers` (1-based) |
| `linear_num_heads`, `linear_head_dim`, ... | that block's `num_heads`, `head_dim`, ... |
| `mlp_layer_types` | `first_k_dense_replace` |
| nothing: its class never rotates | `mla_use_nope` |
| `model_max_length`, `num_experts_per_tok`, ... | `max_position_embeddings`, `num_experts_per_token`, ... |
"""

from __future__ import annotations

from typing import Any

from kconv.errors import KconvError

Config = dict[str, Any]

NAMES = {
    "num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token", "n_shared_experts": "num_shared_experts",
    "n_group": "num_expert_group", "norm_topk_prob": "moe_renormalize", "model_max_length": "max_position_embeddings",
}  # fmt: skip
LINEAR = {
    "linear_num_heads": "num_heads", "linear_head_dim": "head_dim", "linear_conv_kernel_dim": "short_conv_kernel_size",
}  # fmt: skip
# What only Transformers' class reads; a native config does not repeat it.
OWN_KEYS = frozenset({*NAMES, *LINEAR, "layer_types", "mlp_layer_types", "head_dim", "qk_head_dim", "output_router_logits"})


def in_published_words(text: Config) -> Config:
    """`text` with the published keys that it says in Transformers' words; published keys that are there win."""
    added = {published: text[own] for own, published in NAMES.items() if own in text and published not in text}
    kinds, mlps = text.get("layer_types"), text.get("mlp_layer_types")
    if isinstance(kinds, list) and "linear_num_heads" in text and not isinstance(text.get("linear_attn_config"), dict):
        added["linear_attn_config"] = {
            "full_attn_layers": [i for i, kind in enumerate(kinds, 1) if kind == "full_attention"],
            "kda_layers": [i for i, kind in enumerate(kinds, 1) if kind != "full_attention"],
            **{published: text[own] for own, published in LINEAR.items() if own in text},
        }
    if "linear_num_heads" in text and "mla_use_nope" not in text:
        added["mla_use_nope"] = True  # Transformers' class never rotates and has no key for it
    if isinstance(mlps, list) and text.get("first_k_dense_replace") is None:
        added["first_k_dense_replace"] = _leading_dense(mlps)
    return {**text, **added}


def _leading_dense(mlps: list[Any]) -> int:
    first = mlps.index("sparse") if "sparse" in mlps else len(mlps)
    if "dense" in mlps[first:]:
        raise KconvError(
            "config.json: mlp_layer_types has dense layers after sparse ones, which no published Kimi checkpoint does",
            hint="give the checkpoint's own config.json",
        )
    return first
