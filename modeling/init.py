"""Seeded initialisation, as the family trains from.

| parameter | start | source |
|---|---|---|
| matrices, embeddings, routers, experts, `*_res_proj` | normal(0, `initializer_range`) | the configs |
| norms | 1 | |
| `A_log` | log of uniform(1, 16); with a lower bound 0 | fla's KDA layer |
| `dt_bias` | inverse softplus of a time step log-uniform in [0.001, 0.1] | fla's KDA layer |
| `*_conv1d` | uniform(-1, 1) / sqrt(width) | torch's Conv1d, which fla's ShortConvolution is |
| `e_score_correction_bias` | 0 | balancing moves it from there |
| packed codes | uniform codes, scales that give a standard deviation near `initializer_range` | |
"""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import initialization as init

from kconv.modeling.experts import KimiExperts
from kconv.modeling.kda import KimiDeltaAttention
from kconv.modeling.norm import KimiGatedRMSNorm, KimiRMSNorm
from kconv.modeling.router import KimiRouter
from kconv.modeling.short_conv import ShortConvolution

CODE_STD = 2.6  # standard deviation of uniformly drawn E2M1 codes


def initialise(module: nn.Module, std: float) -> bool:
    """Initialise the parameters that `module` itself owns; False when it is not one of ours."""
    if isinstance(module, KimiRMSNorm | KimiGatedRMSNorm):
        init.ones_(module.weight)
    elif isinstance(module, ShortConvolution):
        bound = module.width**-0.5
        init.uniform_(module.weight, -bound, bound)
    elif isinstance(module, KimiRouter):
        init.normal_(module.weight, mean=0.0, std=std)
        init.zeros_(module.e_score_correction_bias)
    elif isinstance(module, KimiDeltaAttention):
        _decay(module)
    elif isinstance(module, KimiExperts):
        _experts(module, std)
    else:
        return False
    return True


def _decay(module: KimiDeltaAttention) -> None:
    if module.lower_bound is not None:
        init.zeros_(module.A_log)
    else:
        init.copy_(module.A_log, torch.empty_like(module.A_log).uniform_(1, 16).log())
    step = torch.empty_like(module.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp().clamp_min(1e-4)
    init.copy_(module.dt_bias, step + torch.log(-torch.expm1(-step)))


def _experts(module: KimiExperts, std: float) -> None:
    for name, p in module.named_parameters(recurse=False):
        if not module.packed:
            init.normal_(p, mean=0.0, std=std)
        elif name.endswith("_scale"):
            init.copy_(p, torch.full_like(p, 127 + round(math.log2(std / CODE_STD))))
        else:
            init.copy_(p, torch.randint_like(p, 256))
