"""How long sampling takes where the vocabulary is sharded over ranks, and whether all ranks draw the same tokens.

    torchrun --nproc-per-node 2 examples/benchmark.py --tp                            # one GPU a rank
    torchrun --nproc-per-node 2 examples/benchmark.py --tp --share-gpu --quick        # a trial: ranks take turns
    torchrun --nproc-per-node 2 examples/benchmark.py --tp --device cpu --quick       # a trial, over gloo

Each variant is measured in turn, run by run, on all ranks at once; a run is many calls, and its time is the slowest
rank's; a cell's number is the median run. With NCCL each variant is a CUDA graph of several calls, replayed; otherwise
calls are timed one after the other. Collectives and the exchange give up after --timeout seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

# A rank that waits by spinning takes a core from the rank that it waits for.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# NVLink multicast is not needed, and a risk to the other users of a host.
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist
from benchmark import DTYPES, TEMPERATURE, environment
from tile_fan_out import tile_fan_out
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

SHAPES, BATCHES = ((128256, 8192), (151936, 4096)), (1, 16, 64, 256)
QUICK_SHAPES, QUICK_BATCHES = ((4096, 64),), (1, 4)
GRAPH_CALLS = 10  # each takes memory for its exchange, so a run is several replays of one graph

OP, COMPILED = "op: sample_sharded", "compiled: fused"
FAN_OUT = "fan-out of every tile (emulated)"
GATHER, ONE_RANK = "inductor: all-gather+softmax+multinomial", "op: sample, one rank"
SHARD = "op: sample, one shard, no exchange"
NAMES = (OP, COMPILED, FAN_OUT, GATHER, ONE_RANK, SHARD)

Call = Callable[[], torch.Tensor]


class Ranks:
    """This process's place among the ranks, and what the ranks tell each other beside what is measured."""

    def __init__(self, args: argparse.Namespace):
        on_gpu, timeout = args.device == "cuda", timedelta(seconds=args.timeout)
        self.device = torch.device("cpu")
        if on_gpu:
            if args.share_gpu:
                os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
            self.device = torch.device("cuda", 0 if args.share_gpu else int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        backend = "nccl" if on_gpu and not args.share_gpu else "gloo"  # NCCL wants a GPU a rank
        dist.init_process_group(backend, timeout=timeout)
        self.control = dist.new_group(backend="gloo", timeout=timeout)
        self.rank, self.world, self.captures = dist.get_rank(), dist.get_world_size(), backend == "nccl"
        self.name = dist.group.WORLD.group_name
        self.share_gpu = on_gpu and args.share_gpu
        self.mesh = init_device_mesh(args.device, (self.world,))
        if not on_gpu:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // self.world))

    def largest(self, value: float) -> float:
        box = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(box, dist.ReduceOp.MAX, group=self.control)
        return float(box)

    def meet(self) -> None:
        """All ranks are here, and their devices idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.largest(0)

    def agree(self, tokens: torch.Tensor) -> bool:
        """Whether all ranks hold the same tokens, all of them valid ids."""
        mine = tokens.cpu()
        first = mine.clone()
        dist.broadcast(first, 0, group=self.control)
        return self.largest(float(not torch.equal(mine, first) or bool((mine < 0).any()))) == 0


# -- variants -----------------------------------------------------------------------------------------------------


class Head(nn.Module):
    """An LM head, sharded over the ranks, that gathers its logits on all of them."""

    def __init__(self, weight: torch.Tensor, ranks: Ranks):
        super().__init__()
        self.lm_head = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(weight, requires_grad=False)
        plan = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(self, ranks.mesh, plan, src_data_rank=None)  # all ranks have the weight already

    def forward(self, hidden):
        return self.lm_head(hidden)


def draw_gathered(head: Head, hidden: torch.Tensor) -> torch.Tensor:
    """The code people write, unmodified."""
    return torch.multinomial(torch.softmax(head(hidden).float() / TEMPERATURE, dim=-1), 1)


def variants(ranks: Ranks, head: Head, hidden: torch.Tensor, whole: torch.Tensor | None, wanted) -> dict:
    """Every variant by name, or None where this rank has no part in it. whole: the whole weight, on rank 0."""
    torch._dynamo.reset()  # one graph a cell, as a server with a fixed batch has
    shard = head.lm_head.weight.to_local()
    vocab = head.lm_head.weight.shape[0]
    capacity = -(-vocab // ranks.world)
    short = {torch.bfloat16: "bf16", torch.float16: "f16"}.get(hidden.dtype)
    program = f"x0 = round(acc, {short}); x1 = div(x0, a0)" if short else "x0 = div(acc, a0)"
    seed = torch.tensor(17, dtype=torch.int64, device=hidden.device)
    scalar = torch.tensor(TEMPERATURE, device=hidden.device)
    ops = torch.ops.flashsampling
    rest = ([scalar], program, 1)
    table: dict[str, Callable[[], Call | None]] = {
        OP: lambda: lambda: ops.sample_sharded(hidden, shard, seed, *rest, vocab, capacity, ranks.name),
        COMPILED: lambda: compiled("flashsampling", head, hidden),
        FAN_OUT: lambda: tile_fan_out(ranks.rank, ranks.world, hidden, shard, seed, rest, vocab, capacity),
        GATHER: lambda: compiled("inductor", head, hidden),
        SHARD: lambda: lambda: ops.sample(hidden, shard, seed, *rest) if len(shard) else None,
        ONE_RANK: lambda: None if whole is None else lambda: ops.sample(hidden, whole, seed, *rest),
    }
    if ranks.share_gpu:
        del table[GATHER]  # DTensor gathers with NCCL, which wants a GPU a rank
    return {name: make() for name, make in table.items() if not wanted or any(w in name for w in wanted)}


def compiled(backend: str, head: Head, hidden: torch.Tensor) -> Call:
    options = {"flashsampling.min_vocab": 0, "flashsampling.strict": True} if backend == "flashsampling" else None
    fn = torch.compile(draw_gathered, backend=backend, options=options, dynamic=False)
    fn(head, hidden)
    return lambda: fn(head, hidden)


# -- timing -------------------------------------------------------------------------------------------------------


class Timer:
    """One variant: the calls one after the other, or, after `capture`, replays of a CUDA graph of several calls."""

    def __init__(self, call: Call, calls: int, device: torch.device):
        self.call, self.calls, self.on_gpu = call, calls, device.type == "cuda"
        self.graph: torch.cuda.CUDAGraph | None = None
        self.tokens: list[torch.Tensor] = []
        for _ in range(3):
            call()

    def capture(self) -> str:
        """Returns what stood in the way of a graph; empty if nothing did."""
        call, side = self.call, torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            # Thread-local, because NCCL's watchdog asks for events meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.tokens = [call() for _ in range(GRAPH_CALLS)]
        except RuntimeError as error:
            return str(error).strip().split("\n")[0]
        self.graph = graph
        return ""

    def run(self) -> float:
        """Microseconds a call, over at least `calls` calls."""
        replays = -(-self.calls // GRAPH_CALLS) if self.graph else self.calls
        once = self.graph.replay if self.graph else self.call
        done = replays * (GRAPH_CALLS if self.graph else 1)
        if not self.on_gpu:
            begin = time.perf_counter()
            for _ in range(replays):
                once()
            return (time.perf_counter() - begin) * 1e6 / done
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            once()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / done

    def replay(self, steps: int) -> torch.Tensor:
        """int64 [steps, B, 1], rounded up to whole replays: the tokens of the graph's calls."""
        log = []
        for _ in range(-(-steps // GRAPH_CALLS)):
            self.graph.replay()
            log.append(torch.stack(self.tokens))
        return torch.cat(log)


def start(ranks: Ranks, name: str, call: Call | None, calls: int) -> Timer | None:
    """A timer that is warm; on a graph if all ranks have captured one."""
    ranks.meet()
    timer = None if call is None else Timer(call, calls, ranks.device)
    if ranks.captures:
        reason = timer.capture() if timer else ""
        if reason:
            print(f"rank {ranks.rank}: no CUDA graph of {name!r}: {reason}", flush=True)
        # Before any replay: a rank without a graph would be waited for.
        if ranks.largest(bool(reason)) and timer:
            timer.graph = None
        if timer and timer.graph:
            timer.graph.replay()
    ranks.meet()
    return timer


def measure(ranks: Ranks, timers: dict[str, Timer | None], rounds: int) -> dict[str, float]:
    """Median microseconds of each variant, all measured in turn; a run is as long as its slowest rank's."""
    times: dict[str, list[float]] = {name: [] for name in timers}
    names = list(timers)
    for _ in range(rounds):
        names.append(names.pop(0))  # another one follows the idle ranks of the one-rank product each time
        for name in names:
            timer = timers[name]
            for _ in range(2):  # the first brings all GPUs to the clock that this variant's power leaves them
                ranks.meet()
                us = ranks.largest(timer.run() if timer else 0.0)
            times[name].append(us)
    return {name: statistics.median(values) for name, values in times.items()}


def check(ranks: Ranks, timers: dict[str, Timer | None], calls: dict[str, Call | None], steps: int) -> dict:
    """Draw `steps` times with each fused variant, by calls and, where there is one, by a graph; compare the ranks."""
    from fs_inductor.kernels import exchange

    found = {}
    for name in (OP, COMPILED):
        if name not in timers:
            continue
        torch.manual_seed(ranks.rank)  # ranks need not share a seed
        ranks.meet()
        drawn = [torch.stack([calls[name]() for _ in range(steps)])]
        if timers[name].graph:
            drawn.append(timers[name].replay(steps))
        drawn = torch.cat(drawn)
        ranks.meet()
        exchange.check()
        found[name] = {"steps": len(drawn), "agree": ranks.agree(drawn), "different": len(drawn.unique())}
    return found


# -- the run ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    from bench_plots import plot_ranks

    import fs_inductor.backend  # noqa: F401 - registers the ops, and the backend where it is not installed
    from fs_inductor.kernels import exchange

    ranks = Ranks(args)
    say = print if ranks.rank == 0 else lambda *text, **kwargs: None
    result = {"environment": surroundings(args, ranks), "arguments": _plain(args), "cells": []}
    for vocab, dim in args.shapes:
        torch.manual_seed(0)
        # GPUs of one kind make the same numbers from one seed.
        whole = torch.randn(vocab, dim, device=ranks.device, dtype=DTYPES[args.dtype]) * 0.02
        head = Head(whole.clone(), ranks)
        whole = whole if ranks.rank == 0 else None
        for batch in args.batches:
            torch.manual_seed(batch)
            hidden = torch.randn(batch, dim, device=ranks.device, dtype=DTYPES[args.dtype])
            calls = variants(ranks, head, hidden, whole, args.variants)
            timers = {name: start(ranks, name, call, args.calls) for name, call in calls.items()}
            cell = {"V": vocab, "D": dim, "B": batch, "us": measure(ranks, timers, args.rounds)}
            cell["graphs"] = [name for name, timer in timers.items() if timer and timer.graph]
            cell["checked"] = check(ranks, timers, calls, args.steps)
            result["cells"].append(cell)
            numbers = ", ".join(f"{name} {us:.1f}" for name, us in cell["us"].items())
            agreed = all(found["agree"] for found in cell["checked"].values())
            say(f"V {vocab} D {dim} B {batch}: {numbers}; ranks agree: {agreed}", flush=True)
            del calls, timers
            result["environment"]["exchange"] = exchange.describe(ranks.name, ranks.device)
            if ranks.rank == 0:
                save(result, args.out)  # in case that a later cell fails
    if ranks.rank == 0:
        print(table(result))
        plot_ranks(result, args.out / f"{stem(result)}.png")
        print("written:", ", ".join(str(args.out / f"{stem(result)}.{end}") for end in ("md", "json", "png")))
    ranks.meet()
    dist.destroy_process_group()
    return 0 if all(found["agree"] for cell in result["cells"] for found in cell["checked"].values()) else 1


def surroundings(args: argparse.Namespace, ranks: Ranks) -> dict:
    found = environment(args.device == "cuda")
    found |= {"world": ranks.world, "share_gpu": args.share_gpu, "backend": dist.get_backend(), "dtype": args.dtype}
    if args.device == "cuda":
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["gpus"] = 1 if args.share_gpu else ranks.world
    return found


def stem(result: dict) -> str:
    return f"tensor_parallel_{result['environment']['world']}"


def save(result: dict, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{stem(result)}.md").write_text(table(result) + "\n")
    (out / f"{stem(result)}.json").write_text(json.dumps(result, indent=1) + "\n")


def table(result: dict) -> str:
    """A Markdown table of microseconds and ratios."""
    env, cells = result["environment"], result["cells"]
    names = [name for name in NAMES if name in cells[0]["us"]]
    fused = OP if OP in names else COMPILED
    hardware = f"{env['gpus']} x {env['device']}" if "gpus" in env else env["device"]
    pairs = [(name, fused) for name in names if name not in (OP, COMPILED)]
    lines = [
        f"{env['world']} ranks on {hardware}, torch {env['torch']}, "
        f"{env['dtype']}, {env['backend']}; microseconds. Exchange: {env['exchange']}.",
        "",
        "| V, D, B | " + " | ".join([*names, *(f"{a} ÷ {b}" for a, b in pairs)]) + " | ranks agree |",
        "| --- |" + " --- |" * (len(names) + len(pairs) + 1),
    ]
    for cell in cells:
        us = cell["us"]
        row = [f"{us[name]:.1f}" for name in names]
        row += [f"{us[a] / us[b]:.2f}" if us.get(b) else "" for a, b in pairs]
        checked = cell["checked"].values()
        steps = sum(found["steps"] for found in checked)
        verdict = f"yes, {steps:,} steps" if all(found["agree"] for found in checked) else "NO"
        lines.append(f"| {cell['V']}, {cell['D']}, {cell['B']} | " + " | ".join([*row, verdict]) + " |")
    return "\n".join(lines)


def _plain(args: argparse.Namespace) -> dict:
    return {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmark.py --tp", description=__doc__.splitlines()[0])
    option = parser.add_argument
    option("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    option("--dtype", choices=list(DTYPES), help="default: bf16 on a GPU, fp32 on a CPU")
    option("--shapes", help="VOCABxHIDDEN, comma-separated")
    option("--batches", help="rows, comma-separated")
    option("--variants", help="only variants whose name contains one of these words, comma-separated")
    option("--rounds", type=int, default=7, help="measured runs a cell (default: %(default)s)")
    option("--calls", type=int, default=100, help="calls a run (default: %(default)s)")
    option("--steps", type=int, default=1000, help="steps on which all ranks must agree (default: %(default)s)")
    option("--timeout", type=float, default=120, help="seconds a rank waits for another (default: %(default)s)")
    option("--share-gpu", action="store_true", help="all ranks on one GPU: a trial, slow")
    option("--quick", action="store_true", help="small shapes: a trial")
    option("--out", type=Path, default=Path("benchmark-results"))
    args = parser.parse_args(argv)
    if "RANK" not in os.environ:
        parser.error("one process a rank: start it with torchrun --nproc-per-node 2 examples/benchmark.py --tp")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch sees no GPU")
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if args.device == "cuda" and not args.share_gpu and torch.cuda.device_count() < per_host:
        parser.error(f"{per_host} ranks, but torch sees {torch.cuda.device_count()} GPUs: start fewer, or --share-gpu")
    if min(args.rounds, args.calls, args.steps) < 1 or args.timeout <= 0:
        parser.error("--rounds, --calls and --steps must be at least 1, and --timeout above 0")
    small = args.quick or args.device == "cpu"
    args.dtype = args.dtype or ("fp32" if args.device == "cpu" else "bf16")
    try:
        shapes = [tuple(int(n) for n in shape.split("x")) for shape in args.shapes.split(",")] if args.shapes else None
        batches = [int(b) for b in args.batches.split(",")] if args.batches else None
    except ValueError as error:
        parser.error(f"--shapes and --batches take whole numbers, such as 151936x4096 and 1,64: {error}")
    args.shapes = shapes or list(QUICK_SHAPES if small else SHAPES)
    args.batches = batches or list(QUICK_BATCHES if small else BATCHES)
    if any(len(shape) != 2 or min(shape) < 1 for shape in args.shapes) or min(args.batches) < 1:
        parser.error("--shapes takes VOCABxHIDDEN and --batches rows, all at least 1")
    args.variants = args.variants.split(",") if args.variants else None
    return args


if __name__ == "__main__":
    sys.exit(main())
