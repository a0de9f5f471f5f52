"""What was fused and what was not: the records, their printed form, and the error that `strict` raises."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

import sympy
import torch
from torch._dynamo.exc import ShortenTraceback
from torch.fx import Node

from .traffic import BATCH, MEANING


@dataclass(frozen=True)
class Fused:
    """One rewritten sink.

    sink: the op that sampled, such as ``aten.multinomial``; location: ``file:line (function) code`` of the user's call.
    op: the op that took its place; epilogue: its program (see README, "What fuses").
    bytes_saved: memory traffic avoided per call, in bytes: an int, or where sizes are dynamic a sympy expression of
        the sizes in ``fs_inductor.traffic.MEANING``. bytes_unfused: all traffic of the unfused head and sampling.
    exchange: how the ranks of a sharded vocabulary agree on the winners, in words; empty for a whole vocabulary.
    heads: how many stacked heads the sink samples, with a call of the op for each.
    """

    sink: str
    location: str
    op: str
    epilogue: str
    bytes_saved: int | sympy.Expr
    bytes_unfused: int | sympy.Expr
    exchange: str = ""
    heads: int = 1

    def __str__(self) -> str:
        times = f" for each of {self.heads} heads" if self.heads > 1 else ""
        lines = [
            f"fused   {self.sink} -> {self.op}{times}  saves {_amount(self.bytes_saved, self.bytes_unfused)}",
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


@dataclass(frozen=True)
class Called:
    """A call of one of our ops that the code makes by hand, with `linear_sample` say: nothing is left to fuse there."""

    op: str
    location: str

    def __str__(self) -> str:
        return f"called  {self.op}\n        at {self.location}"


NO_PASSES = (
    "nothing can be fused: Inductor's option use_joint_graph_passes is False, as mode='lite' makes it. "
    "Set options={'use_joint_graph_passes': True}, or choose another mode"
)


@dataclass
class Report:
    """All sinks of one compilation, in graph order, and the graph breaks met on the way.

    fused, missed: one record per sink. called: our ops, where the code calls them by hand. graph_breaks: a sentence
    each; code after a break is compiled separately, and code at a break is not compiled at all. graphs: how many graphs
    the pass saw. no_passes: some were compiled without it, since Inductor was told to run no passes.
    """

    fused: list[Fused] = field(default_factory=list)
    missed: list[Missed] = field(default_factory=list)
    called: list[Called] = field(default_factory=list)
    graph_breaks: list[str] = field(default_factory=list)
    graphs: int = 0
    no_passes: bool = False

    def __str__(self) -> str:
        head = f"flashsampling: {len(self.fused)} fused, {len(self.missed)} missed"
        if self.called:
            head += f", {len(self.called)} called by hand"
        lines = [head, *map(str, self.fused), *map(str, self.missed), *map(str, self.called)]
        lines += [f"break   {text}" for text in self.graph_breaks]
        if self.graph_breaks:
            lines.append(
                "        what stands before and after a graph break is compiled apart: an LM head and its sampling "
                "on different sides are not fused"
            )
        if self.no_passes:
            lines.append(NO_PASSES)
        elif not self.fused and not self.missed and not self.called:
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
            "compile a function that includes the LM head and the sampling, not the model's forward alone, "
            "and write the draw as one of these"
        )


class NotFusedError(ShortenTraceback):
    """A sink was not fused, under ``flashsampling.strict``. Raised at compile time; ``report`` says which and why."""

    def __init__(self, report: Report):
        # A ShortenTraceback passes through Dynamo and Inductor as it is, where others arrive wrapped.
        super().__init__(f"{report}\n(fs_inductor.explain shows graph breaks too)", first_useful_frame=None)
        self.report = report


def location_of(node: Node) -> str:
    """``file:line (function) code`` of the user's line that made ``node``, from its stack trace.

    The innermost frame outside torch, which has Python layers of its own (``Categorical.sample``, say), and outside of
    this package (`linear_sample`).
    """
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.strip().splitlines()]
    frames = [i for i, line in enumerate(lines) if line.startswith("File ")]
    users = [i for i in frames if not lines[i].startswith(_LIBRARIES)]
    for i in (users or frames)[-1:]:
        file, _, rest = lines[i][5:].partition(", line ")
        number, _, function = rest.partition(", in ")
        code = lines[i + 1] if i + 1 < len(lines) else ""
        # After a graph break Dynamo runs the rest of `step` as `torch_dynamo_resume_in_step_at_12`.
        function = re.sub(r"^torch_dynamo_resume_in_(.*)_at_\d+$", r"\1", function)
        name = file.strip('"')
        return f"{name}:{number} ({function}) {code}".strip()
    return "(no source location)"


_LIBRARIES = tuple(f'File "{os.path.join(os.path.dirname(file), "")}' for file in (torch.__file__, __file__))


def _amount(saved: int | sympy.Expr, unfused: int | sympy.Expr) -> str:
    """Bytes saved in words: of how many where both are numbers, by the row where every row saves the same."""
    if isinstance(saved, int):
        return f"{_bytes(saved)} of {_bytes(unfused)} a call" if isinstance(unfused, int) else f"{_bytes(saved)} a call"
    per = "row"
    each = sympy.expand(saved / BATCH)
    if BATCH in each.free_symbols:
        per, each = "call", saved
    names = ", ".join(f"{symbol}: {MEANING[symbol]}" for symbol in sorted(each.free_symbols, key=str))
    terms = [(int(number), str(sizes)) for sizes, number in each.as_coefficients_dict().items()]
    text = ""
    for number, sizes in sorted(terms, key=lambda term: term[1]):
        text += (" - " if number < 0 else " + ") if text else ""
        text += _bytes(abs(number)) + ("" if sizes == "1" else f" x {sizes.replace('*', ' x ')}")
    return f"{text} a {per}" + (f" ({names})" if names else "")


def _bytes(n: int) -> str:
    for unit in ("bytes", "KB", "MB"):
        if n < 10_000:
            return f"{n:,.0f} {unit}"
        n /= 1000
    return f"{n:,.1f} GB"
