"""Softcaps in an epilogue program: a tanh with the numbers that its input and its result are multiplied by.

They become part of the tanh's constants, so that a softcap costs what its tanh alone costs. In most draws it costs a
third of that, since there its error may be in proportion to the cap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .epilogue import Arg, Instruction, Kind, Program, Ref
from .epilogue_ops import Term


class Softcap(NamedTuple):
    """outside * tanh(inside * x)."""

    x: Arg
    inside: float
    outside: float
    function: str
    """Of `math_triton`: `softcap`, whose error is in proportion to the cap, or `tanh`, in proportion to the result, or
    `bounded_tanh`, for readers that may have no value beyond the cap."""

    def spell(self, x: Term) -> str:
        return f"{self.function}({x.text}, {self.inside!r}, {self.outside!r})"

    def torch(self, x: Tensor) -> Tensor:
        return self.outside * torch.tanh(self.inside * x)


def find_softcaps(program: Program, kinds: Sequence[Kind], greedy: bool) -> dict[int, Softcap | None]:
    """The softcaps, by the number of their last instruction; None at the others, which nothing else reads.

    greedy: whether the largest logit is wanted, which hangs on last bits where all are small.
    """
    readers: dict[str, list[int]] = {}
    for n, one in enumerate(program.instructions):
        for arg in one.args:
            readers.setdefault(str(arg), []).append(n)
    coarse = _read_coarsely(program, kinds)
    found: dict[int, Softcap | None] = {}
    for n, one in enumerate(program.instructions):
        x = one.args[0]
        if one.op != "tanh" or not isinstance(x, Ref):
            continue
        last, inside, outside = n, 1.0, 1.0
        # A factor in `found` belongs to the tanh before it.
        before = x.n if x.kind == "x" and len(readers[str(x)]) == 1 and x.n not in found else None
        if before is not None and (factor := _factor(program.instructions[before])):
            x, inside, found[before] = program.instructions[before].args[0], factor, None
        after = readers.get(f"x{n}", [])
        if len(after) == 1 and (factor := _factor(program.instructions[after[0]])):
            last, outside, found[n] = after[0], factor, None
        function = "tanh" if coarse[last] else "bounded_tanh"
        if coarse[last] and not greedy and last > n and outside <= _LARGEST_CAP:
            function = "softcap"
        found[last] = Softcap(x, inside, outside, function)
    return found


# A cap and one factor of these sizes put a logit off by 5e-4 at most; the usual cap, 30, by 1.4e-5.
_LARGEST_CAP = 64
_LARGEST_FACTOR = 16


def _read_coarsely(program: Program, kinds: Sequence[Kind]) -> list[bool]:
    """Of each instruction, whether its errors come to the logits as they are, or as a temperature scales them.

    A bias and a mask leave them alone. `log`, say, or a difference of two results would not.
    """
    coarse = [True] * len(program.instructions)
    for n, one in reversed(list(enumerate(program.instructions))):
        for place, arg in enumerate(one.args):
            if isinstance(arg, Ref) and arg.kind == "x":
                others = one.args[:place] + one.args[place + 1 :]
                coarse[arg.n] &= coarse[n] and _passes_on(one.op, place, others, kinds)
    return coarse


def _passes_on(op: str, place: int, others: Sequence[Arg], kinds: Sequence[Kind]) -> bool:
    """Whether `op` makes of an error in its argument at `place` one of the same size, but for a temperature."""
    if any(isinstance(other, Ref) and other.kind != "a" for other in others):
        return False
    if op in ("mul", "div") and (op, place) != ("div", 1):
        (other,) = others
        if isinstance(other, Ref):
            return kinds[other.n].shape in ("scalar", "row")
        return abs(other) <= _LARGEST_FACTOR if op == "mul" else abs(other) >= 1 / _LARGEST_FACTOR
    return op in ("add", "sub", "neg", "abs", "relu", "maximum", "minimum", "round") or (op == "where" and place > 0)


def _factor(one: Instruction) -> float | None:
    """The positive number that a value is multiplied by, of a size that `tanh` can take into its fit."""
    if one.op not in ("mul", "div") or not isinstance(one.args[0], Ref) or isinstance(one.args[1], Ref):
        return None
    number = float(one.args[1])
    factor = number if one.op == "mul" or number == 0 else 1 / number
    return factor if 2.0**-10 <= factor <= 2.0**10 else None
