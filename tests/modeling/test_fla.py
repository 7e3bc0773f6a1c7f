"""fla's recurrent kernel and convolution, called through `fla_kernels`, against our torch forms (Triton's interpreter)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from kconv.errors import EnvironmentLacks
from kconv.modeling import fla_kernels
from kconv.modeling.kda_ops import Delta, Gate
from tests.modeling import fla_on_cpu
from tests.modeling.tiny import ids, model


@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="needs flash-linear-attention")
def test_kernels_agree_with_torch() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, fla_on_cpu.__file__], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    errors = json.loads(run.stdout.splitlines()[-1])
    assert len(errors) == 5
    assert max(errors.values()) < 2e-6, errors


@pytest.mark.parametrize(
    "known", [{"q"}, {"use_gate_in_kernel"}, {"use_gate_in_kernel", "lower_bound", "use_beta_sigmoid_in_kernel"}]
)
def test_what_a_version_lacks_is_computed_here(monkeypatch: pytest.MonkeyPatch, known: set[str]) -> None:
    """A kernel of an older version receives log decays and strengths, a newer one the raw projections and the parameters."""
    seen = {}
    monkeypatch.setattr(
        fla_kernels, "_kernel", lambda name: (lambda **kwargs: (seen.update(kwargs), (kwargs["v"], None))[1], frozenset(known))
    )  # fmt: skip
    raw = Delta(*(torch.randn(s) for s in [(1, 3, 2, 4)] * 4 + [(1, 3, 2)]))
    gate = Gate(torch.rand(2), torch.randn(8), -5.0)
    fla_kernels.delta_attention(raw, gate, None, None, chunk=True, keep=False)
    full = "lower_bound" in known
    torch.testing.assert_close(seen["g"], raw.g if full else gate.log_decay(raw.g))
    torch.testing.assert_close(seen["beta"], raw.beta if "use_beta_sigmoid_in_kernel" in known else raw.beta.sigmoid())
    assert ("A_log" in seen) == full
    assert seen.get("safe_gate") is (True if full else None)


def test_backend_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    m = model()
    monkeypatch.setattr(fla_kernels, "available", lambda: False)
    m.set_kda_backend("torch")
    m(ids(1, 9))
    m.set_kda_backend("fla")
    with pytest.raises(EnvironmentLacks, match="cannot be imported"):
        m(ids(1, 9))
