"""Bytes a fusion does not move, as sympy expressions of batch and vocabulary.

The model counts device-memory traffic of tensors with a vocabulary dimension when the site is not fused: the linear
writes the logits, and what follows reads them. The weight and the hidden states are read either way and cancel.
"""

from __future__ import annotations

import sympy

BATCH, VOCAB = sympy.symbols("B V", positive=True, integer=True)


def bytes_saved(draws: int, logit_bytes: int, row_noise: bool) -> sympy.Expr:
    """Bytes of logits, probabilities and noise not moved for a site with ``draws`` draws per row (0: greedy).

    logit_bytes: size of one logit in the graph. row_noise: the draw was spelled with a ``[B, V]`` noise tensor.

    Unfused greedy writes the logits and reads them once. An unfused draw writes the logits, reads them to normalise
    (the row statistics and the probabilities in one pass each), writes float32 probabilities and reads them to draw;
    noise is generated where it is used, so it costs no traffic of its own but for a draw spelled as multinomial, which
    writes and reads a race of its own.
    """
    logits = BATCH * VOCAB * logit_bytes
    if draws == 0:
        return 2 * logits
    probabilities = BATCH * VOCAB * 4
    race = 0 if row_noise else 2 * probabilities
    return 3 * logits + 2 * probabilities + race
