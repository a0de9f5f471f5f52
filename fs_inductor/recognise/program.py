"""The epilogue program under construction: statements, operands, literals, and the graph's dtypes and roundings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from .miss import Miss
from .pointwise import BOOLEAN, EXACT, FILL_LIKE
from .shapes import ShapeStep

aten = torch.ops.aten

Path = tuple[ShapeStep, ...]
LOW_PRECISION = {torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass(frozen=True)
class Value:
    """A value of the program: its spelling (``acc``, ``x3``, ``a0`` or a literal) and its dtype in the graph."""

    text: str
    dtype: torch.dtype
    number: float | None = None


@dataclass(frozen=True)
class Operand:
    """A tensor (or symbolic number) the program reads, as it stands at its use.

    node: the graph's tensor, broadcastable to the logits there; a mask to be built if ``scatter`` is set.
    rank, dim: rank of those logits, and the position of the vocabulary in them.
    path: the shape ops that follow, up to the sink.
    """

    node: Node
    rank: int
    dim: int
    path: Path
    scatter: bool = False


@dataclass
class ProgramBuilder:
    """Collects ``op(args)`` statements, numbered by position, and the operands they read."""

    statements: list[str] = field(default_factory=list)
    operands: list[Operand] = field(default_factory=list)

    def emit(self, op: str, *args: Any, dtype: torch.dtype | None = None) -> Value:
        values = [a if isinstance(a, Value) else self.literal(a) for a in args]
        if op.startswith("logical_"):
            values = [self.as_bool(v) for v in values]
        elif op == "where":
            values = [self.as_bool(values[0]), *map(self.as_float, values[1:])]
        elif op != "round":
            values = [self.as_float(v) for v in values]
        if dtype is None:
            dtype = torch.bool if op in BOOLEAN else _common_dtype(op, values)
        if op == "where" and values[0].text == "false":
            return values[2]
        call = f"{op}({', '.join(v.text for v in values)})"
        for i, statement in enumerate(self.statements):
            if statement == call:
                return Value(f"x{i}", dtype)
        self.statements.append(call)
        return Value(f"x{len(self.statements) - 1}", dtype)

    def literal(self, number: Any, dtype: torch.dtype = torch.float32) -> Value:
        if isinstance(number, bool):
            return Value(str(number).lower(), torch.bool)
        if isinstance(number, complex) or not isinstance(number, (int, float)):
            raise Miss("EPILOGUE_OP", f"{number!r} is not a real number", "use real numbers in the logit processing")
        if dtype in LOW_PRECISION:
            with _disable_current_modes():
                number = torch.tensor(float(number), dtype=dtype).item()
        return Value(repr(float(number)), dtype, float(number))

    def operand(self, node: Node, at_rank: int, dim: int, path: Path, scatter: bool = False) -> Value:
        val = node.meta["val"]
        operand = Operand(node, at_rank, dim, path, scatter)
        if operand not in self.operands:
            self.operands.append(operand)
        is_bool = scatter or (isinstance(val, torch.Tensor) and val.dtype is torch.bool)
        dtype = torch.bool if is_bool else val.dtype if isinstance(val, torch.Tensor) else torch.float32
        return Value(f"a{self.operands.index(operand)}", dtype)

    def round_to(self, dtype: torch.dtype, v: Value) -> Value:
        """``v`` as the graph keeps it in ``dtype``, a float dtype or bool.

        float64 steps are computed in float32, like all probability work.
        """
        if dtype is torch.bool:
            return self.as_bool(v)
        if dtype in LOW_PRECISION and v.dtype is not dtype:
            return self.emit("round", v, Value(LOW_PRECISION[dtype], dtype), dtype=dtype)
        return Value(v.text, dtype, v.number)

    def program(self, result: Value) -> tuple[str, list[Operand]]:
        """The text of the program that ends in ``result``, without the steps it does not need, and its operands."""
        return program_text(self.statements, result.text, self.operands)

    def as_float(self, v: Value) -> Value:
        return v if v.dtype is not torch.bool else self.emit("where", v, 1.0, 0.0)

    def as_bool(self, v: Value) -> Value:
        return v if v.dtype is torch.bool else self.emit("ne", v, 0.0)


def program_text(statements: list[str], result: str, operands: list[Operand]) -> tuple[str, list[Operand]]:
    """``statements`` (``op(args)``, numbered by position) as a program ending in ``result``, pruned and renumbered."""
    if result == "acc":
        return "", []
    if not result.startswith("x"):
        raise Miss("NO_LINEAR", "the sampled values do not depend on the linear", "remove the unused LM head")
    needed = {result}
    for i in reversed(range(len(statements))):
        if f"x{i}" in needed:
            needed.update(_arguments(statements[i]))
    names: dict[str, str] = {}
    kept: list[Operand] = []
    lines: list[str] = []
    for i, statement in enumerate(statements):
        if f"x{i}" not in needed:
            continue
        for name in _arguments(statement):
            if name[0] == "a" and name[1:].isdigit() and name not in names:
                names[name] = f"a{len(kept)}"
                kept.append(operands[int(name[1:])])
        names[f"x{i}"] = f"x{len(lines)}"
        arguments = ", ".join(names.get(a, a) for a in _arguments(statement))
        lines.append(f"x{len(lines)} = {statement.partition('(')[0]}({arguments})")
    return "; ".join(lines), kept


def _arguments(statement: str) -> list[str]:
    return statement.partition("(")[2][:-1].split(", ")


def _common_dtype(op: str, values: list[Value]) -> torch.dtype:
    """The dtype a result is known to be exact in without rounding."""
    dtypes = {
        v.dtype for v in values if v.dtype is not torch.bool and not (v.number is not None and math.isinf(v.number))
    }
    return dtypes.pop() if op in EXACT and len(dtypes) == 1 else torch.float32


def constant_of(node: Any) -> float | bool | None:
    """The number that every element of ``node`` has, where the graph says so."""
    if not isinstance(node, Node):
        return node if isinstance(node, (int, float)) else None
    if node.target in (aten.lift_fresh_copy.default, aten.clone.default, aten.expand.default):
        return constant_of(node.args[0])
    fill = None
    if node.target is aten.scalar_tensor.default:
        fill = node.args[0]
    elif node.target is aten.full.default:
        fill = node.args[1]
    elif node.target in FILL_LIKE:
        fill = FILL_LIKE[node.target](node)
    if isinstance(fill, (int, float)):
        with _disable_current_modes():
            return torch.tensor(fill).to(node.meta["val"].dtype).item()
    if node.op == "get_attr" and node.target.startswith("_tensor_constant"):
        tensor = getattr(node.graph.owning_module, node.target, None)
        is_real = isinstance(tensor, torch.Tensor) and not isinstance(tensor, torch._subclasses.FakeTensor)
        if is_real and tensor.numel() == 1:
            with _disable_current_modes():
                return tensor.item()
    return None
