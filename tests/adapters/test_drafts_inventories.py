"""Every published draft whose tensors are known plans completely: a header-only checkpoint of it has nothing unclaimed.

The inventories and configs are public facts kept beside the repository; where they are absent these tests skip.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kconv
from kconv.checkpoint.headers import safetensors_header
from kconv.spec import Spec

FACTS = Path(__file__).parents[3] / "shared/k3/drafts"
pytestmark = pytest.mark.skipif(not FACTS.is_dir(), reason="needs ../shared/k3/drafts")

# inventory -> its config, and values that a partial config lacks (none of them decides a name or a shape)
TABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "Inferact_Kimi-K3-DSpark": ("Inferact_Kimi-K3-DSpark", {}),
    "NeMo_KimiK3DFlashDraftModel": ("NeMo_KimiK3DFlashDraftModel.derived", {}),
    "RadixArk_Kimi-K3-DSpark": ("SpecForge_kimi-k3-dspark_RadixArk", {}),
    "RadixArk_Kimi-K3.1-Dflash2-Preview": (
        "RadixArk_Kimi-K3.1-Dflash2-Preview.partial",
        {"target_layer_ids": [19, 37, 54, 66, 78, 90], "mask_token_id": 163592, "block_size": 8, "vocab_size": 163840},
    ),
    "RedHatAI_Kimi-K3-speculator.dspark": ("RedHatAI_Kimi-K3-speculator.dspark", {}),
    "lightseekorg_kimi-k3-dflash2.main": ("TorchSpec_kimi_k3_dflash2_mla_swa", {}),
    "lightseekorg_kimi-k3-dflash2.rev-e77935fb": ("lightseekorg_kimi-k3-dflash2.rev-e77935fb", {}),
    "novita_kimi-k2.7-code-dspark": ("novita_kimi-k2.7-code-dspark.partial", {"architectures": ["DSparkDraftModel"]}),
    "z-lab_Kimi-K2.5-DFlash": ("z-lab_Kimi-K2.5-DFlash", {}),
}
FAMILY = {
    "Inferact": "dspark", "NeMo": "kimi_k3_dflash", "RadixArk_Kimi-K3-DSpark": "dspark", "RadixArk_Kimi-K3.1": "dflash2",
    "RedHatAI": "dspark", "lightseekorg": "dflash2", "novita": "dspark", "z-lab": "dflash_kimi_k25",
}  # fmt: skip


def specs_of(inventory: str) -> dict[str, Spec]:
    tensors = json.loads((FACTS / f"{inventory}.inventory.json").read_text())["tensors"]
    rows = [(n, t) for n, t in tensors.items()] if isinstance(tensors, dict) else [(t["name"], t) for t in tensors]
    return {name: Spec(t["dtype"], tuple(t["shape"])) for name, t in rows}


def header_only(folder: Path, inventory: str, **changes: Any) -> dict[str, Spec]:
    """The checkpoint's headers over a hole of its true size, and its config."""
    config_name, missing = TABLE[inventory]
    config = {**json.loads((FACTS / f"{config_name}.config.json").read_text()), **missing, **changes}
    specs = specs_of(inventory)
    write_headers(folder, specs, config)
    return specs


def write_headers(folder: Path, specs: dict[str, Spec], config: dict[str, Any]) -> None:
    header, _ = safetensors_header(specs)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(s.nbytes for s in specs.values()))
    (folder / "config.json").write_text(json.dumps(config))


def test_every_inventory_is_in_the_table() -> None:
    assert {p.name.removesuffix(".inventory.json") for p in FACTS.glob("*.inventory.json")} == set(TABLE)


@pytest.mark.parametrize("inventory", sorted(TABLE))
def test_nothing_is_unclaimed(tmp_path: Path, inventory: str) -> None:
    specs = header_only(tmp_path, inventory)
    made = kconv.plan(tmp_path, to="native").check()
    summary = made.summary()
    assert summary["source_tensors"] == summary["claimed"] == summary["target_tensors"] == len(specs)
    assert summary["unclaimed"] == summary["missing"] == []
    assert summary["grade"] == "exact"
    assert summary["output_bytes"] == sum(s.nbytes for s in specs.values())
    family = next(f for prefix, f in FAMILY.items() if inventory.startswith(prefix))
    assert made.layouts.config["model_type"] == family
    assert sorted(made.targets) == sorted(native_names(made.layouts.config))


def native_names(config: dict[str, Any]) -> list[str]:
    """Names of the native module's parameters and buffers, built without storage."""
    import torch

    from kconv.modeling.drafts import config_class, model_class

    with torch.device("meta"):
        model = model_class(config["model_type"])(config_class(config["model_type"])(**config))
    return list(model.state_dict())


@pytest.mark.parametrize("inventory", ["Inferact_Kimi-K3-DSpark", "z-lab_Kimi-K2.5-DFlash"])
def test_strict_both_ways(tmp_path: Path, inventory: str) -> None:
    """A tensor too many and a tensor too few are both named; runtimes ignore the first and some the second."""
    config_name, _ = TABLE[inventory]
    config = json.loads((FACTS / f"{config_name}.config.json").read_text())
    specs = specs_of(inventory)
    removed = "layers.1.mlp.up_proj.weight"
    changed = {n: s for n, s in specs.items() if n != removed} | {"layers.0.self_attn.g_proj.weight": Spec("BF16", (8, 8))}
    write_headers(tmp_path, changed, config)
    findings = kconv.plan(tmp_path, to="native").findings
    assert findings.missing == [removed]
    assert findings.unclaimed == ["layers.0.self_attn.g_proj.weight"]


def test_the_same_name_holds_another_network(tmp_path: Path) -> None:
    """lightseek's dflash2 at two revisions: five layers under the six-layer config are refused."""
    config = json.loads((FACTS / "TorchSpec_kimi_k3_dflash2_mla_swa.config.json").read_text())
    write_headers(tmp_path, specs_of("lightseekorg_kimi-k3-dflash2.rev-e77935fb"), config)
    made = kconv.plan(tmp_path, to="native")
    assert len(made.findings.missing) == 16
    assert any("fc.weight" in line for line in made.findings.lines())


def test_a_capped_intermediate_size_is_seen(tmp_path: Path) -> None:
    """NeMo's draft inherits the target's 33792, not the class default 18432."""
    header_only(tmp_path, "NeMo_KimiK3DFlashDraftModel", intermediate_size=18432)
    lines = kconv.plan(tmp_path, to="native").findings.lines()
    assert any("mlp.gate_proj.weight" in line and "33792" in line for line in lines)
