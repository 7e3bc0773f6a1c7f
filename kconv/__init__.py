"""kconv: Kimi K3 checkpoints into native PyTorch modules and back, bit-exactly, with proof.

    plan = kconv.plan("Kimi-K3/", to="native")
    kconv.convert(plan, "out/")
    kconv.verify("out/", source="Kimi-K3/")
    kconv.parity("out/", "golden.safetensors")
    model = kconv.load("out/")

Importing kconv is light: torch is loaded when something needs it.
"""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "plan": "kconv.conversion",
    "convert": "kconv.conversion",
    "verify": "kconv.verification",
    "load": "kconv.loading",
    "inspect": "kconv.inspection",
    "tiny": "kconv.synthesis.families",
    "package": "kconv.packaging.package",
    "check": "kconv.packaging.check",
    "publish": "kconv.publishing.publish",
}

__all__ = ["check", "convert", "inspect", "load", "package", "parity", "plan", "publish", "tiny", "verify", "zoo"]


def __getattr__(name: str) -> Any:
    if name in ("parity", "zoo"):  # modules; `parity` is itself the call
        return importlib.import_module(f"kconv.{name}")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'kconv' has no attribute {name!r}")
