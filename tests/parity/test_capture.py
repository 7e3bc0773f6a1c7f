"""Capturing a reference: its own process, its class or its remote code, its inputs, and what the file then holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kconv import parity
from kconv.errors import EnvironmentLacks, KconvError
from kconv.kernels.mxfp4 import decode
from kconv.parity.capture_script import Refused, Widen, inputs_of, kda, random_inputs, reduce, signs, unpack_mxfp4
from kconv.parity.capturing import SCRIPT
from kconv.synthesis.families import tiny
from tests.parity.goldens import GOLDEN, LONG, TINY

OFFICIAL, OFFICIAL_PYTHON = os.environ.get("KCONV_OFFICIAL"), os.environ.get("KCONV_OFFICIAL_PYTHON")
SIGNS = [0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0]
REMOTE = """
import os
from pathlib import Path
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from .configuration_small import SmallConfig

Path(__file__).with_name("pid.txt")
Path(os.environ["SMALL_PID"]).write_text(str(os.getpid()))

class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mlp = nn.Linear(width, width, bias=False)
    def forward(self, x):
        return x + torch.tanh(self.mlp(x).float()).to(x.dtype)

class Small(PreTrainedModel):
    config_class = SmallConfig
    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Layer(config.width) for _ in range(config.num_hidden_layers))
        self.model.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()
    def get_input_embeddings(self):
        return self.embed
    def forward(self, input_ids=None, attention_mask=None, use_cache=None):
        x = self.embed(input_ids)
        for layer in self.model.layers:
            x = layer(x)
        return CausalLMOutput(logits=self.head(self.model.norm(x)))
"""
CONFIG = """
from transformers import PretrainedConfig

class SmallConfig(PretrainedConfig):
    model_type = "small_remote"
    def __init__(self, vocab_size=50, width=24, num_hidden_layers=3, **kwargs):
        self.vocab_size, self.width, self.num_hidden_layers = vocab_size, width, num_hidden_layers
        super().__init__(**kwargs)
"""


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with code of its own; running it leaves the process's number in `SMALL_PID`."""
    from safetensors.torch import save_file

    folder = tmp_path / "remote"
    folder.mkdir()
    (folder / "modeling_small.py").write_text(REMOTE)
    (folder / "configuration_small.py").write_text(CONFIG)
    auto = {"AutoConfig": "configuration_small.SmallConfig", "AutoModelForCausalLM": "modeling_small.Small"}
    shape = {"vocab_size": 50, "width": 24, "num_hidden_layers": 3}
    (folder / "config.json").write_text(json.dumps({"model_type": "small_remote", "auto_map": auto, **shape}))
    weights = {"embed.weight": (50, 24), "model.norm.weight": (24,), "model.norm.bias": (24,), "head.weight": (50, 24)}
    weights |= {f"model.layers.{i}.mlp.weight": (24, 24) for i in range(3)}
    save_file({n: torch.randn(*s) for n, s in weights.items()}, folder / "model.safetensors")
    monkeypatch.setenv("SMALL_PID", str(tmp_path / "pid"))
    return folder


def test_remote_code_runs_only_when_trusted_and_in_its_own_process(remote: Path, tmp_path: Path) -> None:
    out = tmp_path / "golden.safetensors"
    with pytest.raises(KconvError, match="--trust-remote-code"):
        parity.capture(remote, out)
    assert not (tmp_path / "pid").exists()
    assert not out.exists()
    said = parity.capture(remote, out, trust_remote_code=True, tokens=30, python=sys.executable)
    assert int((tmp_path / "pid").read_text()) != os.getpid()
    assert said["reference"] == "Small"
    held = parity.Golden(out)
    assert (held.layers, held.dtype, held.meta["attention"]) == (3, "float64", "eager")
    assert held.points[:3] == ["layers.0.mlp", "layers.0", "layers.1.mlp"]


def test_float64_answers_carry_no_rounding_noise(remote: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    out = tmp_path / "golden.safetensors"
    parity.capture(remote, out, trust_remote_code=True, tokens=30, modules="full")
    held, weights = parity.Golden(out), {n: t.double() for n, t in load_file(remote / "model.safetensors").items()}
    x = weights["embed.weight"][held.ids]
    for i in range(3):
        x = x + torch.tanh(x @ weights[f"model.layers.{i}.mlp.weight"].t())
    x = torch.nn.functional.layer_norm(x, (24,), weights["model.norm.weight"], weights["model.norm.bias"])
    assert torch.equal(held.logits, (x @ weights["head.weight"].t()).float())
    fp32 = held.run_in("float32")
    assert fp32 is not None
    assert 0 < float((fp32 - held.logits).abs().max()) < 1e-4


def test_weights_that_do_not_fit_the_reference_are_refused(remote: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(remote / "model.safetensors")
    del tensors["model.layers.0.mlp.weight"]
    tensors |= {"model.layers.1.mlp.weight": torch.zeros(24, 23), "model.layers.9.mlp.weight": torch.zeros(24, 24)}
    save_file(tensors, remote / "model.safetensors")
    with pytest.raises(KconvError) as refused:
        parity.capture(remote, tmp_path / "golden.safetensors", trust_remote_code=True)
    for said in (
        "missing (1): model.layers.0.mlp.weight",
        "surplus (1): model.layers.9.mlp.weight",
        "[24, 23] instead of [24, 24]",
    ):
        assert said in refused.value.message


def test_a_class_of_transformers_is_compared_live(tmp_path: Path) -> None:
    tiny("kimi-linear", tmp_path / "kl", layers=4, seed=1)
    report = parity.check(tmp_path / "kl", tmp_path / "kl", dtype="float64", tokens=24)
    assert report.passed, report.lines()
    assert report.data()["max_abs"] < 2e-6
    assert report.data()["routing"] == "recorded"
    assert "KimiLinearForCausalLM" in report.reference


def test_official_code_without_its_files_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(KconvError, match="--code"):
        parity.capture(TINY, tmp_path / "g.safetensors", trust_remote_code=True)


def test_an_environment_that_cannot_run_it() -> None:
    with pytest.raises(EnvironmentLacks, match="cannot run"):
        parity.capture(TINY, "unused.safetensors", python="/no/such/python")


def test_the_script_needs_nothing_of_kconv(tmp_path: Path) -> None:
    lines = ("import runpy, sys", "sys.modules['kconv'] = None", "sys.argv = ['capture', '--help']",
             f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", "; ".join(lines)], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "--trust-remote-code" in done.stdout


def test_random_inputs_are_long_seeded_and_uneven() -> None:
    ids, mask = inputs_of(100)
    assert ids.shape == (2, 512)
    assert mask.sum(1).tolist() == [512, 384]
    assert torch.equal(ids, random_inputs(100, 2, 512, 0)[0])
    assert not torch.equal(ids, random_inputs(100, 2, 512, 1)[0])
    assert len(set(ids[1, 384:].tolist())) > 10


def test_ids_given_as_rows(tmp_path: Path) -> None:
    file = tmp_path / "ids.json"
    file.write_text("[[1, 2, 3], [4, 5, 6, 7, 8]]")
    ids, mask = inputs_of(10, file)
    assert mask.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert ids[0, :3].tolist() == [1, 2, 3]


@pytest.mark.parametrize("rows", ["[]", "[[]]", "[[1, 99]]", "[[-1]]", "[1, 2]", "{", '[["a"]]'])
def test_ids_that_are_none_are_refused(rows: str, tmp_path: Path) -> None:
    file = tmp_path / "ids.json"
    file.write_text(rows)
    with pytest.raises(Refused, match="ids"):
        inputs_of(50, file)


def test_what_the_script_refuses_is_bad_input(remote: Path, tmp_path: Path) -> None:
    file = tmp_path / "ids.json"
    file.write_text("[[1, 99]]")
    with pytest.raises(KconvError, match=r"0\.\.49"):
        parity.capture(remote, tmp_path / "g.safetensors", trust_remote_code=True, ids=file)


def test_text_goes_through_the_tokenizer_of_the_checkpoint(remote: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "bee": 1, "sees": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(remote)
    text = tmp_path / "prompts.txt"
    text.write_text("a bee sees a bee\n\nbee sees\n")
    parity.capture(remote, tmp_path / "g.safetensors", trust_remote_code=True, text=text)
    held = parity.Golden(tmp_path / "g.safetensors")
    assert held.mask.sum(1).tolist() == [5, 2]
    assert held.ids[0].tolist() == [0, 1, 2, 0, 1]
    assert held.ids[1, :2].tolist() == [1, 2]


def test_signs_are_the_same_everywhere() -> None:
    s = signs(7, 4)
    assert (s.abs() == 0.5).all()
    assert (s > 0).int().flatten().tolist() == SIGNS
    x = torch.randn(2000, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert float(reduce(x, 4).square().sum(-1).mean() / x.square().sum(-1).mean()) == pytest.approx(1, abs=0.05)
    assert torch.equal(reduce(x, 0), x)


def test_widening_reaches_every_form_of_a_cast() -> None:
    x = torch.ones(2, dtype=torch.float64) / 3
    with Widen():
        casts = [x.float(), x.to(torch.float32), x.type(torch.float32), x.softmax(-1, dtype=torch.float32)]
        assert {y.dtype for y in (*casts, torch.zeros(1, dtype=torch.float32))} == {torch.float64}
        assert torch.equal(x.to(dtype=torch.float32), x)
    assert x.float().dtype == torch.float32


def test_mxfp4_of_the_script_equals_kconv() -> None:
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (8, 64), dtype=torch.uint8, generator=generator)
    scale = torch.randint(110, 140, (8, 4), dtype=torch.uint8, generator=generator)
    assert torch.equal(unpack_mxfp4(packed, scale, torch.float64), decode(packed, scale).double())


def test_plain_kda_equals_fla_naive() -> None:
    naive = pytest.importorskip("fla.ops.kda.naive")
    g = torch.Generator().manual_seed(0)
    q, k, v, z = (torch.randn(1, 20, 2, 8, generator=g) for _ in range(4))
    beta, a_log, bias = torch.randn(1, 20, 2, generator=g), torch.rand(2, generator=g), torch.randn(16, generator=g)
    flags = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    ours, _ = kda(q, k, v, z, beta, a_log, bias, lower_bound=-5.0, **flags)
    decay = -5 * torch.sigmoid(a_log.exp().view(2, 1) * (z + bias.view(2, 8)))
    unit = [x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k)]
    theirs = naive.naive_recurrent_kda(unit[0], unit[1], v, decay, beta.sigmoid())[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not OFFICIAL, reason="KCONV_OFFICIAL and KCONV_OFFICIAL_PYTHON name the official files and their environment")
@pytest.mark.parametrize("name", ["tiny-k3", "calm-k3", "calm-k3-wide", "long-k3"])
def test_the_official_code_gives_the_recorded_answers(name: str, tmp_path: Path) -> None:
    old = parity.Golden(GOLDEN / name / "golden.safetensors")
    how: dict[str, Any] = {"code": OFFICIAL, "python": OFFICIAL_PYTHON, "trust_remote_code": True}
    parity.capture(GOLDEN / name, tmp_path / "g.safetensors", ids=old.path, modules="none", **how)
    new = parity.Golden(tmp_path / "g.safetensors")
    assert float((new.logits - old.logits).abs().max()) < 2e-6
    assert all(torch.allclose(new.hidden(i), old.hidden(i), atol=2e-6) for i in range(old.layers + 1))  # type: ignore[arg-type]


def test_a_file_that_is_no_golden_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KconvError, match="no golden file"):
        parity.Golden(LONG / "model.safetensors")
    (tmp_path / "x.safetensors").write_bytes(b"nonsense")
    with pytest.raises(KconvError, match="cannot read"):
        parity.Golden(tmp_path / "x.safetensors")
