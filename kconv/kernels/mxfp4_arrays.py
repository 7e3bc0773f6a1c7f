"""MXFP4 to bf16 on arrays, by numpy alone: for conversions without numba, which would wait a second for torch to be imported.

Four codes are looked up at a time, as bf16 at the largest ordinary scale; then each exponent is lowered to the group's own.
At that scale bit 14 of a lane says whether the value is a zero, which has no exponent to lower.
"""

from __future__ import annotations

import functools

import numpy as np

LOW, HIGH = 2, 252
"""The first and last scale byte at which every product is a normal bf16."""
LANES = np.uint64(0x0001000100010001)
CHUNK = 8192


@functools.cache
def _quadruples() -> np.ndarray:
    """The bf16 of four codes at scale `HIGH`, uint64 [65536]."""
    code = np.arange(16)
    magnitude = code & 7
    value = ((HIGH - 1) << 7) + np.where(magnitude > 1, magnitude << 6, 0)
    lane = np.where(magnitude > 0, value, 0) | (code & 8) << 12
    four = np.arange(1 << 16)
    table = np.zeros(1 << 16, np.uint64)
    for k in range(4):
        table |= lane[four >> 4 * k & 15].astype(np.uint64) << np.uint64(16 * k)
    return table


def decode_bytes(packed: np.ndarray, scale: np.ndarray, out: np.ndarray, group: int) -> bool:
    """Codes (uint8, two a byte) and scales (uint8, one for `group` codes), 1-D, into the bytes of bf16 values.

    False, with nothing written, where a scale is not of the ordinary ones or four codes may have two scales.
    """
    if group % 4 or not scale.size or scale.min() < LOW or scale.max() > HIGH:
        return False
    words, table = group // 4, _quadruples()
    codes, values = packed.view(np.uint16), out.view(np.uint64)
    step = CHUNK * words
    scratch = np.empty(min(step, codes.size), np.uint64)
    for i in range(0, codes.size, step):
        target = values[i : i + step]
        lanes = scratch[: target.size]
        index = lanes.view(np.intp)
        np.copyto(index, codes[i : i + step])
        np.take(table, index, out=target, mode="clip")
        np.right_shift(target, np.uint64(14), out=lanes)
        np.bitwise_and(lanes, LANES, out=lanes)
        lower = (np.uint64(HIGH) - scale[i // words : i // words + CHUNK]) << np.uint64(7)
        np.multiply(lanes, np.repeat(lower, words), out=lanes)
        np.subtract(target, lanes, out=target)
    return True
