"""The wrapper that compiled DTensors put around random ops on CUDA.

There ``multinomial`` of a replicated DTensor is ``run_dtensor_rng_op(start, end, aten.multinomial.default, probs, n)``,
which moves the generator by whole numbers and is opaque to every pass. Recognition sees the plain op in its place;
where that is not fused, the wrapper comes back.
"""

from __future__ import annotations

import torch
from torch._prims import rng_prims
from torch.fx import Graph, Node

# Not in every torch that we support.
WRAPPER = getattr(rng_prims, "run_dtensor_rng_op", None)


def unwrap(graph: Graph) -> dict[Node, tuple]:
    """Puts plain draws in the place of wrapped ones. Returns for each the wrapper's own arguments, for `rewrap`."""
    wrapped: dict[Node, tuple] = {}
    for node in graph.find_nodes(op="call_function", target=WRAPPER) if WRAPPER is not None else ():
        start, end, op, *args = node.args
        if op is torch.ops.aten.multinomial.default:
            with graph.inserting_before(node):
                plain = graph.call_function(op, tuple(args), node.kwargs)
            _take_place(plain, node)
            wrapped[plain] = (start, end, op)
    return wrapped


def rewrap(graph: Graph, wrapped: dict[Node, tuple]) -> None:
    """Undoes `unwrap` for the draws that are still in the graph."""
    left = set(graph.nodes)
    for plain, own in wrapped.items():
        if plain in left:
            with graph.inserting_before(plain):
                node = graph.call_function(WRAPPER, (*own, *plain.args), plain.kwargs)
            _take_place(node, plain)


def _take_place(new: Node, old: Node) -> None:
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)
