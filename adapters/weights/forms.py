"""What a stored weight is, decided from the tensors that lie under its module's name; the config only fills in and checks.

| tensors of a module (`X.` left out) | form |
|---|---|
| `weight` of a float dtype | plain |
| `weight` F8 (or U8, [O, I]) + `weight_scale` or `weight_scale_inv` | FP8; layout by the scale's shape (`kernels.geometry`) |
| the same with scales U8 or F8_E8M0, one per 32 | MXFP8 |
| `weight_packed` or `weight`, U8 [O, I/2] + `weight_scale` U8 or F8_E8M0 [O, I/32] | MXFP4 (compressed-tensors; Quark) |
| `weight_packed` U8 + `weight_scale` F8_E4M3 [O, I/16] + `weight_global_scale` F32 | NVFP4 (compressed-tensors) |
| `weight` U8 + `weight_scale` F8_E4M3 + `weight_scale_2` F32 | NVFP4 (ModelOpt) |
| `weight_packed` I32 + `weight_scale` (+ `weight_zero_point`) (+ `weight_shape`) | INT4 pack-quantized |
| `input_scale`, `input_global_scale`, `k_scale`, ... | activation scales: recorded, no part of a weight |

A block size comes from the config or the user. Where both are silent, the grid of the scale must fit exactly one of the
pairs of 32, 64 and 128, or the weight is refused.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kconv.adapters.weights.formats import KINDS, MX_GROUP, Fields, Format, Plain, format_of
from kconv.errors import KconvError
from kconv.kernels.geometry import layout_of, scale_shape
from kconv.spec import FLOATS, Spec
from kconv.transforms.base import Specs, Transform
from kconv.transforms.fp8 import CODES

WEIGHTS = ("weight_packed", "weight")
SCALES = ("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "weight_zero_point", "weight_shape",
          "weight_g_idx")  # fmt: skip
ACTIVATIONS = frozenset({
    "input_scale", "input_global_scale", "input_zero_point", "output_scale", "output_zero_point", "k_scale", "v_scale", "q_scale",
    "kv_scale", "prob_scale",
})  # fmt: skip
SUFFIXES = (*WEIGHTS, *SCALES)
EXPONENTS = ("U8", "F8_E8M0")
BLOCK_SIDES = (32, 64, 128)


class FormError(KconvError):
    """A module's tensors are no form that can be read; `suffix` is the tensor to name."""

    def __init__(self, suffix: str, message: str, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.suffix = suffix


@dataclass(frozen=True)
class Declared:
    """What a quantisation block says of one module; an empty field is not said. `kind` is `plain` for a module left out."""

    kind: str
    where: str = "quantization_config"
    block: tuple[int, int] | None = None
    group: int = 0
    code: str = ""
    symmetric: bool = True


@dataclass(frozen=True)
class Form(Fields):
    """How a weight is stored, and through its format (`formats`) what that means."""

    @property
    def plain(self) -> bool:
        """Whether it is not quantised."""
        return self.kind == Plain.kind

    @property
    def kept(self) -> tuple[str, ...]:
        """Suffixes of the tensors that must stay beside decoded values for the stored bits to come back."""
        return tuple(n for n in self.names[1:] if n != "weight_shape")

    @property
    def format(self) -> Format:
        """What is particular to its format."""
        return format_of(self)

    def decoder(self, dtype: str, columns: int, *, sidecar: bool) -> Transform:
        """The transform from the stored tensors of a weight [O, columns] to its values."""
        return self.format.decoder(self, dtype, columns, sidecar=sidecar)

    def specs(self, shape: tuple[int, ...]) -> Specs:
        """Specs of the stored tensors of a weight of `shape` [O, I]."""
        return self.format.specs(self, shape)

    @property
    def label(self) -> str:
        """The form in a few words, for people."""
        return self.format.label(self)

    def to_json(self) -> dict[str, Any]:
        """The fields that are not the defaults."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}

    @classmethod
    def from_json(cls, value: Any, where: str) -> Form:
        """The form of `to_json`; raises KconvError where it is none."""
        fields = {f.name: f for f in dataclasses.fields(cls)}
        if isinstance(value, dict) and not set(value) - set(fields) and value.get("kind") in list(KINDS):
            made: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()}
            form = cls(**made)
            named = isinstance(form.names, tuple) and len(form.names) >= KINDS[form.kind].least_names
            typed = all(isinstance(getattr(form, n), type(f.default)) for n, f in fields.items() if n not in ("kind", "block"))
            if typed and named and all(isinstance(n, str) for n in form.names):
                return form
        hint = "copy kconv.json again from the conversion it came from"
        raise KconvError(f"{where}: {value!r} is no form of a weight", hint=hint)


MXFP4 = Form("mxfp4", ("weight_packed", "weight_scale"), "U8", "U8")
NVFP4 = Form("nvfp4", ("weight_packed", "weight_scale", "weight_global_scale"), "U8", "F8_E4M3", whole=(1,))
FP8_BLOCK = Form("fp8", ("weight", "weight_scale"), "F8_E4M3", "BF16", "F8_E4M3", "block", (128, 128))
ENCODED = {"mxfp4": MXFP4, "nvfp4": NVFP4, "fp8-block": FP8_BLOCK}
"""Forms that weights are re-encoded to, as compressed-tensors names them."""
OWN_CONFIG = "give the config.json that belongs to these weights"
REFETCH = "fetch the files again, or ask the publisher: half of a quantised weight cannot be read"


def plain(dtype: str) -> Form:
    """A weight that is not quantised."""
    return Form("plain", stored=dtype)


def detect(found: Mapping[str, Spec], shape: tuple[int, ...], said: Declared | None = None,
           block: tuple[int, int] | None = None) -> Form:  # fmt: skip
    """The form of a module's tensors.

    Args:
        found: suffix -> spec, of the suffixes in `SUFFIXES`.
        shape: the weight's [O, I] by the config.
        said: what the config's quantisation block says of the module.
        block: the user's block size, for a config that is silent.

    Raises `FormError` for scales without codes, codes without scales, and what cannot be decided.
    """
    weights = [s for s in WEIGHTS if s in found]
    scales = [s for s in SCALES if s in found]
    if not weights:
        raise FormError(scales[0], "scales a weight that is not there", REFETCH)
    if len(weights) > 1:
        raise FormError("weight", "lies beside weight_packed: which of the two counts cannot be known", "remove one of them")
    name, spec = weights[0], found[weights[0]]
    if "weight_g_idx" in found:
        raise FormError("weight_g_idx", "orders the columns by activations, which kconv does not read", "export without actorder")
    if name == "weight" and (spec.dtype in FLOATS or spec.dtype not in (*CODES, "U8", "I8", "I32", "F4")):
        if scales:
            raise FormError(scales[0], f"scales nothing: the weight beside it is {spec}, not quantised", REFETCH)
        return plain(spec.dtype)
    form = _coded(name, found, shape, said, block)
    surplus = [s for s in scales if s not in form.names]
    if surplus:
        raise FormError(surplus[0], f"({found[surplus[0]]}) has no meaning beside {', '.join(form.names)} ({spec})", REFETCH)
    _agree(form, spec, said)
    return form


def _coded(name: str, found: Mapping[str, Spec], shape: tuple[int, ...], said: Declared | None,
           block: tuple[int, int] | None) -> Form:  # fmt: skip
    spec = found[name]
    if spec.dtype == "I32":
        return _int4(name, found, shape, said)
    scale = next((s for s in ("weight_scale", "weight_scale_inv") if s in found), None)
    if scale is None:
        if name == "weight_packed" and len(found) == 1:  # the plan then says that its scale is missing
            return Form("mxfp4", (name, "weight_scale"), spec.dtype, "U8")
        raise FormError(name, f"is {spec}, quantised, and has no scale (weight_scale or weight_scale_inv)", REFETCH)
    if spec.dtype in CODES or (spec.dtype == "U8" and spec.shape == shape):
        return _fp8(name, scale, found, shape, said, block)
    if found[scale].dtype in EXPONENTS:
        return Form("mxfp4", (name, scale), spec.dtype, found[scale].dtype)
    return _nvfp4(name, scale, found)


def _nvfp4(name: str, scale: str, found: Mapping[str, Spec]) -> Form:
    whole = {"weight_packed": "weight_global_scale", "weight": "weight_scale_2"}[name]
    if found[scale].dtype != "F8_E4M3":
        raise FormError(scale, f"is {found[scale]}; codes of 4 bits have scales U8, F8_E8M0 (MXFP4) or F8_E4M3 (NVFP4)", REFETCH)
    if whole not in found:
        raise FormError(scale, f"is {found[scale]} as of NVFP4, but {whole} is lacking", REFETCH)
    return Form("nvfp4", (name, scale, whole), "U8", "F8_E4M3", divides=name == "weight_packed", whole=found[whole].shape)


def _int4(name: str, found: Mapping[str, Spec], shape: tuple[int, ...], said: Declared | None) -> Form:
    scale = found.get("weight_scale")
    if name == "weight" or scale is None:
        raise FormError(name, f"is {found[name]}, packed words without weight_scale", REFETCH)
    groups = scale.shape[-1] if len(scale.shape) == 2 else 0
    if not groups or shape[1] % groups:
        raise FormError("weight_scale", f"is {scale}, which does not divide {shape[1]} columns into groups", REFETCH)
    symmetric = "weight_zero_point" not in found
    if symmetric and said and said.kind == "int4" and not said.symmetric:
        raise FormError(name, "is asymmetric by the config, but weight_zero_point is lacking", REFETCH)
    names = (name, "weight_scale", *(["weight_zero_point"] * (not symmetric)), *(["weight_shape"] * ("weight_shape" in found)))
    kept = found["weight_shape"].dtype if "weight_shape" in found else ""
    if scale.dtype not in ("BF16", "F16", "F32") or kept not in ("", "I32", "I64"):
        raise FormError("weight_scale", f"is {scale}, weight_shape {kept or 'absent'}: not INT4 pack-quantized", REFETCH)
    return Form("int4", names, "I32", scale.dtype, group=shape[1] // groups, symmetric=symmetric, shape=kept)


def _fp8(name: str, scale: str, found: Mapping[str, Spec], shape: tuple[int, ...], said: Declared | None,
         block: tuple[int, int] | None) -> Form:  # fmt: skip
    spec, of = found[name], found[scale]
    code = _code(name, spec, said)
    if of.dtype not in ("F32", "BF16", "F16", *EXPONENTS):
        raise FormError(scale, f"is {of}; scales of FP8 are F32, BF16, F16, U8 or F8_E8M0", REFETCH)
    known = said.block if said and said.block else block
    if said and said.block and block and block != said.block:
        text = f"is in blocks of {said.block[0]} x {said.block[1]} by {said.where}, --block says {block[0]} x {block[1]}"
        raise FormError(scale, text, "leave --block out")
    if of.dtype in EXPONENTS and of.shape == (shape[0], -(-shape[1] // MX_GROUP)):
        return Form("fp8", (name, scale), spec.dtype, of.dtype, code, "block", (1, MX_GROUP))
    try:
        one_block = known and of.shape == scale_shape("block", shape, known)  # [1, 1] of a small weight is its only block's
        layout = "block" if one_block else layout_of(shape, of.shape, known)
    except KconvError as e:
        if known:
            raise FormError(scale, f"is {of}: {e.message}", OWN_CONFIG) from e
        known, layout = _only_block(scale, of, shape)
    used = known if layout.startswith("block") else None
    if of.dtype == "U8" and used is None:
        raise FormError(scale, f"is {of}: bytes are exponents in blocks only, here they could mean anything", OWN_CONFIG)
    return Form("fp8", (name, scale), spec.dtype, of.dtype, code, layout, used)


def _only_block(suffix: str, scale: Spec, shape: tuple[int, ...]) -> tuple[tuple[int, int], str]:
    """The one block size of whose grid a scale can be, and its layout."""
    sizes = list(itertools.product(BLOCK_SIDES, BLOCK_SIDES))
    fits = [(b, layout) for b in sizes for layout in ("block", "block-4d") if scale.shape == scale_shape(layout, shape, b)]
    if len(fits) == 1:
        return fits[0]
    found = ", ".join(f"{a} x {b}" for (a, b), _ in fits)
    what = f"fits blocks of {found}" if fits else "fits no layout of scales"
    raise FormError(
        suffix, f"is {scale}, which {what} for a weight {list(shape)}, and the config names no block size",
        f"{OWN_CONFIG}, or the block size with --block, for example --block 128x128",
    )  # fmt: skip


def _code(name: str, spec: Spec, said: Declared | None) -> str:
    """The format of FP8 codes: the dtype, unless the config names FNUZ codes stored as F8_E4M3, or what U8 bytes are."""
    wanted = said.code if said else ""
    if not wanted:
        if spec.dtype == "U8":
            raise FormError(name, f"is {spec}: which FP8 format the bytes are is said nowhere", "name it in the config (fmt)")
        return spec.dtype
    if wanted not in CODES:
        raise FormError(name, f"is {wanted!r} by the config, no FP8 format that kconv knows", "correct the config (fmt)")
    if spec.dtype != "U8" and wanted.removesuffix("FNUZ") != spec.dtype.removesuffix("FNUZ"):
        raise FormError(name, f"is {spec}, the config says {wanted}", OWN_CONFIG)
    return wanted if spec.dtype in ("U8", wanted.removesuffix("FNUZ")) else spec.dtype


def _agree(form: Form, spec: Spec, said: Declared | None) -> None:
    """Refuses a weight quantised in another way than the config says; plain against quantised is a note, made elsewhere."""
    if said and said.kind not in ("plain", form.kind):
        text = f"is {spec}, stored as {form.label}; {said.where} says {said.kind.upper()}"
        raise FormError(form.names[0], text, f"{OWN_CONFIG}, or correct its quantisation block")
