"""The language-model loss, in at least fp32 (Transformers' own goes down to fp32 in a float64 model)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kconv.modeling.dtypes import widen

IGNORED = -100


def causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    num_items_in_batch: torch.Tensor | int | None = None,
    shift_labels: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Cross entropy of logits [batch, length, vocab] at t against labels [batch, length] at t + 1; -100 is left out.

    `shift_labels` [batch, length] are the targets at t themselves, and win. The mean over the tokens that count, or their
    sum over `num_items_in_batch` (gradient accumulation, as Trainer passes it); None without either kind of labels.
    """
    if labels is not None and shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    if shift_labels is None:
        return None
    target = shift_labels.flatten().to(logits.device)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = F.cross_entropy(widen(logits).flatten(0, 1), target, ignore_index=IGNORED, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch
