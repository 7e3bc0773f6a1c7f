"""Number formats as pure functions on tensors: no I/O, no names, no state but lookup tables.

| module | formats | decode | encode |
|---|---|---|---|
| `mxfp4` | E2M1 codes, E8M0 scale per 32 | `decode` | `encode_with_scale` (exact), `encode`, `quantize` (lossy) |

Every function has one result, whatever computes it: plain torch by table anywhere, numba on the CPU, Triton on CUDA.
`backend.force` chooses by hand, `KCONV_FAST=0` in the environment leaves plain torch alone.
"""
