"""The figures of a plan that other programs rely on."""

from __future__ import annotations

from dataclasses import dataclass, field

from kconv.json_types import Result


@dataclass(frozen=True, eq=False)
class Summary(Result):
    """What a plan does, in numbers: tensors, bytes of the output, the grade, the digest."""

    family: str
    source_layout: str = field(metadata={"key": "from"})
    target_layout: str = field(metadata={"key": "to"})
    source_tensors: int
    claimed: int
    unclaimed: list[str]
    missing: list[str]
    dropped: int
    target_tensors: int
    output_bytes: int
    grade: str
    plan_digest: str
