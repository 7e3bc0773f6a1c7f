"""FSDP2 with bf16 computation: the fp32 set is used in fp32, and a step equals the unsharded model's."""

from __future__ import annotations

import copy
import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kconv.modeling.kda import KimiDeltaAttention
from kconv.modeling.router import KimiRouter
from kconv.modeling.sharding import shard
from kconv.modeling.short_conv import ShortConvolution
from tests.modeling.tiny import ids, model


def seen_dtypes(m: Any) -> dict[str, set[torch.dtype]]:
    """Dtypes of the parameters as the forward pass sees them."""
    seen: dict[str, set[torch.dtype]] = {}

    def note(name: str, *names: str) -> Any:
        def hook(module: Any, *args: Any) -> None:
            for n in names:
                seen.setdefault(f"{name}.{n}", set()).add(getattr(module, n).dtype)

        return hook

    for module in m.modules():
        if isinstance(module, KimiDeltaAttention):
            module.register_forward_pre_hook(note("kda", "A_log", "dt_bias"))
            module.q_proj.register_forward_pre_hook(note("q_proj", "weight"))
        elif isinstance(module, ShortConvolution):
            module.register_forward_pre_hook(note("conv", "weight"))
        elif isinstance(module, KimiRouter):
            module.register_forward_pre_hook(note("router", "weight", "e_score_correction_bias"))
    return seen


def work(rank: int, world: int, port: int, experts_format: str) -> None:
    # numba's kernels look at tensors through numpy, and FSDP cannot free a storage that numpy has seen.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "KCONV_FAST": "0"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    full = model(experts_format=experts_format).train()
    low = copy.deepcopy(full).to(torch.bfloat16)
    for layer, original in zip(low.model.layers, full.model.layers, strict=True):
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate = copy.deepcopy(original.mlp.gate)
    x = ids(2, 20)
    expected = low(x, labels=x).loss
    expected.backward()
    shard(full)
    seen = seen_dtypes(full)
    loss = full(x, labels=x).loss
    loss.backward()
    assert torch.equal(loss, expected), (loss, expected)
    for name, dtypes in seen.items():
        assert dtypes == {torch.bfloat16 if name == "q_proj.weight" else torch.float32}, (name, dtypes)
    wanted = dict(low.named_parameters())
    for name, p in full.named_parameters():
        if p.grad is None:
            assert wanted[name].grad is None, name
            continue
        assert p.dtype == torch.float32
        # Of the norm: where a bf16 gradient cancels, its last digits depend on where in memory the gathered weights lie.
        error = (p.grad.full_tensor() - wanted[name].grad.float()).norm() / wanted[name].grad.float().norm()
        assert error < 1e-2, (name, error)
    dist.destroy_process_group()


@pytest.mark.parametrize("experts_format", ["bf16", "packed"])
def test_two_processes(experts_format: str) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(work, args=(2, port, experts_format), nprocs=2)
