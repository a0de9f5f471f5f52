"""The noise of group-Gumbel sampling, in torch: Philox4x32-10, uniforms, and the Gumbel of a group.

`rng_triton.py` holds the same functions for the device. The two must agree word for word, because
a token is promised to depend on (seed, draw, row, global ids, logits) and not on the machine that
drew it. What both of them share, the constants below, lives here, in the half that needs no Triton.

Words are kept in int64 tensors holding values in [0, 2**32): torch has no arithmetic on uint32.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 128
"""Consecutive global ids that share one score. Part of the contract: changing it changes tokens."""

UNIFORM_SCALE = 2.0**-32
UNIFORM_MAX = 1.0 - 2.0**-24
"""The largest f32 below one. Words near 2**32 would round up to 1.0, where the Gumbel is -inf."""

NUM_WORDS = 8
"""Words per (row, draw, group): one for each of at most seven levels, the last for the score."""

_MASK = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85


def level_bits(group: int = GROUP) -> tuple[int, ...]:
    """The bit of the position inside a group that each tournament level decides, first level first.

    128 gives (6, 5, 4, 3, 0, 2, 1). On the device the two columns of a pair (bit 0) and every
    eighth column (bits 3 and up) sit in one thread's registers, while bits 1 and 2 number the
    threads of a quad: those come last, when one pair a thread is left to exchange.

    Raises ValueError unless `group` is a power of two from 16 to 128.
    """
    if group not in (16, 32, 64, 128):
        raise ValueError(f"group must be 16, 32, 64 or 128, not {group}")
    return (*range(group.bit_length() - 2, 2, -1), 0, 2, 1)


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Philox4x32 with ten rounds: four words for a counter of four words and a key of two.

    All are int64 tensors with values in [0, 2**32); the arguments broadcast.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The 64-bit products wrap around the sign of int64, but all their bits are right.
        product_a, product_b = c0 * _ROUND_A, c2 * _ROUND_B
        c0, c1 = (product_b >> 32 ^ c1 ^ k0) & _MASK, product_b & _MASK
        c2, c3 = (product_a >> 32 ^ c3 ^ k1) & _MASK, product_a & _MASK
        k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
    return c0, c1, c2, c3


def group_words(seed: Tensor, first_id: Tensor, row: Tensor, draw: Tensor, half: int) -> tuple[Tensor, ...]:
    """Four of the eight words of a group: r0..r3 for `half` 0, r4..r7 for `half` 1.

    seed: int64, any value; its low half is the first word of the key.
    first_id: int64, the global id of the group's first element in this shard (its low 32 bits).
    row, draw: int64, which row of the output and which draw of that row.
    All broadcast; the words have their common shape.
    """
    last = torch.full_like(first_id, half)
    counter = (first_id & _MASK, row & _MASK, draw & _MASK, last)
    return philox4x32(counter, (seed & _MASK, (seed >> 32) & _MASK))


def uniform(word: Tensor) -> Tensor:
    """A word as f32 in (0, 1): (word + 1/2) / 2**32, never 0 and never 1."""
    return ((word.to(torch.float32) + 0.5) * UNIFORM_SCALE).clamp_max(UNIFORM_MAX)


def gumbel(word: Tensor) -> Tensor:
    """A word as standard Gumbel noise, f32, finite for every word: from -2.8 to 22.9.

    The long upper tail comes from the uniform near zero, where f32 is dense; taken near one it
    would stop at 16.6.
    """
    return -torch.log(-torch.log1p(-uniform(word)))
