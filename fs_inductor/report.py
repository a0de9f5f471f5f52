"""What was fused and what was not: the records, their printed form, and the error that `strict` raises."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

import sympy
import torch
from torch._dynamo.exc import ShortenTraceback
from torch.fx import Node


@dataclass(frozen=True)
class Fused:
    """One rewritten sink.

    sink: the op that sampled, such as ``aten.multinomial``; location: ``file:line (function) code`` of the user's call.
    op: the op that took its place; epilogue: its program (see README, "What fuses").
    bytes_saved: memory traffic avoided per call, in bytes: an int, or a sympy expression where the batch is dynamic.
    exchange: how the ranks of a sharded vocabulary agree on the winners, in words; empty for a whole vocabulary.
    """

    sink: str
    location: str
    op: str
    epilogue: str
    bytes_saved: int | sympy.Expr
    exchange: str = ""

    def __str__(self) -> str:
        saved = self.bytes_saved
        amount = _bytes(saved) if isinstance(saved, int) else f"{saved} bytes"
        lines = [
            f"fused   {self.sink} -> {self.op}  saves {amount} a call",
            f"at {self.location}",
            f"epilogue: {self.epilogue or '(none)'}",
        ]
        if self.exchange:
            lines.append(f"exchange: {self.exchange}")
        return "\n        ".join(lines)


@dataclass(frozen=True)
class Missed:
    """One sink left alone: ``code`` is stable, ``reason`` says why, ``hint`` what to change (README, "Miss codes")."""

    sink: str
    location: str
    code: str
    reason: str
    hint: str

    def __str__(self) -> str:
        return (
            f"missed  {self.sink} [{self.code}]\n        at {self.location}\n"
            f"        why: {self.reason}\n        what to do: {self.hint}"
        )


@dataclass
class Report:
    """All sinks of one compilation, in graph order, and the graph breaks met on the way.

    fused, missed: one record per sink. graph_breaks: a sentence each; code after a break is compiled separately, and
    code at a break is not compiled at all. graphs: how many graphs were compiled.
    """

    fused: list[Fused] = field(default_factory=list)
    missed: list[Missed] = field(default_factory=list)
    graph_breaks: list[str] = field(default_factory=list)
    graphs: int = 0

    def __str__(self) -> str:
        head = f"flashsampling: {len(self.fused)} fused, {len(self.missed)} missed"
        lines = [head, *map(str, self.fused), *map(str, self.missed)]
        lines += [f"break   {text}" for text in self.graph_breaks]
        if self.graph_breaks:
            lines.append(
                "        what stands before and after a graph break is compiled apart: an LM head and its sampling "
                "on different sides are not fused"
            )
        if not self.fused and not self.missed:
            lines.append(self._nothing_found())
        return "\n".join(lines)

    __repr__ = __str__

    def _nothing_found(self) -> str:
        if self.graph_breaks:
            return (
                "no multinomial, argmax, max(dim).indices or topk(1).indices reached the compiler: "
                "see the graph breaks above, and compile with fullgraph=True to have them raised as errors"
            )
        if self.graphs == 0:
            return "nothing was compiled: pass the uncompiled function that runs the LM head and the sampling"
        return (
            "no multinomial, argmax, max(dim).indices or topk(1).indices is in the compiled code: "
            "compile a function that includes the LM head and the sampling, not the model's forward alone"
        )


class NotFusedError(ShortenTraceback):
    """A sink was not fused, under ``flashsampling.strict``. Raised at compile time; ``report`` says which and why."""

    def __init__(self, report: Report):
        # A ShortenTraceback passes through Dynamo and Inductor as it is, where others arrive wrapped.
        super().__init__(f"{report}\n(fs_inductor.explain shows graph breaks too)", first_useful_frame=None)
        self.report = report


def location_of(node: Node) -> str:
    """``file:line (function) code`` of the user's line that made ``node``, from its stack trace.

    The innermost frame outside torch, which has Python layers of its own (``Categorical.sample``, say).
    """
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.strip().splitlines()]
    frames = [i for i, line in enumerate(lines) if line.startswith("File ")]
    users = [i for i in frames if not lines[i].startswith(f'File "{_TORCH}')]
    for i in (users or frames)[-1:]:
        file, _, rest = lines[i][5:].partition(", line ")
        number, _, function = rest.partition(", in ")
        code = lines[i + 1] if i + 1 < len(lines) else ""
        # After a graph break Dynamo runs the rest of `step` as `torch_dynamo_resume_in_step_at_12`.
        function = re.sub(r"^torch_dynamo_resume_in_(.*)_at_\d+$", r"\1", function)
        name = file.strip('"')
        return f"{name}:{number} ({function}) {code}".strip()
    return "(no source location)"


_TORCH = os.path.join(os.path.dirname(torch.__file__), "")


def _bytes(n: int) -> str:
    for unit in ("bytes", "KB", "MB"):
        if n < 10_000:
            return f"{n:,.0f} {unit}"
        n /= 1000
    return f"{n:,.1f} GB"
