"""Native drafts without a published past: the config they are published with says everything runtimes otherwise guess."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import kconv
from kconv.adapters.drafts.reading import read_draft_config
from kconv.adapters.drafts.writing import NOT_PUBLISHED, serving_config
from kconv.errors import KconvError
from kconv.modeling.drafts import config_class
from kconv.speculative import load_draft
from kconv.synthesis.drafts import KINDS
from tests.adapters.test_drafts_roundtrip import make

PUBLISHABLE = [kind for kind in KINDS if kind != "speculators-dspark"]


def native(folder: Path, kind: str) -> Path:
    """A native draft as training leaves it: no manifest."""
    kconv.convert(make(folder / "src", kind), folder / "native")
    (folder / "native" / "kconv.json").unlink()
    return folder / "native"


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("kind", PUBLISHABLE)
def test_published_and_read_back(tmp_path: Path, kind: str) -> None:
    source = native(tmp_path, kind)
    kconv.convert(source, tmp_path / "hf", to="hf")
    before, after = load_draft(source), load_draft(tmp_path / "hf")
    assert before.state_dict().keys() == after.state_dict().keys()
    assert all(torch.equal(t, after.state_dict()[n]) for n, t in before.state_dict().items())
    ignored = {*NOT_PUBLISHED, "last_tap_normed"}
    a, b = ({k: getattr(m.config, k) for k in m.config.kinds() if k not in ignored} for m in (before, after))
    assert a == b
    assert before.config.owns_embed_tokens == after.config.owns_embed_tokens


def test_what_runtimes_guess_is_written() -> None:
    fields = config_class("dflash_kimi_k25")(**read_draft_config(config_of(GOLDEN)).config)
    written = serving_config(fields)
    assert written["block_size"] == written["dflash_config"]["block_size"] == 4
    assert written["sample_from_anchor"] is False
    assert written["mask_token_id"] == written["dflash_config"]["mask_token_id"] == 508
    assert written["target_layer_ids"] == written["dflash_config"]["target_layer_ids"] == [1, 4, 7]
    assert written["num_target_layers"] == written["target_num_hidden_layers"] == 9
    assert written["is_causal"] is False
    assert written["layer_types"] == ["full_attention"] * 3
    assert written["sliding_window"] is None
    for block in ("rope_parameters", "rope_scaling"):
        assert written[block]["attention_factor"] == 1.0
        assert written[block]["rope_type"] == "yarn"
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 50000.0
    assert "rope_theta" not in written["rope_scaling"]


GOLDEN = Path(__file__).parents[1] / "data/golden/k25-dflash-draft"


def test_nothing_of_the_target_and_no_rope_on_nope(tmp_path: Path) -> None:
    """NeMo's K3 config leaves a theta, a head_dim and the target's MoE keys; none of it is true of the draft."""
    published = config_of(make(tmp_path / "src", "k3-dflash"))
    assert "rope_theta" in published or "rope_parameters" in published
    written = serving_config(read_draft_config(published).config)
    assert not [k for k in written if k.startswith("rope") or "expert" in k or "moe" in k]
    assert not {"auto_map", "quantization_config", "head_dim", "linear_attn_config", "kda_layers"} & set(written)
    assert written["mla_use_nope"] is True
    assert written["mla_norm_eps"] == 1e-6
    assert written["aux_hidden_stream"] == "prefix"


def test_sliding_layers_keep_their_causality() -> None:
    published = copy.deepcopy(config_of(GOLDEN))
    published.update(layer_types=["sliding_attention"] * 2 + ["full_attention"], sliding_window=8, use_sliding_window=True)
    published["dflash_config"]["target_layer_ids"] = [1, 4]  # two taps for three layers: z-lab's form, not MAX's
    for stated, causal in ((None, [True, True, False]), (False, [False] * 3), (True, [True] * 3)):
        if stated is not None:
            published["is_causal"] = stated
        read = read_draft_config(published).config
        written = serving_config(read)
        assert written.get("is_causal") is stated
        again = config_class("dflash")(**read_draft_config(written).config)
        assert again.causal_layers == causal
        assert (written["sliding_window"], written["use_sliding_window"]) == (8, True)


def test_eagle_ids_are_written_as_boundaries(tmp_path: Path) -> None:
    published = config_of(make(tmp_path / "src", "k3-eagle3"))
    known = serving_config(read_draft_config(published, declared={"target_layer_ids": [1, 4, 7]}).config)
    assert known["eagle_aux_hidden_state_layer_ids"] == [2, 5, 8]
    assert known["tap_convention"] == "boundary"
    open_ = serving_config(read_draft_config(published).config)
    assert open_["eagle_aux_hidden_state_layer_ids"] == [1, 4, 7]
    assert "tap_convention" not in open_


def test_what_no_published_key_carries_is_refused(tmp_path: Path) -> None:
    source = native(tmp_path, "speculators-dspark")
    with pytest.raises(KconvError, match="window_rule is 'anchor', would be read as 'query'"):
        kconv.convert(source, tmp_path / "hf", to="hf")
    assert not (tmp_path / "hf").exists()
    read = read_draft_config(config_of(GOLDEN)).config
    with pytest.raises(KconvError, match="layer_is_causal"):
        serving_config({**read, "layer_is_causal": [True, False, True]})
    with pytest.raises(KconvError, match="no native draft"):
        serving_config(config_of(GOLDEN))
