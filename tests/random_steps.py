"""A grammar of step functions: Hypothesis composes the pieces of `random_pieces` and `random_tails` into a step.

A `Step` prints as a script that runs by itself. Beside the step it writes down what must come out of it: the same lines
up to the final logits, run by eager torch in the step's own dtypes, then float64. Nothing here knows the pass.

Hidden states and weights are multiples of 1/8, so products are exact in any order of summation. Rows are repeated
``copies`` times along the batch, which makes many draws of each of a few distributions in one call.
"""

from __future__ import annotations

import itertools
import linecache
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from random_pieces import EPILOGUE, HEADS, LAYOUTS, MASKS, ROWS, SELECTIONS, SLICES, Piece, Selection
from random_tails import PROBS, REFUSALS, SINKS, Refusal, Sink
from random_words import FIRST, KINDS, TAIL, Data

VOCABS = (160, 130, 97, 300)
DTYPES = ("float32", "float32", "bfloat16", "bfloat16", "float16")


@dataclass(frozen=True)
class Output:
    """One tensor of token ids, ``draws`` a row (0 for greedy), before ``offset`` is added and ``table`` is indexed.

    rows: how many different rows it has; tiled: whether they are repeated along the batch.
    """

    draws: int
    rows: int
    tiled: bool
    offset: int = 0
    table: str | None = None


@dataclass(frozen=True)
class Step:
    """A step: its lines, its arguments' expressions, and the lines that give the targets of its outputs.

    fuses: what the grammar expects of the pass, None where either is right; there are no outputs where it is False.
    sinks: how many lines the report must have. numbers: the names of the Python floats among the parameters.
    """

    lines: tuple[str, ...]
    oracle: tuple[str, ...]
    parameters: dict[str, str]
    outputs: tuple[Output, ...]
    dynamic: bool
    seed: int
    sinks: int
    fuses: bool | None
    idioms: frozenset[int]
    pieces: tuple[str, ...]
    numbers: tuple[str, ...]
    dtype: str

    @property
    def source(self) -> str:
        return "\n    ".join([f"def step({', '.join(self.parameters)}):", *self.lines]) + "\n"

    def arguments(self, copies: int, numbers: Sequence[float] | None = None) -> list[Any]:
        """The arguments for ``copies`` copies of the rows; ``numbers`` replaces the Python numbers among them."""
        data = Data(self.seed, copies)
        values = {name: data.of(name, text) for name, text in self.parameters.items()}
        if numbers is not None:
            values |= dict(zip(self.numbers, numbers, strict=False))
        return list(values.values())

    def function(self) -> Callable:
        return _compile(self.source, "step")

    def targets(self, arguments: Sequence[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each output, the float64 scores [rows, V] whose softmax it draws from, and which rows are greedy."""
        source = "\n    ".join([f"def oracle({', '.join(self.parameters)}):", "targets = []", *self.oracle])
        with torch.no_grad():
            found = _compile(source + "\n    return targets\n", "oracle")(*arguments)
        targets = []
        for score, greedy in found:
            score = score.double().reshape(-1, score.shape[-1])
            targets.append((score, torch.as_tensor(greedy).expand(score.shape[0])))
        return targets

    def __repr__(self) -> str:
        batch = "dynamic batch" if self.dynamic else "static batch"
        head = f"# {', '.join(self.pieces)}; {batch}; fuses: {self.fuses}\n"
        made = "\n".join(
            f"{name} = data.of({name!r}, {text!r})" if "(" in text else f"{name} = {text}"
            for name, text in self.parameters.items()
        )
        return (
            f"\n{head}import torch\nfrom random_words import Data\nfrom support import run_pass\n"
            f"from torch.nn import functional as F\n\n\n{self.source}\n\n"
            f"data = Data(seed={self.seed}, copies=400)\n{made}\n"
            f"print(run_pass(step, [{', '.join(self.parameters)}]).report)\n"
        )


_count = itertools.count()


def _compile(source: str, name: str) -> Callable:
    """The function, with its source where tracebacks and Dynamo look for it."""
    file = f"<random {name} {next(_count)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope = {"torch": torch, "F": torch.nn.functional}
    exec(compile(source, file, "exec"), scope)
    return scope[name]


# -- writing a step ---------------------------------------------------------------------------------------------------


class Writer:
    """Writes one step. ``choose(options)`` picks one; the first is the plainest, which shrinking prefers."""

    def __init__(self, choose: Callable[[Sequence[Any]], Any]):
        self.choose = choose
        self.lines: list[str] = []
        self.oracle: list[str] = []
        self.parameters: dict[str, str] = {}
        self.numbers: list[str] = []
        self.pieces: list[Piece] = []
        self.outputs: list[Output] = []
        self.dtype = choose(DTYPES)
        self.one_batch_size = True

    def chance(self, percent: int) -> bool:
        return self.choose(range(100)) >= 100 - percent

    def write(self, piece: Piece, oracle: bool = True, **more: str) -> list[str]:
        """Adds the piece's lines to the step and the oracle's; returns ``more`` with the same words spelled alike."""
        self.pieces.append(piece)
        words: dict[str, str] = {}

        def spell(match: re.Match) -> str:
            word = match[1]
            if word not in words:
                words[word] = KINDS[word.rstrip("0123456789")](self)
            return words[word]

        texts = [re.sub(r"\{(\w+)\}", spell, text) for text in (piece.text, *more.values())]
        lines = [line for line in texts[0].split("\n") if line]
        self.lines += lines
        if oracle:
            self.oracle += lines
        self.finite = self.finite and not piece.masks
        return texts[1:]

    def parameter(self, name: str, text: str) -> str:
        """A new argument called ``name``, or ``name`` with a number."""
        name = next(n for n in (name, *(f"{name}{i}" for i in range(2, 99))) if n not in self.parameters)
        self.parameters[name] = text
        return name

    def shared(self, name: str, text: str) -> str:
        """An argument like `parameter`'s, which may be one that there is already."""
        same = [n for n, known in self.parameters.items() if known == text]
        return same[0] if same and self.chance(50) else self.parameter(name, text)

    def number(self, name: str, text: str) -> str:
        self.numbers.append(self.parameter(name, text))
        return self.numbers[-1]

    def tensor(self, name: str, maker: str, sizes: Sequence[int], suffix: str = "") -> str:
        """A tensor argument, repeated along the batch if it has a value for each row."""
        text = maker.format(", ".join(map(str, sizes))) + suffix
        repeats = self.tiled and len(sizes) > len(self.rows) and sizes[0] == self.rows[0]
        self.one_batch_size = self.one_batch_size and (not repeats or sizes[0] == ROWS)
        return self.parameter(name, f"tile({text})" if repeats else text)

    def leading_mask(self) -> str:
        """A bool for each of the first dimension's entries."""
        count = self.rows[0]
        self.one_batch_size = self.one_batch_size and (not self.tiled or count == ROWS)
        return self.parameter("rows", f"tile(mask({count}))" if self.tiled else f"mask({count})")

    def segment(self, refusal: Refusal | None) -> None:
        """An LM head, what is done to its logits, and the sinks."""
        self.finite, self.offset = True, 0
        self.width = self.vocab = self.choose(VOCABS)
        whole = refusal is not None and refusal.stage == "tail"
        head = self.choose([head for head in HEADS if head.layout == "2d" or not whole])
        self.rows, self.tiled = list(LAYOUTS[head.layout]), head.layout not in ("flat", "one")
        self.write(head)
        if head.layout == "stack":
            self.rows = [ROWS, 2]
        selections = [selection for selection in SELECTIONS if head.layout in selection.layouts]
        length = self.choose((0, 1, 1, 2, 2, 3, 4, 6))
        place = self.choose(range(length + 1))
        for i in range(length + 1):
            if i == place:
                self.select(self.choose(selections))
            if i < length:
                self.process(keep_finite=refusal is not None and refusal.finite)
        if refusal is not None and refusal.stage == "logits":
            self.write(refusal)
        if whole:
            self.write(refusal)
        else:
            self.sample()

    def select(self, selection: Selection) -> None:
        self.write(selection)
        self.rows = eval(selection.left, {"rows": self.rows, "math": math})

    def process(self, keep_finite: bool) -> None:
        """One more step of logit processing."""
        table = self.choose((EPILOGUE,) * 7 + (MASKS,) * 2 + (SLICES,))
        if table is SLICES and self.width == self.vocab:
            piece = self.choose(SLICES)
            self.write(piece)
            self.offset = FIRST if "{first}" in piece.text else 0
            self.width -= TAIL + self.offset
            return
        table = EPILOGUE if table is SLICES or (table is MASKS and keep_finite) else table
        usable = [piece for piece in table if (self.finite or not piece.finite) and (self.rows or not piece.rows)]
        self.write(self.choose(usable))

    def sample(self) -> None:
        """One sink, or two of the same logits."""
        if len(self.rows) > 1 and self.chance(50):
            self.select(FLATTENED)
        rank = len(self.rows) + 1
        usable = [s for s in SINKS if rank <= s.max_rank and s.rank in (None, rank)]
        usable = [s for s in usable if not s.greedy or (self.tiled and self.rows == [ROWS])]
        self.sink(self.choose(usable))
        if not self.outputs[1:] and self.chance(12):
            self.pieces.append(SAME_LOGITS)
            self.keep_token()
            self.sink(self.choose(usable))

    def sink(self, sink: Sink) -> None:
        score = sink.score
        if sink.needs == "p":
            probs = self.choose(PROBS)
            (score,) = self.write(probs, oracle=False, score=probs.score)
        score, greedy = self.write(sink, oracle=False, score=score, greedy=sink.greedy or str(sink.draws == 0))
        self.oracle += ["x = x.double()", f"targets.append(({score}, {greedy}))"]
        table = None
        if self.offset:
            self.lines.append(f"token = token + {self.offset}")
        elif self.rows and self.chance(8):
            table = self.parameter("table", f"distinct({self.width}, {self.width})")
            self.lines.append(f"token = {table}[token]")
        if sink.keeps and sink.draws < 2:
            self.lines += self.choose(([], [], ["token = token.squeeze(-1)"], ["token = token[..., 0]"]))
        self.lines += self.choose(([], [], ["token = token.to(torch.int32)"], ["token = token.contiguous()"]))
        self.outputs.append(Output(sink.draws, math.prod(self.rows), self.tiled, self.offset, table))

    def keep_token(self) -> None:
        self.lines.append("first = token")


def write_step(choose: Callable[[Sequence[Any]], Any]) -> Step:
    """A step of the grammar; ``choose(options)`` makes every decision in it."""
    w = Writer(choose)
    refusal = choose(REFUSALS) if w.chance(22) else None
    autocast = choose(("bfloat16", "float16")) if w.dtype == "float32" and w.chance(20) else None
    w.segment(refusal)
    if refusal is None and len(w.outputs) == 1 and w.chance(10):
        w.pieces.append(TWO_HEADS)
        w.keep_token()
        w.segment(None)
    names = ["first"] * (len(w.outputs) > 1) + ["token"] + ["beside"] * ("beside" in " ".join(w.lines))
    lines, oracle = w.lines, w.oracle
    if autocast:
        w.pieces.append(AUTOCAST)
        head = f"with torch.autocast('cpu', dtype=torch.{autocast}):"
        lines, oracle = ([head, *("    " + line for line in part)] for part in (lines, oracle))
    expectations = {piece.fuses for piece in w.pieces}
    return Step(
        lines=(*lines, f"return {', '.join(names)}"),
        oracle=tuple(oracle),
        parameters=w.parameters,
        outputs=() if refusal else tuple(w.outputs),
        dynamic=all(output.tiled for output in w.outputs) and w.tiled and w.one_batch_size and w.chance(35),
        seed=choose(range(1000)),
        sinks=sum(getattr(piece, "sinks", 0) for piece in w.pieces),
        fuses=False if False in expectations else None if None in expectations else True,
        idioms=frozenset(i for piece in w.pieces for i in piece.idioms),
        pieces=tuple(f"{type(piece).__name__.lower()} {piece.name}" for piece in w.pieces),
        numbers=tuple(w.numbers),
        dtype=autocast or w.dtype,
    )


@st.composite
def steps(draw: Callable) -> Step:
    """Steps, drawn by Hypothesis."""
    return write_step(lambda options: draw(st.sampled_from(options)))


def seeded_steps() -> st.SearchStrategy[Step]:
    """Steps by a number each: they do not shrink, but vary more than Hypothesis' own, which resemble each other."""
    return st.integers(0, 2**64 - 1).map(lambda seed: write_step(random.Random(seed).choice))


FLATTENED = Selection("flattened", "x = x.flatten(0, -2)", (9,), left="[math.prod(rows)]")
SAME_LOGITS = Piece("two sinks of the same logits", "", fuses=None)
TWO_HEADS = Piece("two heads", "", fuses=None)
AUTOCAST = Piece("autocast", "", (10,))
