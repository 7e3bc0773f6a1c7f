"""Kernels against a plain copy of the same bytes, measured in the same run. Figures are medians; nothing is kept.

    python tests/bench/kernels.py [--json] [--threads 1 2] [--device cuda] [--tune]

| column | meaning |
|---|---|
| GB/s | of decoded bf16 output (encoders: of their input) |
| ratio, CPU | to `Tensor.copy_` of that output on as many threads |
| ratio, CUDA | bytes read and written per second, to those of a device copy |

On CUDA the stack is that of a whole K3 layer (896 experts, 39.5 GB of bf16; `--experts` for a smaller one), decoded
straight into rows of a grouped tensor, checks and the wait for them included. It first checks that Triton gives the bits
of the CPU, and also times pinned transfers. `--tune` tries other launch shapes of the MXFP4 kernel.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from kconv.kernels import backend, fp8, int4, mxfp4, nvfp4
from kconv.kernels.common import same_bits

Run = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A kernel bound to its tensors: `bytes_out` decoded bytes, `bytes_all` read and written."""

    name: str
    run: Run
    bytes_out: int
    bytes_all: int


def cases(rows: int, columns: int, device: torch.device, repeats: int = 1) -> Iterator[Case]:
    """Decoders to bf16 and exact encoders, on the shape of a K3 expert or a stack of them; random rows `repeats` times over.

    The stored tensors of a case live as long as it does. All decode into the same rows of a grouped tensor.
    """
    generator = torch.Generator(device=device).manual_seed(0)
    base, bf16 = rows // repeats, torch.bfloat16

    def byte(width: int, low: int = 0, high: int = 256) -> Tensor:
        return torch.randint(low, high, (base, width), dtype=torch.uint8, device=device, generator=generator)

    def stacked(tensor: Tensor) -> Tensor:
        return tensor.repeat(repeats, 1)

    grouped = torch.empty(rows + 1, columns, dtype=bf16, device=device)
    out = grouped[1:]

    def case(name: str, run: Run, *stored: Tensor) -> Case:
        return Case(name, run, out.nbytes, out.nbytes + sum(t.nbytes for t in stored))

    packed, exponent = stacked(byte(columns // 2)), stacked(byte(columns // 32, 110, 128))
    yield case("mxfp4 decode", partial(mxfp4.decode, packed, exponent, bf16, out), packed, exponent)
    yield case("mxfp4 decode, unchecked", partial(mxfp4.decode, packed, exponent, bf16, out, check=False), packed, exponent)
    values, target = mxfp4.decode(packed, exponent), torch.empty_like(packed)
    yield case("mxfp4 encode", partial(mxfp4.encode_with_scale, values, exponent, target), packed, exponent)
    del values, target, exponent
    words, group = packed.view(torch.int32), stacked((byte(columns // 32).float() / 9999 + 1e-4).bfloat16())
    yield case("int4 decode", partial(int4.decode, words, group, columns, bf16, out), packed, group)
    fine, whole = stacked(byte(columns // 16, 0x20, 0x7F)).view(torch.float8_e4m3fn), torch.tensor([2000.0]).to(device)
    yield case("nvfp4 decode", partial(nvfp4.decode, packed, fine, whole, bf16, out, divides=True), packed, fine)
    del packed, words, group, fine
    finite = byte(columns)
    codes = stacked(torch.where(finite & 0x7F == 0x7F, 0, finite).to(torch.uint8)).view(torch.float8_e4m3fn)
    block = torch.rand(-(-rows // 128), -(-columns // 128), device=device, generator=generator) * 0.01 + 1e-4
    yield case("fp8 block decode", partial(fp8.decode, codes, block, bf16, out, block=(128, 128)), codes, block)


def seconds(run: Run, budget: float, synchronise: Run = lambda: None) -> float:
    """Median time of a call, after two to warm up, within a budget of seconds."""
    run(), run(), synchronise()
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - start < budget and len(times) < 50):
        begin = time.perf_counter()
        run()
        synchronise()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def together(runs: list[Run], pool: ThreadPoolExecutor) -> Run:
    """All runs at once, one a thread, each four times so that starting them does not count."""
    return lambda: list(pool.map(lambda run: [run() for _ in range(4)], runs))


def bench_cpu(threads: int) -> list[dict]:
    """Every kernel in plain torch and compiled, on `threads` threads with an expert each, as the executor calls them."""
    rows, columns = 6144, 3584
    results: list[dict] = []
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        sets = [list(cases(rows, columns, torch.device("cpu"))) for _ in range(threads)]
        copies = [(torch.empty(rows, columns, dtype=torch.bfloat16), torch.ones(rows, columns).bfloat16()) for _ in sets]
        copy = together([partial(a.copy_, b) for a, b in copies], pool)
        volume = 4 * threads * copies[0][0].nbytes
        memcpy = volume / seconds(copy, 1.0)
        results.append(row("copy of the output", "torch", threads, memcpy, 1.0))
        for kernel in range(len(sets[0])):
            for name in ("plain", "numba"):
                if backend.available(name):
                    with backend.force(name):
                        rate = volume / seconds(together([s[kernel].run for s in sets], pool), 0.7)
                    results.append(row(sets[0][kernel].name, name, threads, rate, rate / memcpy))
    return results


def bench_cuda(experts: int) -> list[dict]:
    """Every kernel in Triton (and MXFP4 in plain torch) on a stack of experts, against a device copy; transfers."""
    device, wait = torch.device("cuda"), torch.cuda.synchronize
    same_as_cpu(device)
    rows, columns = experts * 6144, 3584
    traffic = device_copy(rows * columns * 2, wait)
    torch.cuda.empty_cache()
    results = [row("device copy, read and written", "torch", 0, traffic, 1.0)]
    for case in cases(rows, columns, device, max(experts // 32, 1)):
        for name in ("triton", "plain"):
            if name == "plain" and not case.name.startswith("mxfp4 decode"):
                continue
            with backend.force(name):
                spent = seconds(case.run, 1.0, wait)
            results.append(row(case.name, name, 0, case.bytes_out / spent, case.bytes_all / spent / traffic))
    return results + transfers(wait)


def device_copy(size: int, wait: Run) -> float:
    """Bytes read and written a second by a copy of `size` bytes within the device."""
    source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * size / seconds(lambda: target.copy_(source), 1.0, wait)


def transfers(wait: Run) -> list[dict]:
    """Pinned host to device and back, 1 GiB."""
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    there = host.nbytes / seconds(lambda: device.copy_(host, non_blocking=True), 1.0, wait)
    back = host.nbytes / seconds(lambda: host.copy_(device, non_blocking=True), 1.0, wait)
    return [row("pinned host to device", "torch", 0, there, None), row("device to pinned host", "torch", 0, back, None)]


def same_as_cpu(device: torch.device) -> None:
    """Stops unless Triton on the device gives the bits of plain torch on the CPU."""
    packed = torch.randint(0, 256, (1024, 1792), dtype=torch.uint8)
    scale = torch.randint(0, 253, (1024, 112), dtype=torch.uint8)
    with backend.force("plain"):
        expected = mxfp4.decode(packed, scale)
    with backend.force("triton"):
        got = mxfp4.decode(packed.to(device), scale.to(device))
        back = mxfp4.encode_with_scale(got, scale.to(device))
    if not (same_bits(got.cpu(), expected) and torch.equal(back.cpu(), packed)):
        raise SystemExit("Triton and the CPU disagree: run tests/unit/triton_check.py cuda")


def tune() -> list[dict]:
    """The MXFP4 decoder with other launch shapes."""
    from kconv.kernels import mxfp4_gpu

    case = list(cases(64 * 6144, 3584, torch.device("cuda")))[1]
    results = []
    for block in (128, 256, 512, 1024):
        for warps in (2, 4, 8):
            mxfp4_gpu._BLOCK, mxfp4_gpu._WARPS = block, warps
            rate = case.bytes_out / seconds(case.run, 0.3, torch.cuda.synchronize)
            results.append(row(f"mxfp4 decode, block {block}, warps {warps}", "triton", 0, rate, None))
    return results


def row(name: str, implementation: str, threads: int, rate: float, ratio: float | None) -> dict:
    """One line of the result."""
    shown = None if ratio is None else round(ratio, 3)
    return {"kernel": name, "by": implementation, "threads": threads, "gb_per_s": round(rate / 1e9, 2), "ratio": shown}


def main() -> None:
    """Parses the command line, measures, prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--experts", type=int, default=896, help="in the stack (CUDA); a multiple of 32, or less")
    parser.add_argument("--tune", action="store_true", help="try other launch shapes (CUDA)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    if options.device == "cuda":
        results = bench_cuda(options.experts) + (tune() if options.tune else [])
        where = torch.cuda.get_device_name()
    else:
        results = [line for threads in options.threads for line in bench_cpu(threads)]
        where = f"CPU, {torch.get_num_threads()} threads"
    if options.json:
        print(json.dumps({"device": where, "torch": torch.__version__, "results": results}))
        return
    print(f"{where}, torch {torch.__version__}")
    for line in results:
        ratio = "" if line["ratio"] is None else f"{line['ratio']:6.2f} x copy"
        print(f"{line['kernel']:36s} {line['by']:7s} {line['threads'] or '':>2} {line['gb_per_s']:9.2f} GB/s {ratio}")


if __name__ == "__main__":
    main()
