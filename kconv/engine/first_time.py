"""What is done for the first time is done alone: the first conversion of each kind runs under one lock, the rest side by side.

Two threads that import parts of one package (numba, torch) at the same time can find it half made, whatever locks Python
holds, since such packages import each other in circles. What a kind of step imports and compiles shows only when it runs, and
a conversion that needs neither package is to wait for neither. So nobody lists the imports: whoever comes first converts
alone, and leaves everything imported for those who follow, in this and in every later run of the process.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_done: set[Hashable] = set()


@contextmanager
def alone_at_first(kind: Hashable) -> Iterator[None]:
    """Run the block alone until it was run once for this kind; blocks of kinds already done wait for nobody."""
    if kind in _done:
        yield
        return
    with _lock:
        yield
        _done.add(kind)
