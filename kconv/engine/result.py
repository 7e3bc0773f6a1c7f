"""What a conversion did."""

from __future__ import annotations

from dataclasses import dataclass, field

from kconv.json_types import OPTIONAL
from kconv.planning.summary import Summary


@dataclass(frozen=True, eq=False)
class Conversion(Summary):
    """The plan's figures, and the run's: seconds, bytes, slabs; `part` is (i, n), `links` counts files by the way of linking.

    `peak_bytes` and `errors` (of re-encoding, by step) are of a run, not of a folder that was finished already.
    """

    seconds: float
    bytes_read: int
    bytes_written: int
    slabs: int
    resumed_slabs: int
    part: list[int]
    notes: list[str]
    finished: bool = False
    links: dict[str, int] = field(default_factory=dict)
    peak_bytes: int | None = field(default=None, metadata=OPTIONAL)
    errors: dict[str, dict[str, float]] | None = field(default=None, metadata=OPTIONAL)
