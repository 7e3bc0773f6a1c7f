"""A draft trained for a native Kimi K3 target inside this script, then decoding with and without it: same tokens, fewer passes.

    python tests/bench/speculative.py [--family dflash|k3-dflash|dspark] [--size tiny|wide] [--device cpu|cuda] [--json OUT]

The target learns a random Markov language (each token has a few successors, one of them likely), the draft learns from
the target's own samples under the DFlash contract: anchors, additive mask, decay-weighted cross entropy. Prompts of
the measurement are held out. Reported per family: whether every token equals plain decoding's, acceptance lengths, how
often each drafted position was kept, target passes, seconds.

`--size wide` is for a GPU: 8 layers of hidden 1024, trained in a minute or two; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from kconv.modeling import KimiK3ForCausalLM, KimiK3TextConfig  # noqa: E402
from kconv.modeling.drafts.dflash import DFlashConfig, DFlashDraftModel  # noqa: E402
from kconv.modeling.drafts.dflash_k3 import KimiK3DFlashDraftModel, build_kimi_k3_dflash_draft_config  # noqa: E402
from kconv.modeling.drafts.dspark import DSparkConfig, DSparkDraftModel  # noqa: E402
from kconv.modeling.kda import KimiDeltaAttention  # noqa: E402
from kconv.speculative import capture_hidden, contract, plain_generate, speculative_generate  # noqa: E402


@dataclass(frozen=True)
class Size:
    """Dimensions of target and draft, and how long both train."""

    layers: int
    hidden: int
    heads: int
    kda_head_dim: int
    experts: int
    vocab: int
    batch: int
    target_steps: int
    draft_steps: int
    rate: float = 2e-3


SIZES = {
    "tiny": Size(5, 64, 4, 16, 4, 48, 16, 150, 300),
    "wide": Size(8, 1024, 8, 128, 8, 512, 16, 120, 150, 5e-4),
}
FAMILIES = ("dflash", "k3-dflash", "dspark")
LENGTH, BLOCK, GAMMA, SUCCESSORS = 48, 6, 4.0, 4


def target_config(size: Size) -> KimiK3TextConfig:
    """A Kimi K3 with every kind of layer; one MLA layer in four and at the end, attention residuals over blocks of three."""
    mla = sorted({*range(4, size.layers + 1, 4), size.layers})
    head = size.kda_head_dim
    return KimiK3TextConfig(
        vocab_size=size.vocab, hidden_size=size.hidden, intermediate_size=2 * size.hidden, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, q_lora_rank=size.hidden // 2, kv_lora_rank=size.hidden // 4, qk_nope_head_dim=head,
        qk_rope_head_dim=head // 2, v_head_dim=head, num_experts=size.experts, num_experts_per_token=2, num_shared_experts=1,
        moe_intermediate_size=size.hidden // 2, routed_expert_hidden_size=size.hidden // 2, attn_res_block_size=3,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.05,
        linear_attn_config={
            "num_heads": size.heads, "head_dim": head, "full_attn_layers": mla,
            "kda_layers": [i for i in range(1, size.layers + 1) if i not in mla], "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0, "use_full_rank_gate": True,
        },
    )  # fmt: skip


class Language:
    """A Markov chain: each token has `SUCCESSORS` successors, the first by far the likeliest."""

    def __init__(self, vocab: int, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.vocab = vocab
        self.next = torch.randint(3, vocab - 1, (vocab, SUCCESSORS), generator=g)
        self.weights = torch.tensor([0.85, 0.09, 0.04, 0.02])

    def sample(self, batch: int, length: int, generator: torch.Generator) -> Tensor:
        """Sequences [batch, length] of ids 3 .. vocab - 2; the last id is kept for the mask."""
        rows = [torch.randint(3, self.vocab - 1, (batch,), generator=generator)]
        for _ in range(length - 1):
            which = torch.multinomial(self.weights.expand(batch, -1), 1, generator=generator)[:, 0]
            rows.append(self.next[rows[-1], which])
        return torch.stack(rows, 1)


def train(model: torch.nn.Module, steps: int, rate: float, loss_of: Callable[[int], Tensor]) -> float:
    """AdamW with a linear warm-up and decay; the mean of the last losses."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.is_floating_point()], lr=rate, weight_decay=0.0)
    last: list[float] = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min((step + 1) / 20, 1.0) * max(1.0 - step / steps, 0.05)
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        last = [*last[-19:], float(loss.detach())]
        if step % 50 == 0:
            print(f"{type(model).__name__}: step {step} of {steps}, loss {last[-1]:.3f}", file=sys.stderr, flush=True)
    return sum(last) / len(last)


@contextmanager
def plain_kda(model: torch.nn.Module) -> Iterator[None]:
    """KDA in plain torch inside the block: tuning fla's training kernels takes minutes, longer than this training itself."""
    layers = [m for m in model.modules() if isinstance(m, KimiDeltaAttention)]
    for layer in layers:
        layer.backend = "torch"
    try:
        yield
    finally:
        for layer in layers:
            layer.backend = "auto"


def train_target(size: Size, language: Language, device: str) -> tuple[Any, float]:
    """The target, trained on the language, and its final loss."""
    torch.manual_seed(0)
    model: Any = KimiK3ForCausalLM(target_config(size))
    model.to(device).train()
    g = torch.Generator().manual_seed(1)

    def loss_of(step: int) -> Tensor:
        ids = language.sample(size.batch, LENGTH, g).to(device)
        return model(ids, labels=ids, use_cache=False).loss

    with plain_kda(model):
        final = train(model, size.target_steps, size.rate, loss_of)
    return model.eval().requires_grad_(False), final


def make_draft(family: str, target: Any) -> Any:
    """An untrained draft for the target.

    `dflash` is grouped-query attention with rotary positions (z-lab, modal), `k3-dflash` NeMo's NoPE MLA, `dspark` rotated MLA
    with a Markov head. All read the target's `attn_res` stream.
    """
    torch.manual_seed(2)
    config, depth = target.config, target.config.num_hidden_layers
    taps, mask = sorted({1, depth // 2, depth - 2}), config.vocab_size - 1
    if family == "k3-dflash":
        nested = {"mask_token_id": mask, "target_layer_ids": taps}
        made = build_kimi_k3_dflash_draft_config(
            config, num_draft_layers=2, num_target_layers=depth, block_size=BLOCK, dflash_config=nested, capture_stream="attn_res"
        )
        return KimiK3DFlashDraftModel(made)
    shared: dict[str, Any] = {
        k: getattr(config, k) for k in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    }
    shared |= {
        "num_hidden_layers": 2, "mask_token_id": mask, "target_layer_ids": taps, "target_num_hidden_layers": depth,
        "capture_stream": "attn_res", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "initializer_range": config.initializer_range,
    }  # fmt: skip
    if family == "dflash":
        return DFlashDraftModel(DFlashConfig(**shared, num_key_value_heads=config.num_attention_heads // 2, block_size=BLOCK))
    widths = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    mla: dict[str, Any] = {k: getattr(config, k) for k in widths}
    dspark = DSparkConfig(**shared, **mla, attention_mode="mla", rope_interleave=True, block_size=BLOCK - 1, markov_rank=32)
    return DSparkDraftModel(dspark)


def draft_loss(draft: Any, target: Any, ids: Tensor, generator: torch.Generator) -> Tensor:
    """The contract's objective on one batch: weighted cross entropy of every trained block position."""
    config, block = draft.config, draft.config.block_size
    with torch.no_grad(), capture_hidden(target, config.taps(), config.capture_stream) as captured:
        target(ids, use_cache=False)
    loss_mask = torch.ones_like(ids, dtype=torch.float32)
    from_anchor = config.sample_from_anchor
    found = contract.sample_anchors(loss_mask.cpu(), block, 12, sample_from_anchor=from_anchor, generator=generator)
    anchors = contract.Anchors(found.positions.to(ids.device), found.keep.to(ids.device))
    wanted, trained = contract.labels(ids, loss_mask, anchors, block, sample_from_anchor=from_anchor)
    context = torch.arange(ids.shape[1], device=ids.device)[None].expand(len(ids), -1)
    tokens = contract.block_tokens(ids, anchors, block, config.mask_token_id)
    hidden = draft(
        position_ids=contract.block_positions(anchors, block, context),
        attention_mask=contract.block_mask(anchors.positions, anchors.keep, ids.shape[1], block),
        noise_embedding=draft.embed_block(tokens, target.get_input_embeddings()),
        target_hidden=captured.hidden,
    ).unflatten(1, (-1, block))
    head = target.get_output_embeddings()
    if isinstance(draft, DSparkDraftModel):
        before = torch.cat([ids.gather(1, anchors.positions)[..., None], wanted[..., :-1]], -1)
        logits = draft.block_logits(hidden, before, head)
    else:
        logits = draft.compute_logits(hidden, head)
    weights = contract.decay_weights(block, GAMMA, sample_from_anchor=from_anchor).to(ids.device) * trained
    each = F.cross_entropy(logits.flatten(0, -2), wanted.flatten(), reduction="none").view_as(weights)
    return (each * weights).sum() / weights.sum()


def train_draft(draft: Any, target: Any, size: Size, language: Language, device: str) -> float:
    """The draft, trained on the target's own samples; its final loss."""
    g = torch.Generator().manual_seed(3)
    prompts = language.sample(8 * size.batch, 4, g).to(device)
    torch.manual_seed(4)
    with torch.no_grad():
        corpus = target.generate(
            prompts, max_new_tokens=LENGTH - 4, min_new_tokens=LENGTH - 4, do_sample=True, temperature=0.7, pad_token_id=0
        )
    draft.train()

    def loss_of(step: int) -> Tensor:
        rows = torch.randint(0, len(corpus), (size.batch,), generator=g)
        return draft_loss(draft, target, corpus[rows.to(device)], g)

    with plain_kda(target):
        final = train(draft, size.draft_steps, size.rate, loss_of)
    draft.eval()
    return final


def timed(device: str, run: Callable[[], Any]) -> tuple[Any, float]:
    """What `run` gives, and its seconds."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = run()
    if device == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


def measure(target: Any, draft: Any, language: Language, device: str, prompts: int, tokens: int) -> dict[str, Any]:
    """Decode held-out prompts with and without the draft."""
    g = torch.Generator().manual_seed(99)
    rows = language.sample(prompts, 8, g).to(device)
    same, lengths, seconds, passes = True, [], {"plain": 0.0, "speculative": 0.0}, {"plain": 0, "speculative": 0}
    kept = torch.zeros(2, draft.config.num_draft_tokens)
    for i in range(-1, prompts):  # the first round warms up and is not counted
        row = rows[max(i, 0)][None]
        plain, without = timed(device, partial(plain_generate, target, row, tokens))
        helped, within = timed(device, partial(speculative_generate, target, draft, row, tokens))
        same = same and torch.equal(plain.tokens, helped.tokens)
        if i < 0:
            continue
        seconds["plain"] += without
        seconds["speculative"] += within
        passes["plain"] += plain.target_passes
        passes["speculative"] += helped.target_passes
        lengths += helped.acceptance_lengths
        for a, n in zip(helped.acceptance_lengths, helped.proposed, strict=True):
            kept[0, : a - 1] += 1
            kept[1, :n] += 1
    return {
        "identical_tokens": same, "verifications": len(lengths), "acceptance_length": round(sum(lengths) / len(lengths), 3),
        "kept_by_position": [round(float(a / b), 3) for a, b in kept.T.tolist() if b], "target_passes": passes,
        "seconds": {k: round(v, 3) for k, v in seconds.items()}, "speedup": round(seconds["plain"] / seconds["speculative"], 3),
    }  # fmt: skip


def bench(
    family: str, size: Size, device: str = "cpu", prompts: int = 6, tokens: int = 96, plain: bool = False
) -> dict[str, Any]:
    """Train target and draft, measure, and return the report; `plain` decodes without fla's kernels too."""
    language = Language(size.vocab)
    (target, target_loss), target_seconds = timed(device, partial(train_target, size, language, device))
    draft = make_draft(family, target).to(device)
    owned = {id(p) for p in draft.parameters()}
    assert not owned & {id(p) for p in target.parameters()}, "the draft holds parameters of the target"
    decoding = plain_kda if plain else nullcontext
    with decoding(target):
        before = measure(target, draft.eval(), language, device, 1, tokens)
    draft_final, draft_seconds = timed(device, partial(train_draft, draft, target, size, language, device))
    with decoding(target):
        after = measure(target, draft, language, device, prompts, tokens)
    return {
        "family": family, "device": device, "target_loss": round(target_loss, 4), "draft_loss": round(draft_final, 4),
        "target_parameters": sum(p.numel() for p in target.parameters()),
        "draft_parameters": sum(p.numel() for p in draft.parameters()),
        "training_seconds": {"target": round(target_seconds, 1), "draft": round(draft_seconds, 1)},
        "untrained": before, "trained": after,
    }  # fmt: skip


def main() -> int:
    """Command line; 1 when a token differs or the trained draft is never kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", choices=FAMILIES, default="dflash")
    parser.add_argument("--size", choices=tuple(SIZES), default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--plain-kda", action="store_true", help="decode without fla's kernels")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = bench(args.family, SIZES[args.size], args.device, args.prompts, args.tokens, args.plain_kda)
    text = json.dumps(report, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    good = report["trained"]["identical_tokens"] and report["trained"]["acceptance_length"] > 1
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
