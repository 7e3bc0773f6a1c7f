"""Writing output files: digests that trail behind, and large regions past the page cache."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kconv.engine.file_sink import FileSink
from kconv.engine.out_files import lay_out
from kconv.engine.slabs import Part, Region, Slab
from kconv.engine.worker import Arena
from kconv.planning.edges import Target
from kconv.spec import Spec
from kconv.storage import direct, hashing
from kconv.storage.direct import LEAST, PAGE, DirectWriter, file_system, whole_pages
from kconv.storage.files import Descriptors, LocalFiles
from kconv.storage.hashing import DIGESTS, Spare, TrailingHash, digests_of
from kconv.transforms.base import Same
from tests.reading import takes_direct_writes


def noise(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def trailing(path: Path, content: bytes, header: int, algorithm: str = "xxh3-128") -> TrailingHash:
    path.write_bytes(content[:header] + bytes(len(content) - header))
    fds = Descriptors(lambda name: os.open(path.parent / name, os.O_RDWR))
    return TrailingHash(fds, path.name, len(content), content[:header], algorithm, Spare())


def deliver(hash_: TrailingHash, path: Path, content: bytes, at: int, n: int, *, offer: bool = True) -> None:
    """What a worker does with a region: have it hashed or kept, write it, say that it is written."""
    data = memoryview(content)[at : at + n]
    if offer and not hash_.take(at, data):
        hash_.keep(at, data)
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(content[at : at + n])
    hash_.written(at, n)
    hash_.advance()


@pytest.mark.parametrize("algorithm", list(DIGESTS))
@pytest.mark.parametrize("order", ["front to back", "back to front", "random", "never offered", "half offered"])
def test_the_digest_does_not_depend_on_the_order(
    order: str, algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "WORTH", 5000)
    content = noise(100_000).tobytes()
    path = tmp_path / "f"
    hash_ = trailing(path, content, 96, algorithm)
    spans = [(at, min(1000, len(content) - at)) for at in range(96, len(content), 1000)]
    if order == "back to front":
        spans.reverse()
    if order in ("random", "half offered"):
        random.Random(1).shuffle(spans)
    for i, (at, n) in enumerate(spans):
        deliver(hash_, path, content, at, n, offer=order != "never offered" and (order != "half offered" or i % 2 == 0))
    assert hash_.hexdigest() == DIGESTS[algorithm](content).hexdigest()
    assert hash_._room == hashing.KEPT, "what was kept is given back"


def test_bytes_that_find_no_room_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "KEPT", 2500)
    content, path = noise(50_000).tobytes(), tmp_path / "f"
    hash_ = trailing(path, content, 0)
    for at in range(49_000, -1, -1000):
        deliver(hash_, path, content, at, 1000)
        assert hash_._room >= 0
    assert hash_.hexdigest() == xxhash.xxh3_128_hexdigest(content)


def test_zero_bytes_are_hashed_without_being_written(tmp_path: Path) -> None:
    content, path = noise(3000).tobytes() + bytes(5_000_000) + noise(3000, 1).tobytes(), tmp_path / "f"
    hash_ = trailing(path, content, 0)
    assert not hash_.take(3000, 5_000_000)
    hash_.keep(3000, 5_000_000)
    hash_.written(3000, 5_000_000)
    deliver(hash_, path, content, 5_003_000, 3000)
    deliver(hash_, path, content, 0, 3000)
    assert hash_.hexdigest() == xxhash.xxh3_128_hexdigest(content)


def test_a_digest_of_a_file_with_a_gap_is_refused(tmp_path: Path) -> None:
    content, path = noise(3000).tobytes(), tmp_path / "f"
    hash_ = trailing(path, content, 0)
    deliver(hash_, path, content, 1000, 2000)
    with pytest.raises(AssertionError, match="3000 bytes were never written"):
        hash_.hexdigest()


def test_many_threads_make_the_same_digest(tmp_path: Path) -> None:
    content, path = noise(4_000_000).tobytes(), tmp_path / "f"
    hash_ = trailing(path, content, 0)
    spans = iter([(at, 4000) for at in range(0, len(content), 4000)])
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                span = next(spans, None)
            if span is None:
                return
            deliver(hash_, path, content, *span)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hash_.hexdigest() == xxhash.xxh3_128_hexdigest(content)


def test_digests_of_a_file_in_one_pass(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(content := noise(9_000_000).tobytes())
    found = digests_of(LocalFiles(tmp_path), "f", "sha256", "xxh3-128")
    assert found == {"sha256": hashlib.sha256(content).hexdigest(), "xxh3-128": xxhash.xxh3_128_hexdigest(content)}


@pytest.mark.parametrize("offset", [0, PAGE, 64, PAGE - 64, 5 * PAGE + 2048])
def test_a_buffer_lies_in_its_pages_as_the_region_does_in_the_file(offset: int) -> None:
    region = Region("w", "f", offset, Spec("U8", (3 * LEAST,)))
    (data,) = Arena().cut([region])
    start, end = whole_pages(data, offset)
    assert (offset + start) % PAGE == (offset + end) % PAGE == (data.ctypes.data + start) % PAGE == 0
    assert end - start > data.nbytes - 2 * PAGE, "all but the ends is written directly"


@pytest.mark.parametrize("nbytes, offset", [(LEAST - 1, 0), (LEAST, 64), (3 * LEAST, 8)])
def test_what_cannot_be_written_directly_is_left_alone(nbytes: int, offset: int) -> None:
    (data,) = Arena().cut([Region("w", "f", offset, Spec("U8", (nbytes,)))])
    assert whole_pages(data, offset) == (0, 0)


def written(folder: Path, wanted: bool | None) -> tuple[bytes, DirectWriter]:
    """One file of odd and large tensors, written by a sink."""
    folder.mkdir(parents=True)
    shapes = {"large": (3 * LEAST + 64,), "shifted": (2 * LEAST,), "zeros": (LEAST,), "odd": (77,), "last": (2 * LEAST + 5,)}
    targets = {n: Target(Spec("U8", s), "model", 0) for n, s in shapes.items()}
    (file,) = lay_out(targets, 1 << 30)
    sink = FileSink(folder, [file], "xxh3-128", wanted)
    sink.prepare()
    regions = [Region(n, file.name, file.starts[n], t.spec) for n, t in targets.items()]
    arena = Arena()
    for i, region in enumerate(regions):
        (data,) = arena.cut([region])
        data[:] = 0 if region.name == "zeros" else noise(data.nbytes, i)
        sink.put(region, data)
    sink.finished(Slab("0.0", [Part(Same(), False, regions, regions)]))
    sink.sync()
    digest = sink.hashes[file.name].hexdigest()
    sink.close()
    content = (folder / file.name).read_bytes()
    assert digest == xxhash.xxh3_128_hexdigest(content)
    for i, region in enumerate(regions):
        stored = content[region.offset : region.offset + region.spec.nbytes]
        assert stored == (bytes(LEAST) if region.name == "zeros" else noise(region.spec.nbytes, i).tobytes())
    return content, sink._direct


def test_both_ways_of_writing_make_the_same_file(tmp_path: Path) -> None:
    assert written(tmp_path / "direct", True)[0] == written(tmp_path / "buffered", False)[0]


@pytest.mark.parametrize("refusal", sorted(direct.REFUSALS))
def test_a_file_system_that_refuses_is_written_through_the_page_cache(
    refusal: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(direct, "pwrite_full", refuse)
    content, writer = written(tmp_path / "refused", True)
    assert not writer.on
    monkeypatch.undo()
    assert content == written(tmp_path / "buffered", False)[0]


def test_a_full_disk_is_not_taken_for_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if not takes_direct_writes(tmp_path):
        pytest.skip("no direct writes on this file system")
    monkeypatch.setattr(direct, "pwrite_full", full)
    with pytest.raises(OSError, match="No space left"):
        written(tmp_path / "full", True)


def test_the_file_system_is_that_of_the_longest_mount_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mounts = "/dev/a / ext4 rw 0 0\nserver:/x /data nfs4 rw 0 0\n/dev/b /data/local\\040disk xfs rw 0 0\n"
    monkeypatch.setattr(Path, "read_text", lambda self: mounts)
    kinds = {"/home/x": "ext4", "/data/x": "nfs4", "/data/local disk/x": "xfs", "/database": "ext4"}
    assert {path: file_system(Path(path)) for path in kinds} == kinds


def test_a_worker_waits_for_the_one_before_it_and_for_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "PATIENCE", 60)
    content, path = noise(4000).tobytes(), tmp_path / "f"
    hash_ = trailing(path, content, 0)
    parts = {at: memoryview(content)[at : at + 1000] for at in range(0, 4000, 1000)}
    hash_.begin(3000, 1000)
    assert not hash_.take(3000, parts[3000]), "nobody works on what lies before: no waiting"
    begun, results = threading.Event(), []

    def first() -> None:
        hash_.begin(0, 1000)
        begun.set()
        while not hash_._lock._waiters:  # type: ignore[attr-defined]
            pass
        results.append(hash_.take(0, parts[0]))

    thread = threading.Thread(target=first)
    thread.start()
    begun.wait()
    hash_.begin(1000, 1000)
    results.append(hash_.take(1000, parts[1000]))
    thread.join()
    assert results == [True, True]
    hash_.begin(2000, 1000)
    assert not hash_.take(3000, parts[3000]), "what this very thread works on is not waited for"
    assert hash_.take(2000, parts[2000])
    assert hash_.take(3000, parts[3000])
    assert hash_.hexdigest() == xxhash.xxh3_128_hexdigest(content)
