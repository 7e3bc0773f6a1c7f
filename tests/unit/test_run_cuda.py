"""The worker for a GPU, without one: its batches and its storage lent by the model, with streams and events that do nothing."""

from __future__ import annotations

import contextlib

import pytest
import torch

import kconv
from kconv import loading
from kconv.conversion import plan
from kconv.engine import run, worker_cuda
from kconv.engine.slabs import Region, streams
from kconv.spec import Spec


class Nothing:
    """A stream or an event of a device that is never busy."""

    def __init__(self, *_) -> None: ...
    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, stream) -> None: ...


class OnDevice(loading.MemorySink):
    """A sink whose tensors pass for the device's."""

    def lend(self, region):
        return None

    def lend_on_device(self, region):
        return self._place(region, "cpu")


@pytest.fixture
def without_gpu(monkeypatch):
    """`torch.cuda` as far as the worker uses it, and pageable memory for pinned."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **how: empty(*size, **how))
    monkeypatch.setattr(torch.cuda, "Event", Nothing)
    monkeypatch.setattr(torch.cuda, "Stream", Nothing)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: Nothing())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(run, "worker_for", lambda device: worker_cuda.CudaWorker)


@pytest.mark.parametrize("options", ({}, {"experts": "bf16"}), ids=("packed", "bf16"))
@pytest.mark.parametrize("batch", (1000, 1 << 20))
def test_same_model_whatever_the_batch(without_gpu, monkeypatch, tmp_path, batch, options) -> None:
    """Regions that several batches hold, and batches that hold several regions."""
    kconv.tiny("k3", tmp_path / "source", layers=5, experts=4)
    monkeypatch.setattr(worker_cuda, "BATCH", batch)
    made = plan(tmp_path / "source", "native", **options).check()
    model = loading.empty_model(made, "cpu", None)
    state = loading._storage(made, model)
    for tensor in state.values():
        tensor.detach().view(-1).view(torch.uint8).fill_(0xA5)
    sink = OnDevice(state)
    run.execute(streams(made, sink.place, "cuda"), made.source.files, sink, workers=2)
    expected = kconv.load(tmp_path / "source", **options).state_dict()
    for name, tensor in state.items():
        assert torch.equal(tensor.view(-1).view(torch.uint8), expected[name].view(-1).view(torch.uint8)), name


def test_storage_is_lent_in_its_own_dtype_only() -> None:
    sink = loading.MemorySink({"w": torch.arange(6, dtype=torch.float32)})
    same, other = Region("w", "w", 4, Spec("F32", (2,))), Region("w", "w", 2, Spec("BF16", (2,)))
    lent = sink.lend(same)
    assert lent is not None
    assert lent.view("f4").tolist() == [1.0, 2.0]
    assert sink.lend_on_device(same) is None
    assert sink.lend(other) is None
    sink.put_tensor(other, torch.tensor([7.0, 8.0], dtype=torch.bfloat16))
    assert sink._flat["w"].tolist() == [0.0, 7.0, 8.0, 3.0, 4.0, 5.0]
