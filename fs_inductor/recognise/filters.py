"""Filters that look at a whole row before they drop tokens: top-k, top-p, min-p and their relatives.

None of them is fused yet; what matters here is to call them by their names.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Node

from .miss import Miss

aten = torch.ops.aten

CUMULATIVE = {aten.cumsum.default, aten.logcumsumexp.default}
_SORT = {aten.sort.default, aten.sort.stable}
COMPARISONS = {
    getattr(getattr(aten, name), overload) for name in ("lt", "le", "gt", "ge") for overload in ("Tensor", "Scalar")
}
_STATISTICS = {
    aten.amax.default,
    aten.amin.default,
    aten.max.dim,
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.var.correction,
    aten.logsumexp.default,
    aten.topk.default,
}
_HINT = (
    "filters that need a whole row of logits first are not supported yet: sample without {}, or keep the site unfused"
)


def filter_miss(region: Iterable[Node]) -> Miss | None:
    """The miss for the filters among ``region``, the nodes from a product (itself excluded) to a sink; None without.

    The code is that of the costliest filter, since that one will be supported last; the reason names them all.
    """
    nodes = list(region)
    cumulative = [n for n in nodes if n.target in CUMULATIVE]
    largest = [n for n in nodes if n.target is aten.kthvalue.default or (n.target is aten.topk.default and _many(n))]
    sorts = [n for n in nodes if n.target in _SORT]
    ranked = {*cumulative, *largest, *sorts}
    cutoffs = [n for n in nodes if n.target in COMPARISONS and _reads_statistic(n, set(nodes), ranked)]
    if sorts and not cumulative and not largest and not cutoffs:
        # A threshold read off the sorted logits; beside a cutoff, a sort only says which tokens are kept anyway.
        largest = sorts
    found: list[tuple[str, str, str, Node]] = []
    if cumulative and (sorts or largest):  # a running sum in the order of ids is no filter by itself
        reason = f"{_name(cumulative[0])} sorts or sums along the vocabulary, as top-p and typical-p filters do"
        found.append(("TOP_P", "top-p", reason, cumulative[0]))
    if largest:
        reason = f"{_name(largest[0])} picks the largest logits, as top-k filters do"
        found.append(("TOP_K", "top-k", reason, largest[0]))
    if cutoffs:
        reason = (
            f"{_name(cutoffs[0])} compares each token with a statistic of its row, "
            "as min-p, epsilon, eta and top-n-sigma cutoffs do"
        )
        found.append(("MIN_P", "min-p or the like", reason, cutoffs[0]))
    if not found:
        return None
    code, _, _, node = found[0]
    reason = "before the draw " + "; and ".join(reason for _, _, reason, _ in found)
    return Miss(code, reason, _HINT.format(" and ".join(name for _, name, _, _ in found)), node)


def _many(topk: Node) -> bool:
    return topk.args[1] != 1


def _reads_statistic(node: Node, region: set[Node], ranked: set[Node]) -> bool:
    """Whether the comparison looks at a row statistic, and not at what a sort or a top-k found.

    What an earlier comparison decided is another filter's affair.
    """
    stack, seen = [node], set()
    found = False
    while stack:
        for source in stack.pop().all_input_nodes:
            if source in ranked:
                return False
            if source.target in _STATISTICS and source in region:
                found = True
            elif source in region and source not in seen and not _is_bool(source):
                seen.add(source)
                stack.append(source)
    return found


def _is_bool(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool


def _name(node: Node) -> str:
    return str(node.target)
