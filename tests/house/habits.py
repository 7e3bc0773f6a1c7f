"""What is counted in the source of one module.

| count | what |
|---|---|
| any | the name `Any`, where it is not the value of a JSON object (`dict[str, Any]`, `Mapping[str, Any]`) |
| probes | `hasattr(x, ...)`, and `getattr(x, "name", default)`: asking an object what it is |
| formats | comparisons with a string that names a quantisation format |
| long | functions of more than 40 lines |
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.house.imports import Module

LONG = 40
FORMATS = frozenset({
    "mxfp4", "nvfp4", "mxfp8", "fp8", "int4", "plain", "packed", "float", "fp8-block", "fp8_block", "block",
    "float-quantized", "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized",
    "naive-quantized", "compressed-tensors", "modelopt", "quark", "MXFP4", "NVFP4", "MXFP8", "FP8",
})  # fmt: skip


def anys(module: Module) -> tuple[int, int]:
    """Uses of `Any`: outside JSON objects, and in all."""
    uses = [node for node in ast.walk(module.tree) if isinstance(node, ast.Name) and node.id == "Any"]
    return len(uses) - sum(1 for node in ast.walk(module.tree) if _json_object(node)), len(uses)


def _json_object(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and isinstance(node.slice, ast.Tuple)):
        return False
    return node.value.id in ("dict", "Mapping") and [ast.unparse(e) for e in node.slice.elts] == ["str", "Any"]


def probes(module: Module) -> int:
    """Calls of hasattr, and of getattr with a name and a default."""
    return sum(1 for node in ast.walk(module.tree) if isinstance(node, ast.Call) and _probe(node))


def _probe(call: ast.Call) -> bool:
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    return name == "hasattr" or (name == "getattr" and len(call.args) == 3 and isinstance(call.args[1], ast.Constant))


def comparisons(module: Module) -> int:
    """Comparisons and match cases with a format's name."""
    return sum(1 for node in ast.walk(module.tree) if isinstance(node, ast.Compare | ast.match_case) and _names_format(node))


def _names_format(node: ast.Compare | ast.match_case) -> bool:
    inside = ast.walk(node.pattern) if isinstance(node, ast.match_case) else _operands(node)
    return any(isinstance(n, ast.Constant) and n.value in FORMATS for n in inside)


def _operands(node: ast.Compare) -> Iterator[ast.AST]:
    for operand in (node.left, *node.comparators):
        yield from operand.elts if isinstance(operand, ast.Tuple | ast.List | ast.Set) else [operand]


def long_functions(module: Module) -> list[str]:
    """Functions longer than a screen."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [node for node in ast.walk(module.tree) if isinstance(node, kinds)]
    return [f"{module.name}.{f.name}" for f in functions if (f.end_lineno or 0) - f.lineno + 1 > LONG]
