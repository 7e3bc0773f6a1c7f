from __future__ import annotations

import pytest
import torch

from kconv.errors import BadData, KconvError
from kconv.spec import Spec
from kconv.transforms.base import Grade, Par, Same, Seq, SpecError
from kconv.transforms.shape import Fuse, Reshape, Transpose, TrimZeros
from tests.unit.transform_checks import assert_same, random_bits, round_trip

DTYPES = ("U8", "F8_E4M3", "BF16", "F32", "I64")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", (0, 1, 2))
@pytest.mark.parametrize("sizes", ((2, 2), (1, 3, 4), (0, 5)))
def test_fuse_returns_the_bits(dtype, axis, sizes):
    shapes = [[3, 4, 6] for _ in sizes]
    for shape, size in zip(shapes, sizes, strict=True):
        shape[axis] = size
    left = [random_bits(Spec(dtype, tuple(shape)), seed) for seed, shape in enumerate(shapes)]
    (fused,) = round_trip(Fuse(axis, sizes), left)
    assert torch.equal(fused.view(torch.uint8), torch.cat([t.view(torch.uint8) for t in left], axis))


def test_fuse_of_equal_parts():
    left = [random_bits(Spec("BF16", (4, 6)), seed) for seed in range(3)]
    round_trip(Fuse(0, parts=3), left)
    round_trip(Fuse(1, parts=3), left)


def test_fuse_of_adjacent_inputs_is_a_view():
    buffer = random_bits(Spec("BF16", (10, 8)))
    parts = buffer[2:5], buffer[5:9]
    (fused,) = Fuse(0, (3, 4)).forward(parts)
    assert fused.data_ptr() == buffer[2].data_ptr()
    assert_same([fused], [buffer[2:9]])


def test_fuse_of_separate_inputs_copies_into_the_lent_storage():
    left = [random_bits(Spec("BF16", (3, 8)), seed) for seed in range(2)]
    lent = torch.empty(6, 8, dtype=torch.bfloat16)
    (fused,) = Fuse(0, parts=2).forward(left, [lent])
    assert fused.data_ptr() == lent.data_ptr()


def test_fuse_of_swapped_neighbours_keeps_their_order():
    buffer = random_bits(Spec("U8", (6, 4)))
    (fused,) = Fuse(0, parts=2).forward([buffer[3:], buffer[:3]])
    assert_same([fused], [torch.cat([buffer[3:], buffer[:3]])])


@pytest.mark.parametrize(
    "specs, words",
    [
        ((Spec("BF16", (3, 4)),), "takes 2 tensors, not 1"),
        ((Spec("BF16", (3, 4)), Spec("F32", (3, 4))), "F32 [3, 4], expected BF16 [3, 4]"),
        ((Spec("BF16", (3, 4)), Spec("BF16", (3, 5))), "BF16 [3, 5], expected BF16 [3, 4]"),
    ],
)
def test_fuse_names_what_disagrees(specs, words):
    with pytest.raises(SpecError) as error:
        Fuse(0, parts=2).forward_specs(specs)
    assert words in str(error.value)


def test_fuse_refuses_a_split_that_does_not_add_up():
    with pytest.raises(SpecError, match="does not split along axis 0 into sizes"):
        Fuse(0, (3, 4)).backward_specs((Spec("U8", (8, 2)),))
    with pytest.raises(SpecError, match="into 3 equal parts"):
        Fuse(0, parts=3).backward_specs((Spec("U8", (8, 2)),))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axes", ((1, 0, 2), (0, 2, 1), (2, 0, 1)))
def test_transpose_returns_the_bits(dtype, axes):
    (moved,) = round_trip(Transpose(axes), [random_bits(Spec(dtype, (3, 4, 5)))])
    assert moved.is_contiguous()


def test_transpose_refuses_another_number_of_axes():
    with pytest.raises(SpecError, match="3 axes"):
        Transpose((0, 2, 1)).forward_specs((Spec("U8", (2, 2)),))
    with pytest.raises(KconvError):
        Transpose((0, 0))


def test_reshape_of_the_kimi_linear_a_log():
    (flat,) = round_trip(Reshape((1, 1, 32, 1), (32,)), [random_bits(Spec("F32", (1, 1, 32, 1)))])
    assert flat.shape == (32,)
    with pytest.raises(SpecError, match=r"expected shape \[1, 1, 32, 1\]"):
        Reshape((1, 1, 32, 1), (32,)).forward_specs((Spec("F32", (32, 1)),))
    with pytest.raises(KconvError, match="different numbers"):
        Reshape((4,), (5,))


@pytest.mark.parametrize("axis", (0, 1))
@pytest.mark.parametrize("size", (96, 128))
def test_trim_zeros_drops_the_padding_and_puts_it_back(axis, size):
    shape = [3, 3]
    shape[axis] = size
    wide = [3, 3]
    wide[axis] = 128
    padded = torch.zeros(wide)
    padded.narrow(axis, 0, size).copy_(random_bits(Spec("F32", tuple(shape))))
    (trimmed,) = round_trip(TrimZeros(size, 128, axis), [padded])
    assert trimmed.shape == torch.Size(shape)


@pytest.mark.parametrize("value", (1e-45, -0.0, float("nan"), 3.0))
def test_trim_zeros_refuses_a_tail_that_is_not_plus_zero(value):
    padded = torch.zeros(128)
    padded[100] = value
    with pytest.raises(BadData, match="after 96 of 128") as error:
        TrimZeros(96, 128).forward([padded])
    assert error.value.operand == 0
    assert error.value.position == (100,)


def test_trim_zeros_refuses_another_length():
    with pytest.raises(SpecError, match="128 entries"):
        TrimZeros(96, 128).forward_specs((Spec("F32", (96,)),))


def test_steps_compose_and_have_the_worst_grade():
    chain = Seq((Fuse(0, parts=2), Transpose((1, 0))))
    left = [random_bits(Spec("BF16", (3, 4)), seed) for seed in range(2)]
    round_trip(chain, left)
    both = Par((chain, Same()), (2, 1), (1, 1))
    round_trip(both, [*left, random_bits(Spec("U8", (5,)))])
    assert both.grade is Grade.EXACT


def test_a_chain_of_tileable_steps_streams():
    chain = Seq((Transpose((0, 2, 1)), Fuse(1, parts=1)))
    round_trip(chain, [random_bits(Spec("BF16", (5, 3, 4)))])
    spec = (Spec("BF16", (5, 3, 4)),)
    assert chain.tiles(spec, chain.forward_specs(spec)) is not None
