"""Number formats as pure functions on tensors: no I/O, no names, no state but lookup tables.

| module | formats | decode | encode |
|---|---|---|---|
| `mxfp4` | E2M1 codes, E8M0 scale per 32 | `decode` | `encode_with_scale` (exact), `encode`, `quantize` (lossy) |
| `fp8` | four 8-bit floats, scales per tensor, channel, block (MXFP8: 1 x 32) | `decode` | `encode_with_scale`, `quantize` |
| `nvfp4` | E2M1 codes, F8_E4M3 scale per 16, global scale | `decode` | `encode_with_scale`, `quantize` |
| `int4` | eight codes in an I32, scale per group, zero points | `decode` | `encode_with_scale`, `quantize` |
| `scaled`, `codes`, `geometry` | what the last three share | | |
| `measure` | the error of a lossy step | | |

Every function has one result, whatever computes it: plain torch by table anywhere, numba on the CPU, Triton on CUDA.
`backend.force` chooses by hand, `KCONV_FAST=0` in the environment leaves plain torch alone. `mxfp4_loops` (numba) and
`mxfp4_arrays` (numpy) decode MXFP4 on bytes, for conversions, which then need no torch.
"""
