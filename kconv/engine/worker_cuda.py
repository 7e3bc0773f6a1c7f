"""A worker that converts on the GPU: page-locked buffers and a stream of its own.

| part | way |
|---|---|
| bytes that only move, into tensors of the device | through pinned batches; nothing waits but for a free batch |
| converted, into tensors of the device | pinned buffer, device, decoded straight into its rows of the target |
| converted, into files | the same, and back into pinned memory |

Bytes cross the bus as they are stored, so packed experts go over packed. Several workers overlap each other's disk and
bus time. Results are the same bits as on the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kconv.engine.first_time import alone_at_first
from kconv.engine.sink import Sink
from kconv.engine.slabs import Part, Region, Slab
from kconv.engine.worker import Arena, Progress, Worker, converted, moved, raw, shaped
from kconv.storage.files import Files

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

WORKERS = 8
"""Readers that a load has at most: more of them wait for the machine's memory and for each other."""
BATCH = 64 << 20
BATCHES = 2
"""While one is read into, the other crosses the bus. Smaller ones mean more calls, for which the threads wait on each other."""


class PinnedArena(Arena):
    """A buffer in page-locked memory, with the event after which it may be written again."""

    def __init__(self) -> None:
        import torch

        super().__init__()
        self.event = torch.cuda.Event()
        self._owner: Tensor | None = None

    def allocate(self, nbytes: int) -> np.ndarray:
        import torch

        self._owner = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return self._owner.numpy()


class Batch:
    """Pinned memory filled with consecutive regions, and where on the device each of them goes.

    All are sent in one call: threads that hold Python's lock for a call per region wait for each other longer than for the bus.
    """

    def __init__(self) -> None:
        import torch

        self.tensor = torch.empty(BATCH, dtype=torch.uint8, pin_memory=True)
        self.bytes = self.tensor.numpy().data
        self.event = torch.cuda.Event()
        self.sources: list[Tensor] = []
        self.targets: list[Tensor] = []
        self.used = 0

    def send(self) -> None:
        """Queue the copies on the current stream."""
        import torch

        if self.used:
            torch._foreach_copy_(self.targets, self.sources, non_blocking=True)
            self.event.record()

    def reuse(self) -> None:
        """Wait until the copies are done, and begin anew."""
        self.event.synchronize()
        self.sources, self.targets, self.used = [], [], 0


class CudaWorker(Worker):
    """Delivers device tensors to a sink that takes tensors, host bytes to one that writes files.

    Work queued on the device's default stream after a slab sees what the slab put there.
    """

    _lends_views = False
    """Whether the stream reads pinned memory through numpy views, which torch's allocator does not know to be in use."""

    def __init__(self, files: Files, sink: Sink, device: str, zero_memo: dict[tuple[object, ...], bool]) -> None:
        import torch

        super().__init__(files, sink, device, zero_memo)
        self.stream = torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.default_stream(device))  # the targets' storage may still be in use there
        self._arenas, self._turn = [PinnedArena(), PinnedArena()], 0
        self._out: Arena = PinnedArena()
        self._batches: list[Batch] = []

    def slab(self, slab: Slab, progress: Progress) -> list[str]:
        """Do one slab on the worker's stream."""
        import torch

        with torch.cuda.stream(self.stream):
            digests = super().slab(slab, progress)
            if self._batches:
                self._next_batch()
        torch.cuda.default_stream(self.device).wait_stream(self.stream)
        if self._lends_views:
            self.stream.synchronize()
        return digests

    def part(self, part: Part) -> list[str]:
        """Do one part; bytes that only move into the device's tensors take the short way."""
        places = self._lent(part) if moved(part) else None
        if places is None:
            return super().part(part)
        for region, place in zip(part.reads, places, strict=True):
            self._send(region, place)
        return [""] * len(places)

    def _send(self, region: Region, place: Tensor) -> None:
        """A region's bytes from its file to the device."""
        import torch

        place, done, size = place.view(torch.uint8), 0, region.spec.nbytes
        while done < size:
            batch = self._batches[0] if self._batches else self._next_batch()
            start, count = batch.used, min(BATCH - batch.used, size - done)
            if not count:
                self._next_batch()
                continue
            self.files.read_into(region.file, region.offset + done, batch.bytes[start : start + count])
            batch.sources.append(batch.tensor[start : start + count])
            batch.targets.append(place[done : done + count])
            batch.used, done = start + count, done + count

    def _next_batch(self) -> Batch:
        """Send the batch being filled, and make another the first."""
        if self._batches:
            self._batches[0].send()
        if len(self._batches) < BATCHES:
            self._batches.insert(0, Batch())
        else:
            self._batches.insert(0, self._batches.pop())
            self._batches[0].reuse()
        return self._batches[0]

    def deliver(self, part: Part) -> list[str]:
        """Read into a pinned buffer, copy, convert, hand over; waits only for what it needs."""
        self._turn, self._lends_views = 1 - self._turn, True
        arena = self._arenas[self._turn]
        arena.event.synchronize()
        data = [shaped(d, r) for d, r in zip(self.read(part, arena), part.reads, strict=True)]
        made = data
        if not moved(part):
            with alone_at_first(self.kind(part)):
                made = converted(part, [d.to(self.device, non_blocking=True) for d in data], self._shaped_places(part))
        if self.sink.takes_tensors:
            digests = [self.sink.put_tensor(w, t) for w, t in zip(part.writes, made, strict=True)]
            arena.event.record()
            return digests
        if not moved(part):
            made = [self._host(t, d, w) for t, d, w in zip(made, self._out.cut(part.writes), part.writes, strict=True)]
            self.stream.synchronize()
        return [self.sink.put(w, raw(t)) for w, t in zip(part.writes, made, strict=True)]

    def _lent(self, part: Part) -> list[Tensor] | None:
        """The device's own storage of what a part writes, flat; None unless all of it is there."""
        places = [place for w in part.writes if (place := self.sink.lend_on_device(w)) is not None]
        return places if len(places) == len(part.writes) else None

    def _shaped_places(self, part: Part) -> list[Tensor] | None:
        places = self._lent(part)
        shapes = [w.spec.shape for w in part.writes]
        return places and [p.view(*s[:-1], -1) if s else p[0] for p, s in zip(places, shapes, strict=True)]

    def _host(self, tensor: Tensor, data: np.ndarray, region: Region) -> Tensor:
        """A device tensor on its way into pinned memory."""
        return shaped(data, region).copy_(tensor, non_blocking=True)
