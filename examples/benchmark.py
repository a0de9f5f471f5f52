"""How long sampling takes, beside the matrix product it cannot do without.

    python examples/benchmark.py                       # the whole grid on a GPU, three cells on a CPU
    python examples/benchmark.py --shapes 151936x4096 --batches 1,64,256 --out results/
    torchrun --nproc-per-node 2 examples/benchmark.py --tp     # a vocabulary sharded over ranks: see benchmark_tp.py

Times one LM head and one draw per row: the fused op alone, the compiled step of unmodified code, and what they replace.
All variants of a cell are measured in turn, round by round, so that a drift of the machine hits all of them; a cell's
number is the median round. On a GPU each variant is a CUDA graph of several calls. Writes a table, a JSON file with the
hardware and the versions, and plots.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_plots import plot_all
from tqdm import tqdm

SHAPES = ((151936, 2048), (151936, 4096), (128256, 8192), (256000, 2304), (262144, 5376), (32000, 4096))
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CPU_SHAPES, CPU_BATCHES = ((151936, 1024),), (1, 8, 64)
TEMPERATURE = 0.8
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Call = Callable[[], object]


# -- the code people write, unmodified ----------------------------------------------------------------------------


def softmax_multinomial(hidden, weight):
    return torch.multinomial(torch.softmax(F.linear(hidden, weight).float() / TEMPERATURE, dim=-1), 1)


def exponential_race(hidden, weight):
    probs = torch.softmax(F.linear(hidden, weight).float() / TEMPERATURE, dim=-1)
    return (probs / torch.empty_like(probs).exponential_(1)).argmax(dim=-1)


def gumbel_argmax(hidden, weight):
    logits = F.linear(hidden, weight).float() / TEMPERATURE
    return (logits - torch.log(-torch.log(torch.rand_like(logits)))).argmax(dim=-1)


def greedy(hidden, weight):
    return F.linear(hidden, weight).argmax(dim=-1)


STEPS = {
    "softmax+multinomial": softmax_multinomial,
    "race": exponential_race,
    "gumbel": gumbel_argmax,
    "greedy": greedy,
}


# -- variants -----------------------------------------------------------------------------------------------------


def variants(hidden: torch.Tensor, weight: torch.Tensor, wanted: list[str] | None) -> dict[str, Call]:
    """Every variant by name, compiled and ready to be called."""
    rows, vocab, device = hidden.shape[0], weight.shape[0], hidden.device
    short = {torch.bfloat16: "bf16", torch.float16: "f16"}.get(hidden.dtype)
    rounded = f"x0 = round(acc, {short}); x1 = div(x0, a0)" if short else "x0 = div(acc, a0)"
    logits = f"x0 = round(acc, {short})" if short else ""
    first = 1 if short else 0
    source = "x0" if short else "acc"
    rich = "; ".join(
        [logits] * bool(short)
        + [
            f"x{first} = div({source}, 30.0)",
            f"x{first + 1} = tanh(x{first})",
            f"x{first + 2} = mul(x{first + 1}, 30.0)",
            f"x{first + 3} = add(x{first + 2}, a1)",
            f"x{first + 4} = where(a2, -inf, x{first + 3})",
            f"x{first + 5} = div(x{first + 4}, a0)",
        ]
    )
    ops = torch.ops.flashsampling
    seed = torch.tensor(17, dtype=torch.int64, device=device)
    scalar = torch.tensor(TEMPERATURE, device=device)
    per_row = torch.full((rows, 1), TEMPERATURE, device=device)
    bias = torch.randn(vocab, device=device)

    def rich_call() -> Call:
        mask = torch.rand(rows, vocab, device=device) < 0.1
        return lambda: ops.sample(hidden, weight, seed, [per_row, bias, mask], rich, 1)

    table: dict[str, Callable[[], Call]] = {
        "matmul": lambda: lambda: hidden @ weight.t(),
        "op: sample": lambda: lambda: ops.sample(hidden, weight, seed, [scalar], rounded, 1),
        "op: greedy": lambda: lambda: ops.argmax(hidden, weight, [], logits),
        "op: softcap, temperature, bias, mask": rich_call,
        "compiled: fused": lambda: compiled(softmax_multinomial, "flashsampling", hidden, weight),
        "compiled: fused greedy": lambda: compiled(greedy, "flashsampling", hidden, weight),
    }
    for name, step in STEPS.items():
        table[f"inductor: {name}"] = lambda step=step: compiled(step, "inductor", hidden, weight)
    try:
        from flashinfer.sampling import sampling_from_logits

        table["flashinfer: sampling_from_logits"] = lambda: (
            lambda: sampling_from_logits((hidden @ weight.t()).float() / TEMPERATURE)
        )
    except ImportError:
        pass
    chosen = {name: make for name, make in table.items() if not wanted or any(w in name for w in wanted)}
    if not chosen:
        sys.exit(f"--variants {','.join(wanted)}: no variant's name contains that; there are {', '.join(table)}")
    return {name: make() for name, make in chosen.items()}


def compiled(step: Callable, backend: str, hidden: torch.Tensor, weight: torch.Tensor) -> Call:
    torch._dynamo.reset()  # one graph a cell, as a server with a fixed batch has
    # What would not pay is measured too: on a CPU the backend leaves vocabularies below 50,000 alone.
    options = {"flashsampling.min_vocab": 1} if backend == "flashsampling" else None
    fn = torch.compile(step, backend=backend, dynamic=False, options=options)
    fn(hidden, weight)
    return lambda: fn(hidden, weight)


# -- timing -------------------------------------------------------------------------------------------------------


class GraphTimer:
    """One variant as a CUDA graph of several calls."""

    def __init__(self, call: Call, calls: int):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        self.graph, self.calls = torch.cuda.CUDAGraph(), calls
        with torch.cuda.graph(self.graph):
            for _ in range(calls):
                call()
        self.graph.replay()

    def start(self) -> Callable[[], float]:
        """Replay it. The result waits for the end, and returns microseconds a call."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.graph.replay()
        end.record()

        def wait() -> float:
            end.synchronize()
            return begin.elapsed_time(end) * 1e3 / self.calls

        return wait


class WallTimer:
    """One variant on the CPU, call by call."""

    def __init__(self, call: Call):
        self.call = call
        call()

    def start(self) -> Callable[[], float]:
        begin = time.perf_counter()
        self.call()
        elapsed = (time.perf_counter() - begin) * 1e6
        return lambda: elapsed


def measure(calls: dict[str, Call], rounds: int, on_gpu: bool) -> dict[str, float]:
    """Median microseconds of each variant, in rounds of all of them in random order."""
    timers = {name: GraphTimer(call, 10) if on_gpu else WallTimer(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in timers}
    names = list(timers)
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(names)  # clocks depend on the power that was drawn just before
        if on_gpu:  # not measured: while it runs the others are queued, so that none of them waits for the CPU
            timers[names[-1]].start()
        started = {name: timers[name].start() for name in names}
        for name, wait in started.items():
            times[name].append(wait())
    return {name: statistics.median(values) for name, values in times.items()}


def ceilings(on_gpu: bool) -> dict[str, float]:
    """Bytes/s of a large device copy (read + written) and flop/s of a large bf16 product, measured."""
    if not on_gpu:
        return {}
    source = torch.empty(2**29, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))

    def seconds(call: Call) -> float:
        # Not as a graph, in which a copy is left to the copy engine, which is slower than the multiprocessors.
        times = []
        for _ in range(12):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3)
        return statistics.median(times)

    copied, products = seconds(lambda: target.copy_(source)), seconds(lambda: a @ b)
    return {"bytes_per_s": 2 * source.nbytes / copied, "flop_per_s": 2 * 8192**3 / products}


def extra_memory(hidden: torch.Tensor, weight: torch.Tensor, program: str) -> int:
    """Bytes the op allocates at its peak beyond its result, once it is warm."""
    seed = torch.tensor(17, dtype=torch.int64, device=hidden.device)
    call = lambda: torch.ops.flashsampling.sample(hidden, weight, seed, [], program, 1)  # noqa: E731
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - result.nbytes


# -- the run ------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if "--tp" in argv:
        import benchmark_tp

        return benchmark_tp.main([argument for argument in argv if argument != "--tp"])
    args = parse(argv)
    on_gpu = args.device == "cuda"
    import fs_inductor.backend  # noqa: F401 - registers the ops, and the backend where it is not installed

    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    result = {"environment": environment(on_gpu), "ceilings": ceilings(on_gpu), "dtype": args.dtype}
    result |= {"rounds": args.rounds, "cells": []}
    cells = [(v, d, b) for v, d in args.shapes for b in args.batches]
    weight = None
    for vocab, dim, batch in tqdm(cells, desc="cells", disable=args.quiet):
        if weight is None or tuple(weight.shape) != (vocab, dim):
            weight = None  # give the last shape's memory back first
            weight = torch.randn(vocab, dim, device=args.device, dtype=DTYPES[args.dtype]) * 0.02
        hidden = torch.randn(batch, dim, device=args.device, dtype=DTYPES[args.dtype])
        times = measure(variants(hidden, weight, args.variants), args.rounds, on_gpu)
        cell = {"V": vocab, "D": dim, "B": batch, "us": times}
        if on_gpu:
            cell["extra_bytes"] = extra_memory(hidden, weight, "")
        result["cells"].append(cell)
        # After each cell, so that a run that is cut short leaves what it has measured.
        (args.out / "benchmark.json").write_text(json.dumps(result, indent=1) + "\n")
    text = table(result)
    print(text)
    (args.out / "benchmark.md").write_text(text + "\n")
    plots = plot_all(result, args.out)
    print("written:", ", ".join(str(p) for p in [args.out / "benchmark.md", args.out / "benchmark.json", *plots]))
    return 0


def table(result: dict) -> str:
    """A Markdown table of microseconds, then ratios with their geometric means."""
    names = list(dict.fromkeys(name for cell in result["cells"] for name in cell["us"]))
    lines = [
        f"{result['environment']['device']}, torch {result['environment']['torch']}, {result['dtype']}; microseconds",
        "",
    ]
    lines += ["| V, D, B | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    for cell in result["cells"]:
        row = [f"{cell['us'][n]:.1f}" if n in cell["us"] else "" for n in names]
        lines.append(f"| {cell['V']}, {cell['D']}, {cell['B']} | " + " | ".join(row) + " |")
    lines += ["", "| ratio | geometric mean | least | most (V, D, B) |", "| --- | --- | --- | --- |"]
    for over, under in ratios(names):
        pairs = [(c["us"][over] / c["us"][under], c) for c in result["cells"] if over in c["us"] and under in c["us"]]
        if not pairs:
            continue
        mean = math.exp(statistics.fmean(math.log(r) for r, _ in pairs))
        worst, cell = max(pairs, key=lambda pair: pair[0])
        best = min(r for r, _ in pairs)
        where = f"{cell['V']}, {cell['D']}, {cell['B']}"
        lines.append(f"| {over} ÷ {under} | {mean:.3f} | {best:.3f} | {worst:.3f} ({where}) |")
    return "\n".join(lines)


def ratios(names: list[str]) -> list[tuple[str, str]]:
    fused = [n for n in ("op: sample", "compiled: fused") if n in names]
    pairs = [(n, "matmul") for n in fused]
    pairs += [(n, "op: sample") for n in names if n.startswith("op: ") and n != "op: sample"]
    for base in fused[-1:]:
        pairs += [(n, base) for n in names if n.startswith(("inductor", "flashinfer")) and n != "inductor: greedy"]
    return [*pairs, ("inductor: greedy", "compiled: fused greedy")]


def environment(on_gpu: bool) -> dict:
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    device = torch.cuda.get_device_name() if on_gpu else f"{platform.processor() or platform.machine()}"
    if not on_gpu:
        device += f", {torch.get_num_threads()} threads"
    return {
        "device": device,
        "torch": torch.__version__,
        "triton": triton_version,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=list(DTYPES), help="default: bf16 on a GPU, fp32 on a CPU")
    parser.add_argument("--shapes", help="VOCABxHIDDEN, comma-separated")
    parser.add_argument("--batches", help="rows, comma-separated")
    parser.add_argument("--variants", help="only variants whose name contains one of these words, comma-separated")
    parser.add_argument("--rounds", type=int, default=20, help="measured rounds a cell")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"), help="folder of the results")
    parser.add_argument("--tp", action="store_true", help="the vocabulary sharded over ranks; has options of its own")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch sees no GPU")
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out takes a folder, and {args.out} is a file")
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {args.rounds}")
    on_cpu = args.device == "cpu"
    args.dtype = args.dtype or ("fp32" if on_cpu else "bf16")
    given = f"not --shapes {args.shapes} --batches {args.batches}"
    try:
        args.shapes = (
            [tuple(int(n) for n in shape.split("x")) for shape in args.shapes.split(",")]
            if args.shapes
            else (CPU_SHAPES if on_cpu else SHAPES)
        )
        args.batches = (
            [int(b) for b in args.batches.split(",")] if args.batches else (CPU_BATCHES if on_cpu else BATCHES)
        )
    except ValueError as error:
        parser.error(f"--shapes and --batches take whole numbers, such as 151936x4096 and 1,64, {given}: {error}")
    if any(len(shape) != 2 or min(shape) < 1 for shape in args.shapes) or min(args.batches) < 1:
        parser.error(f"--shapes takes VOCABxHIDDEN and --batches rows, all at least 1, {given}")
    args.variants = args.variants.split(",") if args.variants else None
    return args


if __name__ == "__main__":
    sys.exit(main())
