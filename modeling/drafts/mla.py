"""Multi-head latent attention over `[context | block]`: the target's own MLA, its forward replaced.

| detail | rule |
|---|---|
| projections | `KimiMLA`'s, by inheritance: the draft stays in lockstep with the layers whose states it reads |
| context and block | through `kv_a_proj_with_mqa` apart (exact: no bias), the latents joined and expanded together |
| NoPE (Kimi K3) | the `qk_rope_head_dim` slice is a head-shared key extension, never rotated |
| RoPE (Inferact, lightseek, Eagle3) | neighbour pairs of that slice; YaRN scales by `mscale(factor, mscale_all_dim)^2` |
| gate | `attention * sigmoid(g_proj(block))` before `o_proj`, where the config has it |

The cache keeps the normed latent and the (rotated) shared key slice: 576 numbers per position and layer at K3's size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kconv.modeling.drafts.cache import Kept, join
from kconv.modeling.drafts.config import DraftConfig
from kconv.modeling.drafts.gqa import Tables
from kconv.modeling.drafts.rope import mscale
from kconv.modeling.mla import KimiMLA


class MLADraftAttention(KimiMLA):
    """Non-causal latent attention of a block over its context and itself."""

    def __init__(self, config: DraftConfig, layer_idx: int, in_features: int | None = None) -> None:
        super().__init__(config)
        self.layer_idx = layer_idx
        self.rotary = config.rope
        if in_features not in (None, config.hidden_size):
            self._widen(in_features or 0)
        rope = config.rope_parameters or {}
        if rope.get("rope_type") == "yarn" and rope.get("mscale_all_dim"):
            self.scale *= mscale(float(rope["factor"]), float(rope["mscale_all_dim"])) ** 2

    def _widen(self, width: int) -> None:
        """Rebuild the projections that read the layer's input, for an input of another width (Eagle3: embedding and state)."""
        for name in ("q_proj", "q_a_proj", "kv_a_proj_with_mqa", "g_proj"):
            if hasattr(self, name):
                setattr(self, name, nn.Linear(width, getattr(self, name).out_features, bias=False))

    def keep(self, x: Tensor, tables: Tables) -> Kept:
        """What is kept of x [B, S, width]: normed latent and rotated shared key slice, [B, S, rank + rope]."""
        latents = self.latents(x)
        if self.rotary is None or tables is None:
            return (latents,)
        latent, shared = latents.split([self.rank, self.rope], -1)
        return (torch.cat([latent, self.rotary.rotate(shared[:, None], tables)[:, 0]], -1),)

    def block_queries(self, hidden: Tensor, tables: Tables) -> Tensor:
        """Queries [B, H, Q, nope + rope] of the block, rotated where the draft rotates."""
        q = self.queries(hidden)
        if self.rotary is None or tables is None:
            return q
        nope, rope = q.split([self.nope, self.rope], -1)
        return torch.cat([nope, self.rotary.rotate(rope, tables)], -1)

    def forward(  # type: ignore[override]
        self, hidden: Tensor, context: Kept | None, tables: Tables, mask: Tensor | None
    ) -> tuple[Tensor, Kept]:
        """Attend from the block; arguments and result as `GQADraftAttention.forward`."""
        kept = self.keep(hidden, tables)
        (latents,) = join(context, kept)
        k, v = self.expand(latents)
        out = F.scaled_dot_product_attention(self.block_queries(hidden, tables), k, v, mask, scale=self.scale)
        return self.output(out, hidden), kept
