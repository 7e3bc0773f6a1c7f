"""Cards that the Hub refuses are refused here first, field by field."""

from __future__ import annotations

import pytest
from huggingface_hub import ModelCard

from kconv.publishing.modelcard_rules import metadata, problems

GOOD = """---
license: other
license_name: kimi-k3
license_link: LICENSE
language: [en, zh]
library_name: transformers
base_model: moonshotai/Kimi-K3
base_model_relation: quantized
tags: [kconv]
datasets: [lab/data]
model-index:
- name: x
  results:
  - task: {type: text-generation}
    dataset: {type: a, name: a}
    metrics: [{type: accuracy, value: 1.0}]
---
# Title
"""


def test_a_good_card() -> None:
    assert problems(GOOD) == []
    assert metadata(GOOD)[0]["base_model"] == "moonshotai/Kimi-K3"
    assert ModelCard(GOOD).data.to_dict()["base_model"] == "moonshotai/Kimi-K3"
    assert problems(GOOD.replace("\n", "\r\n")) == []


@pytest.mark.parametrize(
    "bad, said",
    [
        ("# no metadata", "first line must be ---"),
        ("---\nlicense: mit\n# never closed", "not closed"),
        ("---\nlicense: [\n---\n", "not valid YAML at line"),
        ("---\n- a\n- b\n---\n", "must be a mapping"),
        ("---\nlicense: mit\nlicense: other\n---\n", "license is there twice"),
        ("---\ntags: [a]\n---\n", "license: missing"),
        ("---\nlicense: kimi-k3\n---\n", "license: 'kimi-k3' is not an identifier"),
        ("---\nlicense: other\n---\n", "license_name: missing"),
        ("---\nlicense: other\nlicense_name: x\n---\n", "license_link: missing"),
        ("---\nlicense: mit\nlanguage: English\n---\n", "language: 'English' is not a language code"),
        ("---\nlicense: mit\nlanguage: no\n---\n", "write 'no' in quotes"),
        ("---\nlicense: mit\nbase_model: Kimi K3\n---\n", "base_model: 'Kimi K3' is not a Hub id"),
        ("---\nlicense: mit\nbase_model: a/b@main\n---\n", "base_model: 'a/b@main'"),
        ("---\nlicense: mit\nbase_model: [a/b, /data/x]\n---\n", "base_model: '/data/x'"),
        ("---\nlicense: mit\nbase_model_relation: draft\n---\n", "base_model_relation: 'draft' is none of"),
        ("---\nlicense: mit\ndatasets: [null]\n---\n", "datasets: None is not a Hub id"),
        ("---\nlicense: mit\ntags: a\n---\n", "tags: 'a' must be a list"),
        ("---\nlicense: mit\nwidget: {}\n---\n", "widget: {} must be a list"),
        ("---\nlicense: mit\nmodel-index: text\n---\n", "model-index: must be a list"),
        ("---\nlicense: mit\nmodel-index: [{name: a}]\n---\n", "needs a name and a list of results"),
        ("---\nlicense: mit\nmodel-index: [{name: a, results: [{task: {type: b}}]}]\n---\n", "lacks dataset, metrics"),
        ("---\nlicense: mit\npipeline_tag: [x]\n---\n", "pipeline_tag"),
    ],
)
def test_refused_with_the_field(bad: str, said: str) -> None:
    found = problems(bad)
    assert len(found) == 1 or "license_link" in said or "license_name" in said, found
    assert any(said in line for line in found), found


def test_every_problem_is_named_at_once() -> None:
    assert len(problems("---\nlicense: x\nlanguage: English\nwidget: {}\n---\n")) == 3
