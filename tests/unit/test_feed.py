"""Handing out parts: in order, shared by workers at the end of a file, each slab complete once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kconv.engine.feed import Feed, Share
from kconv.engine.run import execute
from kconv.engine.sink import Sink
from kconv.engine.slabs import Part, Region, Slab, slab_checksum
from kconv.errors import KconvError
from kconv.spec import Spec
from kconv.storage.files import Files
from kconv.transforms.base import Same


def part(name: str) -> Part:
    region = Region(name, "f", 0, Spec("U8", (1,)))
    return Part(Same(), False, [region], [region])


def stream(file: int, slabs: int, parts: int) -> Iterator[Slab]:
    for k in range(slabs):
        yield Slab(f"{file}.{k}", [part(f"{file}.{k}.{i}") for i in range(parts)])


def names(share: Share) -> list[str]:
    return [p.reads[0].name for p in share.slab.parts]


@pytest.mark.parametrize("grain, expected", [(1, [1] * 6), (2, [2, 1, 2, 1]), (None, [3, 3])])
def test_grain(grain: int | None, expected: list[int]) -> None:
    feed = Feed([stream(0, 2, 3)], grain)
    shares = list(iter(feed.take, None))
    assert [len(s.slab.parts) for s in shares] == expected
    assert [n for s in shares for n in names(s)] == [f"0.{k}.{i}" for k in range(2) for i in range(3)]


def test_a_slab_is_complete_with_its_last_part_whatever_the_order() -> None:
    feed = Feed([stream(0, 1, 3)])
    shares = list(iter(feed.take, None))
    assert not shares[2].finish(["c"])
    assert not shares[0].finish(["a", "b"])
    assert shares[1].finish([])
    assert shares[0].whole.checksum == slab_checksum(["a", "b", "c"])


def test_slabs_without_parts_are_passed_over() -> None:
    feed = Feed([iter([Slab("0.0", []), Slab("0.1", [part("x")]), Slab("0.2", [])])])
    assert [s.slab.number for s in iter(feed.take, None)] == ["0.1"]


def test_parts_are_announced_in_the_order_of_handing_out() -> None:
    heard: list[str] = []
    feed = Feed([stream(0, 2, 4)], 1, lambda p: heard.append(p.reads[0].name))
    assert [n for s in iter(feed.take, None) for n in names(s)] == heard


def test_threads_stay_with_their_file_and_help_at_the_end() -> None:
    feed = Feed([stream(0, 1, 2), stream(1, 8, 4)])
    taken: dict[int, list[str]] = {0: [], 1: []}
    both = threading.Barrier(2)

    def work(me: int) -> None:
        first = feed.take()
        assert first
        taken[me] += names(first)
        both.wait()
        while share := feed.take():
            taken[me] += names(share)
            both.wait(5)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    everything = sorted(taken[0] + taken[1])
    assert everything == sorted([*(f"0.0.{i}" for i in range(2)), *(f"1.{k}.{i}" for k in range(8) for i in range(4))])
    helper = next(t for t in taken.values() if t[0].startswith("0."))
    assert helper[:2] == ["0.0.0", "0.0.1"]
    assert len(helper) > 10, "its own file done, it shares the other's parts"


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_of_several_failures_the_first_in_the_file_is_said(slow: int) -> None:
    together = threading.Barrier(3)

    class Zeros(Files):
        def names(self) -> list[str]:
            return ["f"]

        def size(self, name: str) -> int:
            return 1

        def fingerprint(self, name: str) -> str:
            return ""

        def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
            return bytes(length or 1)

        def read_into(self, name: str, offset: int, buffer: memoryview) -> None: ...

    class Failing(Sink):
        def put(self, region: Region, data: np.ndarray) -> str:
            together.wait(5)
            if region.name.endswith(str(slow)):
                time.sleep(0.05)
            raise KconvError(region.name)

    with pytest.raises(KconvError, match=r"0\.0\.0"):
        execute([stream(0, 1, 3)], Zeros(), Failing(), workers=3)
