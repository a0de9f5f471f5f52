"""Does a fusion pay? A measured rule for each kind of device, applied to a site's traffic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.utils._sympy.numbers import int_oo

from .recognise.miss import Miss
from .traffic import BATCH, FEATURES, ROWS, VOCAB, Traffic, expression_of, hint_of


@dataclass(frozen=True)
class Rule:
    """Where fusing was measured to win on one kind of device.

    min_vocab: the smallest vocabulary. A smaller one keeps too few programs busy, whatever the batch.
    max_batch: the largest number of rows at which the fused product keeps up with a plain one; None: no limit was met.
    min_saving: bytes saved per multiply-add of the product that make up for the slower product past ``max_batch``.
        There the time of the product and the traffic saved both grow as B V, so their ratio depends on neither.
        None: nothing makes up for it.
    exact_float32: the limit is that of float32 products without TF32.
    """

    min_vocab: int
    max_batch: int | None = None
    min_saving: float | None = None
    exact_float32: bool = False


# Measured (README, Benchmarks): on a CPU, smaller heads pay for the many small calls of a chunk; on an H200, 1024 ids
# lose to a compiled race by some microseconds, and 32,000 win, at every batch that was measured, which is up to 4096.
# Float32 heads lose at every batch while torch keeps their products exact, and win with TF32.
RULES = {
    "cpu": Rule(min_vocab=50_000),
    "cuda": Rule(min_vocab=4096),
    "cuda, float32": Rule(min_vocab=4096, max_batch=0, exact_float32=True),
}


def measured(device_type: str, dtype: torch.dtype) -> Rule:
    """The rule for heads of ``dtype``, under torch's present precision of float32 products."""
    if device_type == "cpu":
        return RULES["cpu"]
    exact = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32"
    return RULES["cuda, float32" if exact else "cuda"]


def check_vocab(sizes: Sequence[Any], dim: int, rule: Rule, sink: Node) -> None:
    """Raise a Miss for a vocabulary below the rule's smallest.

    sizes: of what the sink samples along ``dim``, ints or SymInts. A dynamic one is judged by its bounds, else by its
    value in the call that is compiled.
    """
    if not _exceeds(rule.min_vocab, sizes[dim], by_hint=True):
        return
    vocab = _value(sizes[dim])
    what, hint = "vocabulary", ""
    if dim != len(sizes) - 1:
        what = f"sampled dimension, {dim}, taken for the vocabulary,"
        hint = f"sample along dim=-1, whose {_value(sizes[-1])} entries the linear computes, if those are meant; or "
    raise Miss(
        "SMALL_VOCAB",
        f"the {what} has {vocab} entries, fewer than {rule.min_vocab}: a fused kernel would not pay",
        f"{hint}set options={{'flashsampling.min_vocab': {vocab}}} to fuse it all the same "
        f"(with mode=, FLASHSAMPLING_MIN_VOCAB={vocab})",
        sink,
    )


def check_batch(traffic: Traffic, rule: Rule, sharded: bool, sink: Node, guards: bool) -> None:
    """Raise a Miss where a plain product and a sampler of its own are faster, for the number of rows.

    A dynamic batch is judged by its bounds, else by its value in the call that is compiled. With ``guards`` (see
    `may_guard`) the graph then serves that side of the limit only, without them every batch. sharded: all ranks must
    decide alike, and one may take from a compile cache what was decided for another batch, so only bounds count.
    """
    rows = traffic.sizes[BATCH]
    if rule.max_batch is None:
        return
    if guards and not sharded and hint_of(rows) is not None:
        beyond = bool(rows > rule.max_batch)
    else:
        beyond = _exceeds(rows, rule.max_batch, by_hint=not sharded)
    if not beyond:
        return
    if rule.min_saving is not None:
        if _exceeds(traffic.sizes[ROWS], rows, by_hint=not sharded):
            return  # unfused, rows that are not sampled would be multiplied too
        saving = _number(traffic, traffic.saved / traffic.known(BATCH * VOCAB * FEATURES), by_hint=not sharded)
        if saving is None or saving >= rule.min_saving:
            return
    if rule.exact_float32:
        why = "a plain float32 product and a sampler are faster on a GPU"
        hint = "allow TF32 (torch.set_float32_matmul_precision('high')), keep the head in bf16, or "
    else:
        why = f"{_value(rows)} rows are sampled, more than flashsampling.max_batch, {rule.max_batch}"
        hint = ""
    override = (
        f"set options={{'flashsampling.max_batch': {_value(rows)}}} to fuse it all the same "
        f"(with mode=, FLASHSAMPLING_MAX_BATCH={_value(rows)})"
    )
    raise Miss("NO_GAIN", why, hint + override, sink)


def _number(traffic: Traffic, expression: sympy.Expr, by_hint: bool) -> float | None:
    """The value of ``expression``, where need be (by_hint) at the sizes of this call; None if that is not known."""
    expression = sympy.cancel(expression)
    hints = {symbol: hint_of(traffic.sizes[symbol]) for symbol in expression.free_symbols}
    if None in hints.values() or (hints and not by_hint):
        return None
    return float(expression.subs(hints))


def may_guard(inputs: Iterable[Any]) -> bool:
    """Whether a graph of these inputs may be guarded on a dynamic size: torch takes none inside of declared bounds.

    Bounds that a check in the user's code gave look the same.
    """
    sizes = [size for x in inputs for size in (x.shape if isinstance(x, torch.Tensor) else [x])]
    nodes = [size.node for size in sizes if isinstance(size, torch.SymInt)]
    ranges = [node.shape_env.bound_sympy(symbol) for node in nodes for symbol in node.expr.free_symbols]
    return all(bounds.lower <= 2 and bounds.upper == int_oo for bounds in ranges)


def _exceeds(a: int | torch.SymInt, b: int | torch.SymInt, by_hint: bool) -> bool:
    """Whether ``a > b``: for all values of dynamic sizes, or else (by_hint) for those of this call. Adds no guard."""
    dynamic = [size.node for size in (a, b) if isinstance(size, torch.SymInt)]
    if not dynamic:
        return a > b
    bounds = dynamic[0].shape_env.bound_sympy(expression_of(a) - expression_of(b))
    if bounds.lower > 0:
        return True
    if bounds.upper <= 0 or not by_hint:
        return False
    hints = hint_of(a), hint_of(b)
    return None not in hints and hints[0] > hints[1]


def _value(size: int | torch.SymInt) -> int:
    """For messages: the size in this call, or the least it can be."""
    hint = hint_of(size)
    return int(size.node.shape_env.bound_sympy(size.node.expr).lower) if hint is None else hint
