"""DistributedDataParallel: several steps on two processes with rows of uneven length equal the same steps on one."""

from __future__ import annotations

import copy
import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from kconv.modeling import KimiK3ForCausalLM, KimiK3TextConfig
from tests.modeling.test_indexer import sparse_model
from tests.modeling.tiny import LINEAR_48B, ids, model, of

KINDS = {
    "k3": lambda: model(dtype=torch.float64),
    "packed": lambda: model(dtype=torch.float64, experts_format="packed"),
    "indexer": lambda: sparse_model(topk=3, dtype=torch.float64),
    "kimi-linear": lambda: of(KimiK3TextConfig.from_k3(LINEAR_48B), dtype=torch.float64),
}
STEPS, LENGTHS = 3, (11, 5)


def batches(step: int) -> list[torch.Tensor]:
    return [ids(2, length, seed=10 * step + rank) for rank, length in enumerate(LENGTHS)]


def train(m: Any, ranks: list[int], weight: float) -> None:
    """Steps over the batches of `ranks`; `weight` makes their losses a mean over all processes."""
    optimizer = torch.optim.SGD(m.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in ranks:
            x = batches(step)[rank]
            (m(x, labels=x).loss * weight).backward()
        optimizer.step()


def work(rank: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for kind, make in KINDS.items():
        alone = make().train()
        together = DistributedDataParallel(copy.deepcopy(alone))
        train(alone, [0, 1], 0.5)
        train(together, [rank], 1.0)
        for name, p in together.module.state_dict().items():
            assert torch.allclose(p, alone.state_dict()[name], rtol=1e-9, atol=1e-12), (kind, name)
    dist.destroy_process_group()


def test_two_processes_train_as_one() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(work, args=(port,), nprocs=2)


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_requires_a_gradient_gets_one(kind: str) -> None:
    m = KINDS[kind]().train()
    x = ids(2, 9)
    m(x, labels=x).loss.backward()
    for name, p in m.named_parameters():
        assert p.requires_grad == (p.grad is not None), name


def test_loading_keeps_untrained_parameters_out_of_training(tmp_path: Any) -> None:
    m = KINDS["indexer"]()
    m.save_pretrained(tmp_path)
    loaded = KimiK3ForCausalLM.from_pretrained(tmp_path)
    wanted = {n for n, p in m.named_parameters() if not p.requires_grad}
    assert {n for n, p in loaded.named_parameters() if not p.requires_grad} == wanted
    assert any("indexer" in n for n in wanted)
    assert any("layers.0.self_attention_res" in n for n in wanted)


def test_the_correction_bias_is_saved_in_fp32_under_its_name(tmp_path: Any) -> None:
    m = model(dtype=torch.bfloat16)
    m.save_pretrained(tmp_path)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert name not in dict(m.named_parameters())
    again = KimiK3ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert again.state_dict()[name].dtype == torch.float32
    assert torch.equal(again.state_dict()[name], m.state_dict()[name])
    assert m.state_dict()[name].abs().max() > 0
