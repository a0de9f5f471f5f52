"""Escapes: somebody else in the graph needs what a fused site would never write.

What they need decides the code. ``PROBS_ESCAPE``: a tensor over the vocabulary leaves the graph. ``LOGPROBS``: numbers
per row do, such as a token's log-probability or an entropy. ``LOGITS_ESCAPE``: the logits go on to something else, such
as a count or a mean over rows.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch.fx import Node

from ..report import location_of
from .linear import Linear
from .miss import Miss
from .pointwise import CASTS
from .shapes import is_identity, same, shape

aten = torch.ops.aten

_REDUCING = {
    "sum", "mean", "prod", "var", "amax", "amin", "max", "min", "logsumexp", "any", "all", "count_nonzero",
    "topk", "argmax", "argmin", "multinomial",
}  # fmt: skip
_PICKING = {aten.gather.default, aten.index.Tensor}


def escape_miss(
    linears: Iterable[Linear], covered: set[Node], ends: set[Node], vocab: object, sinks: set[Node]
) -> Miss | None:
    """The miss for nodes of ``covered`` that a node outside uses; None where nobody does.

    ends: the sinks and their results, whose users are welcome. vocab: the size of the sampled dimension.
    sinks: all sampling ops of the graph.
    """
    linears = list(linears)
    graph = linears[0].node.graph
    edges = [
        (node, user) for node in graph.nodes if node in covered - ends for user in node.users if user not in covered
    ]
    if not edges:
        return None
    wide, mixed = _spread(linears, vocab)
    needs = [_need(user, node, wide, mixed, covered, sinks) for node, user in edges]
    for code in ("PROBS_ESCAPE", "LOGITS_ESCAPE", "LOGPROBS"):
        found = [(*edge, sink) for edge, (need, sink) in zip(edges, needs, strict=True) if need == code]
        if found:  # what autograd keeps is named only where there is nothing that the user wrote
            return _miss(code, *min(found, key=lambda each: _only_for_backward(each[1])))
    return None


def _need(
    user: Node, node: Node, wide: set[Node], mixed: set[Node], covered: set[Node], sinks: set[Node]
) -> tuple[str, Node | None]:
    """The code for what ``user`` makes of ``node``, and the other sink that it leads to."""
    code, other = "LOGITS_ESCAPE", None
    stack, seen = [(node, user)], set()
    while stack:
        source, at = stack.pop()
        if at.op == "output":
            if source in wide:
                return "PROBS_ESCAPE", None
            code = code if source in mixed else "LOGPROBS"
        elif at in sinks:
            other = other or at
        elif at not in seen and at not in covered:
            seen.add(at)
            stack.extend((at, further) for further in at.users)
    return ("LOGITS_ESCAPE", other) if other is not None else (code, None)


def _spread(linears: list[Linear], vocab: object) -> tuple[set[Node], set[Node]]:
    """Nodes computed from the products: those that still have rows over the vocabulary, and those that mixed rows.

    Neither are numbers per row, and what is computed from them alone.
    """
    wide, mixed = {linear.node for linear in linears}, set()
    outputs = [vocab, *(shape(linear.node)[-1] for linear in linears)]
    for node in linears[0].node.graph.nodes:
        if node.op != "call_function":
            continue
        inputs = node.all_input_nodes
        if not wide.intersection(inputs):
            if mixed.intersection(inputs):
                mixed.add(node)
        elif str(node.target).removeprefix("aten.").partition(".")[0] in _REDUCING:
            before, after = _sizes(node.args[0]), _sizes(node)
            kept_rows = len(before) - len(after) <= 1
            if not kept_rows or _count(after, outputs) == _count(before, outputs):
                mixed.add(node)
        elif node.target not in _PICKING or any(same(size, vocab) for size in shape(node)):
            wide.add(node)
    return wide, mixed


def _sizes(node: Node) -> list[object]:
    """The sizes other than one; of an op with several outputs, of the first."""
    value = node.meta["val"]
    value = value[0] if isinstance(value, (tuple, list)) else value
    return [size for size in value.shape if not same(size, 1)]


def _count(sizes: list[object], outputs: list[object]) -> int:
    return sum(any(same(size, output) for output in outputs) for size in sizes)


def _miss(code: str, node: Node, user: Node, sink: Node | None) -> Miss:
    what = "probabilities" if _is_probability(node) else "logits"
    where = f"used by {_name(user)} at {location_of(user)}"
    returned = user.op == "output" or (is_identity(user) and all(u.op == "output" for u in user.users))
    if returned:
        where = "returned" if user.op == "output" else "returned, or saved for the backward pass"
    for_backward = not returned and _only_for_backward(user)
    if for_backward:
        where = "kept for the backward pass"
    reason = f"the {what} are also {where}"
    if code == "PROBS_ESCAPE":
        if not returned and not for_backward:
            reason += ", and what comes of them over the whole vocabulary is returned"
        hint = "return only the tokens under torch.no_grad(), or compute the other result in a separate call"
    elif code == "LOGPROBS":
        reason += ", for numbers per row such as a token's log-probability or an entropy"
        hint = (
            "return only the tokens: log-probabilities beside a draw are not supported yet, "
            "so compute them in a separate call where they are needed"
        )
    elif sink is not None:
        reason += f", on the way to another sink ({_name(sink)} at {location_of(sink)}) that is not fused with this one"
        hint = "see what the report says of that sink, or compute it in a separate call"
    else:
        hint = "use only the tokens here, or compute the other result in a separate call"
    return Miss(code, reason, hint, node)


def _only_for_backward(node: Node) -> bool:
    """Whether all that comes of a node of a joint graph is gradients: it meets a tangent on every way to the output."""
    behind: set[Node] = set()
    for each in node.graph.nodes:
        tangent = each.op == "placeholder" and str(each.target).startswith("tangents")
        if tangent or behind.intersection(each.all_input_nodes):
            behind.add(each)
    stack, seen = [node], set()
    while stack:
        at = stack.pop()
        if at.op == "output":
            return False
        if at not in seen and at not in behind:
            seen.add(at)
            stack.extend(at.users)
    return True


def _is_probability(node: Node) -> bool:
    if node.target is aten.div.Tensor:
        node = node.args[0]
    while isinstance(node, Node) and (is_identity(node) or node.target in CASTS):
        node = node.args[0]
    return isinstance(node, Node) and (node.target is aten.exp.default or _is_softmax(node))


def _is_softmax(node: Node) -> bool:
    return node.target is aten.div.Tensor and isinstance(node.args[0], Node) and node.args[0].target is aten.exp.default


def _name(node: Node) -> str:
    return node.name if node.target is operator.getitem else str(node.target).removesuffix(".default")
