"""Transformers' Kimi K2 models written in the published layout, by names and rows spelled out here.

| format | written by |
|---|---|
| bf16 | the module's own tensors, split and renamed |
| INT4 | the pack-quantized compressor of compressed-tensors, routed experts, groups of 32, as K2-Thinking and K2.5 |
| FP8 | torch's own conversion to float8_e4m3fn under a scale per block, `weight_scale_inv`, as K2-Instruct |
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

TEXT: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 6, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "qk_nope_head_dim": 16, "first_k_dense_replace": 1, "moe_layer_freq": 1, "routed_scaling_factor": 2.827, "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0, "max_position_embeddings": 262144, "num_nextn_predict_layers": 0, "tie_word_embeddings": False,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "hidden_act": "silu", "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 3,
    "rope_scaling": {
        "type": "yarn", "factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
VISION: dict[str, Any] = {
    "vt_hidden_size": 32, "vt_intermediate_size": 48, "vt_num_attention_heads": 2, "vt_num_hidden_layers": 2, "patch_size": 14,
    "init_pos_emb_height": 6, "init_pos_emb_width": 6, "init_pos_emb_time": 4, "merge_kernel_size": [2, 2],
    "mm_hidden_size": 32, "projector_ln_eps": 1e-5, "text_hidden_size": 64, "video_attn_type": "spatial_temporal",
}  # fmt: skip
OWN_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2, "pos_emb_height": 6,
    "pos_emb_width": 6, "pos_emb_time": 4, "patch_size": 14, "merge_kernel_size": [2, 2],
}  # fmt: skip
IMAGE = 310
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
NOT_PACKED = ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*"]
TENSORS = dict[str, torch.Tensor]
RENAMES: tuple[tuple[str, str], ...] = (
    (r"^model\.language_model\.", "language_model.model."), (r"^lm_head\.", "language_model.lm_head."),
    (r"\.norm1\.", ".norm0."), (r"\.norm2\.", ".norm1."), (r"(vision.*)\.fc1\.", r"\1.fc0."), (r"(vision.*)\.fc2\.", r"\1.fc1."),
    (r"attn\.proj\.", "wo."), (r"^model\.vision_tower\.layers\.", "vision_tower.encoder.blocks."),
    (r"^model\.vision_tower\.final", "vision_tower.encoder.final"), (r"pos_emb\.position_embeddings", "pos_emb.weight"),
    (r"\.in_proj\.", ".proj.0."), (r"\.out_proj\.", ".proj.2."), (r"^model\.(vision_tower|mm_projector)\.", r"\1."),
)  # fmt: skip


def published_tensors(state: TENSORS, heads: int = 2) -> TENSORS:
    """A state dict of Transformers' class under the published names: experts split, q, k and v of the tower fused."""
    made: TENSORS = {}
    fused: dict[str, TENSORS] = {}
    for name, t in state.items():
        qkv = re.match(r"(model\.vision_tower\.layers\.\d+\.)attn\.([qkv])_proj\.(weight|bias)", name)
        if qkv:
            key = f"{qkv[1].replace('model.vision_tower.layers', 'vision_tower.encoder.blocks')}wqkv.{qkv[3]}"
            fused.setdefault(key, {})[qkv[2]] = t if qkv[2] == "v" else interleaved(t, heads)
        elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            made |= split(_renamed(name), t)
        else:
            made[_renamed(name)] = t
    made |= {name: torch.cat([parts[p] for p in "qkv"]) for name, parts in fused.items()}
    return {n: t.clone().contiguous() for n, t in made.items()}


def _renamed(name: str) -> str:
    """A name of Transformers' modules as published; the text model and the rest have renames of their own."""
    vision = "vision_tower" in name or "mm_projector" in name
    for pattern, new in RENAMES[2:] if vision else RENAMES[:2]:
        name = re.sub(pattern, new, name)
    return name


def interleaved(t: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from (first halves, second halves) to pairs."""
    rows = []
    for head in t.chunk(heads):
        first, second = head.chunk(2)
        rows += [x for pair in zip(first, second, strict=True) for x in pair]
    return torch.stack(rows)


def split(name: str, t: torch.Tensor) -> TENSORS:
    """Grouped experts one by one."""
    base, _, kind = name.rpartition(".")
    parts = {"gate_proj": t.chunk(2, 1)[0], "up_proj": t.chunk(2, 1)[1]} if kind == "gate_up_proj" else {kind: t}
    return {f"{base}.{e}.{part}.weight": x[e] for part, x in parts.items() for e in range(t.shape[0])}


def int4(tensors: TENSORS) -> tuple[TENSORS, TENSORS]:
    """Routed experts packed by compressed-tensors; what is stored, and the values that its own decompressor gives."""
    from tests.unit.test_kernels_oracles import compressor, decompressed, scheme

    stored, values = dict(tensors), dict(tensors)
    for name in [n for n in tensors if ".experts." in n]:
        weight = tensors[name]
        scale = (weight.float().unflatten(1, (-1, 32)).abs().amax(-1) / 7).clamp(min=1e-4).to(torch.bfloat16)
        state = {"weight": weight, "weight_scale": scale}
        packed = compressor("pack-quantized").compress(state, scheme(**INT4))
        del stored[name]
        stored |= {name.removesuffix("weight") + key: t for key, t in packed.items()}
        values[name] = decompressed("pack-quantized", packed, **INT4).to(torch.bfloat16)
    return stored, values


def fp8(tensors: TENSORS, block: tuple[int, int]) -> tuple[TENSORS, TENSORS]:
    """Every projection of attention and MLPs in FP8 blocks; what is stored, and the values code by code."""
    stored, values = dict(tensors), dict(tensors)
    for name in [n for n in tensors if n.endswith("_proj.weight") or "_proj_with_mqa" in n]:
        weight = tensors[name].float()
        rows, columns = weight.shape
        scale = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
        codes, decoded = torch.empty_like(weight).to(torch.float8_e4m3fn), torch.empty_like(weight)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                tile = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
                scale[i, j] = weight[tile].abs().max() / 448
                codes[tile] = (weight[tile] / scale[i, j]).to(torch.float8_e4m3fn)
                decoded[tile] = codes[tile].float() * scale[i, j]
        stored |= {name: codes, name + "_scale_inv": scale}
        values[name] = decoded.to(torch.bfloat16)
    return stored, values


def block_int4() -> dict[str, Any]:
    """The quantisation block of K2-Thinking and K2.5."""
    weights = {**INT4, "dynamic": False, "observer": "minmax", "actorder": None, "block_structure": None, "observer_kwargs": {}}
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "config_groups": {"group_0": group}, "format": "pack-quantized", "ignore": NOT_PACKED, "kv_cache_scheme": None,
        "quant_method": "compressed-tensors", "quantization_status": "compressed",
    }  # fmt: skip


def write(folder: Path, tensors: TENSORS, config: dict[str, Any], shards: int = 2) -> Path:
    """Tensors dealt over shards, with an index and config.json."""
    folder.mkdir(parents=True)
    names = sorted(tensors)
    where = {n: f"model-{i % shards + 1:05d}-of-{shards:06d}.safetensors" for i, n in enumerate(names)}
    for file in sorted(set(where.values())):
        save_file({n: tensors[n].contiguous() for n in names if where[n] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder
