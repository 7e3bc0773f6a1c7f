"""Precision rules of the native modules.

| rule | where it comes from |
|---|---|
| widen to *at least* fp32, never *to* fp32 | a model loaded in float64 then computes in float64 from end to end |
| five kinds of tensor are never narrower than fp32 | they are F32 in the checkpoint |

The five are `A_log`, `dt_bias`, `*_conv1d`, `o_norm` and `e_score_correction_bias`. `Fp32Parameters` keeps them wide by
construction: they are created wide whatever the default dtype is (which is how `from_pretrained(dtype=...)` decides),
module casts skip them, and `load_state_dict(assign=True)` widens what it is given. Under `torch.autocast` the router and
the KDA recurrence keep the first rule, see `no_autocast`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

WIDE = (torch.float32, torch.float64)


def wide(dtype: torch.dtype) -> torch.dtype:
    """`dtype` itself when it is fp32 or float64, otherwise fp32."""
    return dtype if dtype in WIDE else torch.float32


def widen(x: torch.Tensor) -> torch.Tensor:
    """`x` in at least fp32; the same tensor when it is wide already."""
    return x if x.dtype in WIDE else x.float()


def no_autocast(x: torch.Tensor) -> torch.autocast:
    """Context in which products of wide tensors stay wide: `torch.autocast` would narrow them to its own dtype."""
    return torch.autocast(x.device.type, enabled=False)


def wide_parameter(*shape: int) -> nn.Parameter:
    """An uninitialised parameter in at least fp32, float64 where that is torch's default dtype."""
    return nn.Parameter(torch.empty(*shape, dtype=wide(torch.get_default_dtype())))


class Fp32Parameters(nn.Module):
    """A module whose parameters and buffers named in `fp32_names` never become narrower than fp32."""

    fp32_names: ClassVar[tuple[str, ...]] = ()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        if recurse:
            for child in self.children():
                child._apply(fn)
        own = {**self._parameters, **self._buffers}
        held = [p for n in self.fp32_names if (p := own.get(n)) is not None]
        protected = {id(p) for p in held} | {id(p.grad) for p in held if p.grad is not None}

        def cast(t: torch.Tensor) -> torch.Tensor:
            out = fn(t)
            narrow = id(t) in protected and out.dtype not in WIDE
            return t.to(device=out.device, dtype=torch.float32) if narrow else out

        return super()._apply(cast, recurse=False)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in self.fp32_names:
            if prefix + name in state_dict:
                state_dict[prefix + name] = widen(state_dict[prefix + name])
        super()._load_from_state_dict(state_dict, prefix, *args)
