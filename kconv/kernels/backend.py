"""Which implementation computes a kernel: plain torch always works, the others are chosen when they can be.

| name | used for | needs |
|---|---|---|
| `plain` | any device | torch |
| `numba` | CPU tensors | numba (`pip install kconv[fast]`) |
| `triton` | CUDA tensors | triton (`pip install kconv[gpu]`) |

`KCONV_FAST=0` in the environment, or `force("plain")`, leaves plain torch alone.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from kconv.errors import EnvironmentLacks

_SUFFIX = {"numba": "cpu", "triton": "gpu"}
_forced: list[str] = []


@functools.cache
def available(name: str) -> bool:
    """Whether the package behind the implementation called `name` can be imported."""
    return name == "plain" or importlib.util.find_spec(name) is not None


def choice(device: str) -> str:
    """The implementation used for tensors on a device of type `device`: `plain`, `numba` or `triton`."""
    if _forced:
        return _forced[-1]
    if os.environ.get("KCONV_FAST", "1") == "0":
        return "plain"
    wanted = {"cpu": "numba", "cuda": "triton"}.get(device, "plain")
    return wanted if available(wanted) else "plain"


@contextmanager
def force(name: str) -> Iterator[None]:
    """Use the implementation called `name` inside the block, in all threads; raises `EnvironmentLacks` if absent."""
    if not available(name):
        raise EnvironmentLacks(f"{name} is not installed", hint='pip install "kconv[fast,gpu]"')
    _forced.append(name)
    try:
        yield
    finally:
        _forced.remove(name)


def compiled(family: str, device: str) -> ModuleType | None:
    """The module with the compiled kernels of `family` for a device type, or None when plain torch is to be used."""
    name = choice(device)
    return None if name == "plain" else importlib.import_module(f"kconv.kernels.{family}_{_SUFFIX[name]}")


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled by numba without the GIL; kept on disk where a cache directory can be written."""
    import numba

    try:
        return numba.njit(function, cache=True, nogil=True, error_model="numpy")
    except RuntimeError:  # numba found no place for its cache: compile in this process alone
        return numba.njit(function, nogil=True, error_model="numpy")
