"""Keywords of a forward pass that are not in its signature: each is used, or refused with what to use instead.

| keyword | treatment |
|---|---|
| `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`, `max_length_k` | Transformers' packing: `cu_seqlens` |
| `num_items_in_batch`, `shift_labels` | the loss, where there is one |
| None; False for what would only ask for more output | nothing is asked for |
| anything else | raises `KconvError` before anything is computed |
"""

from __future__ import annotations

from typing import Any

import torch

from kconv.errors import KconvError

PACKING = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"})
LOSS = frozenset({"num_items_in_batch", "shift_labels"})
_BOUNDARIES = "give document boundaries as cu_seqlens, or document numbers as attention_mask"
INSTEAD = {
    "output_attentions": "attention weights are not kept, and KDA layers have none; hook the layers' self_attn",
    "output_router_logits": "hook the layers' mlp.gate, which returns chosen experts and weights",
    **dict.fromkeys(
        ("seq_idx", "seq_lens", "position_ids_q", "_packed_seq_ids", "packed_token_indices", "kimi_packed_context", "_doc_ids",
         "_seq_start", "qkv_format", "cu_seqlens_padded"), _BOUNDARIES,
    ),
    "block_residual": "blocks are made by the model; a stage of a pipeline calls its layers with the blocks before them",
    "cache_position": "leave it out: a cache knows how many tokens it holds",
    "token_type_ids": "leave it out: this family has no token types",
}  # fmt: skip


def check_keywords(given: dict[str, Any], known: frozenset[str], where: str) -> None:
    """Raise KconvError naming each keyword of `given` that asks `where` for something it does not do."""
    asked = sorted(
        k for k, v in given.items() if k not in known and v is not None and not (v is False and k.startswith("output_"))
    )
    if asked:
        hints = [f"{k}: {INSTEAD.get(k, 'no such argument; check its spelling')}" for k in asked]
        raise KconvError(f"{where} does not take {', '.join(asked)}", hint="; ".join(hints))


def boundaries(cu_seqlens: torch.Tensor | None, keywords: dict[str, Any], mask: torch.Tensor | None) -> torch.Tensor | None:
    """Document boundaries from `cu_seqlens` or Transformers' keywords; raises KconvError where two statements differ."""
    queries, keys = keywords.get("cu_seq_lens_q"), keywords.get("cu_seq_lens_k")
    given = [t for t in (cu_seqlens, queries, keys) if t is not None]
    if any(not torch.equal(given[0].flatten().cpu(), t.flatten().cpu()) for t in given[1:]):
        raise KconvError(
            "cu_seqlens, cu_seq_lens_q and cu_seq_lens_k differ", hint="a document attends to itself: give one set of boundaries"
        )
    if given and mask is not None and bool((mask != 1).any()):
        raise KconvError(
            "both document boundaries and an attention_mask with padding or documents are given",
            hint="give the boundaries without the mask, or document numbers as the mask (0 is padding)",
        )
    return given[0] if given else None
