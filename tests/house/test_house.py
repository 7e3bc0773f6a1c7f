"""The house stays as it is: no circle, few modules at the top; and the counting sees what it should."""

from __future__ import annotations

from pathlib import Path

from tests.house import shape
from tests.house.__main__ import HERE, figures
from tests.house.imports import graph, modules


def test_no_module_imports_itself_by_way_of_others() -> None:
    found = figures(HERE)
    assert found["circles of files"] == []
    assert found["upward imports between files"] == []


def test_a_newcomer_finds_at_most_twelve_modules_at_the_top() -> None:
    assert figures(HERE)["modules at the top"] <= 12
    assert figures(HERE)["floors of rooms"] <= 11


def test_a_circle_through_a_link_and_a_late_import_is_counted(tmp_path: Path) -> None:
    package, linked = tmp_path / "kconv", tmp_path / "adapters"
    package.mkdir()
    linked.mkdir()
    (package / "adapters").symlink_to("../adapters")
    (package / "__init__.py").write_text("")
    (package / "spec.py").write_text("")
    (package / "plan.py").write_text("import kconv.spec\n\ndef late():\n    from kconv.adapters import k3\n")
    (linked / "__init__.py").write_text('KNOWN = {"k3": "kconv.adapters.k3"}\n')
    (linked / "k3.py").write_text("from kconv import plan\n")
    found = graph(modules(tmp_path))
    assert shape.circles(found) == [["kconv.adapters.k3", "kconv.plan"]]
    assert found["kconv.adapters"] == {"kconv.adapters.k3"}
    assert shape.upward(found) == [("kconv.plan", "kconv.adapters.k3")]
    assert shape.floors(found) == 4


def test_floors_count_the_longest_way_down() -> None:
    assert shape.floors({"a": {"b", "c"}, "b": {"c"}, "c": set(), "d": {"a"}}) == 4
