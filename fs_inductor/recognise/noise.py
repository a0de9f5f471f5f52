"""Noise that turns an argmax into a draw: exponential variables (races) and Gumbel variables, as Inductor spells them.

A guard such as ``rand + 1e-10`` or ``clamp_min(q, 1e-10)`` only keeps logarithms and quotients finite. Ours are finite
without one, so guards up to `MAX_GUARD` are read as the noise they protect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Node

from .filters import COMPARISONS, CUMULATIVE
from .miss import Miss
from .pointwise import is_float_cast
from .shapes import is_identity, rank, same, shape

aten = torch.ops.aten

MAX_GUARD = 1e-6
_UNIFORM = {aten.rand.default, aten.rand_like.default}
_RANDOM = _UNIFORM | {
    aten.uniform.default,
    aten.exponential.default,
    aten.randn.default,
    aten.randn_like.default,
    aten.normal_functional.default,
    aten.bernoulli.p,
    aten.bernoulli.default,
}
_REARRANGEMENTS = {aten.view.default, aten.reshape.default, aten.permute.default, aten.unsqueeze.default}


def is_random(node: Any) -> bool:
    return isinstance(node, Node) and node.target in _RANDOM


def inverse_cdf_miss(region: Iterable[Node]) -> Miss | None:
    """The miss for a draw of the first id whose running sum passes a random number; None if ``region`` has none."""
    for node in region:
        if node.target not in COMPARISONS:
            continue
        # The running sum and the random number stand next to the comparison: there is no need to look far.
        stack, seen = [node], set()
        while stack and len(seen) < 32:
            at = stack.pop()
            if at not in seen:
                seen.add(at)
                stack.extend(() if at.target in CUMULATIVE else at.all_input_nodes)
        sums = [at for at in seen if at.target in CUMULATIVE]
        if sums and any(map(is_random, seen)):
            return Miss(
                "NOISE",
                f"{node.target} compares the running sum {sums[0].target} with a random number, an inverse-CDF draw",
                "draw with torch.multinomial(probs, 1), which is fused",
                node,
            )
    return None


def gumbel(node: Any) -> tuple[list[Node], int] | None:
    """``node = sign * Gumbel(0, 1)`` as (the nodes that make it up, sign), or None."""
    nodes: list[Node] = []
    sign = 1
    node = _strip(node, nodes)
    while _is(node, aten.neg.default) or (_is(node, aten.mul.Tensor) and node.args[1] == -1):
        nodes.append(node)
        sign, node = -sign, _strip(node.args[0], nodes)
    if not _is(node, aten.log.default):
        return None
    nodes.append(node)
    inner = exponential(node.args[0])
    return None if inner is None else (nodes + inner, -sign)


def exponential(node: Any) -> list[Node] | None:
    """The nodes that make up an Exponential(1) variable at ``node``, or None."""
    nodes: list[Node] = []
    node = _strip(node, nodes, guards=_is_guard)
    if _is(node, aten.exponential.default):
        rate = node.args[1] if len(node.args) > 1 else node.kwargs.get("lambd", 1.0)
        return [*nodes, node] if rate == 1 else None
    negated = _is(node, aten.neg.default)
    if not negated and not (_is(node, aten.mul.Tensor) and node.args[1] == -1):
        return None
    nodes.append(node)
    node = _strip(node.args[0], nodes)
    if _is(node, aten.where.self):
        # Inductor's exponential_: where(u >= 1 - eps/2, -eps/2, log(u)) keeps the logarithm away from zero.
        condition, number, log = node.args
        inner = _log_uniform(log)
        threshold = condition.args[1] if _is(condition, aten.ge.Scalar) else None
        if inner is None or not isinstance(threshold, float) or not 1 - MAX_GUARD <= threshold <= 1:
            return None
        if _strip(condition.args[0], []) not in inner or not _tiny_constant(number):
            return None
        return [*nodes, node, condition, *inner]
    inner = _log_uniform(node)
    return None if inner is None else nodes + inner


def _log_uniform(node: Any) -> list[Node] | None:
    nodes: list[Node] = []
    node = _strip(node, nodes)
    if not _is(node, aten.log.default):
        return None
    nodes.append(node)
    uniform = _uniform(node.args[0])
    return None if uniform is None else nodes + uniform


def _uniform(node: Any) -> list[Node] | None:
    """The nodes of a Uniform(0, 1) variable."""
    nodes: list[Node] = []
    node = _strip(node, nodes, guards=_is_guard_of_uniform)
    if _is(node, aten.sub.Tensor, aten.rsub.Scalar) and _is_unscaled(node) and 1 in node.args:
        x = node.args[1] if node.args[0] == 1 and node.target is aten.sub.Tensor else node.args[0]
        flipped = node.args[0] == 1 if node.target is aten.sub.Tensor else True
        if not flipped:
            return None
        nodes.append(node)
        node = _strip(x, nodes)
    if isinstance(node, Node) and node.target in _UNIFORM:
        return [*nodes, node]
    if _is(node, aten.uniform.default):
        low = node.args[1] if len(node.args) > 1 else node.kwargs.get("from", 0.0)
        high = node.args[2] if len(node.args) > 2 else node.kwargs.get("to", 1.0)
        if 0 <= low <= MAX_GUARD and 1 - MAX_GUARD <= high <= 1:
            return [*nodes, node]
    return None


def _strip(node: Any, nodes: list[Node], guards: Callable[[Node], bool] | None = None) -> Any:
    """Passes casts, rearrangements of independent elements and what ``guards`` accepts."""
    while isinstance(node, Node):
        if is_identity(node) or node.target in _REARRANGEMENTS or is_dense_view(node) or is_float_cast(node):
            pass
        elif guards is not None and guards(node):
            pass
        else:
            break
        nodes.append(node)
        node = node.args[0]
    return node


def is_dense_view(node: Node) -> bool:
    """`as_strided` of a flat tensor to a contiguous one of as many elements, as torch 2.14 spells `uniform_`."""
    if node.target is not aten.as_strided.default or rank(node.args[0]) != 1:
        return False
    offset = list(node.args[3:])
    elements = 1
    for n, step in zip(reversed(shape(node)), reversed(node.meta["val"].stride()), strict=True):
        if not same(step, elements) and not same(n, 1):
            return False
        elements = elements * n
    return offset in ([], [0], [None]) and same(elements, shape(node.args[0])[0])


def _is_unscaled(node: Node) -> bool:
    """Whether an addition or subtraction has no ``alpha``."""
    return len(node.args) == 2 and not node.kwargs


def _is_guard(node: Node) -> bool:
    """A tiny addition, a factor next to one, a tiny lower bound."""
    if node.target is aten.add.Tensor:
        return _is_unscaled(node) and _between(node.args[1], 0, MAX_GUARD)
    if node.target is aten.mul.Tensor:
        return _between(node.args[1], 1 - MAX_GUARD, 1)
    low, high = _bounds(node)
    return low is not None and high is None and _between(low, 0, MAX_GUARD)


def _is_guard_of_uniform(node: Node) -> bool:
    """The same, and bounds next to zero and one: an exponential variable must not be cut off at one."""
    low, high = _bounds(node)
    if high is None:
        return _is_guard(node)
    return _between(high, 1 - MAX_GUARD, 1) and (low is None or _between(low, 0, MAX_GUARD))


def _bounds(node: Node) -> tuple[Any, Any]:
    args = dict(enumerate(node.args)) | node.kwargs
    if node.target is aten.clamp_min.default:
        return args.get(1, args.get("min")), None
    if node.target is aten.clamp_max.default:
        return None, args.get(1, args.get("max"))
    if node.target is aten.clamp.default:
        return args.get(1, args.get("min")), args.get(2, args.get("max"))
    return None, None


def _between(number: Any, low: float, high: float) -> bool:
    return isinstance(number, (int, float)) and low <= number <= high


def _tiny_constant(node: Any) -> bool:
    value = node.args[0] if _is(node, aten.scalar_tensor.default) else node
    return isinstance(value, float) and -MAX_GUARD <= value < 0


def _is(node: Any, *targets: Any) -> bool:
    return isinstance(node, Node) and node.target in targets
