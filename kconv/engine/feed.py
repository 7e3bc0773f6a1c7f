"""Handing out work: a worker stays with one output file while it lasts, and shares its slabs' parts with others at the end.

Parts of a slab are handed out one by one, in order, so that workers at the same file stay within a few MB of each other:
what they write is then hashed in order while it is in the cache. A slab is complete when the last of its parts is.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from kconv.engine.slabs import Part, Slab, slab_checksum


class Open:
    """A slab whose parts are being done."""

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self.begun = 0
        self._digests: dict[int, list[str]] = {}
        self._left = len(slab.parts)
        self._lock = threading.Lock()

    def finish(self, first: int, parts: int, digests: list[str]) -> bool:
        """Note the digests of what `parts` parts from `first` on wrote; whether the slab is complete now."""
        with self._lock:
            self._digests[first] = digests
            self._left -= parts
            return self._left == 0

    @property
    def checksum(self) -> str:
        """Of a complete slab, whoever did its parts."""
        return slab_checksum(d for first in sorted(self._digests) for d in self._digests[first])


class Share(NamedTuple):
    """Some parts of a slab, from part `first` on."""

    whole: Open
    first: int
    slab: Slab

    @property
    def order(self) -> tuple[int, ...]:
        """Where it stands: file, slab, part."""
        return (*map(int, self.slab.number.split(".")), self.first)

    def finish(self, digests: list[str]) -> bool:
        """Note what was written; whether the whole slab is complete now."""
        return self.whole.finish(self.first, len(self.slab.parts), digests)


class Stream:
    """The slabs of one output file, front to back, `grain` parts at a time (None: whole slabs)."""

    def __init__(self, slabs: Iterator[Slab], grain: int | None) -> None:
        self._slabs = (slab for slab in slabs if slab.parts)
        self._grain = grain
        self._open: Open | None = None

    def take(self) -> Share | None:
        """The next parts; None when there are none left to begin."""
        if self._open is None or self._open.begun == len(self._open.slab.parts):
            slab = next(self._slabs, None)
            if slab is None:
                return None
            self._open = Open(slab)
        whole, first = self._open, self._open.begun
        parts = whole.slab.parts[first : first + (self._grain or len(whole.slab.parts))]
        whole.begun += len(parts)
        return Share(whole, first, Slab(whole.slab.number, parts))


class Feed:
    """All streams; safe to take from in any number of threads. `begin` hears of every part in the order of handing out."""

    def __init__(
        self, streams: Iterable[Iterator[Slab]], grain: int | None = 1, begin: Callable[[Part], None] | None = None
    ) -> None:
        self._begin = begin or (lambda part: None)
        self._waiting = deque(Stream(slabs, grain) for slabs in streams)
        self._active: list[Stream] = []
        self._mine = threading.local()
        self._lock = threading.Lock()

    def take(self) -> Share | None:
        """The next parts for the calling thread; None when there are none left."""
        with self._lock:
            mine: Stream | None = getattr(self._mine, "stream", None)
            while True:
                if mine is not None:
                    share = mine.take()
                    if share is not None:
                        for part in share.slab.parts:
                            self._begin(part)
                        return share
                    if mine in self._active:
                        self._active.remove(mine)
                if self._waiting:
                    mine = self._waiting.popleft()
                    self._active.append(mine)
                elif self._active:
                    mine = self._active[-1]
                else:
                    return None
                self._mine.stream = mine
