"""A recognised site becomes an op call: row selections move to the hidden states, vocabulary slices to the weight."""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.utils import detect_fake_mode
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .recognise.gather import GatherStep
from .recognise.heads import Place
from .recognise.miss import Miss
from .recognise.program import Operand
from .recognise.shapes import ShapeStep, rank, same, shape, size_of
from .recognise.tails import Site
from .recognise.together import Group

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
        values = map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.fake_mode:
            node.meta["val"] = target(*values[0], **values[1])
        if "stack_trace" in self.before.meta:
            node.meta["stack_trace"] = self.before.meta["stack_trace"]
        self.added.append(node)
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
        """A bool tensor, True where the graph overwrites logits: ``[V]`` if all rows agree, else the logits' shape."""
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


def rewrite(graph: Graph, group: Group, replaced: dict[Node, Node]) -> dict[Site, Node]:
    """Replaces the sites of ``group`` by op calls, and returns for each site the call that serves its first head.

    Draws of one program become the columns of one ``sample``; greedy sinks beside them make it ``sample_and_argmax``.
    ``replaced`` maps the outputs of sites that have been rewritten to what took their place; ours are added.

    Raises:
        Miss: an operand cannot be built, or the sites depend on each other; the graph is as it was.
    """
    _check_independent(group)
    order = {node: i for i, node in enumerate(graph.nodes)}
    editor = GraphEditor(graph, min((site.output for site in group.sites), key=order.__getitem__))
    calls: dict[Site, Node] = {}
    tokens: dict[Site, Node] = {}
    try:
        for heads in group.calls:
            call, results = _call(editor, heads, replaced)
            calls |= dict.fromkeys(heads, call)
            tokens |= results
        together = {site: _stack(editor, site, [tokens[head] for head in site.heads]) for site in group.sites}
        for site, result in together.items():
            _check_like(site.output, result)
    except Exception:
        editor.undo()
        raise
    for site, result in together.items():
        site.output.replace_all_uses_with(result)
        replaced[site.output] = result
    # Operands of a later sink may stand below the place of the first.
    stable_topological_sort(graph)
    return {site: calls[site] for site in group.sites}


def _call(editor: GraphEditor, heads: list[Site], replaced: dict[Node, Node]) -> tuple[Node, dict[Site, Node]]:
    """One op call for ``heads``, and the tokens of each in the shape of its sink's rows."""
    ops = torch.ops.flashsampling
    draws = [site for site in heads if site.draws]
    greedy = [site for site in heads if not site.draws]
    builder = SiteBuilder(editor, heads[0], replaced)
    hidden, weight = builder.hidden(), builder.weight()
    program, operands, greedy_program = _merge_programs(draws, greedy)
    # A greedy sink may have reshaped the rows in a way of its own.
    builders = {site: builder if site is heads[0] else SiteBuilder(editor, site, replaced) for site in heads}
    owners = [next(site for site in heads if operand in site.operands) for operand in operands]
    tensors = [builders[site].operand(operand) for site, operand in zip(owners, operands, strict=True)]
    total = sum(site.draws for site in draws)
    if draws:
        # One seed a call: drawn on the device inside the graph, so that manual_seed reproduces and replays differ.
        seed = editor.call(prims.inductor_seed.default, hidden.meta["val"].device)
    gather = heads[0].gather
    if gather is not None:
        shard = (builder.vocab(), gather.capacity, gather.group)
        if draws:
            args = (hidden, weight, seed, tensors, program, total, *shard)
            call = drawn = editor.call(ops.sample_sharded.default, *args)
        else:
            call = best = editor.call(ops.argmax_sharded.default, hidden, weight, tensors, greedy_program, *shard)
    elif draws and greedy:
        args = (hidden, weight, seed, tensors, program, greedy_program, total)
        call = editor.call(ops.sample_and_argmax.default, *args)
        drawn, best = (editor.call(operator.getitem, call, i) for i in (0, 1))
    elif draws:
        call = drawn = editor.call(ops.sample.default, hidden, weight, seed, tensors, program, total)
    else:
        call = best = editor.call(ops.argmax.default, hidden, weight, tensors, greedy_program)
    results = {site: builders[site].shape_like_sink(best) for site in greedy}
    first = 0
    for site in draws:
        mine = drawn
        if site.draws != total:
            mine = editor.call(aten.slice.Tensor, drawn, 1, first, first + site.draws)
            # Eager's results are tensors of their own, not strided parts of one.
            mine = editor.call(aten.clone.default, mine, memory_format=torch.contiguous_format)
        first += site.draws
        if site.sink.target is not aten.multinomial.default:
            mine = editor.call(aten.select.int, mine, 1, 0)
        results[site] = builders[site].shape_like_sink(mine)
    return call, results


def _stack(editor: GraphEditor, site: Site, tokens: list[Node]) -> Node:
    """The tokens of all heads of a sink, in its own order."""
    if len(tokens) == 1:
        return tokens[0]
    place = site.stack.places[-1]
    sampled = shape(site.sink.args[0])
    removed = rank(site.output) < len(sampled) and site.sink_dim < place.dim
    dim = place.dim - removed
    if same(sampled[place.dim], len(tokens) * place.inner):
        return editor.call(aten.cat.default, tokens, dim)
    sizes = [size_of(editor.call, tokens[0], d) for d in range(rank(tokens[0]))]
    before, after = sizes[:dim], sizes[dim + 1 :]
    if same(place.inner, 1):
        apart = [editor.call(aten.unsqueeze.default, t, dim + 1) for t in tokens]
    elif isinstance(place.inner, int):
        apart = [editor.call(aten.reshape.default, t, [*before, -1, 1, place.inner, *after]) for t in tokens]
    else:
        raise Miss(
            "LAYOUT",
            "the rows of the stacked heads are mixed in a way that is not known at compile time",
            "stack the heads along a dimension of their own",
            site.sink,
        )
    return editor.call(aten.reshape.default, editor.call(aten.cat.default, apart, dim + 1), [*before, -1, *after])


def _check_independent(group: Group) -> None:
    """Raise a Miss where one call for all sites would need a token of its own to be computed."""
    sites = group.sites
    if len(sites) == 1:
        return
    reached: set[Node] = set()
    stack = [site.output for site in sites]
    while stack:
        for user in stack.pop().users:
            if user not in reached:
                reached.add(user)
                stack.append(user)
    for site in (head for sink in sites for head in sink.heads):
        inputs = {site.linear.left, site.linear.right}
        for operand in site.operands:
            inputs.update(operand.node.all_input_nodes if operand.scatter else [operand.node])
        outputs = {other.output for other in sites}
        if inputs & (reached | outputs) - site.nodes:
            raise Miss(
                "LOGITS_ESCAPE",
                f"{len(sites)} sinks share this linear and depend on each other: one kernel call cannot serve them all",
                "sample once per linear, or multiply again for the second sample",
                site.linear.node,
            )


def _check_like(output: Node, result: Node) -> None:
    """The net under the rewrite: what takes a sink's place must look like it."""
    want, have = output.meta["val"], result.meta["val"]
    known = [(a, b) for a, b in zip(want.shape, have.shape, strict=False) if isinstance(a, int) and isinstance(b, int)]
    if want.dim() != have.dim() or want.dtype != have.dtype or any(a != b for a, b in known):
        raise AssertionError(f"{result.target} gives {tuple(have.shape)} where the graph has {tuple(want.shape)}")


def _merge_programs(draws: list[Site], greedy: list[Site]) -> tuple[str, list[Operand], str]:
    """The programs of the draws and of the greedy sinks over one list of operands."""
    operands = list(draws[0].operands if draws else greedy[0].operands)
    program = draws[0].program if draws else ""
    if not greedy:
        return program, operands, ""
    names = []
    for operand in greedy[0].operands:
        if operand not in operands:
            operands.append(operand)
        names.append(f"a{operands.index(operand)}")
    greedy_program = re.sub(r"\ba(\d+)\b", lambda m: names[int(m[1])], greedy[0].program)
    return program, operands, greedy_program


def erase(graph: Graph, sites: list[Site]) -> None:
    """Erases what rewritten sites left behind; random ops would survive dead-code elimination."""
    dead = set().union(*(head.nodes for site in sites for head in site.heads))
    for node in reversed(graph.nodes):
        if node in dead and not node.users:
            graph.erase_node(node)
    graph.eliminate_dead_code()
