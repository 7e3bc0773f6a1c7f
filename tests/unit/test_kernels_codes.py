from __future__ import annotations

import pytest
import torch

from kconv.kernels.codes import CODES, nearest, pair_values, values

TORCH = {
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
EVERY_BYTE = torch.arange(256, dtype=torch.uint8)
EVERY_BF16 = torch.arange(65536).to(torch.uint16).view(torch.bfloat16)


@pytest.mark.parametrize("name", TORCH)
def test_values_are_those_of_torch(name):
    ours, theirs = values(CODES[name]), EVERY_BYTE.view(TORCH[name]).float()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(
        torch.where(ours.isnan(), 0, ours.view(torch.int32)), torch.where(ours.isnan(), 0, theirs.view(torch.int32))
    )


def test_e4m3fn_and_fnuz_differ_by_a_factor_two_and_in_the_nan_codes():
    # KB-010
    fn, fnuz = values(CODES["F8_E4M3"]), values(CODES["F8_E4M3FNUZ"])
    assert torch.signbit(fn[0x80])
    assert fn[0x80] == 0
    assert fnuz[0x80].isnan()
    assert fn[[0x7F, 0xFF]].isnan().all()
    assert fnuz[[0x7F, 0xFF]].isfinite().all()
    both = fn.isfinite() & fnuz.isfinite()
    assert torch.equal(fn[both], 2 * fnuz[both])


@pytest.mark.parametrize("name", CODES)
def test_nearest_is_nearest_and_keeps_every_code(name):
    code = CODES[name]
    table, found = values(code), nearest(code).long()
    finite = table.isfinite()
    own = found[table.bfloat16().view(torch.uint16).long()]
    assert torch.equal(own[finite], torch.arange(table.numel())[finite])
    number = EVERY_BF16.float()
    inside = number.isfinite() & (number.abs() <= code.largest)
    best = (number[inside, None] - table[finite]).abs().min(1).values
    assert torch.equal((number[inside] - table[found[inside]]).abs(), best)
    assert table[found].isfinite().all()


@pytest.mark.parametrize("name", CODES)
def test_pairs_are_two_values_low_code_first(name):
    code = CODES[name]
    pairs = pair_values(code).view(torch.float32).view(-1, 2)
    count = 1 << code.bits
    low, high = 5, count - 6
    assert pairs[low + count * high].tolist() == [code.value(low), code.value(high)]
    assert len(pairs) == count * count


@pytest.mark.parametrize(
    "name, largest, step",
    [
        ("E2M1", 6.0, 0.5), ("INT4", 8.0, 1.0), ("F8_E4M3", 448.0, 2.0**-9), ("F8_E4M3FNUZ", 240.0, 2.0**-10),
        ("F8_E5M2", 57344.0, 2.0**-16), ("F8_E5M2FNUZ", 57344.0, 2.0**-17),
    ],
)  # fmt: skip
def test_ranges(name, largest, step):
    assert CODES[name].largest == largest
    assert CODES[name].step == step
    magnitudes = values(CODES[name]).abs()
    assert magnitudes[magnitudes > 0].min() == step
