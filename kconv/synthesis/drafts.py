"""Drafts as published, small: the configs their publishers write, names as they write them, shapes from the adapter's table.

| family | as published by | attention | oddity kept |
|---|---|---|---|
| `k3-dflash` | NeMo AutoModel's trainer | MLA, NoPE, SiTU | the target's MoE keys, head_dim and rope keys left in the config |
| `k25-dflash` | z-lab | GQA, YaRN | block size at the top level only, no attention_factor |
| `k3-dflash2` | lightseek | MLA, RoPE, 1 full and n-1 sliding layers | model_type qwen3, copy of the embedding |
| `k3-dspark` | Inferact, lightseek | MLA, RoPE | `context_proj`, no block size, num_target_layers counts taps |
| `k3-dspark-gqa` | RadixArk (SpecForge) | GQA, YaRN | everything in dflash_config, no attention_factor |
| `speculators-dspark` | RedHat | GQA, sliding | boundary ids, copies of embedding and head, nested layer config |
| `k3-eagle3` | lightseek (TorchSpec) | MLA, RoPE | mla_use_nope true, pad id 0, smaller vocabulary with d2t and t2d |

They fit `kconv tiny k3`: hidden 128, vocabulary 512, nine layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kconv.adapters.drafts.naming import published_name
from kconv.adapters.drafts.reading import read_draft_config
from kconv.adapters.drafts.table import Row, kinds_of_taps, rows_of, shape, sizes
from kconv.errors import KconvError
from kconv.spec import Spec, dtype_name
from kconv.synthesis.family import Family, knob
from kconv.synthesis.writing import SINGLE, Synthetic

if TYPE_CHECKING:
    from torch import Tensor

Json = dict[str, Any]


@dataclass(frozen=True)
class DraftShape:
    """What every tiny draft has."""

    layers: int = knob(2, "Draft layers.")
    hidden: int = knob(128, "Hidden width, the target's.")
    width: int = knob(192, "Width of the MLP.")
    heads: int = knob(4, "Query heads.")
    vocab: int = knob(512, "Vocabulary, the target's.")
    taps: tuple[int, ...] = knob((1, 4, 7), "Tapped target layers, counted from 0.", least=0)
    target_layers: int = knob(9, "Layers of the target.")
    block: int = knob(4, "Positions of one block.")
    mask: int = knob(508, "Mask token id.", least=0)
    dtype: str = knob("bfloat16", "Precision of the weights.", choices=("bfloat16", "float32"))

    @property
    def common(self) -> Json:
        """Keys that every published config has."""
        special = {"bos_token_id": self.vocab - 12, "eos_token_id": self.vocab - 11, "pad_token_id": self.vocab - 1}
        return {
            "hidden_size": self.hidden, "intermediate_size": self.width, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "vocab_size": self.vocab, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False, **special,
        }  # fmt: skip


@dataclass(frozen=True)
class GQAShape(DraftShape):
    """A draft with grouped-query attention."""

    heads: int = knob(8, "Query heads.")
    kv_heads: int = knob(2, "Key and value heads.")
    head_dim: int = knob(32, "Channels of a head.")

    @property
    def attention(self) -> Json:
        """The attention's keys."""
        return {
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "attention_bias": False,
            "attention_dropout": 0.0,
        }


@dataclass(frozen=True)
class K25Shape(GQAShape):
    """A draft for Kimi K2.5: one tap per layer."""

    layers: int = knob(3, "Draft layers, as many as taps.")


@dataclass(frozen=True)
class MLAShape(DraftShape):
    """A draft with latent attention."""

    q_lora: int = knob(48, "Width of the compressed queries.")
    kv_lora: int = knob(32, "Width of the compressed keys and values.")
    nope_dim: int = knob(16, "Own dimensions of a key head.")
    rope_dim: int = knob(8, "Key dimensions that all heads share.")
    v_dim: int = knob(16, "Dimensions of a value head.")

    @property
    def attention(self) -> Json:
        """The attention's keys."""
        return {
            "num_key_value_heads": self.heads, "q_lora_rank": self.q_lora, "kv_lora_rank": self.kv_lora,
            "qk_nope_head_dim": self.nope_dim, "qk_rope_head_dim": self.rope_dim, "v_head_dim": self.v_dim,
        }  # fmt: skip


@dataclass(frozen=True)
class DFlash2Shape(MLAShape):
    """A DFlash2 draft."""

    conv_group: int = knob(16, "Channels that share a dynamic kernel.")
    selector_rank: int = knob(16, "Rank of the selector's codebooks.")
    selector_top_k: int = knob(8, "Candidates of a position.")


@dataclass(frozen=True)
class DSparkShape(MLAShape):
    """A DSpark draft with latent attention."""

    markov_rank: int = knob(16, "Rank of the Markov head.")
    fc_norm: bool = knob(False, "RMSNorm per tap before the fusion (lightseek).")


@dataclass(frozen=True)
class DSparkGQAShape(GQAShape):
    """A DSpark draft with grouped-query attention."""

    markov_rank: int = knob(16, "Rank of the Markov head.")


@dataclass(frozen=True)
class Eagle3Shape(MLAShape):
    """An Eagle3 head."""

    layers: int = knob(1, "Draft layers: an Eagle3 head has one.")
    draft_vocab: int = knob(128, "Vocabulary of the draft; the target's size leaves d2t and t2d out.")
    v31: bool = knob(False, "Eagle 3.1: fc_norm and norm_output.")


def yarn(factor: float, **more: Any) -> Json:
    """A YaRN block as these publishers write it."""
    return {"factor": factor, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0, **more}


MSCALE = {"mscale": 1.0, "mscale_all_dim": 1.0}


def k3_dflash(s: MLAShape) -> Json:
    """NeMo's `KimiK3DFlashDraftModel`."""
    leaked = {
        "moe_intermediate_size": 64, "num_experts_per_token": 2, "routed_expert_hidden_size": 64, "head_dim": s.hidden // s.heads,
        "rope_theta": 10000.0, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    }  # fmt: skip
    off = {
        "num_experts": None, "num_shared_experts": 0, "num_nextn_predict_layers": 0, "attn_res_block_size": None,
        "linear_attn_config": {"kda_layers": [], "full_attn_layers": list(range(1, s.layers + 1))},
    }  # fmt: skip
    nested = {"mask_token_id": s.mask, "target_layer_ids": list(s.taps)}
    return {
        "architectures": ["KimiK3DFlashDraftModel"], "model_type": "kimi_linear", **s.common, **s.attention, **leaked, **off,
        "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "mla_use_nope": True,
        "mla_use_output_gate": True, "max_position_embeddings": 4096, "num_target_layers": s.target_layers, "block_size": s.block,
        "dflash_config": {**nested, "block_size": s.block}, "dtype": s.dtype,
    }  # fmt: skip


def k25_dflash(s: GQAShape) -> Json:
    """z-lab's `DFlashDraftModel` for Kimi K2.5."""
    return {
        "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "model_type": "qwen3",
        **s.common, **s.attention, "hidden_act": "silu", "layer_types": ["full_attention"] * s.layers,
        "max_position_embeddings": 256,
        "num_target_layers": s.target_layers, "block_size": s.block, "rope_theta": 50000.0,
        "rope_scaling": {**yarn(4.0, **MSCALE), "rope_type": "yarn"}, "use_sliding_window": False, "sliding_window": None,
        "dflash_config": {"mask_token_id": s.mask, "target_layer_ids": list(s.taps)}, "dtype": s.dtype,
    }  # fmt: skip


def k3_dflash2(s: DFlash2Shape) -> Json:
    """lightseek's MLA DFlash2."""
    nested = {
        "block_size": s.block, "attention_mode": "mla", "conv_kernel_size": 2, "conv_group_size": s.conv_group,
        "selector_rank": s.selector_rank, "selector_top_k": s.selector_top_k, "target_layer_ids": list(s.taps),
        "mask_token_id": s.mask,
    }  # fmt: skip
    return {
        "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", **s.common, **s.attention, "hidden_act": "silu",
        "mla_use_output_gate": False, "is_causal": False, "num_target_layers": s.target_layers, "use_sliding_window": True,
        "layer_types": ["sliding_attention"] * (s.layers - 1) + ["full_attention"], "sliding_window": 16,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 50000.0, **yarn(32.0, **MSCALE)}, "dflash_config": nested,
        "torch_dtype": s.dtype,
    }  # fmt: skip


def k3_dspark(s: DSparkShape) -> Json:
    """Inferact's and lightseek's `K3DSparkModel`."""
    stream = {"fc_norm": True, "aux_hidden_stream": "attn_res"} if s.fc_norm else {}
    return {
        "architectures": ["K3DSparkModel"], "model_type": "k3_dspark", **s.common, **s.attention, "mla_use_nope": False,
        "mla_use_output_gate": False, "max_position_embeddings": 2048, "rope_theta": 50000.0, "num_target_layers": len(s.taps),
        "target_hidden_size": s.hidden, "target_num_hidden_layers": s.target_layers, "target_layer_ids": list(s.taps), **stream,
        "mask_token_id": s.mask, "markov_rank": s.markov_rank, "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True, "draft_vocab_size": s.vocab, "_torchspec_version": "0.1.0", "torch_dtype": s.dtype,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 50000.0, **yarn(32.0, **MSCALE)},
    }  # fmt: skip


def dspark_gqa(s: DSparkGQAShape) -> Json:
    """RadixArk's `DSparkDraftModel`, trained by SpecForge."""
    nested = {
        "attention_mode": "gqa", "confidence_head_alpha": 1.0, "confidence_head_with_markov": True,
        "enable_confidence_head": True,
        "markov_head_type": "vanilla", "markov_rank": s.markov_rank, "mask_token_id": s.mask, "projector_type": "dspark",
        "target_layer_ids": list(s.taps),
    }  # fmt: skip
    return {
        "architectures": ["DSparkDraftModel"], "auto_map": {"AutoModel": "dspark.DSparkDraftModel"}, "model_type": "qwen3",
        **s.common, **s.attention, "hidden_act": "silu", "layer_types": ["full_attention"] * s.layers,
        "max_position_embeddings": 1024,
        "num_target_layers": s.target_layers, "block_size": s.block, "dflash_config": nested, "sliding_window": None,
        "rope_parameters": {"factor": 16.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0, "rope_type": "yarn"},
        "use_sliding_window": False, "dtype": s.dtype,
    }  # fmt: skip


def speculators_dspark(s: DSparkGQAShape) -> Json:
    """RedHat's speculators checkpoint."""
    layer = {
        "model_type": "qwen3", **s.common, **s.attention, "hidden_act": "silu", "layer_types": ["sliding_attention"] * s.layers,
        "sliding_window": 16, "use_sliding_window": True, "max_position_embeddings": 1024,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    }  # fmt: skip
    proposal = {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": s.block, "verifier_accept_k": 1}
    verifier = {"architectures": ["KimiK3ForConditionalGeneration"], "name_or_path": None}
    return {
        "architectures": ["DSparkDraftModel"], "aux_hidden_state_layer_ids": [i + 1 for i in s.taps], "block_size": s.block,
        "confidence_head_with_markov": True, "draft_vocab_size": s.vocab, "dtype": s.dtype, "enable_confidence_head": True,
        "markov_head_type": "vanilla", "markov_rank": s.markov_rank, "mask_token_id": s.mask, "sample_from_anchor": True,
        "sliding_window_non_causal": False, "speculators_model_type": "dspark", "speculators_version": "0.9.0",
        "target_hidden_size": None, "tie_word_embeddings": False, "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "dspark", "default_proposal_method": "greedy", "proposal_methods": [proposal],
            "verifier": verifier,
        },
    }  # fmt: skip


def k3_eagle3(s: Eagle3Shape) -> Json:
    """lightseek's MLA Eagle3 head, trained by TorchSpec."""
    if s.layers != 1:
        raise KconvError(f"an Eagle3 head has one layer, not {s.layers}")
    new = {"fc_norm": True, "norm_output": True} if s.v31 else {}
    eagle = {
        "eagle_aux_hidden_state_layer_ids": list(s.taps), "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
    }  # fmt: skip
    return {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", **s.common, **s.attention,
        "mla_use_nope": True, "hidden_act": "silu", "draft_vocab_size": s.draft_vocab, "torch_dtype": s.dtype,
        "rope_theta": 50000.0,
        "rope_scaling": {"type": "yarn", **yarn(32.0, **MSCALE)}, "max_position_embeddings": 2048, "eagle_config": eagle, **new,
        "pad_token_id": 0,
    }  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """How a family is published: its config, the naming of its tensors, and which tables it holds copies of."""

    config: Callable[[Any], Json]
    traits: tuple[str, ...] = ()
    owned: tuple[str, ...] = ()


KINDS: dict[str, Kind] = {
    "k3-dflash": Kind(k3_dflash),
    "k25-dflash": Kind(k25_dflash),
    "k3-dflash2": Kind(k3_dflash2, owned=("embed_tokens.weight",)),
    "k3-dspark": Kind(k3_dspark, ("context",), ("embed_tokens.weight",)),
    "k3-dspark-gqa": Kind(dspark_gqa),
    "speculators-dspark": Kind(speculators_dspark, owned=("embed_tokens.weight", "lm_head.weight")),
    "k3-eagle3": Kind(k3_eagle3, owned=("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")),
}


def make(name: str) -> Callable[[DraftShape, int], Synthetic]:
    """The maker of a family."""

    def run(chosen: DraftShape, seed: int) -> Synthetic:
        kind = KINDS[name]
        config = kind.config(chosen)
        maps = getattr(chosen, "draft_vocab", chosen.vocab) < chosen.vocab
        owned = [n for n in kind.owned if maps or n not in ("d2t", "t2d")]
        native = read_draft_config(config, owned).config
        placed = dict(_tensors(native, chosen.dtype))
        names = {published_name(n, kind.traits): n for n in placed}
        specs = {published: placed[n] for published, n in names.items()}

        def value(published: str) -> Tensor:
            return draw(names[published], specs[published], native, seed)

        return Synthetic(config, specs, dict.fromkeys(specs, SINGLE), value)

    return run


def _tensors(native: Json, dtype: str):
    values = sizes(native)
    over = {"layer": range(native["num_hidden_layers"]), "tap": range(kinds_of_taps(native)), None: (0,)}
    for row in rows_of(native):
        for i in over[row.index]:
            yield _name(row, i), Spec(row.dtype or dtype_name(dtype), shape(row.shape, values))


def _name(row: Row, index: int) -> str:
    return row.name.format_map({"layer": index, "tap": index})


def draw(name: str, spec: Spec, native: Json, seed: int) -> Tensor:
    """One tensor's values: by the general laws; the vocabulary maps choose real tokens, convolutions are near identity."""
    import torch

    from kconv.spec import torch_dtype
    from kconv.synthesis import values

    if name in ("d2t", "t2d"):
        chosen = (
            torch.randperm(native["vocab_size"], generator=values.generator(seed, "d2t"))[: native["draft_vocab_size"]]
            .sort()
            .values
        )
        marks = torch.zeros(native["vocab_size"], dtype=torch.bool)
        marks[chosen] = True
        return chosen - torch.arange(len(chosen)) if name == "d2t" else marks
    drawn = values.weights(name, spec, seed)
    if name.endswith("base_kernel"):
        drawn = drawn.float()
        drawn[:, 0] += 1
    return drawn.to(torch_dtype(spec.dtype))


K3_DFLASH = Family("Kimi K3 DFlash draft as NeMo AutoModel writes it", MLAShape, make("k3-dflash"))
K25_DFLASH = Family("Kimi K2.5 DFlash draft as z-lab publishes it", K25Shape, make("k25-dflash"))
K3_DFLASH2 = Family("Kimi K3 DFlash2 draft as lightseek publishes it", DFlash2Shape, make("k3-dflash2"))
K3_DSPARK = Family("Kimi K3 DSpark draft as Inferact and lightseek publish it", DSparkShape, make("k3-dspark"))
K3_DSPARK_GQA = Family("Kimi K3 DSpark draft as RadixArk publishes it", DSparkGQAShape, make("k3-dspark-gqa"))
SPECULATORS_DSPARK = Family("DSpark draft in speculators' schema", DSparkGQAShape, make("speculators-dspark"))
K3_EAGLE3 = Family("Kimi K3 Eagle3 head as lightseek publishes it", Eagle3Shape, make("k3-eagle3"))
