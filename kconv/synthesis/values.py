"""Random weights of sensible sizes: finite logits of order 1, every tensor set, every tensor its own stream.

| name ends with | mean | standard deviation |
|---|---|---|
| a norm, or any vector | 1 | 0.2 |
| `dt_bias`; `e_score_correction_bias`; `conv1d.weight` | 0; 4; 0 | 0.5; 0.1; 0.4 |
| attention-residual projections | 0 | 0.3 |
| embedding | 0 | 1 |
| any other matrix | 0 | 1 / sqrt(columns) |
| `A_log` | log of a uniform number between 1 and 16 |

`calm` sets weights as a trained model's are (small sublayer outputs, clear routing margins, even residual mixing), so
that rounding is not amplified from layer to layer.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch

from kconv.spec import Spec, torch_dtype
from kconv.synthesis.shapes import GROUP

E8M0_BIAS = 127
CODE_DEVIATION = 2.6  # of E2M1 values under random codes and a scale that is one of three neighbours
INT4_DEVIATION = 4.6  # of values -8..7, all alike
FP8_DEVIATION, FP8_MOST = 100.0, 448.0
BOTH_ZEROS = 0x80  # low nibble +0, high nibble -0
SMALL_CODES = 0xBB  # clears the largest bit of both magnitudes: values up to 1.5, so the scale is not the only one possible


@dataclass(frozen=True)
class Law:
    """How a tensor whose name ends with `ending` is drawn; deviation None is one over the root of its columns."""

    ending: str
    mean: float
    deviation: float | None
    calm: float = 1.0


LAWS: tuple[Law, ...] = (
    Law("dt_bias", 0.0, 0.5),
    Law("e_score_correction_bias", 4.0, 0.1),
    Law("conv1d.weight", 0.0, 0.4),
    Law("k_norm.bias", 0.0, 0.1),
    Law("res_proj.weight", 0.0, 0.3, calm=0.2),
    Law("embed_tokens.weight", 0.0, 1.0),
    Law("routed_expert_down_proj.weight", 0.0, None),
    Law("down_proj.weight", 0.0, None, calm=0.25),
    Law("o_proj.weight", 0.0, None, calm=0.25),
    Law("routed_expert_up_proj.weight", 0.0, None, calm=0.25),
    Law(".w2", 0.0, None, calm=0.25),
    Law("mlp.gate.weight", 0.0, None, calm=4.0),
)
VECTOR, MATRIX = Law("", 1.0, 0.2), Law("", 0.0, None)


def generator(seed: int, key: str) -> torch.Generator:
    """The random stream of one tensor."""
    digest = hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def weights(key: str, spec: Spec, seed: int, *, calm: bool = False) -> torch.Tensor:
    """A plain tensor of `spec`, drawn by the law of its name."""
    law = next((law for law in LAWS if key.endswith(law.ending)), VECTOR if len(spec.shape) == 1 else MATRIX)
    deviation = law.deviation if law.deviation is not None else spec.shape[-1] ** -0.5
    drawn = torch.randn(spec.shape, generator=generator(seed, key)) * deviation + law.mean
    return (drawn * law.calm if calm else drawn).to(torch_dtype(spec.dtype))


def decay_logs(key: str, spec: Spec, heads: int, seed: int) -> torch.Tensor:
    """`A_log`: one value a head, then exact zeros up to the stored size."""
    values = torch.empty(heads).uniform_(1, 16, generator=generator(seed, key)).log()
    flat = torch.zeros(spec.numel)
    flat[:heads] = values
    return flat.reshape(spec.shape).to(torch_dtype(spec.dtype))


def mxfp4_codes(key: str, spec: Spec, seed: int) -> torch.Tensor:
    """Packed E2M1 codes [rows, columns/2]: random, with a group of zeros of both signs and one of small codes for certain."""
    packed = torch.randint(0, 256, spec.shape, dtype=torch.uint8, generator=generator(seed, key + "_packed"))
    packed[0, : GROUP // 2] = BOTH_ZEROS
    packed[-1, -GROUP // 2 :] &= SMALL_CODES
    return packed


def mxfp4_scales(key: str, spec: Spec, seed: int) -> torch.Tensor:
    """E8M0 scales [rows, columns/32] that give decoded values a deviation near one over the root of the columns."""
    columns = spec.shape[-1] * GROUP
    middle = E8M0_BIAS + round(math.log2(columns**-0.5 / CODE_DEVIATION))
    return torch.randint(middle - 1, middle + 2, spec.shape, dtype=torch.uint8, generator=generator(seed, key + "_scale"))


def int4_words(key: str, spec: Spec, seed: int) -> torch.Tensor:
    """Words of eight random codes [rows, columns/8]."""
    return torch.randint(-(2**31), 2**31, spec.shape, generator=generator(seed, key)).to(torch.int32)


def fp8_codes(key: str, spec: Spec, seed: int) -> torch.Tensor:
    """Codes of normally distributed values that reach the format's ends, both zeros among them."""
    drawn = torch.randn(spec.shape, generator=generator(seed, key)) * FP8_DEVIATION
    drawn[..., :2] = torch.tensor([0.0, -0.0])[: spec.shape[-1]]
    return drawn.clamp(-FP8_MOST, FP8_MOST).to(torch_dtype(spec.dtype))


def scales(key: str, spec: Spec, seed: int, columns: int, deviation: float) -> torch.Tensor:
    """Scales within a factor of two, that give values of codes of `deviation` one over the root of the columns."""
    drawn = torch.rand(spec.shape, generator=generator(seed, key)) * 0.7 + 0.7
    return (drawn * columns**-0.5 / deviation).to(torch_dtype(spec.dtype))
