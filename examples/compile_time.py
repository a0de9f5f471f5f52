"""How long `backend="flashsampling"` takes to compile, beside `backend="inductor"`.

    python examples/compile_time.py                    # a Llama of four layers, five fresh compiles of each
    python examples/compile_time.py --layers 16 --steps draw --device cuda --out results/

Three steps of one model: its logits with nothing to sample, one drawn token, one greedy token. Both backends compile
each of them from nothing: caches are off, Dynamo is reset, and all compiles take turns, so that a drift of the machine
hits all alike. A number is the median of the rounds, and a ratio that of the rounds' ratios, for a first call:
tracing, the passes, code generation, the compilers of that code, and one run. The clock includes all of it. Processor
time leaves out the compilers, which are other processes; on a busy machine it says more than the clock. A fused step
has less code to generate, as softmax and draw are gone, so it may well compile faster.

The pass is also timed alone, from its call to its return, and set against the processor time of Inductor's compile of
the same step. For the step without a site both backends must generate the same code. Writes a table and a JSON file
with the hardware and the versions, anew after each round.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch._inductor.compile_fx
import torch._inductor.custom_graph_pass
import torch._inductor.pattern_matcher
from benchmark import environment
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, TemperatureLogitsWarper

TEMPERATURE = 0.8
NO_SINK = "no sink"
BACKENDS = ("inductor", "flashsampling")
Step = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Cost:
    """Of one compile: seconds on the clock, of this process, of the compilers it started, and of the pass alone."""

    wall: float
    cpu: float
    compilers: float
    in_pass: float


@dataclass
class Row:
    """One step under one backend: what it cost in each round."""

    step: str
    backend: str
    rounds: list[Cost] = field(default_factory=list)

    def median(self, what: str) -> float:
        return statistics.median(getattr(cost, what) for cost in self.rounds)

    def over(self, other: Row, what: str) -> float:
        """The median ratio to `other`, round by round: a machine that slows down slows both of a round."""
        pairs = zip(self.rounds, other.rounds, strict=True)
        return statistics.median(getattr(mine, what) / getattr(theirs, what) for mine, theirs in pairs)


# -- the steps ----------------------------------------------------------------------------------------------------


def steps(model: LlamaForCausalLM) -> dict[str, Step]:
    warper = TemperatureLogitsWarper(TEMPERATURE)

    def no_sink(ids):
        return model(ids).logits[:, -1]

    def draw(ids):
        probs = torch.softmax(warper(ids, model(ids).logits[:, -1]), dim=-1)
        return torch.multinomial(probs, num_samples=1)

    def greedy(ids):
        return model(ids).logits[:, -1].argmax(dim=-1)

    return {NO_SINK: no_sink, "draw": draw, "greedy": greedy}


def build(args: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False).to(args.device)


# -- timing -------------------------------------------------------------------------------------------------------


@contextmanager
def timed_pass() -> Iterator[list[float]]:
    """Collects the processor seconds of every call of the pass."""
    from fs_inductor.graph_pass import FlashSamplingPass

    calls: list[float] = []
    original = FlashSamplingPass.__call__

    @functools.wraps(original)
    def timed(self, graph):
        begin = time.process_time()
        try:
            return original(self, graph)
        finally:
            calls.append(time.process_time() - begin)

    FlashSamplingPass.__call__ = timed
    try:
        yield calls
    finally:
        FlashSamplingPass.__call__ = original


def compiled(step: Step, backend: str) -> Step:
    torch._dynamo.reset()
    gc.collect()
    options = {"flashsampling.min_vocab": 0, "flashsampling.strict": True} if backend == "flashsampling" else None
    return torch.compile(step, backend=backend, options=options, fullgraph=True)


def compile_once(step: Step, backend: str, ids: torch.Tensor) -> Cost:
    """The first call of `step`, compiled from nothing."""
    fn = compiled(step, backend)
    with timed_pass() as calls:
        wall, before = time.perf_counter(), os.times()
        fn(ids)
        wall, after = time.perf_counter() - wall, os.times()
    spent = [b - a for a, b in zip(before, after, strict=True)]
    return Cost(wall, spent[0] + spent[1], spent[2] + spent[3], sum(calls))


def code_of(step: Step, backend: str, ids: torch.Tensor) -> list[str]:
    """The lines of the code generated for `step`, but for comments and for paths, which name files of one run."""
    _, texts = run_and_get_code(compiled(step, backend), ids)
    lines = [line for text in texts for line in text.splitlines()]
    return [line for line in lines if not line.lstrip().startswith("#") and "/" not in line]


# -- the run ------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    fixed = once_a_process()
    warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")  # that is what is asked for below
    table = {name: step for name, step in steps(build(args)).items() if name in args.steps}
    ids = torch.arange(args.batch * 8, device=args.device).view(args.batch, 8) % args.vocab
    rows = [Row(name, backend) for name in table for backend in BACKENDS]
    # Compilers run one after another, as children of this process, whose time can be told from its own.
    settings = {"force_disable_caches": True, "compile_threads": 1}
    with torch.no_grad(), inductor_config.patch(settings), tqdm(disable=args.quiet) as bar:
        bar.reset(total=(1 + args.rounds) * len(rows) + len(BACKENDS) * (NO_SINK in table))
        code = []
        for backend in BACKENDS if NO_SINK in table else ():
            bar.set_description(f"generated code, {backend}")
            code.append(code_of(table[NO_SINK], backend, ids))
            bar.update()
        if code:
            fixed["code without a sink"] = "the same" if code[0] == code[1] else "DIFFERENT"
        for turn in range(1 + args.rounds):
            for row in rows if turn % 2 else rows[::-1]:
                bar.set_description(f"{row.step}, {row.backend}")
                cost = compile_once(table[row.step], row.backend, ids)
                if turn:  # the first round imports and fills what a process needs once
                    row.rounds.append(cost)
                bar.update()
            if turn:
                text, paths = write(args, rows, fixed, turn)
    print(text)
    print("written:", ", ".join(map(str, paths)))
    return 0 if len({tuple(lines) for lines in code}) < 2 else 1


def once_a_process() -> dict[str, float | str]:
    """Milliseconds of processor time for what is not part of every compile."""
    begin = time.process_time()
    import fs_inductor.backend  # registers the backend where it is not installed

    imported = time.process_time()
    fs_inductor.graph_pass.FlashSamplingPass(fs_inductor.Options()).uuid()
    return {"import, ms": (imported - begin) * 1e3, "key for the caches, ms": (time.process_time() - imported) * 1e3}


def write(
    args: argparse.Namespace, rows: list[Row], fixed: dict[str, float | str], rounds: int
) -> tuple[str, list[Path]]:
    """The table, and the files that now hold it and the single measurements."""
    hardware = environment(args.device == "cuda")
    text = "\n".join(
        [
            f"{hardware['device']}, torch {hardware['torch']}; Llama, {args.layers} layers; medians of {rounds}",
            "",
            *report(rows),
            "",
            "Once a process: "
            + "; ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k}: {v}" for k, v in fixed.items()),
        ]
    )
    result = {
        "environment": hardware,
        "model": {key: getattr(args, key) for key in ("layers", "hidden", "vocab", "batch")},
        "once_a_process": fixed,
        "rows": [asdict(row) for row in rows],
    }
    args.out.mkdir(parents=True, exist_ok=True)
    paths = [args.out / "compile_time.md", args.out / "compile_time.json"]
    for path, content in zip(paths, (text, json.dumps(result, indent=1)), strict=True):
        path.write_text(content + "\n")
    return text, paths


def report(rows: list[Row]) -> list[str]:
    """A Markdown table, in seconds (of the clock and of this process) and milliseconds."""
    heads = ["step"]
    heads += [f"{backend}, {what}" for what in ("clock", "processor") for backend in BACKENDS]
    heads += ["ratio, clock", "ratio, processor", "the pass, ms", "of inductor's"]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for inductor, ours in zip(rows[::2], rows[1::2], strict=True):
        pairs = [(inductor.median(what), ours.median(what)) for what in ("wall", "cpu")]
        cells = [ours.step]
        cells += [f"{seconds:.2f}" for pair in pairs for seconds in pair]
        cells += [f"{ours.over(inductor, what):.3f}" for what in ("wall", "cpu")]
        in_pass = ours.median("in_pass")
        cells += [f"{in_pass * 1e3:.1f}", f"{in_pass / inductor.median('cpu'):.2%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64, help="size of the hidden states, a multiple of 8")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", default="no sink,draw,greedy", help="which of the three, comma-separated")
    parser.add_argument("--rounds", type=int, default=5, help="measured compiles of each step and backend")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch sees no GPU")
    for name in ("layers", "hidden", "vocab", "batch", "rounds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(args, name)}")
    if args.hidden % 8:
        parser.error(f"--hidden must be a multiple of 8, not {args.hidden}: four heads of an even size")
    args.steps = [name.strip() for name in args.steps.split(",")]
    unknown = set(args.steps) - {NO_SINK, "draw", "greedy"}
    if unknown:
        parser.error(f"--steps takes 'no sink', 'draw' and 'greedy', not {sorted(unknown)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
