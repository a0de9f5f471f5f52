"""Bytes of device memory that a site moves, unfused and fused, as sympy expressions of its sizes.

The model counts tensors once for each kernel that reads or writes them: the weight, the hidden states, the logits, what
a draw makes of them, and the tokens. Operands of the logit processing (masks, biases) are read either way; left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from .recognise.shapes import shape
from .recognise.tails import Site

BATCH, VOCAB, FEATURES, ROWS, WIDTH = sympy.symbols("B V D R N", positive=True, integer=True)

MEANING = {
    BATCH: "rows sampled",
    VOCAB: "vocabulary",
    FEATURES: "hidden size",
    ROWS: "rows of the unfused product",
    WIDTH: "columns of the unfused product",
}
"""The model's sizes. R exceeds B where a step multiplies rows that it does not sample; N exceeds V where it slices the
vocabulary, and is one rank's share where the vocabulary is sharded."""

TOKEN_BYTES = 8


@dataclass(frozen=True)
class Traffic:
    """Bytes a call moves: ``unfused`` and ``fused``, in the symbols of `MEANING`; ``sizes`` gives the symbols' values.

    A size is an int or, where it is dynamic, a SymInt; to read a Traffic never guards on one.
    """

    unfused: sympy.Expr
    fused: sympy.Expr
    sizes: Mapping[sympy.Symbol, int | torch.SymInt]

    @property
    def saved(self) -> sympy.Expr:
        """Bytes that the fused call does not move, with what is known of the sizes filled in."""
        return self.known(self.unfused - self.fused)

    def known(self, expression: sympy.Expr) -> sympy.Expr:
        """``expression`` with numbers for the static sizes; of the dynamic ones, N and R become V and a multiple of B
        where that is what they are for every value."""
        values: dict[sympy.Symbol, Any] = {s: size for s, size in self.sizes.items() if isinstance(size, int)}
        for symbol, base in ((ROWS, BATCH), (WIDTH, VOCAB)):
            if symbol not in values and base not in values:
                ratio = sympy.cancel(expression_of(self.sizes[symbol]) / expression_of(self.sizes[base]))
                if ratio.is_Integer:
                    values[symbol] = ratio * base
        return sympy.expand(expression.subs(values))

    def per_head(self, heads: int) -> Traffic:
        """The share of one of ``heads`` stacked heads, whose rows are as many: what one of their calls moves."""
        unfused, fused = (expression.subs(BATCH, heads * BATCH) / heads for expression in (self.unfused, self.fused))
        return Traffic(unfused, fused, {**self.sizes, BATCH: self.sizes[BATCH] // heads})


def of(sites: Sequence[Site]) -> Traffic:
    """The traffic of ``sites``, which share their linear and sample the same rows of it: one call serves them all."""
    site = sites[0]
    product, dim = site.linear.node, site.linear_dim
    scores = shape(site.sink.args[0])
    sizes = {
        BATCH: _but(scores, site.sink_dim),
        VOCAB: scores[site.sink_dim],
        FEATURES: shape(site.linear.hidden(dim))[dim],
        ROWS: _but(shape(product), dim),
        # The last rank's share may be smaller, but what is decided from traffic must be decided alike on all ranks.
        WIDTH: shape(product)[dim] if site.gather is None else site.gather.capacity,
    }
    weight_bytes = site.linear.left.meta["val"].dtype.itemsize
    logit_bytes = product.meta["val"].dtype.itemsize
    tokens = sum(BATCH * max(each.draws, 1) * TOKEN_BYTES for each in sites)
    # Stacked heads may have linears of their own; each head is a call that reads its part of a weight.
    linears = len({head.linear.node for head in site.heads})
    unfused = linears * ((WIDTH + ROWS) * FEATURES * weight_bytes + ROWS * WIDTH * logit_bytes) + tokens
    unfused += sum(sampling(each.draws, logit_bytes, row_noise=bool(each.noise)) for each in sites)
    own = VOCAB * len(site.heads)
    if site.gather is not None:
        own = WIDTH
        unfused += BATCH * (WIDTH + VOCAB) * logit_bytes  # the gather reads one share and writes all of them
    fused = (own + BATCH) * FEATURES * weight_bytes + tokens
    return Traffic(unfused, fused, sizes)


def sampling(draws: int, logit_bytes: int, row_noise: bool) -> sympy.Expr:
    """Bytes moved from written logits to the token, for ``draws`` draws per row (0: greedy).

    logit_bytes: size of one logit in the graph. row_noise: the draw was spelled with a ``[B, V]`` noise tensor.

    Greedy reads the logits once. A draw reads them to normalise (the row statistics and the probabilities in one pass
    each), writes float32 probabilities and reads them to draw; noise is generated where it is used, so it costs no
    traffic of its own but for a draw spelled as multinomial, which writes and reads a race of its own.
    """
    logits, floats = BATCH * VOCAB * logit_bytes, BATCH * VOCAB * 4
    if draws == 0:
        return logits
    return 2 * logits + 2 * floats + (0 if row_noise else 2 * floats)


def expression_of(size: int | torch.SymInt) -> sympy.Expr:
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


def hint_of(size: int | torch.SymInt) -> int | None:
    """The size in the call that is compiled; None where it is unknown, as for a size that depends on data."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else None


def _but(sizes: Sequence[Any], dim: int) -> Any:
    return math.prod(size for d, size in enumerate(sizes) if d != dim)
