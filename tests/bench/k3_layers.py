"""One layer of each kind of Kimi K3 at its real widths on a GPU, beside what memory and arithmetic allow.

    PYTHONPATH=. python tests/bench/k3_layers.py [--tokens 1,16,512,4096,16384] [--kinds moe,moe-bf16,kda,mla,dense] [--out F]

A limit is the time for the bytes that must move, at the rate of a device copy, or for the flops, at the rate of a bf16 product
of 8192, whichever is longer; both rates are measured in the same run. Up to 64 tokens are a decoding step: that many
sequences, one token each, over a static cache of `--past` tokens; more are one sequence without a cache. Captured in a CUDA graph
where that is possible. Needs 80 GB for the bf16 experts, 20 GB otherwise. The model's totals are sums, not measurements.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from kconv.modeling import KimiK3TextConfig  # noqa: E402
from kconv.modeling.init import initialise  # noqa: E402
from kconv.modeling.kda import KimiDeltaAttention  # noqa: E402
from kconv.modeling.mla import KimiMLA  # noqa: E402
from kconv.modeling.mlp import KimiMLP  # noqa: E402
from kconv.modeling.moe import KimiMoE  # noqa: E402
from kconv.modeling.situ import GatedActivation  # noqa: E402
from kconv.modeling.static_cache import StaticKDACacheLayer, StaticMLACacheLayer  # noqa: E402
from tests.bench.k3_gpu import few_configs  # noqa: E402

DEVICE = "cuda"
DECODING = 64
LAYERS = {"moe": 92, "kda": 69, "mla": 24, "dense": 1}
GPU_BYTES, MODEL_BYTES = 139 * 2**30, 1.561e12


def milliseconds(run: Callable[[], Any], repeats: int = 9, warm: int = 3) -> float:
    """Median time of `run` on the device."""
    for _ in range(warm):
        run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def in_graph(run: Callable[[], Any]) -> float:
    """The same, of replays of a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return milliseconds(graph.replay)


def rates() -> tuple[float, float]:
    """Bytes a second of a device copy, read and written, and flops a second of a bf16 product."""
    source = torch.empty(2**32, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    moved = 2 * source.numel() / milliseconds(lambda: target.copy_(source)) * 1e3
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return moved, 2 * 8192**3 / milliseconds(lambda: a @ b) * 1e3


def build(kind: str, config: KimiK3TextConfig) -> Any:
    """A layer's part on the device in bf16, with weights of the usual size."""
    act = GatedActivation(config.hidden_act, config.activation_situ_beta, config.activation_situ_linear_beta)
    makers: dict[str, Callable[[], Any]] = {
        "moe": lambda: KimiMoE(config, config.experts_of(1)), "moe-bf16": lambda: KimiMoE(config, config.experts_of(1)),
        "kda": lambda: KimiDeltaAttention(config), "mla": lambda: KimiMLA(config),
        "dense": lambda: KimiMLP(config.hidden_size, config.intermediate_size, act),
    }  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        module = makers[kind]().eval()
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for part in module.modules():
            if not initialise(part, config.initializer_range) and isinstance(part, torch.nn.Linear):
                torch.nn.init.normal_(part.weight, std=config.initializer_range)
    return module


def work(kind: str, module: Any, tokens: int, past: int, config: KimiK3TextConfig) -> tuple[float, float]:
    """Bytes that must move and flops that must be done."""
    experts = getattr(module, "experts", None)
    routed = 0 if experts is None else sum(p.numel() * p.element_size() for p in experts.parameters())
    always = [p for n, p in module.named_parameters() if not n.startswith("experts.")]
    size = sum(p.numel() * p.element_size() for p in always)
    flops = 2.0 * tokens * sum(p.numel() for p in always if p.ndim == 2)
    if experts is not None:
        used = 1 - (1 - config.num_experts_per_token / experts.experts) ** tokens
        each = 3 * experts.inter * experts.width
        flops += 2.0 * tokens * config.num_experts_per_token * each
        size += int(routed * used)
    if kind == "kda" and tokens <= DECODING:
        size += 2 * tokens * 4 * module.heads * module.head_dim**2
    if kind == "mla":
        width = module.nope + module.rope + module.value
        flops += 2.0 * module.heads * width * (tokens * tokens / 2 if tokens > DECODING else 0)
        size += 2 * tokens * past * (module.rank + module.rope) if tokens <= DECODING else 0
    return size, flops


def runner(kind: str, module: Any, tokens: int, past: int, config: KimiK3TextConfig) -> Callable[[], Any]:
    """The pass to be timed; a decoding step reads a filled cache and leaves it as it was."""
    decoding = tokens <= DECODING
    shape = (tokens, 1, config.hidden_size) if decoding else (1, tokens, config.hidden_size)
    x = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    if kind.startswith("moe"):
        wide = x.float()
        return lambda: module(x, wide)
    if kind == "dense" or not decoding:
        return lambda: module(x)
    if kind == "mla":
        latents = StaticMLACacheLayer(past + 256)
        latents.latent = torch.randn(tokens, past, module.rank + module.rope, device=DEVICE, dtype=x.dtype)
        latents.at = at = torch.tensor([past], device=DEVICE)
        return lambda: module(x, None, latents, (torch.arange(latents.capacity, device=DEVICE) <= at)[None, None, None])
    states = StaticKDACacheLayer()
    width = module.heads * module.head_dim
    states.conv = torch.randn(tokens, 3, module.q_conv1d.width - 1, width, device=DEVICE, dtype=x.dtype)
    states.state = torch.randn(tokens, module.heads, module.head_dim, module.head_dim, device=DEVICE)
    return lambda: module(x, None, states)


@torch.no_grad()
def measure(kind: str, counts: list[int], past: int, bandwidth: float, arithmetic: float) -> list[dict[str, Any]]:
    """Rows of the table for one kind of layer."""
    config = KimiK3TextConfig(experts_format="packed" if kind == "moe" else "bf16")
    module, rows = build(kind, config), []
    for tokens in counts:
        size, flops = work(kind, module, tokens, past, config)
        limit = 1e3 * max(size / bandwidth, flops / arithmetic)
        run = runner(kind, module, tokens, past, config)
        row: dict[str, Any] = {"kind": kind, "tokens": tokens, "limit_ms": limit, "ms": milliseconds(run)}
        try:
            row["graph_ms"] = in_graph(run)
        except Exception as error:
            print(f"{kind} {tokens}: no graph: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
            torch.cuda.synchronize()
        best = min(row["ms"], row.get("graph_ms", row["ms"]))
        row |= {"ratio": row["ms"] / limit, "best_ratio": best / limit, "best_ms": best}
        rows.append(row)
        graph = f"{row['graph_ms']:9.3f}" if "graph_ms" in row else f"{'-':>9}"
        print(
            f"{kind:9} {tokens:6} {row['ms']:9.3f} {graph} {limit:9.3f} {row['ratio']:6.2f} {row['best_ratio']:6.2f}", flush=True
        )
    return rows


def totals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The whole model, computed: the layers' times added up, on as many GPUs as hold it, one after the other."""
    found = []
    for tokens in sorted({r["tokens"] for r in rows}):
        times = {r["kind"]: r["best_ms"] for r in rows if r["tokens"] == tokens}
        if set(LAYERS) <= set(times):
            ms = sum(count * times[kind] for kind, count in LAYERS.items())
            found.append({"tokens": tokens, "ms": ms, "tokens_per_s": 1e3 * tokens / ms})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="1,16,512,4096,16384")
    parser.add_argument("--kinds", default="moe,kda,mla,dense,moe-bf16")
    parser.add_argument("--past", type=int, default=4096, help="tokens in the cache of a decoding step")
    parser.add_argument("--configs", type=int, help="let fla autotune over so few configurations, to save minutes")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    if args.configs:
        few_configs(args.configs)
    bandwidth, arithmetic = rates()
    print(f"{torch.cuda.get_device_name()}: {bandwidth / 1e12:.2f} TB/s copied, {arithmetic / 1e12:.0f} TFLOP/s in bf16")
    print(f"{'layer':9} {'tokens':>6} {'ms':>9} {'graph':>9} {'limit':>9} {'ratio':>6} {'best':>6}")
    rows = []
    for kind in args.kinds.split(","):
        rows += measure(kind, [int(t) for t in args.tokens.split(",")], args.past, bandwidth, arithmetic)
        torch.cuda.empty_cache()
    whole, gpus = totals(rows), -(-int(MODEL_BYTES) // GPU_BYTES)
    for t in whole:
        print(f"computed: {t['tokens']} tokens through 69 KDA, 24 MLA, 92 MoE, 1 dense on {gpus} GPUs: {t['ms']:.0f} ms, "
              f"{t['tokens_per_s']:.0f} tokens/s")  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps({"bandwidth": bandwidth, "flops": arithmetic, "rows": rows, "whole": whole}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
