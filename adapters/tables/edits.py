"""What someone changed in a converted folder's config: on the way back the change goes along, or is refused by name.

| a key of the native config that is not what the conversion wrote | on the way back |
|---|---|
| one that published configs have (`num_experts_per_token`, `rms_norm_eps`, token ids, ...) | written there, and said |
| one that only native classes know, and that changes what is computed (`mla_norm_eps`) | refused |
| what tensors or options decide (dtype, depth, expert counts, ties) | as the tensors say |

The conversion's own config is not kept: it follows from the source's, which the manifest holds word for word.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

Config = dict[str, Any]
SETTLED = frozenset({
    "architectures", "dtype", "experts_format", "indexer_config", "linear_attn_config", "model_type", "num_experts",
    "num_experts_per_layer", "num_hidden_layers", "num_nextn_predict_layers", "tie_word_embeddings", "torch_dtype",
    "n_routed_experts",
})  # fmt: skip


def edited(wrote: Mapping[str, Any], found: Mapping[str, Any], ignored: Collection[str]) -> Config:
    """Keys of `found` whose value is not the one that the conversion wrote, with the value found."""
    return {k: v for k, v in found.items() if k not in SETTLED and k not in ignored and not (k in wrote and wrote[k] == v)}


def put(config: Config, edits: Mapping[str, Any], dialect: Mapping[str, str], notes: list[str]) -> Config:
    """A published config with the edits in the block of the text model, and wherever else the same key stands.

    `dialect` maps other names of a key to the published one: where the config uses such a name, that is written too.
    """
    made = copy.deepcopy(config)
    holders = [h for h in (made, made.get("text_config")) if isinstance(h, dict)]
    for key, value in edits.items():
        names = {key, *(own for own, published in dialect.items() if published == key)}
        before = next((h[n] for h in reversed(holders) for n in names if n in h), None)
        holders[-1][key] = value
        for holder in holders:
            holder.update({n: value for n in names if n in holder})
        notes.append(f"config.json says {key} {value!r}, the recorded source {before!r}: written as it is here")
    return made


def refusals(edits: Mapping[str, Any], native_only: Collection[str], target: str) -> list[str]:
    """A problem for every edit that the target has no key for."""
    return [
        f"config.json: {key} is {edits[key]!r}, which is not what the conversion wrote, and a config in the {target} layout "
        "has no such key: set it back, or keep the native layout"
        for key in native_only
        if key in edits
    ]
