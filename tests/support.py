"""Runs the graph pass alone: trace a function, apply the pass, stop before code generation, execute what is left.

Ten times faster than a whole compile, and the tensors that reach our ops can be looked at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.fx import Graph, GraphModule, Interpreter, Node

import fs_inductor.backend  # noqa: F401 - registers the ops and, in a checkout that is not installed, the backend
from fs_inductor.graph_pass import FlashSamplingPass, PassSequence
from fs_inductor.kernels.epilogue import Program
from fs_inductor.options import Options
from fs_inductor.report import Report

BATCH, LENGTH, FEATURES, VOCAB = 4, 5, 16, 160
"""Sizes of the tests' tensors, all different: a tensor whose first size is BATCH has a batch dimension."""

EVERY_SIZE = Options(min_vocab=0)
OPS = torch.ops.flashsampling
_SHORT = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "bool",
}
_RANDOM_WORDS = ("multinomial", "rand", "exponential", "uniform", "bernoulli")


class _Stop(Exception):
    """Ends a compilation after our pass."""


@dataclass
class OpCall:
    """One executed call of one of our ops, with real tensors."""

    op: str
    hidden: torch.Tensor
    weight: torch.Tensor
    seed: torch.Tensor | None
    operands: list[torch.Tensor]
    program: str
    greedy_program: str
    num_samples: int

    def logits(self, program: str | None = None) -> torch.Tensor:
        """The final logits ``[B, V]`` in float32, by the program's own interpreter."""
        accumulator = self.hidden.float() @ self.weight.float().T
        text = self.program if program is None else program
        return Program.parse(text).run(accumulator, self.operands).broadcast_to(accumulator.shape)


@dataclass
class Rewritten:
    """What the pass made of a function, and what the rewritten graph computed."""

    report: Report
    before: str = ""
    after: str = ""
    modules: list[GraphModule] = field(default_factory=list)
    calls: list[OpCall] = field(default_factory=list)
    result: Any = None

    @property
    def nodes(self) -> list[Node]:
        """All nodes of the rewritten graphs."""
        return [node for module in self.modules for node in module.graph.nodes]

    def text(self, symbols: bool = True) -> str:
        """Our op calls, canonical: dtypes, shapes and programs, the same from one torch version to the next.

        symbols: print the batch as ``B`` where it is dynamic; else its value in this trace.
        """
        return "\n".join(_call_text(n, symbols) for n in self.nodes if _is_ours(n))

    def left_over(self) -> list[str]:
        """Sampling and random ops that are still in the graph."""
        targets = [str(node.target) for node in self.nodes if node.op == "call_function"]
        return [t for t in targets if any(w in t for w in _RANDOM_WORDS) or t.startswith(("aten.argmax", "aten.topk"))]


def run_pass(
    fn: Callable,
    args: Sequence[Any],
    *,
    dynamic: str | None = None,
    options: Options = EVERY_SIZE,
    mode: Callable[[], contextlib.AbstractContextManager] = torch.no_grad,
    config: dict[str, Any] | None = None,
    execute: bool = True,
) -> Rewritten:
    """Traces ``fn(*args)``, applies the pass, and executes the rewritten graph op by op.

    dynamic: None for static shapes; "batch" to make the batch dimension dynamic; "all" for every dimension.
    mode: the context of the call, such as ``torch.no_grad``. config: Inductor settings, such as ``freezing``.
    execute: False stops after the pass, without a result or calls.
    """
    rewritten = Rewritten(Report())
    ours = FlashSamplingPass(options, rewritten.report)

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable:
        captured: list[GraphModule] = []

        def before(graph: Graph) -> None:
            rewritten.before += str(graph)

        def after(graph: Graph) -> None:
            rewritten.after += str(graph)
            captured.append(graph.owning_module)
            raise _Stop

        inductor = torch._TorchCompileInductorWrapper(None, dict(config or {}), None)
        inductor.config["joint_custom_pre_pass"] = PassSequence([before, ours, after])
        try:
            inductor(gm, example_inputs)
        except Exception:
            if not captured:
                raise
        rewritten.modules += captured
        if not execute:
            raise _Stop
        return lambda *inputs: _Recorder(captured[0], rewritten.calls).run(*inputs)

    torch._dynamo.reset()
    args = fresh(args)
    if dynamic == "batch":
        for tensor in args:
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 0 and tensor.shape[0] == BATCH:
                torch._dynamo.mark_dynamic(tensor, 0)
    with mode(), inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        compiled = torch.compile(fn, backend=backend, dynamic=True if dynamic == "all" else None, fullgraph=True)
        try:
            rewritten.result = compiled(*args)
        except Exception:
            if execute or not rewritten.modules:
                raise
    return rewritten


def fresh(args: Sequence[Any]) -> list[Any]:
    """Copies, so that a function that works in place does not change its caller's tensors."""
    return [a.detach().clone() if type(a) is torch.Tensor else a for a in args]


def assert_fused(rewritten: Rewritten, count: int) -> None:
    """``count`` sinks were fused, none was missed, and nothing that samples is left."""
    assert rewritten.report.missed == [], str(rewritten.report)
    assert len(rewritten.report.fused) == count, str(rewritten.report)
    assert rewritten.left_over() == []


class _Recorder(Interpreter):
    """Executes a graph and keeps the arguments of our op calls."""

    def __init__(self, module: GraphModule, calls: list[OpCall]):
        super().__init__(module)
        self.recorded = calls

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        if target is OPS.sample.default:
            hidden, weight, seed, operands, program, n = args
            self.recorded.append(OpCall("sample", hidden, weight, seed, operands, program, "", n))
        elif target is OPS.sample_and_argmax.default:
            hidden, weight, seed, operands, program, greedy, n = args
            self.recorded.append(OpCall("sample_and_argmax", hidden, weight, seed, operands, program, greedy, n))
        elif target is OPS.argmax.default:
            hidden, weight, operands, program = args
            self.recorded.append(OpCall("argmax", hidden, weight, None, operands, program, program, 0))
        return super().call_function(target, args, kwargs)


def _is_ours(node: Node) -> bool:
    return node.op == "call_function" and str(node.target).startswith("flashsampling.")


def _call_text(node: Node, symbols: bool) -> str:
    name = str(node.target).removeprefix("flashsampling.").removesuffix(".default")
    schema = [argument.name for argument in node.target._schema.arguments]
    values = dict(zip(schema, node.args, strict=False)) | node.kwargs

    def tensor(n: Node) -> str:
        val = n.meta["val"]
        return f"{_SHORT[val.dtype]}[{', '.join(_size_text(s, symbols) for s in val.shape)}]"

    parts = [f"{key} {tensor(values[key])}" for key in ("hidden", "weight", "seed") if key in values]
    if values["operands"]:
        parts.append(f"operands [{', '.join(tensor(n) for n in values['operands'])}]")
    if values.get("num_samples", 1) != 1:
        parts.append(f"num_samples {values['num_samples']}")
    parts += [f"{key} {values[key]}" for key in ("vocab", "capacity") if key in values]
    lines = [f"{name}({', '.join(parts)})"]
    for key in ("program", "greedy_program"):
        if key in values:
            lines += _program_lines(f"  {key}: ", values[key] or "acc")
    return "\n".join(lines)


def _program_lines(head: str, program: str) -> list[str]:
    """``head`` and the program's statements, broken between statements into lines of at most 100 characters."""
    lines = [head]
    for statement in program.split("; "):
        if len(lines[-1]) + len(statement) > 100:
            lines.append("    ")
        lines[-1] += statement + "; "
    lines[-1] = lines[-1][:-2]
    return [line.rstrip() for line in lines]


def _size_text(size: Any, symbols: bool) -> str:
    """Every symbol is a batch size here, by construction; whether two of them are one symbol is torch's affair."""
    if isinstance(size, int):
        return str(size)
    if not symbols:
        return str(size.node.hint)
    return str(size.node.expr.subs(dict.fromkeys(size.node.expr.free_symbols, "B")))
