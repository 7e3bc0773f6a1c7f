"""The manifest of a conversion, from its plan and the files it made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kconv.checkpoint.manifest import FORMAT, versions
from kconv.names import folded
from kconv.planning.plan import Plan

OURS = ("native", "nemo")  # layouts that kconv made, whose source is what the way back leads to


def build(plan: Plan, files: Mapping[str, Mapping[str, Any]], inputs: Mapping[str, str]) -> dict[str, Any]:
    """The manifest of a conversion, from its plan, the files it made, and the stamps of those it read."""
    source, layouts = plan.source, plan.layouts
    where = source.where if source.where.startswith("hf://") else Path(source.where).resolve().name
    earlier = (source.manifest or {}).get("source")
    ours = plan.backward or layouts.source_layout in OURS
    origin = earlier if ours and earlier else {
        "name": where,
        "revision": source.files.revision,
        "config": source.config,
        "index_metadata": source.index_metadata,
        "tensors": len(source.entries),
    }  # fmt: skip
    return {
        "format": FORMAT,
        "source": origin,
        "family": layouts.family,
        "from": layouts.source_layout,
        "to": layouts.target_layout,
        "options": plan.options,
        "facts": layouts.facts,
        "plan_digest": plan.digest,
        "grade": str(plan.grade),
        "tensors": len(plan.targets),
        "dropped": [{"reason": d.reason, "count": len(d.names), "names": folded(d.names)} for d in layouts.drops],
        "notes": layouts.notes,
        "inputs": {name: inputs[name] for name in sorted(inputs)},
        "files": {name: dict(files[name]) for name in sorted(files)},
        "versions": versions(),
    }
