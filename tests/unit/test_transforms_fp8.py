from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kconv.errors import BadData, KconvError
from kconv.kernels.common import same_bits
from kconv.kernels.geometry import LAYOUTS, scale_shape
from kconv.spec import Spec, spec_of, torch_dtype
from kconv.transforms.base import Grade, SpecError, Tiles
from kconv.transforms.fp8 import Fp8, Mxfp8
from tests.unit.transform_checks import backward, forward, random_bits, round_trip

CODES = ("F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ")


def finite(spec: Spec, seed: int) -> torch.Tensor:
    codes = random_bits(spec, seed)
    raw = codes.view(torch.uint8)
    return torch.where(codes.float().isfinite(), raw, 0x31).to(torch.uint8).view(codes.dtype)


def factor(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    bits = random_bits(Spec("U8", shape), seed)
    if dtype in ("U8", "F8_E8M0"):
        return (107 + bits % 30).to(torch.uint8).view(torch_dtype(dtype))
    return ((bits.float() + 1) / 37).to(torch_dtype(dtype))


@settings(max_examples=60, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS), code=st.sampled_from(CODES), dtype=st.sampled_from(("BF16", "F32")),
    scale_dtype=st.sampled_from(("F32", "BF16", "F16", "F8_E8M0")), rows=st.integers(1, 40), columns=st.integers(1, 40),
    experts=st.sampled_from((0, 0, 3)), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_stored_bits_come_back(layout, code, dtype, scale_dtype, rows, columns, experts, seed):
    shape = (experts, rows, columns) if experts else (rows, columns)
    block = (8, 16) if layout.startswith("block") else None
    scale = factor(scale_dtype, scale_shape(layout, shape, block), seed + 1)
    left = [finite(Spec(code, shape), seed), scale]
    transform = Fp8(dtype, layout=layout, block=block, code=code, scale_dtype=scale_dtype)
    assert transform.grade is Grade.EXACT_WITH_SIDECAR
    round_trip(transform, left)
    detected = Fp8.of(spec_of(left[0]), spec_of(scale), block=block, dtype=dtype)
    assert same_bits(detected.forward(left)[0], transform.forward(left)[0])


@pytest.mark.parametrize("rows", (32, 45))
def test_block_tiles_cover_whole_scale_rows(rows):
    transform = Fp8("BF16", block=(16, 32))
    left = [finite(Spec("F8_E4M3", (rows, 70)), 0), factor("F32", (-(-rows // 16), 3), 1)]
    round_trip(transform, left)
    specs = tuple(spec_of(t) for t in left)
    assert transform.tiles(specs, transform.forward_specs(specs)) == Tiles((16, 1), (16, 1))


def test_mxfp8_is_fp8_in_blocks_of_1_x_32():
    left = [finite(Spec("F8_E4M3", (6, 96)), 0), factor("U8", (6, 3), 1)]
    (values, _) = round_trip(Mxfp8("BF16"), left)
    assert torch.equal(values.float(), left[0].float() * torch.exp2(left[1].float() - 127).repeat_interleave(32, 1))


def test_codes_stored_under_another_dtype():
    # KB-010: FNUZ codes under the dtype F8_E4M3 are decoded as the config says.
    left = [finite(Spec("F8_E4M3", (4, 8)), 0), torch.ones(1)]
    left[0].view(torch.uint8)[left[0].view(torch.uint8) == 0x80] = 1
    transform = Fp8("BF16", layout="tensor", code="F8_E4M3FNUZ", stored="F8_E4M3")
    (values, _) = round_trip(transform, left)
    assert torch.equal(values.float() * 2, left[0].float())
    raw = Fp8("BF16", layout="tensor", stored="U8")
    round_trip(raw, [left[0].view(torch.uint8), left[1]])


def test_without_the_sidecar_the_way_back_is_lossy():
    transform = Fp8("BF16", sidecar=False, block=(8, 8))
    assert transform.grade is Grade.LOSSY
    (values,) = forward(transform, [finite(Spec("F8_E4M3", (16, 16)), 0), factor("F32", (2, 2), 1)])
    codes, scale = backward(transform, [values])
    again = transform.forward([codes, scale])[0].float()
    top = values.float().view(2, 8, 2, 8).abs().amax((1, 3)).repeat_interleave(8, 0).repeat_interleave(8, 1)
    assert ((again - values.float()).abs() <= (values.float().abs() / 14).clamp(min=0) + top / 448 / 64).all()


@pytest.mark.parametrize(
    "specs, words",
    [
        ((Spec("F8_E4M3", (576, 200)),), "takes 2 tensors, not 1"),
        ((Spec("F8_E5M2", (576, 200)), Spec("F32", (5, 2))), "the weight is F8_E5M2 [576, 200], expected F8_E4M3"),
        ((Spec("F8_E4M3", (576, 200)), Spec("BF16", (5, 2))), "the scale is BF16 [5, 2], expected F32"),
        ((Spec("F8_E4M3", (576, 200)), Spec("F32", (4, 1))), "expected shape [5, 2] (block 128 x 128)"),
        ((Spec("F8_E4M3", (576,)), Spec("F32", (5,))), "no rows and columns"),
    ],
)
def test_forward_specs_name_what_disagrees(specs, words):
    # KB-001, KB-019: a scale of the wrong shape is found before any data is read.
    with pytest.raises(SpecError) as error:
        Fp8("BF16", block=(128, 128)).forward_specs(specs)
    assert words in str(error.value)


def test_a_block_layout_without_a_block_size_is_refused():
    # KB-002
    with pytest.raises(KconvError, match="without a block size"):
        Fp8("BF16", layout="block")
    with pytest.raises(SpecError, match="fits no layout"):
        Fp8.of(Spec("F8_E4M3", (1000, 128)), Spec("F32", (8, 1)))


def test_u8_scales_need_a_grid():
    # KB-004
    with pytest.raises(KconvError, match="could mean anything"):
        Fp8.of(Spec("F8_E4M3", (4, 64)), Spec("U8", (4, 1)))
    assert Fp8.of(Spec("F8_E4M3", (4, 64)), Spec("U8", (4, 2)), block=(1, 32)) == Mxfp8("BF16")


def test_nan_codes_stop_the_conversion():
    # KB-011
    left = [torch.full((2, 2), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.ones(1)]
    with pytest.raises(BadData, match="is nan"):
        Fp8("BF16", layout="tensor").forward(left)
    with pytest.raises(KconvError, match="not F64"):
        Fp8("F64", layout="tensor")
