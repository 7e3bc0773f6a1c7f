"""Routed experts, stacked: plain matrices, or MXFP4 codes kept packed in memory.

| format | parameters | memory at K3's size, 92 layers |
|---|---|---|
| bf16 | `gate_up_proj` [E, 2 * inter, width] (gate = w1, then up = w3), `down_proj` [E, width, inter] | 5.45 TB |
| packed | `*_packed` U8 [E, out, in / 2] and `*_scale` U8 [E, out, in / 32] of the same two | 1.45 TB |

`kconv.modeling.expert_paths` decides how they are computed. Here are the ways of plain torch: tokens are sorted by expert,
and each active expert is one matrix product (the reference's order of operations, exact everywhere), or all of them are one
`torch._grouped_mm`. Packed experts are decoded as they are used, never all at once; gradients flow to the input only.
Results are weighted and summed over the top-k in at least fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from kconv.kernels.mxfp4 import decode
from kconv.modeling import expert_paths
from kconv.modeling.config import KimiK3TextConfig
from kconv.modeling.dtypes import widen
from kconv.modeling.situ import GatedActivation

GROUP = 32
DECODE_AT_ONCE = 8  # packed experts decoded together on the grouped path: 0.5 GB of bf16 at K3's size


class PackedLinear(torch.autograd.Function):
    """`x @ decode(packed, scale).T`; the backward pass decodes again instead of keeping the matrix."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """[tokens, in] x packed [out, in / 2] -> [tokens, out]."""
        ctx.save_for_backward(packed, scale)
        return F.linear(x, decode(packed, scale, x.dtype, check=False))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Gradient of the input; codes have none."""
        packed, scale = ctx.saved_tensors
        return grads[0] @ decode(packed, scale, grads[0].dtype, check=False), None, None


class KimiExperts(nn.Module):
    """`experts` gated MLPs of `width` -> 2 * inter -> `width`."""

    def __init__(self, config: KimiK3TextConfig, experts: int) -> None:
        super().__init__()
        self.experts, self.inter = experts, config.moe_intermediate_size
        self.width = config.routed_expert_hidden_size or config.hidden_size
        self.packed = config.experts_format == "packed"
        self.grouped = True  # False keeps the reference's order of operations everywhere
        self.act = GatedActivation(config.hidden_act, config.activation_situ_beta, config.activation_situ_linear_beta)
        for name, out, inp in (("gate_up_proj", 2 * self.inter, self.width), ("down_proj", self.width, self.inter)):
            if self.packed:
                self._add_codes(f"{name}_packed", out, inp // 2)
                self._add_codes(f"{name}_scale", out, inp // GROUP)
            else:
                self.register_parameter(name, nn.Parameter(torch.empty(experts, out, inp)))

    def matrix(self, name: str) -> torch.Tensor:
        """The parameter `name` as this module sees it now: parametrised, adapted or just brought to its device.

        Every reader goes through here, and only while `forward` runs.
        """
        return getattr(self, name)

    def _add_codes(self, name: str, rows: int, columns: int) -> None:
        codes = torch.empty(self.experts, rows, columns, dtype=torch.uint8)
        self.register_parameter(name, nn.Parameter(codes, requires_grad=False))

    def forward(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [tokens, width] through experts `indices` [tokens, k] with `weights` [tokens, k]; returns at least fp32."""
        stored = tuple(self.matrix(n) for n in self._names())
        path = expert_paths.path_of(self, x, stored)
        if path == "fused":
            from kconv.modeling import fused_experts

            return fused_experts.run(x, indices, weights, fused_experts.Matrices.of(stored), self.act)
        tokens, k = indices.shape
        order = indices.flatten().argsort(stable=True)
        counts = torch.zeros(self.experts, dtype=torch.long, device=x.device)
        counts.scatter_add_(0, indices.flatten(), torch.ones_like(indices.flatten()))  # bincount waits for the device
        y = self._run(x[order // k], counts, path)
        place = torch.empty_like(order).index_copy(0, order, torch.arange(order.numel(), device=order.device))
        return (widen(y[place]).view(tokens, k, -1) * weights[..., None]).sum(1)

    def _names(self) -> tuple[str, ...]:
        parts = ("_packed", "_scale") if self.packed else ("",)
        return tuple(f"{name}{part}" for name in ("gate_up_proj", "down_proj") for part in parts)

    def _run(self, x: torch.Tensor, counts: torch.Tensor, path: expert_paths.Path) -> torch.Tensor:
        """All experts over rows sorted by expert, `counts` [experts] rows each."""
        if path == "grouped":
            if not self.packed:
                return _grouped(x, counts, *self._matrices(slice(None), x.dtype), self.act)
            return self._run_some_at_once(x, counts)
        parts = [self._run_one(x[a:b], e) for e, a, b in _active(counts)]
        return torch.cat(parts) if parts else x

    def _run_some_at_once(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        active, parts = list(_active(counts)), []
        for i in range(0, len(active), DECODE_AT_ONCE):
            now = active[i : i + DECODE_AT_ONCE]
            chosen = torch.tensor([e for e, _, _ in now], device=x.device)
            rows = x[now[0][1] : now[-1][2]]
            parts.append(_grouped(rows, counts[chosen], *self._matrices(chosen, x.dtype), self.act))
        return torch.cat(parts) if parts else x

    def _matrices(self, chosen: torch.Tensor | slice, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """`gate_up_proj` and `down_proj` of some experts, decoded where they are packed."""
        if not self.packed:
            return self.matrix("gate_up_proj")[chosen], self.matrix("down_proj")[chosen]
        gate_up, down = (
            decode(self.matrix(f"{n}_packed")[chosen], self.matrix(f"{n}_scale")[chosen], dtype, check=False)
            for n in ("gate_up_proj", "down_proj")
        )
        return gate_up, down

    def _run_one(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        gate, up = self._linear(x, "gate_up_proj", expert).chunk(2, dim=-1)
        return self._linear(self.act(gate, up), "down_proj", expert)

    def _linear(self, x: torch.Tensor, name: str, expert: int) -> torch.Tensor:
        if not self.packed:
            return F.linear(x, self.matrix(name)[expert])
        return PackedLinear.apply(x, self.matrix(f"{name}_packed")[expert], self.matrix(f"{name}_scale")[expert])


def _grouped(
    x: torch.Tensor, counts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, act: GatedActivation
) -> torch.Tensor:
    """Experts over rows sorted by expert as two grouped products; `counts` rows for each of the matrices."""
    ends = counts.cumsum(0).to(torch.int32)
    gate, up = torch._grouped_mm(x, gate_up.transpose(-1, -2), offs=ends).chunk(2, dim=-1)
    return torch._grouped_mm(act(gate, up).contiguous(), down.transpose(-1, -2), offs=ends)


def _active(counts: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """Each expert that has rows, with the first and the end of its rows."""
    start = 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            yield expert, start, start + count
        start += count
