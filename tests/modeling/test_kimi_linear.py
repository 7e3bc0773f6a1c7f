"""The Kimi-Linear variant against Transformers' own KimiLinearForCausalLM, which runs on the CPU."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kconv.modeling import KimiK3TextConfig
from tests.modeling.tiny import LINEAR_48B, ids, of

transformers = pytest.importorskip("transformers", minversion="5.24")


def write_published(m: Any, folder: Path) -> None:
    """The model in the published Kimi-Linear layout: split experts, `block_sparse_moe`, A_log [1, 1, H, 1]."""
    tensors: dict[str, torch.Tensor] = {}
    for name, t in m.state_dict().items():
        published = name
        if ".mlp." in name and not name.startswith("model.layers.0."):
            published = name.replace(".mlp.", ".block_sparse_moe.")
        if name.endswith("A_log"):
            tensors[published] = t.view(1, 1, -1, 1)
        elif ".experts." in name:
            weights = t.chunk(2, 1) if name.endswith("gate_up_proj") else (t,)
            for w, part in zip("13" if len(weights) == 2 else "2", weights, strict=True):
                for e in range(t.shape[0]):
                    tensors[f"{published.rsplit('.', 1)[0]}.{e}.w{w}.weight"] = part[e]
        else:
            tensors[published] = t
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**LINEAR_48B, "architectures": ["KimiLinearForCausalLM"]}))


@pytest.fixture(scope="module", autouse=True)
def torch_forms() -> Iterator[None]:
    """Transformers takes fla's GPU kernels whenever fla can be imported; put its own torch functions back."""
    module = importlib.import_module("transformers.models.kimi_linear.modeling_kimi_linear")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in list(vars(module).items()):
            if inspect.isfunction(value) and hasattr(value, "__wrapped__") and "delta_attention" in name:
                patch.setattr(module, name, inspect.unwrap(value))
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    ours = of(KimiK3TextConfig.from_k3(LINEAR_48B))
    folder = tmp_path_factory.mktemp("kimi-linear")
    write_published(ours, folder)
    theirs, info = transformers.KimiLinearForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return ours, theirs.eval()


@pytest.mark.parametrize("length", [1, 7, 64, 200])
def test_logits(pair: tuple[Any, Any], length: int) -> None:
    ours, theirs = pair
    x = ids(2, length)
    with torch.no_grad():
        a, b = ours(x, use_cache=False).logits, theirs(x, use_cache=False).logits
    assert a.std() > 0.3
    torch.testing.assert_close(a, b, rtol=0, atol=5e-5)


def test_left_padding(pair: tuple[Any, Any]) -> None:
    ours, theirs = pair
    x, mask = ids(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[1, :13] = 0
    with torch.no_grad():
        a, b = ours(x, attention_mask=mask).logits, theirs(x, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(a[mask.bool()], b[mask.bool()], rtol=0, atol=5e-5)


def test_config_of_transformers_translates(pair: tuple[Any, Any]) -> None:
    ours, theirs = pair
    translated = KimiK3TextConfig.from_k3(theirs.config).to_dict()
    expected = ours.config.to_dict()
    names = set(expected) & set(KimiK3TextConfig.__dataclass_fields__) - {"dtype", "architectures", "transformers_version"}
    assert {n: translated[n] for n in names} == {n: expected[n] for n in names}
    assert translated["linear_attn_config"]["use_full_rank_gate"] is False


def test_generate(pair: tuple[Any, Any]) -> None:
    ours, theirs = pair
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    assert torch.equal(ours.generate(ids(1, 12), **options), theirs.generate(ids(1, 12), **options))
