"""NeMo AutoModel's K3 drafts with random weights and their answers: argv OUT_FOLDER KIND..., run in a process of its own.

Writes what its trainer would save (config.json, model.safetensors in fp32) and `io.safetensors` with inputs and outputs.
Weights before the latent norms are small, so that their eps (1e-6 or 1e-5) shows.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.modeling.tiny import K3

B, S, BLOCK, TAPS = 2, 13, 4, (0, 2, 4)
ANCHORS = (3, 5, 9)


class Args(dict):
    """The recipe's arguments: read as attributes, tested with `in`."""

    __getattr__ = dict.__getitem__


def text_config() -> Any:
    from nemo_automodel.components.models.kimi_k3.config import KimiK3TextConfig

    return KimiK3TextConfig(
        **K3, hidden_act="situ", mla_use_nope=True, mla_use_output_gate=True, num_key_value_heads=4, torch_dtype="float32"
    )


def fill(model: torch.nn.Module, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        value = (
            1 + 0.2 * torch.randn(p.shape, generator=g)
            if p.ndim == 1
            else torch.randn(p.shape, generator=g) * p.shape[-1] ** -0.5
        )
        small = "q_a_proj" in name or "kv_a_proj" in name
        p.data.copy_(value * (2e-3 if small else 1.0))


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def training_mask() -> torch.Tensor:
    from nemo_automodel.components.attention.dflash_mask import create_dflash_sdpa_mask

    anchors = torch.tensor(ANCHORS)[None].expand(B, -1)
    keep = torch.ones(B, len(ANCHORS), dtype=torch.bool)
    keep[1, 2] = False
    return create_dflash_sdpa_mask(anchors, keep, S, BLOCK, torch.device("cpu"), torch.float32)


def dflash() -> tuple[Any, dict[str, torch.Tensor]]:
    from nemo_automodel.components.speculative.dflash.draft_kimi_k3 import (
        KimiK3DFlashDraftModel,
        build_kimi_k3_dflash_draft_config,
    )

    transform = {"output_multiplier": 0.5, "final_logit_softcapping": 7.0, "input_embedding_scale": 2.0}
    config = build_kimi_k3_dflash_draft_config(
        text_config(), num_draft_layers=2, num_target_layers=5, block_size=BLOCK, attention_backend="sdpa",
        dflash_config={"mask_token_id": 96, "target_layer_ids": list(TAPS), **transform},
    )  # fmt: skip
    model = KimiK3DFlashDraftModel(config).float().eval()
    fill(model, 1)
    hidden = config.hidden_size
    io = {
        "target_hidden": randn(B, S, len(TAPS) * hidden, seed=2), "noise": randn(B, len(ANCHORS) * BLOCK, hidden, seed=3),
        "mask": training_mask(), "head": randn(97, hidden, seed=4),
    }  # fmt: skip
    head = torch.nn.Linear(hidden, 97, bias=False)
    head.weight.data.copy_(io["head"])
    io["output"] = model(attention_mask=io["mask"], noise_embedding=io["noise"], target_hidden=io["target_hidden"])
    io["logits"] = model.compute_logits(io["output"], head)
    return model, io


def dspark(kind: str) -> tuple[Any, dict[str, torch.Tensor]]:
    from nemo_automodel.components.speculative.dspark.config import build_kimi_k3_draft_config
    from nemo_automodel.components.speculative.dspark.draft_kimi_k3 import KimiK3DSparkModel

    config = build_kimi_k3_draft_config(
        text_config(),
        Args(
            num_draft_layers=2, target_layer_ids=list(TAPS), confidence_head_alpha=1.0, confidence_head_with_markov=True,
            markov_rank=6, markov_head_type=kind, block_size=BLOCK, mask_token_id=96, num_anchors=3,
        ),
    )  # fmt: skip
    model = KimiK3DSparkModel(config).float().eval()
    fill(model, 5)
    hidden = config.hidden_size
    io = {
        "target_hidden": randn(B, S, len(TAPS) * hidden, seed=2), "noise": randn(B, len(ANCHORS) * BLOCK, hidden, seed=3),
        "mask": training_mask(), "anchor": torch.tensor([3, 50]),
        "previous": torch.randint(0, 97, (B, len(ANCHORS), BLOCK), generator=torch.Generator().manual_seed(6)),
    }  # fmt: skip
    io["output"] = model._forward_backbone(
        position_ids=None, attention_mask=io["mask"], noise_embedding=io["noise"], target_hidden_states=io["target_hidden"]
    )
    blocks = io["output"].unflatten(1, (-1, BLOCK))
    base = model.compute_logits(blocks)
    io["logits"] = model.markov_head.apply_block_logits(base, token_ids=io["previous"], hidden_states=blocks)
    io["confidence"] = model.predict_confidence_step(blocks, io["previous"])
    io["drafted"], _ = model.sample_draft_tokens(base[:, 0], first_prev_token_ids=io["anchor"], hidden_states=blocks[:, 0])
    return model, io


def eagle3(variant: str) -> tuple[Any, dict[str, torch.Tensor]]:
    from nemo_automodel.components.speculative.eagle.draft_kimi_k3 import KimiK3Eagle3DraftModel

    config = text_config()
    config.architectures = ["KimiK3Eagle3DraftModel"]
    config.draft_vocab_size, config.num_aux_hidden_states, config.target_hidden_size = 40, len(TAPS), config.hidden_size
    config.fc_norm = config.norm_output = variant == "31"
    config.num_hidden_layers, config.num_experts = 1, None
    model = KimiK3Eagle3DraftModel(config).float().eval()
    fill(model, 7)
    chosen = torch.randperm(97, generator=torch.Generator().manual_seed(8))[:40].sort().values
    model.set_vocab_mapping(chosen)
    ids = torch.randint(0, 97, (B, S), generator=torch.Generator().manual_seed(9))
    aux = randn(B, S, len(TAPS) * config.hidden_size, seed=10)
    states = model.project_hidden_states(aux)
    cache: list[list[torch.Tensor]] = [[], []]
    steps = []
    tokens, io = ids, {"ids": ids, "aux": aux, "projected": states}
    for _ in range(3):
        states = model(tokens, states, torch.ones(B, S), cache_hidden=cache)
        steps.append(model.compute_logits(states))
        tokens = torch.cat([tokens[:, 1:], tokens.new_zeros(B, 1)], 1)
    return model, {**io, "logits": torch.stack(steps)}


def main() -> None:
    import triton.runtime.autotuner as autotuner

    autotuner.Autotuner._bench = lambda self, *a, config=None, **k: [1.0, 1.0, 1.0]
    for kind in sys.argv[2:]:
        write(kind, Path(sys.argv[1]) / kind)


@torch.no_grad()
def write(kind: str, out: Path) -> None:
    """One draft's folder."""
    out.mkdir(parents=True, exist_ok=True)
    name, _, variant = kind.partition("-")
    model, io = {"dflash": lambda _: dflash(), "dspark": dspark, "eagle3": eagle3}[name](variant)
    tensors = {k: v.contiguous() for k, v in model.state_dict().items() if "_extra_state" not in k}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    save_file({k: v.contiguous() for k, v in io.items()}, out / "io.safetensors")


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    main()
