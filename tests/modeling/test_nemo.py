"""NeMo AutoModel 0.7.0 as a second, live oracle: its K3 on the CPU (fla's recurrent kernel in Triton's interpreter)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.modeling import nemo_reference
from tests.modeling.published import GOLDEN, load_published
from tests.modeling.tiny import ids

NEEDED = ("nemo_automodel", "fla", "triton")
pytestmark = pytest.mark.skipif(any(importlib.util.find_spec(n) is None for n in NEEDED), reason=f"needs {', '.join(NEEDED)}")


@pytest.fixture(scope="module")
def inputs() -> dict[str, torch.Tensor]:
    """Ids that the golden does not hold, over a chunk boundary, and one row padded on the right."""
    mask = torch.ones(2, 67, dtype=torch.long)
    mask[1, 29:] = 0
    return {"input_ids": ids(2, 67, seed=9, vocab=500), "attention_mask": mask}


@pytest.fixture(scope="module")
def nemo(inputs: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("nemo")
    save_file(inputs, folder / "inputs.safetensors")
    command = [
        sys.executable,
        nemo_reference.__file__,
        GOLDEN / "calm-k3",
        folder / "inputs.safetensors",
        folder / "out.safetensors",
    ]
    run = subprocess.run(
        [str(a) for a in command], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return load_file(Path(folder / "out.safetensors"))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_nemo_agrees(inputs: dict[str, torch.Tensor], nemo: dict[str, torch.Tensor], attention: str) -> None:
    model = load_published("calm-k3", torch.float32, attention=attention)
    mask = inputs["attention_mask"].bool()
    with torch.no_grad():
        logits = model(inputs["input_ids"]).logits
        padded = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    torch.testing.assert_close(logits, nemo["logits"], rtol=0, atol=3e-5)
    torch.testing.assert_close(padded[mask], nemo["logits_padded"][mask], rtol=0, atol=3e-5)
