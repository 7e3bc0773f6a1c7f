from __future__ import annotations

import threading

import pytest
import torch

from kconv.errors import BadData, KconvError
from kconv.kernels.common import same_bits
from kconv.kernels.measure import Error, error_of
from kconv.transforms.base import Grade, Seq
from kconv.transforms.dtype import Cast
from kconv.transforms.fp8 import Fp8
from kconv.transforms.int4 import Int4
from kconv.transforms.mxfp4 import Mxfp4
from kconv.transforms.notes import Notes, collect
from kconv.transforms.quantize import QuantizeFp8, QuantizeMxfp4, QuantizeNvfp4
from tests.unit.transform_checks import assert_tiles, backward, forward

ISOS = [
    QuantizeFp8("BF16", block=(16, 32)), QuantizeFp8("F32", "channel-2d", None, "F8_E5M2", "BF16"),
    QuantizeFp8("BF16", "block", (1, 32), scale_dtype="U8"), QuantizeMxfp4("BF16"), QuantizeMxfp4("F32", 16),
    QuantizeNvfp4("BF16"), QuantizeNvfp4("F32", False, ()),
]  # fmt: skip


def weights(transform, shape=(48, 96), seed=0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02
    return values.bfloat16() if transform.dtype == "BF16" else values


@pytest.mark.parametrize("transform", ISOS, ids=str)
def test_specs_grade_and_error(transform):
    values = weights(transform)
    assert transform.grade is Grade.LOSSY
    with collect() as notes:
        right = transform.forward([values])
    forward(transform, [values])
    (decoded,) = backward(transform, right)
    (error,) = notes.errors.values()
    assert error == error_of(values, decoded)
    assert not error.lossless
    assert 0.005 < error.relative < 0.12
    assert f"{error.changed} of 4608 values changed" in str(error)


@pytest.mark.parametrize("transform", ISOS, ids=str)
def test_quantising_again_changes_nothing(transform):
    right = transform.forward([weights(transform)])
    (once,) = transform.backward(right)
    with collect() as notes:
        (twice,) = transform.backward(transform.forward([once]))
    (error,) = notes.errors.values()
    if isinstance(transform, QuantizeMxfp4):  # its scale follows from the values alone
        assert error.lossless
        assert same_bits(twice, once)
    assert error.relative < 0.05


@pytest.mark.parametrize("transform", [i for i in ISOS if not isinstance(i, QuantizeNvfp4)], ids=str)
def test_tiles_are_quantised_alone(transform):
    values = weights(transform)
    if transform.decoder.sidecar is False:
        left = transform.backward(transform.forward([values]))
        if isinstance(transform, QuantizeMxfp4):
            assert_tiles(transform, left, transform.forward(left))
    left_specs = transform.backward_specs(transform.forward_specs(_specs([values])))
    assert transform.tiles(left_specs, transform.forward_specs(left_specs)) is not None


def _specs(tensors):
    from kconv.spec import spec_of

    return tuple(spec_of(t) for t in tensors)


def test_mxfp4_to_fp8_and_nvfp4_is_lossless_where_the_exponents_allow_it():
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (64, 64), dtype=torch.uint8, generator=generator)
    scale = torch.randint(115, 121, (64, 4), dtype=torch.uint8, generator=generator)
    for transform in (QuantizeFp8("BF16", block=(16, 32)), QuantizeNvfp4("BF16"), QuantizeMxfp4("BF16")):
        chain = Seq((Mxfp4("BF16", sidecar=False), transform))
        with collect() as notes:
            right = chain.forward([packed, scale])
        (error,) = notes.errors.values()
        assert error.lossless
        assert str(error) == "lossless: all 8192 values the same"
        assert same_bits(transform.backward(right)[0], Mxfp4("BF16").forward([packed, scale])[0])


def test_the_lossy_way_back_of_a_decoder_is_measured():
    values = torch.randn(16, 32).bfloat16()
    for name, transform in (("FP8", Fp8("BF16", False, block=(16, 16))), ("INT4", Int4("BF16", False))):
        with collect() as notes:
            transform.backward([values])
        assert list(notes.errors) == [name]


def test_errors_add_up_over_tensors_and_threads():
    transform = QuantizeMxfp4("F32")
    parts = [weights(transform, seed=i) for i in range(4)]
    total = Notes()
    lock = threading.Lock()

    def work(values):
        with collect() as notes:
            transform.forward([values])
        with lock:
            total.merge(notes)

    threads = [threading.Thread(target=work, args=(p,)) for p in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole = torch.cat(parts)
    expected = error_of(whole, transform.backward(transform.forward([whole]))[0])
    assert total.errors["MXFP4"].count == expected.count
    assert total.errors["MXFP4"].changed == expected.changed
    assert total.errors["MXFP4"].relative == pytest.approx(expected.relative)


def test_without_a_collector_nothing_is_decoded_again():
    calls = []
    from kconv.transforms import notes

    notes.measure("X", torch.zeros(1), lambda: calls.append(1))  # type: ignore[arg-type, return-value]
    notes.warn("nobody listens")
    assert not calls
    assert Error() + Error() == Error()
    assert error_of(torch.zeros(0), torch.zeros(0)).relative == 0


def test_scales_that_are_all_zero_bytes_are_suspicious():
    # KB-031
    packed = torch.full((2, 16), 0x33, dtype=torch.uint8)
    with collect() as notes:
        Mxfp4("BF16").forward([packed, torch.zeros(2, 1, dtype=torch.uint8)])
    assert notes.warnings == [
        "all scale bytes are 0 (2^-127), as of a placeholder that was never filled; the neutral scale is 127"
    ]
    with collect() as notes:
        Mxfp4("BF16").forward([torch.zeros_like(packed), torch.zeros(2, 1, dtype=torch.uint8)])
        Mxfp4("BF16").forward([packed, torch.ones(2, 1, dtype=torch.uint8)])
    assert not notes.warnings


def test_what_is_not_finite_is_refused():
    values = torch.zeros(32, 32)
    values[3, 4] = float("nan")
    for transform in (QuantizeFp8("F32", block=(16, 16)), QuantizeMxfp4("F32"), QuantizeNvfp4("F32")):
        with pytest.raises(BadData, match="cannot be quantised") as error:
            transform.forward([values])
        assert error.value.position == (3, 4)
    with pytest.raises(KconvError, match="without a block size"):
        QuantizeFp8("F32", block=None)
    assert Seq((Cast("F32", "BF16", lossy=True), QuantizeMxfp4("BF16"))).grade is Grade.LOSSY
