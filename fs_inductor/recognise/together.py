"""What concerns several sites at once: who may see the logits, and which sites one op call serves."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from .escape import escape_miss
from .heads import HeadStep
from .miss import Miss
from .shapes import RESHAPES, rank, shape
from .tails import Site


@dataclass
class Group:
    """Sites that share linears, and are fused together or not at all.

    calls: for each op call the sites it serves, one head of a sink each. A part of a weight is read by one call only.
    """

    sites: list[Site]
    calls: list[list[Site]]


def group_sites(sites: list[Site], sinks: set[Node]) -> tuple[list[Group], dict[Node, Miss]]:
    """The groups of ``sites`` that may be fused, and a Miss for each sink that may not.

    sinks: all sampling ops of the graph, those that were missed included.
    """
    groups: list[Group] = []
    missed: dict[Node, Miss] = {}
    for members in _connected(sites):
        calls: list[list[Site]] = []
        miss = _escape(members, sinks)
        if miss is None:
            calls = _calls([head for site in members for head in site.heads])
            miss = next((m for m in map(_not_one_call, calls) if m is not None), None)
        if miss is None:
            groups.append(Group(members, calls))
        else:
            missed |= {site.sink: miss for site in members}
    return groups, missed


def _connected(sites: list[Site]) -> list[list[Site]]:
    """``sites`` in groups that share no linear, and no cat of several linears' logits."""
    groups: list[tuple[set[Node], list[Site]]] = []
    for site in sites:
        nodes, members = set().union(*(head.nodes for head in site.heads)), [site]
        apart = []
        for others, theirs in groups:
            if nodes & others:
                nodes, members = nodes | others, theirs + members
            else:
                apart.append((others, theirs))
        groups = [*apart, (nodes, members)]
    return [members for _, members in groups]


def _escape(members: list[Site], sinks: set[Node]) -> Miss | None:
    heads = [head for site in members for head in site.heads]
    covered = set().union(*(head.nodes for head in heads))
    ends = {node for site in members for node in (site.sink, site.output)}
    vocab = shape(members[0].sink.args[0])[members[0].sink_dim]
    return escape_miss([head.linear for head in heads], covered, ends, vocab, sinks)


def _calls(heads: list[Site]) -> list[list[Site]]:
    """``heads`` by the part of a weight that they read, where the parts of one weight do not overlap."""
    linears: dict[Node, list[Site]] = {}
    for head in heads:
        linears.setdefault(head.linear.node, []).append(head)
    calls: list[list[Site]] = []
    for members in linears.values():
        parts: dict[Any, list[Site]] = {}
        for head in members:
            parts.setdefault(_part(head), []).append(head)
        ordered = sorted(parts) if None not in parts else []
        if ordered and all(a[1] <= b[0] for a, b in itertools.pairwise(ordered)):
            calls += parts.values()
        else:
            calls.append(members)
    return calls


def _part(head: Site) -> tuple[int, int] | None:
    """The rows of the weight that the site reads, as (start, end); None where that is not known."""
    start, end = 0, shape(head.linear.node)[head.linear_dim]
    if not isinstance(end, int) or head.gather is not None:
        return None
    for step in head.path:
        if step.slices_vocab:
            first, last, stride = step.bounds()
            if not all(isinstance(x, int) for x in (first, last, stride)) or stride != 1 or min(first, last) < 0:
                return None
            start, end = start + first, min(end, start + last)
    return start, end


def _rows(head: Site) -> tuple:
    """What tells which rows of the product a site samples, and in which order: reshapes at the end do not matter."""
    path = list(head.path)
    dim = head.sink_dim
    while path and path[-1].node.target in RESHAPES and not isinstance(path[-1], HeadStep):
        if dim != rank(path[-1].node) - 1 or path[-1].dim_in != rank(path[-1].source) - 1:
            break
        dim = path.pop().dim_in
    if path and isinstance(path[-1], HeadStep) and path[-1].whole and dim == rank(path[-1].node) - 1:
        last = path[-1]
        return head.linear_dim, tuple(path[:-1]), (last.inner, last.heads, last.head)
    return head.linear_dim, tuple(path), dim


def _not_one_call(heads: list[Site]) -> Miss | None:
    """Several sinks of one linear are fused only where one kernel call serves them: twice would multiply twice."""
    rows = {_rows(head) for head in heads}
    draws = {(head.program, tuple(head.operands)) for head in heads if head.draws}
    greedy = {(head.program, tuple(head.operands)) for head in heads if not head.draws}
    noise = [node for head in heads for node in head.noise]
    again = "call the LM head again for each of them"
    hint = f"give the sinks the same rows, temperature and masks, or {again}"
    if len(rows) > 1:
        what = "sample different rows or slices of it"
    elif len(draws) > 1 or len(greedy) > 1:
        what = "process its logits differently"
    elif len(noise) != len(set(noise)):
        what, hint = "share one noise tensor, so their draws are not independent", "draw fresh noise for each sink"
    elif draws and greedy and heads[0].gather is not None:
        what, hint = "are both greedy and drawn, which a sharded vocabulary does not support yet", again
    else:
        return None
    return Miss(
        "LOGITS_ESCAPE",
        f"{len(heads)} sinks share this linear and {what}, so one kernel call cannot serve them all",
        hint,
        heads[0].linear.node,
    )
