"""Print the figures of the house, of this repository or of the one whose folder is given; circles make it exit 1."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tests.house import habits, shape
from tests.house.imports import PACKAGE, graph, modules

HERE = Path(__file__).parents[2]


def figures(root: Path) -> dict[str, Any]:
    """Every figure of the package below `root`."""
    known = modules(root)
    files = graph(known)
    rooms = shape.between(files, {name: module.room for name, module in known.items()})
    lines = sum(module.text.count("\n") for module in known.values())
    outside, every = (sum(counts) for counts in zip(*map(habits.anys, known.values()), strict=True))
    return {
        "modules at the top": len(list((root / PACKAGE).glob("*.py"))),
        "rooms": len(rooms),
        "files": len(known),
        "lines": lines,
        "floors of rooms": shape.floors(rooms),
        "floors of files": shape.floors(files),
        "imports between rooms": sum(map(len, rooms.values())),
        "upward imports between rooms": [f"{a} -> {b}" for a, b in shape.upward(rooms)],
        "upward imports between files": [f"{a} -> {b}" for a, b in shape.upward(files)],
        "circles of rooms": shape.circles(rooms),
        "circles of files": shape.circles(files),
        "Any per 1000 lines": round(1000 * every / lines, 1),
        "Any per 1000 lines outside JSON objects": round(1000 * outside / lines, 1),
        "probes": sum(map(habits.probes, known.values())),
        "comparisons with format names": sum(map(habits.comparisons, known.values())),
        "functions over 40 lines": [name for module in known.values() for name in habits.long_functions(module)],
    }


def _said(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    items = [f"{len(item)}: {' '.join(item)}" if isinstance(item, list) else item for item in value]
    return "\n    ".join([str(len(items)), *items])


def main() -> int:
    """Print the figures; 1 when there is a circle."""
    parser = argparse.ArgumentParser(prog="python -m tests.house", description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=HERE, help="a checkout, this one by default")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    asked = parser.parse_args()
    found = figures(asked.root)
    print(json.dumps(found) if asked.json else "\n".join(f"{key}: {_said(value)}" for key, value in found.items()))
    return int(bool(found["circles of files"]))


if __name__ == "__main__":
    sys.exit(main())
