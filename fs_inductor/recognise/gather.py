"""Tensor parallelism: the all-gather that joins the logits of a vocabulary sharded over ranks.

DTensor and functional collectives spell it ``(pad) -> all_gather_into_tensor -> wait_tensor -> split -> cat(dim)``, or,
where there is one row, a view in place of split and cat. ``torch.distributed``'s own collectives add a copy to their
output, and engines move the dimension of ranks before the vocabulary's and merge the two. The gather becomes a step of
the site's path that moves nothing: rows are the same on both of its sides, and the vocabulary is one rank's shard on
one side, whole on the other.

What is recognised, and so what is fused, depends on facts that are equal on all ranks.
"""

from __future__ import annotations

import math
import operator
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .miss import Miss
from .shapes import (
    RESHAPES,
    VIEWS,
    Call,
    Narrowed,
    PieceStep,
    ShapeStep,
    cut_dim,
    is_identity,
    rank,
    same,
    same_shape,
    shape,
)

aten = torch.ops.aten
prims = torch.ops.prims
collectives = torch.ops._c10d_functional

ALL_GATHER = (collectives.all_gather_into_tensor.default,)
_WAIT = (collectives.wait_tensor.default,)
GATHER_TARGETS = {
    *ALL_GATHER,
    *_WAIT,
    aten.split.Tensor,
    aten.cat.default,
    aten.constant_pad_nd.default,
    aten.copy.default,
}
_EMPTY = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default}


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
    parts: list[Node] = [node]
    if node.target is aten.cat.default:
        gathered = _joined(node, dim, parts)
    elif node.target in VIEWS:
        gathered = _one_row(node, dim, parts) or _moved(node, dim, parts)
    else:
        return None
    if gathered is None:
        return None
    inner = gathered.args[0]
    capacity = shape(inner)[dim]
    if not isinstance(capacity, int):
        raise _layout(node, "gathers shards of a size that is not known at compile time")
    while inner.target in (aten.constant_pad_nd.default, aten.clone.default):
        if inner.target is aten.constant_pad_nd.default:
            _check_padding(inner, dim)
        parts.append(inner)
        inner = inner.args[0]
    return GatherStep(node, dim, dim, capacity, gathered.args[1], gathered.args[2], inner, tuple(parts))


def _joined(node: Node, dim: int, parts: list[Node]) -> Node | None:
    """The gather of ``cat`` over the ranks' pieces, which are split off or sliced out of what was gathered."""
    pieces = list(node.args[0])
    in_order, gathered = True, None
    for i, piece in enumerate(pieces):
        cut = piece = _uncopied(piece, parts)
        if piece.target is operator.getitem and piece.args[0].target is aten.split.Tensor:
            parts.append(piece)
            cut = piece.args[0]
            along = cut.args[2] if len(cut.args) > 2 else 0
            in_order &= piece.args[1] == i and along == 0
        elif piece.target is aten.slice.Tensor:
            along, start = (*piece.args[1:3], 0, 0)[:2]
            in_order &= along == 0 and same(_number(start), i * shape(piece)[0])
        else:
            return None
        parts.append(cut)
        source = _gathered(cut.args[0], parts)
        if source is None or gathered not in (None, source):
            return None
        gathered = source
    joined = (node.args[1] if len(node.args) > 1 else 0) % rank(node)
    if gathered is None or not in_order or len(pieces) != gathered.args[1]:
        raise _layout(node, "puts the shards together in an order of its own")
    if not all(same_shape(piece, gathered.args[0]) for piece in pieces):
        raise _layout(node, "cuts the gathered tensor elsewhere than between ranks")
    if joined != dim:
        raise _layout(node, "gathers rows, not the vocabulary")
    return gathered


def _one_row(node: Node, dim: int, parts: list[Node]) -> Node | None:
    """The gather of a view of one row, whose shards lie behind each other already."""
    gathered = _gathered(node.args[0], found := [])
    if gathered is None or rank(node) != rank(gathered.args[0]):
        return None
    local = shape(gathered.args[0])
    if not same(math.prod(local[:dim] + local[dim + 1 :]), 1) or not same(shape(node)[dim], math.prod(shape(found[0]))):
        return None
    parts += found
    return gathered


def _moved(node: Node, dim: int, parts: list[Node]) -> Node | None:
    """The gather of ``view(world, *local).movedim(0, dim).reshape(...)``: how engines gather along a dimension."""
    found, moved = [], node.args[0]
    while isinstance(moved, Node) and moved.target is aten.clone.default:
        found.append(moved)
        moved = moved.args[0]
    if not isinstance(moved, Node) or moved.target is not aten.permute.default or moved.args[0].target not in VIEWS:
        return None
    found += [moved, moved.args[0]]
    gathered = _gathered(moved.args[0].args[0], found)
    if gathered is None:
        return None
    local = shape(gathered.args[0])
    apart = (gathered.args[1], *local)
    whole = (*local[:dim], gathered.args[1] * local[dim], *local[dim + 1 :]) if dim < len(local) else ()
    order = [*range(1, dim + 1), 0, *range(dim + 1, len(apart))]
    if not _sizes(moved.args[0], apart) or list(moved.args[1]) != order or not _sizes(node, whole):
        raise _layout(node, "puts the shards together in an order of its own")
    parts += found
    return gathered


def _gathered(node: Any, parts: list[Node]) -> Node | None:
    """The all-gather that ``node`` is the awaited result of, copied perhaps; adds what lies between to ``parts``."""
    found: list[Node] = []
    wait = _uncopied(node, found)
    if not isinstance(wait, Node) or wait.target not in _WAIT or not _is_gather(wait.args[0]):
        return None
    parts += [*found, wait, wait.args[0]]
    return wait.args[0]


def _uncopied(node: Any, parts: list[Node]) -> Any:
    """What was copied into ``node``: collectives that write to their output become a copy to it."""
    while isinstance(node, Node) and node.target is aten.copy.default:
        source = node.args[1]
        if not same_shape(node, source) or node.meta["val"].dtype != source.meta["val"].dtype:
            break
        parts += [node, *([node.args[0]] if node.args[0].target in _EMPTY else [])]
        node = source
    return node


def _number(size: Any) -> Any:
    return size.meta["val"] if isinstance(size, Node) else size


def _sizes(node: Node, sizes: tuple) -> bool:
    return rank(node) == len(sizes) and all(same(a, b) for a, b in zip(shape(node), sizes, strict=True))


def gather_of(path: tuple[ShapeStep, ...]) -> GatherStep | None:
    """The gather of a site's path, if it has one.

    Raises:
        Miss: TP_LAYOUT, if there are two, if the vocabulary is sliced but for the padding at its end, or if what
            follows the gather may be other rows on every rank.
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
    for step in path[path.index(gathers[0]) + 1 :]:
        if not step.slices_vocab and _numbers_rows(step):
            # A rank that keeps rows of its own would compare its winners with those of other rows.
            raise _layout(
                step.node,
                "picks rows by their number after the gather, and the numbers may be the rank's own",
                "pick the rows of the hidden states, before the LM head, or the last of them, as [:, -1] does",
            )
    return gathers[0]


def _numbers_rows(step: ShapeStep) -> bool:
    """Whether the graph says by number which rows the step keeps; the last of a dimension is any rank's."""
    node, sizes = step.node, shape(step.source)
    if isinstance(step, PieceStep):
        return not same(sizes[cut_dim(node.args[0])], 1)
    if node.target is aten.select.int:
        dim, index = node.args[1:3]
        return index != -1 and not same(sizes[dim], 1)
    if node.target is aten.slice.Tensor:
        start, end, stride = step.bounds()
        return start != -1 or stride != 1 or end not in (None, sys.maxsize)
    if node.target is aten.index.Tensor:
        return any(_is_constant(index) for index in node.args[1] if index is not None)
    return node.target is aten.index_select.default and _is_constant(node.args[2])


def _is_constant(index: Node) -> bool:
    """Whether the graph itself makes ``index``, and not as 0, 1, 2, ...; a tensor that is passed in is data."""
    stack, seen = [index], set()
    while stack:
        node = stack.pop()
        if node.op == "placeholder":
            return False
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    plain = [node for node in seen if node.target is prims.iota.default]
    moved = [node for node in seen if node not in plain and not is_identity(node) and node.target not in RESHAPES]
    counts = all(node.kwargs.get("start", 0) == 0 and node.kwargs.get("step", 1) == 1 for node in plain)
    return not plain or bool(moved) or not counts


def _is_gather(node: Any) -> bool:
    return isinstance(node, Node) and node.target in ALL_GATHER


def _check_padding(pad: Node, dim: int) -> None:
    amounts = list(pad.args[1])
    last = rank(pad) - 1
    for i, amount in enumerate(amounts):
        if amount != 0 and (last - i // 2 != dim or i % 2 == 0):
            raise _layout(pad, "pads elsewhere than at the end of the vocabulary")


_GATHER_ONCE = "shard the LM head's output dimension evenly over one process group (ColwiseParallel) and gather it once"


def _layout(node: Node, what: str, hint: str = _GATHER_ONCE) -> Miss:
    return Miss("TP_LAYOUT", f"{node.target} {what}", hint, node)
