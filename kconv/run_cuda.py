"""A worker that converts on the GPU: pinned buffers, its own stream, two parts in flight.

Bytes cross the bus as they are stored, so packed experts go over packed; a part's copy to the device overlaps the
conversion of the part before it, and several workers overlap each other's disk and bus time. Results are the same bits
as on the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kconv.files import Files
from kconv.run import Arena, Progress, Sink, Worker, converted, moved, raw, shaped
from kconv.slabs import Part, Region, Slab

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


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


class CudaWorker(Worker):
    """Delivers device tensors to a sink that takes tensors, host bytes to one that writes files."""

    def __init__(self, files: Files, sink: Sink, device: str, zero_memo: dict) -> None:
        import torch

        super().__init__(files, sink, device, zero_memo)
        self.stream = torch.cuda.Stream(device)
        self._arenas, self._turn = [PinnedArena(), PinnedArena()], 0
        self._out: Arena = PinnedArena()

    def deliver(self, part: Part) -> list[str]:
        """Read into a pinned buffer, copy, convert, hand over; waits only for what it needs."""
        import torch

        self._turn = 1 - self._turn
        arena = self._arenas[self._turn]
        arena.event.synchronize()
        data = [shaped(d, r) for d, r in zip(self.read(part, arena), part.reads, strict=True)]
        put_tensor: Any = getattr(self.sink, "put_tensor", None)
        with torch.cuda.stream(self.stream):
            made = data
            if not moved(part):
                made = converted(part, [d.to(self.device, non_blocking=True) for d in data], None)
            if put_tensor is not None:
                digests = [put_tensor(w, t) for w, t in zip(part.writes, made, strict=True)]
                arena.event.record()
                return digests
            if not moved(part):
                made = [self._host(t, d, w) for t, d, w in zip(made, self._out.cut(part.writes), part.writes, strict=True)]
                self.stream.synchronize()
        return [self.sink.put(w, raw(t)) for w, t in zip(part.writes, made, strict=True)]

    def _host(self, tensor: Tensor, data: np.ndarray, region: Region) -> Tensor:
        """A device tensor on its way into pinned memory."""
        return shaped(data, region).copy_(tensor, non_blocking=True)

    def slab(self, slab: Slab, progress: Progress) -> str:
        """Do one slab; what was put on the device is complete when this returns."""
        checksum = super().slab(slab, progress)
        self.stream.synchronize()
        return checksum
