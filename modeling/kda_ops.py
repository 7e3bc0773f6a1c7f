"""Kimi Delta Attention in plain torch: the gate, the recurrence, and its chunk form.

Per head, with state S [K, V], log decay g [K], write strength b and unit-length q, k (q also times K^-0.5):

    S <- exp(g) * S;   u = b * (v - k^T S);   S <- S + k u^T;   o = q^T S

Chunk form (the delta rule's WY representation with a decay per channel): with G the running sum of g inside a chunk,

    (I + A) U = b * (V - (K e^G) S0),   A[t, j] = b_t sum_d k_t k_j e^(G_t - G_j) for j < t
    O = (Q e^G) S0 + P U,               P[t, j] = sum_d q_t k_j e^(G_t - G_j) for j <= t
    S = e^(G_end) S0 + (K e^(G_end - G))^T U

so that only one step a chunk is sequential. Every exponent is a sum of decays, hence <= 0: no gate can overflow it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kconv.modeling.dtypes import no_autocast, wide, widen

CHUNK, BLOCK = 64, 16
QK_EPS = 1e-6


class Gate(NamedTuple):
    """The decay's parameters: `a_log` [heads], `dt_bias` [heads * dim], and a lower bound of the log decay (K3: -5)."""

    a_log: torch.Tensor
    dt_bias: torch.Tensor
    lower_bound: float | None

    def log_decay(self, z: torch.Tensor) -> torch.Tensor:
        """Log decay of each channel from the gate projection `z` [..., heads, dim], in at least fp32.

        `lower_bound * sigmoid(exp(a_log) * (z + dt_bias))` with a lower bound (Kimi K3), else
        `-exp(a_log) * softplus(z + dt_bias)` (Kimi-Linear).
        """
        heads, dim = z.shape[-2:]
        rate = widen(self.a_log).exp().view(heads, 1)
        z = widen(z) + widen(self.dt_bias).view(heads, dim)
        if self.lower_bound is not None:
            return self.lower_bound * torch.sigmoid(rate * z)
        return -rate * F.softplus(z)


def unit(x: torch.Tensor) -> torch.Tensor:
    """`x / sqrt(sum(x^2) + 1e-6)` over the last axis, in at least fp32."""
    x = widen(x)
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + QK_EPS)


class Delta(NamedTuple):
    """What the recurrence reads: q, k and log decay g [B, T, H, K], v [B, T, H, V], strength beta [B, T, H] in (0, 1)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def prepared(self) -> Delta:
        """q and k of unit length, q scaled by K^-0.5, everything in one dtype of at least fp32."""
        dtype = wide(torch.promote_types(self.v.dtype, self.g.dtype))
        q = unit(self.q) * self.q.shape[-1] ** -0.5
        return Delta(*(x.to(dtype) for x in (q, unit(self.k), self.v, self.g, self.beta)))


def recurrent(x: Delta, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token over prepared `x` from state [B, H, K, V]; returns o [B, T, H, V] and the state after it."""
    q, k, v, g, beta = x
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None]
        u = beta[:, t, :, None] * (v[:, t] - (k[:, t, :, None] @ state)[..., 0, :])
        state = state + k[:, t, :, :, None] * u[..., None, :]
        outputs.append((q[:, t, :, None] @ state)[..., 0, :])
    return torch.stack(outputs, dim=1), state


@dataclass(frozen=True)
class ChunkPlan:
    """How sequences are cut into chunks, longest sequence first, so that the sequences of each step are a prefix.

    `tokens` [chunks, CHUNK] are flat positions, -1 where a chunk is short; `steps` says how many chunks each step has;
    `order` [sequences] is the order of the states.
    """

    tokens: torch.Tensor
    steps: list[int]
    order: torch.Tensor

    @classmethod
    def of(cls, bounds: list[int], device: torch.device) -> ChunkPlan:
        """Plan for the sequences between `bounds` of a flat row."""
        lengths = [b - a for a, b in itertools.pairwise(bounds)]
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        starts, ends, steps = [], [], []
        for offset in range(0, max(lengths, default=0), CHUNK):
            active = [i for i in order if lengths[i] > offset]
            starts += [bounds[i] + offset for i in active]
            ends += [bounds[i + 1] for i in active]
            steps.append(len(active))
        first = torch.tensor(starts, dtype=torch.long, device=device)
        tokens = first[:, None] + torch.arange(CHUNK, device=device)
        tokens = tokens.masked_fill(tokens >= torch.tensor(ends, dtype=torch.long, device=device)[:, None], -1)
        return cls(tokens, steps, torch.tensor(order, dtype=torch.long, device=device))


def chunked(x: Delta, state: torch.Tensor, bounds: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunk form over prepared `x` of one flat row, [N, H, .], cut at `bounds` into sequences; state [sequences, H, K, V].

    Returns o [N, H, V] and the final states. Exact up to rounding; differentiable; any gate.
    """
    plan = ChunkPlan.of(bounds, x.q.device)
    valid = plan.tokens >= 0
    q, k, v, g, beta = (_to_chunks(t, plan.tokens, valid) for t in x._replace(beta=x.beta[..., None]))
    total = _running_sum(g)
    scores_kk, scores_qk = _decayed_scores((k, q), k, total)
    lower = torch.tril(scores_kk * beta, -1)
    rhs = torch.cat([beta * k * _exp(total, k.dtype), beta * v], dim=-1)
    solved = torch.linalg.solve_triangular(lower, rhs, upper=False, unitriangular=True)
    w, u = solved.split([k.shape[-1], v.shape[-1]], dim=-1)
    q_in = q * _exp(total, q.dtype)
    end = total[..., -1:, :]
    k_out = (k * _exp(end - total, k.dtype)).transpose(-1, -2)
    decay = _exp(end, k.dtype).transpose(-1, -2)
    o, states = _scan(plan.steps, state[plan.order], w, u, q_in, scores_qk, k_out, decay)
    flat = o.transpose(1, 2)[valid]
    out = torch.empty_like(flat).index_copy(0, plan.tokens[valid], flat)
    return out, torch.empty_like(states).index_copy(0, plan.order, states)


def _scan(
    steps: list[int], state: torch.Tensor, w: torch.Tensor, u: torch.Tensor, q_in: torch.Tensor, p: torch.Tensor,
    k_out: torch.Tensor, decay: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The sequential part: one step a chunk, over the sequences that still have one."""
    outputs, finished, at = [], [], 0
    for count in steps:
        if count < state.shape[0]:
            finished.append(state[count:])
            state = state[:count]
        now = slice(at, at + count)
        written = u[now] - w[now] @ state
        outputs.append(q_in[now] @ state + p[now] @ written)
        state = decay[now] * state + k_out[now] @ written
        at += count
    states = torch.cat([state, *reversed(finished)])
    return (torch.cat(outputs) if outputs else u), states


def _to_chunks(x: torch.Tensor, tokens: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """[N, H, D] -> [chunks, H, CHUNK, D], zero where a chunk is short: no decay, nothing written."""
    return (x[tokens.clamp_min(0)] * valid[..., None, None]).transpose(1, 2)


def _running_sum(g: torch.Tensor) -> torch.Tensor:
    """Cumulative log decay inside each chunk, in float64.

    Differences of these sums become exponents: at fp32 the sum of 64 decays of -5 would cost them five digits.
    """
    return g.double().cumsum(-2)


def _exp(exponent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return exponent.to(dtype).exp()


def _decayed_scores(rows: tuple[torch.Tensor, ...], k: torch.Tensor, total: torch.Tensor) -> list[torch.Tensor]:
    """For each x in `rows`: sum_d x[t] k[j] e^(total[t] - total[j]) for j <= t, as [chunks, H, CHUNK, CHUNK].

    Between blocks of 16 the exponent is split at the start of t's block, which lies between j and t: both factors stay
    <= 1 and a matrix product does the work. Inside a block differences are taken pair by pair, a column at a time.
    """
    shape = (*k.shape[:2], CHUNK // BLOCK, BLOCK, k.shape[-1])
    blocks, sums = k.view(shape), total.view(shape)
    start = F.pad(sums[..., -1, :], (0, 0, 1, 0))[..., :-1, :]  # the sum before each block
    gap = start[..., :, None, :] - total[:, :, None]  # [chunks, H, block, CHUNK, K]
    earlier = torch.arange(CHUNK, device=k.device) < BLOCK * torch.arange(CHUNK // BLOCK, device=k.device)[:, None]
    keys = k[:, :, None] * _exp(gap.masked_fill(~earlier[..., None], float("-inf")), k.dtype)
    reach = _exp(sums - start[..., None, :], k.dtype)
    own = torch.eye(CHUNK // BLOCK, dtype=k.dtype, device=k.device)
    scores = []
    for x in rows:
        across = (x.view(shape) * reach) @ keys.transpose(-1, -2)
        inside = torch.stack([_column(x.view(shape), blocks, sums, j) for j in range(BLOCK)], dim=-1)
        both = across.unflatten(-1, (CHUNK // BLOCK, BLOCK)) + inside[..., None, :] * own[:, None, :, None]
        scores.append(both.flatten(-2).flatten(2, 3))
    return scores


def _column(x: torch.Tensor, k: torch.Tensor, sums: torch.Tensor, j: int) -> torch.Tensor:
    """Scores of one column of every diagonal block: rows j and later of the block against its token j."""
    decay = _exp(sums[..., j:, :] - sums[..., j : j + 1, :], x.dtype)
    return F.pad((x[..., j:, :] * decay * k[..., j : j + 1, :]).sum(-1), (j, 0))


def delta_attention(
    x: Delta, state: torch.Tensor | None, bounds: list[int] | None, recurrent_up_to: int = 4
) -> tuple[torch.Tensor, torch.Tensor]:
    """KDA over raw `x` [B, T, H, .], or over one flat row [1, N, H, .] cut at `bounds` into sequences.

    Returns o [B, T, H, V] in v's dtype and the states [sequences, H, K, V], begun from `state` (None: zeros). Calls of at
    most `recurrent_up_to` tokens a row run token by token.
    """
    batch, length, heads, dim = x.q.shape
    ready = x.prepared()
    count = batch if bounds is None else len(bounds) - 1
    start = ready.q.new_zeros(count, heads, dim, x.v.shape[-1]) if state is None else state.to(ready.q.dtype)
    with no_autocast(x.q):
        if bounds is None and length <= recurrent_up_to:
            o, final = recurrent(ready, start)
        else:
            cuts = list(range(0, batch * length + 1, length)) if bounds is None else bounds
            flat, final = chunked(Delta(*(t.flatten(0, 1) for t in ready)), start, cuts)
            o = flat.view(batch, length, heads, x.v.shape[-1])
    return o.to(x.v.dtype), final
