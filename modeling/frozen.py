"""Parameters that no loss can reach: kept out of training, so that DDP and optimizers find a gradient for all they wait for.

| parameters | why |
|---|---|
| the first layer's `self_attention_res_*` | before the first layer there is no block to mix |
| an indexer's | choosing keys has no gradient; DeepSeek trains it apart, to predict the attention's own weights |

A router's correction bias is a buffer: balancing moves it, by the sign of each expert's load, no gradient does.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def freeze(module: nn.Module) -> None:
    """Take `module` out of training, now and whenever weights are loaded into a model that holds it."""
    module.requires_grad_(False)
    marked: Any = module
    marked.out_of_training = True


def refreeze(model: nn.Module) -> None:
    """Freeze what is marked: loading makes new parameters, which require gradients."""
    for module in model.modules():
        if getattr(module, "out_of_training", False):
            module.requires_grad_(False)
