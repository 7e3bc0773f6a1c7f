"""DFlash2: DFlash with dynamic convolutions around each sublayer and a selector that walks the candidates (inco.ai/blog/dflash2).

| part | rule |
|---|---|
| convolution | `y_t = sum_o (base_o + delta_{t,o}) * x_{t-o}` over `conv_kernel_size` taps of one block; before it there is 0 |
| `delta` | `kernel_projection` of the sublayer's input, one value per `conv_group_size` channels, for both convolutions |
| `base_kernel` | [2, taps, hidden]: before the sublayer, after it; bare parameters without `.weight` |
| selector | each position's top `selector_top_k`; score(b) = logit(b) + <pred[a] * (W h), succ[b]>, walked from the anchor |

The block of the convolution is the anchor and the drafted tokens: `block_size` positions. Grouped-query and MLA backbones.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from kconv.errors import KconvError
from kconv.modeling.drafts.cache import Kept
from kconv.modeling.drafts.config import DraftConfig, DraftConfigError, require_mask
from kconv.modeling.drafts.gqa import Tables
from kconv.modeling.drafts.layer import DraftDecoderLayer
from kconv.modeling.drafts.model import BlockDraftModel, Head
from kconv.modeling.drafts.sampling import Proposal, Sampler


class DFlash2Config(DraftConfig):
    """A DFlash2 draft."""

    model_type = "dflash2"

    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16

    def check(self) -> None:
        """Refuse group sizes that do not divide the width, and empty selectors."""
        super().check()
        require_mask(self)
        if self.conv_group_size < 1 or self.hidden_size % self.conv_group_size:
            raise DraftConfigError(f"conv_group_size {self.conv_group_size} does not divide hidden_size {self.hidden_size}")
        if self.conv_kernel_size < 1 or self.conv_kernel_size > (self.block_size or self.conv_kernel_size):
            raise DraftConfigError(f"conv_kernel_size {self.conv_kernel_size} does not fit a block of {self.block_size}")
        if self.selector_rank < 1 or not 1 <= self.selector_top_k <= self.vocab_size:
            raise DraftConfigError(f"selector_rank {self.selector_rank}, selector_top_k {self.selector_top_k} are out of range")
        if self.has_draft_vocab:
            raise DraftConfigError("DFlash2 predicts over the target's whole vocabulary; draft_vocab_size is smaller")


def convolve(x: Tensor, delta: Tensor, base: Tensor, group: int, block_size: int) -> Tensor:
    """Dynamic depthwise convolution inside blocks.

    Args:
        x: [B, S, C], S a multiple of `block_size`.
        delta: [B, S, taps, C / group], what the input adds to the taps.
        base: [taps, C], the learned taps.
        group: channels that share one delta.
        block_size: positions of one block; no tap reaches into the block before.

    Returns:
        [B, S, C].
    """
    if x.shape[1] % block_size:
        raise KconvError(f"{x.shape[1]} positions are no whole number of blocks of {block_size}")
    blocks = x.unflatten(1, (-1, block_size))
    kernel = (base.to(x.dtype) + delta.repeat_interleave(group, -1)).unflatten(1, (-1, block_size))
    total = kernel[..., 0, :] * blocks
    for tap in range(1, base.shape[0]):
        shifted = F.pad(blocks[:, :, :-tap], (0, 0, tap, 0))
        total = total + kernel[..., tap, :] * shifted
    return total.flatten(1, 2)


class GroupedDynamicConv(nn.Module):
    """The convolutions before and after one sublayer, both driven by its input."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        self.taps, self.group = config.conv_kernel_size, config.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, config.hidden_size))
        width = 2 * self.taps * (config.hidden_size // self.group)
        self.kernel_projection = nn.Linear(config.hidden_size, width, bias=False)

    def before(self, x: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
        """The convolved input [B, S, C], and the deltas [B, S, taps, C / group] for the output."""
        deltas = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))
        return convolve(x, deltas[..., 0, :, :], self.base_kernel[0], self.group, block_size), deltas[..., 1, :, :]

    def after(self, x: Tensor, delta: Tensor, block_size: int) -> Tensor:
        """The convolved output [B, S, C]."""
        return convolve(x, delta, self.base_kernel[1], self.group, block_size)


class DFlash2DecoderLayer(DraftDecoderLayer):
    """A draft layer with convolutions around attention and MLP."""

    def __init__(self, config: DraftConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        assert isinstance(config, DFlash2Config)
        self.attention_conv = GroupedDynamicConv(config)
        self.mlp_conv = GroupedDynamicConv(config)
        self.block_size = config.block_size

    def forward(self, hidden: Tensor, context: Kept | None, tables: Tables, mask: Tensor | None) -> tuple[Tensor, Kept]:
        """As the plain layer, each sublayer between its convolutions."""
        size = self.block_size or hidden.shape[1]
        size = min(size, hidden.shape[1])
        x, delta = self.attention_conv.before(self.input_layernorm(hidden), size)
        attended, kept = self.self_attn(x, context, tables, mask)
        hidden = hidden + self.attention_conv.after(attended, delta, size)
        x, delta = self.mlp_conv.before(self.post_attention_layernorm(hidden), size)
        return hidden + self.mlp_conv.after(self.mlp(x), delta, size), kept


class CandidateSelector(nn.Module):
    """Scores neighbouring candidates and walks one path through them."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def scores(self, hidden: Tensor, logits: Tensor, candidates: Tensor, predecessor: Tensor) -> Tensor:
        """Scores [..., k] of candidates [..., k] with their logits, behind `predecessor` [...], at hidden [..., C]."""
        gate = F.embedding(predecessor, self.predecessor_codebook) * self.hidden_projection(hidden)
        return logits + torch.einsum("...r,...kr->...k", gate, F.embedding(candidates, self.successor_codebook))

    def walk(self, hidden: Tensor, logits: Tensor, anchor_ids: Tensor, sampler: Sampler) -> Proposal:
        """One token per position of hidden [B, n, C] with logits [B, n, V], behind the anchors [B]."""
        unary, candidates = logits.topk(self.top_k, -1)
        token, tokens, rows = anchor_ids, [], []
        for i in range(hidden.shape[1]):
            scores = self.scores(hidden[:, i], unary[:, i], candidates[:, i], token)
            chosen, probs = self._pick(scores, sampler)
            token = candidates[:, i].gather(-1, chosen[:, None])[:, 0]
            tokens.append(token)
            if probs is not None:
                rows.append(torch.zeros_like(logits[:, i], dtype=probs.dtype).scatter(-1, candidates[:, i], probs))
        return Proposal(torch.stack(tokens, 1), torch.stack(rows, 1) if rows else None)

    @staticmethod
    def _pick(scores: Tensor, sampler: Sampler) -> tuple[Tensor, Tensor | None]:
        """The candidates are the top-k already: only the temperature applies."""
        if sampler.greedy:
            return scores.argmax(-1), None
        plain = Sampler(sampler.temperature, generator=sampler.generator)
        return plain.pick(scores)


class DFlash2DraftModel(BlockDraftModel):
    """DFlash2 over a grouped-query or MLA backbone."""

    config_class: Any = DFlash2Config
    layer_class: ClassVar[type[DraftDecoderLayer]] = DFlash2DecoderLayer

    def extra_modules(self, config: DraftConfig) -> None:
        """The selector."""
        assert isinstance(config, DFlash2Config)
        self.candidate_selector = CandidateSelector(config)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, GroupedDynamicConv):
            identity = torch.zeros_like(module.base_kernel)
            identity[:, 0] = 1.0
            init.copy_(module.base_kernel, identity)
            init.zeros_(module.kernel_projection.weight)
        elif isinstance(module, CandidateSelector):
            init.normal_(module.predecessor_codebook, mean=0.0, std=self.config.initializer_range)
            init.zeros_(module.successor_codebook)

    def propose(self, hidden: Tensor, anchor_ids: Tensor, output_head: Head | None, sampler: Sampler) -> Proposal:
        """Tokens of a block by the selector's walk."""
        drafted = self.drafting(hidden)
        return self.candidate_selector.walk(drafted, self.compute_logits(drafted, output_head), anchor_ids, sampler)
