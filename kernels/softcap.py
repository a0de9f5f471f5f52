"""Softcaps in an epilogue program: a tanh with the numbers that its input and its result are multiplied by.

They become part of the tanh's fit, so that a softcap costs what its tanh alone costs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .epilogue import Arg, Instruction, Program, Ref
from .epilogue_ops import Term


class Softcap(NamedTuple):
    """outside * tanh(inside * x)."""

    x: Arg
    inside: float
    outside: float
    function: str
    """Of `math_triton`: `softcap`, or `tanh` where something may depend on the last bits of small values."""

    def spell(self, x: Term) -> str:
        return f"{self.function}({x.text}, {self.inside!r}, {self.outside!r})"

    def torch(self, x: Tensor) -> Tensor:
        return self.outside * torch.tanh(self.inside * x)


def find_softcaps(program: Program) -> dict[int, Softcap | None]:
    """The softcaps, by the number of their last instruction; None at the others, which nothing else reads."""
    readers: dict[str, list[int]] = {}
    for n, one in enumerate(program.instructions):
        for arg in one.args:
            readers.setdefault(str(arg), []).append(n)
    coarse = _read_coarsely(program)
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
        found[last] = Softcap(x, inside, outside, "softcap" if last > n and coarse[last] else "tanh")
    return found


_PROPORTIONAL = {"add", "sub", "mul", "div", "neg", "abs", "relu", "maximum", "minimum", "where", "round"}


def _read_coarsely(program: Program) -> list[bool]:
    """Of each instruction, whether errors in proportion to its largest results make only such errors in the logits.

    What `log`, say, makes of a small result depends on its last bits.
    """
    coarse = [True] * len(program.instructions)
    for n, one in reversed(list(enumerate(program.instructions))):
        computed = [isinstance(arg, Ref) and arg.kind != "a" for arg in one.args]
        fits = one.op in _PROPORTIONAL and not (one.op == "div" and computed[1])
        fits &= not (one.op == "mul" and all(computed))
        for arg in one.args:
            if isinstance(arg, Ref) and arg.kind == "x":
                coarse[arg.n] &= coarse[n] and fits
    return coarse


def _factor(one: Instruction) -> float | None:
    """The positive number that a value is multiplied by, of a size that `tanh` can take into its fit."""
    if one.op not in ("mul", "div") or not isinstance(one.args[0], Ref) or isinstance(one.args[1], Ref):
        return None
    number = float(one.args[1])
    factor = number if one.op == "mul" or number == 0 else 1 / number
    return factor if 2.0**-10 <= factor <= 2.0**10 else None
