"""From the tail's input back to the linear: the walk that collects the epilogue program and its operands.

The walk has three modes, by what the sink still cares about:

* ``value``: exactly this value, step by step, with the graph's own roundings.
* ``logit``: this value up to a constant per row, which neither softmax nor argmax sees. Row maxima and normalisers
  (what ``softmax`` and ``log_softmax`` subtract) are peeled off.
* ``log_weight``: the logarithm of this non-negative value, up to a constant per row. ``exp`` ends the mode; divisions
  by positive row constants (a softmax's sum, a renormalisation) are peeled off; zeroed entries become ``-inf``.

Roundings of probabilities and log-probabilities to a lower precision are dropped on the way: the result is an exact
draw, not a draw from rounded probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from .gather import ALL_GATHER, match_gather
from .linear import REDUCTIONS, Linear, barrier_miss
from .miss import Miss
from .pointwise import BOOLEAN, CASTS, EXACT, FILL_LIKE, POINTWISE, SCATTER_TARGETS
from .shapes import ShapeStep, is_identity, rank, same, same_shape, shape, step_back

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
class Walk:
    """The state of one site's walk; ``statements`` and ``operands`` are its result."""

    linear: Linear
    dependents: set[Node]
    statements: list[str] = field(default_factory=list)
    operands: list[Operand] = field(default_factory=list)
    visited: set[Node] = field(default_factory=set)
    linear_dim: int | None = None
    path: Path | None = None
    _memo: dict[tuple[str, Node], tuple[Path, Value]] = field(default_factory=dict)
    _sharded: set[Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        # Before a gather each rank has a shard: a row statistic there differs between ranks and is no constant.
        stack = [node for node in self.dependents if node.target in ALL_GATHER]
        while stack:
            for node in stack.pop().all_input_nodes:
                if node in self.dependents and node not in self._sharded:
                    self._sharded.add(node)
                    stack.append(node)

    # -- the three modes ------------------------------------------------------------------------------------------

    def value(self, node: Any, dim: int, path: Path) -> Value:
        """``node`` itself; ``dim`` is the vocabulary's position in it, ``path`` the shape ops from it to the sink."""
        return self._visit("value", self._value, node, dim, path)

    def logit(self, node: Node, dim: int, path: Path) -> Value:
        """``node`` up to a constant per row."""
        return self._visit("logit", self._logit, node, dim, path)

    def log_weight(self, node: Node, dim: int, path: Path) -> Value:
        """``log(node)`` up to a constant per row, for a node known to be non-negative (see `is_weight`)."""
        return self._visit("log_weight", self._log_weight, node, dim, path)

    def _visit(self, mode: str, visit: Callable, node: Any, dim: int, path: Path) -> Value:
        if not isinstance(node, Node) or node not in self.dependents:
            return self._independent(node, dim, path)
        known = self._memo.get((mode, node))
        if known is not None:
            if known[0] != path:
                raise _two_paths(node)
            return known[1]
        self.visited.add(node)
        inner = node.args[0] if node.args else None
        gather = None if node is self.linear.node else match_gather(node, dim)
        step = None if is_identity(node) or gather is not None else step_back(node, dim)
        if node is self.linear.node:
            result = self._product(dim, path)
        elif gather is not None:
            self.visited.update(gather.parts)
            result = getattr(self, mode)(gather.inner, dim, (gather, *path))
        elif is_identity(node):
            result = getattr(self, mode)(inner, dim, path)
        elif step is not None:
            result = getattr(self, mode)(inner, step.dim_in, (step, *path))
        else:
            result = visit(node, dim, path)
        self._memo[mode, node] = path, result
        return result

    def _value(self, node: Node, dim: int, path: Path) -> Value:
        if node.target in FILL_LIKE:
            self.absorb(node)
            return self.literal(FILL_LIKE[node.target](node), node.meta["val"].dtype)
        if node.target in CASTS:
            return self._cast(self.value(node.args[0], dim, path), node)
        if node.target is aten.slice_scatter.default and same_shape(node.args[1], node):
            # Dynamic shapes wrap `l[:, ids] = x` in a slice that covers everything.
            self.absorb(node.args[0])
            return self.value(node.args[1], dim, path)
        if node.target in SCATTER_TARGETS:
            mask, number = self._scatter(node, dim, path)
            return self._round(self.emit("where", mask, number, self.value(node.args[0], dim, path)), node)
        if node.target not in POINTWISE:
            raise self._unsupported(node)
        if node.kwargs.get("rounding_mode"):
            raise self._unsupported(node)
        for arg in node.args:
            if isinstance(arg, Node) and arg in self.dependents and not same_shape(arg, node):
                raise _broadcast(node) if self._spans(arg, node, dim) else self._row_statistic_miss(arg, node)
        args = [self._argument(arg, node, dim, path) for arg in node.args]
        kwargs = {k: self._argument(v, node, dim, path) for k, v in node.kwargs.items() if k in ("alpha", "min", "max")}
        return self._round(POINTWISE[node.target](self.emit, *args, **kwargs), node)

    def _logit(self, node: Node, dim: int, path: Path) -> Value:
        """Looks for what a row constant may be peeled from; anything else is an ordinary value."""
        target, args = node.target, node.args
        if target in CASTS and node.meta["val"].dtype.is_floating_point:
            inner = self.logit(args[0], dim, path)
            # A rounding after a peeled constant would round something else than the graph does: it is dropped.
            return inner if self._peels(args[0], dim) else self._cast(inner, node)
        if target in (aten.sub.Tensor, aten.add.Tensor) and node.kwargs.get("alpha", 1) == 1:
            for x, other in ((args[0], args[1]), (args[1], args[0])):
                if target is aten.sub.Tensor and x is args[1]:
                    continue
                if self._is_row_statistic(other, node, dim) and x in self.dependents:
                    self.absorb(other)
                    return self.logit(x, dim, path)
        if not self._peels(node, dim):
            return self.value(node, dim, path)
        if target in (aten.mul.Tensor, aten.div.Tensor):
            x, factor = self._scaled(node)
            if x in self.dependents and factor not in self.dependents and self._is_row_constant(factor, node, dim):
                factor = self._argument(factor, node, dim, path)
                return self.emit("mul" if target is aten.mul.Tensor else "div", self.logit(x, dim, path), factor)
        masked = self._masked(node, dim, path, -math.inf)
        if masked is not None:
            mask, inner = masked
            return self.emit("where", mask, self.literal(-math.inf), self.logit(inner, dim, path))
        return self.value(node, dim, path)

    def _log_weight(self, node: Node, dim: int, path: Path) -> Value:
        target, args = node.target, node.args
        if target in CASTS:
            return self.log_weight(args[0], dim, path)
        if target is aten.exp.default:
            return self.logit(args[0], dim, path)
        if target is aten.div.Tensor and self._is_positive_row_constant(args[1], node, dim):
            self.absorb(args[1])
            return self.log_weight(args[0], dim, path)
        if target is aten.mul.Tensor and isinstance(args[1], (int, float)) and args[1] > 0:
            return self.log_weight(args[0], dim, path)
        masked = self._masked(node, dim, path, 0.0)
        if masked is not None:
            mask, inner = masked
            return self.emit("where", mask, self.literal(-math.inf), self.log_weight(inner, dim, path))
        raise self._unsupported(node)

    def is_weight(self, node: Any, dim: int) -> bool:
        """Whether `log_weight` can take ``node``: an exponential, normalised, scaled, zeroed in places, or reshaped."""
        if not isinstance(node, Node) or node not in self.dependents:
            return False
        if is_identity(node) or (node.target in CASTS and node.meta["val"].dtype.is_floating_point):
            return self.is_weight(node.args[0], dim)
        gather = match_gather(node, dim)
        if gather is not None:
            return self.is_weight(gather.inner, dim)
        step = step_back(node, dim)
        if step is not None:
            return self.is_weight(node.args[0], step.dim_in)
        if node.target is aten.exp.default:
            return True
        if node.target is aten.div.Tensor:
            return self._is_positive_row_constant(node.args[1], node, dim) and self.is_weight(node.args[0], dim)
        if node.target is aten.mul.Tensor:
            factor = node.args[1]
            return isinstance(factor, (int, float)) and factor > 0 and self.is_weight(node.args[0], dim)
        where = self._where_constant(node, 0.0)
        return where is not None and self.is_weight(where[1], dim)

    # -- the ends of the walk -------------------------------------------------------------------------------------

    def _product(self, dim: int, path: Path) -> Value:
        """The linear itself: its accumulator, its bias, and the rounding of its output."""
        self.linear.check(dim)
        if self.path is not None and (self.path, self.linear_dim) != (path, dim):
            raise _two_paths(self.linear.node)
        self.path, self.linear_dim = path, dim
        node = self.linear.node
        self.visited.update(self.linear.nodes)
        result = Value("acc", torch.float32)
        if node.target is aten.addmm.default:
            if node.kwargs.get("alpha", 1) != 1:
                result = self.emit("mul", result, self.literal(node.kwargs["alpha"]))
            bias = self.operand(node.args[0], rank(node), dim, path)
            if node.kwargs.get("beta", 1) != 1:
                bias = self.emit("mul", bias, self.literal(node.kwargs["beta"]))
            result = self.emit("add", result, bias)
        return self._round(result, node)

    def _independent(self, node: Any, dim: int, path: Path) -> Value:
        raise Miss(
            "NO_LINEAR",
            "the sampled values do not come from the linear alone",
            "compile the LM head and the sampling in one function",
            node if isinstance(node, Node) else None,
        )

    def _argument(self, arg: Any, user: Node, dim: int, path: Path) -> Any:
        """An argument of the pointwise op ``user``: a value of the walk, an operand, or a literal."""
        if arg is None:
            return None
        if not isinstance(arg, Node):
            return self.literal(arg, user.meta["val"].dtype if _keeps_dtype(user) else torch.float32)
        if arg in self.dependents:
            return self.value(arg, dim, path)
        number = constant_of(arg)
        if number is not None:
            return self.literal(number, user.meta["val"].dtype if _keeps_dtype(user) else torch.float32)
        operand = self.operand(arg, rank(user), dim, path)
        out = user.meta["val"].dtype
        val = arg.meta["val"]
        if out in LOW_PRECISION and isinstance(val, torch.Tensor) and val.dtype is torch.float32 and val.dim() == 0:
            # Eager casts a 0-d tensor to the dtype of the result first. (Python floats arrive as float64 and are not.)
            return self.emit("round", operand, Value(LOW_PRECISION[out], out), dtype=out)
        return operand

    # -- building blocks ------------------------------------------------------------------------------------------

    def emit(self, op: str, *args: Any, dtype: torch.dtype | None = None) -> Value:
        values = [a if isinstance(a, Value) else self.literal(a) for a in args]
        if op.startswith("logical_"):
            values = [self._as_bool(v) for v in values]
        elif op == "where":
            values = [self._as_bool(values[0]), *map(self._as_float, values[1:])]
        elif op != "round":
            values = [self._as_float(v) for v in values]
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
        if isinstance(val, torch.Tensor) and val.dtype.is_complex:
            raise self._unsupported(node)
        operand = Operand(node, at_rank, dim, path, scatter)
        if operand not in self.operands:
            self.operands.append(operand)
        is_bool = scatter or (isinstance(val, torch.Tensor) and val.dtype is torch.bool)
        dtype = torch.bool if is_bool else val.dtype if isinstance(val, torch.Tensor) else torch.float32
        return Value(f"a{self.operands.index(operand)}", dtype)

    def program(self, result: Value) -> tuple[str, list[Operand]]:
        """The text of the program that ends in ``result``, without the steps it does not need, and its operands."""
        return program_text(self.statements, result.text, self.operands)

    def absorb(self, node: Any) -> None:
        """Counts ``node`` and all it depends on, back to the linear, as part of the site."""
        stack = [node]
        while stack:
            node = stack.pop()
            if isinstance(node, Node) and node in self.dependents and node not in self.visited:
                self.visited.add(node)
                stack.extend(node.all_input_nodes)

    def _as_float(self, v: Value) -> Value:
        return v if v.dtype is not torch.bool else self.emit("where", v, 1.0, 0.0)

    def _as_bool(self, v: Value) -> Value:
        return v if v.dtype is torch.bool else self.emit("ne", v, 0.0)

    def _round(self, v: Value, node: Node) -> Value:
        dtype = node.meta["val"].dtype
        if dtype is torch.bool:
            return self._as_bool(v)
        if not dtype.is_floating_point:
            raise self._unsupported(node)
        if dtype in LOW_PRECISION and v.dtype is not dtype:
            return self.emit("round", v, Value(LOW_PRECISION[dtype], dtype), dtype=dtype)
        # float64 steps are computed in float32, like all probability work.
        return Value(v.text, dtype, v.number)

    def _cast(self, v: Value, node: Node) -> Value:
        return self._round(self._as_float(v) if node.meta["val"].dtype is not torch.bool else v, node)

    def _unsupported(self, node: Node) -> Miss:
        filtered = self.known_barrier(node)
        if filtered is not None:
            return filtered
        if node.target in REDUCTIONS:
            reason = f"{node.target} over the vocabulary feeds the logits themselves"
        else:
            reason = f"the epilogue has no op for {node.target} giving {node.meta['val'].dtype}"
        return Miss("EPILOGUE_OP", reason, "move this op out of the logit processing, or keep the site unfused", node)

    def _row_statistic_miss(self, arg: Node, node: Node) -> Miss:
        return self.known_barrier(arg) or Miss(
            "EPILOGUE_OP",
            f"{node.target} mixes a statistic of the row, computed from its logits by {arg.target}, into the logits",
            "process each logit by itself: thresholds relative to the row's own maximum, say, are not supported yet",
            node,
        )

    def known_barrier(self, node: Any) -> Miss | None:
        """The telling miss for a filter (top-k, top-p) or a collective between ``node`` and the linear, if any."""
        stack, seen = [node], set()
        while stack:
            node = stack.pop()
            if isinstance(node, Node) and node in self.dependents and node not in seen:
                seen.add(node)
                stack.extend(node.all_input_nodes)
        miss = barrier_miss(seen)
        return None if miss.code == "NO_LINEAR" else miss

    # -- row constants --------------------------------------------------------------------------------------------

    def _scaled(self, node: Node) -> tuple[Any, Any]:
        """The logits and the factor of a product or quotient, whichever comes first."""
        a, b = node.args[:2]
        return (b, a) if node.target is aten.mul.Tensor and a not in self.dependents else (a, b)

    def _spans(self, arg: Node, node: Node, dim: int) -> bool:
        d = dim - (rank(node) - rank(arg))
        return d >= 0 and same(shape(arg)[d], shape(node)[dim])

    def _is_row_constant(self, arg: Any, node: Node, dim: int) -> bool:
        if not isinstance(arg, Node):
            return isinstance(arg, (int, float))
        if not isinstance(arg.meta["val"], torch.Tensor):
            return True
        d = dim - (rank(node) - rank(arg))
        return d < 0 or same(shape(arg)[d], 1)

    def _is_row_statistic(self, arg: Any, node: Node, dim: int) -> bool:
        """A constant per row computed from the logits: a maximum, a log-sum-exp."""
        if not isinstance(arg, Node) or arg not in self.dependents or node in self._sharded:
            return False
        return self._is_row_constant(arg, node, dim)

    def _is_positive_row_constant(self, arg: Any, node: Node, dim: int) -> bool:
        """A sum of exponentials over the vocabulary, perhaps clamped from below, per row."""
        if not self._is_row_statistic(arg, node, dim):
            return False
        passable = {aten.clamp_min.default, aten.clamp.default, aten.unsqueeze.default, *CASTS}
        while is_identity(arg) or arg.target in passable:
            if arg.target is aten.clamp.default and len(arg.args) > 2:
                return False
            arg = arg.args[0]
        if arg.target is not aten.sum.dim_IntList or arg not in self.dependents:
            return False
        source = arg.args[0]
        dims = {d % rank(source) for d in arg.args[1]}
        return rank(source) == rank(node) and dims == {dim} and self.is_weight(source, dim)

    def _peels(self, node: Any, dim: int) -> bool:
        """Whether the `logit` walk from ``node`` will drop a row constant before it reaches an ordinary value."""
        if not isinstance(node, Node) or node not in self.dependents or node is self.linear.node:
            return False
        if is_identity(node) or (node.target in CASTS and node.meta["val"].dtype.is_floating_point):
            return self._peels(node.args[0], dim)
        gather = match_gather(node, dim)
        if gather is not None:
            return self._peels(gather.inner, dim)
        step = step_back(node, dim)
        if step is not None:
            return self._peels(node.args[0], step.dim_in)
        if node.target in (aten.sub.Tensor, aten.add.Tensor):
            others = node.args[1:] if node.target is aten.sub.Tensor else node.args
            if any(self._is_row_statistic(other, node, dim) for other in others):
                return True
            return False
        if node.target in (aten.mul.Tensor, aten.div.Tensor):
            x, factor = self._scaled(node)
            return self._is_row_constant(factor, node, dim) and self._peels(x, dim)
        where = self._where_constant(node, -math.inf)
        return where is not None and self._peels(where[1], dim)

    # -- masks ----------------------------------------------------------------------------------------------------

    def _where_constant(self, node: Node, number: float) -> tuple[Any, Node, bool] | None:
        """``where(mask, number, x)`` or its mirror image as (mask, x, negated)."""
        if node.target is aten.where.self:
            mask, a, b = node.args
            if constant_of(a) == number:
                return mask, b, False
            if constant_of(b) == number:
                return mask, a, True
        if node.target is aten.masked_fill.Scalar and node.args[2] == number:
            return node.args[1], node.args[0], False
        return None

    def _masked(self, node: Node, dim: int, path: Path, number: float) -> tuple[Value, Node] | None:
        where = self._where_constant(node, number)
        if where is None or not isinstance(where[1], Node):
            return None
        mask, inner, negated = where
        if inner not in self.dependents or not same_shape(inner, node):
            return None
        value = self._argument(mask, node, dim, path)
        return (self.emit("logical_not", value) if negated else value), inner

    def _scatter(self, node: Node, dim: int, path: Path) -> tuple[Value, Value]:
        """``node`` overwrites some logits with one number: the mask (an operand the rewrite builds) and the number."""
        number = self._overwriting_number(node)
        computed = [a for a in _scatter_indices(node) if isinstance(a, Node) and a in self.dependents]
        if number is not None and len(computed) == 1 and same_shape(computed[0], node):
            if computed[0].meta["val"].dtype is torch.bool:
                return self.value(computed[0], dim, path), number
        if number is None or computed:
            raise self.known_barrier(node) or Miss(
                "EPILOGUE_OP",
                f"{node.target} writes values that are not one number into the logits",
                "write one number (such as -inf), or add a [V] or [B, V] tensor to the logits instead",
                node,
            )
        return self.operand(node, rank(node), dim, path, scatter=True), number

    def _overwriting_number(self, node: Node) -> Value | None:
        dtype = node.meta["val"].dtype
        if node.target is aten.index_put.default:
            if len(node.args) > 3 and node.args[3]:
                return None
            source = node.args[2]
        elif node.target is aten.scatter.value:
            source = node.args[3]
        elif node.target in (aten.select_scatter.default, aten.slice_scatter.default):
            source = node.args[1]
            while isinstance(source, Node) and (source.target is aten.copy.default or is_identity(source)):
                if source.target is aten.copy.default:
                    self.absorb(source)
                    source = source.args[1]
                else:
                    source = source.args[0]
            if isinstance(source, Node) and source.target is aten.expand.default:
                source = source.args[0]
        else:
            return None
        number = source if isinstance(source, (int, float)) else constant_of(source)
        return None if number is None else self.literal(number, dtype)


def constant_of(node: Any) -> float | bool | None:
    """The number that every element of ``node`` has, where the graph says so."""
    if not isinstance(node, Node):
        return node if isinstance(node, (int, float)) else None
    if node.target in (aten.lift_fresh_copy.default, aten.clone.default, aten.expand.default):
        return constant_of(node.args[0])
    if node.target is aten.scalar_tensor.default:
        return constant_of(node.args[0])
    if node.target is aten.full.default:
        return constant_of(node.args[1])
    if node.target in FILL_LIKE:
        return constant_of(FILL_LIKE[node.target](node))
    if node.op == "get_attr" and node.target.startswith("_tensor_constant"):
        tensor = getattr(node.graph.owning_module, node.target, None)
        is_real = isinstance(tensor, torch.Tensor) and not isinstance(tensor, torch._subclasses.FakeTensor)
        if is_real and tensor.numel() == 1:
            with _disable_current_modes():
                return tensor.item()
    return None


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


def _keeps_dtype(user: Node) -> bool:
    """Whether a literal is first cast to the dtype of the result: selecting ops do, arithmetic works in float32."""
    return user.target in _SELECTING


_SELECTING = {t for t, name in ((t, str(t)) for t in POINTWISE) if any(w in name for w in ("where", "clamp", "fill"))}


def _common_dtype(op: str, values: list[Value]) -> torch.dtype:
    """The dtype a result is known to be exact in without rounding."""
    dtypes = {
        v.dtype for v in values if v.dtype is not torch.bool and not (v.number is not None and math.isinf(v.number))
    }
    return dtypes.pop() if op in EXACT and len(dtypes) == 1 else torch.float32


def _scatter_indices(node: Node) -> list[Any]:
    if node.target is aten.index_put.default:
        return list(node.args[1])
    return [node.args[2]] if node.target is aten.scatter.value else []


def _two_paths(node: Node) -> Miss:
    return Miss(
        "LAYOUT",
        f"{node.target} reaches the sink by two ways that select different rows",
        "select the rows once, right after the LM head",
        node,
    )


def _broadcast(node: Node) -> Miss:
    return Miss(
        "LAYOUT",
        f"{node.target} broadcasts the logits to a larger shape",
        "expand the hidden states instead",
        node,
    )
