"""The tensors of a Kimi K3 text model, as a table: name, kind of layer, shape in terms of the config, precision.

Sizes (K3 in brackets): C hidden [7168], H KDA heads [96], D KDA head dim [128], P = H*D [12288], K conv kernel [4],
A attention heads [96], Q q_lora [1536], R kv_lora [512], QK = nope+rope head dim [192], B = nope+v head dim [256],
O = A*v [12288], I dense width [33792], M expert width [3072], S shared width [6144], L latent width [3584],
E experts [896], V vocabulary [163840]; of Kimi K3.1's indexer N heads [32] and T key width [128].
Kimi-Linear is the same table without attention residuals, latent and MLA gate.

Source: headers of the published checkpoint (60 patterns that multiply out to its 497,220 tensors).
"""

from __future__ import annotations

from kconv.adapters.tables.rows import MOST, Config, Row, Table, q_lora
from kconv.errors import KconvError


def attn_res(c: Config) -> bool:
    """Whether the model mixes block residuals."""
    return bool(c.get("attn_res_block_size"))


def latent(c: Config) -> bool:
    """Whether routed experts work in a latent width."""
    return bool(c.get("routed_expert_hidden_size"))


def full_gate(c: Config) -> bool:
    """Whether KDA's output gate is one full-rank projection."""
    return bool(c["linear_attn_config"].get("use_full_rank_gate"))


def indexer(c: Config) -> bool:
    """Whether some MLA layers choose their keys (Kimi K3.1)."""
    return bool(c.get("indexer_config"))


def family(c: Config) -> str:
    """What to call a model of this config."""
    return "Kimi K3.1" if indexer(c) else "Kimi K3" if attn_res(c) else "Kimi-Linear"


ROWS: tuple[Row, ...] = (
    Row("embed_tokens.weight", "model", ("V", "C")),
    Row("input_layernorm.weight", "layer", ("C",)),
    Row("self_attention_res_norm.weight", "layer", ("C",), when=attn_res),
    Row("self_attention_res_proj.weight", "layer", (1, "C"), when=attn_res),
    Row("self_attn.q_proj.weight", "kda", ("P", "C")),
    Row("self_attn.k_proj.weight", "kda", ("P", "C")),
    Row("self_attn.v_proj.weight", "kda", ("P", "C")),
    Row("self_attn.q_conv1d.weight", "kda", ("P", 1, "K"), fp32=True),
    Row("self_attn.k_conv1d.weight", "kda", ("P", 1, "K"), fp32=True),
    Row("self_attn.v_conv1d.weight", "kda", ("P", 1, "K"), fp32=True),
    Row("self_attn.A_log", "kda", ("H",), fp32=True),
    Row("self_attn.dt_bias", "kda", ("P",), fp32=True),
    Row("self_attn.f_a_proj.weight", "kda", ("D", "C")),
    Row("self_attn.f_b_proj.weight", "kda", ("P", "D")),
    Row("self_attn.b_proj.weight", "kda", ("H", "C")),
    Row("self_attn.g_proj.weight", "kda", ("P", "C"), when=full_gate),
    Row("self_attn.g_a_proj.weight", "kda", ("D", "C"), when=lambda c: not full_gate(c)),
    Row("self_attn.g_b_proj.weight", "kda", ("P", "D"), when=lambda c: not full_gate(c)),
    Row("self_attn.o_norm.weight", "kda", ("D",), fp32=True),
    Row("self_attn.o_proj.weight", "kda", ("C", "P")),
    Row("self_attn.q_a_proj.weight", "mla", ("Q", "C"), when=q_lora),
    Row("self_attn.q_a_layernorm.weight", "mla", ("Q",), when=q_lora),
    Row("self_attn.q_b_proj.weight", "mla", ("A*QK", "Q"), when=q_lora),
    Row("self_attn.q_proj.weight", "mla", ("A*QK", "C"), when=lambda c: not q_lora(c)),
    Row("self_attn.kv_a_proj_with_mqa.weight", "mla", ("R+rope", "C")),
    Row("self_attn.kv_a_layernorm.weight", "mla", ("R",)),
    Row("self_attn.kv_b_proj.weight", "mla", ("G*B", "R")),
    Row("self_attn.g_proj.weight", "mla", ("O", "C"), when=lambda c: bool(c.get("mla_use_output_gate"))),
    Row("self_attn.o_proj.weight", "mla", ("C", "O")),
    Row("self_attn.indexer.wq_b.weight", "indexer", ("N*T", "Q"), when=indexer),
    Row("self_attn.indexer.wk.weight", "indexer", ("T", "C"), when=indexer),
    Row("self_attn.indexer.weights_proj.weight", "indexer", ("N", "C"), when=indexer),
    Row("self_attn.indexer.k_norm.weight", "indexer", ("T",), when=indexer),
    Row("self_attn.indexer.k_norm.bias", "indexer", ("T",), when=lambda c: indexer(c) and c["indexer_config"]["norm_bias"]),
    Row("post_attention_layernorm.weight", "layer", ("C",)),
    Row("mlp_res_norm.weight", "layer", ("C",), when=attn_res),
    Row("mlp_res_proj.weight", "layer", (1, "C"), when=attn_res),
    Row("mlp.gate_proj.weight", "dense", ("I", "C")),
    Row("mlp.up_proj.weight", "dense", ("I", "C")),
    Row("mlp.down_proj.weight", "dense", ("C", "I")),
    Row("mlp.gate.weight", "moe", ("E", "C")),
    Row("mlp.gate.e_score_correction_bias", "moe", ("E",), fp32=True),
    Row("mlp.shared_experts.gate_proj.weight", "moe", ("S", "C"), when=lambda c: bool(c.get("num_shared_experts"))),
    Row("mlp.shared_experts.up_proj.weight", "moe", ("S", "C"), when=lambda c: bool(c.get("num_shared_experts"))),
    Row("mlp.shared_experts.down_proj.weight", "moe", ("C", "S"), when=lambda c: bool(c.get("num_shared_experts"))),
    Row("mlp.routed_expert_down_proj.weight", "moe", ("L", "C"), when=latent),
    Row("mlp.routed_expert_norm.weight", "moe", ("L",), when=lambda c: latent(c) and bool(c.get("latent_moe_use_norm"))),
    Row("mlp.routed_expert_up_proj.weight", "moe", ("C", "L"), when=latent),
    Row("norm.weight", "model", ("C",)),
    Row("output_attn_res_norm.weight", "model", ("C",), when=attn_res),
    Row("output_attn_res_proj.weight", "model", (1, "C"), when=attn_res),
    Row("lm_head.weight", "head", ("V", "C"), when=lambda c: not c.get("tie_word_embeddings")),
)

EXPERTS: dict[str, tuple[str, ...]] = {"w1": ("M", "L"), "w3": ("M", "L"), "w2": ("L", "M")}
GATE, UP, DOWN = "w1", "w3", "w2"

VISION_ROOTS = ("vision_tower.", "mm_projector.")

# Counts that a config must have, and those that it may leave out.
COUNTS = ("num_hidden_layers", "vocab_size", "hidden_size", "num_attention_heads", "intermediate_size",
          "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank")  # fmt: skip
OPTIONAL_COUNTS = ("num_key_value_heads", "q_lora_rank", "moe_intermediate_size", "num_shared_experts", "num_experts",
                   "routed_expert_hidden_size", "first_k_dense_replace", "moe_layer_freq", "attn_res_block_size",
                   "num_nextn_predict_layers")  # fmt: skip
LINEAR_COUNTS = ("num_heads", "head_dim", "short_conv_kernel_size")


def k3_table(config: Config) -> Table:
    """The layout of a text config (`text_config` of the published one); raises KconvError where it contradicts itself."""
    linear = config.get("linear_attn_config")
    if not isinstance(linear, dict):
        raise KconvError("config.json has no linear_attn_config", hint="kconv needs the layer lists to tell KDA from MLA layers")
    _check_counts(config, linear)
    n = config["num_hidden_layers"]
    kda, mla = (tuple(i - 1 for i in linear[key]) for key in ("kda_layers", "full_attn_layers"))
    if len(kda) + len(mla) != n or sorted(kda + mla) != list(range(n)):
        raise KconvError(
            f"config.json: kda_layers and full_attn_layers (1-based) do not cover the {n} layers once each",
            hint="correct linear_attn_config or num_hidden_layers",
        )
    return Table(config, _kinds(config, n, kda, mla), _sizes(config, linear), ROWS, EXPERTS)


def _check_counts(config: Config, linear: Config) -> None:
    """Every number that a shape or a layer list comes from is there and is one."""
    hint = "give the checkpoint's own config.json"
    held = {"linear_attn_config": (linear, LINEAR_COUNTS), "": (config, COUNTS)}
    for where, (holder, keys) in held.items():
        lacking = [key for key in keys if holder.get(key) is None]
        if lacking:
            raise KconvError(f"config.json lacks {', '.join(f'{where}.{k}'.lstrip('.') for k in lacking)}", hint=hint)
    counts = {k: config.get(k) for k in COUNTS + OPTIONAL_COUNTS} | {f"linear_attn_config.{k}": linear[k] for k in LINEAR_COUNTS}
    for key, value in counts.items():
        if value is not None and (type(value) is not int or not 0 <= value < MOST):
            raise KconvError(f"config.json: {key} is {value!r}, which is no count", hint=hint)
    for key in ("kda_layers", "full_attn_layers"):
        if not isinstance(linear.get(key), list) or not all(type(i) is int for i in linear[key]):
            raise KconvError(f"config.json: linear_attn_config.{key} is no list of layer numbers", hint=hint)


def _kinds(config: Config, n: int, kda: tuple[int, ...], mla: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    first, every = config.get("first_k_dense_replace") or 0, config.get("moe_layer_freq") or 1
    has_experts = bool(config.get("num_experts"))
    moe = tuple(i for i in range(n) if has_experts and i >= first and i % every == 0)
    dense = tuple(i for i in range(n) if i not in moe)
    kinds = {"layer": tuple(range(n)), "kda": kda, "mla": mla, "dense": dense, "moe": moe}
    sparse = {"indexer": tuple(i - 1 for i in config["indexer_config"]["layers"])} if indexer(config) else {}
    return kinds | sparse


def _sizes(config: Config, linear: Config) -> dict[str, int]:
    heads = config["num_attention_heads"]
    moe_width = config.get("moe_intermediate_size") or 0
    rope, nope, v = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
    return {
        "V": config["vocab_size"],
        "C": config["hidden_size"],
        "H": linear["num_heads"],
        "D": linear["head_dim"],
        "P": linear["num_heads"] * linear["head_dim"],
        "K": linear["short_conv_kernel_size"],
        "A": heads,
        "G": config.get("num_key_value_heads") or heads,
        "Q": config.get("q_lora_rank") or 0,
        "R": config["kv_lora_rank"],
        "rope": rope,
        "QK": nope + rope,
        "B": nope + v,
        "O": heads * v,
        "I": config["intermediate_size"],
        "M": moe_width,
        "S": moe_width * (config.get("num_shared_experts") or 0),
        "L": config.get("routed_expert_hidden_size") or config["hidden_size"],
        "E": config.get("num_experts") or 0,
        "N": (config.get("indexer_config") or {}).get("num_heads", 0),
        "T": (config.get("indexer_config") or {}).get("head_dim", 0),
    }
