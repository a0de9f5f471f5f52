"""Several rows of one product on the way to one token, as classifier-free guidance mixes two: what to do instead.

A linear layer commutes with sums and scales of rows, so that such a mix may be made of the hidden states, and is fused
then. Behind a softcap, a mask or anything else that is not linear that is not promised.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from .gather import GATHER_TARGETS
from .linear import Linear
from .miss import Miss
from .pointwise import is_float_cast
from .shapes import SHAPE_TARGETS, is_piece, rank, same, shape

aten = torch.ops.aten

_SUMS = {aten.add.Tensor, aten.sub.Tensor}
_SCALES = {aten.mul.Tensor, aten.div.Tensor}


def mixed_rows(node: Node, linear: Linear, dependents: set[Node]) -> Miss:
    """The miss for ``node``, which reaches the sink by two ways that take different rows of it.

    dependents: the nodes between the product and the sink.
    """
    mix = _meeting(node, dependents)
    culprit = None if mix is None else _first_not_linear(linear, mix, dependents)
    hint = "select the rows once, right after the LM head, or keep the site unfused"
    if culprit is not None:
        hint += f": {culprit.target} is not linear, so hidden states that were mixed need not give the same logits"
    elif mix is not None:
        biased = linear.node.target is aten.addmm.default
        which = "a mix of rows whose weights add up to one" if biased else "a weighted sum of rows"
        hint = (
            f"mix hidden states, not logits: {which} can be made before the LM head, up to rounding; guidance is "
            "lm_head(u + s * (c - u)) then, of hidden states c and u"
        )
    return Miss("LAYOUT", f"{node.target} reaches the sink by two ways that select different rows", hint, node)


def _meeting(node: Node, dependents: set[Node]) -> Node | None:
    """The first node with several inputs that all ways from ``node`` to the sink go through; None if none is."""
    reached = {node}
    for each in node.graph.nodes:
        if each in dependents and reached.intersection(each.all_input_nodes):
            reached.add(each)
    order = {each: i for i, each in enumerate(node.graph.nodes)}
    last_use = 0
    for each in sorted(reached, key=order.__getitem__):
        inputs = reached.intersection(each.all_input_nodes)
        if len(inputs) > 1 and last_use <= order[each]:
            return each
        last_use = max([last_use, *(order[user] for user in each.users if user in reached)])
    return None


def _first_not_linear(linear: Linear, mix: Node, dependents: set[Node]) -> Node | None:
    """The first node from the product to ``mix``, included, that does more than to select, add and scale rows."""
    needed = {mix}
    for node in reversed(mix.graph.nodes):
        if node in needed and node is not linear.node:
            needed.update(set(node.all_input_nodes) & dependents)
    between = (node for node in mix.graph.nodes if node in needed and node is not linear.node)
    return next((node for node in between if not _is_linear(node, dependents)), None)


def _is_linear(node: Node, dependents: set[Node]) -> bool:
    if node.target in SHAPE_TARGETS | GATHER_TARGETS or node.target is aten.neg.default or is_piece(node):
        return True  # a gather's padding is zeros, or stays with ids that nobody samples
    if is_float_cast(node):
        return True
    if node.target in _SUMS:
        return all(arg in dependents for arg in node.args[:2])
    if node.target in _SCALES:
        x, factor = node.args[:2]
        if node.target is aten.mul.Tensor and x not in dependents:
            x, factor = factor, x
        return x in dependents and factor not in dependents and _is_one_a_row(factor, node)
    return False


def _is_one_a_row(factor: Any, node: Node) -> bool:
    if not isinstance(factor, Node) or not isinstance(factor.meta["val"], torch.Tensor) or rank(factor) == 0:
        return True
    return same(shape(factor)[-1], 1) and not same(shape(node)[-1], 1)
