from __future__ import annotations

import copy
import gzip
import json
from collections import Counter
from typing import Any

import pytest

from kconv.adapters.k3.table import k3_table
from kconv.errors import KconvError
from kconv.spec import Spec
from kconv.synthesis.k3 import K3
from kconv.zoo.cards import Card, load_card, numbers
from tests.reading import PUBLISHED, json_of, needs_published


@pytest.fixture(scope="module")
def card() -> Card:
    return load_card("kimi-k3")


@pytest.fixture(scope="module")
def tensors(card):
    return {t.name: t for t in card.placed()}


def published_config(card: Card) -> dict[str, Any]:
    assert K3.frame is not None
    return K3.frame(K3.shape(**card.data["shape"])).config


def test_the_card_agrees_with_itself(card, tensors):
    assert card.problems(list(tensors.values())) == []
    assert len(tensors) == 497_220


def test_the_card_s_layout_is_the_adapter_s_table_at_full_size(card, tensors):
    made = K3.make(K3.shape(**card.data["shape"]), 0)
    assert made.specs == {n: t.spec for n, t in tensors.items()}
    assert made.shards == {n: t.file for n, t in tensors.items()}


def test_the_card_s_domains_are_the_config_s_layers(card):
    layout = k3_table(published_config(card)["text_config"])
    assert {k: v for k, v in card.domains.items() if k in layout.kinds} == layout.kinds


@needs_published
def test_names_and_shards_are_the_published_index(card, tensors):
    index = json.loads(gzip.decompress((PUBLISHED / "model.safetensors.index.json.gz").read_bytes()))
    assert {n: t.file for n, t in tensors.items()} == index["weight_map"]
    assert sum(t.spec.nbytes for t in tensors.values()) == index["metadata"]["total_size"] == card.data["bytes"]


@needs_published
def test_shapes_and_dtypes_are_the_published_headers(tensors):
    published: Counter[Spec] = Counter()
    for row in json_of(PUBLISHED / "tensor_inventory.json"):
        published[Spec(row["dtype"], tuple(row["shape"]))] += row["count"]
    assert Counter(t.spec for t in tensors.values()) == published


@needs_published
def test_the_generated_config_is_the_published_one(card):
    assert published_config(card) == json_of(PUBLISHED / "config.json")


def broken(card: Card, change) -> Card:
    data = copy.deepcopy(card.data)
    change(data)
    return Card(data, "broken")


@pytest.mark.parametrize(
    ("change", "said"),
    (
        (lambda d: d["layout"]["groups"][1].update(copies=70), "70 copies, its domains make 69"),
        (lambda d: d.update(bytes=1), "bytes: 1, its layout makes 1560860324864"),
        (lambda d: d.update(dtypes={"U8": 1}), "dtypes: {'U8': 1}"),
        (lambda d: d["layout"]["groups"][-1]["tensors"].update({"norm0.weight": "F32 [1]"}), "its layout makes"),
        (lambda d: d["layout"]["groups"].append(d["layout"]["groups"][6]), "language_model.lm_head.weight is placed 2 times"),
    ),
)
def test_a_wrong_card_says_where(card, change, said):
    assert any(said in line for line in broken(card, change).problems())


def test_unreadable_cards_are_refused(card, tmp_path):
    with pytest.raises(KconvError, match=r"no card is called kimi-k9\n  next: cards are .*kimi-k3"):
        load_card("kimi-k9")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(KconvError, match="is not valid YAML"):
        load_card(tmp_path / "bad.yaml")
    with pytest.raises(KconvError, match=r"'BF17 .7.' is no tensor"):
        broken(card, lambda d: d["layout"]["groups"][0]["tensors"].update(x="BF17 [7]")).problems()
    with pytest.raises(KconvError, match="no domain is called leyer"):
        broken(card, lambda d: d["layout"]["groups"][0].update(prefix="a.{leyer}.")).problems()


def test_numbers():
    assert numbers("0-2,5, 7-8") == (0, 1, 2, 5, 7, 8)
