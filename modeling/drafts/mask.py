"""Who sees whom: the attention masks of block drafts.

Keys lie as `[context S | block_0 | ... | block_N-1]`, queries as the blocks alone. Query `i` of the block anchored at `a`:

| key | visible when |
|---|---|
| context position `c` | `c < a` (strict: the anchor's own context state is not), same document, inside the window |
| own block, offset `j` | always; in a causal layer `j <= i` |
| other blocks | never |
| anything, for a padding block | its own block only, so that no row is empty |

Window `w`: by rule `query` (z-lab, NeMo, the runtimes) `a + i - c < w`; by rule `anchor` (speculators' trainer) `c >= a - w`.
While decoding there is one block behind its context, and z-lab also bounds the block itself: `|i - j| < w` where not causal.
"""

from __future__ import annotations

import torch
from torch import Tensor


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where visible, -inf elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


def in_window(anchor: Tensor, offset: Tensor, key: Tensor, window: int | None, rule: str) -> Tensor | bool:
    """Whether context position `key` lies inside the window of the query at `anchor + offset`; all broadcast."""
    if window is None:
        return True
    return anchor + offset - key < window if rule == "query" else key >= anchor - window


def block_mask(
    anchors: Tensor,
    keep: Tensor,
    context_len: int,
    block_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    causal: bool = False,
    window: int | None = None,
    window_rule: str = "query",
    documents: Tensor | None = None,
) -> Tensor:
    """The additive training mask.

    Args:
        anchors: [B, N] positions of the anchors.
        keep: [B, N] bool, False for padding blocks.
        context_len: S.
        block_size: positions of one block.
        dtype: of the mask.
        causal: whether a position sees only earlier ones of its block.
        window: context window, None for the whole prefix.
        window_rule: `query` or `anchor`, see the module's table.
        documents: [B, S] document id of each context position when documents are packed.

    Returns:
        [B, 1, N * block_size, S + N * block_size], 0 where visible and -inf elsewhere.
    """
    batch, blocks = anchors.shape
    device = anchors.device
    anchor = anchors.repeat_interleave(block_size, 1)[..., None]
    offset = torch.arange(block_size, device=device).repeat(blocks)[None, :, None]
    key = torch.arange(context_len, device=device)[None, None]
    context = (key < anchor) & in_window(anchor, offset, key, window, window_rule)
    context = context & keep.repeat_interleave(block_size, 1)[..., None]
    if documents is not None:
        document = documents.gather(1, anchors).repeat_interleave(block_size, 1)[..., None]
        context = context & (documents[:, None] == document)
    own = _own_block(blocks, block_size, causal, device)
    visible = torch.cat([context, own[None].expand(batch, -1, -1)], -1)
    return additive(visible[:, None], dtype)


def _own_block(blocks: int, block_size: int, causal: bool, device: torch.device) -> Tensor:
    """[N * block_size, N * block_size] bool: positions of the same block, with `causal` no later ones."""
    position = torch.arange(blocks * block_size, device=device)
    same = position[:, None] // block_size == position[None] // block_size
    return same & (position[None] <= position[:, None]) if causal else same


def decode_mask(
    queries: int,
    keys: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    causal: bool = False,
    window: int | None = None,
    window_rule: str = "query",
) -> Tensor | None:
    """The additive mask of one block of `queries` positions behind its context; None when everything is visible.

    Returns [1, 1, queries, keys], or None.
    """
    if not causal and window is None:
        return None
    anchor = keys - queries
    query = anchor + torch.arange(queries, device=device)[:, None]
    key = torch.arange(keys, device=device)[None]
    visible = key <= query if causal else torch.ones(queries, keys, dtype=torch.bool, device=device)
    if window is not None and window_rule == "query":
        visible = visible & (query - key < window)
        if not causal:
            visible = visible & (key - query < window)
    elif window is not None:
        visible = visible & (key >= anchor - window)
    return additive(visible[None, None], dtype)
