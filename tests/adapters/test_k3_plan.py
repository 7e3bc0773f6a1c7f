"""Planning Kimi K3 at its full size: every one of its 497,220 tensors, against arithmetic on its config.

The golden table is made again with `KCONV_REGENERATE=1 pytest tests/adapters/test_k3_plan.py -k table`.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

import kconv
from kconv.checkpoint.reading import Checkpoint, open_checkpoint
from kconv.cli import cli
from kconv.cli.plan import print_plan
from kconv.planning.plan import Plan
from tests.reading import PUBLISHED, ROOT, json_of, needs_published

TABLE = ROOT / "tests" / "data" / "plan-kimi-k3.txt"
SOURCE_TENSORS, VISION_TENSORS = 497_220, 168


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("full") / "Kimi-K3"
    kconv.tiny("k3", out, full_size=True)
    return out


@pytest.fixture(scope="module")
def checkpoint(folder) -> Checkpoint:
    return open_checkpoint(folder)


@pytest.fixture(scope="module")
def packed(checkpoint) -> Plan:
    return kconv.plan(checkpoint).check()


class Arithmetic:
    """Weights of a Kimi K3 text model, counted from its config alone: in bf16, in fp32, and in routed experts."""

    def __init__(self, config: dict[str, Any]) -> None:
        t = config["text_config"]
        linear, hidden = t["linear_attn_config"], t["hidden_size"]
        heads, dim = linear["num_heads"], linear["head_dim"]
        self.layers, self.mla = t["num_hidden_layers"], len(linear["full_attn_layers"])
        self.kda = len(linear["kda_layers"])
        self.dense = t["first_k_dense_replace"]
        self.moe = self.layers - self.dense
        latent, width = t["routed_expert_hidden_size"], t["moe_intermediate_size"]
        self.experts = self.moe * t["num_experts"] * 3 * width * latent
        kernel = linear["short_conv_kernel_size"]
        self.float32 = self.kda * (heads + heads * dim * (1 + 3 * kernel) + dim) + self.moe * t["num_experts"]
        self.bfloat16 = (
            self.kda * (hidden * heads * dim * 5 + dim * (hidden + heads * dim) + heads * hidden)
            + self.mla * self._mla(t, hidden)
            + self.layers * hidden * 6
            + self.dense * 3 * hidden * t["intermediate_size"]
            + self.moe * hidden * (t["num_experts"] + 3 * width * t["num_shared_experts"] + 2 * latent)
            + self.moe * latent
            + hidden * (2 * t["vocab_size"] + 3)
        )
        self.native_tensors = self.kda * 14 + self.mla * 8 + self.layers * 6 + self.dense * 3 + self.moe * 12 + 5

    def _mla(self, t: dict[str, Any], hidden: int) -> int:
        heads, q, kv = t["num_attention_heads"], t["q_lora_rank"], t["kv_lora_rank"]
        nope, rope, v = t["qk_nope_head_dim"], t["qk_rope_head_dim"], t["v_head_dim"]
        queries = q * hidden + q + heads * (nope + rope) * q
        keys = (kv + rope) * hidden + kv + heads * (nope + v) * kv
        return queries + keys + 2 * heads * v * hidden

    @property
    def without_experts(self) -> int:
        """Bytes of everything but routed experts."""
        return 2 * self.bfloat16 + 4 * self.float32


@pytest.fixture(scope="module")
def counted(folder) -> Arithmetic:
    return Arithmetic(json_of(folder / "config.json"))


def test_the_layout_is_whole(folder, checkpoint):
    assert len(checkpoint.entries) == SOURCE_TENSORS
    assert checkpoint.nbytes == 1_560_860_324_864
    assert sum(p.stat().st_size for p in folder.glob("*.safetensors")) > 1_560_860_324_864
    assert sum(p.stat().st_blocks * 512 for p in folder.iterdir()) < 300_000_000


def test_packed(packed, counted):
    summary = packed.summary()
    assert summary["source_tensors"] == SOURCE_TENSORS
    assert (summary["unclaimed"], summary["missing"]) == ([], [])
    assert summary["dropped"] == VISION_TENSORS
    assert summary["claimed"] + summary["dropped"] == SOURCE_TENSORS
    assert summary["target_tensors"] == counted.native_tensors == len(packed.targets)
    assert summary["grade"] == "exact"
    assert summary["output_bytes"] == counted.without_experts + counted.experts // 2 + counted.experts // 32
    assert summary["output_bytes"] == 1_559_965_598_080
    dropped = {n for d in packed.layouts.drops for n in d.names}
    assert {n.split(".")[0] for n in dropped} == {"vision_tower", "mm_projector"}


@pytest.mark.parametrize(
    ("options", "per_expert_weight", "grade"),
    (
        ({"experts": "bf16"}, (2, 1 / 32), "exact-with-sidecar"),
        ({"experts": "bf16", "sidecar": False}, (2,), "value-exact"),
    ),
)
def test_decoded(checkpoint, counted, options, per_expert_weight, grade):
    summary = kconv.plan(checkpoint, **options).check().summary()
    assert summary["claimed"] + summary["dropped"] == SOURCE_TENSORS
    assert summary["dropped"] == VISION_TENSORS
    assert summary["unclaimed"] == []
    assert summary["grade"] == grade
    assert summary["output_bytes"] == counted.without_experts + sum(int(counted.experts * b) for b in per_expert_weight)


def test_with_vision_only_the_padding_goes(checkpoint, counted):
    made = kconv.plan(checkpoint, vision="keep").check()
    assert made.claimed == SOURCE_TENSORS
    assert made.dropped == []
    assert checkpoint.nbytes - made.output_bytes == counted.kda * 32 * 4


def test_text_only_in_its_own_names_keeps_every_byte_but_padding(checkpoint, counted):
    """The remote code does not load a padded A_log."""
    made = kconv.plan(checkpoint, "hf-text").check()
    vision = sum(e.spec.nbytes for n, e in checkpoint.entries.items() if n.startswith(("vision_tower.", "mm_projector.")))
    assert len(made.targets) == SOURCE_TENSORS - VISION_TENSORS
    assert made.output_bytes == checkpoint.nbytes - vision - counted.kda * 32 * 4


def test_command_says_the_same_as_json(folder, packed):
    result = CliRunner().invoke(cli, ["plan", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert {k: data[k] for k in packed.summary()} == packed.summary()
    assert data["problems"] == []
    assert data["peak_bytes"] > 0


def test_folded_table(folder, packed):
    """About sixty lines that a person can read, against a golden copy."""
    printed = io.StringIO()
    print_plan(packed, Console(file=printed, soft_wrap=True, highlight=False), {})
    text = printed.getvalue().replace(str(folder), "Kimi-K3")
    if os.environ.get("KCONV_REGENERATE"):
        TABLE.write_text(text)
    assert text == TABLE.read_text()
    lines = text.splitlines()
    assert 40 <= len(lines) <= 75
    assert max(map(len, lines)) <= 200


@needs_published
def test_the_published_headers_make_the_same_plan(packed, tmp_path):
    subprocess.run([sys.executable, str(PUBLISHED / "make_sparse_k3"), str(tmp_path / "sparse")], check=True, capture_output=True)
    made = kconv.plan(tmp_path / "sparse").check()
    assert made.summary() == packed.summary()
    assert made.digest == packed.digest
