from __future__ import annotations

import pytest
import torch

from kconv.errors import BadData, KconvError
from kconv.kernels import backend, e2m1, mxfp4, nvfp4
from kconv.kernels.common import same_bits

CPU = [name for name in ("plain", "numba") if backend.available(name)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(params=CPU)
def implementation(request):
    with backend.force(request.param):
        yield request.param


def stored(shape, seed=0, low=0x20, high=0x7E):
    """Random packed codes and positive F8_E4M3 scales."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, generator=generator)
    byte = torch.randint(low, high + 1, (*shape[:-1], shape[-1] // 16), dtype=torch.uint8, generator=generator)
    return packed, byte.view(torch.float8_e4m3fn)


def by_definition(packed, scale, whole, dtype, divides):
    code = torch.tensor(e2m1.E2M1)[torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()]
    factor = scale.float() / whole.reshape(()) if divides else scale.float() * whole.reshape(())
    return (code * factor.repeat_interleave(16, -1)).to(dtype)


@pytest.mark.parametrize("divides, whole", [(True, torch.tensor([2688.7])), (False, torch.tensor(3.1e-4))])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ((33, 64), (2, 5, 48), (16,)))
def test_decode_and_encode_follow_the_definition(implementation, divides, whole, dtype, shape):
    packed, scale = stored(shape)
    values = nvfp4.decode(packed, scale, whole, dtype, divides=divides, reversible=True)
    assert same_bits(values, by_definition(packed, scale, whole, dtype, divides))
    assert torch.equal(nvfp4.encode_with_scale(values, scale, whole, divides=divides), packed)


def test_the_two_spellings_agree_when_the_global_scale_is_a_power_of_two(implementation):
    packed, scale = stored((8, 64))
    one = nvfp4.decode(packed, scale, torch.tensor([256.0]), divides=True)
    assert same_bits(one, nvfp4.decode(packed, scale, torch.tensor(1 / 256), divides=False))


@pytest.mark.parametrize("byte", (0x7F, 0xFF))
def test_a_nan_among_the_scales_is_refused_with_its_position(implementation, byte):
    # KB-011
    packed, scale = stored((4, 64))
    scale.view(torch.uint8)[2, 3] = byte
    with pytest.raises(BadData, match=f"scale 0x{byte:02X} is NaN") as error:
        nvfp4.decode(packed, scale, torch.tensor([1.0]), divides=True)
    assert (error.value.operand, error.value.position) == (1, (2, 3))


@pytest.mark.parametrize("whole", (0.0, float("nan"), float("inf")))
def test_a_global_scale_that_cannot_be_is_refused(whole):
    packed, scale = stored((4, 64))
    with pytest.raises(BadData, match="the global scale is") as error:
        nvfp4.decode(packed, scale, torch.tensor([whole]), divides=True)
    assert error.value.operand == 2


def test_codes_under_a_zero_scale_are_refused_only_when_they_must_come_back(implementation):
    packed, scale = stored((4, 64))
    scale.view(torch.uint8)[1, 2] = 0
    packed[1, 20] = 0x57
    assert not nvfp4.decode(packed, scale, torch.tensor([1.0]), divides=True)[1, 32:48].any()
    with pytest.raises(BadData, match="cannot be told from its value"):
        nvfp4.decode(packed, scale, torch.tensor([1.0]), divides=True, reversible=True)
    packed[1, 16:24] = 0x80
    values = nvfp4.decode(packed, scale, torch.tensor([1.0]), divides=True, reversible=True)
    assert torch.equal(nvfp4.encode_with_scale(values, scale, torch.tensor([1.0]), divides=True), packed)


@pytest.mark.parametrize("divides", (True, False))
@pytest.mark.parametrize("spread", (0, 8, 14))
def test_quantize_of_mxfp4_is_lossless_within_the_span(divides, spread):
    generator = torch.Generator().manual_seed(spread)
    packed = torch.randint(0, 256, (16, 64), dtype=torch.uint8, generator=generator)
    scale = torch.randint(118 - spread, 119, (16, 4), dtype=torch.uint8, generator=generator)
    values = mxfp4.decode(packed, scale)
    again, scales, whole = nvfp4.quantize(values, divides=divides)
    assert same_bits(nvfp4.decode(again, scales, whole, divides=divides), values)


def test_quantize_beyond_the_span_is_near():
    values = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    values[3, :16] *= 1e-7
    packed, scale, whole = nvfp4.quantize(values, divides=True)
    decoded = nvfp4.decode(packed, scale, whole, torch.float32, divides=True)
    top = values.view(16, 4, 16).abs().amax(-1, keepdim=True).clamp(min=values.abs().max() / 448 / 448)
    assert ((values - decoded).view(16, 4, 16).abs() <= top * 0.18).all()
    zeros = nvfp4.quantize(torch.zeros(2, 32), divides=False)
    assert not nvfp4.decode(*zeros, divides=False).any()


def test_quantize_refuses_nan():
    with pytest.raises(BadData, match="cannot be quantised"):
        nvfp4.quantize(torch.full((1, 16), float("nan")), divides=True)


def test_shapes_that_do_not_fit_are_named():
    packed, scale = stored((4, 64))
    with pytest.raises(KconvError, match="one per 16"):
        nvfp4.decode(packed, scale[:, :3], torch.tensor([1.0]), divides=True)
    with pytest.raises(KconvError, match="one global scale"):
        nvfp4.decode(packed, scale, torch.ones(2), divides=True)
    with pytest.raises(KconvError, match="F8_E4M3 scales"):
        nvfp4.decode(packed, scale.view(torch.uint8), torch.ones(1), divides=True)
