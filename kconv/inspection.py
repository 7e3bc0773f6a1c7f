"""What a checkpoint is, on one screen: family, layout, dtypes with counts and bytes, oddities, and what it converts to."""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

from kconv.adapters import adapter_for
from kconv.checkpoint.reading import Checkpoint, open_checkpoint
from kconv.conversion import plan
from kconv.errors import KconvError
from kconv.json_types import Result
from kconv.options import TARGETS


@dataclass(frozen=True, eq=False)
class Inspection(Result):
    """What a checkpoint is; `of_family` holds what its family has to say, whose keys stand beside the others in JSON."""

    source: str
    tensors: int
    bytes: int
    shards: int
    dtypes: dict[str, dict[str, int]]
    quantization: dict[str, str]
    other_files: list[str]
    of_family: dict[str, Any]
    converts_to: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        found = super().to_json()
        return found | found.pop("of_family")


def inspect(source: Any) -> Inspection:
    """Describe a checkpoint from its headers and config; an unknown family is described as far as its headers go."""
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for group in checkpoint.alike:
        spec, count = group.entry.spec, len(group.names)
        counts[spec.dtype] += count
        sizes[spec.dtype] += count * spec.nbytes
    try:
        family = adapter_for(checkpoint).describe(checkpoint)
        family |= {"notes": [*family["notes"], *_doubts(checkpoint)]}
    except KconvError as e:
        family = {"family": "unknown", "problems": [e.message]}
    return Inspection(
        source=checkpoint.where,
        tensors=len(checkpoint.entries),
        bytes=sum(sizes.values()),
        shards=len(checkpoint.shards),
        dtypes={dtype: {"tensors": counts[dtype], "bytes": sizes[dtype]} for dtype in sorted(counts)},
        quantization=quantization_blocks(checkpoint.config),
        other_files=checkpoint.other_files(),
        of_family=family,
        converts_to=_targets(checkpoint) if family.get("family") != "unknown" else {},
    )


def quantization_blocks(config: dict[str, Any]) -> dict[str, str]:
    """Where the config has quantisation blocks, and what they name."""
    found = {}
    for where, holder in (("top level", config), ("text_config", config.get("text_config") or {})):
        block = holder.get("quantization_config")
        if isinstance(block, dict):
            found[where] = " ".join(str(block[k]) for k in ("quant_method", "format", "quant_algo") if block.get(k))
    return found


def _doubts(checkpoint: Checkpoint) -> list[str]:
    """What is doubtful about a draft; nothing of anything else, nor of a draft that is not sound."""
    drafts = importlib.import_module("kconv.adapters.drafts.adapter")
    config = drafts.sound_config(checkpoint) if drafts.is_draft(checkpoint.config) else None
    if config is None:
        return []
    from kconv.speculative.findings import doubts

    return doubts(config)


def _targets(checkpoint: Checkpoint) -> dict[str, str]:
    """Target -> the grade of its default plan, or why there is none."""
    found = {}
    for target in TARGETS:
        try:
            made = plan(checkpoint, target)
            problems = made.findings.lines()
            found[target] = str(made.grade) if not problems else f"not as it is: {problems[0]}"
        except KconvError as e:
            found[target] = f"not as it is: {e.message}"
    return found
