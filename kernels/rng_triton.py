"""The noise of group-Gumbel sampling, in Triton: what `rng.py` does in torch, with the same names.

A file of its own, so that the plain-torch path imports `rng.py` where Triton is not installed.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def group_words(seed, first_id, row, draw):
    """The eight words (uint32) of every group of a tile.

    seed: int64 scalar, or [BB, 1] for one seed a row.
    first_id: integers [1, NG] or [BB, NG], global id of each group's first element in this shard.
    row: integers [BB, 1], the row of the output (0 throughout when every row has its own seed).
    draw: integer scalar. The words are [BB, NG].
    """
    first_id, row = tl.broadcast(first_id.to(tl.uint32), row.to(tl.uint32))
    zero = tl.zeros_like(row)
    draw = zero + draw.to(tl.uint32)
    r0, r1, r2, r3 = tl.philox(seed, first_id, row, draw, zero, n_rounds=10)
    r4, r5, r6, r7 = tl.philox(seed, first_id, row, draw, zero + 1, n_rounds=10)
    return r0, r1, r2, r3, r4, r5, r6, r7


@triton.jit
def uniform(word):
    """A word as f32 in (0, 1): (word + 1/2) / 2**32, never 0 and never 1."""
    # UNIFORM_SCALE and UNIFORM_MAX of rng.py, spelled out: with a constexpr global, Triton 3.6 keys
    # its cache by what else the process compiled before.
    return tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)


@triton.jit
def gumbel(word):
    """A word as standard Gumbel noise, f32, finite for every word."""
    v = uniform(word)
    # -log1p(-v) from a plain log: w keeps only some bits of v; v / (1 - w) puts the lost ones back.
    w = 1.0 - v
    lost = tl.where(w == 1.0, 1.0, 1.0 - w)
    e = tl.where(w == 1.0, v, -tl.log(w) * (v / lost))
    return -tl.log(e)
