from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kconv.errors import BadData, KconvError
from kconv.kernels.common import same_bits
from kconv.spec import FLOATS, Spec
from kconv.transforms.base import Grade, Seq, SpecError
from kconv.transforms.mxfp4 import Mxfp4
from kconv.transforms.shape import Fuse
from tests.unit.transform_checks import backward, forward, random_bits, round_trip

HELD = {"BF16": (0, 252), "F16": (104, 140), "F32": (0, 252), "F64": (0, 254)}


def stored(shape: tuple[int, ...], group: int = 32, low: int = 0, high: int = 252, seed: int = 0):
    packed = random_bits(Spec("U8", (*shape[:-1], shape[-1] // 2)), seed)
    scale = random_bits(Spec("U8", (*shape[:-1], shape[-1] // group)), seed + 1)
    return [packed, (low + scale.int() % (high - low + 1)).to(torch.uint8)]


@settings(max_examples=25, deadline=None)
@given(
    dtype=st.sampled_from(sorted(FLOATS)), rows=st.integers(0, 5), groups=st.integers(1, 4),
    group=st.sampled_from((2, 16, 32, 64)), axes=st.integers(0, 2), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_stored_bits_come_back_with_the_sidecar(dtype, rows, groups, group, axes, seed):
    shape = ((2, rows)[2 - axes :] if axes else ()) + (groups * group,)
    round_trip(Mxfp4(dtype, group_size=group), stored(shape, group, *HELD[dtype], seed))


@pytest.mark.parametrize("dtype", sorted(FLOATS))
def test_values_come_back_without_the_sidecar(dtype):
    transform = Mxfp4(dtype, sidecar=False)
    assert transform.grade is Grade.VALUE_EXACT
    (values,) = forward(transform, stored((6, 128), 32, 110, 135))
    left = backward(transform, [values])
    (again,) = forward(transform, left)
    assert same_bits(again, values)
    left_again = backward(transform, [again])
    assert all(torch.equal(a, b) for a, b in zip(left, left_again, strict=True))


def test_the_sidecar_grade():
    assert Mxfp4("BF16").grade is Grade.EXACT_WITH_SIDECAR
    assert str(Mxfp4("BF16").grade) == "exact-with-sidecar"


def test_e8m0_scales_keep_their_dtype():
    packed, scale = stored((3, 64))
    transform = Mxfp4("BF16", scale_dtype="F8_E8M0")
    round_trip(transform, [packed, scale.view(torch.float8_e8m0fnu)])


def test_packed_codes_may_be_stored_as_f4_or_i8():
    # KB-032: F4 counts codes, torch counts byte pairs.
    packed, scale = stored((3, 64))
    signed = Mxfp4("BF16", packed_dtype="I8")
    round_trip(signed, [packed.view(torch.int8), scale])
    four = Mxfp4("BF16", packed_dtype="F4")
    specs = (Spec("F4", (3, 64)), Spec("U8", (3, 2)))
    assert four.forward_specs(specs) == (Spec("BF16", (3, 64)), Spec("U8", (3, 2)))
    assert four.backward_specs(four.forward_specs(specs)) == specs
    assert torch.equal(four.backward(four.forward([packed, scale]))[0], packed)
    with pytest.raises(SpecError, match="groups of 32 do not divide"):
        four.forward_specs((Spec("F4", (2, 31)), Spec("U8", (2, 1))))


def test_fused_experts_of_k3_shape_tile_by_rows():
    transform = Mxfp4("BF16")
    left = (Spec("U8", (6144, 1792)), Spec("U8", (6144, 112)))
    right = transform.forward_specs(left)
    assert right == (Spec("BF16", (6144, 3584)), Spec("U8", (6144, 112)))
    assert transform.tiles(left, right) is not None
    assert transform.tiles((Spec("U8", (32,)), Spec("U8", (2,))), ()) is None


def test_fuse_then_decode_is_one_chain():
    gate, up = stored((4, 64), seed=1), stored((4, 64), seed=2)
    chain = Seq((Fuse(0, parts=2),))
    packed = chain.forward([gate[0], up[0]])[0]
    scale = chain.forward([gate[1], up[1]])[0]
    values, _ = Mxfp4("BF16").forward([packed, scale])
    assert same_bits(values[:4], Mxfp4("BF16").forward(gate)[0])
    assert same_bits(values[4:], Mxfp4("BF16").forward(up)[0])


@pytest.mark.parametrize(
    "specs, words",
    [
        ([Spec("U8", (4, 32))], "takes 2 tensors, not 1"),
        ([Spec("I32", (4, 32)), Spec("U8", (4, 2))], "packed is I32 [4, 32], expected U8"),
        ([Spec("U8", (4, 32)), Spec("BF16", (4, 2))], "scale is BF16 [4, 2], expected U8"),
        ([Spec("U8", (4, 32)), Spec("U8", (4, 4))], "expected shape [4, 2]"),
        ([Spec("U8", (4, 32)), Spec("U8", (5, 2))], "expected shape [4, 2]"),
        ([Spec("U8", (4, 31)), Spec("U8", (4, 2))], "groups of 32 do not divide"),
        ([Spec("U8", ()), Spec("U8", ())], "no axis of codes"),
    ],
)
def test_forward_specs_name_what_disagrees(specs, words):
    with pytest.raises(SpecError) as error:
        Mxfp4("BF16").forward_specs(tuple(specs))
    assert words in str(error.value)


@pytest.mark.parametrize(
    "specs, words",
    [
        ([Spec("F32", (4, 64)), Spec("U8", (4, 2))], "values is F32 [4, 64], expected BF16"),
        ([Spec("BF16", (4, 64)), Spec("U8", (4, 4))], "scale is U8 [4, 4], expected U8 [4, 2]"),
        ([Spec("BF16", (4, 60)), Spec("U8", (4, 2))], "groups of 32 do not divide"),
        ([Spec("BF16", (4, 64))], "takes 2 tensors"),
    ],
)
def test_backward_specs_name_what_disagrees(specs, words):
    with pytest.raises(SpecError) as error:
        Mxfp4("BF16").backward_specs(tuple(specs))
    assert words in str(error.value)


def test_changed_weights_are_refused_on_the_way_back():
    transform = Mxfp4("BF16")
    right = transform.forward(stored((4, 64), 32, 127, 127))
    right[0][1, 3] = 0.3
    with pytest.raises(BadData, match="has no MXFP4 code") as error:
        transform.backward(right)
    assert error.value.position == (1, 3)


@pytest.mark.parametrize("wrong", [{"dtype": "U8"}, {"group_size": 3}, {"scale_dtype": "F32"}])
def test_forms_that_do_not_exist(wrong):
    with pytest.raises(KconvError, match="no such form"):
        Mxfp4(**wrong)
