"""NeMo AutoModel's K3 on a folder in the nemo layout: argv FOLDER PUBLISHED IDS.safetensors OUT.safetensors.

For `logits` nothing of NeMo's own conversion takes part: `load_state_dict(strict=True)` gets the files' tensors as they are.
For `own` its own adapter reads the published folder. Run in a process of its own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.modeling.nemo_reference import empty_model, nemo_model, no_autotuning


def main() -> None:
    no_autotuning()
    folder, published, ids_file, out = (Path(a) for a in sys.argv[1:5])
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        tensors |= load_file(file)
    model = empty_model(json.loads((folder / "config.json").read_text()), torch.float32)
    model.load_state_dict(tensors, strict=True)
    inputs = load_file(ids_file)
    with torch.no_grad():
        logits = {
            "logits": model.eval()(inputs["input_ids"]).logits,
            "own": nemo_model(published, torch.float32)(inputs["input_ids"]).logits,
        }
    save_file({k: v.float().contiguous() for k, v in logits.items()}, out)


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    main()
