"""The native K3 on a GPU through fla: errors beside the official code's, kernels against the torch forms, timings beside NeMo.

    PYTHONPATH=. python tests/bench/k3_gpu.py --out result.json [--budget 460] [--stages errors,kernels,cache,timings]

Needs torch with CUDA, transformers and flash-linear-attention; NeMo AutoModel 0.7.0 where it can be imported. The result is
written after every stage, so that a run that is cut short leaves what it found. fla autotunes for minutes in a new process.

`OFFICIAL` is the official code's distance from the same float64 answers on an H200 with fla 0.6.0 (fp32 means TF32 inside its
kernels): median token, 90% token, largest token, mean KL, largest KL, top-1 agreement.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from kconv.modeling import KimiK3Cache, KimiK3ForCausalLM, KimiK3TextConfig, fla_kernels, kda_ops  # noqa: E402
from kconv.modeling.segments import from_cu_seqlens  # noqa: E402
from kconv.modeling.short_conv import ShortConvolution  # noqa: E402
from tests.modeling.published import golden, load_published  # noqa: E402

COLUMNS = ("median", "p90", "max", "mean_kl", "max_kl", "top1")
OFFICIAL = {
    ("calm-k3", "fp32"): (1.2e-3, 2.3e-3, 4.1e-3, 1.1e-7, 6.3e-7, 0.993),
    ("calm-k3-wide", "fp32"): (1.6e-3, 3.3e-3, 5.4e-3, 2.3e-7, 1.4e-6, 1.000),
    ("calm-k3", "bf16"): (4.9e-2, 0.14, 1.8, 3.1e-3, 0.12, 0.929),
    ("calm-k3-wide", "bf16"): (4.6e-2, 0.16, 2.4, 6.4e-3, 0.28, 0.943),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FACTOR = 1.2
DEVICE = "cuda"


class Report:
    """What was found, printed as it comes and written after every stage."""

    def __init__(self, out: Path, budget: float, dtypes: tuple[str, ...] = ("fp32", "bf16")) -> None:
        self.out, self.budget, self.dtypes, self.start = out, budget, dtypes, time.monotonic()
        self.found: dict[str, Any] = {}

    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def say(self, text: str) -> None:
        print(f"[{self.elapsed():6.1f}s] {text}", flush=True)

    def stage(self, name: str, run: Callable[[Report], Any], needs: float) -> None:
        """Run a stage unless the budget is spent; its result, or why there is none, goes to the file."""
        if self.elapsed() + needs > self.budget:
            self.found[name] = {"skipped": f"{self.elapsed():.0f} s of {self.budget:.0f} s spent, needs about {needs:.0f} s"}
            self.say(f"{name}: {self.found[name]['skipped']}")
        else:
            self.say(f"{name} ...")
            try:
                self.found[name] = run(self)
            except Exception as error:
                self.found[name] = {"failed": f"{type(error).__name__}: {error}"}
                traceback.print_exc()
        self.found["seconds"] = self.elapsed()
        self.out.write_text(json.dumps(self.found, indent=1))


def few_configs(most: int) -> None:
    """Cut what Triton's autotuner tries; both models use the same kernels, so the comparison stays fair."""
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs
    Autotuner.prune_configs = lambda self, *args, **kwargs: prune(self, *args, **kwargs)[:most]


def environment(report: Report) -> dict[str, str]:
    import transformers
    import triton

    versions = {"torch": torch.__version__, "triton": triton.__version__, "transformers": transformers.__version__}
    if fla_kernels.available():
        import fla

        versions["fla"] = fla.__version__
    versions["gpu"] = torch.cuda.get_device_name()
    report.say(str(versions))
    return versions


def distances(logits: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    """The columns of the golden table for logits [B, T, V] against the exact ones."""
    a, b = logits.double().cpu(), exact.double().cpu()
    error = (a - b).abs().amax(-1).flatten()
    p, q = b.log_softmax(-1), a.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    top1 = (a.argmax(-1) == b.argmax(-1)).double().mean()
    values = (error.median(), error.quantile(0.9), error.max(), kl.mean(), kl.max(), top1)
    return {name: float(v) for name, v in zip(COLUMNS, values, strict=True)}


def within(found: dict[str, float], official: tuple[float, ...]) -> bool:
    """Median token and KL no more than FACTOR worse than the official code's; disagreements in top-1 count as errors do."""
    limits = dict(zip(COLUMNS, official, strict=True))
    worse = [c for c in ("median", "mean_kl", "max_kl") if found[c] > FACTOR * limits[c]]
    return not worse and 1 - found["top1"] <= FACTOR * (1 - limits["top1"]) + 1e-2


def errors(report: Report) -> list[dict[str, Any]]:
    rows = []
    report.say(f"{'golden':14} {'dtype':5} {'experts':7} " + " ".join(f"{c:>9}" for c in COLUMNS))
    for name, precision in (key for key in OFFICIAL if key[1] in report.dtypes):
        exact, official = golden(name), OFFICIAL[name, precision]
        for experts in ("packed", "bf16"):
            model = load_published(name, DTYPES[precision], experts, "sdpa").to(DEVICE)
            with torch.no_grad():
                found = distances(model(exact["input_ids"].to(DEVICE)).logits, exact["logits"])
            ok = within(found, official)
            rows.append({"golden": name, "dtype": precision, "experts": experts, **found, "within": ok})
            shown = " ".join(f"{found[c]:9.2e}" for c in COLUMNS)
            report.say(f"{name:14} {precision:5} {experts:7} {shown}  {'ok' if ok else 'WORSE'}")
        report.say(f"{'official':20} {'':7} " + " ".join(f"{v:9.2e}" for v in official))
    return rows


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()


def kernel_inputs(dtype: torch.dtype, length: int, dim: int) -> tuple[kda_ops.Delta, kda_ops.Gate, torch.Tensor]:
    gen = torch.Generator(DEVICE).manual_seed(0)
    heads = 4
    shapes = [(1, length, heads, dim)] * 4 + [(1, length, heads)]
    raw = kda_ops.Delta(*(torch.randn(*s, generator=gen, device=DEVICE).to(dtype) for s in shapes))
    a_log = torch.rand(heads, generator=gen, device=DEVICE)
    gate = kda_ops.Gate(a_log, torch.randn(heads * dim, generator=gen, device=DEVICE), -5.0)
    return raw, gate, torch.randn(3, heads, dim, dim, generator=gen, device=DEVICE)


def in_torch(raw: kda_ops.Delta, gate: kda_ops.Gate, state: torch.Tensor, bounds: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    wide = kda_ops.Delta(*(t.double() for t in raw))
    exact_gate = kda_ops.Gate(gate.a_log.double(), gate.dt_bias.double(), gate.lower_bound)
    x = wide._replace(g=exact_gate.log_decay(wide.g), beta=wide.beta.sigmoid())
    return kda_ops.delta_attention(x, state.double(), bounds)


def kernels(report: Report) -> list[dict[str, Any]]:
    """fla's kernels against our chunk form in float64 on the same inputs: outputs, states and gradients."""
    rows, bounds = [], [0, 200, 201, 512]
    for precision, dtype in DTYPES.items():
        raw, gate, state = kernel_inputs(dtype, bounds[-1], 128)
        cu = torch.tensor(bounds, device=DEVICE, dtype=torch.int32)
        exact, exact_state = in_torch(raw, gate, state, bounds)
        for chunk in (True, False):
            o, final = fla_kernels.delta_attention(raw, gate, state, cu, chunk=chunk, keep=True)
            assert final is not None
            kind = "chunk" if chunk else "recurrent"
            rows.append({"kernel": kind, "dtype": precision, "output": relative(o, exact), "state": relative(final, exact_state)})
            report.say(str(rows[-1]))
        weight = torch.randn_like(exact)
        leaves = kda_ops.Delta(*(t.clone().requires_grad_() for t in raw))
        theirs = fla_kernels.delta_attention(leaves, gate, state, cu, chunk=True, keep=False)[0]
        theirs_grads = torch.autograd.grad((theirs.double() * weight).sum(), leaves)
        ours = torch.autograd.grad((in_torch(leaves, gate, state, bounds)[0] * weight).sum(), leaves)
        pairs = zip(("q", "k", "v", "z", "beta"), theirs_grads, ours, strict=True)
        rows.append({"kernel": "chunk backward", "dtype": precision, **{n: relative(a, b) for n, a, b in pairs}})
        report.say(str(rows[-1]))
        conv = ShortConvolution(512, 4).to(DEVICE)
        torch.nn.init.normal_(conv.weight)
        segments = from_cu_seqlens(cu, 1, bounds[-1])
        x, before = raw.q.flatten(-2), torch.randn(3, 3, 512, device=DEVICE).to(dtype)
        pair = [conv(x, segments, before, use_fla=use) for use in (True, False)]
        rows.append({"kernel": "convolution", "dtype": precision, "output": relative(*pair)})
        report.say(str(rows[-1]))
    return rows


def cache(report: Report) -> list[dict[str, Any]]:
    """Cached steps and padded rows against one pass, on the GPU."""
    rows = []
    for precision, dtype in DTYPES.items():
        model = load_published("calm-k3-wide", dtype, "packed", "sdpa").to(DEVICE)
        x = golden("calm-k3-wide")["input_ids"].to(DEVICE)
        mask = torch.ones_like(x)
        mask[1, :19] = 0
        with torch.no_grad():
            whole, state = model(x, use_cache=False).logits, KimiK3Cache(model.config)
            parts = [model(part, cache=state).logits for part in x.split([60, *[1] * 10], dim=1)]
            padded = model(x, attention_mask=mask).logits[1, 19:]
            state, pieces = KimiK3Cache(model.config), []
            for a, b in ((0, 10), (10, 40), (40, 70)):  # the second row begins with a piece of nothing but padding
                pieces.append(model(x[:, a:b], attention_mask=mask[:, :b], cache=state).logits)
            alone = model(x[1:, 19:], use_cache=False).logits[0]
            tokens = model.generate(x[:, :40], max_new_tokens=12, do_sample=False, eos_token_id=None)
            again = model.generate(x[:, :40], max_new_tokens=12, do_sample=False, eos_token_id=None, use_cache=False)
        row = {"cached": relative(torch.cat(parts, 1), whole), "padded": relative(padded, alone)}
        row["padded in pieces"] = relative(torch.cat(pieces, 1)[1, 19:], alone)
        fixed = model.generate(x[:, :40], max_new_tokens=12, do_sample=False, eos_token_id=None, cache_implementation="static")
        same = (tokens == again).double().mean().item()
        row["static tokens equal"] = (tokens == fixed).double().mean().item()
        rows.append({"dtype": precision, **row, "generated tokens equal to uncached": same})
        report.say(str(rows[-1]))
    return rows


def medium_config() -> dict[str, Any]:
    """A K3 text config of the published form whose work is dominated by its kernels: 1.5 B parameters, K3's head sizes."""
    text = json.loads((ROOT / "tests/data/golden/calm-k3-wide/config.json").read_text())["text_config"]
    text |= {
        "vocab_size": 32768, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "num_attention_heads": 16,
        "num_key_value_heads": 16, "q_lora_rank": 512, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "num_experts": 32, "num_experts_per_token": 4, "moe_intermediate_size": 1024,
        "routed_expert_hidden_size": 1024, "quantization_config": None,
    }  # fmt: skip
    text["linear_attn_config"] |= {
        "num_heads": 16, "head_dim": 128, "kda_layers": [1, 2, 3, 5, 6, 7], "full_attn_layers": [4, 8],
    }  # fmt: skip
    return text


def write_published(model: Any, text: dict[str, Any], folder: Path) -> None:
    """The model in the published layout with split bf16 experts, for NeMo to read."""
    tensors: dict[str, torch.Tensor] = {}
    for name, t in model.state_dict().items():
        moe = ".mlp." in name and ".layers.0." not in name
        target = "language_model." + (name.replace(".mlp.", ".block_sparse_moe.") if moe else name)
        if ".mlp.experts." not in name:
            tensors[target] = t.contiguous()
            continue
        parts = (("w1", t.chunk(2, 1)[0]), ("w3", t.chunk(2, 1)[1])) if name.endswith("gate_up_proj") else (("w2", t),)
        for w, part in parts:
            for e in range(t.shape[0]):
                tensors[f"{target.rsplit('.', 1)[0]}.{e}.{w}.weight"] = part[e].contiguous()
    save_file({k: v.cpu() for k, v in tensors.items()}, folder / "model-00001-of-000001.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k3", "text_config": text}))


def seconds(run: Callable[[], Any], repeats: int = 10, warm: int = 3) -> float:
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
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def measure(
    report: Report, name: str, model: Any, ids: torch.Tensor, loss: Callable[[Any, torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    """Forward and training step; the optimizer is one fused AdamW step."""
    found: dict[str, Any] = {"model": name}
    model.eval()

    def forward() -> None:
        with torch.no_grad():
            model(ids)

    found["forward_ms"] = 1e3 * seconds(forward)
    report.say(f"{name}: forward of {ids.numel()} tokens {found['forward_ms']:.1f} ms")
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(model, ids).backward()
        optimizer.step()

    torch.cuda.reset_peak_memory_stats()
    found["step_ms"] = 1e3 * seconds(step, repeats=5, warm=2)
    found["step_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    report.say(f"{name}: training step {found['step_ms']:.1f} ms, peak {found['step_peak_gib']:.1f} GiB")
    model.eval()
    return found


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def generation(report: Report, name: str, model: Any, ids: torch.Tensor, count: int, static: bool = False) -> dict[str, float]:
    """Milliseconds a token of greedy decoding with the cache, after the prompt; `static` replays CUDA graphs."""
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"cache_implementation": "static"} if static else {}

    def run(tokens: int) -> float:
        return seconds(lambda: model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **options), repeats=3, warm=1)

    per_token = 1e3 * (run(count + 1) - run(1)) / count
    kind = "static" if static else "growing"
    report.say(f"{name}: {per_token:.2f} ms a generated token after {ids.shape[1]}, {kind} cache")
    return {"ms_per_token_static" if static else "ms_per_token": per_token}


def timings(report: Report) -> dict[str, Any]:
    """Our model and NeMo's on the same bf16 weights; 4096 tokens."""
    text = medium_config()
    torch.manual_seed(0)
    config = KimiK3TextConfig.from_k3({"model_type": "kimi_k3", "text_config": text})
    with torch.device(DEVICE):
        ours: Any = KimiK3ForCausalLM(config)
    ours.to(torch.bfloat16)
    ids = torch.randint(3, 32000, (1, 4096), device=DEVICE)
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in ours.parameters()), "tokens": ids.numel(), "rows": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_published(ours, text, folder)
        with torch.no_grad():
            logits = ours.eval()(ids).logits
        found["rows"].append(measure(report, "kconv", ours, ids, lambda m, x: next_token_loss(m(x).logits, x)))
        for static in (False, True):
            found["rows"][-1] |= generation(report, "kconv", ours, ids[:, :512], 32, static)
        report.out.write_text(json.dumps({**report.found, "timings": found}, indent=1))
        del ours
        torch.cuda.empty_cache()
        found["nemo"] = nemo(report, folder, ids, logits, found["rows"])
    return found


def nemo(report: Report, folder: Path, ids: torch.Tensor, logits: torch.Tensor, rows: list[dict[str, Any]]) -> dict[str, Any]:
    try:
        from tests.modeling.nemo_reference import nemo_model

        theirs = nemo_model(folder, torch.bfloat16, DEVICE)
    except Exception as error:
        report.say(f"nemo-automodel is not usable here: {type(error).__name__}: {error}")
        return {"skipped": f"{type(error).__name__}: {error}"}

    def out(model: Any, x: torch.Tensor) -> torch.Tensor:
        result = model(x)
        return result.logits if hasattr(result, "logits") else result

    with torch.no_grad():
        agreement = distances(out(theirs, ids)[:, :512], logits[:, :512])
    report.say(f"nemo's logits against ours, both bf16: {agreement}")
    rows.append(measure(report, "nemo-automodel", theirs, ids, lambda m, x: next_token_loss(out(m, x), x)))
    prompt = ids[:, :512]
    with torch.no_grad():
        rows[-1]["ms_per_token"] = 1e3 * seconds(lambda: out(theirs, prompt), repeats=5, warm=2)
    report.say(f"nemo-automodel: {rows[-1]['ms_per_token']:.2f} ms a generated token (no cache: one pass over 512 tokens each)")
    return {"agreement": agreement}


STAGES: dict[str, tuple[Callable[[Report], Any], float]] = {
    "errors": (errors, 30), "kernels": (kernels, 30), "cache": (cache, 20), "timings": (timings, 60),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--budget", type=float, default=460.0, help="seconds after which no further stage begins")
    parser.add_argument("--stages", default=",".join(STAGES), help="which stages, in order")
    parser.add_argument("--dtypes", default="fp32,bf16", help="precisions of the stage errors")
    parser.add_argument("--configs", type=int, help="let fla autotune over so few configurations, to save minutes")
    args = parser.parse_args()
    if args.configs:
        few_configs(args.configs)
    report = Report(args.out, args.budget, tuple(args.dtypes.split(",")))
    report.stage("environment", environment, 0)
    for name in args.stages.split(","):
        report.stage(name, *STAGES[name])
    if "errors" not in args.stages.split(","):
        return 0
    rows = report.found["errors"]
    bad = [r for r in rows if not r["within"]] if isinstance(rows, list) else [rows]
    report.say(f"errors within {FACTOR} of the official code's: {bad or 'yes'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
