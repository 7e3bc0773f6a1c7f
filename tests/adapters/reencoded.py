"""The small golden K3 re-encoded by compressed-tensors 0.20 or by the rules of ModelOpt and Quark.

| function | makes |
|---|---|
| `encode(form, weight)` | the stored tensors of a weight by suffix, and the values that the library itself decodes |
| `reencode(draft, choice)` | a checkpoint whose weights are stored as `choice(module)` says, and its expected values |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.builders import Draft
from tests.unit.test_kernels_oracles import FP8, MXFP4, MXFP8, NVFP4, compressor, decompressed, scheme

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
BLOCK = (32, 64)
Encoded = tuple[dict[str, Tensor], Tensor]


def _through(name: str, given: dict[str, Tensor], **args: Any) -> Encoded:
    """What a library's compressor stores, and what its decompressor makes of it."""
    state = compressor(name).compress(given, scheme(**args))
    return state, decompressed(name, state, **args).contiguous()


def _tiles(weight: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest magnitude of each tile [ceil(O/b0), ceil(I/b1)], partial tiles at the edges included."""
    rows, columns = (-(-n // b) for n, b in zip(weight.shape, block, strict=True))
    padded = torch.zeros(rows * block[0], columns * block[1])
    padded[: weight.shape[0], : weight.shape[1]] = weight.abs()
    return padded.view(rows, block[0], columns, block[1]).amax((1, 3))


def _scale(top: Tensor) -> Tensor:
    return (top / 448).clamp(min=1e-9)


def fp8_block(weight: Tensor) -> Encoded:
    if any(n % b for n, b in zip(weight.shape, BLOCK, strict=True)):
        return fp8_inverse(weight, "weight_scale", torch.bfloat16)  # compressed-tensors wants whole tiles
    args = {**FP8, "strategy": "block", "block_structure": list(BLOCK)}
    return _through("float-quantized", {"weight": weight, "weight_scale": _scale(_tiles(weight, BLOCK)).bfloat16()}, **args)


def fp8_inverse(weight: Tensor, suffix: str = "weight_scale_inv", dtype: torch.dtype = torch.float32,
                block: tuple[int, int] = BLOCK) -> Encoded:  # fmt: skip
    """DeepSeek's layout by its rule: code times the scale of its tile, in fp32."""
    scale = _scale(_tiles(weight, block)).to(dtype)
    spread = _spread(scale, weight, block)
    return {"weight": _codes(weight, spread), suffix: scale}, _product(weight, spread)


def fp8_modelopt(weight: Tensor) -> Encoded:
    """ModelOpt's 4-D block scales; its blocks are 128 x 128."""
    state, values = fp8_inverse(weight, "weight_scale", block=(128, 128))
    return {**state, "weight_scale": state["weight_scale"][:, None, :, None]}, values


def fp8_quark(weight: Tensor) -> Encoded:
    """Quark's per-channel scales [O]."""
    scale = _scale(weight.abs().amax(1).float())
    return {"weight": _codes(weight, scale[:, None]), "weight_scale": scale}, _product(weight, scale[:, None])


def fp8_channel(weight: Tensor) -> Encoded:
    given = {"weight": weight, "weight_scale": _scale(weight.abs().amax(1, keepdim=True).float()).bfloat16()}
    return _through("float-quantized", given, **FP8, strategy="channel")


def fp8_tensor(weight: Tensor) -> Encoded:
    given = {"weight": weight, "weight_scale": _scale(weight.abs().max().float()).bfloat16().reshape(1)}
    return _through("float-quantized", given, **FP8, strategy="tensor")


def mxfp8(weight: Tensor) -> Encoded:
    top = weight.view(weight.shape[0], -1, 32).abs().amax(-1).float()
    scale = torch.exp2(torch.frexp(top.clamp(min=1e-9)).exponent.float() - 9).bfloat16()
    return _through("mxfp8-quantized", {"weight": weight, "weight_scale": scale}, **MXFP8)


def mxfp4(weight: Tensor) -> Encoded:
    top = weight.view(weight.shape[0], -1, 32).abs().amax(-1).float()
    scale = torch.exp2(torch.frexp(top.clamp(min=1e-9)).exponent.float() - 3).bfloat16()
    return _through("mxfp4-pack-quantized", {"weight": weight, "weight_scale": scale}, **MXFP4)


def mxfp4_quark(weight: Tensor) -> Encoded:
    state, values = mxfp4(weight)
    return {"weight": state["weight_packed"], "weight_scale": state["weight_scale"]}, values


def nvfp4(weight: Tensor) -> Encoded:
    whole = (448 * 6 / weight.abs().max().float()).reshape(1)
    top = weight.view(weight.shape[0], -1, 16).abs().amax(-1).float()
    scale = (top / 6 * whole).clamp(min=2.0**-9).to(torch.float8_e4m3fn).float()
    given = {"weight": weight, "weight_scale": scale, "weight_global_scale": whole}
    state, values = _through("nvfp4-pack-quantized", given, **NVFP4)
    return state | {"input_global_scale": torch.ones(1)}, values


def nvfp4_modelopt(weight: Tensor) -> Encoded:
    """ModelOpt's names over codes of its rule: value = code x scale x weight_scale_2; powers of two, so that it is exact."""
    whole = torch.tensor(2.0**-8)
    top = weight.view(weight.shape[0], -1, 16).abs().amax(-1).float()
    scale = torch.exp2(torch.frexp(top.clamp(min=2.0**-8)).exponent.float() - 3) / whole
    scale = scale.to(torch.float8_e4m3fn).float()
    given = {"weight": weight, "weight_scale": scale, "weight_global_scale": (1 / whole).reshape(1)}
    state, values = _through("nvfp4-pack-quantized", given, **NVFP4)
    stored = {"weight": state["weight_packed"], "weight_scale": state["weight_scale"], "weight_scale_2": whole}
    return stored | {"input_scale": torch.tensor(1.0)}, values


def int4(weight: Tensor) -> Encoded:
    scale = (weight.view(weight.shape[0], -1, 32).abs().amax(-1).float() / 7).clamp(min=1e-9).bfloat16()
    return _through("pack-quantized", {"weight": weight, "weight_scale": scale}, **INT4)


def _spread(scale: Tensor, weight: Tensor, block: tuple[int, int]) -> Tensor:
    return scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: weight.shape[0], : weight.shape[1]]


def _codes(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight.float() / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)


def _product(weight: Tensor, scale: Tensor) -> Tensor:
    return (_codes(weight, scale).float() * scale.float()).bfloat16()


CT_FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8_block": ("float-quantized", {**FP8, "strategy": "block", "block_structure": list(BLOCK)}),
    "fp8_channel": ("float-quantized", {**FP8, "strategy": "channel"}),
    "fp8_tensor": ("float-quantized", {**FP8, "strategy": "tensor"}),
    "mxfp8": ("mxfp8-quantized", {**MXFP8, "scale_dtype": "torch.uint8"}),
    "mxfp4": ("mxfp4-pack-quantized", {**MXFP4, "scale_dtype": "torch.uint8"}),
    "nvfp4": ("nvfp4-pack-quantized", {**NVFP4, "scale_dtype": "torch.float8_e4m3fn"}),
    "int4": ("pack-quantized", INT4),
}
ENCODERS: dict[str, Callable[[Tensor], Encoded]] = {
    f.__name__: f
    for f in (fp8_block, fp8_inverse, fp8_modelopt, fp8_quark, fp8_channel, fp8_tensor, mxfp8, mxfp4, mxfp4_quark,
              nvfp4, nvfp4_modelopt, int4)
}  # fmt: skip


def plain_weights(draft: Draft) -> dict[str, Tensor]:
    """Module -> its matrix; MXFP4 experts as compressed-tensors decodes them."""
    found: dict[str, Tensor] = {}
    for name, value in draft.tensors.items():
        module, _, suffix = name.rpartition(".")
        if suffix == "weight_packed":
            state = {"weight_packed": value, "weight_scale": draft.tensors[module + ".weight_scale"]}
            found[module] = decompressed("mxfp4-pack-quantized", state, **MXFP4).bfloat16()
        elif suffix == "weight" and value.dim() == 2:
            found[module] = value
    return found


def reencode(draft: Draft, choice: Callable[[str], str | None]) -> dict[str, Tensor]:
    """Stores each module in the form `choice` names (None: as it is); returns module -> values of those that changed."""
    expected: dict[str, Tensor] = {}
    for module, weight in plain_weights(draft).items():
        form = choice(module)
        if form is None:
            continue
        state, values = ENCODERS[form](weight.contiguous())
        for suffix in ("weight", "weight_packed", "weight_scale"):
            draft.tensors.pop(f"{module}.{suffix}", None)
        draft.tensors |= {f"{module}.{suffix}": t.contiguous().clone() for suffix, t in state.items()}
        expected[module] = values
    draft.text.pop("quantization_config", None)
    return expected


def ct_block(**groups: tuple[str, list[str]]) -> dict[str, Any]:
    """A block of compressed-tensors: group name -> (form, targets)."""
    made = {
        name: {"targets": targets, "format": CT_FORMATS[form][0],
               "weights": {"symmetric": True, "dynamic": False, **CT_FORMATS[form][1]}}
        for name, (form, targets) in groups.items()
    }
    return {"quant_method": "compressed-tensors", "config_groups": made, "ignore": [], "quantization_status": "compressed",
            "format": CT_FORMATS[next(iter(groups.values()))[0]][0] if len(groups) == 1 else "mixed-precision"}  # fmt: skip
