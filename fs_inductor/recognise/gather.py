"""Tensor parallelism: the all-gather that joins the logits of a vocabulary sharded over ranks.

DTensor and functional collectives spell it ``(pad) -> all_gather_into_tensor -> wait_tensor -> split -> cat(dim)``, or,
where there is one row, a view in place of split and cat. The gather becomes a step of the site's path that moves
nothing: rows are the same on both of its sides, and the vocabulary is one rank's shard on one side, whole on the other.

What is recognised, and so what is fused, depends on facts that are equal on all ranks.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .miss import Miss
from .shapes import Call, Narrowed, ShapeStep, rank, same, shape

aten = torch.ops.aten
collectives = torch.ops._c10d_functional

ALL_GATHER = (collectives.all_gather_into_tensor.default,)
_WAIT = (collectives.wait_tensor.default,)
GATHER_TARGETS = {
    *ALL_GATHER,
    *_WAIT,
    aten.split.Tensor,
    aten.cat.default,
    aten.constant_pad_nd.default,
}


@dataclass(frozen=True)
class GatherStep(ShapeStep):
    """The gather as a step of a path. ``node`` joins the shards.

    capacity: ids per rank, padding included; world: number of ranks; group: the process group's name.
    inner: the shard's logits, unpadded; parts: all nodes of the gather.
    """

    capacity: int = 0
    world: int = 0
    group: str = ""
    inner: Node | None = None
    parts: tuple[Node, ...] = ()

    slices_vocab = False

    def replay(self, call: Call, x: Node, spans_vocab: bool, narrowed: Narrowed = None) -> Node:
        return x


def match_gather(node: Node, dim: int) -> GatherStep | None:
    """The gather that ends at ``node``, whose vocabulary lies along ``dim``; None if none does.

    Raises:
        Miss: TP_LAYOUT, for a gather that joins something else than shards of the vocabulary.
    """
    if node.target is aten.cat.default:
        pieces = list(node.args[0])
        split = pieces[0].args[0] if pieces[0].target is operator.getitem else None
        if split is None or split.target is not aten.split.Tensor or split.args[0].target not in _WAIT:
            return None
        wait, parts = split.args[0], [node, *pieces, split]
        gathered = wait.args[0]
        in_order = [piece.args for piece in pieces] == [(split, i) for i in range(len(pieces))]
        joined = (node.args[1] if len(node.args) > 1 else 0) % rank(node)
        split_dim = split.args[2] if len(split.args) > 2 else 0
        if not _is_gather(gathered) or not in_order or split_dim != 0 or len(pieces) != gathered.args[1]:
            raise _layout(node, "puts the shards together in an order of its own")
        if not same(shape(pieces[0])[0], shape(gathered.args[0])[0]):
            raise _layout(node, "cuts the gathered tensor elsewhere than between ranks")
        if joined != dim:
            raise _layout(node, "gathers rows, not the vocabulary")
    elif node.target in (aten.view.default, aten.reshape.default) and node.args[0].target in _WAIT:
        # One row: the shards lie behind each other already.
        wait, parts = node.args[0], [node]
        gathered = wait.args[0]
        if not _is_gather(gathered) or rank(node) != rank(gathered.args[0]):
            return None
        local = shape(gathered.args[0])
        if not same(math.prod(local[:dim] + local[dim + 1 :]), 1) or not same(shape(node)[dim], math.prod(shape(wait))):
            return None
    else:
        return None
    inner = gathered.args[0]
    parts += [wait, gathered]
    capacity = shape(inner)[dim]
    if not isinstance(capacity, int):
        raise _layout(node, "gathers shards of a size that is not known at compile time")
    while inner.target in (aten.constant_pad_nd.default, aten.clone.default):
        if inner.target is aten.constant_pad_nd.default:
            _check_padding(inner, dim)
        parts.append(inner)
        inner = inner.args[0]
    return GatherStep(node, dim, dim, capacity, gathered.args[1], gathered.args[2], inner, tuple(parts))


def gather_of(path: tuple[ShapeStep, ...]) -> GatherStep | None:
    """The gather of a site's path, if it has one.

    Raises:
        Miss: TP_LAYOUT, if there are two, or if the vocabulary is sliced but for the padding at its end.
    """
    gathers = [step for step in path if isinstance(step, GatherStep)]
    if not gathers:
        return None
    if len(gathers) > 1:
        raise _layout(gathers[0].node, "is one of several gathers on the way to the sink")
    for step in path:
        if step.slices_vocab:
            start, _, stride = step.bounds()
            if path.index(step) < path.index(gathers[0]) or start != 0 or stride != 1:
                raise _layout(step.node, "takes a part of a sharded vocabulary")
    return gathers[0]


def _is_gather(node: Any) -> bool:
    return isinstance(node, Node) and node.target in ALL_GATHER


def _check_padding(pad: Node, dim: int) -> None:
    amounts = list(pad.args[1])
    last = rank(pad) - 1
    for i, amount in enumerate(amounts):
        if amount != 0 and (last - i // 2 != dim or i % 2 == 0):
            raise _layout(pad, "pads elsewhere than at the end of the vocabulary")


def _layout(node: Node, what: str) -> Miss:
    return Miss(
        "TP_LAYOUT",
        f"{node.target} {what}",
        "shard the LM head's output dimension evenly over one process group (ColwiseParallel) and gather it once",
        node,
    )
