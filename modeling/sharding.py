"""FSDP2 for the native models: weights gathered in bf16, the fp32 set in fp32.

`fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))` would round every parameter it gathers, the
fp32 set too. `shard` gives those modules units of their own:

| unit | gathered in |
|---|---|
| the projections of a KDA layer | `param_dtype` |
| the rest of a KDA layer: `A_log`, `dt_bias`, convolutions, `o_norm` | as stored (fp32) |
| routers: weight and correction bias | as stored (fp32) |
| packed experts | as stored (codes) |
| the rest of each layer; embedding, final norm and mix, head | `param_dtype` |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from kconv.modeling.experts import KimiExperts
from kconv.modeling.kda import KimiDeltaAttention
from kconv.modeling.layer import KimiK3DecoderLayer
from kconv.modeling.router import KimiRouter


def shard(
    model: nn.Module, *, param_dtype: torch.dtype = torch.bfloat16, reduce_dtype: torch.dtype = torch.float32, **options: Any
) -> nn.Module:
    """Shard a native model in place over the default process group (or `mesh=`); `options` go to `fully_shard`.

    Keep the parameters in fp32 (they are the optimizer's copy); computation runs in `param_dtype`.
    """
    low = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    stored = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    for module in list(model.modules()):
        if isinstance(module, KimiDeltaAttention):
            fully_shard([c for c in module.children() if isinstance(c, nn.Linear)], mp_policy=low, **options)
            fully_shard(module, mp_policy=stored, **options)
        elif isinstance(module, KimiRouter) or (isinstance(module, KimiExperts) and module.packed):
            fully_shard(module, mp_policy=stored, **options)
    for module in list(model.modules()):
        if isinstance(module, KimiK3DecoderLayer):
            fully_shard(module, mp_policy=low, **options)
    fully_shard(model, mp_policy=low, **options)
    return model
