"""What a chain of nodes means to a sink, without emitting anything: weights, row constants, masks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from .gather import ALL_GATHER, match_gather
from .heads import head_step
from .linear import Linear, barrier_miss
from .miss import Miss
from .pointwise import CASTS, is_float_cast
from .program import constant_of
from .shapes import ShapeStep, is_identity, rank, same, same_shape, shape, step_back

aten = torch.ops.aten

POWERS = {aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor}


class Structure:
    """Questions about the nodes between a linear and a sink. ``dim`` is always the vocabulary's position in a node."""

    def __init__(self, linear: Linear, dependents: set[Node], head: int = 0):
        self.linear = linear
        self.head = head
        self.dependents = dependents
        # Before a gather each rank has a shard: a row statistic there differs between ranks and is no constant.
        self.sharded: set[Node] = set()
        stack = [node for node in dependents if node.target in ALL_GATHER]
        while stack:
            for node in stack.pop().all_input_nodes:
                if node in dependents and node not in self.sharded:
                    self.sharded.add(node)
                    stack.append(node)

    def is_weight(self, node: Any, dim: int) -> bool:
        """Whether `log_weight` can take ``node``: an exponential, normalised, scaled, zeroed in places, or reshaped."""
        if not isinstance(node, Node) or node not in self.dependents:
            return False
        if is_identity(node) or is_float_cast(node):
            return self.is_weight(node.args[0], dim)
        gather = match_gather(node, dim)
        if gather is not None:
            return self.is_weight(gather.inner, dim)
        step = self.step(node, dim)
        if step is not None:
            return self.is_weight(step.source, step.dim_in)
        if node.target is aten.exp.default:
            return True
        if node.target is aten.div.Tensor:
            if not isinstance(node.args[0], Node) or not same_shape(node.args[0], node):
                return False
            return self.is_positive_row_constant(node.args[1], node, dim) and self.is_weight(node.args[0], dim)
        if node.target in POWERS:
            return self.is_positive_power(node, dim) and self.is_weight(node.args[0], dim)
        kept = self.kept(node)
        if kept is not None:
            return self.is_weight(kept[1], dim)
        if node.target is aten.mul.Tensor:
            factor = node.args[1]
            return isinstance(factor, (int, float)) and factor > 0 and self.is_weight(node.args[0], dim)
        where = self.where_constant(node, 0.0)
        return where is not None and self.is_weight(where[1], dim)

    def step(self, node: Node, dim: int) -> ShapeStep | None:
        """The shape op at ``node``, heads put together included; None if it is none."""
        return head_step(node, dim, self.head, self.dependents) or step_back(node, dim)

    def is_positive_power(self, node: Node, dim: int) -> bool:
        """``x ** t`` with one exponent a row; a tensor t is taken to be positive, as inverse temperatures are."""
        x, t = node.args
        if not isinstance(x, Node) or not same_shape(x, node):
            return False
        if isinstance(t, (int, float)):
            return t > 0
        return t not in self.dependents and self.is_row_constant(t, node, dim)

    def kept(self, node: Node) -> tuple[Node, Node] | None:
        """``x * mask``, where ``mask`` is zero or one because it was bool once, as (mask as bool, x)."""
        if node.target is not aten.mul.Tensor:
            return None
        for x, mask in (node.args, reversed(node.args)):
            while isinstance(mask, Node) and not _is_bool(mask) and (is_identity(mask) or mask.target in CASTS):
                mask = mask.args[0]
            if isinstance(mask, Node) and _is_bool(mask) and isinstance(x, Node) and same_shape(x, node):
                return mask, x
        return None

    def known_barrier(self, node: Any) -> Miss | None:
        """The telling miss for a collective or a scatter between ``node`` and the linear, if any."""
        stack, seen = [node], set()
        while stack:
            node = stack.pop()
            if isinstance(node, Node) and node in self.dependents and node not in seen:
                seen.add(node)
                stack.extend(node.all_input_nodes)
        miss = barrier_miss(seen)
        return None if miss.code == "NO_LINEAR" else miss

    def shifted(self, node: Node, dim: int) -> tuple[Node, Node] | None:
        """The logits and the row statistic of a sum or difference, if it is one; None otherwise."""
        a, b = node.args[:2]
        for x, other in ((a, b),) if node.target is aten.sub.Tensor else ((a, b), (b, a)):
            if isinstance(x, Node) and x in self.dependents and same_shape(x, node):
                if self.is_row_statistic(other, node, dim):
                    return x, other
        return None

    def biased(self, node: Node, dim: int) -> tuple[Node, Any] | None:
        """A sum or difference of x, with a row constant to be peeled from it, and b from elsewhere, as (x, b)."""
        if node.kwargs.get("alpha", 1) != 1:
            return None
        a, b = node.args[:2]
        for x, other in ((a, b), (b, a)):
            if isinstance(x, Node) and same_shape(x, node) and other not in self.dependents and self.peels(x, dim):
                return x, other
        return None

    def scaled(self, node: Node) -> tuple[Any, Any]:
        """The logits and the factor of a product or quotient, whichever comes first."""
        a, b = node.args[:2]
        return (b, a) if node.target is aten.mul.Tensor and a not in self.dependents else (a, b)

    def spans(self, arg: Node, node: Node, dim: int) -> bool:
        d = dim - (rank(node) - rank(arg))
        return d >= 0 and same(shape(arg)[d], shape(node)[dim])

    def is_row_constant(self, arg: Any, node: Node, dim: int) -> bool:
        if not isinstance(arg, Node):
            return isinstance(arg, (int, float))
        if not isinstance(arg.meta["val"], torch.Tensor):
            return True
        d = dim - (rank(node) - rank(arg))
        return d < 0 or same(shape(arg)[d], 1)

    def is_row_statistic(self, arg: Any, node: Node, dim: int) -> bool:
        """A constant per row computed from the logits: a maximum, a log-sum-exp."""
        if not isinstance(arg, Node) or arg not in self.dependents or node in self.sharded:
            return False
        return self.is_row_constant(arg, node, dim)

    def is_positive_row_constant(self, arg: Any, node: Node, dim: int) -> bool:
        """A sum of exponentials over the vocabulary, perhaps clamped from below, per row."""
        if not self.is_row_statistic(arg, node, dim):
            return False
        passable = {aten.clamp_min.default, aten.clamp.default, aten.unsqueeze.default}
        while is_identity(arg) or arg.target in passable or _is_wide_cast(arg):
            if arg.target is aten.clamp.default and len(arg.args) > 2:
                return False
            arg = arg.args[0]
        if arg.target is not aten.sum.dim_IntList or arg not in self.dependents:
            return False
        source = arg.args[0]
        dims = {d % rank(source) for d in arg.args[1]}
        return rank(source) == rank(node) and dims == {dim} and self.is_weight(source, dim)

    def peels(self, node: Any, dim: int) -> bool:
        """Whether the `logit` walk from ``node`` will drop a row constant before it reaches an ordinary value."""
        if not isinstance(node, Node) or node not in self.dependents or node is self.linear.node:
            return False
        if is_identity(node) or is_float_cast(node):
            return self.peels(node.args[0], dim)
        gather = match_gather(node, dim)
        if gather is not None:
            return self.peels(gather.inner, dim)
        step = self.step(node, dim)
        if step is not None:
            return self.peels(step.source, step.dim_in)
        if node.target in (aten.sub.Tensor, aten.add.Tensor):
            return self.shifted(node, dim) is not None or self.biased(node, dim) is not None
        if node.target is aten.log.default:
            return self.is_weight(node.args[0], dim)
        if node.target in (aten.mul.Tensor, aten.div.Tensor):
            x, factor = self.scaled(node)
            if not isinstance(x, Node) or not same_shape(x, node):
                return False
            return self.is_row_constant(factor, node, dim) and self.peels(x, dim)
        where = self.where_constant(node, -math.inf)
        return where is not None and self.peels(where[1], dim)

    def where_constant(self, node: Node, number: float) -> tuple[Any, Node, bool] | None:
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


def _is_wide_cast(node: Node) -> bool:
    """To a dtype with float32's range: a sum of exponentials becomes infinite in float16, and zero as an integer."""
    return node.target in CASTS and node.meta["val"].dtype in (torch.bfloat16, torch.float32, torch.float64)


def _is_bool(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool
