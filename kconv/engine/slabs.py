"""The unit of work: a slab is a run of parts that is read, converted and written in one go, about 32 MB of output.

A part is some rows of one piece of one edge: regions to read, regions to write, and the transform between them. A stream is
the slabs of one output file, front to back, so that a worker that stays with a stream writes in order. The numbering
(file, slab) is a pure function of plan and layout, which is what lets a journal be resumed and `--part I/N` split the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass

import xxhash

from kconv.planning.edges import Edge
from kconv.planning.plan import Plan
from kconv.spec import Spec
from kconv.storage.direct import PAGE
from kconv.transforms.base import Specs, Transform

SLAB_BYTES = 32 << 20
PART_BYTES = 8 << 20
DEVICE_PART_BYTES = 64 << 20

Place = Callable[[str], tuple[str, int]]


@dataclass(slots=True)
class Region:
    """Consecutive bytes of a file that hold (rows of) one tensor."""

    name: str
    file: str
    offset: int
    spec: Spec
    first_row: int = 0


@dataclass(slots=True)
class Part:
    """Regions to read, the transform and its direction, regions to write."""

    transform: Transform
    backward: bool
    reads: list[Region]
    writes: list[Region]

    @property
    def cost(self) -> int:
        """The larger of bytes in and bytes out."""
        return max(sum(r.spec.nbytes for r in self.reads), sum(w.spec.nbytes for w in self.writes))


@dataclass(slots=True)
class Slab:
    """Parts done together; `number` is `<file>.<slab>`, both counted from 0 in output order."""

    number: str
    parts: list[Part]


def part_bytes(device: str) -> int:
    """Size of a part: what stays in a core's cache on the CPU, what hides a launch and a transfer on a GPU."""
    return PART_BYTES if device == "cpu" else DEVICE_PART_BYTES


def streams(plan: Plan, place: Place, device: str = "cpu", without: Container[str] = ()) -> list[Iterator[Slab]]:
    """The slabs of a plan whose targets lie where `place` says, one iterator for each file of first targets.

    Edges whose first target is in `without` are left out.
    """
    by_file: dict[str, list[tuple[int, Edge]]] = {}
    for edge in plan.edges:
        first = _first_target(plan, edge)
        if first in without:
            continue
        file, offset = place(first)
        by_file.setdefault(file, []).append((offset, edge))
    return [_stream(plan, i, edges, place, part_bytes(device)) for i, (_, edges) in enumerate(sorted(by_file.items()))]


def _stream(plan: Plan, file: int, edges: list[tuple[int, Edge]], place: Place, most: int) -> Iterator[Slab]:
    count, batch, size = 0, [], 0
    for _, edge in sorted(edges, key=lambda item: item[0]):
        for part in _edge_parts(plan, edge, place, most):
            batch.append(part)
            size += part.cost
            if size >= max(SLAB_BYTES, most):
                yield Slab(f"{file}.{count}", batch)
                count, batch, size = count + 1, [], 0
    if batch:
        yield Slab(f"{file}.{count}", batch)


def _first_target(plan: Plan, edge: Edge) -> str:
    if plan.backward:
        return edge.rule.left_names(edge.binding, edge.rule.domain[0])[0][0]
    return edge.rule.right_names(edge.binding)[0]


def _edge_parts(plan: Plan, edge: Edge, place: Place, most: int) -> Iterator[Part]:
    def source(name: str) -> tuple[str, int]:
        entry = plan.entry(name)
        return entry.file, entry.start

    find_left, find_right = (place, source) if plan.backward else (source, place)
    right_names = edge.rule.right_names(edge.binding)
    element = edge.right
    bases = [find_right(name) for name in right_names]
    for k, value in enumerate(edge.rule.domain):
        offsets = [base + k * spec.nbytes for (_, base), spec in zip(bases, element, strict=True)]
        rows_before = [0] * len(element)
        for names, lefts, rights in zip(edge.rule.left_names(edge.binding, value), edge.lefts, edge.rights, strict=True):
            left = [Region(n, *find_left(n), s) for n, s in zip(names, lefts, strict=True)]
            right = [
                Region(n, f, at, s, before)
                for n, (f, _), at, s, before in zip(right_names, bases, offsets, rights, rows_before, strict=True)
            ]
            yield from _tiled(edge.rule.transform, plan.backward, left, right, most)
            offsets = [at + s.nbytes for at, s in zip(offsets, rights, strict=True)]
            rows_before = [b + (s.shape[0] if s.shape else 0) for b, s in zip(rows_before, rights, strict=True)]


def _tiled(transform: Transform, backward: bool, left: list[Region], right: list[Region], most: int) -> Iterator[Part]:
    """One part, or several of about `most` bytes where the transform's rows are independent."""
    specs: tuple[Specs, Specs] = tuple(r.spec for r in left), tuple(r.spec for r in right)
    tiles = transform.tiles(*specs)
    whole = Part(transform, backward, *((right, left) if backward else (left, right)))
    if tiles is None or whole.cost <= most:
        yield whole
        return
    count = -(-right[0].spec.shape[0] // tiles.right[0])
    written = zip(left, tiles.left, strict=True) if backward else zip(right, tiles.right, strict=True)
    step = _paged(max(1, count * most // whole.cost), [r.spec.row_bytes * n for r, n in written])
    for at in range(0, count, step):
        lefts = [_rows(r, at * n, (at + step) * n) for r, n in zip(left, tiles.left, strict=True)]
        rights = [_rows(r, at * n, (at + step) * n) for r, n in zip(right, tiles.right, strict=True)]
        yield Part(transform, backward, *((rights, lefts) if backward else (lefts, rights)))


def _paged(step: int, rows: list[int]) -> int:
    """So many rows of these bytes, or as many fewer as fill whole pages of the files, for direct writes."""
    whole = math.lcm(*(PAGE // math.gcd(PAGE, row_bytes) for row_bytes in rows))
    return step // whole * whole or step


def _rows(region: Region, start: int, stop: int) -> Region:
    spec = region.spec
    start, stop = min(start, spec.shape[0]), min(stop, spec.shape[0])
    return Region(
        region.name, region.file, region.offset + start * spec.row_bytes, spec.rows(stop - start), region.first_row + start
    )


def slab_checksum(digests: Iterable[str]) -> str:
    """One checksum of a slab from the digests of its written regions, in order."""
    return xxhash.xxh3_64_hexdigest("".join(digests).encode())
