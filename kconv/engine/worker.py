"""One worker: reads, converts and delivers parts, in buffers of its own.

Memory is what the workers hold: one part's inputs and outputs each (a few MB, or one untileable tensor), whatever the
size of the checkpoint.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kconv.engine.first_time import alone_at_first
from kconv.engine.sink import Sink
from kconv.engine.slabs import Part, Region, Slab
from kconv.errors import BadData
from kconv.spec import torch_dtype
from kconv.storage.direct import PAGE, phase
from kconv.storage.files import Files
from kconv.transforms.notes import Notes, collect

if TYPE_CHECKING:
    from torch import Tensor

ALIGN = 64
HUGE = 2 << 20


@dataclass
class Progress:
    """What has been done so far; read by the reporter while workers add to it."""

    slabs: int = 0
    bytes_read: int = 0
    bytes_out: int = 0
    notes: Notes = field(default_factory=Notes)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Arena:
    """One worker's buffer, grown when needed and cut into aligned pieces; adjacent cuts stay adjacent when sizes align."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)

    def allocate(self, nbytes: int) -> np.ndarray:
        """Fresh storage, in huge pages where the system gives them: a direct write of it then needs few disk requests."""
        block = mmap.mmap(-1, -(-nbytes // HUGE) * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            block.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(block, np.uint8)

    def cut(self, regions: list[Region]) -> list[np.ndarray]:
        """A 1-D uint8 array for each region."""
        starts, at = [], 0
        for region in regions:
            at += (phase(region.offset, ALIGN) - at) % PAGE
            starts.append(at)
            at += -(-region.spec.nbytes // ALIGN) * ALIGN
        if self._buffer.size < at:
            block = self.allocate(at + PAGE)
            self._buffer = block[-block.ctypes.data % PAGE :]
        return [self._buffer[s : s + r.spec.nbytes] for s, r in zip(starts, regions, strict=True)]


def torch_ready() -> None:
    """Import torch once, with one thread for each worker: the workers are the parallelism."""
    import torch

    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def shaped(data: np.ndarray, region: Region) -> Tensor:
    """Bytes as a tensor of the region's spec (F4 stays bytes, its last dimension halved)."""
    import torch

    spec, flat = region.spec, torch.from_numpy(data)
    if spec.dtype == "F4":
        return flat.view(*spec.shape[:-1], spec.shape[-1] // 2)
    return flat.view(torch_dtype(spec.dtype)).view(spec.shape)


def raw(tensor: Tensor | np.ndarray) -> np.ndarray:
    """A tensor's bytes, 1-D, without a copy where it is contiguous on the CPU."""
    if isinstance(tensor, np.ndarray):
        return tensor
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def moved(part: Part) -> bool:
    """Whether a part's outputs are its inputs' bytes."""
    return part.transform.moves_bytes() and len(part.reads) == len(part.writes)


def bytes_of(part: Part, data: list[np.ndarray], outs: list[np.ndarray] | None = None) -> Sequence[np.ndarray] | None:
    """A part's outputs where they need no tensors, and so no torch; None where they do."""
    if moved(part):
        return data
    return part.transform.on_bytes(data, tuple(r.spec for r in part.reads), part.backward, outs)


def converted(part: Part, ins: list[Tensor], outs: list[Tensor] | None) -> list[Tensor]:
    """The part's outputs, each held against its predicted spec."""
    torch_ready()
    made = (part.transform.backward if part.backward else part.transform.forward)(ins, outs)
    for region, tensor in zip(part.writes, made, strict=True):
        if tensor.nbytes != region.spec.nbytes or tuple(tensor.shape) != region.spec.shape:
            raise AssertionError(f"{part.transform} made {tensor.dtype} {list(tensor.shape)} for {region.name} {region.spec}")
    return made


class Worker:
    """Reads, converts and delivers parts; owns its buffers."""

    def __init__(self, files: Files, sink: Sink, device: str, zero_memo: dict[tuple[object, ...], bool]) -> None:
        self.files, self.sink, self.device = files, sink, device
        self._in, self._out = Arena(), Arena()
        self._zero_memo = zero_memo
        self.notes = Notes()

    def slab(self, slab: Slab, progress: Progress) -> list[str]:
        """Do one slab, or some parts of one; returns the digests of what was written."""
        digests: list[str] = []
        for part in slab.parts:
            digests += self.part(part)
            with progress.lock:
                progress.bytes_read += sum(r.spec.nbytes for r in part.reads)
                progress.bytes_out += sum(w.spec.nbytes for w in part.writes)
        return digests

    def advise(self, slab: Slab, *, needed: bool) -> None:
        """Say that a slab's inputs will be read soon, or not again, where the files want to know."""
        self.files.advise([(r.file, r.offset, r.spec.nbytes) for part in slab.parts for r in part.reads], needed=needed)

    def part(self, part: Part) -> list[str]:
        """Do one part; returns the digests of what it wrote."""
        if self._holes(part):
            zeros = [self.sink.put_zeros(w) for w in part.writes]
            if all(z is not None for z in zeros):
                return zeros  # type: ignore[return-value]
        try:
            with collect() as notes:
                digests = self.deliver(part)
        except BadData as e:
            self.sink.refused(part, e)
            return []
        notes.warnings = [f"{part.reads[0].name} in {part.reads[0].file}: {said}" for said in notes.warnings]
        self.notes.merge(notes)
        return digests

    def deliver(self, part: Part) -> list[str]:
        """Read, convert and hand over one part."""
        own = [self.sink.lend(w) for w in part.writes]
        data = self.read(part, self._in, own if moved(part) else None)
        cut = [] if moved(part) else [d if d is not None else c for d, c in zip(own, self._out.cut(part.writes), strict=True)]
        made = self.made(part, data, cut)
        put = self._put_tensor if self.sink.takes_tensors else self._put_bytes
        return [put(w, t) for w, t in zip(part.writes, made, strict=True)]

    def _put_tensor(self, region: Region, made: Tensor | np.ndarray) -> str:
        return self.sink.put_tensor(region, shaped(made, region) if isinstance(made, np.ndarray) else made)

    def _put_bytes(self, region: Region, made: Tensor | np.ndarray) -> str:
        return self.sink.put(region, raw(made))

    def made(self, part: Part, data: list[np.ndarray], cut: list[np.ndarray] | None) -> Sequence[Tensor | np.ndarray]:
        """A part's outputs from its inputs' bytes, into `cut` if that serves."""
        with alone_at_first(self.kind(part)):
            made = bytes_of(part, data, cut)
            if made is not None:
                return made
            outs = None if cut is None else [shaped(d, w) for d, w in zip(cut, part.writes, strict=True)]
            return converted(part, [shaped(d, r) for d, r in zip(data, part.reads, strict=True)], outs)

    def kind(self, part: Part) -> tuple[object, ...]:
        """What decides which code a conversion runs."""
        return self.device, part.transform, part.backward, *(r.spec.dtype for r in part.reads)

    def read(self, part: Part, arena: Arena, own: list[np.ndarray | None] | None = None) -> list[np.ndarray]:
        """The inputs' bytes: in their final place where the sink lends it, in the arena, or as views of mapped files."""
        views = [v for r in part.reads if (v := self.files.view(r.file, r.offset, r.spec.nbytes)) is not None]
        if len(views) == len(part.reads):
            return views
        data = arena.cut(part.writes if moved(part) else part.reads)
        if own:
            data = [mine if mine is not None else d for mine, d in zip(own, data, strict=True)]
        for region, buffer in zip(part.reads, data, strict=True):
            self.files.read_into(region.file, region.offset, buffer.data)
        return data

    def _holes(self, part: Part) -> bool:
        """Whether all inputs are holes of sparse files and their conversion is zero bytes."""
        if not all(self.files.is_hole(r.file, r.offset, r.spec.nbytes) for r in part.reads):
            return False
        key = (part.transform, part.backward, tuple(r.spec for r in part.reads))
        if key not in self._zero_memo:
            data = self._in.cut(part.reads)
            for d in data:
                d.fill(0)
            made = self.made(part, data, None)
            self._zero_memo[key] = not any(raw(t).any() for t in made)
        return self._zero_memo[key]
