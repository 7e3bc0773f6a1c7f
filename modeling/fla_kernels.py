"""flash-linear-attention's KDA kernels behind one signature, whatever its version.

| fla | gate in the kernel | lower bound | beta's sigmoid in the kernel | convolution lives in |
|---|---|---|---|---|
| 0.4.0 | no | no | no | fla.modules.convolution |
| 0.4.1 | chunk only | no | no | fla.modules.convolution |
| 0.4.2, 0.5.0 | yes | yes | no | fla.modules.conv, fla.modules.convolution |
| 0.5.1 | yes | yes | yes | fla.modules.conv, fla.modules.convolution |
| 0.6.0 | yes | yes | yes | fla.modules.causal_conv1d |

(Read off the signatures of the released wheels.) What a kernel's signature lacks is computed here in torch: unknown
keywords would vanish in its `**kwargs`. States are [sequences, heads, K, V], which needs no flag in any version.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch

from kconv.modeling.kda_ops import Delta, Gate
from kconv.modeling.segments import Segments

CONV_MODULES = ("fla.modules.causal_conv1d", "fla.modules.conv", "fla.modules.convolution")


@functools.cache
def available() -> bool:
    """Whether fla can be imported; without it CUDA runs the plain torch forms."""
    if importlib.util.find_spec("fla") is None:
        return False
    try:
        importlib.import_module("fla.ops.kda")
    except (ImportError, RuntimeError):
        return False
    return True


@functools.cache
def _kernel(name: str) -> tuple[Callable[..., Any], frozenset[str]]:
    function = getattr(importlib.import_module("fla.ops.kda"), name)
    return function, frozenset(inspect.signature(function).parameters)


@functools.cache
def _conv() -> Callable[..., Any]:
    for name in CONV_MODULES:
        try:
            return importlib.import_module(name).causal_conv1d
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"this fla has causal_conv1d in none of {', '.join(CONV_MODULES)}")


def delta_attention(
    raw: Delta, gate: Gate, state: torch.Tensor | None, cu_seqlens: torch.Tensor | None, chunk: bool, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """KDA by fla over `raw` [B, T, H, .], whose g is the gate's projection and whose beta are logits.

    `chunk` picks the chunk kernel (prefill, training), otherwise the recurrent one, which has no backward pass. Returns o
    and, where `keep`, the states [sequences, H, K, V].
    """
    function, has = _kernel("chunk_kda" if chunk else "fused_recurrent_kda")
    options: dict[str, Any] = {}
    if {"use_gate_in_kernel", "lower_bound"} <= has:
        options |= {"use_gate_in_kernel": True, **gate._asdict()}
        options["A_log"] = options.pop("a_log")
        if chunk:
            options["safe_gate"] = gate.lower_bound is not None
    else:
        raw = raw._replace(g=gate.log_decay(raw.g))
    if "use_beta_sigmoid_in_kernel" in has:
        options["use_beta_sigmoid_in_kernel"] = True
    else:
        raw = raw._replace(beta=raw.beta.float().sigmoid())
    return function(
        **{name: t.contiguous() for name, t in raw._asdict().items()},
        initial_state=state,
        output_final_state=keep,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.long(),
        **options,
    )


def short_conv(x: torch.Tensor, weight: torch.Tensor, segments: Segments | None, state: torch.Tensor | None) -> torch.Tensor:
    """Causal depthwise convolution, then SiLU; `weight` [channels, 1, width], `state` [sequences, width - 1, channels]."""
    initial = None
    if state is not None:
        # fla's state has `width` columns of which the first is never read.
        initial = torch.nn.functional.pad(state.transpose(1, 2), (1, 0)).contiguous()
    y, _ = _conv()(
        x, weight[:, 0].contiguous(), initial_state=initial, output_final_state=False, activation="silu",
        cu_seqlens=None if segments is None else segments.cu_seqlens.long(),
    )  # fmt: skip
    return y
