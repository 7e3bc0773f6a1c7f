from __future__ import annotations

import pytest
import torch

from kconv.errors import BadData, KconvError
from kconv.kernels.common import same_bits
from kconv.spec import Spec, torch_dtype
from kconv.transforms.base import Grade, SpecError
from kconv.transforms.dtype import Cast
from tests.unit.transform_checks import backward, forward, random_bits, round_trip

WIDENING = [
    ("BF16", "F32"), ("BF16", "F64"), ("F16", "F32"), ("F16", "F64"), ("F32", "F64"), ("I32", "I64"), ("U8", "I32"),
]  # fmt: skip


def finite(spec: Spec) -> torch.Tensor:
    bits = random_bits(spec)
    return torch.where(bits.isfinite(), bits, 0.0) if bits.dtype.is_floating_point else bits


@pytest.mark.parametrize("narrow, wide", WIDENING)
def test_widening_returns_the_bits_and_the_numbers(narrow, wide):
    left = finite(Spec(narrow, (64, 33)))
    (right,) = round_trip(Cast(narrow, wide), [left])
    assert torch.equal(right, left.to(torch_dtype(wide)))
    assert Cast(narrow, wide).grade is Grade.VALUE_EXACT


@pytest.mark.parametrize("narrow, wide", WIDENING)
def test_checked_narrowing_is_the_inverse(narrow, wide):
    left = finite(Spec(narrow, (64, 33))).to(torch_dtype(wide))
    round_trip(Cast(wide, narrow), [left])


def test_bf16_keeps_nan_payloads_through_fp32():
    every = torch.arange(65536).to(torch.uint16).view(torch.bfloat16).view(64, 1024)
    round_trip(Cast("BF16", "F32"), [every])


@pytest.mark.parametrize("value", (1 + 2**-9, 2**-140, 1e39))
def test_checked_narrowing_refuses_what_would_change(value):
    tensor = torch.ones(3, 4, dtype=torch.float64)
    tensor[1, 2] = value
    with pytest.raises(BadData, match="not representable in BF16") as error:
        Cast("F64", "BF16").forward([tensor])
    assert error.value.position == (1, 2)


def test_lossy_narrowing_rounds_to_nearest_even_and_says_so():
    cast = Cast("F32", "BF16", lossy=True)
    assert cast.grade is Grade.LOSSY
    left = torch.randn(100, 7)
    (right,) = forward(cast, [left])
    assert same_bits(right, left.bfloat16())
    assert same_bits(backward(cast, [right])[0], right.float())


def test_lossy_narrowing_refuses_overflow():
    # KB-023: narrowing bf16 scales to fp16 must report an overflow, not clip it.
    with pytest.raises(BadData, match="not representable in F16") as error:
        Cast("BF16", "F16", lossy=True).forward([torch.tensor([1.0, 3e38], dtype=torch.bfloat16)])
    assert error.value.position == (1,)


def test_integers_that_do_not_fit_are_refused():
    with pytest.raises(BadData, match="representable in I32"):
        Cast("I64", "I32").forward([torch.tensor([1, 2**40])])
    with pytest.raises(KconvError):
        Cast("F32", "I32")
    with pytest.raises(KconvError):
        Cast("I64", "I32", lossy=True)


def test_another_dtype_is_named():
    with pytest.raises(SpecError, match=r"the tensor is F16 \[2\], expected BF16"):
        Cast("BF16", "F32").forward_specs((Spec("F16", (2,)),))
