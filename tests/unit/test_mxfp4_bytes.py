"""MXFP4 on bytes, without torch: numba's loops and numpy, against the kernels on tensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kconv.kernels import backend, mxfp4, mxfp4_arrays
from kconv.spec import Spec, torch_dtype
from kconv.transforms.mxfp4 import Mxfp4
from tests.builders import small_k3

pytest.importorskip("numba")
ROWS, COLUMNS = 6, 256


def made(low: int, high: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, ROWS * COLUMNS // 2, np.uint8)
    return codes, rng.integers(low, high + 1, ROWS * COLUMNS // 32).astype(np.uint8)


SPECS = Spec("U8", (ROWS, COLUMNS // 2)), Spec("U8", (ROWS, COLUMNS // 32))


@pytest.mark.parametrize(
    "by, dtype, low, high",
    [("numba", "BF16", 2, 252), ("numba", "F16", 114, 140), ("numba", "F32", 2, 252), ("plain", "BF16", 2, 252)],
)
def test_forward_has_the_bits_of_the_plain_kernel(by: str, dtype: str, low: int, high: int) -> None:
    codes, scale = made(low, high)
    with backend.force(by):
        found = Mxfp4(dtype).on_bytes([codes, scale], SPECS, False)
    assert found is not None
    with backend.force("plain"):
        packed, scales = (torch.from_numpy(a).view(ROWS, -1) for a in (codes, scale))
        expected = mxfp4.decode(packed, scales, torch_dtype(dtype))
    assert bytes(found[0]) == expected.view(torch.uint8).numpy().tobytes()
    assert found[1] is scale


def test_backward_finds_the_codes_again_and_writes_into_what_is_lent() -> None:
    codes, scale = made(2, 252)
    transform = Mxfp4("BF16")
    forward = transform.on_bytes([codes, scale], SPECS, False)
    assert forward is not None
    lent = [np.zeros_like(codes), np.zeros_like(scale)]
    back = transform.on_bytes(forward, transform.forward_specs(SPECS), True, lent)
    assert back is not None
    assert back[0] is lent[0]
    assert bytes(back[0]) == bytes(codes)


@pytest.mark.parametrize("by", ["numba", "plain"])
@pytest.mark.parametrize("scale", [0, 1, 253, 254, 255])
def test_an_unusual_scale_is_left_to_tensors(scale: int, by: str) -> None:
    codes, scales = made(100, 130)
    scales[-1] = scale
    with backend.force(by):
        assert Mxfp4("BF16").on_bytes([codes, scales], SPECS, False) is None


def test_a_value_without_a_code_is_left_to_tensors() -> None:
    codes, scale = made(100, 130)
    transform = Mxfp4("BF16")
    values, scales = transform.on_bytes([codes, scale], SPECS, False) or []
    values.view(np.uint16)[7] ^= 1
    assert transform.on_bytes([values, scales], transform.forward_specs(SPECS), True) is None


def test_without_numba_only_bf16_is_made_of_bytes() -> None:
    codes, scale = made(114, 140)
    with backend.force("plain"):
        assert Mxfp4("F16").on_bytes([codes, scale], SPECS, False) is None
        transform = Mxfp4("BF16")
        values = transform.on_bytes([codes, scale], SPECS, False)
        assert values is not None
        assert transform.on_bytes(values, transform.forward_specs(SPECS), True) is None


def test_numpy_knows_every_code_at_every_ordinary_scale() -> None:
    """All 251 scales, each with a group of all codes in both nibbles; several chunks."""
    scale = np.tile(np.arange(mxfp4_arrays.LOW, mxfp4_arrays.HIGH + 1).astype(np.uint8), 80)
    codes = np.random.default_rng(1).integers(0, 256, scale.size * 16, np.uint8)
    codes[: 251 * 16] = np.tile(np.arange(16) * 17, 251)
    assert scale.size > 2 * mxfp4_arrays.CHUNK
    out = np.zeros(codes.size * 4, np.uint8)
    assert mxfp4_arrays.decode_bytes(codes, scale, out, 32)
    expected = mxfp4.decode(torch.from_numpy(codes).view(-1, 16), torch.from_numpy(scale).view(-1, 1))
    assert bytes(out) == expected.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("fast", ["0", "1"])
@pytest.mark.parametrize("experts, imported", [("packed", False), ("bf16", False), ("fp8-block", True)])
def test_a_conversion_to_bf16_needs_no_torch(
    experts: str, imported: bool, fast: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KCONV_FAST", fast)
    source = small_k3().write(tmp_path / "src")
    program = (
        "import sys, kconv; kconv.convert(sys.argv[1], sys.argv[2], experts=sys.argv[3], to=sys.argv[4]);"
        "print('torch' in sys.modules)"
    )
    to = "hf" if experts == "fp8-block" else "native"
    command = [sys.executable, "-c", program, str(source), str(tmp_path / "out"), experts, to]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(imported)
