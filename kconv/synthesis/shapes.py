"""The options of the K3 families: dimensions, names, and what must hold between them.

`TextShape` is what Kimi K3 and Kimi-Linear share; a value of 0 means that the mechanism is absent. The defaults of `K3Shape`
make 9 layers of every kind, about 3 MB.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kconv.errors import Problems
from kconv.synthesis.family import knob

GROUP = 32  # weights that share one MXFP4 scale
FIRST_SPECIALS, BYTES = 24, 256
ROOTS = ("language_model.model.", "model.language_model.", "model.")
A_LOG_FORMS = ("padded", "heads", "broadcast")
A_LOG_HELP = "Form of A_log: [H] padded with zeros to a multiple of 128, [H], or [1,1,H,1]."


class Mechanisms:
    """What a family has or not; a family with the mechanism makes an option of it."""

    q_lora: int = 0
    latent: int = 0
    block: int = 0
    root: str = "model."
    plain_experts: bool = True
    dotted_res: bool = False
    vision: bool = False


@dataclass(frozen=True)
class TextShape(Mechanisms):
    """Dimensions and names of a text model of the family."""

    layers: int = knob(9, "Decoder layers.")
    mla_layers: tuple[int, ...] = knob((), "MLA layers, counted from 1; every fourth and the last by default.")
    dense_layers: int = knob(1, "First layers with a dense MLP.", least=0)
    moe_every: int = knob(1, "Of the others, every how many have experts.")
    hidden: int = knob(128, "Hidden width.")
    dense_width: int = knob(192, "Width of a dense MLP.")
    heads: int = knob(4, "MLA heads.")
    kv_lora: int = knob(32, "MLA: width of the compressed keys and values.")
    nope_dim: int = knob(16, "MLA: own dimensions of a key head.")
    rope_dim: int = knob(8, "MLA: key dimensions that all heads share.", least=0)
    v_dim: int = knob(16, "MLA: dimensions of a value head.")
    kda_heads: int = knob(3, "KDA heads.")
    kda_head_dim: int = knob(32, "KDA: dimensions of a head.")
    conv_kernel: int = knob(4, "KDA: length of the short convolutions.")
    experts: int = knob(8, "Routed experts of a layer; 0 makes every MLP dense.", least=0)
    expert_counts: tuple[int, ...] = knob((), "Routed experts of each expert layer, where they differ (pruned checkpoints).")
    top_k: int = knob(2, "Experts a token goes to.")
    expert_groups: int = knob(1, "Groups that the router first chooses among.")
    topk_groups: int = knob(1, "How many of these groups it keeps.")
    shared_experts: int = knob(2, "Shared experts, fused into one MLP.", least=0)
    expert_width: int = knob(64, "Width of an expert.")
    vocab: int = knob(512, "Vocabulary.")
    special_tokens: int = knob(FIRST_SPECIALS, "Ids at the end of the vocabulary kept for special tokens.", least=FIRST_SPECIALS)
    tied: bool = knob(False, "The head is the embedding.")
    dtype: str = knob("bfloat16", "Precision of what is not kept in fp32.", choices=("bfloat16", "float32"))
    a_log: str = knob("padded", A_LOG_HELP, choices=A_LOG_FORMS)
    split_experts: bool = knob(False, "Deal the tensors over the shards, so that an expert's parts lie in different files.")
    calm: bool = knob(False, "Weights as a trained model's: small sublayer outputs, clear routing margins.")

    @property
    def mla(self) -> list[int]:
        """MLA layers, counted from 1."""
        return list(self.mla_layers) or sorted({*range(4, self.layers + 1, 4), self.layers})

    @property
    def kda(self) -> list[int]:
        """KDA layers, counted from 1."""
        return [n for n in range(1, self.layers + 1) if n not in self.mla]

    @property
    def moe(self) -> list[int]:
        """Layers with experts, counted from 0."""
        sparse = [i for i in range(self.dense_layers, self.layers) if i % self.moe_every == 0]
        return sparse if self.experts else []

    @property
    def most_experts(self) -> int:
        """The largest layer's experts, which the config names."""
        return max(self.expert_counts, default=self.experts)

    def counts(self) -> dict[int, int]:
        """Layer (from 0) -> its routed experts."""
        return dict(zip(self.moe, self.expert_counts or [self.experts] * len(self.moe), strict=True))

    @property
    def first_special(self) -> int:
        """Id of the first special token."""
        return self.vocab - self.special_tokens

    def check(self) -> None:
        """Raise `Problems` with everything that cannot be."""
        found = [*self._layer_problems(), *self._expert_problems()]
        if self.first_special < BYTES:
            needs = f"{BYTES} bytes and {self.special_tokens} special tokens need an id each"
            found.append(f"vocab {self.vocab} is too small: {needs}")
        if found:
            raise Problems("this shape cannot be:", found, hint="`kconv tiny FAMILY --help` lists the options")

    def _layer_problems(self) -> list[str]:
        found = []
        if set(self.mla_layers) - set(range(1, self.layers + 1)) or len(set(self.mla_layers)) < len(self.mla_layers):
            found.append(f"mla_layers {list(self.mla_layers)} are not distinct layers of 1-{self.layers}")
        if self.dense_layers > self.layers:
            found.append(f"dense_layers {self.dense_layers} exceeds layers {self.layers}")
        if self.expert_counts and len(self.expert_counts) != len(self.moe):
            found.append(f"expert_counts has {len(self.expert_counts)} numbers, {len(self.moe)} layers have experts")
        return found

    def _expert_problems(self) -> list[str]:
        if not self.experts:
            return []
        counts = sorted(set(self.expert_counts or (self.experts,)))
        widths = {"expert_width": self.expert_width, **({"latent": self.latent} if self.latent else {"hidden": self.hidden})}
        found = []
        if not self.plain_experts:
            found += [f"{k} {v} is no multiple of {GROUP}, which MXFP4 needs" for k, v in widths.items() if v % GROUP]
        if self.topk_groups > self.expert_groups:
            found.append(f"topk_groups {self.topk_groups} exceeds expert_groups {self.expert_groups}")
        found += [f"{n} experts do not divide into {self.expert_groups} groups" for n in counts if n % self.expert_groups]
        within = math.floor(counts[0] / self.expert_groups * min(self.topk_groups, self.expert_groups))
        if self.top_k > within:
            found.append(f"top_k {self.top_k} exceeds the {within} experts that a token can reach")
        return found


@dataclass(frozen=True)
class K3Shape(TextShape):
    """Kimi K3."""

    q_lora: int = knob(48, "MLA: width of the compressed queries; 0 for a direct projection.", least=0)
    latent: int = knob(64, "Width in which routed experts work; 0 for the hidden width.", least=0)
    block: int = knob(4, "Layers of an attention-residual block.")
    root: str = knob(ROOTS[0], "Prefix of the text model's names; `model.` is text-only.", choices=ROOTS)
    plain_experts: bool = knob(False, "Experts not quantised.")
    dotted_res: bool = knob(False, "Naming attention residuals self_attention_res.norm_weight.")
    vision: bool = knob(True, "Vision tower and projector.")
    vision_layers: int = knob(2, "Vision: blocks.")
    vision_hidden: int = knob(32, "Vision: hidden width.")
    vision_width: int = knob(64, "Vision: width of an MLP.")
    vision_heads: int = knob(2, "Vision: heads.")
    vision_qkv: int = knob(48, "Vision: width of queries, keys and values.")
    vision_grid: int = knob(4, "Vision: rows and columns of the position embedding.")


@dataclass(frozen=True)
class LinearShape(TextShape):
    """Kimi-Linear: no latent, no residual mixing, no output gate on MLA, a low-rank gate on KDA."""

    shared_experts: int = knob(1, "Shared experts, fused into one MLP.", least=0)
    a_log: str = knob("broadcast", A_LOG_HELP, choices=A_LOG_FORMS)
