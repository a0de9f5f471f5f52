"""A recognised group of sites becomes op calls."""

from __future__ import annotations

import operator
import re

import torch
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node

from .building import GraphEditor, SiteBuilder
from .recognise.miss import Miss
from .recognise.program import Operand
from .recognise.shapes import rank, same, shape, size_of
from .recognise.tails import Site
from .recognise.together import Group

aten = torch.ops.aten
prims = torch.ops.prims


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
