"""Tails: what turns logits into token ids. Each sink op is walked back to its linear and becomes a `Site`.

Sinks are `multinomial`, `argmax`, `max.dim` and `topk(k=1)` used for their index. An argmax over logits is greedy; over
a quotient of probabilities and exponential noise, or a sum of logits and Gumbel noise, it is a draw.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from . import noise
from .filters import filter_miss
from .gather import GatherStep, gather_of, match_gather
from .heads import OtherHead, Stack, same_places, stack_of
from .linear import PASSABLE, Linear, ancestors, find_linear
from .logits import Walk
from .miss import Miss
from .pointwise import CASTS, FLOATS, is_float_cast
from .program import Operand, Path, Value, constant_of
from .shapes import REPEATING, is_identity, rank, same, same_shape, shape
from .structure import POWERS

aten = torch.ops.aten

SINK_TARGETS = (aten.multinomial.default, aten.argmax.default, aten.max.dim, aten.topk.default)


@dataclass(eq=False)
class Site:
    """A recognised sink: everything the checks and the rewrite need, without a change to the graph.

    sink: the sampling op; output: the node that holds its token ids (a getitem for max and topk).
    draws: samples per row, or 0 for greedy.
    linear, linear_dim: the LM head, and the position of the vocabulary in its product.
    path: the shape ops from the product to the sink's input; sink_dim: the vocabulary's position there.
    program, operands: the epilogue program's text and what it reads.
    nodes: all nodes between the linear and the sink, both included; noise: the random nodes a draw replaces.
    gather: the all-gather on the path, where the vocabulary is sharded over ranks.
    stack: where this head's logits lie, if the sink samples several heads; more: the sites of its other heads.
    """

    sink: Node
    output: Node
    draws: int
    linear: Linear
    linear_dim: int
    path: Path
    sink_dim: int
    program: str
    operands: list[Operand]
    nodes: set[Node]
    noise: set[Node]
    gather: GatherStep | None
    stack: Stack | None = None
    more: tuple[Site, ...] = ()

    @property
    def heads(self) -> tuple[Site, ...]:
        """The sites of all heads that the sink samples, this one first."""
        return (self, *self.more)


def recognise(sink: Node) -> Site | None:
    """The site behind ``sink``; None if it is no sink after all (a `max` or `topk` used for its values).

    Raises:
        Miss: the sink cannot be fused, and why.
    """
    output, dim, draws = _sink(sink)
    if output is None:
        return None
    try:
        site = _site(sink, output, dim, draws, 0)
    except OtherHead as other:
        site = _site(sink, output, dim, draws, other.head)
    if site.stack is not None and not site.stack.chosen:
        site.more = tuple(_site(sink, output, dim, draws, head) for head in range(1, site.stack.heads))
        if not all(other.stack is not None and same_places(site.stack, other.stack) for other in site.more):
            raise Miss("LAYOUT", "the heads are stacked in several ways", "stack the heads once", sink)
    return site


def _site(sink: Node, output: Node, dim: int, draws: int, head: int) -> Site:
    """The site of one head of ``sink``; most sinks have one."""
    linear, dependents = find_linear(sink, head)
    try:
        return _walk(sink, output, dim, draws, linear, dependents, head)
    except Miss as miss:
        # What was written explains why the walk did not get through better than the node at which it stopped.
        between = [node for node in sink.graph.nodes if node in dependents and node is not linear.node]
        if miss.code in _EXPLAINED_BY_FILTERS:
            miss = filter_miss(between) or noise.inverse_cdf_miss(between) or miss
        if miss.code == "LAYOUT":
            miss = _wrong_dim(sink, dim, linear) or miss
        raise miss from None


def _wrong_dim(sink: Node, dim: int, linear: Linear) -> Miss | None:
    """The miss for a sink over some dimension of rows, where the last one is the linear's output as it was."""
    sizes, output = shape(sink.args[0]), shape(linear.node)[-1]
    if dim == len(sizes) - 1 or not same(sizes[-1], output) or same(sizes[dim], output):
        return None
    return Miss(
        "SAMPLING_DIM",
        f"dimension {dim} of {len(sizes)} is sampled, and the linear's output is the last",
        "sample along the last dimension of the logits, the vocabulary: dim=-1",
        sink,
    )


# Each head is a call of its own: more of them than any codec has would be something else than heads.
MAX_HEADS = 64
_EXPLAINED_BY_FILTERS = {"EPILOGUE_OP", "LAYOUT", "NOISE", "NO_LINEAR"}


def _walk(sink: Node, output: Node, dim: int, draws: int, linear: Linear, dependents: set[Node], head: int) -> Site:
    _check_casts(sink, dependents)
    x = sink.args[0]
    walk = Walk(linear, dependents, head)
    noise_nodes: set[Node] = set()
    if draws:
        if not walk.structure.is_weight(x, dim):
            raise _not_probabilities(x, walk)
        result = walk.log_weight(x, dim, ())
    elif _draws_noise(x, walk):
        result = _score(walk, x, dim, (), noise_nodes)
        draws = 1
    else:
        result = walk.log_weight(x, dim, ()) if walk.structure.is_weight(x, dim) else walk.logit(x, dim, ())
    program, operands = walk.program(result)
    for operand in operands:
        if noise_nodes & {operand.node, *ancestors(operand.node)}:
            raise Miss(
                "NOISE",
                f"the processing of the logits also reads the noise that draws ({operand.node.target})",
                "draw fresh noise for each use",
                operand.node,
            )
    if walk.path is None:
        raise Miss("NO_LINEAR", "the sampled values do not depend on the linear", "remove the unused LM head", sink)
    gather, stack = gather_of(walk.path), stack_of(walk.path)
    if gather is not None and stack is not None:
        raise Miss(
            "TP_LAYOUT",
            "several heads are stacked whose vocabularies are sharded over ranks",
            "sample each head by a call of its own: stacked heads are fused on one rank only",
            sink,
        )
    if stack is not None and (walk.linear_dim != rank(linear.node) - 1 or stack.heads > MAX_HEADS):
        raise Miss(
            "LAYOUT",
            f"the sampled dimension is one of {stack.heads} parts of the vocabulary, or of the rows, of the linear",
            f"stack at most {MAX_HEADS} heads, each of which has its vocabulary in the last dimension of its logits",
            linear.node,
        )
    nodes = walk.visited | noise_nodes | {sink, output}
    return Site(
        sink=sink,
        output=output,
        draws=draws,
        linear=linear,
        linear_dim=walk.linear_dim,
        path=walk.path,
        sink_dim=dim,
        program=program,
        operands=operands,
        nodes=nodes,
        noise=noise_nodes,
        gather=gather,
        stack=stack,
    )


def _check_casts(sink: Node, dependents: set[Node]) -> None:
    """Raise a Miss for float8 between linear and sink: its few bits are no rounding of probabilities one may drop."""
    for node in sink.graph.nodes:
        if node in dependents and node.target in CASTS:
            dtype = node.meta["val"].dtype
            if dtype.is_floating_point and dtype not in FLOATS:
                raise Miss(
                    "DTYPE",
                    f"{node.target} rounds to {dtype}, which the kernel does not do",
                    "leave the cast out, or cast to bfloat16 or float16 between the LM head and the sampling",
                    node,
                )


def _sink(sink: Node) -> tuple[Node | None, int, int]:
    """The node with the token ids, the sampled dimension, and the draws per row."""
    x = sink.args[0]
    args = dict(enumerate(sink.args)) | sink.kwargs
    if sink.target is aten.multinomial.default:
        draws = args.get(1)
        replacement = args.get(2, args.get("replacement", False))
        if not isinstance(draws, int):
            raise Miss(
                "NUM_SAMPLES",
                "the number of samples is symbolic: it is not known at compile time",
                "draw a fixed number of samples",
                sink,
            )
        if draws < 1:
            raise Miss("NUM_SAMPLES", f"multinomial draws {draws} samples, an error", "draw one sample or more", sink)
        if draws > 1 and not replacement:
            raise Miss(
                "NUM_SAMPLES",
                f"multinomial draws {draws} samples without replacement",
                "draw with replacement=True, or draw one sample",
                sink,
            )
        return sink, rank(x) - 1, draws
    if sink.target is aten.argmax.default:
        dim = args.get(1, args.get("dim"))
        if dim is None:
            wide = [i for i, size in enumerate(shape(x)) if not same(size, 1)]
            if len(wide) > 1:
                raise Miss("SAMPLING_DIM", "argmax runs over all dimensions, not one", "pass dim=-1 to argmax", sink)
            dim = wide[0] if wide else -1
        return sink, dim % max(rank(x), 1), 0
    if sink.target is aten.topk.default and (args.get(1) != 1 or not args.get(3, args.get("largest", True))):
        return None, 0, 0
    index = _index_output(sink)
    if index is None:
        return None, 0, 0
    if sink.target is aten.topk.default:
        return index, args.get(2, args.get("dim", -1)) % rank(x), 0
    return index, args[1] % rank(x), 0


def _index_output(sink: Node) -> Node | None:
    """The getitem with the indices of a (values, indices) pair, where the values are not used."""
    users = [u for u in sink.users if u.target is operator.getitem]
    indices = [u for u in users if u.args[1] == 1]
    values = [u for u in users if u.args[1] == 0 and u.users]
    if not indices:
        return None
    if values:
        raise Miss(
            "LOGPROBS",
            f"the values of {sink.target} are used beside its indices",
            "drop the values, or compute the chosen tokens' logits in a call of its own",
            values[0],
        )
    return indices[0]


def _not_probabilities(node: Any, walk: Walk) -> Miss:
    filtered = walk.structure.known_barrier(node)
    return filtered or Miss(
        "EPILOGUE_OP",
        f"multinomial's weights do not come from a softmax or exp of the logits ({getattr(node, 'target', node)})",
        "sample from softmax(logits, dim=-1)",
        node if isinstance(node, Node) else None,
    )


# -- draws spelled as an argmax over noise ------------------------------------------------------------------------


def _draws_noise(x: Node, walk: Walk) -> bool:
    """Whether random numbers enter between the linear and the argmax."""
    stack, seen = [x], set(walk.linear.nodes)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if noise.is_random(node):
            return True
        # Outside the logits' own chain, only follow what noise is made of.
        if node in walk.dependents or node.target in PASSABLE or noise.is_dense_view(node):
            stack.extend(node.all_input_nodes)
    return False


def _score(walk: Walk, node: Node, dim: int, path: Path, used: set[Node]) -> Value:
    """Walks an argmax's input that holds noise; the result is the program's logit, with the noise taken out."""
    if node not in walk.dependents:
        raise _unknown_noise(node)
    walk.visited.add(node)
    target, args = node.target, node.args
    if is_identity(node) or is_float_cast(node):
        return _score(walk, args[0], dim, path, used)
    gather = match_gather(node, dim)
    if gather is not None:
        walk.visited.update(gather.parts)
        return _score(walk, gather.inner, dim, (gather, *path), used)
    step = walk.step(node, dim, path)
    if step is not None:
        if target in REPEATING:
            raise Miss(
                "NOISE",
                f"{target} picks rows after the noise was added: rows picked twice share their noise",
                "pick the rows first, then add the noise",
                node,
            )
        walk.visited.update(step.nodes)
        return _score(walk, step.source, step.dim_in, (step, *path), used)
    if target in (aten.mul.Tensor, aten.div.Tensor) and isinstance(args[1], (int, float)) and args[1] > 0:
        return _score(walk, args[0], dim, path, used)
    if target is aten.where.self:
        for chosen, other, negated in ((args[1], args[2], False), (args[2], args[1], True)):
            if constant_of(chosen) == -math.inf and same_shape(other, node):
                mask = walk.argument(args[0], node, dim, path)
                mask = walk.emit("logical_not", mask) if negated else mask
                return walk.emit("where", mask, -math.inf, _score(walk, other, dim, path, used))
    whole = isinstance(args[0], Node) and same_shape(args[0], node)
    if target is aten.div.Tensor and whole and walk.structure.is_weight(args[0], dim):
        candidate, power, raised = _temperature(walk, args[1], POWERS, node, dim)
        made_of = noise.exponential(candidate)
        if made_of is not None and _is_fresh(args[1], node, [*raised, *made_of], used):
            user = raised[-1] if raised else node
            return _tempered(walk, walk.log_weight(args[0], dim, path), power, user, dim, path)
    if target in (aten.add.Tensor, aten.sub.Tensor) and not node.kwargs:
        pairs = [(args[0], args[1], 1 if target is aten.add.Tensor else -1)]
        if target is aten.add.Tensor:
            pairs.append((args[1], args[0], 1))
        for logits, scaled, sign in pairs:
            candidate, factor, product = _temperature(walk, scaled, PRODUCTS, node, dim)
            found = noise.gumbel(candidate)
            if found is not None and found[1] * sign == 1 and logits in walk.dependents and same_shape(logits, node):
                if _is_fresh(scaled, node, [*product, *found[0]], used):
                    user = product[-1] if product else node
                    return _tempered(walk, walk.logit(logits, dim, path), factor, user, dim, path)
    raise _unknown_noise(node)


PRODUCTS = {aten.mul.Tensor}


def _temperature(walk: Walk, node: Any, targets: set, user: Node, dim: int) -> tuple[Any, Any, list[Node]]:
    """Noise with its temperature, ``E ** T`` or ``T * G``, as (noise, T, the nodes in between); T is 1 for bare noise.

    A tensor T is taken to be positive, as temperatures are; zero means greedy.
    """
    nodes: list[Node] = []
    inner = node
    while isinstance(inner, Node) and (is_identity(inner) or is_float_cast(inner)):
        nodes.append(inner)
        inner = inner.args[0]
    if isinstance(inner, Node) and inner.target in targets:
        for x, t in (inner.args, reversed(inner.args)) if targets is PRODUCTS else (inner.args,):
            is_number = isinstance(t, (int, float))
            if (is_number and t > 0) or (isinstance(t, Node) and not _is_noise(t) and _is_outside(walk, t, user, dim)):
                return x, t, [*nodes, inner]
    return node, 1, []


def _is_noise(node: Node) -> bool:
    return noise.gumbel(node) is not None or noise.exponential(node) is not None


def _is_outside(walk: Walk, node: Node, user: Node, dim: int) -> bool:
    return node not in walk.dependents and walk.structure.is_row_constant(node, user, dim)


def _tempered(walk: Walk, value: Value, t: Any, user: Node, dim: int, path: Path) -> Value:
    """Noise scaled by T on logits is noise on logits divided by T. user: what scales the noise, and rounds T."""
    if t == 1:
        return value
    divisor = walk.argument(t, user, dim, path)
    if divisor.number is None:
        divisor = walk.emit("maximum", divisor, 1e-30)
    return walk.emit("div", value, divisor)


def _is_fresh(candidate: Node, node: Node, made_of: list[Node], used: set[Node]) -> bool:
    """Whether every logit has noise of its own, which nothing else in the graph sees."""
    if not same_shape(candidate, node):
        raise Miss(
            "NOISE",
            "the noise is broadcast: several logits share one random number",
            "draw noise of the logits' full shape",
            candidate,
        )
    for part in made_of:
        if any(user not in made_of and user is not node for user in part.users):
            raise Miss(
                "NOISE",
                "the noise is used a second time, so this draw is not independent of the rest of the graph",
                "draw fresh noise for each use",
                part,
            )
    used.update(made_of)
    return True


def _unknown_noise(node: Node) -> Miss:
    return Miss(
        "NOISE",
        f"random numbers enter the argmax in a way that is no exponential race and no Gumbel-max ({node.target})",
        "write argmax(probs / exponential noise), argmax(logits + Gumbel noise), or use torch.multinomial",
        node,
    )
