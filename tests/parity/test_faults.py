"""Faults are found and named: every kind of tensor, and formulas of the model gone wrong, each from the recorded answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kconv import parity
from kconv.modeling import kda_ops
from kconv.parity.uncovered import different, uncovered
from tests.parity.goldens import LONG, TINY, changed, golden, model, perturb

CONV = [f"{x}_{kind}" for x in "qkv" for kind in ("proj", "conv1d")]
KDA = [*CONV, "f_a_proj", "f_b_proj", "b_proj", "g_proj", "o_norm", "o_proj"]
MLA = ["q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "g_proj", "o_proj"]
MOE = ["gate", "routed_expert_down_proj", "routed_expert_norm", "routed_expert_up_proj",
       *(f"shared_experts.{n}_proj" for n in ("gate", "up", "down"))]  # fmt: skip
NORMS = ["input_layernorm", "post_attention_layernorm"]
MODULES = [
    "embed_tokens", "norm", "lm_head", *(f"layers.0.mlp.{n}_proj" for n in ("gate", "up", "down")),
    *(f"layers.1.self_attn.{n}" for n in KDA), *(f"layers.2.self_attn.{n}" for n in MLA),
    *(f"layers.{i}.mlp.{n}" for i, n in zip((1, 2, 3, 1, 2, 3, 4), MOE, strict=True)), *(f"layers.3.{n}" for n in NORMS),
]  # fmt: skip
# What is no module's own tensor, and the module it is reported as.
OTHERS = {
    "layers.1.self_attn.A_log": "layers.1.self_attn",
    "layers.3.self_attn.dt_bias": "layers.3.self_attn",
    "layers.4.mlp.gate.e_score_correction_bias": "layers.4.mlp.gate",
    "layers.1.self_attention_res_norm.weight": "layers.1.self_attention_res",
    "layers.2.self_attention_res_proj.weight": "layers.2.self_attention_res",
    "layers.0.mlp_res_norm.weight": "layers.0.mlp_res",
    "layers.3.mlp_res_proj.weight": "layers.3.mlp_res",
    "output_attn_res_norm.weight": "output_attn_res",
    "output_attn_res_proj.weight": "output_attn_res",
    "layers.2.mlp.experts.gate_up_proj_packed": "layers.2.mlp.experts",
    "layers.3.mlp.experts.gate_up_proj_scale": "layers.3.mlp.experts",
    "layers.4.mlp.experts.down_proj_packed": "layers.4.mlp.experts",
    "layers.1.mlp.experts.down_proj_scale": "layers.1.mlp.experts",
}
TENSORS = {f"{m}.weight": m for m in MODULES} | OTHERS


def full(name: str) -> str:
    return name if name.startswith("lm_head") else f"model.{name}"


def test_every_tensor_of_the_model_is_of_a_kind_tested_here() -> None:
    def kinds(names: Any) -> set[str]:
        return {".".join(p for p in n.removeprefix("model.").split(".") if not p.isdigit()) for n in names}

    assert kinds(model(LONG).state_dict()) == kinds(TENSORS)


@pytest.mark.parametrize("name", TENSORS)
def test_a_perturbed_tensor(name: str) -> None:
    with changed(model(LONG), full(name), perturb):
        report = parity.compare(model(LONG), golden(LONG))
    assert not report.passed
    assert report.first_divergence == TENSORS[name]


def test_the_expert_at_fault_is_named() -> None:
    with changed(model(LONG), full("layers.2.mlp.experts.down_proj_packed"), perturb):
        report = parity.compare(model(LONG), golden(LONG))
    assert report.divergence is not None
    assert report.divergence["experts"] == [2]


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "g_proj", "o_proj"])
def test_a_transposed_square_matrix(name: str) -> None:
    with changed(model(LONG), f"model.layers.1.self_attn.{name}.weight", lambda t: t.t().clone()):
        report = parity.compare(model(LONG), golden(LONG))
    assert not report.passed
    assert report.first_divergence == f"layers.1.self_attn.{name}"


def swap_experts(t: torch.Tensor) -> torch.Tensor:
    return t[[1, 0, *range(2, len(t))]]


def swap_gate_and_up(t: torch.Tensor) -> torch.Tensor:
    return torch.cat(t.chunk(2, dim=1)[::-1], dim=1)


@pytest.mark.parametrize("change", [swap_experts, swap_gate_and_up])
@pytest.mark.parametrize("layer", [1, 4])
def test_experts_swapped_and_gate_taken_for_up(change: Callable[..., torch.Tensor], layer: int) -> None:
    names = [f"model.layers.{layer}.mlp.experts.gate_up_proj_{n}" for n in ("packed", "scale")]
    with changed(model(LONG), names[0], change), changed(model(LONG), names[1], change):
        report = parity.compare(model(LONG), golden(LONG))
    assert not report.passed
    assert report.first_divergence == f"layers.{layer}.mlp.experts"


def test_a_transposed_square_expert() -> None:
    loaded = model(TINY, experts="bf16")
    with changed(loaded, "model.layers.5.mlp.experts.down_proj", lambda t: t.transpose(1, 2).clone()):
        report = parity.compare(loaded, golden(TINY), source=TINY)
    assert not report.passed
    assert report.first_divergence == "layers.5.mlp.experts"
    assert report.divergence is not None
    assert report.divergence["tensors"] == ["layers.5.mlp.experts.down_proj"]


@contextmanager
def eps_of_q_a(m: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(m.model.layers[2].self_attn.q_a_layernorm, "eps", 1e-5)
    yield "layers.2.self_attn.q_a_layernorm"


@contextmanager
def clamped_gate(m: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    def clamped(gate: kda_ops.Gate, z: torch.Tensor) -> torch.Tensor:
        heads, width = z.shape[-2:]
        g = -gate.a_log.exp().view(heads, 1) * F.softplus(z + gate.dt_bias.view(heads, width))
        return g.clamp(min=gate.lower_bound)

    monkeypatch.setattr(kda_ops.Gate, "log_decay", clamped)
    yield "layers.0.self_attn"


@contextmanager
def bf16_router(m: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for layer in m.model.layers[1:]:
        router = layer.mlp.gate
        run = router.forward
        monkeypatch.setattr(router, "forward", lambda x, run=run: run(x.bfloat16().to(x.dtype)))
    yield "layers.1.mlp.gate"


@contextmanager
def scaled_after_the_norm(m: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    moe = m.model.layers[3].mlp
    scaling = moe.gate.scaling
    monkeypatch.setattr(moe.gate, "scaling", 1.0)
    hook = moe.routed_expert_norm.register_forward_hook(lambda module, args, out: out * scaling)
    yield "layers.3.mlp.gate"
    hook.remove()


@contextmanager
def window_of_256(m: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    def window(x: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        allowed = torch.ones(x.shape[1], latents.shape[1], dtype=torch.bool).tril()
        return allowed.triu(-255)

    monkeypatch.setattr(m.model.layers[2].self_attn, "selected_keys", window)
    yield "layers.2.self_attn"


@contextmanager
def state_lost_at_384(m: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    attention = m.model.layers[3].self_attn
    run = attention.forward

    def forward(x: torch.Tensor, segments: Any = None, cache: Any = None) -> torch.Tensor:
        if segments is not None:
            return run(x, segments, cache)
        return torch.cat([run(x[:, :384]), run(x[:, 384:])], dim=1)

    monkeypatch.setattr(attention, "forward", forward)
    yield "layers.3.self_attn"


FORMULAS = [eps_of_q_a, clamped_gate, bf16_router, scaled_after_the_norm, window_of_256, state_lost_at_384]


@pytest.mark.parametrize("fault", FORMULAS, ids=lambda f: f.__name__)
def test_a_wrong_formula(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with fault(model(LONG), monkeypatch) as module:
        report = parity.compare(model(LONG), golden(LONG))
    assert not report.passed
    assert report.first_divergence == module


def test_what_shows_only_late_is_reported_with_its_position(monkeypatch: pytest.MonkeyPatch) -> None:
    with window_of_256(model(LONG), monkeypatch):
        data = parity.compare(model(LONG), golden(LONG)).data()
    assert data["verdict"] == "fail"
    assert data["first_bad_token"]["position"] >= 256
    assert data["divergence"]["first_position"] == 256


def test_a_fault_in_bf16_is_found_under_the_noise() -> None:
    loaded = model(LONG, torch.bfloat16)
    with changed(loaded, "model.layers.2.mlp.experts.gate_up_proj_packed", swap_experts):
        report = parity.compare(loaded, golden(LONG))
    assert not report.passed
    assert report.first_divergence == "layers.2.mlp.experts"
    assert report.divergence is not None
    assert report.divergence["experts"] == [0, 1]


@pytest.mark.parametrize(("name", "module"), [("model.layers.4.self_attn.o_proj.weight", "layers.4.self_attn.o_proj"),
                                              ("lm_head.weight", "lm_head")])  # fmt: skip
def test_nan_fails_and_its_module_is_named(name: str, module: str) -> None:
    def poison(t: torch.Tensor) -> None:
        t[0, 0] = torch.nan

    with changed(model(LONG), name, poison):
        report = parity.compare(model(LONG), golden(LONG))
    assert not report.passed
    assert report.first_divergence == module
    assert report.data()["nan"] is True
    assert report.data()["worst_token"]["abs"] is None


def test_hidden_states_alone_name_module_and_tensor_by_the_source() -> None:
    for name in ("layers.3.self_attn.g_proj", "layers.8.mlp.gate", "layers.4.mlp_res_norm", "output_attn_res_proj"):
        with changed(model(TINY), f"model.{name}.weight", perturb):
            report = parity.compare(model(TINY), golden(TINY), source=TINY)
        assert not report.passed
        assert report.first_divergence == name
        assert report.divergence is not None
        assert report.divergence["tensors"] == [f"{name}.weight"]


def test_hidden_states_alone_name_the_layer_without_a_source() -> None:
    with changed(model(TINY), "model.layers.3.self_attn.g_proj.weight", perturb):
        report = parity.compare(model(TINY), golden(TINY))
    assert report.first_divergence == "layers.3"


def test_a_formula_is_not_blamed_on_the_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    with clamped_gate(model(TINY), monkeypatch):
        report = parity.compare(model(TINY), golden(TINY), source=TINY)
    assert not report.passed
    assert report.first_divergence == "layers.0"
    assert any("not the conversion" in note for note in report.notes)


def spoil_an_unused_row(tensor: torch.Tensor) -> None:
    used = set(parity.Golden(golden(TINY)).ids.flatten().tolist())
    tensor[next(i for i in range(512) if i not in used), 3] += 1


@pytest.mark.parametrize(
    ("module", "change"), [("layers.0.self_attention_res_norm", perturb), ("embed_tokens", spoil_an_unused_row)]
)
def test_what_no_token_reads_is_compared_with_the_source(module: str, change: Callable[[torch.Tensor], None]) -> None:
    with changed(model(TINY), f"model.{module}.weight", change):
        report = parity.compare(model(TINY), golden(TINY), source=TINY)
    assert not report.passed
    assert report.first_divergence == module
    assert [f["check"] for f in report.failed] == [f"{module}.weight"]


def test_an_expert_that_no_token_is_sent_to(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = model(TINY)
    router = loaded.model.layers[8].mlp.gate
    names: Any = uncovered(loaded, {8: torch.tensor([[0, 1], [2, 3]])}, torch.arange(512))
    assert names["model.layers.8.mlp.experts.down_proj_packed"] == {4, 5, 6, 7}
    assert len(names["model.layers.8.mlp.experts.down_proj_packed"]) + 4 == router.weight.shape[0]

    def spoil(tensor: torch.Tensor) -> None:
        tensor[0, 0] ^= 1  # an expert that was seen: the runs judge it
        tensor[6, 0] ^= 1

    with changed(loaded, "model.layers.8.mlp.experts.down_proj_packed", spoil):
        assert different(loaded, TINY, names) == ["layers.8.mlp.experts.down_proj_packed[6]"]
