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

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from .gather import match_gather
from .heads import HeadStep, OtherHead, chosen_head
from .linear import REDUCTIONS, Linear
from .miss import Miss
from .mixes import mixed_rows
from .pointwise import CASTS, FILL_LIKE, POINTWISE, SCATTER_TARGETS, is_float_cast
from .program import LOW_PRECISION, Path, ProgramBuilder, Value, constant_of
from .shapes import ShapeStep, is_identity, rank, same, same_shape
from .structure import POWERS, Structure

aten = torch.ops.aten


class Walk(ProgramBuilder):
    """The state of one site's walk: a program that grows, the nodes visited, and where the linear was met."""

    def __init__(self, linear: Linear, dependents: set[Node], head: int = 0):
        super().__init__()
        self.linear = linear
        self.dependents = dependents
        self.structure = Structure(linear, dependents, head)
        self.visited: set[Node] = set()
        self.linear_dim: int | None = None
        self.path: Path | None = None
        self._memo: dict[tuple[str, Node], tuple[Path, Value]] = {}

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
                raise mixed_rows(node, self.linear, self.dependents)
            return known[1]
        self.visited.add(node)
        gather = None if node is self.linear.node else match_gather(node, dim)
        step = None if is_identity(node) or gather is not None else self.step(node, dim, path)
        if node is self.linear.node:
            result = self._product(dim, path)
        elif gather is not None:
            self.visited.update(gather.parts)
            result = getattr(self, mode)(gather.inner, dim, (gather, *path))
        elif is_identity(node):
            result = getattr(self, mode)(node.args[0], dim, path)
        elif step is not None:
            self.visited.update(step.nodes)
            result = getattr(self, mode)(step.source, step.dim_in, (step, *path))
        else:
            result = visit(node, dim, path)
        self._memo[mode, node] = path, result
        return result

    def step(self, node: Node, dim: int, path: Path) -> ShapeStep | None:
        """The shape op at ``node``; where heads are put together, the head that ``path`` picks or the walk is for."""
        step = None if node is self.linear.node else self.structure.step(node, dim)
        if isinstance(step, HeadStep):
            chosen = chosen_head(step, path)
            if chosen is not None and chosen != step.head:
                if not step.whole:
                    raise OtherHead(step.node, chosen)
                return dataclasses.replace(step, head=chosen)
        return step

    def _value(self, node: Node, dim: int, path: Path) -> Value:
        if node.target in FILL_LIKE:
            self.absorb(node)
            return self.literal(constant_of(node), node.meta["val"].dtype)
        if node.target in CASTS:
            return self._cast(self.value(node.args[0], dim, path), node)
        if node.target is aten.slice_scatter.default and _overwrites(node):
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
                raise _broadcast(node) if self.structure.spans(arg, node, dim) else self._row_statistic_miss(arg, node)
        args = [self.argument(arg, node, dim, path) for arg in node.args]
        kwargs = {k: self.argument(v, node, dim, path) for k, v in node.kwargs.items() if k in ("alpha", "min", "max")}
        return self._round(POINTWISE[node.target](self.emit, *args, **kwargs), node)

    def _logit(self, node: Node, dim: int, path: Path) -> Value:
        """Looks for what a row constant may be peeled from; anything else is an ordinary value."""
        target, args = node.target, node.args
        if is_float_cast(node):
            inner = self.logit(args[0], dim, path)
            # A rounding after a peeled constant would round something else than the graph does: it is dropped.
            return inner if self.structure.peels(args[0], dim) else self._cast(inner, node)
        if target in (aten.sub.Tensor, aten.add.Tensor) and node.kwargs.get("alpha", 1) == 1:
            shifted = self.structure.shifted(node, dim)
            if shifted is not None:
                x, statistic = shifted
                self.absorb(statistic)
                return self.logit(x, dim, path)
            biased = self.structure.biased(node, dim)
            if biased is not None:
                x, bias = biased
                subtracted = target is aten.sub.Tensor and x is args[1]
                bias = self.argument(bias, node, dim, path)
                x = self.logit(x, dim, path)
                if subtracted:
                    return self.emit("sub", bias, x)
                return self.emit("add" if target is aten.add.Tensor else "sub", x, bias)
        if target is aten.log.default and self.structure.is_weight(args[0], dim):
            return self.log_weight(args[0], dim, path)
        if not self.structure.peels(node, dim):
            return self.value(node, dim, path)
        if target in (aten.mul.Tensor, aten.div.Tensor):
            x, factor = self.structure.scaled(node)
            if (
                x in self.dependents
                and factor not in self.dependents
                and self.structure.is_row_constant(factor, node, dim)
            ):
                factor = self.argument(factor, node, dim, path)
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
        if target is aten.div.Tensor and self.structure.is_positive_row_constant(args[1], node, dim):
            self.absorb(args[1])
            return self.log_weight(args[0], dim, path)
        if target in POWERS and self.structure.is_positive_power(node, dim):
            return self.emit("mul", self.log_weight(args[0], dim, path), self.argument(args[1], node, dim, path))
        kept = self.structure.kept(node)
        if kept is not None:
            mask = self.argument(kept[0], node, dim, path)
            return self.emit("where", mask, self.log_weight(kept[1], dim, path), self.literal(-math.inf))
        if target is aten.mul.Tensor and isinstance(args[1], (int, float)) and args[1] > 0:
            return self.log_weight(args[0], dim, path)
        masked = self._masked(node, dim, path, 0.0)
        if masked is not None:
            mask, inner = masked
            return self.emit("where", mask, self.literal(-math.inf), self.log_weight(inner, dim, path))
        raise self._unsupported(node)

    # -- the ends of the walk -------------------------------------------------------------------------------------

    def _product(self, dim: int, path: Path) -> Value:
        """The linear itself: its accumulator, its bias, and the rounding of its output."""
        self.linear.check(dim)
        if self.path is not None and (self.path, self.linear_dim) != (path, dim):
            raise mixed_rows(self.linear.node, self.linear, self.dependents)
        self.path, self.linear_dim = path, dim
        node = self.linear.node
        self.visited.update(self.linear.nodes)
        result = Value("acc", torch.float32)
        if node.target is aten.addmm.default:
            if node.kwargs.get("alpha", 1) != 1:
                result = self.emit("mul", result, self.literal(node.kwargs["alpha"]))
            bias = self.operand(node.args[0], rank(node), dim, path)
            beta = node.kwargs.get("beta", 1)
            if beta not in (0, 1):
                bias = self.emit("mul", bias, self.literal(beta))
            if beta != 0:  # eager does not look at the bias then, NaN or not
                result = self.emit("add", result, bias)
        return self._round(result, node)

    def _independent(self, node: Any, dim: int, path: Path) -> Value:
        raise Miss(
            "NO_LINEAR",
            "the sampled values do not come from the linear alone",
            "compile the LM head and the sampling in one function",
            node if isinstance(node, Node) else None,
        )

    def argument(self, arg: Any, user: Node, dim: int, path: Path) -> Any:
        """An argument of the pointwise op ``user``: a value of the walk, an operand, or a literal."""
        if arg is None:
            return None
        if not isinstance(arg, Node):
            _check_float64(arg, user)
            return self.literal(arg, self._number_dtype(user))
        if arg in self.dependents:
            return self.value(arg, dim, path)
        dtype = self._operand_dtype(arg, user)
        number = constant_of(arg)
        if number is not None:
            _check_float64(number, user)
            return self.literal(number, dtype)
        operand = self.operand(arg, rank(user), dim, path)
        is_bool = operand.dtype is torch.bool
        return self.round_to(dtype, operand) if dtype in LOW_PRECISION and not is_bool else operand

    def _operand_dtype(self, arg: Node, user: Node) -> torch.dtype:
        """What eager casts ``arg``, which is no part of the logits, to before ``user`` computes with it.

        That rounds integers beside low-precision logits. A tensor on the CPU with one element is a number to eager,
        but for the first factor on CPUs; one on the GPU is cast like any other tensor.
        """
        val = arg.meta["val"]
        if isinstance(val, torch.Tensor):
            first = arg is user.args[0] and self.linear.node.meta["val"].device.type == "cpu"
            if first or val.device.type != "cpu" or not all(same(size, 1) for size in val.shape):
                return _computes_in(user)
        return self._number_dtype(user)

    def _number_dtype(self, user: Node) -> torch.dtype:
        """What eager casts a number to before ``user`` computes with it.

        Products and quotients of low-precision tensors take it in float32; so do sums on GPUs, but not on CPUs.
        Everything else casts it to the tensors' own dtype.
        """
        on_cpu = self.linear.node.meta["val"].device.type == "cpu"
        in_float32 = _SCALING if on_cpu else _SCALING | _ADDING
        return torch.float32 if user.target in in_float32 else _computes_in(user)

    def absorb(self, node: Any) -> None:
        """Counts ``node`` and all it depends on, back to the linear, as part of the site."""
        stack = [node]
        while stack:
            node = stack.pop()
            if isinstance(node, Node) and node in self.dependents and node not in self.visited:
                self.visited.add(node)
                stack.extend(node.all_input_nodes)

    def _round(self, v: Value, node: Node) -> Value:
        dtype = node.meta["val"].dtype
        if not dtype.is_floating_point and dtype is not torch.bool:
            raise self._unsupported(node)
        return self.round_to(dtype, v)

    def _cast(self, v: Value, node: Node) -> Value:
        return self._round(self.as_float(v) if node.meta["val"].dtype is not torch.bool else v, node)

    def _unsupported(self, node: Node) -> Miss:
        filtered = self.structure.known_barrier(node)
        if filtered is not None:
            return filtered
        if node.target in REDUCTIONS:
            reason = f"{node.target} over the vocabulary feeds the logits themselves"
        else:
            reason = f"the epilogue has no op for {node.target} giving {node.meta['val'].dtype}"
        return Miss("EPILOGUE_OP", reason, "move this op out of the logit processing, or keep the site unfused", node)

    def _row_statistic_miss(self, arg: Node, node: Node) -> Miss:
        hint = "process each logit by itself: min-p filters and other uses of a row's own maximum are not supported yet"
        if node.target is aten.sub.Tensor and arg.target is aten.log.default:
            hint = (
                "leave out the log_softmax where its results are only added, or scaled by one number a row: it shifts "
                "a row by a constant, which changes no draw; other uses of a row's own sum are not supported yet"
            )
        return self.structure.known_barrier(arg) or Miss(
            "EPILOGUE_OP",
            f"{node.target} mixes a statistic of the row, computed from its logits by {arg.target}, into the logits",
            hint,
            node,
        )

    # -- masks ----------------------------------------------------------------------------------------------------

    def _masked(self, node: Node, dim: int, path: Path, number: float) -> tuple[Value, Node] | None:
        where = self.structure.where_constant(node, number)
        if where is None or not isinstance(where[1], Node):
            return None
        mask, inner, negated = where
        if inner not in self.dependents or not same_shape(inner, node):
            return None
        value = self.argument(mask, node, dim, path)
        return (self.emit("logical_not", value) if negated else value), inner

    def _scatter(self, node: Node, dim: int, path: Path) -> tuple[Value, Value]:
        """``node`` overwrites some logits with one number: the mask (an operand the rewrite builds) and the number."""
        number = self._overwriting_number(node)
        computed = [a for a in _scatter_indices(node) if isinstance(a, Node) and a in self.dependents]
        if number is not None and len(computed) == 1 and same_shape(computed[0], node):
            if computed[0].meta["val"].dtype is torch.bool:
                return self.value(computed[0], dim, path), number
        if number is None or computed:
            raise self.structure.known_barrier(node) or Miss(
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


def _computes_in(user: Node) -> torch.dtype:
    """The dtype a pointwise op converts its inputs to: its result's, or in a comparison what they promote to."""
    dtype = user.meta["val"].dtype
    if dtype is torch.bool:
        values = [a.meta["val"] if isinstance(a, Node) else a for a in user.args]
        dtype = torch.result_type(*values) if len(values) == 2 else torch.float32
    return dtype if dtype.is_floating_point else torch.float32


# As far as draws are exact (README): from here on float32 has steps of 2**-8 and more, which close logits fall between.
MAX_OFFSET = 2.0**15


def _check_float64(number: Any, user: Node) -> None:
    """Raise a Miss for a number that float64 logits survive, but not the float32 in which they are computed."""
    if user.meta["val"].dtype is not torch.float64 or not isinstance(number, (int, float)):
        return
    size, alpha = abs(number), user.kwargs.get("alpha", 1)
    if user.target in _ADDING:
        lost = MAX_OFFSET < size * (max(1, abs(alpha)) if isinstance(alpha, (int, float)) else 1) < math.inf
    else:
        lost = user.target in _SCALING and 0 < size < math.inf and not _SMALLEST <= size <= _LARGEST
    if lost:
        raise Miss(
            "DTYPE",
            f"{user.target} with {number!r} needs float64: in float32, which the kernel computes in, logits are lost",
            f"process the logits in float32, and add nothing beyond ±{MAX_OFFSET:.0f} to them",
            user,
        )


_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
_SCALING = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}
_ADDING = {aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Tensor, aten.rsub.Scalar}


def _scatter_indices(node: Node) -> list[Any]:
    if node.target is aten.index_put.default:
        return list(node.args[1])
    return [node.args[2]] if node.target is aten.scatter.value else []


def _overwrites(node: Node) -> bool:
    """Whether a scatter into a slice replaces all there is by its source, as it is."""
    source = node.args[1]
    return same_shape(source, node) and source.meta["val"].dtype == node.meta["val"].dtype


def _broadcast(node: Node) -> Miss:
    return Miss(
        "LAYOUT",
        f"{node.target} broadcasts the logits to a larger shape",
        "expand the hidden states instead",
        node,
    )
