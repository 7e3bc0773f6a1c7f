"""Every registered format has all its parts, and its forms are told from all others."""

from __future__ import annotations

import json

import pytest

from kconv.adapters.weights.formats import FORMATS, format_of
from kconv.adapters.weights.forms import FP8_BLOCK, MXFP4, NVFP4, Form, detect, plain
from kconv.adapters.weights.written import block_of
from kconv.spec import Spec

SHAPE = (128, 256)
MXFP8 = Form("fp8", ("weight", "weight_scale"), "F8_E4M3", "U8", "F8_E4M3", "block", (1, 32))
INT4 = Form("int4", ("weight_packed", "weight_scale", "weight_shape"), "I32", "BF16", group=32, shape="I64")
SAMPLES = {"plain": plain("BF16"), "mxfp4": MXFP4, "nvfp4": NVFP4, "int4": INT4, "mxfp8": MXFP8, "fp8": FP8_BLOCK}
QUANTISED = sorted(set(FORMATS) - {"plain"})


def test_every_registered_format_is_looked_at_here() -> None:
    assert SAMPLES.keys() == FORMATS.keys()
    assert {name for name, form in SAMPLES.items() if format_of(form) is FORMATS[name]} == set(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_a_form_is_detected_from_its_own_specs_and_comes_back_from_the_manifest(name: str) -> None:
    form = SAMPLES[name]
    assert detect(dict(zip(form.names, form.specs(SHAPE), strict=True)), SHAPE, block=form.block) == form
    assert Form.from_json(json.loads(json.dumps(form.to_json())), "here") == form


@pytest.mark.parametrize("name", QUANTISED)
def test_a_decoder_makes_values_of_the_weights_shape_from_the_specs(name: str) -> None:
    form = SAMPLES[name]
    values = form.decoder("BF16", SHAPE[1], sidecar=False).forward_specs(form.specs(SHAPE))
    assert values == (Spec("BF16", SHAPE),)
    encoder = form.format.encoder(form, "BF16")
    assert encoder is None or encoder.forward_specs(values) == form.specs(SHAPE)


@pytest.mark.parametrize("name", QUANTISED)
def test_a_form_has_a_label_and_words_in_a_quantisation_block_of_its_own(name: str) -> None:
    form = SAMPLES[name]
    block = block_of({"self_attn.q_proj.weight": [form]}, [])
    assert block is not None
    assert block["format"] == form.format.format
    others = [f.format for n, f in FORMATS.items() if n != name]
    assert form.format.format not in others
    assert form.label not in [other.label for n, other in SAMPLES.items() if n != name]
