"""Speculative decoding with converted drafts: the contract they were trained under, and a reference decoder that shows it.

| module | holds |
|---|---|
| `contract` | anchors, blocks, masks, positions, labels, acceptance |
| `capture` | `capture_hidden(model, taps, stream)`: the target states a draft reads |
| `target` | a target with a cache that can take tokens back: by cropping, by recorded states, or by snapshot |
| `proposers` | how each family drafts |
| `decoding` | `speculative_generate`, `plain_generate` |
| `loading` | `load_draft`: a draft directory, published or native, as a module |
| `findings` | `review`: what is doubtful about a draft's configuration |
| `parity` | a draft against a golden file |
"""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "capture_hidden": "capture",
    "load_draft": "loading",
    "plain_generate": "decoding",
    "speculative_generate": "decoding",
    "review": "findings",
}

__all__ = ["capture_hidden", "load_draft", "plain_generate", "review", "speculative_generate"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"kconv.speculative.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'kconv.speculative' has no attribute {name!r}")
