"""The digests of plans, pinned: a stored plan is cited by its digest, so no renaming and no rewriting may change one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kconv
from kconv.transforms.base import Par, Same, Seq, Transform, stated
from kconv.transforms.dtype import Cast
from kconv.transforms.fp8 import Fp8
from kconv.transforms.int4 import Int4
from kconv.transforms.inverse import Inverse
from kconv.transforms.mxfp4 import Mxfp4
from kconv.transforms.nvfp4 import Nvfp4
from kconv.transforms.quantize import QuantizeFp8, QuantizeMxfp4, QuantizeNvfp4
from kconv.transforms.shape import Fuse, Reshape, Transpose, TrimZeros
from kconv.transforms.side_by_side import SideBySide
from kconv.transforms.vocab import VocabularyMaps

Chain = tuple[dict[str, Any], ...]
"""Conversions in a row, by their options: all but the last are made, the last is planned."""

NATIVE: dict[str, Any] = {"vision": "keep"}
BACK = {"to": "hf"}

PLANS: dict[str, tuple[str, dict[str, Any], Chain]] = {
    "K3, published experts": ("k3", {}, (NATIVE,)),
    "K3, no vision": ("k3", {}, ({"vision": "drop"},)),
    "K3, experts decoded beside their scales": ("k3", {}, ({**NATIVE, "experts": "bf16"},)),
    "K3, experts decoded without scales": ("k3", {}, ({**NATIVE, "experts": "fp32", "sidecar": False},)),
    "K3, cast to fp32": ("k3", {}, ({**NATIVE, "dtype": "float32"},)),
    "K3, two layers": ("k3", {"dtype": "float32"}, ({**NATIVE, "layers": (0, 1)},)),
    "K3, plain experts quantised to MXFP4": ("k3", {"plain_experts": True}, ({**NATIVE, "experts": "mxfp4"},)),
    "K3, to Hugging Face again": ("k3", {}, (NATIVE, BACK)),
    "K3, to text-only Hugging Face": ("k3", {"dotted_res": True}, ({"to": "hf-text"},)),
    "K3, to NVFP4": ("k3", {}, ({**BACK, "experts": "nvfp4"},)),
    "K3, from NVFP4": ("k3", {}, ({**BACK, "experts": "nvfp4"}, {**NATIVE, "experts": "bf16"})),
    "K3, to FP8 experts": ("k3", {}, ({**BACK, "experts": "fp8-block", "block": (32, 32)},)),
    "K3, from FP8 weights": ("k3", {"plain_experts": True}, ({**BACK, "weights": "fp8-block", "block": (32, 32)}, NATIVE)),
    "K3, to NeMo": ("k3", {}, (NATIVE, {"to": "nemo"})),
    "K3.1": ("k31", {}, ({**NATIVE, "indexer_eps": 1e-6},)),
    "K3.1, to Hugging Face again": ("k31", {"index_bias": False}, ({**NATIVE, "indexer_eps": 1e-6}, BACK)),
    "Kimi-Linear": ("kimi-linear", {}, ({},)),
    "K2, FP8 blocks": ("k2", {}, ({},)),
    "K2, FP8 blocks decoded without scales": ("k2", {}, ({"sidecar": False},)),
    "K2, bf16": ("k2", {"format": "bf16"}, ({}, BACK)),
    "K2.5, INT4": ("k25", {}, (NATIVE,)),
    "K2.5, to Hugging Face again": ("k25", {}, (NATIVE, BACK)),
    "DFlash": ("k3-dflash", {}, ({},)),
    "DFlash of K2.5": ("k25-dflash", {}, ({}, BACK)),
    "DFlash2": ("k3-dflash2", {}, ({},)),
    "DSpark": ("k3-dspark", {}, ({},)),
    "DSpark, grouped queries": ("k3-dspark-gqa", {}, ({}, BACK)),
    "DSpark of speculators": ("speculators-dspark", {}, ({},)),
    "Eagle3": ("k3-eagle3", {}, ({},)),
    "Eagle3, to Hugging Face again": ("k3-eagle3", {}, ({}, BACK)),
}

PINNED = {
    "K3, published experts": "f8a2dd8c7ec9fd96d94451ab8dfa5de3a592de88b82b74fc3e00e45d8469ae8f",
    "K3, no vision": "0abe2966deed96cc9582d03bdcb1ce7bcc59eb55f1f64c6dd28eea1d3358d2f6",
    "K3, experts decoded beside their scales": "968399a2326f53abc854c946dd4c266fde073315d19728bd54b952e89c5b1981",
    "K3, experts decoded without scales": "040f2ca2df4c69a6f152646945bcfc9fa679f6275867637238a12cedc79cc85d",
    "K3, cast to fp32": "6b80f299dd2cc30694f3b22e72a6bddced48ccaec2f1d0437428967d993519c6",
    "K3, two layers": "af3ef9f0a50c1192e5b161e3d7367284ae48fb3479960f77afae493b19348c9a",
    "K3, plain experts quantised to MXFP4": "9ababdaab7a2e4d1aab049e5678c4c6dc0170544e8cd3f316c9247ce291540b2",
    "K3, to Hugging Face again": "087296d5faeee70a797b25b1681ab01e9c9016424d800917dd70aede99022bfe",
    "K3, to text-only Hugging Face": "1f6ef113af3e1a81d13c15b375f72f830f302a101126345efdb958113236afb9",
    "K3, to NVFP4": "7f81d525a88d77ecb8aa3d6b368efc437f724d4f682b81a576050400d1982f11",
    "K3, from NVFP4": "fcd55e34413bfcc79e69e22967d7a38076d27cf0e743190903f882399aedd04f",
    "K3, to FP8 experts": "e103bccd8a175d1cd20df7a998639c43c727585b880be486c49b0caa59296061",
    "K3, from FP8 weights": "60c38895198b3c900a816bfca4e85809663dabb4cadbaa6d2541f0cdd586a739",
    "K3, to NeMo": "5f7e3bdd715510370116142aa4281eca7cd95a5802c67fb21c3548feea04d072",
    "K3.1": "293b9835e6590650f63d8ae9f5c65aea1a7e6c6c1c1b85c3c582699335e5d82a",
    "K3.1, to Hugging Face again": "c8c06a574ff0022c8b3562207cd39604cb25b0bece6422caa7c1871451fd5213",
    "Kimi-Linear": "5ca6d759a0346f46a81e37deb0b5197035d5b12deba0b83781eaf47326d9a880",
    "K2, FP8 blocks": "3b4b63719f848ab2395d6793ce2f010d250e3ce3469c49288f161ad24cbc7ea6",
    "K2, FP8 blocks decoded without scales": "75faf617ddb4c670a279b9ce1ba383377215edfa41cf3aa22d926eed4a6ec441",
    "K2, bf16": "791aa401797b2ec1b7b10fdd26cc39709489ddbbd52dfb71282238f45a3aaddc",
    "K2.5, INT4": "63858e74ab0c77214cadb3e16afb93994f2e42213d627b741539f0be98238831",
    "K2.5, to Hugging Face again": "6e8e94f6733b6065e92689bd0e0abaaf7cf50ef0f61e7dd2240cc58a26ef7627",
    "DFlash": "140b2980319a5bd16b014a0b4e6f871c2586a9bf1e833e211a21af55812d9056",
    "DFlash of K2.5": "ebb2d946402493a61cc8189a64b02b4d2f535a15b649a08e0d963ef8b507a645",
    "DFlash2": "ccf2b34273cd01b032694b0cc215d09dceec8407e9d44f60b323f7864052b775",
    "DSpark": "33fa30c9729d163c0a25d146a55529d2b8483479d76bd5ca0d96c39c193d5e69",
    "DSpark, grouped queries": "9129b4b3829a5f11298367b7303394d7a6c6bdfb67d9bd5ed59506981e0cb8f4",
    "DSpark of speculators": "c7df8a67025dba959af16bf1e2d9570067f3f72e4dac5a4f7837f37fd558ffd3",
    "Eagle3": "d321810a125132791aea6392fb51d26dc57333569d0672d9c706238bf6f9bb71",
    "Eagle3, to Hugging Face again": "eb31ff546ef3fd7bf3e034384075f887cdd7041a92b522ce70a5065650aecbc1",
}


def digest(family: str, shape: dict[str, Any], chain: Chain, folder: Path) -> str:
    source = folder / "made"
    kconv.tiny(family, source, **shape)
    for i, options in enumerate(chain[:-1]):
        kconv.convert(source, folder / str(i), **options)
        source = folder / str(i)
    return kconv.plan(source, **chain[-1]).check().digest


@pytest.mark.parametrize("title", PLANS)
def test_digest_of_a_plan_never_changes(title: str, tmp_path: Path) -> None:
    family, shape, chain = PLANS[title]
    assert digest(family, shape, chain, tmp_path) == PINNED[title]


STEPS: list[tuple[Transform, str]] = [
    (Same(), "Same()"),
    (Seq((Same(),)), "Seq(steps=(Same(),))"),
    (Par((Same(), Same()), (1, 2), (1, 2)), "Par(steps=(Same(), Same()), lefts=(1, 2), rights=(1, 2))"),
    (SideBySide(Same(), 2), "Abreast(iso=Same(), parts=2)"),
    (Cast("F32", "BF16", lossy=True), "Cast(left='F32', right='BF16', lossy=True)"),
    (
        Fp8("F32", False, "block", (32, 64), "F8_E4M3FNUZ", "BF16", "U8"),
        "Fp8(dtype='F32', sidecar=False, layout='block', block=(32, 64), code='F8_E4M3FNUZ', scale_dtype='BF16', stored='U8')",
    ),
    (
        Int4("F16", True, 96, 0, False, "F32", ""),
        "Int4(dtype='F16', sidecar=True, columns=96, group_size=0, symmetric=False, scale_dtype='F32', shape_dtype='')",
    ),
    (Inverse(Same()), "Inverse(iso=Same())"),
    (
        Mxfp4("F32", False, 16, "F8_E8M0", "F4"),
        "Mxfp4(dtype='F32', sidecar=False, group_size=16, scale_dtype='F8_E8M0', packed_dtype='F4')",
    ),
    (Nvfp4("F16", True, False, ()), "Nvfp4(dtype='F16', sidecar=True, divides=False, global_shape=())"),
    (
        QuantizeFp8("F32", "block", (32, 32), "F8_E4M3", "BF16"),
        "QuantizeFp8(dtype='F32', layout='block', block=(32, 32), code='F8_E4M3', scale_dtype='BF16')",
    ),
    (QuantizeMxfp4("F32", 16), "QuantizeMxfp4(dtype='F32', group_size=16)"),
    (QuantizeNvfp4("F32", False, ()), "QuantizeNvfp4(dtype='F32', divides=False, global_shape=())"),
    (Fuse(1, (2, 3)), "Fuse(axis=1, sizes=(2, 3), parts=0)"),
    (Reshape((6,), (2, 3)), "Reshape(left=(6,), right=(2, 3))"),
    (Transpose((1, 0)), "Transpose(axes=(1, 0))"),
    (TrimZeros(3, 128), "TrimZeros(size=3, padded=128, axis=0)"),
    (VocabularyMaps(128, 512), "VocabularyMaps(draft=128, target=512)"),
]


@pytest.mark.parametrize(("step", "pinned"), STEPS, ids=[type(step).__name__ for step, _ in STEPS])
def test_identity_of_a_step_never_changes(step: Transform, pinned: str) -> None:
    assert step.identity() == pinned


def test_every_step_has_its_identity_pinned() -> None:
    def made_of(base: type) -> set[type]:
        subclasses: list[type] = base.__subclasses__()
        return {base}.union(*map(made_of, subclasses))

    steps = {step for step in made_of(Transform) if step.__module__.startswith("kconv.") and "identity" in vars(step)}
    assert steps - {Transform} == {type(step) for step, _ in STEPS}


def test_a_step_that_comes_to_mean_something_else_has_another_identity() -> None:
    assert stated("Cast", 2, left="F32") == "Cast.2(left='F32')"
    with pytest.raises(TypeError):
        stated("Cast", left=[1])
