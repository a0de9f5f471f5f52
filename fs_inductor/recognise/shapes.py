"""Row selections and reshapes between the linear and the sink.

Each such op is walked backwards (where does the vocabulary dimension come from?) and later replayed on a tensor that
stands in for the logits with another size in that dimension: the hidden states, or an epilogue operand. That is how
``lm_head(h)[:, -1]`` ends up multiplying only the rows that are sampled.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .miss import Miss

aten = torch.ops.aten
prims = torch.ops.prims

# `call(target, *args)` appends a node to the graph; building.GraphEditor provides it.
Call = Callable[..., Node]
# A dimension and its size.
Narrowed = tuple[int, int] | None

VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
RESHAPES = VIEWS | {aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims}
IDENTITY = {aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default}


@dataclass(frozen=True)
class ShapeStep:
    """One shape op, with the position of the vocabulary dimension in its input and in its output."""

    node: Node
    dim_in: int
    dim_out: int

    @property
    def source(self) -> Node:
        """The step's input."""
        return self.node.args[0]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes that the step consists of."""
        return (self.node,)

    @property
    def slices_vocab(self) -> bool:
        return self.node.target is aten.slice.Tensor and self._slice_dim() == self.dim_in

    def bounds(self) -> tuple[Any, Any, Any]:
        """Start, end and stride of a slice."""
        return _arg(self.node, 2, "start") or 0, _arg(self.node, 3, "end"), _arg(self.node, 4, "step", 1)

    def _slice_dim(self) -> int:
        return _arg(self.node, 1, "dim", 0) % rank(self.node.args[0])

    def replay(self, call: Call, x: Node, spans_vocab: bool, narrowed: Narrowed = None) -> Node:
        """The same op on ``x``, whose dimension ``dim_in`` may have another size.

        ``spans_vocab`` says whether that dimension still runs over the vocabulary, so that a slice of it applies.
        ``narrowed`` is a dimension of the output that has another size too, since it lacks the other heads, and that
        size, or -1 where it is not known.
        """
        target, args = self.node.target, self.node.args
        if self.slices_vocab and not spans_vocab:
            return x
        if target in VIEWS:
            sizes: list[Any] = []
            for i, size in enumerate(shape(self.node)):
                if i == self.dim_out:
                    sizes.append(size_of(call, x, self.dim_in))
                elif narrowed is not None and i == narrowed[0]:
                    sizes.append(narrowed[1])
                else:
                    sizes.append(size if isinstance(size, int) else args[1][i])
            if sum(isinstance(size, int) and size == -1 for size in sizes) > 1:
                raise _layout_miss(self.node, "gives several dimensions sizes that are not known at compile time")
            return call(aten.reshape.default, x, sizes)
        if target is aten.squeeze.default:
            # Named dimensions only: the stand-in may have size 1 where the logits have the vocabulary.
            sizes = shape(args[0])
            return call(aten.squeeze.dims, x, [d for d in range(len(sizes)) if d != self.dim_in and same(sizes[d], 1)])
        if target is aten.expand.default:
            sizes = list(args[1])
            sizes[self.dim_out] = -1
            if narrowed is not None:
                sizes[narrowed[0]] = -1
            return call(aten.expand.default, x, sizes)
        return call(target, x, *args[1:], **self.node.kwargs)


@dataclass(frozen=True)
class PieceStep(ShapeStep):
    """One of the tensors that ``split``, ``chunk`` or ``unbind`` give; ``node`` is the getitem."""

    @property
    def source(self) -> Node:
        return self.node.args[0].args[0]

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.node, self.node.args[0])

    @property
    def slices_vocab(self) -> bool:
        return cut_dim(self.node.args[0]) == self.dim_in

    def bounds(self) -> tuple[Any, Any, Any]:
        return *_piece_bounds(self.node), 1

    def replay(self, call: Call, x: Node, spans_vocab: bool, narrowed: Narrowed = None) -> Node:
        cut, index = self.node.args
        if cut.target is aten.unbind.int:
            return call(aten.select.int, x, cut_dim(cut), index)
        if not self.slices_vocab:
            return call(operator.getitem, call(cut.target, x, *cut.args[1:], **cut.kwargs), index)
        return call(aten.slice.Tensor, x, self.dim_in, *_piece_bounds(self.node)) if spans_vocab else x


@dataclass(frozen=True)
class WrittenStep(ShapeStep):
    """A view read again after it was written to in place: ``select(select_scatter(base, x))`` is ``x``."""

    parts: tuple[Node, ...] = ()

    @property
    def source(self) -> Node:
        return self.parts[-1].args[1]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """With what was written over, as far as nobody else reads it."""
        found = list(self.parts)
        for scatter in [part for part in self.parts if part.target in _WRITES.values()]:
            base = scatter.args[0]
            while _is_passed(base) or base.target in _WRITES.values():
                if any(user not in found for user in base.users):
                    break
                found.append(base)
                base = base.args[0]
        return tuple(found)

    @property
    def slices_vocab(self) -> bool:
        return False

    def replay(self, call: Call, x: Node, spans_vocab: bool, narrowed: Narrowed = None) -> Node:
        return x


@dataclass(frozen=True)
class ViewStep(ShapeStep):
    """Several views, one after another, that leave the vocabulary alone together: it is merged and split again."""

    inner: Node | None = None
    parts: tuple[Node, ...] = ()

    @property
    def source(self) -> Node:
        return self.inner

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.parts


def view_step(node: Node, dim: int) -> ShapeStep | None:
    """The views that end at ``node``, as one; None if no number of them leaves the vocabulary alone."""
    parts, inner = [node], node.args[0]
    while True:
        source = view_source(shape(inner), shape(node), dim)
        if source is not None:
            plain = len(parts) == 1
            return ShapeStep(node, source, dim) if plain else ViewStep(node, source, dim, inner, tuple(parts))
        if not isinstance(inner, Node) or not (inner.target in VIEWS or is_identity(inner)):
            return None
        parts.append(inner)
        inner = inner.args[0]


def view_source(before: tuple, after: tuple, dim: int) -> int | None:
    """Which dimension of ``before`` is dimension ``dim`` of ``after``, its view; None if it is a part or a product."""
    for i in reversed(range(len(before))):
        if same(before[i], after[dim]) and same(math.prod(before[i + 1 :]), math.prod(after[dim + 1 :])):
            return i
    return None


CUTS = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}


def is_piece(node: Any) -> bool:
    return isinstance(node, Node) and node.target is operator.getitem and node.args[0].target in CUTS


def cut_dim(cut: Node) -> int:
    position = 1 if cut.target is aten.unbind.int else 2
    return _arg(cut, position, "dim", 0) % rank(cut.args[0])


def _piece_bounds(piece: Node) -> tuple[int, int]:
    """Start and end of the part of the vocabulary that ``piece`` is."""
    cut, index = piece.args
    sizes = cut.args[1] if cut.target is aten.split_with_sizes.default else [cut.args[1]] * (index + 1)
    if not all(isinstance(size, int) for size in sizes[: index + 1]):
        raise _layout_miss(cut, "cuts at places that are not known at compile time")
    start = sum(sizes[:index])
    return start, start + sizes[index]


def shape(node: Any) -> tuple:
    return tuple(node.meta["val"].shape)


def rank(node: Any) -> int:
    return node.meta["val"].dim()


def same(a: Any, b: Any) -> bool:
    """Whether two sizes are known to be equal, without adding a guard."""
    return a is b or statically_known_true(a == b)


def same_shape(a: Any, b: Any) -> bool:
    if not all(isinstance(x.meta["val"], torch.Tensor) for x in (a, b)):
        return False  # a symbolic number
    sa, sb = shape(a), shape(b)
    return len(sa) == len(sb) and all(same(x, y) for x, y in zip(sa, sb, strict=True))


def size_of(call: Call, node: Node, dim: int) -> Any:
    size = shape(node)[dim]
    return size if isinstance(size, int) else call(aten.sym_size.int, node, dim)


def is_identity(node: Node) -> bool:
    """Ops that hand their input through: clones, and the no-op slices that dynamic shapes leave behind."""
    if node.target in IDENTITY:
        return True
    if node.target in (aten.slice.Tensor, aten.expand.default, aten.view.default, aten.reshape.default):
        return isinstance(node.args[0], Node) and same_shape(node, node.args[0])
    return False


def step_back(node: Node, dim: int) -> ShapeStep | None:
    """The shape op at ``node`` with its vocabulary dimension traced to the input; None if ``node`` is no shape op."""
    if is_piece(node):
        cut = node.args[0]
        if cut.target is aten.unbind.int:
            return PieceStep(node, dim + (dim >= cut_dim(cut)), dim)
        if cut_dim(cut) == dim:
            _piece_bounds(node)
        return PieceStep(node, dim, dim)
    written = _written(node)
    if written:
        return WrittenStep(node, dim, dim, written)
    trace = _BACK.get(node.target)
    return None if trace is None else ShapeStep(node, trace(node, dim), dim)


_WRITES = {aten.select.int: aten.select_scatter.default, aten.slice.Tensor: aten.slice_scatter.default}


def _written(node: Node) -> tuple[Node, ...]:
    """If ``node`` takes out of a tensor just what was put there: the nodes back to the scatter; else nothing."""
    if node.target not in _WRITES or not isinstance(node.args[0], Node):
        return ()
    parts, behind = [node], node.args[0]
    # Functionalisation goes by the shape of the base, such as the matrix product's, and back; views nest.
    while behind.target is not _WRITES[node.target]:
        inner = _written(behind) or (behind,)
        if len(inner) == 1 and not _is_passed(behind):
            return ()
        parts += inner
        behind = inner[-1].args[0 if len(inner) == 1 else 1]
    if not same_shape(behind, node.args[0]) or _place(node, 1) != _place(behind, 2):
        return ()
    if behind.args[1].meta["val"].dtype != behind.meta["val"].dtype:
        return ()  # writing has cast it
    return *parts, behind


def _is_passed(node: Node) -> bool:
    return isinstance(node.args[0] if node.args else None, Node) and (node.target in VIEWS or is_identity(node))


def _place(node: Node, position: int) -> tuple:
    """Where a select or slice, or its scatter, reads or writes: the arguments from ``position`` on."""
    dim = _arg(node, position, "dim", 0) % rank(node.args[0])
    if node.target in (aten.select.int, aten.select_scatter.default):
        return dim, _arg(node, position + 1, "index")
    end = _arg(node, position + 2, "end")
    start, step = _arg(node, position + 1, "start") or 0, _arg(node, position + 3, "step", 1)
    return dim, start, sys.maxsize if end is None else end, step


def _arg(node: Node, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _layout_miss(node: Node, what: str) -> Miss:
    return Miss(
        "LAYOUT",
        f"{node.target} {what}, so the token ids no longer run along one dimension of the linear's output",
        "select rows, not parts of the vocabulary, between the LM head and the sampling",
        node,
    )


def _view(node: Node, dim: int) -> int:
    source = view_source(shape(node.args[0]), shape(node), dim)
    if source is not None:
        return source
    raise _layout_miss(node, "splits or merges the vocabulary dimension")


def _permute(node: Node, dim: int) -> int:
    return node.args[1][dim] % rank(node)


def _transpose(node: Node, dim: int) -> int:
    a, b = (d % rank(node) for d in node.args[1:3])
    return {a: b, b: a}.get(dim, dim)


def _unsqueeze(node: Node, dim: int) -> int:
    new = node.args[1] % rank(node)
    if dim == new:
        raise _layout_miss(node, "adds the dimension that is sampled")
    return dim - (dim > new)


def _squeeze(node: Node, dim: int) -> int:
    sizes = shape(node.args[0])
    dims = _arg(node, 1, "dim", list(range(len(sizes))))
    dims = [d % len(sizes) for d in ([dims] if isinstance(dims, int) else dims)]
    kept = [d for d, size in enumerate(sizes) if d not in dims or not same(size, 1)]
    if len(kept) != rank(node):
        raise _layout_miss(node, "squeezes a dimension of unknown size")
    return kept[dim]


def _select(node: Node, dim: int) -> int:
    return dim + (dim >= node.args[1] % rank(node.args[0]))


def _slice(node: Node, dim: int) -> int:
    return dim


def _index_select(node: Node, dim: int) -> int:
    if node.args[1] % rank(node) == dim:
        raise _layout_miss(node, "gathers parts of the vocabulary")
    return dim


def _expand(node: Node, dim: int) -> int:
    source = dim - (rank(node) - rank(node.args[0]))
    if source < 0 or not same(shape(node.args[0])[source], shape(node)[dim]):
        raise _layout_miss(node, "repeats along the dimension that is sampled")
    return source


def _index(node: Node, dim: int) -> int:
    """Advanced indexing of row dimensions. Adjacent index tensors leave their result in place."""
    indices = node.args[1]
    used = [i for i, index in enumerate(indices) if index is not None]
    index_vals = [indices[i].meta["val"] for i in used]
    if any(v.dtype in (torch.bool, torch.uint8) for v in index_vals):
        raise _layout_miss(node, "selects rows by a mask, whose number is not known")
    if used != list(range(used[0], used[-1] + 1)):
        raise _layout_miss(node, "indexes dimensions that are not adjacent")
    out_rank = max(v.dim() for v in index_vals)
    if used[0] <= dim < used[0] + out_rank:
        raise _layout_miss(node, "samples along an index")
    source = dim if dim < used[0] else dim - out_rank + len(used)
    if source in used:
        raise _layout_miss(node, "gathers parts of the vocabulary")
    return source


_BACK: dict[Any, Callable[[Node, int], int]] = {
    aten.view.default: _view,
    aten.reshape.default: _view,
    aten._unsafe_view.default: _view,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.expand.default: _expand,
}
SHAPE_TARGETS = set(_BACK) | IDENTITY | CUTS
# What may give a row more than once.
REPEATING = {aten.index.Tensor, aten.index_select.default, aten.expand.default}
