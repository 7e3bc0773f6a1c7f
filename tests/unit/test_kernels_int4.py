from __future__ import annotations

import pytest
import torch

from kconv.errors import BadData, KconvError
from kconv.kernels import backend, int4
from kconv.kernels.common import same_bits

CPU = [name for name in ("plain", "numba") if backend.available(name)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(params=CPU)
def implementation(request):
    with backend.force(request.param):
        yield request.param


def words(rows, columns, seed=0):
    """Random words, their surplus nibbles 0, and the codes in them by bit arithmetic."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns), generator=generator)
    padded = torch.nn.functional.pad(codes, (0, -columns % 8)).view(rows, -1, 8)
    word = (padded << (4 * torch.arange(8))).sum(-1)
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32), codes


def some_scale(shape, dtype=torch.bfloat16, seed=1):
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 0.02 + 0.001).to(dtype)


@pytest.mark.parametrize("scale_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns, groups", [(64, 2), (128, 1), (96, 3), (36, 1), (33, 1)])
def test_decode_and_encode_follow_the_definition(implementation, scale_dtype, dtype, columns, groups):
    packed, codes = words(24, columns)
    scale = some_scale((24, groups), scale_dtype)
    values = int4.decode(packed, scale, columns, dtype, reversible=True)
    wide = scale.float().repeat_interleave(columns // groups, 1)
    assert same_bits(values, ((codes - 8).float() * wide).to(dtype))
    assert torch.equal(int4.encode_with_scale(values, scale), packed)


def test_eight_values_lie_in_a_word_from_the_lowest_bits_up(implementation):
    # KB-023
    codes = torch.arange(16).repeat(2)
    word = (codes.view(4, 8) << (4 * torch.arange(8))).sum(-1)
    packed = torch.where(word >= 2**31, word - 2**32, word).to(torch.int32).view(1, 4)
    for scale in (3e37, 1e-38):
        stored = torch.tensor([[scale]], dtype=torch.bfloat16)
        for dtype in (torch.bfloat16, torch.float32):
            values = int4.decode(packed, stored, 32, dtype)
            assert same_bits(values[0], (torch.arange(-8, 8).repeat(2).float() * stored.float()).to(dtype)[0])


def test_a_scale_beyond_fp16_is_reported_and_not_clipped(implementation):
    # KB-023
    packed, _ = words(2, 32)
    with pytest.raises(BadData, match="beyond 65504"):
        int4.decode(packed, torch.full((2, 1), 3e37, dtype=torch.bfloat16), 32, torch.float16)
    with pytest.raises(BadData, match="cannot be told"):
        int4.decode(packed, torch.full((2, 1), 1e-30, dtype=torch.bfloat16), 32, torch.float16, reversible=True)


@pytest.mark.parametrize("rows", (24, 21))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_points_are_packed_along_the_rows(implementation, rows, dtype):
    packed, codes = words(rows, 64)
    zero_words, zero_codes = words(2, rows, seed=5)
    scale = some_scale((rows, 2))
    zero = zero_words.t().contiguous()
    values = int4.decode(packed, scale, 64, dtype, zero=zero, reversible=True)
    difference = codes - zero_codes.t().repeat_interleave(32, 1)
    assert same_bits(values, (difference.float() * scale.float().repeat_interleave(32, 1)).to(dtype))
    assert torch.equal(int4.encode_with_scale(values, scale, zero=zero), packed)


def test_surplus_nibbles_must_be_zero_to_come_back(implementation):
    packed, _ = words(5, 36)
    packed[3, 4] |= 1 << 28
    int4.decode(packed, some_scale((5, 1)), 36)
    with pytest.raises(BadData, match="nibbles after column 36") as error:
        int4.decode(packed, some_scale((5, 1)), 36, reversible=True)
    assert (error.value.operand, error.value.position) == (0, (3, 4))


def test_a_value_without_a_code_is_refused(implementation):
    packed, _ = words(5, 64)
    scale = some_scale((5, 2))
    values = int4.decode(packed, scale, 64)
    values[4, 40] = 9 * scale[4, 1]
    with pytest.raises(BadData, match="has no INT4 code") as error:
        int4.encode_with_scale(values, scale)
    assert error.value.position == (4, 40)


def test_quantize_is_lossless_where_a_scale_allows_it():
    packed, codes = words(40, 64)
    scale = some_scale((40, 2))
    values = int4.decode(packed, scale, 64)
    again, new_scale = int4.quantize(values, 32, torch.bfloat16)
    reached = (codes.view(40, 2, 32) - 8).abs().amax(-1)
    exact = (int4.decode(again, new_scale, 64) == values).view(40, 2, 32).all(-1)
    assert exact[reached >= 7].all()
    random = torch.randn(8, 64)
    again, new_scale = int4.quantize(random, 0, torch.float32)
    assert (int4.decode(again, new_scale, 64, torch.float32) - random).abs().max() <= new_scale.max() / 2 * 1.0001


def test_shapes_that_do_not_fit_are_named():
    packed, _ = words(8, 64)
    with pytest.raises(KconvError, match=r"is not I32 \[O, 9\]"):
        int4.decode(packed, some_scale((8, 2)), 70)
    with pytest.raises(KconvError, match="into groups"):
        int4.decode(packed, some_scale((8, 3)), 64)
    with pytest.raises(KconvError, match="zero points"):
        int4.decode(packed, some_scale((8, 2)), 64, zero=packed)
