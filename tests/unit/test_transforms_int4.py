from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kconv.errors import BadData, KconvError
from kconv.kernels.common import same_bits
from kconv.spec import Spec, torch_dtype
from kconv.transforms.base import Grade, SpecError
from kconv.transforms.int4 import Int4
from tests.unit.transform_checks import backward, forward, random_bits, round_trip


def stored(rows, columns, groups, *, scale="BF16", zero=False, shape="I64", seed=0):
    packed = random_bits(Spec("I32", (rows, -(-columns // 8))), seed)
    if columns % 8:
        packed[:, -1] &= (1 << 4 * (columns % 8)) - 1
    left = [packed, ((random_bits(Spec("U8", (rows, groups)), seed + 1).float() + 3) / 999).to(torch_dtype(scale))]
    if zero:
        left.append(random_bits(Spec("I32", (-(-rows // 8), groups)), seed + 2))
    if shape:
        left.append(torch.tensor([rows, columns], dtype=torch_dtype(shape)))
    return left


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 20), groups=st.integers(1, 4), group=st.sampled_from((32, 128)),
    dtype=st.sampled_from(("BF16", "F16", "F32")), scale=st.sampled_from(("BF16", "F16", "F32")), zero=st.booleans(),
    shape=st.sampled_from(("I64", "I32", "")), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_stored_bits_come_back(rows, groups, group, dtype, scale, zero, shape, seed):
    left = stored(rows, groups * group, groups, scale=scale, zero=zero, shape=shape, seed=seed)
    transform = Int4(dtype, group_size=group, symmetric=not zero, scale_dtype=scale, shape_dtype=shape)
    assert transform.grade is Grade.EXACT_WITH_SIDECAR
    round_trip(transform, left)


@pytest.mark.parametrize("columns", (36, 33, 64))
def test_one_group_a_row_with_any_number_of_columns(columns):
    round_trip(Int4("BF16", columns=columns, group_size=0), stored(6, columns, 1))


def test_without_the_sidecar_values_of_full_groups_come_back():
    transform = Int4("BF16", sidecar=False)
    assert transform.grade is Grade.LOSSY
    left = stored(6, 64, 2)
    left[0][:, ::4] = -1  # a code 15 in every group
    (values,) = forward(transform, left)
    (again,) = transform.forward(backward(transform, [values]))
    assert same_bits(again, values)


def test_weight_shape_that_disagrees_is_refused():
    left = stored(6, 64, 2)
    left[2][1] = 60
    with pytest.raises(BadData, match=r"weight_shape says \[6, 60\], the packed words hold \[6, 64\]") as error:
        Int4("BF16").forward(left)
    assert error.value.operand == 2


@pytest.mark.parametrize(
    "specs, words",
    [
        ((Spec("I32", (8, 16)), Spec("BF16", (8, 4))), "takes 3 tensors, not 2"),
        ((Spec("U8", (8, 64)), Spec("U8", (8, 4)), Spec("I64", (2,))), "the packed is U8 [8, 64], expected I32"),
        ((Spec("I32", (8, 16)), Spec("F16", (8, 4)), Spec("I64", (2,))), "the scale is F16 [8, 4], expected BF16"),
        ((Spec("I32", (8, 16)), Spec("BF16", (8, 1)), Spec("I64", (2,))), "the scale is BF16 [8, 1], expected BF16 [8, 4]"),
        ((Spec("I32", (8, 15)), Spec("BF16", (8, 4)), Spec("I64", (2,))), "do not divide into groups of 32"),
        ((Spec("I32", (8, 16)), Spec("BF16", (8, 4)), Spec("I32", (2,))), "the shape is I32 [2], expected I64 [2]"),
    ],
)
def test_forward_specs_name_what_disagrees(specs, words):
    # KB-026: a packed tensor of another format is refused by its dtype.
    with pytest.raises(SpecError) as error:
        Int4("BF16").forward_specs(specs)
    assert words in str(error.value)


def test_asymmetric_needs_its_zero_points():
    with pytest.raises(SpecError, match="takes 4 tensors"):
        Int4("BF16", symmetric=False).forward_specs((Spec("I32", (8, 16)), Spec("BF16", (8, 4)), Spec("I64", (2,))))
    with pytest.raises(KconvError, match="zero points beside"):
        Int4("BF16", symmetric=False, sidecar=False)
    with pytest.raises(KconvError, match="no such form"):
        Int4("BF16", scale_dtype="U8")
