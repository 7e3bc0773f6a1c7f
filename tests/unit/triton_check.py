"""Run by `test_kernels_triton` in a process of its own, where Triton interprets its kernels on CPU tensors.

Also the check for a real GPU: `python tests/unit/triton_check.py cuda` (larger sizes).
"""

from __future__ import annotations

import sys

import torch

from kconv.errors import BadData
from kconv.kernels import backend, fp8, int4, mxfp4, nvfp4
from kconv.kernels.common import same_bits

DEVICE = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
ROWS = 7 if DEVICE.type == "cpu" else 3072


def both(function, *tensors, **options):
    """The result of plain torch on the CPU and of Triton on the device, equal in every bit."""
    with backend.force("plain"):
        expected = function(*tensors, **options)
    moved = [t.to(DEVICE) if isinstance(t, torch.Tensor) else t for t in tensors]
    options = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    with backend.force("triton"):
        got = function(*moved, **options).cpu()
    assert got.dtype == expected.dtype
    assert same_bits(got, expected), (function.__module__, options, [getattr(t, "dtype", t) for t in tensors])
    return got


def refused(function, *tensors, **options):
    """Triton refuses at the same place as plain torch."""
    places = []
    for name, device in (("plain", torch.device("cpu")), ("triton", DEVICE)):
        with backend.force(name):
            try:
                function(*(t.to(device) if isinstance(t, torch.Tensor) else t for t in tensors), **options)
            except BadData as error:
                places.append((error.operand, error.position, str(error)))
    assert len(places) == 2, places
    assert places[0] == places[1], places


def check_mxfp4() -> None:
    held = {torch.bfloat16: 253, torch.float16: 141, torch.float32: 253, torch.float64: 255}
    for dtype, top in held.items():
        for group, columns in ((32, 96), (48, 96), (6, 96), (32, 3584)):
            if columns > 96 and DEVICE.type == "cpu":
                continue
            packed = torch.randint(0, 256, (ROWS, columns // 2), dtype=torch.uint8)
            low = 104 if dtype == torch.float16 else 0
            scale = torch.randint(low, top, (ROWS, columns // group), dtype=torch.uint8)
            values = both(mxfp4.decode, packed, scale, dtype)
            assert torch.equal(both(mxfp4.encode_with_scale, values, scale), packed)
    packed, scale = torch.randint(0, 256, (5, 48), dtype=torch.uint8), torch.full((5, 3), 127, dtype=torch.uint8)
    values = mxfp4.decode(packed, scale)
    values[3, 50] = 0.3
    refused(mxfp4.encode_with_scale, values, scale)
    scale[4, 1] = 255
    refused(mxfp4.decode, packed, scale)


def check_fp8() -> None:
    for code, name in ((torch.float8_e4m3fn, "F8_E4M3"), (torch.float8_e4m3fnuz, "F8_E4M3FNUZ"),
                       (torch.float8_e5m2, "F8_E5M2"), (torch.float8_e5m2fnuz, "F8_E5M2FNUZ")):  # fmt: skip
        raw = torch.randint(0, 256, (ROWS, 100), dtype=torch.uint8)
        codes = torch.where(raw.view(code).float().isfinite(), raw, 1).to(torch.uint8).view(code)
        for shape, block in (((), None), ((ROWS,), None), ((-(-ROWS // 4), 4), (4, 32)), ((-(-ROWS // 4), 1, 4, 1), (4, 32))):
            scale = torch.rand(shape) * 0.1 + 1e-3
            for dtype in (torch.bfloat16, torch.float32, torch.float16):
                if dtype == torch.float16 and "5M2" in name:
                    continue
                values = both(fp8.decode, codes, scale, dtype, block=block)
                if dtype != torch.float16:
                    assert same_bits(both(fp8.encode_with_scale, values, scale, name, block=block), codes)
        tiny = torch.full((), 2.0**-120)  # subnormal products
        both(fp8.decode, codes, tiny, torch.float32)
        both(fp8.decode, codes, tiny * 2.0**-6, torch.bfloat16)
        codes.view(torch.uint8)[2, 3] = 0x80 if "FNUZ" in name else 0x7F
        refused(fp8.decode, codes, torch.tensor(0.5))
        both(fp8.decode, codes, torch.tensor(0.5), finite=False)


def check_odd_shapes() -> None:
    """Rows that words do not fill, groups that they straddle, several weights at once, negative scales, codes at every place."""
    for columns, groups in ((60, 2), (52, 2), (9, 3), (64, 64)):
        packed = torch.randint(0, 2**28, (ROWS, -(-columns // 8))).to(torch.int32)
        scale = torch.rand(ROWS, groups) - 0.5
        for stored in (scale, scale.bfloat16(), scale.half()):
            both(int4.decode, packed, stored, columns)
    for columns, code in ((36, torch.float8_e4m3fn), (40, torch.float8_e4m3fn), (40, torch.float8_e5m2fnuz)):
        codes = torch.randint(0, 0x7F, (3, 5, columns), dtype=torch.uint8).view(code)
        both(fp8.decode, codes, torch.rand(3, 3, 5) - 0.5, block=(2, 8))
        both(fp8.decode, codes, torch.rand(3, 5) - 0.5)
        for place in range(columns):
            damaged = codes.clone()
            damaged.view(torch.uint8)[2, 4, place] = 0xFF if code == torch.float8_e4m3fn else 0x80
            refused(fp8.decode, damaged, torch.rand(3))


def check_int4_and_nvfp4() -> None:
    packed = torch.randint(-(2**31), 2**31, (ROWS, 8)).to(torch.int32)
    zero = torch.randint(-(2**31), 2**31, (-(-ROWS // 8), 2)).to(torch.int32)
    scale = (torch.rand(ROWS, 2) * 0.1 + 1e-3).bfloat16()
    for dtype in (torch.bfloat16, torch.float32):
        for zeros in (None, zero):
            values = both(int4.decode, packed, scale, 64, dtype, zero=zeros)
            assert torch.equal(both(int4.encode_with_scale, values, scale, zero=zeros), packed)
    packed = torch.randint(0, 256, (ROWS, 32), dtype=torch.uint8)
    scale = torch.randint(0x10, 0x7E, (ROWS, 4), dtype=torch.uint8).view(torch.float8_e4m3fn)
    for dtype in (torch.bfloat16, torch.float32):
        for divides in (True, False):
            values = both(nvfp4.decode, packed, scale, torch.tensor([1234.5]), dtype, divides=divides)
            assert torch.equal(both(nvfp4.encode_with_scale, values, scale, torch.tensor([1234.5]), divides=divides), packed)
    scale.view(torch.uint8)[1, 2] |= 0x80
    both(nvfp4.decode, packed, scale, torch.tensor([1234.5]), divides=True)
    scale.view(torch.uint8)[3, 1] = 0xFF
    refused(nvfp4.decode, packed, scale, torch.tensor([1234.5]), divides=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    check_mxfp4()
    check_fp8()
    check_odd_shapes()
    check_int4_and_nvfp4()
    print("every bit equal")
