"""The epilogue program: what turns a raw accumulator of the LM head into a final logit.

A straight-line program carried as text, so that it can be read in a golden test, hashed, cached and
exported:

    x0 = round(acc, bf16); x1 = div(x0, a1); x2 = where(a0, -inf, x1)

`acc` is the f32 accumulator, `xN` the N-th result, `aN` the N-th operand: a tensor that broadcasts
to the logits, bool or (converted to) f32. The last statement is the final logit; the empty program
is `acc` itself. `OPS`, in `epilogue_ops.py`, gives each op its type, its torch and its Triton
spelling in one row. `Program.run` is the torch interpreter; `emit` writes the same program as a
Triton function, and only that needs Triton.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from .epilogue_ops import DTYPES, OPS, TYPE_NAMES, constant

if TYPE_CHECKING:
    import triton


# Far beyond what a program reads. Without a bound, a program that names a999999999 would make a list of that length.
MAX_OPERANDS = 1024


class ProgramError(ValueError):
    """An epilogue program that does not parse, type-check, or fit its operands."""


# --- The program ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ref:
    """A value by name: `acc`, the n-th result (`x`) or the n-th operand (`a`)."""

    kind: Literal["acc", "x", "a"]
    n: int = 0

    def __str__(self) -> str:
        return "acc" if self.kind == "acc" else f"{self.kind}{self.n}"


Arg = Ref | float | bool | str


@dataclass(frozen=True)
class Instruction:
    op: str
    args: tuple[Arg, ...]

    def __str__(self) -> str:
        return f"{self.op}({', '.join(_print(arg) for arg in self.args)})"


def _print(arg: Arg) -> str:
    if isinstance(arg, bool):
        return "true" if arg else "false"
    return str(arg) if isinstance(arg, (Ref, str)) else repr(arg)


@dataclass(frozen=True, eq=False, repr=False)
class Program:
    """A type-checked epilogue program. Immutable; equal, and hashed, by its text.

    Program(instructions) raises ProgramError where an instruction names an unknown op, takes the
    wrong number or type of arguments, or refers to a result that does not exist yet.
    `Program.parse(text)` is cached.
    """

    instructions: tuple[Instruction, ...] = ()

    def __post_init__(self) -> None:
        self._check()

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"Program.parse({self._text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    @cached_property
    def _text(self) -> str:
        return "; ".join(f"x{n} = {one}" for n, one in enumerate(self.instructions))

    @cached_property
    def operand_types(self) -> tuple[str | None, ...]:
        """'f' or 'b' for each operand, None for one that no instruction uses."""
        uses: dict[int, str] = {}
        for n, one in enumerate(self.instructions):
            for arg, kind in zip(one.args, OPS[one.op].arguments, strict=True):
                if not isinstance(arg, Ref) or arg.kind != "a":
                    continue
                if uses.setdefault(arg.n, kind) != kind:
                    raise ProgramError(
                        f"{self._where(n)}: here {arg} is {TYPE_NAMES[kind]}, "
                        f"but an earlier use made it {TYPE_NAMES[uses[arg.n]]}"
                    )
        return tuple(uses.get(n) for n in range(max(uses, default=-1) + 1))

    def uses(self, n: int) -> bool:
        """Whether some instruction reads operand `n`."""
        return n < self.num_operands and self.operand_types[n] is not None

    @property
    def num_operands(self) -> int:
        """One more than the highest operand number used."""
        return len(self.operand_types)

    @staticmethod
    @lru_cache(maxsize=1024)
    def parse(text: str) -> Program:
        """The program written in `text`; raises ProgramError, quoting the faulty statement."""
        statements = [one.strip() for one in text.split(";")] if text.strip() else []
        instructions = []
        for n, statement in enumerate(statements):
            match = _STATEMENT.fullmatch(statement)
            if not match:
                raise ProgramError(f"statement {n}, {statement!r}: expected `x{n} = op(argument, ...)`")
            name, op, arguments = match.groups()
            if name != f"x{n}":
                raise ProgramError(f"statement {n}, {statement!r}: must define x{n}, not {name}")
            words = [word.strip() for word in arguments.split(",")] if arguments.strip() else []
            instructions.append(Instruction(op, tuple(_parse(word, n, statement) for word in words)))
        return Program(tuple(instructions))

    def after_rounding(self) -> tuple[str | None, Program]:
        """The dtype to which the program rounds `acc` before anything else, and what it does then; else None and all.

        With an `acc` that is rounded already, the rest computes the same.
        """
        first, *others = self.instructions or (None,)
        acc = Ref("acc")
        if first is None or first.op != "round" or first.args[0] != acc or any(acc in one.args for one in others):
            return None, self
        renamed = {Ref("x", n): Ref("x", n - 1) if n else acc for n in range(len(self.instructions))}
        rest = (Instruction(one.op, tuple(renamed.get(arg, arg) for arg in one.args)) for one in others)
        return first.args[1], Program(tuple(rest))

    def _where(self, n: int) -> str:
        return f"statement {n}, 'x{n} = {self.instructions[n]}'"

    def _check(self) -> None:
        types: list[str] = []
        for n, one in enumerate(self.instructions):
            if one.op not in OPS:
                raise ProgramError(f"{self._where(n)}: no op named {one.op!r}; there are {', '.join(OPS)}")
            wanted = OPS[one.op].arguments
            if len(one.args) != len(wanted):
                raise ProgramError(f"{self._where(n)}: {one.op} takes {len(wanted)} arguments, not {len(one.args)}")
            for position, (arg, want) in enumerate(zip(one.args, wanted, strict=True)):
                if not isinstance(arg, Ref | float | int) and arg not in DTYPES:
                    raise ProgramError(f"{self._where(n)}: {arg!r} is not an argument")
                if isinstance(arg, Ref) and arg.kind == "x" and not 0 <= arg.n < n:
                    raise ProgramError(f"{self._where(n)}: {arg} is not defined before x{n}")
                if isinstance(arg, Ref) and arg.kind == "a" and not 0 <= arg.n < MAX_OPERANDS:
                    raise ProgramError(f"{self._where(n)}: {arg} is too high: operands end at a{MAX_OPERANDS - 1}")
                have = _type_of(arg, types, want)
                if have != want:
                    raise ProgramError(
                        f"{self._where(n)}: argument {position + 1} is {TYPE_NAMES[have]}, "
                        f"but {one.op} wants {TYPE_NAMES[want]}"
                    )
            types.append(OPS[one.op].result)
        if types and types[-1] != "f":
            raise ProgramError(f"{self._where(len(types) - 1)}: the last value, the logit, must be a float")
        _ = self.operand_types  # raises where two uses of an operand disagree

    def run(self, acc: Tensor, operands: Sequence[Tensor], known: Sequence[Tensor | None] = ()) -> Tensor:
        """The final logits, f32 with the shape of `acc`, computed with torch.

        acc: f32 [B, C]. operands: tensors that broadcast to [B, C], one for each operand number.
        known: values for the first results, where the caller has them already (None: never used).
        Raises ProgramError where an operand is missing, or bool where a float is meant, or reverse.
        """
        self.check_operands(operands)
        values = {f"a{n}": tensor for n, tensor in enumerate(operands)}
        values = {k: v if v.dtype == torch.bool else v.to(torch.float32) for k, v in values.items()}
        values |= {f"x{n}": value for n, value in enumerate(known)}
        values["acc"] = acc
        last_use = {str(arg): n for n, one in enumerate(self.instructions) for arg in one.args}
        result = values.get(f"x{len(known) - 1}", acc)
        for n, one in enumerate(self.instructions[len(known) :], len(known)):
            inputs = (values[str(a)] if isinstance(a, Ref) else constant(a) for a in one.args)
            result = OPS[one.op].torch(*inputs)
            values[f"x{n}"] = result
            for arg in one.args:  # a chunk of logits is large: let go of it after its last use
                if last_use[str(arg)] == n:
                    values.pop(str(arg), None)
        return result if result.shape == acc.shape else result.to(acc.device).expand(acc.shape)

    def check_operands(self, operands: Sequence[Tensor | torch.dtype]) -> None:
        """Raises ProgramError unless the operands, tensors or their dtypes, fit the program."""
        if len(operands) < self.num_operands:
            raise ProgramError(f"the program uses {self.num_operands} operands, but got {len(operands)}: {self}")
        for n, (want, operand) in enumerate(zip(self.operand_types, operands, strict=False)):
            dtype = operand if isinstance(operand, torch.dtype) else operand.dtype
            have = "b" if dtype == torch.bool else "f"
            if dtype.is_complex or want not in (None, have):
                raise ProgramError(
                    f"operand a{n} is {dtype}, but the program uses it as {TYPE_NAMES[want or 'f']}: {self}"
                )


_STATEMENT = re.compile(r"(\w+)\s*=\s*(\w+)\s*\(([^()]*)\)")
_REF = re.compile(r"([xa])(0|[1-9][0-9]{0,8})")  # longer numbers than any program has are no names
_NUMBER = re.compile(r"-?(?:inf|nan|[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)")


def _parse(word: str, n: int, statement: str) -> Arg:
    if word == "acc":
        return Ref("acc")
    if match := _REF.fullmatch(word):
        return Ref(match[1], int(match[2]))
    if word in ("true", "false"):
        return word == "true"
    if word in DTYPES:
        return word
    if _NUMBER.fullmatch(word) and len(word) < 300:  # with more digits an integer may be too large for a float
        return int(word) if re.fullmatch("-?[0-9]+", word) else float(word)
    raise ProgramError(
        f"statement {n}, {statement!r}: {word!r} is not an argument; "
        f"write acc, xN, aN, a number, inf, nan, true, false or {', '.join(DTYPES)}"
    )


def _type_of(arg: Arg, types: Sequence[str], want: str) -> str:
    if isinstance(arg, Ref):
        # An operand takes the type of its use; operand_types sees to it that all uses agree.
        return {"acc": "f", "a": "f" if want == "d" else want}.get(arg.kind) or types[arg.n]
    if isinstance(arg, str):
        return "d"
    return "b" if isinstance(arg, bool) else "f"


# --- Operands and the device ------------------------------------------------------------

Shape = Literal["scalar", "row", "token", "full"]


class Kind(NamedTuple):
    """What the emitted code must know of an operand: the axes it varies on, its dtype, and whether it is a full one of
    booleans whose rows can be read four at a time."""

    shape: Shape
    dtype: torch.dtype
    by_four: bool = False


def operand_kinds(
    operands: Sequence[Tensor], batch: int, vocab: int, shift: int = 0
) -> tuple[tuple[Kind, ...], tuple[tuple[int, int], ...]]:
    """The kind of each operand, and its (row, column) strides in elements, 0 where it is constant.

    operands: tensors that broadcast to [batch, vocab]. shift: how far before column 0 the first tile starts.
    Raises ValueError, naming one that does not broadcast.
    """
    kinds, strides = [], []
    for n, operand in enumerate(operands):
        shape = (1, 1, *operand.shape)[-2:]
        if operand.dim() > 2 or any(have not in (1, want) for have, want in zip(shape, (batch, vocab), strict=True)):
            raise ValueError(
                f"operand a{n} has shape {list(operand.shape)}, which does not broadcast to the "
                f"logits' [{batch}, {vocab}]"
            )
        row, column = (
            0 if size == 1 else stride for size, stride in zip(shape, (0, 0, *operand.stride())[-2:], strict=True)
        )
        name: Shape = ("full" if column else "row") if row else ("token" if column else "scalar")
        by_four = name == "full" and operand.dtype == torch.bool and column == 1
        by_four = by_four and all(n % 4 == 0 for n in (operand.data_ptr(), row, vocab, shift))
        kinds.append(Kind(name, operand.dtype, by_four))
        strides.append((row, column))
    return tuple(kinds), tuple(strides)


def emit(
    program: Program, kinds: tuple[Kind, ...], early: tuple[int, ...], late: tuple[int, ...], greedy: bool
) -> triton.JITFunction:
    """A Triton function that computes the program on a tile:

        epilogue(acc, early, late) -> f32 [BB, BV]

    acc: f32 [BB, BV]. early, late: what the functions of `emit_loads` have loaded for the operands of these numbers,
    among which are all that the program uses. greedy: whether for the largest of the logits, or for a draw.

    Equal arguments always give the same source, hence the same key in Triton's cache.
    Raises ProgramError if the kinds do not fit the program.
    """
    from . import epilogue_triton  # here, because the torch path must work without Triton

    return epilogue_triton.emit(program, kinds, early, late, greedy)


def emit_loads(kinds: tuple[Kind, ...], which: tuple[int, ...]) -> triton.JITFunction | None:
    """A Triton function that loads the operands numbered in `which` for a tile; None if there are none:

        loads(operands, strides, rows, v0, B, V, BV) -> tuple

    operands: a tuple of pointers; strides: a tuple of (row stride, column stride), as from `operand_kinds`.
    rows [BB], v0: the tile's rows and its first column. Nothing is loaded outside rows 0 ... B and columns 0 ... V, and
    the values there mean nothing.
    """
    from . import epilogue_triton

    return epilogue_triton.emit_loads(kinds, which)
