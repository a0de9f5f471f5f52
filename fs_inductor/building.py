"""What a rewrite adds to a graph: nodes, and the tensors of one site's op call.

Row selections move to the hidden states, vocabulary slices to the weight, and operands follow both.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.utils import detect_fake_mode
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .recognise.gather import GatherStep
from .recognise.heads import Place
from .recognise.miss import Miss
from .recognise.program import Operand
from .recognise.shapes import ShapeStep, rank, same, shape, size_of
from .recognise.tails import Site

aten = torch.ops.aten
prims = torch.ops.prims


class GraphEditor:
    """Appends nodes with fake values before one place of a graph."""

    def __init__(self, graph: Graph, before: Node):
        self.graph = graph
        self.before = before
        self.fake_mode = detect_fake_mode([n.meta.get("val") for n in graph.nodes])
        self.added: list[Node] = []

    def call(self, target: Callable, *args: Any, **kwargs: Any) -> Node:
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(target, args, kwargs)
        self.added.append(node)  # at once: should it fail below, `undo` takes it out
        values = map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.fake_mode:
            node.meta["val"] = target(*values[0], **values[1])
        if "stack_trace" in self.before.meta:
            node.meta["stack_trace"] = self.before.meta["stack_trace"]
        return node

    def undo(self) -> None:
        for node in reversed(self.added):
            if not node.users:
                self.graph.erase_node(node)


class SiteBuilder:
    """The tensors of one site's op call: hidden states, weight, operands, and the shape of the result."""

    def __init__(self, editor: GraphEditor, site: Site, replaced: dict[Node, Node]):
        self.call = editor.call
        self.site = site
        self.replaced = replaced
        # images[k]: the hidden states after the first k shape ops of the path, D in the vocabulary's place.
        self.images = [site.linear.hidden(site.linear_dim)]
        for level in range(len(site.path)):
            self.images.append(self._replay(level, self.images[-1], spans_vocab=False))

    def hidden(self) -> Node:
        """``[B, D]``, a row for each row of the sink's input."""
        return self._rows(self.images[-1])

    def weight(self) -> Node:
        """``[V, D]``, without the rows that a vocabulary slice leaves out."""
        weight = self.site.linear.vocab_weight(self.call, self.site.linear_dim)
        return self._slice_vocab(weight, 0, self.site.path)

    def vocab(self) -> int:
        """Size of the whole vocabulary, padding of a sharded one excluded."""
        return shape(self.site.sink.args[0])[self.site.sink_dim]

    def shape_like_sink(self, tokens: Node) -> Node:
        """The op's ``[B]`` (greedy) or ``[B, n]`` (draws) result in the shape of the graph's own."""
        site = self.site
        want = site.output.meta["val"].shape
        have = shape(tokens)
        whole = self._place(len(site.path)) is None
        if whole and len(want) == len(have) and all(same(a, b) for a, b in zip(want, have, strict=True)):
            return tokens
        sizes: list[Any] = []
        if not want:
            pass  # argmax over everything
        elif site.sink.target is aten.multinomial.default:
            rows = [0] if rank(self.images[-1]) > 1 else []
            sizes = [size_of(self.call, self.images[-1], d) for d in rows] + [site.draws]
        else:
            keepdim = len(want) == rank(self.images[-1])
            for d in range(rank(self.images[-1])):
                if d != site.sink_dim:
                    sizes.append(size_of(self.call, self.images[-1], d))
                elif keepdim:
                    sizes.append(1)
        return self.call(aten.reshape.default, tokens, sizes)

    # -- steps of the path --------------------------------------------------------------------------------------------

    def _place(self, level: int) -> Place | None:
        """Where the sink's heads lie after the first ``level`` steps of the path, if it has several there."""
        return self.site.stack.places[level] if self.site.stack is not None else None

    def _replay(self, level: int, x: Node, spans_vocab: bool) -> Node:
        """Step number ``level`` of the path on ``x``, which has this head's part of what the graph has."""
        step, before, after = self.site.path[level], self._place(level), self._place(level + 1)
        if before is not None and after is None:
            return self.call(aten.select.int, x, before.dim, 0)
        if after is None:
            return step.replay(self.call, x, spans_vocab)
        size = shape(step.node)[after.dim]
        return step.replay(
            self.call, x, spans_vocab, (after.dim, size // self.site.stack.heads if isinstance(size, int) else -1)
        )

    # -- tensors in the place of the logits -------------------------------------------------------------------------

    def _rows(self, x: Node) -> Node:
        """``x``, shaped like the sink's input but for the vocabulary dimension, as a matrix of rows."""
        dim, last = self.site.sink_dim, rank(x) - 1
        if dim != last:
            x = self.call(aten.permute.default, x, [d for d in range(rank(x)) if d != dim] + [dim])
        if rank(x) == 2:
            return x
        width = size_of(self.call, x, last)
        return self.call(aten.reshape.default, x, [-1 if last else 1, width])

    def _slice_vocab(self, x: Node, dim: int, path: tuple[ShapeStep, ...]) -> Node:
        for step in path:
            if isinstance(step, GatherStep):
                break  # what follows slices the whole vocabulary, and this is one rank's shard
            if step.slices_vocab:
                x = self.call(aten.slice.Tensor, x, dim, *step.bounds())
        return x

    def operand(self, operand: Operand) -> Node:
        """A tensor broadcastable to ``[B, V]``, a row for each row of `hidden`."""
        level = len(self.site.path) - len(operand.path)
        # The token of another head may be an operand here, and that head may have been rewritten already.
        node = self._mask(operand, level) if operand.scatter else self.replaced.get(operand.node, operand.node)
        device = self.images[0].meta["val"].device
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            # An int or float that Dynamo made symbolic.
            return self.call(aten.scalar_tensor.default, node, dtype=torch.float32, device=device)
        if value.device != device:
            # A Python float that Dynamo turned into a 0-d CPU tensor: a kernel cannot follow a host pointer.
            node = self.call(prims.device_put.default, node, device)
        lead = operand.rank - rank(node)
        if self._place(level) is not None:
            node = self._narrow(node, self._place(level), lead)
        sizes = shape(node)
        vocab = operand.dim - lead
        spans_vocab = vocab >= 0 and not same(sizes[vocab], 1)
        if all(same(size, 1) for d, size in enumerate(sizes) if d != vocab):
            if not spans_vocab:
                return self.call(aten.reshape.default, node, []) if sizes else node
            if len(sizes) > 1:
                node = self.call(aten.reshape.default, node, [size_of(self.call, node, vocab)])
            return self._slice_vocab(node, 0, operand.path)
        if operand.path or operand.rank != 2 or lead:
            node = self._expand_rows(node, operand, level)
        for i, step in enumerate(operand.path, start=level):
            spans_vocab = spans_vocab and not isinstance(step, GatherStep)
            node = self._replay(i, node, spans_vocab)
        return self._rows(node)

    def _narrow(self, node: Node, place: Place, lead: int) -> Node:
        """This head's part of an operand: heads lie along ``place`` where the operand has all of them."""
        dim, head, heads = place.dim - lead, self.site.stack.head, self.site.stack.heads
        if dim < 0 or same(shape(node)[dim], 1):
            return node
        if same(place.inner, 1):
            return self.call(aten.slice.Tensor, node, dim, head, sys.maxsize, heads)
        if isinstance(place.inner, int):
            apart = [-1, heads, place.inner]
        elif same(shape(node)[dim], heads * place.inner):
            apart = [1, heads, -1]
        else:
            raise Miss(
                "LAYOUT",
                f"the heads' parts of {node.target} cannot be told apart",
                "stack the heads along a dimension of their own",
                node,
            )
        sizes = [size_of(self.call, node, d) for d in range(rank(node))]
        parts = self.call(aten.reshape.default, node, [*sizes[:dim], *apart, *sizes[dim + 1 :]])
        part = self.call(aten.select.int, parts, dim + 1, head)
        return self.call(aten.reshape.default, part, [*sizes[:dim], -1, *sizes[dim + 1 :]])

    def _expand_rows(self, node: Node, operand: Operand, level: int) -> Node:
        """All row dimensions in full, so that the shape ops apply; the vocabulary dimension stays as it is."""
        image, lead = self.images[level], operand.rank - rank(node)
        for _ in range(lead):
            node = self.call(aten.unsqueeze.default, node, 0)
        sizes = [
            -1 if d == operand.dim or same(size, shape(image)[d]) else size_of(self.call, image, d)
            for d, size in enumerate(shape(node))
        ]
        return node if all(size == -1 for size in sizes) else self.call(aten.expand.default, node, sizes)

    # -- masks of overwritten logits --------------------------------------------------------------------------------

    def _mask(self, operand: Operand, level: int) -> Node:
        """A bool tensor, True where the graph overwrites logits; it broadcasts to their shape."""
        mask = self._overwritten(operand, level)
        if rank(mask) == 1:  # the vocabulary alone, which need not be the last dimension
            for _ in range(operand.rank - 1 - operand.dim):
                mask = self.call(aten.unsqueeze.default, mask, rank(mask))
        return mask

    def _overwritten(self, operand: Operand, level: int) -> Node:
        """The same as ``[V]`` if all rows agree, else in the logits' rank."""
        node, dim = operand.node, operand.dim
        vocab = self._vocab_size(operand, level)
        if node.target is aten.index_put.default:
            indices = list(node.args[1])
            if len(indices) == 1 and indices[0].meta["val"].dtype is torch.bool and rank(indices[0]) <= operand.rank:
                mask = indices[0]
                for _ in range(operand.rank - rank(mask)):
                    mask = self.call(aten.unsqueeze.default, mask, rank(mask))
                return mask
            if len(indices) == dim + 1 and all(index is None for index in indices[:-1]):
                return self.call(aten.index_put.default, self._false([vocab]), [indices[-1]], self._true())
            return self.call(aten.index_put.default, self._false_like(level, dim, vocab), indices, self._true())
        if node.target is aten.scatter.value:
            blank = self._false_like(level, dim, vocab)
            return self.call(aten.scatter.value, blank, node.args[1], node.args[2], True)
        scatter_dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
        blank = self._false([vocab])
        if scatter_dim % operand.rank != dim:
            raise Miss(
                "EPILOGUE_OP",
                f"{node.target} overwrites whole rows of the logits",
                "overwrite entries of the vocabulary, or leave the rows out",
                node,
            )
        if node.target is aten.select_scatter.default:
            return self.call(aten.select_scatter.default, blank, self._true(), 0, node.args[3])
        bounds = node.args[3:]
        part = self.call(aten.slice.Tensor, blank, 0, *bounds)
        ones = self.call(aten.expand.default, self._true(), [size_of(self.call, part, 0)])
        return self.call(aten.slice_scatter.default, blank, ones, 0, *bounds)

    def _vocab_size(self, operand: Operand, level: int) -> Any:
        """The vocabulary's size at the operand's place: slices that come later do not count."""
        size = shape(operand.node)[operand.dim]
        if isinstance(size, int):
            return size
        weight = self.site.linear.vocab_weight(self.call, self.site.linear_dim)
        return size_of(self.call, self._slice_vocab(weight, 0, self.site.path[:level]), 0)

    def _false(self, sizes: list[Any]) -> Node:
        device = self.images[0].meta["val"].device
        return self.call(aten.full.default, sizes, False, dtype=torch.bool, device=device, pin_memory=False)

    def _true(self) -> Node:
        device = self.images[0].meta["val"].device
        return self.call(aten.full.default, [], True, dtype=torch.bool, device=device, pin_memory=False)

    def _false_like(self, level: int, dim: int, vocab: Any) -> Node:
        image, place = self.images[level], self._place(level)
        sizes = [vocab if d == dim else size_of(self.call, image, d) for d in range(rank(image))]
        if place is not None:  # indices count the rows of all heads
            heads = self.site.stack.heads
            known = isinstance(sizes[place.dim], int)
            sizes[place.dim] = sizes[place.dim] * heads if known else self.call(operator.mul, sizes[place.dim], heads)
        return self._false(sizes)
