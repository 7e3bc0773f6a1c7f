from __future__ import annotations

import threading

import pytest
import torch

from kconv.errors import BadData, EnvironmentLacks, KconvError
from kconv.kernels import backend, e2m1, mxfp4
from kconv.kernels.common import same_bits

CPU = [name for name in ("plain", "numba") if backend.available(name)]


@pytest.fixture(params=CPU)
def implementation(request):
    with backend.force(request.param):
        yield request.param


def codes(rows: int, columns: int, low: int, high: int, group: int = 32, seed: int = 0):
    """Random packed codes and scale bytes in [low, high]."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(low, high + 1, (rows, columns // group), dtype=torch.uint8, generator=generator)
    return packed, scale


def by_definition(packed, scale, dtype):
    """Value by value from the format's definition, in fp64, then in `dtype`."""
    code = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    factor = 2.0 ** (scale.double() - 127)
    group = code.shape[-1] // scale.shape[-1]
    return (torch.tensor(e2m1.E2M1, dtype=torch.float64)[code] * factor.repeat_interleave(group, -1)).to(dtype)


RANGES = {torch.bfloat16: (0, 252), torch.float16: (104, 140), torch.float32: (0, 252), torch.float64: (0, 254)}


@pytest.mark.parametrize("dtype", mxfp4.DTYPES, ids=str)
def test_decode_is_the_definition_for_every_scale_the_dtype_holds(implementation, dtype):
    packed, scale = codes(300, 128, *RANGES[dtype])
    values = mxfp4.decode(packed, scale, dtype)
    assert same_bits(values, by_definition(packed, scale, dtype))


@pytest.mark.parametrize("dtype", mxfp4.DTYPES, ids=str)
def test_encode_with_scale_returns_every_code(implementation, dtype):
    packed, scale = codes(300, 128, *RANGES[dtype], seed=1)
    values = mxfp4.decode(packed, scale, dtype)
    assert torch.equal(mxfp4.encode_with_scale(values, scale), packed)


@pytest.mark.parametrize("group", (2, 16, 32, 64, 96))
def test_every_group_size(implementation, group):
    packed, scale = codes(7, group * 3, 0, 252, group)
    values = mxfp4.decode(packed, scale)
    assert same_bits(values, by_definition(packed, scale, torch.bfloat16))
    assert torch.equal(mxfp4.encode_with_scale(values, scale), packed)


def test_scale_bytes_134_127_and_0_are_exact(implementation):
    # KB-005: 134 is 128.0 and not the NaN marker, 0 is 2^-127.
    packed = torch.full((1, 48), 0x22, dtype=torch.uint8)
    values = mxfp4.decode(packed, torch.tensor([[134, 127, 0]], dtype=torch.uint8))
    assert values[0, ::32].tolist() == [128.0, 1.0, 2.0**-127]


def test_both_zeros_survive(implementation):
    packed = torch.tensor([[0x80] * 16], dtype=torch.uint8)
    scale = torch.tensor([[120]], dtype=torch.uint8)
    values = mxfp4.decode(packed, scale)
    assert torch.signbit(values).tolist() == [[False, True] * 16]
    assert torch.equal(mxfp4.encode_with_scale(values, scale), packed)


@pytest.mark.parametrize("dtype", mxfp4.DTYPES, ids=str)
def test_the_nan_scale_is_refused_with_its_position(implementation, dtype):
    packed, scale = codes(5, 96, 100, 130)
    scale[3, 1] = 255
    with pytest.raises(BadData, match="255 is NaN") as error:
        mxfp4.decode(packed, scale, dtype)
    assert (error.value.operand, error.value.position) == (1, (3, 1))
    with pytest.raises(BadData, match="255 is NaN"):
        mxfp4.encode_with_scale(torch.zeros(5, 96, dtype=dtype), scale)


@pytest.mark.parametrize(
    "dtype, byte, held, lost",
    [
        (torch.bfloat16, 254, 0xB3, 0x40),
        (torch.bfloat16, 253, 0x55, 0x06),
        (torch.float32, 254, 0xB3, 0x04),
        (torch.float16, 141, 0x55, 0x60),
        (torch.float16, 103, 0x22, 0x01),
        (torch.float16, 103, 0x44, 0xB0),
        (torch.float16, 142, 0xB3, 0x04),
        (torch.float16, 20, 0x80, 0x01),
    ],
)
def test_a_product_beyond_the_dtype_is_refused_with_its_position(implementation, dtype, byte, held, lost):
    packed, scale = torch.full((3, 32), 0x11, dtype=torch.uint8), torch.full((3, 2), 127, dtype=torch.uint8)
    scale[2, 1] = byte
    packed[2, 16:] = held
    assert same_bits(mxfp4.decode(packed, scale, dtype), by_definition(packed, scale, dtype))
    packed[2, 20] = lost
    with pytest.raises(BadData, match=f"scale byte {byte}") as error:
        mxfp4.decode(packed, scale, dtype)
    assert (error.value.operand, error.value.position) == (1, (2, 1))
    assert f"column {9 if lost & 0xF0 else 8} of the group" in str(error.value)


@pytest.mark.parametrize("dtype", mxfp4.DTYPES, ids=str)
@pytest.mark.parametrize("value", (0.25, 2.5, 5.0, 8.0, 0.5 + 2**-9, 2.0**-100, float("nan"), float("inf")))
def test_a_value_without_a_code_is_refused_with_its_position(implementation, dtype, value):
    packed, scale = codes(4, 64, 127, 127)
    values = mxfp4.decode(packed, scale, dtype)
    values[2, 37] = value
    if values[2, 37] in e2m1.E2M1:  # rounds to one in a narrow dtype
        return
    with pytest.raises(BadData, match="no MXFP4 code") as error:
        mxfp4.encode_with_scale(values, scale)
    assert (error.value.operand, error.value.position) == (0, (2, 37))


@pytest.mark.parametrize("byte", (0, 1, 2, 3, 127, 252, 253, 254))
def test_a_bf16_has_its_code_or_is_refused(implementation, byte):
    every = torch.arange(65536).to(torch.uint16).view(torch.bfloat16)
    products = e2m1.products()[byte].bfloat16()
    held = products[products.isfinite()]
    scale = torch.full((1,), byte, dtype=torch.uint8)
    for value in held:
        packed = int(mxfp4.encode_with_scale(torch.stack((value, value)), scale))
        assert same_bits(products[packed & 15], value)
        assert packed & 15 == packed >> 4
    other = every[~torch.isin(every.view(torch.int16), held.view(torch.int16))]
    for value in other[byte::131]:
        for pair in ((value, held[1]), (held[1], value)):
            with pytest.raises(BadData):
                mxfp4.encode_with_scale(torch.stack(pair), scale)


def test_the_lent_output_is_used_wherever_it_starts(implementation):
    packed, scale = codes(6, 64, 100, 130)
    expected = mxfp4.decode(packed, scale)
    buffer = torch.zeros(6 * 64 + 3, dtype=torch.bfloat16)
    for start in range(3):
        out = buffer[start : start + 6 * 64].view(6, 64)
        assert mxfp4.decode(packed, scale, torch.bfloat16, out) is out
        assert same_bits(out, expected)
        assert torch.equal(mxfp4.encode_with_scale(out, scale), packed)
    wide = torch.zeros(6, 80, dtype=torch.bfloat16)
    mxfp4.decode(packed, scale, torch.bfloat16, wide[:, 8:72])
    assert same_bits(wide[:, 8:72].contiguous(), expected)
    assert not wide[:, :8].any()
    target = torch.zeros(6, 40, dtype=torch.uint8)
    assert torch.equal(mxfp4.encode_with_scale(wide[:, 8:72], scale, target[:, 4:36]), packed)
    assert torch.equal(target[:, 4:36], packed)


def test_more_axes_and_no_rows(implementation):
    packed, scale = codes(24, 64, 100, 130)
    flat = mxfp4.decode(packed, scale)
    stacked = mxfp4.decode(packed.view(2, 3, 4, 32), scale.view(2, 3, 4, 2))
    assert same_bits(stacked.view(24, 64), flat)
    assert mxfp4.decode(packed[0], scale[0]).shape == (64,)
    empty = mxfp4.decode(packed[:0], scale[:0])
    assert empty.shape == (0, 64)
    assert mxfp4.encode_with_scale(empty, scale[:0]).shape == (0, 32)


def test_larger_than_one_chunk(implementation):
    packed, scale = codes(700, 3584, 100, 130)
    values = mxfp4.decode(packed, scale)
    assert same_bits(values, by_definition(packed, scale, torch.bfloat16))
    assert torch.equal(mxfp4.encode_with_scale(values, scale), packed)


def test_e8m0_scales_are_the_same_bytes(implementation):
    packed, scale = codes(4, 64, 0, 252)
    assert same_bits(mxfp4.decode(packed, scale.view(torch.float8_e8m0fnu)), mxfp4.decode(packed, scale))


def test_flushing_subnormals_does_not_change_a_bit(implementation):
    packed, scale = codes(40, 64, 0, 3)
    expected = by_definition(packed, scale, torch.bfloat16)
    assert torch.set_flush_denormal(True) in (True, False)
    try:
        values = mxfp4.decode(packed, scale)
        assert torch.equal(mxfp4.encode_with_scale(values, scale), packed)
    finally:
        torch.set_flush_denormal(False)
    assert same_bits(values, expected)


def test_encode_keeps_every_value_and_is_canonical():
    packed, scale = codes(200, 128, 10, 240)
    packed[:20] &= 0x33  # groups that have several encodings
    packed[20:30] = 0x80
    values = mxfp4.decode(packed, scale)
    canonical, scales = mxfp4.encode(values)
    assert same_bits(mxfp4.decode(canonical, scales), values)
    top = (canonical.view(200, 4, 16) & 0x77).flatten(2)
    largest = torch.maximum(top & 15, top >> 4).amax(-1)
    assert set(largest[:20].flatten().tolist()) | set(largest[30:].flatten().tolist()) <= {6, 7}
    assert scales[20:30].unique().tolist() == [127]
    again, scales_again = mxfp4.encode(mxfp4.decode(canonical, scales))
    assert torch.equal(again, canonical)
    assert torch.equal(scales_again, scales)


def test_encode_refuses_a_group_that_no_scale_fits():
    values = torch.zeros(2, 64, dtype=torch.bfloat16)
    values[1, 40], values[1, 50] = 1.0, 2.0**-6
    with pytest.raises(BadData, match="no MXFP4 code at the scale") as error:
        mxfp4.encode(values)
    assert error.value.position == (1, 50)


def test_quantize_rounds_to_the_nearest_value_and_ties_to_even():
    grid = torch.tensor(e2m1.E2M1[:8])
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.9])
    assert grid[mxfp4.nearest_code(ties).long()].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    magnitudes = torch.linspace(0, 6, 9001)
    got = grid[mxfp4.nearest_code(magnitudes).long()]
    nearest = (magnitudes[:, None] - grid).abs().min(1).values
    assert torch.equal((magnitudes - got).abs(), nearest)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_quantize_takes_the_scale_of_the_specification(dtype):
    values = torch.randn(50, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    _, scale = mxfp4.quantize(values)
    top = values.double().view(50, 3, 32).abs().amax(-1)
    assert torch.equal(scale.double(), top.log2().floor() - 2 + 127)


@pytest.mark.parametrize("value", (float("nan"), float("inf"), -float("inf")))
def test_quantize_refuses_what_is_not_finite(value):
    values = torch.zeros(2, 32)
    values[1, 5] = value
    with pytest.raises(BadData, match="cannot be quantised") as error:
        mxfp4.quantize(values)
    assert error.value.position == (1, 5)


@pytest.mark.parametrize(
    "packed, scale",
    [((4, 32), (4, 3)), ((4, 32), (3, 2)), ((4, 3), (4, 2))],
)
def test_shapes_that_do_not_belong_together(packed, scale):
    with pytest.raises(KconvError):
        mxfp4.decode(torch.zeros(packed, dtype=torch.uint8), torch.zeros(scale, dtype=torch.uint8))
    with pytest.raises(KconvError, match="fp16, fp32 or fp64"):
        mxfp4.decode(torch.zeros(1, 16, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8), torch.int32)


def test_parameters_are_encoded_like_tensors(implementation):
    packed, scale = codes(4, 64, 100, 130)
    parameter = torch.nn.Parameter(mxfp4.decode(packed, scale))
    assert torch.equal(mxfp4.encode_with_scale(parameter, scale), packed)


def test_threads_share_the_kernels(implementation):
    packed, scale = codes(200, 512, 0, 252)
    expected = mxfp4.decode(packed, scale)
    results: list[bool] = []
    work = lambda: results.extend(same_bits(mxfp4.decode(packed, scale), expected) for _ in range(5))  # noqa: E731
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 20


def test_the_environment_chooses_plain(monkeypatch):
    monkeypatch.setenv("KCONV_FAST", "0")
    assert backend.choice("cpu") == "plain"
    monkeypatch.setenv("KCONV_FAST", "1")
    assert backend.choice("cpu") == ("numba" if backend.available("numba") else "plain")
    assert backend.choice("meta") == "plain"
    with pytest.raises(EnvironmentLacks), backend.force("no-such-package"):
        pass
