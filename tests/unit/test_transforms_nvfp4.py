from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kconv.errors import BadData
from kconv.kernels.common import same_bits
from kconv.spec import Spec
from kconv.transforms.base import Grade, SpecError
from kconv.transforms.nvfp4 import Nvfp4
from tests.unit.transform_checks import backward, forward, random_bits, round_trip


def stored(shape, whole_shape, divides, seed=0):
    packed = random_bits(Spec("U8", (*shape[:-1], shape[-1] // 2)), seed)
    byte = random_bits(Spec("U8", (*shape[:-1], shape[-1] // 16)), seed + 1)
    scale = (1 + byte % 126).to(torch.uint8).view(torch.float8_e4m3fn)
    return [packed, scale, torch.full(whole_shape, 1777.7 if divides else 2.3e-3)]


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 20), groups=st.integers(1, 6), dtype=st.sampled_from(("BF16", "F32")), divides=st.booleans(),
    whole=st.sampled_from(((), (1,))), experts=st.sampled_from((0, 2)), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_stored_bits_come_back(rows, groups, dtype, divides, whole, experts, seed):
    shape = (experts, rows, groups * 16) if experts else (rows, groups * 16)
    transform = Nvfp4(dtype, divides=divides, global_shape=whole)
    assert transform.grade is Grade.EXACT_WITH_SIDECAR
    round_trip(transform, stored(shape, whole, divides, seed))


def test_without_the_sidecar_the_way_back_is_lossy_but_keeps_what_it_can():
    transform = Nvfp4("BF16", sidecar=False)
    assert transform.grade is Grade.LOSSY
    left = stored((4, 64), (1,), True)
    left[1] = torch.full((4, 4), 2.0).to(torch.float8_e4m3fn)
    left[2] = torch.tensor([64.0])
    (values,) = forward(transform, left)
    (again,) = transform.forward(backward(transform, [values]))
    assert same_bits(again, values)


def test_a_zero_scale_over_codes_is_refused_with_a_way_out():
    left = stored((4, 64), (1,), True)
    left[1].view(torch.uint8)[2, 1] = 0
    with pytest.raises(BadData, match="without sidecar"):
        Nvfp4("BF16").forward(left)
    assert Nvfp4("BF16", sidecar=False).forward(left)[0].shape == (4, 64)


@pytest.mark.parametrize(
    "specs, words",
    [
        ((Spec("U8", (8, 32)), Spec("F8_E4M3", (8, 4))), "takes 3 tensors, not 2"),
        ((Spec("I32", (8, 32)), Spec("F8_E4M3", (8, 4)), Spec("F32", (1,))), "packed is I32 [8, 32], expected U8"),
        ((Spec("U8", (8, 32)), Spec("U8", (8, 2)), Spec("F32", (1,))), "the scale is U8 [8, 2], expected F8_E4M3 [8, 4]"),
        ((Spec("U8", (8, 32)), Spec("F8_E4M3", (8, 4)), Spec("F32", ())), "the global scale is F32 [], expected F32 [1]"),
        ((Spec("U8", (8, 30)), Spec("F8_E4M3", (8, 4)), Spec("F32", (1,))), "groups of 16 do not divide"),
    ],
)
def test_forward_specs_name_what_disagrees(specs, words):
    with pytest.raises(SpecError) as error:
        Nvfp4("BF16").forward_specs(specs)
    assert words in str(error.value)
