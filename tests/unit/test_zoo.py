"""The cards are sound, agree with what is published, and tell checkpoints from what they are not."""

from __future__ import annotations

import copy
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kconv import zoo
from kconv.cli import cli
from kconv.errors import KconvError
from kconv.spec import BITS, Spec
from kconv.zoo.cards import Card, card_ids, load_card
from tests.hubserver.fixtures import hub
from tests.hubserver.server import HubServer
from tests.reading import PUBLISHED, json_of, needs_published

__all__ = ["hub"]
IDS = card_ids()


@pytest.mark.parametrize("name", IDS)
def test_sound(name: str) -> None:
    assert zoo.card_problems(load_card(name)) == []


def test_what_the_zoo_is_asked_to_hold() -> None:
    data = {c.data["id"]: c.data for c in zoo.cards()}
    assert {"kimi-k3", "kimi-linear-48b-a3b-instruct", "kimi-k2.5", "kimi-k2.6", "kimi-k2.7-code", "kimi-k3.1-pro"} <= data.keys()
    assert sum(d["base"] == "kimi-k3" for d in data.values()) >= 6
    assert sum(d["kind"] == "draft" for d in data.values()) >= 15
    k31 = data["kimi-k3.1-pro"]
    assert {item["status"] for item in k31["verification"]} == {"unverified"}
    for d in data.values():
        for item in d["verification"]:
            path = re.match(r"pytest (\S+)", item.get("command", ""))
            if path:
                assert (Path(__file__).parents[2] / path[1]).is_file(), f"{d['id']}: {path[1]}"


def test_layouts_are_the_published_counts() -> None:
    """Tensors, bytes and parameters as the publishers state them; `problems` has held the layouts against the cards."""
    published = {
        "kimi-k3": (497_220, 2_779_931_837_184), "kimi-linear-48b-a3b-instruct": (20_493, None),
        "z-lab-kimi-k2.5-dflash": (69, None), "inferact-kimi-k3-dspark": (68, 3_562_312_961),
        "lightseekorg-kimi-k3-dflash2": (103, None), "lightseekorg-kimi-k3-dflash2-e77935fb": (87, None),
        "radixark-kimi-k3-dspark": (62, 2_249_289_601), "redhatai-kimi-k3-speculator.dspark": (64, 4_744_900_481),
        "novita-kimi-k2.7-code-dspark": (44, None), "radixark-kimi-k3.1-dflash2-preview": (86, 2_784_811_008),
    }  # fmt: skip
    for name, (tensors, parameters) in published.items():
        card = load_card(name)
        placed = list(card.placed())
        assert len(placed) == tensors
        if parameters:
            codes = sum(2 * t.spec.numel for t in placed if t.name.endswith("weight_packed"))
            plain = sum(t.spec.numel for t in placed if not t.name.endswith(("weight_packed", "weight_scale")))
            assert codes + plain == parameters, name
    linear = load_card("kimi-linear-48b-a3b-instruct").data
    header = (98_248_224_120 - linear["bytes"]) / linear["tensors"]
    assert 100 < header < 160, "the published file bytes are the tensors' and about 131 bytes of header each"


@needs_published
def test_layouts_of_drafts_are_the_known_inventories() -> None:
    files = {
        "z-lab-kimi-k2.5-dflash": "z-lab_Kimi-K2.5-DFlash", "inferact-kimi-k3-dspark": "Inferact_Kimi-K3-DSpark",
        "lightseekorg-kimi-k3-dflash2": "lightseekorg_kimi-k3-dflash2.main",
        "novita-kimi-k2.7-code-dspark": "novita_kimi-k2.7-code-dspark",
        "radixark-kimi-k3-dspark": "RadixArk_Kimi-K3-DSpark",
        "redhatai-kimi-k3-speculator.dspark": "RedHatAI_Kimi-K3-speculator.dspark",
    }  # fmt: skip
    for card, file in files.items():
        rows = json_of(PUBLISHED / "drafts" / f"{file}.inventory.json")["tensors"]
        rows = [{"name": n, **row} for n, row in rows.items()] if isinstance(rows, dict) else rows
        expected = {row["name"]: Spec(row["dtype"], tuple(row["shape"])) for row in rows}
        assert {t.name: t.spec for t in load_card(card).placed()} == expected


def _relative(stored: str) -> Iterator[tuple[str, Spec]]:
    """Kimi K3 as the tool that wrote a derivative stores it."""
    expert = re.compile(r"\.experts\.\d+\.w\d\.weight_(packed|scale)$")
    also = re.compile(r"shared_experts\.\w+\.weight|routed_expert_(down|up)_proj\.weight|layers\.0\.mlp\.\w+\.weight")
    for t in load_card("kimi-k3").placed():
        packed = expert.search(t.name)
        if packed and packed[1] == "scale":
            continue
        rows, columns = (t.spec.shape[0], t.spec.shape[1] * 2) if packed else (*t.spec.shape, 1, 1)[:2]
        if stored == "fp8-block" and (packed or also.search(t.name)):
            yield t.name, Spec("F8_E4M3", (rows, columns))
            yield t.name + "_scale", Spec("BF16", (rows // 128, columns // 128))
        elif packed:
            yield t.name, t.spec
            yield t.name + "_scale", Spec("F8_E4M3", (rows, columns // 16))
            yield from ((t.name + end, Spec("F32", (1,))) for end in ("_global_scale", "_input_scale"))
        elif stored == "nvidia" and ".self_attn." in t.name and t.name.endswith("_proj.weight"):
            yield t.name, Spec("F8_E4M3", (rows, columns))
            yield t.name + "_scale", Spec("F32", (math.ceil(rows / 128), 1, math.ceil(columns / 128), 1))
        else:
            yield t.name, t.spec


@pytest.mark.parametrize(
    "card, stored, published",
    [
        ("redhatai-kimi-k3-fp8-block", "fp8-block", 2.820e12),
        ("nvidia-kimi-k3-nvfp4", "nvidia", 1.610e12),
        ("redhatai-kimi-k3-nvfp4", "redhat", 1.646e12),
    ],
)
def test_derived_counts_meet_the_published_sizes(card: str, stored: str, published: float) -> None:
    rows = list(_relative(stored))
    total = sum(spec.nbytes for _, spec in rows)
    data = load_card(card).data
    assert (len(rows), total) == (data["tensors"], data["bytes"])
    assert abs(total - published) < 5e8, "the published size has four digits"


def test_bad_cards_are_named() -> None:
    good = load_card("inferact-kimi-k3-dspark")

    def broken(**changes: Any) -> str:
        data = copy.deepcopy(good.data) | changes
        return " | ".join(zoo.card_problems(Card({k: v for k, v in data.items() if v is not None}, good.where)))

    item = {"what": "all of it", "status": "verified"}
    assert "'command' is a required property" in broken(verification=[item])
    assert "'would_verify' is a required property" in broken(verification=[{"what": "all of it", "status": "unverified"}])
    assert "revision" in broken(revision="main")
    assert "'traps' is a required property" in broken(traps=None)
    assert "'target' is a required property" in broken(target=None)
    assert "tensors: 68, its layout" not in broken()
    assert "tensors: 70, its layout makes 68" in broken(tensors=70)
    assert "base: no card is called kimi-k9" in broken(base="kimi-k9")
    assert "id: other in the file" in broken(id="other")
    assert "Additional properties" in broken(colour="blue")


def header_only(card: Card, folder: Path, *, changes: dict[str, Spec | None] | None = None) -> Path:
    """A checkpoint of a card's names and shapes, without data (sparse files)."""
    folder.mkdir()
    specs: dict[str, Spec | None] = {t.name: t.spec for t in card.placed()}
    specs |= changes or {}
    header, at = {}, 0
    for name, spec in specs.items():
        if spec is not None:
            header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [at, at + spec.nbytes]}
            at += spec.nbytes
    blob = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as f:
        f.write(len(blob).to_bytes(8, "little") + blob)
        f.truncate(8 + len(blob) + at)
    config = {"model_type": card.data["model_type"], "architectures": [card.data["architecture"]]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_check_against_headers(tmp_path: Path) -> None:
    card = load_card("inferact-kimi-k3-dspark")
    result = zoo.check(header_only(card, tmp_path / "same"))
    assert (result["ok"], result["card"], result["differences"]) == (True, "inferact-kimi-k3-dspark", [])
    assert "names, dtypes, shapes" in result["compared"]
    changed = header_only(
        card, tmp_path / "changed",
        changes={"context_norm.weight": Spec("F32", (7168,)), "final_norm.weight": None, "norm.weight": Spec("BF16", (7168,))},
    )  # fmt: skip
    found = "\n".join(zoo.check(changed, "inferact-kimi-k3-dspark")["differences"])
    assert "missing: final_norm.weight" in found
    assert "not on the card: norm.weight" in found
    assert "context_norm.weight is F32 [7168], BF16 [7168] by the card" in found
    with pytest.raises(KconvError, match="no card fits"):
        zoo.check(header_only(card, tmp_path / "fewer", changes={"final_norm.weight": None}))


def test_check_on_the_hub_reads_headers_only(hub: HubServer, tmp_path: Path) -> None:
    card = load_card("inferact-kimi-k3-dspark")
    folder = header_only(card, tmp_path / "m")
    hub.seed(card.data["repo"], {"config.json": folder / "config.json"})
    sha = "ab" * 32  # 7 GB of zeros need not be hashed for this
    hub.store.linked[sha] = folder / "model.safetensors"
    entry = hub.store.entry("model.safetensors", sha, lfs=True)
    hub.store.repos[card.data["repo"]].commit("refs/heads/main", "weights", {"model.safetensors": entry})
    result = zoo.check(f"hf://{card.data['repo']}")
    assert (result["ok"], result["card"]) == (True, "inferact-kimi-k3-dspark")
    assert any("the card describes revision cf6b8244" in note for note in result["notes"])
    assert hub.served() < 20_000


def test_kimi_k3_at_full_size(tmp_path: Path) -> None:
    from kconv.synthesis.families import tiny

    tiny("k3", tmp_path / "k3", full_size=True)
    result = zoo.check(tmp_path / "k3")
    assert result["ok"], result["differences"][:5]
    assert set(result["compared"]) >= {"tensors", "bytes", "shards", "dtypes", "names, dtypes, shapes"}


def test_command_line(tmp_path: Path) -> None:
    run = CliRunner()
    listed = json.loads(run.invoke(cli, ["zoo", "list", "--json"]).stdout)["cards"]
    assert Counter(c["kind"] for c in listed) == Counter(c.data["kind"] for c in zoo.cards())
    assert run.invoke(cli, ["zoo", "check"]).exit_code == 0
    for name in IDS:
        done = run.invoke(cli, ["zoo", "show", name])
        assert done.exit_code == 0
        assert load_card(name).data["title"] in done.stdout
    assert run.invoke(cli, ["zoo", "show", "nope"]).exit_code == 2
    folder = header_only(load_card("radixark-kimi-k3-dspark"), tmp_path / "d", changes={"fc.weight": Spec("BF16", (1, 1))})
    done = run.invoke(cli, ["zoo", "check", str(folder), "--card", "radixark-kimi-k3-dspark"])
    assert done.exit_code == 1
    assert "fc.weight is BF16 [1, 1]" in done.stdout


def test_bits_are_known() -> None:
    assert all(dtype in BITS for c in zoo.cards() for dtype in c.data.get("dtypes", {}))
