"""Holds `fla_kernels` against `kda_ops` on the CPU, where fla's kernels run in Triton's interpreter (TRITON_INTERPRET=1).

Only the recurrent kernel and the convolution do; the chunk kernels need a GPU (tests/bench/k3_gpu.py). Prints the largest
error of each as JSON.
"""

from __future__ import annotations

import json

import torch

from kconv.modeling import fla_kernels, kda_ops
from kconv.modeling.segments import from_mask
from kconv.modeling.short_conv import ShortConvolution

HEADS, DIM, LENGTH = 2, 16, 11


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.double() - b.double()).abs().max().item()


def main() -> None:
    import triton.runtime.autotuner as autotuner

    # The autotuner asks for a GPU driver even to choose among configs that all give the same numbers.
    autotuner.Autotuner.run = lambda self, *a, **k: self.fn.run(*a, **{**self.configs[0].all_kwargs(), **k})
    torch.manual_seed(0)
    q, k, v, z = (torch.randn(1, 2 * LENGTH, HEADS, DIM) for _ in range(4))
    raw = kda_ops.Delta(q, k, v, z, torch.randn(1, 2 * LENGTH, HEADS))
    state, mask = torch.randn(2, HEADS, DIM, DIM), torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, 7:] = 2
    segments = from_mask(mask)
    assert segments is not None
    found = {}
    for bound in (-5.0, None):
        gate = kda_ops.Gate(torch.rand(HEADS), torch.randn(HEADS * DIM), bound)
        x = raw._replace(g=gate.log_decay(z), beta=raw.beta.sigmoid())
        states = torch.randn(3, HEADS, DIM, DIM)
        theirs = fla_kernels.delta_attention(raw, gate, states, segments.cu_seqlens, chunk=False, keep=True)
        ours = kda_ops.delta_attention(x, states, segments.bounds)
        found[f"recurrent, bound {bound}"] = max(error(a, b) for a, b in zip(theirs, ours, strict=True) if a is not None)
    del state
    conv = ShortConvolution(HEADS * DIM, 4)
    torch.nn.init.normal_(conv.weight)
    x_conv, before = torch.randn(2, LENGTH, HEADS * DIM), torch.randn(2, 3, HEADS * DIM)
    for name, given in (("without state", None), ("with state", before)):
        found[f"convolution {name}"] = error(conv(x_conv, None, given, use_fla=True), conv(x_conv, None, given, use_fla=False))
    flat = x_conv.reshape(1, 2 * LENGTH, -1)
    found["convolution of sequences"] = error(conv(flat, segments, None, use_fla=True), conv(flat, segments, None, use_fla=False))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
