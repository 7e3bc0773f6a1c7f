"""The block that says whose draft this is: built, checked against its schema, found in a config.

It lies in the draft's `config.json` under a key of its own, `kconv_provenance`, which Transformers carries through
`from_pretrained` and `save_pretrained` as it does every key it does not know (measured with 5.24.0; `_name_or_path` and
`_commit_hash` do not survive). The schema beside this file is its documentation.

No exporter of drafts found so far writes a target's revision or a digest of anything into the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from kconv.adapters.drafts.reading import PROVENANCE as KEY
from kconv.adapters.drafts.seal import FORMAT
from kconv.checkpoint.reading import Checkpoint
from kconv.errors import KconvError, Problems
from kconv.packaging import digests
from kconv.packaging.target_model import UNKNOWN, Target, facts

READABLE = (1, FORMAT)
SCHEMA = Path(__file__).with_name("provenance.schema.json")
TRAINING = ("dataset", "dataset_revision", "trainer", "trainer_version")
MLA_NORMS = ("q_a_layernorm", "kv_a_layernorm")


@cache
def schema() -> dict[str, Any]:
    """The JSON schema of the block."""
    return json.loads(SCHEMA.read_text(encoding="utf-8"))


def problems(block: Any) -> list[str]:
    """Where a block departs from its schema, as `path: what`."""
    from jsonschema import Draft202012Validator

    found = Draft202012Validator(schema()).iter_errors(block)
    return [f"{KEY}.{'.'.join(map(str, e.absolute_path)) or '(itself)'}: {e.message[:200]}" for e in found]


def read(config: Mapping[str, Any], where: str = "config.json") -> dict[str, Any] | None:
    """The block of a draft's config; None if it has none; raises Problems if it is damaged."""
    block = config.get(KEY)
    if block is None:
        return None
    if isinstance(block, dict) and block.get("format") not in READABLE:
        known = " and ".join(map(str, READABLE))
        raise KconvError(f"{where}: {KEY} has the format {block.get('format')!r}, this kconv reads {known}", hint="update kconv")
    if found := problems(block) or contradictions(block):
        raise Problems(f"{where}: {KEY} is damaged:", found, hint="package the draft again")
    return dict(block)


def contradictions(block: Mapping[str, Any]) -> list[str]:
    """Digests of a block that are not those of the parts recorded beside them: one of the two was changed."""
    target, wrong = block["target"], []
    for kind, table in target["tensors"].items():
        if isinstance(table, dict) and table["sha256"] != digests.runs_digest(table["dtype"], table["shape"], table["runs"]):
            wrong.append(f"{KEY}.target.tensors.{kind}: the sha256 is not that of its dtype, shape and runs")
    for part in ("tokenizer", "prompt"):
        files, sha = target[part]["files"], target[part]["sha256"]
        if sha not in (UNKNOWN, digests.files_digest(files)):
            wrong.append(f"{KEY}.target.{part}: the sha256 is not that of its files")
    return wrong


def build(
    draft: Checkpoint, config: Mapping[str, Any], target: Target, *, names: Mapping[str, str],
    origins: Mapping[str, str] | None = None, training: Mapping[str, str] | None = None,
    target_facts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The block of a draft and its target, in format 1: `seal.sealed` adds what a config.json is to be held against.

    Args:
        draft: the draft's files.
        config: its normalised (native) config.
        target: what it was trained on.
        names: its tensors' names -> native names, where they differ (`draft_checks.native_names`).
        origins: `embed_tokens` and `lm_head` -> borrowed, copy or own (`unknown` if left out).
        training: `dataset`, `dataset_revision`, `trainer`, `trainer_version`, as far as they are known.
        target_facts: what `kconv.packaging.target_model.facts` returned for this target and the draft's taps, if it is at hand.
    """
    taps = config.get("target_layer_ids")
    known = check_training(training)
    block = {
        "format": 1,
        "target": dict(target_facts or facts(target, taps)),
        "draft": draft_facts(draft, config, target, origins or {}, names),
        "training": {key: known.get(key) or UNKNOWN for key in TRAINING},
        "made_by": {"kconv": metadata.version("kconv"), "plan_digest": (draft.manifest or {}).get("plan_digest") or UNKNOWN},
    }
    if found := problems(block):
        raise Problems(f"{draft.where} and {target.where} cannot be recorded:", found, hint="fetch the configs again")
    return block


def check_training(training: Mapping[str, str] | None) -> Mapping[str, str]:
    """What is said of the training, never None; refuses keys that the block has no place for."""
    if surplus := set(training or {}) - set(TRAINING):
        raise KconvError(f"training has no {', '.join(sorted(surplus))}", hint=f"it has {', '.join(TRAINING)}")
    return training or {}


def draft_facts(
    draft: Checkpoint, config: Mapping[str, Any], target: Target, origins: Mapping[str, str], names: Mapping[str, str]
) -> dict[str, Any]:
    """The `draft` part: what its weights assume and no other key of its config states without ambiguity."""
    return {
        "family": config["model_type"],
        "architecture": (draft.config.get("architectures") or [UNKNOWN])[0],
        "dialect": config.get("dialect") or UNKNOWN,
        **assumed(config, target),
        "embed_tokens": origins.get("embed_tokens", UNKNOWN),
        "lm_head": origins.get("lm_head", UNKNOWN),
        "weights": weights(draft, names),
    }


def assumed(config: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """What the draft's weights assume, whatever dialect states it: taps, mask token, block, rope, eps, causality."""
    depth, size = config["num_hidden_layers"], config.get("block_size")
    drafted = size if size is None or config.get("sample_from_anchor") else size - 1
    return {
        "taps": {
            "layers": list(config["target_layer_ids"]) if config.get("target_layer_ids") is not None else UNKNOWN,
            "convention": "output_of_layer_0_based",
            "order": "as_listed",
            "stream": config.get("capture_stream") or UNKNOWN,
        },
        "mask_token": mask_token(config, target),
        "block": {"size": size or UNKNOWN, "counts": "positions_anchor_included", "drafted": drafted or UNKNOWN},
        "rope": rope(config),
        "norm_eps": norm_eps(config),
        "causality": {
            "is_causal": list(config.get("layer_is_causal") or [bool(config.get("is_causal"))] * depth),
            "layer_types": list(config.get("layer_types") or ["full_attention"] * depth),
            "sliding_window": config.get("sliding_window") or "none",
        },
    }


def weights(draft: Checkpoint, names: Mapping[str, str]) -> dict[str, Any]:
    """The draft's own tensors whatever files they lie in, and the files they lie in now."""
    files = {shard: digests.sha256_range(draft.files, shard, 0, draft.files.size(shard)) for shard in draft.shards}
    return {"form": "tensors-1", "sha256": digests.tensors_digest(draft, names), "files": files}


def mask_token(config: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """The mask token's id, its string in the target's tokenizer, and the digest of its row in the target's embedding."""
    number = config.get("mask_token_id")
    if number is None:
        return {"id": "none" if config["model_type"] == "eagle3" else UNKNOWN, "string": UNKNOWN, "row_sha256": UNKNOWN}
    name = target.table("embed_tokens")
    row = UNKNOWN
    if name and number < (target.entry(name).spec.shape or (0,))[0]:
        row = digests.row_digest(target.files, target.entry(name), number)
    return {"id": number, "string": target.token(number) or UNKNOWN, "row_sha256": row}


def rope(config: Mapping[str, Any]) -> Any:
    """The rotary embedding with its amplitude written out, or "none"."""
    if config.get("mla_use_nope"):
        return "none"
    block = config.get("rope_parameters")
    if not block:
        return UNKNOWN
    factor = block.get("attention_factor")
    if factor is None:
        from kconv.modeling.drafts.rope import default_attention_factor

        factor = default_attention_factor(block) if block.get("rope_type") == "yarn" else 1.0
    return {**block, "attention_factor": factor, "interleaved": bool(config.get("rope_interleave"))}


def norm_eps(config: Mapping[str, Any]) -> dict[str, Any]:
    """eps of every norm: one default, and the latent norms of MLA, which no published file states."""
    eps: dict[str, Any] = {"default": config.get("rms_norm_eps") or UNKNOWN}
    if config.get("attention_mode") == "mla":
        eps |= {name: config.get("mla_norm_eps") or UNKNOWN for name in MLA_NORMS}
    return eps
