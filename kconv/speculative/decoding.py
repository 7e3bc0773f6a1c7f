"""The reference speculative decoder: drafts propose, the target verifies a whole block in one pass, the output is the target's.

| mode | a drafted token x at position t is kept when | the token after the kept run |
|---|---|---|
| greedy | it is the target's most likely token | the target's most likely token there |
| sampled | u < p(x) / q(x), u uniform | from `max(p - q, 0)`, normalised; from p when all were kept |

Both give exactly what decoding the target alone gives: the same tokens when greedy, the same distribution when sampled
(Leviathan et al., arXiv 2211.17192), whatever the draft. Only the number of target passes depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kconv.errors import KconvError
from kconv.modeling.drafts.sampling import Proposal, Sampler
from kconv.speculative.proposers import Proposer, proposer_for
from kconv.speculative.target import Target, depth_of


@dataclass
class Decoded:
    """What decoding gave.

    `acceptance_lengths` holds, for each verification, the tokens it yielded: the kept run and one of the target's.
    `per_position[k]` is how often the draft's k-th token was kept, among the verifications that proposed one.
    """

    tokens: Tensor
    prompt_length: int
    acceptance_lengths: list[int] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)
    target_passes: int = 0

    @property
    def new_tokens(self) -> Tensor:
        """The generated ids [1, n]."""
        return self.tokens[:, self.prompt_length :]

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per verification; 1.0 means the draft never helped."""
        return sum(self.acceptance_lengths) / len(self.acceptance_lengths) if self.acceptance_lengths else 0.0

    @property
    def per_position(self) -> list[float]:
        """Rate at which each drafted position was kept."""
        kept = [a - 1 for a in self.acceptance_lengths]
        most = max(self.proposed, default=0)
        rates = []
        for k in range(most):
            tried = [a for a, n in zip(kept, self.proposed, strict=True) if n > k]
            rates.append(sum(a > k for a in tried) / len(tried))
        return rates


def verify_greedy(proposal: Proposal, logits: Tensor) -> tuple[int, Tensor]:
    """How many of the drafted tokens [1, n] the target's logits [1, n + 1, V] keep, and the token after them [1]."""
    picks = logits.argmax(-1)
    run = int((proposal.tokens == picks[:, :-1]).long().cumprod(1).sum())
    return run, picks[:, run]


def verify_sampled(proposal: Proposal, logits: Tensor, sampler: Sampler) -> tuple[int, Tensor]:
    """The same by rejection sampling; `proposal.probs` [1, n, V] are the distributions its tokens were drawn from."""
    p = sampler.probs(logits)
    n = proposal.tokens.shape[1]
    if n == 0:
        return 0, sampler.draw(p[:, 0])
    q = proposal.probs
    if q is None:
        raise KconvError(
            "sampled verification needs the draft's distributions", hint="let the draft sample at the same temperature"
        )
    q = q.to(p.dtype)
    at = proposal.tokens[..., None]
    ratio = (p[:, :n].gather(-1, at) / q.gather(-1, at))[..., 0]
    u = torch.rand(ratio.shape, generator=sampler.generator, device=ratio.device, dtype=ratio.dtype)
    run = int((u < ratio).long().cumprod(1).sum())
    if run == n:
        return run, sampler.draw(p[:, n])
    left = (p[:, run] - q[:, run]).clamp_min(0)
    # p == q up to rounding leaves nothing: then a rejection itself was rounding, and p is right.
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, p[:, run])
    return run, sampler.draw(left / left.sum(-1, keepdim=True))


def speculative_generate(
    target: nn.Module,
    draft: Any,
    input_ids: Tensor,
    max_new_tokens: int,
    *,
    stop_token_ids: Sequence[int] = (),
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    draft_tokens: int | None = None,
    stream: str | None = None,
    way: str = "auto",
    min_confidence: float | None = None,
) -> Decoded:
    """Decode `target` with the help of `draft`.

    Args:
        target: a causal language model with a cache, native or from Transformers.
        draft: a native draft module, from `load_draft` or `from_pretrained`.
        input_ids: [1, n] prompt.
        max_new_tokens: how many tokens to generate at most.
        stop_token_ids: generation ends with the first of these.
        temperature, top_k, top_p, generator: sampling; temperature 0 is greedy.
        draft_tokens: tokens per block; the config's number by default.
        stream: the capture stream; the config's by default.
        way: how the target takes tokens back, see `kconv.speculative.target`.
        min_confidence: DSpark's early end of a block.

    Raises:
        KconvError: when the draft does not fit the target, or its config leaves open what is needed here.
    """
    config = draft.config
    check_fits(target, config)
    state = Target(target, config.taps(), stream or config.capture_stream, way, last_normed=config.last_tap_normed)
    proposer = proposer_for(draft, state, draft_tokens, min_confidence)
    sampler = Sampler(temperature, top_k, top_p, generator)
    return _generate(state, proposer, input_ids, max_new_tokens, set(stop_token_ids), sampler)


def plain_generate(
    target: nn.Module,
    input_ids: Tensor,
    max_new_tokens: int,
    *,
    stop_token_ids: Sequence[int] = (),
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Decoded:
    """Decode `target` alone, one token a pass, with the same rules; arguments as `speculative_generate`."""
    return _generate(
        Target(target), None, input_ids, max_new_tokens, set(stop_token_ids), Sampler(temperature, top_k, top_p, generator)
    )


def check_fits(target: nn.Module, config: Any) -> None:
    """Refuse a draft whose sizes or taps the target does not have; right sizes do not make it the right target."""
    wanted: Any = target.config
    text = wanted.get_text_config() if hasattr(wanted, "get_text_config") else wanted
    width = config.target_hidden_size or config.hidden_size
    if width != text.hidden_size:
        raise KconvError(f"the draft reads states {width} wide, the target's are {text.hidden_size}")
    if config.vocab_size != text.vocab_size:
        raise KconvError(f"the draft has a vocabulary of {config.vocab_size}, the target of {text.vocab_size}")
    depth = depth_of(target)
    if config.target_num_hidden_layers not in (None, depth):
        raise KconvError(f"the draft was trained on a target of {config.target_num_hidden_layers} layers, this one has {depth}")
    if max(config.taps()) >= depth:
        raise KconvError(f"the draft taps layer {max(config.taps())}, the target has {depth} layers (0..{depth - 1})")


def _generate(
    state: Target, proposer: Proposer | None, input_ids: Tensor, max_new_tokens: int, stops: set[int], sampler: Sampler
) -> Decoded:
    """Keep verifying blocks until enough tokens are there or one of `stops` came."""
    with torch.no_grad():
        tokens = input_ids.to(state.device)
        decoded = Decoded(tokens, tokens.shape[1])
        end = tokens.shape[1] + max_new_tokens
        logits, hidden = state.forward(tokens)
        state.keep(tokens.shape[1])
        if proposer and hidden is not None:
            proposer.commit(tokens, hidden)
        anchor = sampler.pick(logits[:, -1])[0] if max_new_tokens else tokens[:, -1]
        tokens = torch.cat([tokens, anchor[:, None]], 1)[:, :end]
        while tokens.shape[1] < end and not _stopped(tokens[:, -1:], stops):
            tokens = _step(state, proposer, tokens, end, stops, sampler, decoded)
        decoded.tokens, decoded.target_passes = tokens, state.passes
    return decoded


def _step(
    state: Target, proposer: Proposer | None, tokens: Tensor, end: int, stops: set[int], sampler: Sampler, decoded: Decoded
) -> Tensor:
    """One proposal and its verification: the tokens with what it yielded."""
    anchor, room = tokens[:, -1], end - tokens.shape[1]
    count = min(proposer.most, room - 1) if proposer else 0
    proposal = Proposal(tokens[:, :0])
    if proposer and count > 0:
        proposal = proposer.propose(anchor, count, sampler)
    block = torch.cat([anchor[:, None], proposal.tokens], 1)
    logits, hidden = state.forward(block)
    run, following = verify_greedy(proposal, logits) if sampler.greedy else verify_sampled(proposal, logits, sampler)
    yielded = torch.cat([proposal.tokens[:, :run], following[:, None]], 1)
    yielded = yielded[:, : _until_stop(yielded, stops)]
    taken = yielded.shape[1]
    state.keep(taken)
    if proposer and hidden is not None:
        proposer.commit(block[:, :taken], hidden[:, :taken])
    decoded.acceptance_lengths.append(taken)
    decoded.proposed.append(proposal.tokens.shape[1])
    return torch.cat([tokens, yielded], 1)


def _stopped(token: Tensor, stops: set[int]) -> bool:
    return int(token) in stops


def _until_stop(yielded: Tensor, stops: set[int]) -> int:
    """How many of the yielded tokens come before and including the first stop."""
    for i, token in enumerate(yielded[0].tolist()):
        if token in stops:
            return i + 1
    return yielded.shape[1]
