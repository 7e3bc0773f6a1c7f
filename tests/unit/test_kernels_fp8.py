from __future__ import annotations

import pytest
import torch

from kconv.errors import BadData, KconvError
from kconv.kernels import backend, fp8
from kconv.kernels.common import same_bits
from kconv.kernels.geometry import layout_of, scale_shape

CPU = [name for name in ("plain", "numba") if backend.available(name)]
TORCH = {
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
LAYOUTS = ("scalar", "tensor", "tensor-2d", "channel", "channel-2d", "block", "block-4d")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(params=CPU)
def implementation(request):
    with backend.force(request.param):
        yield request.param


def finite_codes(shape, name="F8_E4M3", seed=0):
    raw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    codes = raw.view(TORCH[name])
    return torch.where(codes.float().isfinite(), raw, 0x42).to(torch.uint8).view(TORCH[name])


def random_scale(shape, dtype=torch.float32, seed=1, low=-3.0, high=3.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) * (high - low) + low).exp2().to(dtype)


def spread(scale, shape, block):
    """A scale of any layout, repeated over its weight, by index arithmetic."""
    *_, rows, columns = shape
    if scale.dim() >= 2 and scale.numel() > 1 and block:
        grid = scale.reshape(-(-rows // block[0]), -(-columns // block[1])).float()
        return grid[torch.arange(rows)[:, None] // block[0], torch.arange(columns) // block[1]]
    return scale.float().reshape(-1, 1).expand(rows, columns) if scale.numel() > 1 else scale.float().reshape(1, 1)


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_is_the_fp32_product_rounded_once(implementation, name, layout, dtype):
    shape, block = (45, 50), (16, 32) if layout.startswith("block") else None
    codes, scale = finite_codes(shape, name), random_scale(scale_shape(layout, shape, block))
    scale = scale / 64 if dtype == torch.float16 else scale
    expected = (codes.float() * spread(scale, shape, block)).to(dtype)
    assert same_bits(fp8.decode(codes, scale, dtype, block=block), expected)


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_encode_with_scale_returns_every_code(implementation, name, layout, dtype):
    shape, block = (45, 50), (16, 32) if layout.startswith("block") else None
    codes = finite_codes(shape, name, seed=3)
    scale = random_scale(scale_shape(layout, shape, block), seed=4)
    if dtype == torch.float16:
        size = codes.float().abs()  # those that fp16 can tell apart at such scales
        kept = (size * scale.max() / 16 < 60000) & ((size * scale.min() / 16 > 2.0**-16) | (size == 0))
        codes, scale = torch.where(kept, codes.view(torch.uint8), 0).view(TORCH[name]), scale / 16
    values = fp8.decode(codes, scale, dtype, block=block, reversible=True)
    assert same_bits(fp8.encode_with_scale(values, scale, name, block=block), codes)


@pytest.mark.parametrize("scale", (1.0, 0.4375, 3e-5, 7.1e-3, 123.4, 1.9999999, -0.3))
@pytest.mark.parametrize("name", TORCH)
def test_every_code_comes_back_from_bf16(implementation, name, scale):
    every = torch.arange(256, dtype=torch.uint8).view(TORCH[name])
    codes = every[every.float().isfinite()].view(1, -1)
    values = fp8.decode(codes, torch.tensor(scale), reversible=True)
    assert same_bits(fp8.encode_with_scale(values, torch.tensor(scale), name), codes)


def test_partial_edge_tiles_use_their_own_scale():
    # KB-001: [576, 200] has a grid of 5 x 2, the last tiles are clipped.
    codes, scale = finite_codes((576, 200)), random_scale((5, 2))
    values = fp8.decode(codes, scale, torch.float32, block=(128, 128))
    rows, columns = torch.arange(576)[:, None] // 128, torch.arange(200) // 128
    assert values.shape == (576, 200)
    assert torch.equal(values, codes.float() * scale[rows, columns])


def test_the_block_size_is_not_inferred_from_the_grid():
    # KB-002: 1000 rows with 8 scale rows are blocks of 128, not of 125.
    codes, scale = torch.ones(1000, 128).to(torch.float8_e4m3fn), torch.exp2(torch.arange(8.0)).view(8, 1)
    values = fp8.decode(codes, scale, torch.float32, block=(128, 128))
    assert values[126, 0] == 1
    assert values[128, 0] == 2
    with pytest.raises(KconvError, match="fits no layout") as error:
        fp8.decode(codes, scale, torch.float32)
    assert "block size must come from the config" in str(error.value)


def test_u8_exponents_equal_e8m0_exponents():
    # KB-004
    codes, byte = finite_codes((4, 64)), torch.full((4, 2), 120, dtype=torch.uint8)
    values = fp8.decode(codes, byte, block=(1, 32))
    assert torch.equal(values.float(), codes.float() * 2.0**-7)
    assert same_bits(values, fp8.decode(codes, byte.view(torch.float8_e8m0fnu), block=(1, 32)))


def test_a_u8_scale_of_an_unknown_grid_is_refused():
    # KB-004
    codes = finite_codes((4, 64))
    with pytest.raises(KconvError, match="fits no layout"):
        fp8.decode(codes, torch.full((4, 2), 120, dtype=torch.uint8))
    with pytest.raises(KconvError, match="could mean anything"):
        fp8.decode(codes, torch.full((4, 1), 120, dtype=torch.uint8))


def test_mxfp8_scales_134_127_0_and_255():
    # KB-005
    codes = torch.full((1, 128), 1.0).to(torch.float8_e4m3fn)
    byte = torch.tensor([[134, 127, 0, 127]], dtype=torch.uint8)
    values = fp8.decode(codes, byte, torch.float32, block=(1, 32))
    assert values[0, ::32].tolist() == [128.0, 1.0, 2.0**-127, 1.0]
    byte[0, 3] = 255
    with pytest.raises(BadData, match="255 is NaN") as error:
        fp8.decode(codes, byte, block=(1, 32))
    assert (error.value.operand, error.value.position) == (1, (0, 3))


def test_a_permutation_of_rows_must_not_cut_a_block():
    # KB-007: decoding first, then reordering, gives each head its own scale; a block height of 128 over heads of 64 shows
    # that the scales alone could not have been reordered.
    codes, scale = torch.ones(384, 128).to(torch.float8_e4m3fn), torch.tensor([[1.0], [2.0], [4.0]])
    values = fp8.decode(codes, scale, torch.float32, block=(128, 128))
    assert values[::128, 0].tolist() == [1, 2, 4]
    order = torch.arange(6).view(2, 3).t().flatten()
    heads = values.view(6, 64, 128)[order].view(384, 128)
    assert heads[::64, 0].tolist() == [1, 2, 1, 4, 2, 4]


@pytest.mark.parametrize("shape, layout", [((), "scalar"), ((1,), "tensor"), ((1, 1), "tensor-2d"), ((256,), "channel"),
                                           ((256, 1), "channel-2d"), ((2, 2), "block"), ((2, 1, 2, 1), "block-4d")])  # fmt: skip
def test_scale_layouts_are_told_apart_by_shape(shape, layout):
    # KB-014: stale weight_block_size does not turn a channel scale into a block scale; (1, 1) is per tensor.
    assert layout_of((256, 256), shape, (128, 128)) == layout


@pytest.mark.parametrize("shape", ((3,), (2, 1), (3, 2), (2, 1, 2), (256, 256), (2, 2, 1, 1)))
def test_a_scale_shape_that_fits_nothing_is_named(shape):
    with pytest.raises(KconvError) as error:
        layout_of((256, 256), shape, (128, 128))
    assert f"scale {list(shape)} fits no layout of a weight [256, 256] in blocks of 128 x 128" in str(error.value)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_scales_of_f16_bf16_and_f32_give_the_same(implementation, dtype):
    # KB-020
    codes, scale = finite_codes((40, 64)), random_scale((40, 1), dtype)
    assert same_bits(fp8.decode(codes, scale), fp8.decode(codes, scale.float()))


@pytest.mark.parametrize("name, byte", [("F8_E4M3", 0x7F), ("F8_E4M3", 0xFF), ("F8_E4M3FNUZ", 0x80), ("F8_E5M2", 0x7D),
                                        ("F8_E5M2", 0xFC), ("F8_E5M2FNUZ", 0x80)])  # fmt: skip
def test_codes_that_are_not_finite_are_refused_unless_allowed(implementation, name, byte):
    # KB-011
    codes = finite_codes((8, 96), name)
    codes.view(torch.uint8)[5, 33] = byte
    with pytest.raises(BadData, match=f"code 0x{byte:02X} of {name} is") as error:
        fp8.decode(codes, torch.tensor(0.5))
    assert (error.value.operand, error.value.position) == (0, (5, 33))
    values = fp8.decode(codes, torch.tensor(0.5), finite=False)
    assert not values[5, 33].isfinite()
    assert values.isfinite().sum() == 8 * 96 - 1
    assert torch.signbit(values[5, 33]) == bool(byte >> 7)


@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
def test_a_scale_that_is_not_finite_is_refused(implementation, bad):
    scale = torch.ones(2, 1, 3, 1)
    scale[1, 0, 2, 0] = bad
    with pytest.raises(BadData, match="the scale is") as error:
        fp8.decode(finite_codes((20, 40)), scale, block=(16, 16))
    assert (error.value.operand, error.value.position) == (1, (1, 0, 2, 0))


def test_overflow_of_the_target_is_refused_with_its_position(implementation):
    codes = torch.full((4, 8), 1.0).to(torch.float8_e4m3fn)
    codes[2, 5] = 448.0
    with pytest.raises(BadData, match="beyond 65504") as error:
        fp8.decode(codes, torch.tensor(200.0), torch.float16)
    assert error.value.position == (2, 5)


@pytest.mark.parametrize("scale", (0.0, 2.0**-20))
def test_codes_that_would_collapse_are_refused_only_when_they_must_come_back(implementation, scale):
    codes = finite_codes((8, 32))
    codes.view(torch.uint8)[:, 0] = 0x01
    fp8.decode(codes, torch.tensor(scale), torch.float16)
    with pytest.raises(BadData, match="cannot be told from its value"):
        fp8.decode(codes, torch.tensor(scale), torch.float16, reversible=True)
    zeros = torch.tensor([[0x00, 0x80] * 4], dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = fp8.decode(zeros, torch.tensor(scale), torch.float16, reversible=True)
    assert same_bits(fp8.encode_with_scale(values, torch.tensor(scale)), zeros)


def test_a_value_without_a_code_is_refused_with_its_position(implementation):
    codes, scale = finite_codes((20, 40)), random_scale((2, 3))
    values = fp8.decode(codes, scale, block=(16, 16))
    values[17, 33] = values[17, 33] * 1.05 + 0.3
    with pytest.raises(BadData, match="has no F8_E4M3 code at scale") as error:
        fp8.encode_with_scale(values, scale, block=(16, 16))
    assert (error.value.operand, error.value.position) == (0, (17, 33))


def test_stacked_weights_have_their_own_grids(implementation):
    for rows in (32, 40):  # 40 rows leave a partial tile between two weights
        codes, scale = finite_codes((3, rows, 24)), random_scale((3, -(-rows // 16), 2))
        values = fp8.decode(codes, scale, block=(16, 16))
        for e in range(3):
            assert same_bits(values[e], fp8.decode(codes[e], scale[e], block=(16, 16)))
        assert same_bits(fp8.encode_with_scale(values, scale, block=(16, 16)), codes)


def test_odd_widths_lent_outputs_and_no_rows(implementation):
    codes, scale = finite_codes((7, 33)), random_scale((7, 1))
    expected = (codes.float() * scale).bfloat16()
    buffer = torch.zeros(7 * 33 + 1, dtype=torch.bfloat16)
    out = buffer[1:].view(7, 33)
    assert fp8.decode(codes, scale, torch.bfloat16, out) is out
    assert same_bits(out, expected)
    wide = torch.zeros(7, 40, dtype=torch.bfloat16)
    fp8.decode(codes, scale, torch.bfloat16, wide[:, 3:36])
    assert same_bits(wide[:, 3:36].contiguous(), expected)
    assert fp8.decode(codes[:0], scale[:0]).shape == (0, 33)


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantize_is_nearest_within_its_scale(name, layout):
    shape, block = (40, 48), (16, 32) if layout.startswith("block") else None
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codes, scale = fp8.quantize(values, name, layout=layout, block=block)
    assert tuple(scale.shape) == scale_shape(layout, shape, block)
    decoded = fp8.decode(codes, scale, torch.float32, block=block)
    table = torch.arange(256, dtype=torch.uint8).view(TORCH[name]).float()
    table = table[table.isfinite()]
    unit = spread(scale, shape, block)
    best = (values[..., None] / unit[..., None] - table).abs().min(-1).values
    assert torch.allclose(((values - decoded) / unit).abs(), best, atol=float(table.max()) * 1e-6, rtol=1e-3)


def test_quantize_is_lossless_where_powers_of_two_allow_it():
    codes = finite_codes((64, 64))
    values = (codes.float() * torch.exp2(torch.arange(4.0) - 9).repeat_interleave(16)[:, None]).bfloat16()
    again, scale = fp8.quantize(values, layout="block", block=(16, 16), scale_dtype="F32")
    assert same_bits(fp8.decode(again, scale, block=(16, 16)), values)
    again, scale = fp8.quantize(values, layout="block", block=(16, 16), scale_dtype="U8")
    assert same_bits(fp8.decode(again, scale, block=(16, 16)), values)


def test_quantize_of_zeros_and_of_nan():
    codes, scale = fp8.quantize(torch.zeros(4, 4), layout="channel")
    assert scale.tolist() == [1.0] * 4
    assert not codes.view(torch.uint8).any()
    with pytest.raises(BadData, match="cannot be quantised"):
        fp8.quantize(torch.full((2, 2), float("nan")), layout="tensor")


def test_quantize_refuses_a_scale_that_its_dtype_cannot_hold():
    values = torch.ones(2, 32, 32)
    values[1, 20, 17] = 1.1e9
    with pytest.raises(BadData, match="the scale of a tile is beyond F16") as error:
        fp8.quantize(values, layout="block", block=(16, 16), scale_dtype="F16")
    assert error.value.position == (1, 16, 16)
    codes, scale = fp8.quantize(values, layout="block", block=(16, 16))
    assert torch.equal(fp8.decode(codes, scale, block=(16, 16))[0], values[0].bfloat16())


def test_parameters_are_encoded_like_tensors(implementation):
    codes, scale = finite_codes((4, 8)), torch.tensor(0.1)
    parameter = torch.nn.Parameter(fp8.decode(codes, scale))
    assert same_bits(fp8.encode_with_scale(parameter, scale), codes)


def test_unknown_formats_are_named():
    with pytest.raises(KconvError, match="no FP8 format is called F32"):
        fp8.decode(torch.zeros(2, 2), torch.tensor(1.0))
    with pytest.raises(KconvError, match="no FP8 format is called F8_E3M4"):
        fp8.decode(finite_codes((2, 2)), torch.tensor(1.0), code="F8_E3M4")
    with pytest.raises(KconvError, match="not understood"):
        fp8.decode(finite_codes((2, 2)), torch.ones(2, dtype=torch.int32))
