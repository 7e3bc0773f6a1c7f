"""How a conversion is proven to compute what the reference computes.

    report = kconv.parity("out/", "golden.safetensors", dtype="float64")     # the module itself is callable
    report = kconv.parity.compare(model, "golden.safetensors")               # a native model in memory
    kconv.parity.capture("reference/", "golden.safetensors")                 # what to compare with

`check` is `kconv.parity(...)` by its name. `report.passed` is the verdict, `report.data()` the JSON object of the command.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

_LAZY = {
    "check": "kconv.parity.comparison:check",
    "compare": "kconv.parity.comparison:compare",
    "compare_logits": "kconv.parity.measures:compare_logits",
    "capture": "kconv.parity.capturing:capture",
    "Golden": "kconv.parity.golden:Golden",
    "Report": "kconv.parity.report:Report",
    "streamed": "kconv.parity.streaming:streamed",
}

__all__ = ["Golden", "Report", "capture", "check", "compare", "compare_logits", "streamed"]


class _Parity(ModuleType):
    """The package, callable: `import kconv.parity` binds the module to `kconv.parity`, which the documentation calls."""

    def __call__(self, converted: Any, reference: Any, **how: Any) -> Any:
        """See `check`."""
        return importlib.import_module("kconv.parity.comparison").check(converted, reference, **how)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module, _, what = _LAZY[name].partition(":")
        return getattr(importlib.import_module(module), what)
    raise AttributeError(f"module 'kconv.parity' has no attribute {name!r}")


sys.modules[__name__].__class__ = _Parity
