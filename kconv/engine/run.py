"""Executing slabs: worker threads that each take one part at a time, in file order.

The first error stops every worker after its part; an interrupt does the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from kconv.engine.feed import Feed
from kconv.engine.sink import Sink
from kconv.engine.slabs import Slab
from kconv.engine.worker import Progress, Worker
from kconv.storage.files import Files


def worker_for(device: str) -> type[Worker]:
    """The kind of worker that converts on `device`; to be called before threads start, since it imports."""
    if device == "cpu":
        return Worker
    import torch  # noqa: F401

    from kconv.engine.worker_cuda import CudaWorker

    return CudaWorker


def execute(
    streams: Iterable[Iterator[Slab]],
    files: Files,
    sink: Sink,
    *,
    workers: int,
    device: str = "cpu",
    done: Callable[[Slab, str], None] = lambda slab, checksum: None,
    tick: Callable[[int], None] = lambda done: None,
    interval: float = 0.25,
) -> Progress:
    """Do all slabs; `done` is called after each, `tick` every `interval` seconds from the calling
    thread, with the bytes made so far."""
    kind = worker_for(device)
    progress, stop = Progress(), threading.Event()
    failures: list[tuple[tuple[int, ...], BaseException]] = []
    feed, zero_memo = Feed(streams, 1 if device == "cpu" else None, sink.begin), dict[tuple[object, ...], bool]()
    finished = threading.Semaphore(0)

    def work() -> None:
        share = None
        try:
            worker = kind(files, sink, device, zero_memo)
            while not stop.is_set():
                share = feed.take()
                if share is None:
                    break
                whole = share.whole
                if share.first == 0:
                    worker.advise(whole.slab, needed=True)
                if share.finish(worker.slab(share.slab, progress)):
                    worker.advise(whole.slab, needed=False)
                    sink.finished(whole.slab)
                    done(whole.slab, whole.checksum)
                    with progress.lock:
                        progress.slabs += 1
            with progress.lock:
                progress.notes.merge(worker.notes)
        except BaseException as e:
            failures.append((share.order if share else (), e))
            stop.set()
        finally:
            finished.release()

    threads: list[threading.Thread] = []
    ended = 0
    try:
        for number in range(workers):
            threads.append(threading.Thread(target=work, name=f"kconv-{number}", daemon=True))
            threads[-1].start()
        while ended < workers:
            ended += finished.acquire(timeout=interval)
            tick(progress.bytes_out)
    finally:
        stop.set()
        for thread in threads:
            with suppress(RuntimeError):  # interrupted before it was started: it finds `stop` and does nothing
                thread.join()
    if failures:  # of what failed at the same time, the first in the file: the same each time
        raise min(failures, key=lambda failure: failure[0])[1]
    return progress
