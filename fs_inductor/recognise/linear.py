"""The LM head: which matrix product a sink's logits come from, and everything that depends on it."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .filters import filter_miss
from .gather import ALL_GATHER, GATHER_TARGETS
from .miss import Miss
from .noise import inverse_cdf_miss
from .pointwise import CASTS, POINTWISE_TARGETS, SCATTER_TARGETS
from .shapes import SHAPE_TARGETS, VIEWS, Call, is_identity, is_piece, rank, same, same_shape, shape

aten = torch.ops.aten

# Row statistics of a softmax or of its relatives: looked through when searching for the linear.
REDUCTIONS = {
    aten.amax.default,
    aten.max.dim,
    aten.sum.dim_IntList,
    aten.logsumexp.default,
    aten._softmax.default,
    aten._log_softmax.default,
}
PASSABLE = POINTWISE_TARGETS | SCATTER_TARGETS | SHAPE_TARGETS | GATHER_TARGETS | REDUCTIONS
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Linear:
    """``node = hidden @ weight.T (+ bias)`` in an ATen spelling: mm, addmm, a bmm over one batch, mul + sum."""

    node: Node
    left: Node
    right: Node

    @classmethod
    def match(cls, node: Node) -> Linear | None:
        args = node.args
        if node.target is aten.mm.default:
            return cls(node, args[0], args[1])
        if node.target is aten.addmm.default:
            return cls(node, args[1], args[2])
        if node.target is aten.bmm.default and same(shape(node)[0], 1):
            return cls(node, args[0], args[1])
        if node.target is aten.sum.dim_IntList and _is_matvec(node):
            a, b = _without_upcasts(*node.args[0].args)
            return cls(node, a, b) if rank(a) == 2 else cls(node, b, a)
        if node.target is aten.unsqueeze.default and _is_dot(node):
            a, b = node.args[0].args[0].args
            return cls(node, a.args[0], b.args[0])
        return None

    @property
    def is_matvec(self) -> bool:
        return self.node.target is aten.sum.dim_IntList

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes that make up the product; all of them go when the site is rewritten."""
        if self.node.target is aten.unsqueeze.default:
            return (self.node.args[0].args[0], self.node.args[0], self.node)
        return (self.node.args[0], self.node) if self.is_matvec else (self.node,)

    def weight_numel(self) -> int:
        """Size of the larger factor, to tell an LM head from a low-rank or temperature head beside it."""
        return max(_hint(self.left), _hint(self.right))

    def hidden(self, dim: int) -> Node:
        """The factor without the vocabulary: shaped like the product, with D in place of V at ``dim``."""
        if self.is_matvec:
            return self.right
        return self.left if dim == rank(self.node) - 1 else self.right

    def vocab_weight(self, call: Call, dim: int) -> Node:
        """The factor with the vocabulary, as a ``[V, D]`` view."""
        if self.is_matvec:
            return self.left
        if dim != rank(self.node) - 1:
            return _drop_batch(call, self.left)
        weight = _drop_batch(call, self.right)
        if weight.target is aten.permute.default and rank(weight) == 2:
            return weight.args[0]
        return call(aten.permute.default, weight, [1, 0])

    def check(self, dim: int) -> None:
        """Raise a Miss unless the vocabulary lies along ``dim`` of the product and the kernel takes its factors."""
        matrix_dims = (0,) if self.is_matvec else (rank(self.node) - 2, rank(self.node) - 1)
        if dim not in matrix_dims:
            raise Miss(
                "SAMPLING_DIM",
                "the sampled dimension is not an output dimension of the linear",
                "sample along the vocabulary, the last dimension of the logits",
                self.node,
            )
        dtypes = {n.meta["val"].dtype for n in (self.left, self.right)}
        if len(dtypes) != 1 or not dtypes <= set(_FLOATS):
            raise Miss(
                "DTYPE",
                f"the linear multiplies {' by '.join(sorted(str(d) for d in dtypes))}",
                "use one of bfloat16, float16 and float32 for both the hidden states and the weight",
                self.node,
            )
        features = shape(self.left)[-1]
        if not statically_known_true(features > 0):
            what = "no features" if same(features, 0) else f"{features} features, which may be none"
            raise Miss(
                "NO_LINEAR",
                f"the linear sums over {what}, and then its logits do not depend on the hidden states",
                "give the hidden states and the weight at least one feature, of a number known at compile time",
                self.node,
            )


def find_linear(sink: Node, head: int = 0) -> tuple[Linear, set[Node]]:
    """The LM head behind ``sink`` and all nodes on a way from its product to ``sink``.

    Searches backwards through pointwise ops, reshapes and row statistics. Where several products are found (a low-rank
    adapter added to the logits, say) the one with the largest weight is the head and the others are operands. Where
    logits are stacked, only those of number ``head`` are searched.

    Raises:
        Miss: NO_LINEAR, or a more telling code where the search ended at something known.
    """
    found: list[Linear] = []
    seen: set[Node] = set()
    barriers: list[Node] = []
    stack = list(sink.all_input_nodes)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        linear = Linear.match(node)
        if linear is not None:
            found.append(linear)
        elif head < len(stacked_pieces(node) or ()):
            stack.append(stacked_pieces(node)[head])
        elif node.target in PASSABLE or _is_getitem(node):
            stack.extend(node.all_input_nodes)
        else:
            barriers.append(node)
    if not found:
        raise _nothing_found(sink, barriers)
    gathered = any(node.target in ALL_GATHER for node in seen)
    # Behind a gather the weight's size differs between ranks, and all must choose alike.
    head = max(found, key=lambda linear: shape(linear.left)[-1] if gathered else linear.weight_numel())
    return head, _dependents(head) & ancestors(sink)


def _nothing_found(sink: Node, barriers: list[Node]) -> Miss:
    """Why the search from ``sink``, which ended at ``barriers``, met no product."""
    behind = _behind(sink)
    miss = filter_miss(behind) or inverse_cdf_miss(behind) or barrier_miss(barriers)
    between = [node for node in barriers if _hides_product(node, sink)] if miss.code == "NO_LINEAR" else []
    return _no_spelling(between[0]) if between else miss


# A few ops with their casts and views; what lies further back is another layer's.
_SIGHT = 32


def _hides_product(barrier: Node, sink: Node) -> bool:
    """Whether a product with columns enough for a vocabulary stands close behind ``barrier``."""
    vocab = shape(sink.args[0])[-1]
    stack, seen = [barrier], set()
    while stack and len(seen) < _SIGHT:
        node = stack.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if Linear.match(node) is None:
            stack.extend(node.all_input_nodes)
        elif any(statically_known_true(size >= vocab) for size in shape(node)):
            return True
    return False


def stacked_pieces(node: Node) -> list[Node] | None:
    """What a cat of tensors of one shape puts together, but for the parts of one tensor: stacked heads, perhaps."""
    if node.target is not aten.cat.default or len(node.args[0]) < 2:
        return None
    first, *others = node.args[0]
    if any(is_piece(piece) for piece in node.args[0]) or not all(same_shape(first, other) for other in others):
        return None
    return list(node.args[0])


def _behind(sink: Node) -> list[Node]:
    """The nodes between ``sink`` and the nearest products behind it, or all its ancestors where there is none."""
    seen: set[Node] = set()
    products: set[Node] = set()
    stack = list(sink.all_input_nodes)
    while stack:
        node = stack.pop()
        if node in seen or node in products:
            continue
        if Linear.match(node) is not None:
            products.add(node)
        else:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    nodes = [node for node in sink.graph.nodes if node in seen]
    if not products:
        return nodes
    reached = set(products)
    for node in nodes:
        if reached.intersection(node.all_input_nodes):
            reached.add(node)
    return [node for node in nodes if node in reached]


def barrier_miss(barriers: Iterable[Node]) -> Miss:
    """The miss for a search or a walk that could not pass ``barriers``."""
    barriers = [n.args[0] if n.target is operator.getitem else n for n in barriers if n.op == "call_function"]
    names = {n: str(n.target) for n in barriers}
    for code, words, reason, hint in _BARRIERS:
        for node, name in names.items():
            if any(word in name for word in words):
                return Miss(code, f"{name} {reason}", hint, node)
    for node in names:
        unknown = torch.Tag.pointwise in getattr(node.target, "tags", ()) and node.target not in PASSABLE
        if unknown and _processes_logits(node):
            return _no_spelling(node)
    node = barriers[0] if barriers else None
    where = f" (the search ended at {names[node]})" if node is not None else ""
    return Miss(
        "NO_LINEAR",
        f"no linear layer was found behind this sink{where}",
        "compile the LM head and the sampling in one function, with only pointwise ops and row selections between them",
        node,
    )


def _no_spelling(node: Node) -> Miss:
    hint = "use another op, or compute this outside of the way from the LM head to the sampling"
    return Miss("EPILOGUE_OP", f"the epilogue has no op for {node.target}", hint, node)


def _processes_logits(node: Node) -> bool:
    """Whether only pointwise ops and views lie between ``node`` and a product."""
    while Linear.match(node) is None:
        tags = getattr(node.target, "tags", ())
        if not (node.target in VIEWS or is_identity(node) or node.target in CASTS or torch.Tag.pointwise in tags):
            return False
        behind = [n for n in node.all_input_nodes if n.op == "call_function"]
        if len(behind) != 1:
            return False
        node = behind[0]
    return True


_BARRIERS = (
    (
        "LAYOUT",
        ("aten.bmm",),
        "multiplies by a weight of its own for each entry of a batch",
        "multiply by each weight on its own, with F.linear, and torch.stack the logits: stacked heads are fused",
    ),
    (
        "TP_LAYOUT",
        ("c10d", "all_gather", "wait_tensor", "all_reduce"),
        "stands between the linear and the sink in a form that is not known",
        "shard the LM head's output dimension over one process group (ColwiseParallel) and gather it once",
    ),
    (
        "EPILOGUE_OP",
        ("aten.scatter", "aten.index_put", "aten.index_add", "aten.scatter_add"),
        "writes a value of its own into each of some logits, as repetition penalties do",
        "add a [V] or [B, V] bias to the logits, such as torch.zeros(V).index_fill(0, ids, 2.0), which is fused; "
        "what depends on a logit, as a penalty does, goes with torch.where and a [V] or [B, V] mask",
    ),
    (
        "QUANTIZED",
        ("_scaled_mm", "_int_mm", "int8pack", "int4pack", "torchao", "quantized"),
        "multiplies a quantised weight",
        "keep the LM head in bfloat16, float16 or float32",
    ),
)


def _is_getitem(node: Node) -> bool:
    return is_piece(node) or (node.target is operator.getitem and node.args[0].target is aten.max.dim)


def _dependents(head: Linear) -> set[Node]:
    """All nodes computed from the head's product."""
    dependents = {head.node}
    stack = [head.node]
    while stack:
        for user in stack.pop().users:
            if user not in dependents:
                dependents.add(user)
                stack.append(user)
    return dependents


def ancestors(node: Node) -> set[Node]:
    """All nodes that ``node`` is computed from."""
    found: set[Node] = set()
    stack = list(node.all_input_nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def _is_matvec(node: Node) -> bool:
    """``sum(W[V, D] * h[D], [1])``, how Inductor's decompositions spell a matrix-vector product."""
    product = node.args[0]
    if len(node.args) > 2 or list(node.args[1]) not in ([1], [-1]) or product.target is not aten.mul.Tensor:
        return False
    if not all(isinstance(a, Node) for a in product.args) or len(product.users) != 1:
        return False
    vector, matrix = sorted(product.args, key=rank)
    return (rank(vector), rank(matrix)) == (1, 2) and same(shape(vector)[0], shape(matrix)[1]) and rank(product) == 2


def _without_upcasts(a: Node, b: Node) -> tuple[Node, Node]:
    """The factors as they were before float32, which holds products of low-precision numbers exactly."""
    inner = [x.args[0] for x in (a, b) if x.target in CASTS and x.meta["val"].dtype is torch.float32]
    if len(inner) == 2:
        dtypes = {x.meta["val"].dtype for x in inner}
        if len(dtypes) == 1 and dtypes <= {torch.bfloat16, torch.float16}:
            return inner[0], inner[1]
    return a, b


def _is_dot(node: Node) -> bool:
    """``unsqueeze(sum(squeeze(h[1, D]) * squeeze(W[D, 1])), 0)``: on CPUs, a product of one row by one column.

    A rank whose shard has one row has this where the others have an mm, and all must decide alike.
    """
    total = node.args[0]
    if total.target is not aten.sum.dim_IntList or list(total.args[1]) != [0] or tuple(total.args[2:]) != (True,):
        return False
    product = total.args[0]
    if product.target is not aten.mul.Tensor or len(total.users) != 1 or len(product.users) != 1:
        return False
    factors = [a.args[0] for a in product.args if isinstance(a, Node) and a.target is aten.squeeze.dim]
    if len(factors) != 2 or any(rank(factor) != 2 for factor in factors) or rank(node) != 2:
        return False
    left, right = factors
    return same(shape(left)[0], 1) and same(shape(right)[1], 1) and same(shape(left)[1], shape(right)[0])


def _drop_batch(call: Call, node: Node) -> Node:
    return node if rank(node) == 2 else call(aten.squeeze.dims, node, [0])


def _hint(node: Node) -> int:
    """Number of elements, with the traced size where a dimension is symbolic."""
    numel = 1
    for size in shape(node):
        if isinstance(size, torch.SymInt):
            hint = size.node.hint if size.node.has_hint() else None
            size = 1 if hint is None else int(hint)
        numel *= size
    return numel
