"""PEFT's adapters: cached decoding, the whole pass and the merged model agree, and so does what was saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kconv.errors import KconvError
from kconv.modeling import KimiK3Cache, KimiK3TextConfig
from tests.modeling.test_indexer import sparse_model
from tests.modeling.tiny import LINEAR_48B, ids, model, of

peft = pytest.importorskip("peft")
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS = {
    "k3": lambda: model(dtype=torch.float64),
    "packed": lambda: model(dtype=torch.float64, experts_format="packed"),
    "indexer": lambda: sparse_model(topk=3, dtype=torch.float64),
    "kimi-linear": lambda: of(KimiK3TextConfig.from_k3(LINEAR_48B), dtype=torch.float64),
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora on kv_b_proj": {"target_modules": ["kv_b_proj"]},
    "lora on res_proj": {"target_modules": r".*_res_proj"},
    "lora on all": {"target_modules": "all-linear"},
    "dora on all": {"target_modules": "all-linear", "use_dora": True},
    "lora by default": {},
    "experts": {"target_parameters": EXPERTS},
    "experts, router and all": {"target_modules": "all-linear", "target_parameters": [*EXPERTS, "mlp.gate.weight"]},
}
CLOSE: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-10}


def adapted(m: Any, options: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    made = peft.get_peft_model(m, peft.LoraConfig(r=3, lora_alpha=6, task_type="CAUSAL_LM", **options)).eval()
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "lora_" in name:
                p.add_(0.1 * torch.randn_like(p))
    return made


def whole(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return m(input_ids=x, use_cache=False).logits


def cached(m: Any, x: torch.Tensor) -> torch.Tensor:
    cache = KimiK3Cache(m.config)
    with torch.no_grad():
        return torch.cat([m(input_ids=part, past_key_values=cache).logits for part in x.split([5, 1, 1, 2], dim=1)], 1)


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_cached_whole_merged_and_reloaded_agree(kind: str, adapter: str, tmp_path: Path) -> None:
    if (kind == "packed" and "experts" in adapter) or (kind == "kimi-linear" and "res_proj" in adapter):
        pytest.skip("codes take no low-rank addition" if kind == "packed" else "Kimi-Linear has no residual mixing")
    x = ids(2, 9)
    before = whole(KINDS[kind](), x)
    made = adapted(KINDS[kind](), ADAPTERS[adapter])
    full = whole(made, x)
    assert not torch.allclose(full, before, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(cached(made, x), full, **CLOSE)
    made.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(KINDS[kind](), tmp_path).eval()
    torch.testing.assert_close(whole(again.double(), x), full, rtol=1e-5, atol=1e-6)
    merged = made.merge_and_unload()
    torch.testing.assert_close(whole(merged, x), full, **CLOSE)
    torch.testing.assert_close(cached(merged, x), full, **CLOSE)


@pytest.mark.parametrize("adapter", ["lora on all", "experts"])
def test_adapters_train_and_nothing_else_does(adapter: str) -> None:
    made, x = adapted(KINDS["k3"](), ADAPTERS[adapter]).train(), ids(2, 9)
    first = made(input_ids=x, labels=x).loss
    first.backward()
    trained = {n for n, p in made.named_parameters() if p.grad is not None}
    assert trained
    assert all("lora_" in n for n in trained)
    with torch.no_grad():
        for p in made.parameters():
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)
    assert made(input_ids=x, labels=x).loss < first


def test_rows_with_different_adapters_decode_as_they_prefill() -> None:
    made, x = adapted(KINDS["k3"](), {"target_modules": ["kv_b_proj", "o_proj"]}), ids(2, 9)
    cache, parts = KimiK3Cache(made.config), []
    with torch.no_grad():
        full = made(input_ids=x, use_cache=False, adapter_names=["default", "__base__"]).logits
        for part in x.split([5, 1, 3], dim=1):
            parts.append(made(input_ids=part, past_key_values=cache, adapter_names=["default", "__base__"]).logits)
    torch.testing.assert_close(torch.cat(parts, 1), full, **CLOSE)
    torch.testing.assert_close(full[1:], whole(KINDS["k3"](), x[1:]), **CLOSE)


def test_prompt_tuning_trains_and_generates() -> None:
    m, x = KINDS["k3"](), ids(2, 6)
    made = peft.get_peft_model(m, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    made.train()(input_ids=x, attention_mask=torch.ones_like(x), labels=x).loss.backward()
    assert all(p.grad is not None for p in made.parameters() if p.requires_grad)
    made.eval()
    # With a cache, this PEFT asks for it by the name it had before: it inserts its prompt at every step, in any model.
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "use_cache": False}
    out = made.generate(input_ids=x, attention_mask=torch.ones_like(x), **options)
    with torch.no_grad():
        for _ in range(4):
            x = torch.cat([x, made(input_ids=x, attention_mask=torch.ones_like(x)).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(out[:, -4:], x[:, -4:])


def test_prefix_tuning_is_refused_with_its_reason() -> None:
    """Its prefixes are keys and values of every layer: KDA layers have neither."""
    prefix = peft.PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=4, num_layers=5, num_attention_heads=4, token_dim=48, encoder_hidden_size=48
    )
    made = peft.get_peft_model(KINDS["k3"](), prefix)
    with pytest.raises(KconvError, match="KDA"):
        made(input_ids=ids(1, 5), attention_mask=torch.ones(1, 5))
