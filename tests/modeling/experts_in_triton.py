"""Holds the fused experts against float64: on a GPU, or on the CPU in Triton's interpreter (TRITON_INTERPRET=1).

    PYTHONPATH=. python tests/modeling/experts_in_triton.py

Prints the relative errors as JSON, and how many of the products of all codes with the scale bytes 66 to 192 are not exact.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from kconv.kernels.mxfp4 import decode
from kconv.modeling import fused_experts as fused
from kconv.modeling.situ import GatedActivation

DEVICE = "cpu" if not fused.on_gpu() else "cuda"
EXPERTS, WIDTH, INTER, TOP_K = 6, 128, 256, 2
ACTIVATIONS = (GatedActivation("situ", 4.0, 25.0), GatedActivation("situ", 1.5, None), GatedActivation("silu"))


def matrices(scales: tuple[int, int] = (116, 121)) -> tuple[fused.Matrices, fused.Matrices, list[torch.Tensor]]:
    """Random packed experts, the same decoded to bf16, and to float64."""
    stored, exact = [], []
    for rows, columns in ((2 * INTER, WIDTH), (WIDTH, INTER)):
        codes = torch.randint(0, 256, (EXPERTS, rows, columns // 2), dtype=torch.uint8, device=DEVICE)
        scale = torch.randint(*scales, (EXPERTS, rows, columns // 32), dtype=torch.uint8, device=DEVICE)
        stored += [codes, scale]
        exact.append(decode(codes, scale, torch.float64))
    return fused.Matrices.of(tuple(stored)), fused.Matrices(*(m.bfloat16() for m in exact)), exact


def by_definition(
    x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, exact: list[torch.Tensor], act: Any
) -> torch.Tensor:
    """The weighted sum of experts, pair by pair, in float64."""
    h = torch.einsum("td,tkod->tko", x, exact[0][indices])
    y = torch.einsum("tki,tkoi->tko", act(h[..., :INTER], h[..., INTER:]), exact[1][indices])
    return (y * weights[..., None]).sum(1)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(tokens, WIDTH, device=DEVICE).bfloat16()
    indices = torch.rand(tokens, EXPERTS, device=DEVICE).topk(TOP_K).indices
    return x, indices, torch.rand(tokens, TOP_K, device=DEVICE)


def forward_errors(tokens: int, act: GatedActivation, sizes: tuple[int, ...]) -> dict[str, float]:
    """Pairs without a sort, and sizes of tiles; packed and plain."""
    packed, plain, exact = matrices()
    x, indices, weights = inputs(tokens)
    wanted = by_definition(x.double(), indices, weights.double(), exact, act)
    found = {}
    for name, m in (("packed", packed), ("plain", plain)):
        found[f"{name} unsorted"] = distance(fused.forward(x, indices, weights, m, act)[0], wanted)
        for size in sizes:
            order = fused.order_of(indices, EXPERTS, size)
            found[f"{name} {size}"] = distance(fused.through(x, order, weights, m, act)[0], wanted)
    return found


def gradient_errors(tokens: int, act: GatedActivation) -> dict[str, float]:
    """Gradients of the input and of the weights, of two backward passes over one forward pass."""
    packed, _, exact = matrices()
    x, indices, weights = inputs(tokens)
    ours = [x.requires_grad_(), weights.requires_grad_()]
    wide = [t.detach().double().requires_grad_() for t in ours]
    y = fused.run(x, indices, weights, packed, act)
    wanted = by_definition(wide[0], indices, wide[1], exact, act)
    direction = torch.randn_like(wanted)
    first = torch.autograd.grad((y.double() * direction).sum(), ours, retain_graph=True)
    again = torch.autograd.grad((y.double() * direction).sum(), ours)
    right = torch.autograd.grad((wanted * direction).sum(), wide)
    found = {f"gradient {n}": distance(a, b) for n, a, b in zip(("x", "weights"), first, right, strict=True)}
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    return found


def inexact_products() -> int:
    """Matrix rows with all 256 bytes at scale bytes 66 to 192, read out by unit vectors."""
    rows, columns = 512, 128
    row = torch.arange(rows, device=DEVICE)
    codes = (64 * (row % 4)[:, None] + torch.arange(64, device=DEVICE)).to(torch.uint8)[None].contiguous()
    scale = (66 + row // 4).clamp_max(192).to(torch.uint8)[None, :, None].expand(1, rows, 4).contiguous()
    units = fused.quarters(torch.eye(columns, device=DEVICE).bfloat16()).contiguous()
    order = fused.order_of(torch.zeros(columns, 1, dtype=torch.long, device=DEVICE), 1, 16)
    out = units.new_empty(columns, rows)
    assert order.places is not None
    places = order.places.long()
    sorted_units = torch.empty_like(units).index_copy_(0, places, units)
    fused.product(sorted_units, codes.view(torch.int16), scale.view(torch.int32), out, order, 1)
    return int((decode(codes, scale, torch.bfloat16)[0] != out[places].T).sum())


def main() -> None:
    torch.manual_seed(0)
    errors: dict[str, float] = {}
    for act, tokens, sizes in zip(ACTIVATIONS, (20, 3, 9), (tuple(fused.PACKED_LAUNCH), (16,), (16,)), strict=True):
        for name, error in (forward_errors(tokens, act, sizes) | gradient_errors(tokens, act)).items():
            errors[name] = max(errors.get(name, 0.0), error)
    print(json.dumps({"inexact products": inexact_products(), **errors}))


if __name__ == "__main__":
    main()
