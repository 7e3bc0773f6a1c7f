"""Codes times scales, the core of FP8, INT4 and NVFP4: value = round(fp32(code) * fp32(scale)), and its inverse.

| step | rule |
|---|---|
| product | in fp32, then rounded once to the wanted dtype: what Transformers' Fp8Dequantize computes |
| scales of bf16 or fp16, target the same | bit-identical to compressed-tensors, which multiplies in the dtype of the scale |
| inverse | the code nearest to value / scale; then decoded again and compared bit for bit |

Why the inverse finds every code: neighbouring codes differ by at least 1/16 of their size (or by a whole `step`), the
value is off by at most 2^-9 of its size (bf16) and the quotient by 2^-8. It fails only where the target dtype underflows
(scale * step below twice its least subnormal) or overflows; `decode(reversible=True)` looks there and refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from kconv.errors import BadData, KconvError
from kconv.kernels import backend
from kconv.kernels.codes import CODES, Code, nearest, pair_values, values
from kconv.kernels.common import all_finite, bits, chunk_rows, first, same_bits, unravel, viewable
from kconv.kernels.geometry import Grid

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_E4M3 = CODES["F8_E4M3"]
_QUIET_NAN = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00, torch.float32: 0x7FC00000}


@dataclass(frozen=True)
class Scales:
    """Scales [N, rows, columns] of N weight matrices on a grid, as stored; `offset` (the same shape) is taken off the code first.

    Those of F8_E4M3 are divided (`divides`) or multiplied by `unit`, F32 []. `shape` and `weight` are the shapes of the
    user's tensors, for the positions in errors.
    """

    stored: Tensor
    grid: Grid
    shape: tuple[int, ...]
    weight: tuple[int, ...]
    offset: Tensor | None = None
    unit: Tensor | None = None
    divides: bool = False

    @cached_property
    def factor(self) -> Tensor:
        """What codes are multiplied with, fp32, in the shape of `stored`."""
        return self.stored.float() if self.unit is None else self._with_unit(e4m3_numbers(self.stored))

    def _with_unit(self, numbers: Tensor) -> Tensor:
        assert self.unit is not None
        return numbers / self.unit if self.divides else numbers * self.unit

    def edges(self) -> Tensor:
        """Two scales, fp32 [2], between whose magnitudes all others lie unless the first is negative; NaN where one is NaN."""
        if self.unit is None:
            return torch.stack(torch.aminmax(self.stored)).float()
        magnitudes = torch.stack(torch.aminmax(self.stored.view(torch.uint8) & 0x7F))
        return self._with_unit(e4m3_numbers(magnitudes.view(torch.float8_e4m3fn))).abs()

    def matrix(self, index: int | None) -> Scales:
        """Those of one weight matrix, or of all of them laid end to end, with `stored` and `offset` [rows, columns]."""

        def pick(tensor: Tensor) -> Tensor:
            return (tensor.flatten(0, 1) if index is None else tensor[index]).contiguous()

        return replace(self, stored=pick(self.stored), offset=None if self.offset is None else pick(self.offset))

    def scale_at(self, at: tuple[int, ...]) -> float:
        """The scale over element [n, row, column] of the matrices."""
        return float(self.factor[at[0], at[1] // self.grid.height, at[2] // self.grid.width])

    def in_weight(self, at: tuple[int, ...], rows: int) -> tuple[int, ...]:
        """Where element [n, row, column] of matrices of `rows` rows is in the user's weight."""
        return (*unravel(at[0] * rows + at[1], self.weight[:-1]), at[2])

    def in_scale(self, at: tuple[int, ...]) -> tuple[int, ...]:
        """Where scale [n, row, column] is in the user's tensor of scales."""
        flat = (at[0] * self.grid.rows + at[1]) * self.grid.columns + at[2]
        return unravel(flat, self.shape)

    def not_finite(self) -> BadData:
        """The error for the first scale that is not finite."""
        at = first(~self.factor.isfinite())
        number = float(self.factor[at])
        message, hint = f"the scale is {number}", "the checkpoint is damaged here: fetch the file again, or ask its publisher"
        if self.unit is not None and number != number:
            message = f"scale 0x{int(self.stored.view(torch.uint8)[at]):02X} is NaN"
            hint = "the exporter overflowed F8_E4M3 here: fetch the file again, or ask its publisher"
        return BadData(message, operand=1, position=self.in_scale(at), hint=hint)


def e4m3_numbers(scale: Tensor) -> Tensor:
    """The fp32 numbers of F8_E4M3 scales; torch's own conversion does five times fewer a second."""
    index = scale.contiguous().view(torch.uint8).to(torch.int32).view(-1)
    return torch.index_select(values(_E4M3, scale.device), 0, index).view(scale.shape)


def decode(codes: Tensor, scales: Scales, code: Code, out: Tensor, *, finite: bool = True, reversible: bool = False) -> None:
    """Codes U8 [N, O, W] into out [N, O, I]: W = I for codes of 8 bits, at least I/2 for those of 4, low nibble first.

    Raises `BadData` for a scale or (unless `finite` is false) a code that is not finite, for a product beyond the dtype,
    and with `reversible` for a product from which the code cannot be told.
    """
    if out.dtype not in DTYPES:
        raise KconvError(f"{code.name} decodes to bf16, fp16 or fp32, not {out.dtype}")
    if not out.numel():
        return
    target = out if viewable(out, 2 * out.dtype.itemsize) else torch.empty_like(out, memory_format=torch.contiguous_format)
    low, high, special = _on_host(scales, _run_decode(codes, scales, code, target))
    if special:
        _patch_specials(codes, scales, code, target, finite)
    largest = max(code.largest, 23.0 if scales.offset is not None else 0.0)
    info = torch.finfo(target.dtype)
    if high * largest > info.max / 1.01:
        _refuse_overflow(target, codes, scales, code, info.max)
    if reversible and (special or low * code.step < 2 * info.smallest_normal * info.eps or high * largest > info.max / 1.01):
        _refuse_collapse(target, codes, scales, code)
    if target is not out:
        out.copy_(target)


def encode(tensor: Tensor, scales: Scales, code: Code, out: Tensor) -> None:
    """Values [N, O, I] into codes U8 [N, O, W], such that decoding gives the same bits; raises `BadData` (operand 0) if none do.

    Surplus nibbles of a wider W are zero bits.
    """
    if not tensor.numel():
        return
    _on_host(scales, False)
    dense = tensor.detach().contiguous()
    _run_encode(dense, scales, code, out)
    back = torch.empty_like(dense)
    if bool(_run_decode(out, scales, code, back)):
        _patch_specials(out, scales, code, back, finite=False)
    if not same_bits(back, dense):
        at = first(bits(back) != bits(dense))
        raise BadData(
            f"{float(dense[at]):g} has no {code.name} code at scale {scales.scale_at(at):g}",
            operand=0, position=scales.in_weight(at, dense.shape[1]),
            hint="the weights were changed after decoding: re-encode them (lossy) instead of using the kept scales",
        )  # fmt: skip


def _per_row(factor: Tensor, grid: Grid, rows: int) -> Tensor:
    """Scales [rows of the grid, columns] repeated for every row of the weight, [rows, columns]."""
    if factor.shape[0] == 1:
        return factor.expand(rows, -1)
    return factor.repeat_interleave(grid.height, 0)[:rows] if grid.height > 1 else factor


def unpack(codes: Tensor, code: Code, columns: int) -> Tensor:
    """One code a byte, U8 [..., columns]."""
    if code.per_byte == 1:
        return codes
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)[..., :columns]


def _by_columns(tensor: Tensor, factor: Tensor, width: int, operation: str) -> Tensor:
    full = tensor.shape[1] // width
    head, tail = tensor[:, : full * width], tensor[:, full * width :]
    if full:
        getattr(head.unflatten(1, (full, width)), operation)(factor[:, :full, None])
    if tail.numel():
        getattr(tail, operation)(factor[:, full:])
    return tensor


def _matrices(codes: Tensor, scales: Scales, out: Tensor) -> Iterator[tuple[Tensor, Scales, Tensor]]:
    """Weights as matrices with their scales; all of them as one where no tile crosses from one weight to the next."""
    if codes.shape[1] % scales.grid.height == 0:
        yield codes.flatten(0, 1), scales.matrix(None), out.flatten(0, 1)
        return
    for i in range(codes.shape[0]):
        yield codes[i], scales.matrix(i), out[i]


def _run_decode(codes: Tensor, scales: Scales, code: Code, out: Tensor) -> bool | Tensor:
    """Decodes; true, or nonzero in a tensor [1] of the device, when a code was not finite (its result is then to be patched)."""
    compiled = backend.compiled("scaled", codes.device.type)
    special: bool | Tensor = False
    for matrix, own, target in _matrices(codes.contiguous(), scales, out):
        done = None if compiled is None else compiled.decode(matrix, own, code, target)
        special = special | (_decode(matrix, own, code, target) if done is None else done)
    return special


def _decode(codes: Tensor, scales: Scales, code: Code, out: Tensor) -> bool:
    """Plain torch: one look-up of two fp32 numbers, product, rounding; chunk by chunk of rows."""
    rows, columns = out.shape
    height, grid = 2 * chunk_rows(columns, codes.device), scales.grid
    look_up = _LookUp(code, min(height, rows), codes)
    factor = _per_row(scales.factor, grid, rows)
    offset = None if scales.offset is None else _per_row(scales.offset, grid, rows)
    special = False
    for i in range(0, rows, height):
        chunk = codes[i : i + height]
        special |= look_up.has_special(chunk)
        number = look_up(chunk)[:, :columns]
        if offset is not None:
            _by_columns(number, offset[i : i + height], grid.width, "sub_")
        out[i : i + height].copy_(_by_columns(number, factor[i : i + height], grid.width, "mul_"))
    return special


class _LookUp:
    """The fp32 numbers of codes [R, W], in storage kept from chunk to chunk."""

    def __init__(self, code: Code, rows: int, codes: Tensor) -> None:
        pairs = code.per_byte == 2 or (codes.shape[1] % 2 == 0 and viewable(codes, 2))
        self.view = torch.uint16 if pairs and code.per_byte == 1 else torch.uint8
        self.table = (pair_values if pairs else values)(code, codes.device)
        width = codes.shape[1] // self.view.itemsize
        self.index = torch.empty((rows, width), dtype=torch.int32, device=codes.device)
        self.number = torch.empty(rows * width, dtype=self.table.dtype, device=codes.device)
        self.byte = torch.empty((rows, codes.shape[1]), dtype=torch.uint8, device=codes.device)
        self.code = code

    def has_special(self, codes: Tensor) -> bool:
        """Whether a code is not finite."""
        byte = self.byte[: codes.shape[0]]
        if self.code.hole < 256:
            return int(torch.bitwise_xor(codes, self.code.hole, out=byte).min()) == 0
        return self.code.limit < 128 and int(torch.bitwise_and(codes, 0x7F, out=byte).max()) >= self.code.limit

    def __call__(self, codes: Tensor) -> Tensor:
        index = self.index[: codes.shape[0]].copy_(codes.view(self.view))
        number = torch.index_select(self.table, 0, index.view(-1), out=self.number[: index.numel()])
        return number.view(torch.float32).view(codes.shape[0], -1)


def _specials(codes: Tensor, code: Code) -> Tensor:
    """Which codes (one a byte) are not finite."""
    if code.bits == 4:
        return torch.zeros_like(codes, dtype=torch.bool)
    return codes == code.hole if code.hole < 256 else (codes & 0x7F) >= code.limit


def _patch_specials(codes: Tensor, scales: Scales, code: Code, out: Tensor, finite: bool) -> None:
    """Refuses codes that are not finite, or gives them one bit pattern on every device: the quiet NaN of their sign."""
    mask = _specials(codes, code)
    at = first(mask)
    if finite:
        raise BadData(
            f"code 0x{int(codes[at]):02X} of {code.name} is {code.value(int(codes[at]))}",
            operand=0, position=scales.in_weight(at, codes.shape[1]),
            hint="the checkpoint is damaged here: fetch the file again, or ask its publisher",
        )  # fmt: skip
    wanted = codes[mask]
    number = values(code, codes.device)[wanted.long()].abs()
    size = torch.where(number.isnan(), _QUIET_NAN[out.dtype], bits(number.to(out.dtype)))
    signed = size | torch.where(wanted > 127, torch.iinfo(size.dtype).min, 0).to(size.dtype)
    bits(out)[mask] = signed


def _run_encode(tensor: Tensor, scales: Scales, code: Code, out: Tensor) -> None:
    compiled = backend.compiled("scaled", tensor.device.type)
    special = None if all_finite(tensor) else ~tensor.isfinite()
    source = tensor if special is None else torch.where(special, 0.0, tensor)
    for matrix, own, target in _matrices(source, scales, out):
        if compiled is None or not compiled.encode(matrix, own, code, target):
            _encode(matrix, own, code, target)
    if special is not None:
        _encode_specials(tensor, special, code, out)


def _encode(tensor: Tensor, scales: Scales, code: Code, out: Tensor) -> None:
    """Plain torch: quotient, rounded to bf16, looked up; chunk by chunk of rows."""
    table = nearest(code, tensor.device)
    (rows, columns), grid = tensor.shape, scales.grid
    divisor = _per_row(torch.where(scales.factor == 0, 1.0, scales.factor), grid, rows)
    offset = None if scales.offset is None else _per_row(scales.offset, grid, rows)
    height = 2 * chunk_rows(columns, tensor.device)
    space = torch.empty((min(height, rows), columns), dtype=torch.float32, device=tensor.device)
    for i in range(0, rows, height):
        chunk = tensor[i : i + height]
        quotient = _by_columns(space[: chunk.shape[0]].copy_(chunk), divisor[i : i + height], grid.width, "div_")
        if offset is not None:
            _by_columns(quotient, offset[i : i + height], grid.width, "add_")
        index = quotient.to(torch.bfloat16).view(torch.uint16).to(torch.int32)
        picked = torch.index_select(table, 0, index.view(-1)).view(index.shape)
        out[i : i + height].copy_(pack(picked, code, out.shape[1]))


def pack(codes: Tensor, code: Code, width: int) -> Tensor:
    """Codes, one a byte [R, I], as U8 [R, width]; surplus nibbles are zero bits."""
    if code.per_byte == 1:
        return codes
    padded = torch.nn.functional.pad(codes, (0, 2 * width - codes.shape[-1]))
    return padded[..., 0::2] | padded[..., 1::2] << 4


def _encode_specials(tensor: Tensor, special: Tensor, code: Code, out: Tensor) -> None:
    if code.bits == 4:
        return
    sign = torch.signbit(tensor[special]).to(torch.uint8) << 7
    nan = torch.where(tensor[special].isnan(), 0x7F, code.limit).to(torch.uint8) | sign
    out[special] = nan if code.hole > 255 else torch.full_like(nan, code.hole)


def _on_host(scales: Scales, special: bool | Tensor) -> tuple[float, float, bool]:
    """Smallest and largest magnitude of the scales, and whether `special`, in one transfer; raises `BadData` unless finite."""
    edges = scales.edges()
    mark = special.to(edges) if isinstance(special, Tensor) else edges.new_full((1,), special)
    low, high, found = torch.cat((edges, mark)).tolist()
    if low < 0:
        low, high = torch.stack(torch.aminmax(scales.factor.abs())).tolist()
    if not high < float("inf"):
        raise scales.not_finite()
    return low, high, bool(found)


def _refuse_overflow(out: Tensor, codes: Tensor, scales: Scales, code: Code, limit: float) -> None:
    beyond = ~out.isfinite() & ~_specials(unpack(codes, code, out.shape[-1]), code)
    if bool(beyond.any()):
        at = first(beyond)
        raise BadData(
            f"code times scale is beyond {limit:g}, the largest {str(out.dtype).removeprefix('torch.')}",
            operand=0, position=scales.in_weight(at, out.shape[1]), hint="choose a wider dtype",
        )  # fmt: skip


def _refuse_collapse(out: Tensor, codes: Tensor, scales: Scales, code: Code) -> None:
    again = torch.zeros_like(codes)
    _run_encode(out, scales, code, again)
    if torch.equal(again, codes):
        return
    different = unpack(again, code, out.shape[-1]) != unpack(codes, code, out.shape[-1])
    if bool(different.any()):
        at = first(different)
        raise BadData(
            f"{code.name} code {int(unpack(codes, code, out.shape[-1])[at])} cannot be told from its value "
            f"{float(out[at]):g} (scale {scales.scale_at(at):g})",
            operand=0, position=scales.in_weight(at, out.shape[1]),
            hint="convert without sidecar or to a wider dtype, or keep it as stored",
        )  # fmt: skip
