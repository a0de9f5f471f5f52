"""Stacked heads: logits of K codebooks beside each other, sampled by one sink.

They come from one linear of K * V outputs, viewed as ``[..., K, V]``, or from K linears whose logits are stacked. Such
a sink is K sites, one a head: a `HeadStep` on each one's path says which head it is, and a `Stack` where the heads lie
in every tensor between there and the sink, so that each head's rows and operands can be found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .linear import stacked_pieces
from .miss import Miss
from .shapes import (
    VIEWS,
    Call,
    Narrowed,
    PieceStep,
    ShapeStep,
    WrittenStep,
    aten,
    cut_dim,
    is_identity,
    rank,
    same,
    shape,
    size_of,
    view_step,
)

_HINT = "stack the heads once, right after the LM heads, as [..., K, V] or [..., K * rows, V]"


class Place(NamedTuple):
    """Where the heads lie: dimension ``dim`` has size outer * K * inner, heads in the middle."""

    dim: int
    inner: Any


@dataclass(frozen=True)
class HeadStep(ShapeStep):
    """The logits of one of ``heads`` heads in the place of all. ``node``, a view or a cat, puts them together.

    head: which one. inner: the input; parts: all nodes of the step. place: where the heads lie in the output.
    whole: the input has the logits of all heads along its vocabulary dimension, not those of one head.
    """

    heads: int = 0
    head: int = 0
    inner: Node | None = None
    parts: tuple[Node, ...] = ()
    place: Place | None = field(default=None, compare=False)  # sizes may be symbolic, which have no hash
    whole: bool = False

    @property
    def source(self) -> Node:
        return self.inner

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.parts

    @property
    def slices_vocab(self) -> bool:
        return self.whole

    def bounds(self) -> tuple[Any, Any, Any]:
        vocab = shape(self.node)[self.dim_out]
        return self.head * vocab, (self.head + 1) * vocab, 1

    def replay(self, call: Call, x: Node, spans_vocab: bool, narrowed: Narrowed = None) -> Node:
        if self.node.target is aten.cat.default:
            return x
        if self.whole and spans_vocab:
            x = call(aten.slice.Tensor, x, self.dim_in, *self.bounds())
        sizes = [size if isinstance(size, int) else self.node.args[1][i] for i, size in enumerate(shape(self.node))]
        rows = shape(self.node)[self.place.dim]
        sizes[self.place.dim] = rows // self.heads if isinstance(rows, int) else -1
        sizes[self.dim_out] = size_of(call, x, self.dim_in)
        if sum(isinstance(size, int) and size == -1 for size in sizes) > 1:
            raise _layout(self.node, "gives several dimensions sizes that are not known at compile time")
        return call(aten.reshape.default, x, sizes)


@dataclass(frozen=True)
class Stack:
    """A site's place among its sink's heads.

    places: where the heads lie after each number of steps of the path; None where there is only this head.
    chosen: a later step picks this head, so that the sink has no other.
    """

    heads: int
    head: int
    places: tuple[Place | None, ...]
    chosen: bool


class OtherHead(Miss):
    """The walk went into one head, but a later step picks another."""

    def __init__(self, node: Node, head: int):
        super().__init__("LAYOUT", f"{node.target} stacks heads of which only number {head} is used", _HINT, node)
        self.head = head


def head_step(node: Node, dim: int, head: int, dependents: set[Node]) -> ShapeStep | None:
    """The step that puts heads together at ``node``, whose vocabulary lies along ``dim``; None if none does.

    dependents: what is computed from one head's product, where each head has its own; ``head`` counts where one
    product has them all.
    """
    if node.target is aten.cat.default:
        joined = cat_dim(node)
        own = _own_piece(node, dependents)
        if own is None or joined == dim:
            return None
        piece = node.args[0][own]
        place = Place(joined, shape(piece)[joined])
        return HeadStep(node, dim, dim, len(node.args[0]), own, piece, (node,), place)
    if node.target not in VIEWS:
        return None
    plain = view_step(node, dim)
    if plain is not None:
        return plain
    before, after = shape(node.args[0]), shape(node)
    vocab, rest = after[dim], math.prod(after[dim + 1 :])
    sources = [i for i in range(len(before)) if same(math.prod(before[i + 1 :]), rest)]
    if not sources:
        return None
    dim_in = sources[-1]
    if not isinstance(before[dim_in], int) or not isinstance(vocab, int) or before[dim_in] % vocab:
        return None
    heads = before[dim_in] // vocab
    apart = (*before[:dim_in], heads, vocab, *before[dim_in + 1 :])
    place = _through_view(apart, after, Place(dim_in, 1), heads)
    if place is None or place.dim == dim:
        return None
    parts, source = [node], node.args[0]
    while is_identity(source):
        parts.append(source)
        source = source.args[0]
    if source.target is aten.cat.default and cat_dim(source) == dim_in and len(source.args[0]) == heads:
        own = _own_piece(source, dependents)
        if own is not None:
            inner = source.args[0][own]
            return HeadStep(node, dim_in, dim, heads, own, inner, (*parts, source), place)
    return HeadStep(node, dim_in, dim, heads, head, node.args[0], (node,), place, whole=True)


def cat_dim(node: Node) -> int:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return dim % rank(node)


def _own_piece(cat: Node, dependents: set[Node]) -> int | None:
    own = [i for i, piece in enumerate(stacked_pieces(cat) or ()) if piece in dependents]
    return own[0] if len(own) == 1 else None


def same_places(a: Stack, b: Stack) -> bool:
    """Whether two sites of one sink have their heads stacked in one way."""
    pairs = list(zip(a.places, b.places, strict=False))
    return len(a.places) == len(b.places) and all(
        x is y is None or (x is not None and y is not None and x.dim == y.dim and same(x.inner, y.inner))
        for x, y in pairs
    )


def stack_of(path: Sequence[ShapeStep]) -> Stack | None:
    """Where the heads lie along a site's path; None where there are none.

    Raises:
        Miss: LAYOUT, for a step after which the heads cannot be told apart.
    """
    places: list[Place | None] = [None]
    found: HeadStep | None = None
    for step in path:
        if isinstance(step, HeadStep):
            if found is not None:
                raise _layout(step.node, "stacks heads a second time")
            found = step
            places.append(step.place)
        else:
            places.append(None if places[-1] is None else _follow(step, places[-1], found.heads))
    if found is None:
        return None
    return Stack(found.heads, found.head, tuple(places), chosen=places[-1] is None)


def chosen_head(step: HeadStep, path: Sequence[ShapeStep]) -> int | None:
    """The one head that ``path``, what follows ``step``, picks; None if it keeps them all."""
    place = step.place
    for later in path:
        if isinstance(later, HeadStep):
            raise _layout(later.node, "stacks heads a second time")
        following = _follow(later, place, step.heads)
        if following is None:
            return _index_of(later) % step.heads
        place = following
    return None


def _index_of(step: ShapeStep) -> int:
    return step.node.args[1] if isinstance(step, PieceStep) else step.node.args[2]


def _follow(step: ShapeStep, place: Place, heads: int) -> Place | None:
    """Where the heads lie after ``step``; None if it picks one of them."""
    if isinstance(step, WrittenStep):  # its node reads just what its source is
        return place
    node, (dim, inner) = step.node, place
    target, args = node.target, node.args
    if isinstance(step, PieceStep):
        cut = args[0]
        if cut_dim(cut) != dim:
            return place if cut.target is not aten.unbind.int else Place(dim - (dim > cut_dim(cut)), inner)
        if cut.target is aten.unbind.int and same(shape(cut.args[0])[dim], heads):
            return None
    elif target in VIEWS:
        following = _through_view(shape(step.source), shape(node), place, heads)
        if following is not None:
            return following
    elif target is aten.permute.default:
        return Place([d % rank(node) for d in args[1]].index(dim), inner)
    elif target is aten.transpose.int:
        a, b = (d % rank(node) for d in args[1:3])
        return Place({a: b, b: a}.get(dim, dim), inner)
    elif target is aten.unsqueeze.default:
        return Place(dim + (args[1] % rank(node) <= dim), inner)
    elif target is aten.expand.default:
        return Place(dim + rank(node) - rank(args[0]), inner)
    elif target is aten.select.int:
        removed = args[1] % rank(args[0])
        if removed != dim:
            return Place(dim - (dim > removed), inner)
        if same(shape(args[0])[dim], heads) and isinstance(args[2], int):
            return None
    elif target is aten.slice.Tensor:
        if step._slice_dim() != dim:
            return place
    elif target in (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims):
        sizes = shape(args[0])
        named = list(range(len(sizes))) if len(args) < 2 else [args[1]] if isinstance(args[1], int) else args[1]
        removed = [d % len(sizes) for d in named if same(sizes[d % len(sizes)], 1)]
        if target is aten.squeeze.default or dim not in [d % len(sizes) for d in named]:
            return Place(dim - sum(d < dim for d in removed), inner)
    elif target is aten.index.Tensor:
        used = [i for i, index in enumerate(args[1]) if index is not None]
        if dim not in used:
            return Place(dim if dim < used[0] else dim - len(used) + max(rank(args[1][i]) for i in used), inner)
    elif target is aten.index_select.default and args[1] % rank(node) != dim:
        return place
    raise _layout(node, "takes stacked heads apart in a way that is not known")


def _through_view(before: tuple, after: tuple, place: Place, heads: int) -> Place | None:
    """The heads' place after a view: the number of elements between one head and the next stays the same."""
    between = place.inner * math.prod(before[place.dim + 1 :])
    inners = [1] + [place.inner * math.prod(before[place.dim + 1 : i]) for i in range(place.dim + 1, len(before))]
    for inner in inners:
        if same(inner, 0):
            continue
        for dim in reversed(range(len(after))):
            fits = same(inner * math.prod(after[dim + 1 :]), between)
            if fits and statically_known_true(after[dim] % (heads * inner) == 0):
                return Place(dim, inner)
    return None


def _layout(node: Node, what: str) -> Miss:
    return Miss(
        "LAYOUT",
        f"{node.target} {what}",
        _HINT,
        node,
    )
