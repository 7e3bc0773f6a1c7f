"""No strange value in a draft's config.json makes a traceback, in no dialect, at no level, published or native."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kconv
from kconv.adapters.drafts.adapter import describe, is_draft, layouts
from kconv.adapters.drafts.reading import READ, read_draft_config
from kconv.checkpoint.reading import Checkpoint, open_checkpoint
from kconv.errors import KconvError
from kconv.json_types import fits, misfits
from kconv.modeling.drafts.dflash2 import DFlash2Config, DFlash2DraftModel
from kconv.modeling.drafts.eagle3 import Eagle3Config, Eagle3DraftModel
from kconv.options import Options
from kconv.speculative import load_draft
from kconv.synthesis.drafts import KINDS
from kconv.synthesis.families import synthesize
from tests.adapters.test_drafts_roundtrip import make

STRANGE: list[Any] = [
    None, "x", 3.5, -1, 0, True, [], {}, [None], ["a"], [[1]], {"a": 1}, {"rope_type": 5}, 10**30, float("nan"), float("inf"),
    [1, 2, 3],
]  # fmt: skip
ELSEWHERE = (
    "architectures", "dflash_config", "dtype", "eagle_config", "id2label", "model_type", "num_target_layers", "rope_parameters",
    "rope_scaling", "rope_theta", "tap_convention", "transformer_layer_config", "torch_dtype",
)  # fmt: skip
EVERY = 11  # of all pairs of key and value; prime to the number of values, so that each key meets several of them


def paths(config: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from paths(value, (*above, key))


def spoiled(config: dict[str, Any], offset: int) -> Iterator[tuple[tuple[str, ...], Any, dict[str, Any]]]:
    keys = list(dict.fromkeys([*paths(config), *((k,) for k in (*READ, *ELSEWHERE))]))
    pairs = [(path, value) for path in keys for value in STRANGE]
    for path, value in pairs[offset::EVERY]:
        made = copy.deepcopy(config)
        level = made
        for key in path[:-1]:
            level = level[key]
        level[path[-1]] = copy.deepcopy(value)
        yield path, value, made


def survives(checkpoint: Checkpoint, config: dict[str, Any]) -> None:
    """Reading, planning and describing give a result or a KconvError."""
    strange = copy.copy(checkpoint)
    strange.config = config
    if not is_draft(config):
        return
    for use in (lambda: layouts(strange, Options()), lambda: describe(strange)):
        with contextlib.suppress(KconvError):
            use()


@pytest.mark.parametrize("side", ["published", "native"])
@pytest.mark.parametrize("kind", KINDS)
def test_strange_values(tmp_path: Path, kind: str, side: str) -> None:
    folder = make(tmp_path / "src", kind)
    if side == "native":
        kconv.convert(folder, tmp_path / "native")
        folder = tmp_path / "native"
    checkpoint = open_checkpoint(folder)
    for path, value, config in spoiled(json.loads((folder / "config.json").read_text()), tuple(KINDS).index(kind)):
        try:
            survives(checkpoint, config)
        except Exception as e:
            raise AssertionError(f"{'.'.join(path)} = {value!r}") from e


def test_every_wrong_value_is_named() -> None:
    wrong = {"hidden_size": "128", "layer_types": "full_attention", "rms_norm_eps": float("nan")}
    config = {**synthesize("k25-dflash").config, **wrong}
    config["rope_scaling"] = {**config["rope_scaling"], "factor": [8]}
    with pytest.raises(KconvError) as e:
        read_draft_config(config)
    for said in (
        "hidden_size is '128', it should be a positive whole number or null",
        "layer_types is 'full_attention', it should be a list, each a string or null",
        "rms_norm_eps is nan, it should be a finite number",
        "rope_scaling.factor is [8], it should be a finite number or null",
    ):
        assert said in str(e.value)


def test_missing_sizes_and_strange_declarations() -> None:
    config = {k: v for k, v in synthesize("k3-dflash2").config.items() if k not in ("hidden_size", "vocab_size")}
    with pytest.raises(KconvError, match=r"(?s)hidden_size is missing.*vocab_size is missing"):
        read_draft_config(config)
    for declared in ({"block_size": "4"}, {"attention_factor": "x"}, {"target_layer_ids": 3}):
        with pytest.raises(KconvError, match=f"the declared {next(iter(declared))} is"):
            read_draft_config(synthesize("k3-dspark").config, declared=declared)


def test_kinds() -> None:
    assert fits(3, "float")
    assert fits((1, 2), "list[int]")
    assert fits(None, "size | None")
    for value, kind in ((True, "int"), (0, "size"), (-1, "count"), (2**31 + 1, "int"), (5000, "layers"), (float("inf"), "float")):
        assert not fits(value, kind)
    assert misfits({"a": 1, "other": object()}, {"a": "str"}, "x.") == ["x.a is 1, it should be a string"]


MLA: dict[str, Any] = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}


@pytest.mark.parametrize("build", [
    lambda: Eagle3DraftModel(Eagle3Config(**SMALL, **MLA, target_layer_ids=[0, 1, 2])),
    lambda: DFlash2DraftModel(DFlash2Config(**SMALL, mask_token_id=5, target_layer_ids=[0, 2], block_size=4)),
])  # fmt: skip
def test_a_native_config_may_leave_defaults_out(build: Any, tmp_path: Path) -> None:
    """What a class takes by default, a config.json need not say: an Eagle3 head's attention, number of layers and tables."""
    torch.manual_seed(0)
    model = build().eval()
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    defaults = type(model.config).defaults()
    short = {k: v for k, v in written.items() if k not in defaults or v != defaults[k]}
    assert "num_hidden_layers" not in short
    (tmp_path / "config.json").write_text(json.dumps(short))
    loaded = load_draft(tmp_path)
    state = loaded.state_dict()
    assert {n: t.shape for n, t in state.items()} == {n: t.shape for n, t in model.state_dict().items()}
    assert all(torch.equal(state[n], t) for n, t in model.state_dict().items())
