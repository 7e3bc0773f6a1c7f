"""Which module of kconv imports which, read from the source, with the links to `adapters` and `modeling` resolved.

| counted | as |
|---|---|
| `import a.b`, `from a import b` | the module a.b where there is one, else a |
| relative imports | the module they mean |
| imports inside functions and under TYPE_CHECKING | like the others |
| `importlib.import_module("a.b")` and a module's whole name as a string (no logger's), `"a.b:X"` too | a lazy import of it |
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE = "kconv"


@dataclass(frozen=True)
class Module:
    """A file of the package under its import name."""

    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def package(self) -> str:
        """The package that its relative imports start from."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    @property
    def room(self) -> str:
        """The folder or the single file directly below the package that holds it."""
        return ".".join(self.name.split(".")[1:2]) or "__init__"


def modules(root: Path) -> dict[str, Module]:
    """Every module of the package below `root`, linked folders included."""
    return {name: Module(name, path) for name, path in sorted(_walk(root / PACKAGE, PACKAGE))}


def _walk(folder: Path, name: str) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and any(path.glob("*.py")):
            yield from _walk(path, f"{name}.{path.name}")
        elif path.suffix == ".py":
            yield (name if path.stem == "__init__" else f"{name}.{path.stem}"), path


def imports(module: Module, known: dict[str, Module]) -> set[str]:
    """The modules that `module` names, itself left out."""
    found = {target for name in _named(module, known) if (target := _module(name, known))}
    return found - {module.name}


def _named(module: Module, known: dict[str, Module]) -> Iterator[str]:
    calls = [node for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
    loggers = [arg for call in calls if ast.unparse(call.func) == "logging.getLogger" for arg in call.args]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, module)
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in loggers:
            name = node.value.partition(":")[0]
            yield from [name] if name in known and name != PACKAGE else []


def _base(node: ast.ImportFrom, module: Module) -> str:
    if not node.level:
        return node.module or ""
    above = module.package.split(".")[: len(module.package.split(".")) - node.level + 1]
    return ".".join([*above, *([node.module] if node.module else [])])


def _module(name: str, known: dict[str, Module]) -> str | None:
    """The module that holds what `name` names, None outside the package."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or None


def graph(known: dict[str, Module]) -> dict[str, set[str]]:
    """Module -> the modules it imports."""
    return {name: imports(module, known) for name, module in known.items()}
