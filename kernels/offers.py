"""What a tile of logits becomes: candidates for each row's winner, 64-bit words that one `atomic_max` a row compares.

A word is the order-preserving key of a score above the complement of an id: the highest score wins, and of equal ones
the lowest id. A group's score needs only its maximum, its mass and one random word, so the tournament that picks the
winner *inside* a group is run only by tiles that may beat the best score so far: a few waves out of many.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rng_triton import group_words, gumbel, uniform

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
_INF = tl.constexpr(float("inf"))

# One parameter a line would bury the code.
# fmt: off

# A position inside a group has bits k-1 ... 0. The tournament decides the top bit first, down to bit 3, then 0, 2, 1.
# With accumulators as the matrix unit leaves them, bits 2 and 1 number the threads of a quad and the others a thread's
# registers, so splitting on those moves nothing. Masses are always added in that order, so that they are the same
# numbers under every tile shape. For the same reason a column's number is that of its thread's first one, and a
# constant: whole, it would take a register, and the compiler would keep it there from tile to tile.


@triton.jit
def laid_as(x, like):
    """x. Gluon, where a value has the layout its operation gave it, moves it to where `like` is."""
    return x


@triton.jit
def halves(x, BB: tl.constexpr, NG: tl.constexpr, WIDTH: tl.constexpr):
    """Split [BB, NG, WIDTH] on the top bit of the last axis: two [BB, NG, WIDTH / 2]."""
    return tl.split(x.reshape(BB, NG, 2, WIDTH // 2).permute(0, 1, 3, 2))


@triton.jit
def by_thread(x):
    """[..., N] as [..., N / 8, 4, 2], whose last axis but one numbers threads."""
    if len(x.shape) == 3:
        return x.reshape(x.shape[0], x.shape[1], x.shape[2] // 8, 4, 2)
    else:
        return x.reshape(x.shape[0], x.shape[1] // 8, 4, 2)


@triton.jit
def from_first(N: tl.constexpr):
    """How far columns are from their thread's first one, [N / 8, 1, 2]."""
    return tl.arange(0, N // 8)[:, None, None] * 8 + tl.arange(0, 2)[None, None, :]


@triton.jit
def lowest(mask, N: tl.constexpr):
    """The lowest column of [..., N] that is in the mask; N or more for none."""
    # As whole numbers: if taken apart, Triton would move a tile to another layout for them.
    if len(mask.shape) == 3:
        return tl.min(tl.where(mask, tl.arange(0, N)[None, None, :], N), 2)
    else:
        return tl.min(tl.where(mask, tl.arange(0, N)[None, :], N), 1)


@triton.jit
def _mask_outside(logits, v0, V):
    """-inf for columns outside the vocabulary, which only its first and its last tile have."""
    BB: tl.constexpr = logits.shape[0]
    BV: tl.constexpr = logits.shape[1]
    thread = tl.arange(0, 4)[None, None, :, None] * 2
    own = from_first(BV)[None]
    # Of a branch, or of a loop that is known to run once, the compiler would make selections for every tile.
    outside = tl.cdiv(tl.maximum(tl.maximum(v0 + BV - V, -v0), 0), BV)
    while outside > 0:
        inside = (own >= -v0 - thread) & (own < V - v0 - thread)
        logits = tl.where(inside, by_thread(logits), -_INF).reshape(BB, BV)
        outside -= 1
    return logits


@triton.jit
def _sides(x, high):
    """Split on axis 2, whose two elements may sit in two threads: a sum of one moves it without shared memory."""
    zero = tl.zeros_like(x)
    return tl.sum(tl.where(high, zero, x), 2), tl.sum(tl.where(high, x, zero), 2)


@triton.constexpr_function
def levels(group):
    """How many bits a position inside a group has above bit 2."""
    return group.bit_length() - 4


@triton.jit
def _group_mass(p, BB: tl.constexpr, NG: tl.constexpr, G: tl.constexpr):
    """The total [BB, NG] of p [BB, NG, G], added up in the tournament's order."""
    LEVELS: tl.constexpr = levels(G)
    for level in tl.static_range(LEVELS):
        s0, s1 = halves(p, BB, NG, G >> level)
        p = s0 + s1
    s0, s1 = tl.split(p.reshape(BB, NG, 4, 2))
    return tl.sum(tl.sum((s0 + s1).reshape(BB, NG, 2, 2), 2), 2)


@triton.jit
def group_top(x):
    """The maximum [BB, NG] of x [BB, NG, G]."""
    return tl.max(x, 2)


@triton.jit
def group_scores(logits, NG: tl.constexpr, G: tl.constexpr):
    """What `offer_draw` wants of logits [BB, NG * G]: p [BB, NG, G], top and mass [BB, NG]."""
    BB: tl.constexpr = logits.shape[0]
    x = logits.reshape(BB, NG, G)
    top = group_top(x)
    # Clamped to finite, so that -inf gives p = 0, +inf gives p = inf, and no inf - inf makes a NaN.
    top = tl.where(top == top, tl.minimum(tl.maximum(top, -_FLOAT_MAX), _FLOAT_MAX), 0.0)
    # p is made by one multiply-add, which does not round the product, while `shift` is rounded: p of the top is not 1
    # but 2 to that difference, for which `mass` makes up. From 2^30 on it would leave float32: groups that are masked
    # by -1e10 would have infinite mass. There floats are 128 apart or more, and any scale serves; this one is exact.
    far = tl.abs(top) > 1073741824.0
    scale = tl.where(far, 1.0, _LOG2_E)
    shift = top * scale
    p = tl.exp2(x * scale[:, :, None] - shift[:, :, None])
    return p, tl.where(far, top, shift * _LN_2), laid_as(_group_mass(p, BB, NG, G), top)


@triton.jit
def _merge(s0, s1, i0, i1, u, BIT: tl.constexpr):
    """One level of the tournament: masses s0, s1 and winners i0, i1 of the sides with BIT clear and set."""
    total = s0 + s1
    u = laid_as(u, total)
    # Comparing with the smaller side keeps full relative precision for both; a side of mass 0 cannot win.
    small = u * total < tl.minimum(s0, s1)
    take1 = small == (s1 < s0)
    return total, tl.where(take1, i1 | BIT, i0)


@triton.jit
def _tournament(p, words, BB: tl.constexpr, NG: tl.constexpr, G: tl.constexpr):
    """The winner's position [BB, NG] inside each group, drawn with probability p / sum p; p is [BB, NG, G]."""
    LEVELS: tl.constexpr = levels(G)
    i = laid_as(tl.zeros((BB, NG, G), tl.int32), p)
    for level in tl.static_range(LEVELS):
        s0, s1 = halves(p, BB, NG, G >> level)
        i0, i1 = halves(i, BB, NG, G >> level)
        p, i = _merge(s0, s1, i0, i1, uniform(words[level])[:, :, None], G >> (level + 1))
    s0, s1 = tl.split(p.reshape(BB, NG, 4, 2))
    i0, i1 = tl.split(i.reshape(BB, NG, 4, 2))
    p, i = _merge(s0, s1, i0, i1, uniform(words[LEVELS])[:, :, None], 1)
    p, i = p.reshape(BB, NG, 2, 2), i.reshape(BB, NG, 2, 2)
    high = tl.arange(0, 2)[None, None, :, None] == 1
    s0, s1 = _sides(p, high)
    i0, i1 = _sides(i, high)
    p, i = _merge(s0, s1, i0, i1, uniform(words[LEVELS + 1])[:, :, None], 4)
    high = tl.arange(0, 2)[None, None, :] == 1
    s0, s1 = _sides(p, high)
    i0, i1 = _sides(i, high)
    return _merge(s0, s1, i0, i1, uniform(words[LEVELS + 2]), 2)[1]


@triton.jit
def _order_key(score):
    """An uint32 that orders as the scores do: -0.0 equals 0.0, and every NaN is one key above +inf."""
    bits = (score + 0.0).to(tl.uint32, bitcast=True)
    key = tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(score != score, 0xFFFFFFFF, key).to(tl.uint32)


@triton.jit
def _any(mask):
    # An axis at a time: over all at once, Triton would first move the mask to another layout.
    mask = mask.to(tl.int32)
    if len(mask.shape) == 2:
        mask = tl.max(mask, 1)
    return tl.max(mask, 0) != 0


@triton.jit
def read_best(best, slot0, step, row0, B, BB: tl.constexpr, THREADS: tl.constexpr):
    """The words so far of rows row0 ... row0 + BB, at slot0, slot0 + step, ...: [BB * COPIES], for `best_key_of`.

    An old word is only lower, so racing with other programs is harmless. What is not harmless is two threads that hold
    one row and have read different values: they part at the next branch and wait for each other at a barrier forever.
    So there are copies enough that every element is one thread's alone (at two elements, the widest load, a thread),
    and `best_key_of` settles on their maximum. A row's copies are neighbours: their maximum stays inside a warp.
    """
    COPIES: tl.constexpr = 2 * THREADS // BB if 2 * THREADS > BB else 1
    i = tl.arange(0, BB * COPIES)
    row = i // COPIES
    slots = slot0 + row.to(tl.int64) * step
    return tl.load(best + slots, mask=(row0 + row < B) & (i % COPIES == 0), other=0, volatile=True)


@triton.jit
def best_key_of(words, BB: tl.constexpr):
    keys = (words >> 32).to(tl.uint32)
    return tl.max(keys.reshape(BB, keys.numel // BB), 1)


@triton.jit
def _word(key, ids):
    """What a row keeps the maximum of: the higher key, and among equal keys the lower id."""
    return (key.to(tl.uint64) << 32) | (0xFFFFFFFF - ids.to(tl.uint64))


@triton.jit
def _max_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def keep_highest(slots, word, mask):
    tl.atomic_max(slots, word, mask=mask, sem="relaxed", scope="gpu")


@triton.jit
def offer_argmax(logits, first_col, row_mask, slots, best, best_key, id_base,
                 BV: tl.constexpr, INTERPRET: tl.constexpr):
    """Greedy: offer the lowest id of each row's maximum; a NaN counts as above everything, as in torch.argmax."""
    if INTERPRET:  # a custom reduction runs element by element there
        top = tl.max(logits, 1)
        top = tl.where(tl.max((logits != logits).to(tl.int32), 1) != 0, float("nan"), top)
    else:
        top = tl.reduce(logits, 1, _max_nan)
    key = _order_key(top)
    wins = (key >= laid_as(best_key, key)) & laid_as(row_mask, key)
    if _any(wins):
        at_top = (logits == top[:, None]) | (logits != logits)
        col = laid_as(lowest(at_top, BV), key)
        # An all -inf row is at its maximum in the masked columns before the shard too.
        ids = tl.maximum(col.to(tl.int64) + first_col, 0) + id_base
        keep_highest(best + slots, _word(key, ids), wins)


@triton.jit
def _of_best(x, key, BB: tl.constexpr, NG: tl.constexpr):
    """x [BB, NG] -> [BB, 1], its value at the group of each row's highest key, of equals the first."""
    x, key = tl.broadcast(x, key)
    for level in tl.static_range(6):  # any more groups than a tile has
        if NG >> level > 1:
            key0, key1 = tl.split(key.reshape(BB, NG >> (level + 1), 2))
            x0, x1 = tl.split(x.reshape(BB, NG >> (level + 1), 2))
            x = tl.where(key1 > key0, x1, x0)
            key = tl.where(key1 > key0, key1, key0)
    return x


@triton.jit
def _best_group(p, key, BB: tl.constexpr, NG: tl.constexpr, G: tl.constexpr):
    """`_of_best` for the elements of groups: p [BB, NG, G] -> [BB, 1, G]."""
    for level in tl.static_range(6):  # any more groups than a tile has
        if NG >> level > 1:
            key0, key1 = tl.split(key.reshape(BB, NG >> (level + 1), 2))
            p0, p1 = tl.split(p.reshape(BB, NG >> (level + 1), 2, G).permute(0, 1, 3, 2))
            p = tl.where((key1 > key0)[:, :, None], p1, p0)
            key = tl.where(key1 > key0, key1, key0)
    return p


@triton.jit
def _best_words(seed, first_id, rows, draw, key, BB: tl.constexpr, NG: tl.constexpr):
    """The words of each row's best group, [BB, 1]."""
    # The first four cost less if asked for once, by the winner's id. The others must be those that came with the word
    # of the score: if that one had no other use, Triton would think it free to compute it where it is needed, which is
    # in each of the four threads that share a row.
    words = group_words(seed, first_id, rows, draw)
    r0, r1, r2, r3, _, _, _, r7 = group_words(seed, _of_best(first_id, key, BB, NG), rows, draw)
    r4 = _of_best(words[4], key, BB, NG)
    r5 = _of_best(words[5], key, BB, NG)
    r6 = _of_best(words[6], key, BB, NG)
    return r0, r1, r2, r3, r4, r5, r6, r7


@triton.jit
def offer_draw(p, top, mass, group_id, rows, row_mask, slots, best, best_key, seed, draw, id_base,
                SELECT: tl.constexpr, BB: tl.constexpr, NG: tl.constexpr, G: tl.constexpr):
    """One draw: perturb the groups' scores, and offer each row's best group with the winner inside it.

    p [BB, NG, G]: exp(logits - top), but for what float32 makes of it; mass: its sums. top and mass are [BB, NG].
    group_id [1, NG]: the groups' aligned first ids. best_key [BB]: from `best_key_of`.
    SELECT: only a row's best group needs a winner. Pick it before the tournament, which pays where the groups of a row
    are in one thread, as Hopper's matrix unit leaves them; elsewhere whole tiles would change hands.
    """
    first_id = tl.maximum(group_id, id_base)  # a shard boundary may cut its first group
    first_id = laid_as(first_id, top)
    rows = laid_as(rows[:, None], top)
    draw = tl.zeros_like(rows) + draw  # a tensor, also for the interpreter, where loops count in Python
    noise = gumbel(group_words(seed, first_id, rows, draw)[7])
    key = _order_key(top + tl.log(mass) + noise)
    row_key = tl.max(key, 1)
    wins = (row_key >= laid_as(best_key, row_key)) & laid_as(row_mask, row_key)
    if _any(wins):
        # p1 is also a value of its own for this branch: the tournament adds what `_group_mass` has added, and the
        # compiler would keep all those sums in registers from there to here.
        if SELECT and NG > 1:
            NG1: tl.constexpr = 1
            p1 = _best_group(p, key, BB, NG, G)
            mass1 = _of_best(mass, key, BB, NG)
            id1 = _of_best(group_id, key, BB, NG)
            key1 = row_key[:, None]
        else:
            NG1: tl.constexpr = NG
            p1 = tl.where(wins[:, None, None], p, 0.0)
            mass1 = mass
            id1 = group_id
            key1 = key
        # First what a tournament cannot decide: a NaN, else a +inf, wins its group; a group without mass (all -inf)
        # offers its first id.
        special = (mass1 == 0.0) | (mass1 == _INF) | (mass1 != mass1)
        forced = tl.zeros_like(special.to(tl.int32))
        if _any(wins[:, None] & special):
            nan = laid_as(lowest(p1 != p1, G), forced)
            inf = laid_as(lowest(p1 == _INF, G), forced)
            forced = tl.where(nan < G, nan, tl.where(inf < G, inf, 0))
        # Asked for again here, so that the four words only the tournament needs cost nothing elsewhere.
        if SELECT and NG > 1:
            words = _best_words(seed, first_id, rows, draw, key, BB, NG)
        else:
            words = group_words(seed, first_id, rows, draw)
        position = tl.where(special, forced, laid_as(_tournament(p1, words, BB, NG1, G), mass1))
        word = tl.max(_word(key1, tl.maximum(id1 + position, id_base)), 1)
        keep_highest(best + slots, word, wins)


@triton.jit
def tile_rows(b0, BB: tl.constexpr):
    """The rows of a tile whose first one is b0."""
    return b0 + tl.arange(0, BB)


@triton.jit
def load_operands(LOADS: tl.constexpr, operands, strides, rows, v0, B, V, BV: tl.constexpr):
    if LOADS is None:
        return ()
    else:
        return LOADS(operands, strides, rows, v0, B, V, BV)


@triton.jit
def offer_tile(acc, v0, b0, B, V, id_base, num_draws, seed, best, best_words, operands, operand_strides, early,
                LATE: tl.constexpr, EPILOGUE: tl.constexpr, GREEDY_EPILOGUE: tl.constexpr, GREEDY: tl.constexpr,
                MANY_DRAWS: tl.constexpr, ROW_SEEDS: tl.constexpr, SELECT: tl.constexpr, G: tl.constexpr,
                BB: tl.constexpr, BV: tl.constexpr, THREADS: tl.constexpr, INTERPRET: tl.constexpr):
    """Offer the candidates of one tile: acc [BB, BV] is the product of rows b0... and ids v0... of the shard."""
    NG: tl.constexpr = BV // G
    rows = tile_rows(b0, BB)
    row_mask = rows < B
    logits = EPILOGUE(acc, early, load_operands(LATE, operands, operand_strides, rows, v0, B, V, BV))
    logits = _mask_outside(logits, v0, V)
    if GREEDY:
        offer_argmax(logits, v0, row_mask, rows, best, best_key_of(best_words, BB), id_base, BV, INTERPRET)
    else:
        p, top, mass = group_scores(logits, NG, G)
        group_id = id_base.to(tl.int64) + v0 + tl.arange(0, NG).to(tl.int64)[None, :] * G
        if ROW_SEEDS:
            row_seed = laid_as(tl.load(seed + rows, mask=row_mask, other=0)[:, None], top)
            noise_row = tl.zeros_like(rows)
        else:
            row_seed = tl.load(seed)
            noise_row = rows
        if MANY_DRAWS:
            for draw in range(num_draws):
                slots = rows.to(tl.int64) * num_draws + draw
                words = read_best(best, b0.to(tl.int64) * num_draws + draw, num_draws, b0, B, BB, THREADS)
                best_key = best_key_of(words, BB)
                offer_draw(p, top, mass, group_id, noise_row, row_mask, slots, best, best_key, row_seed, draw, id_base,
                            SELECT, BB, NG, G)
        else:
            best_key = best_key_of(best_words, BB)
            offer_draw(p, top, mass, group_id, noise_row, row_mask, rows, best, best_key, row_seed, 0, id_base,
                        SELECT, BB, NG, G)
    if GREEDY_EPILOGUE is not None:
        # Loaded again, rather than kept in registers while the draw is made.
        logits = GREEDY_EPILOGUE(acc, early, load_operands(LATE, operands, operand_strides, rows, v0, B, V, BV))
        logits = _mask_outside(logits, v0, V)
        slots = B.to(tl.int64) * num_draws + rows  # behind the draws' words
        words = read_best(best, B.to(tl.int64) * num_draws + b0, 1, b0, B, BB, THREADS)
        best_key = best_key_of(words, BB)
        offer_argmax(logits, v0, row_mask, slots, best, best_key, id_base, BV, INTERPRET)


@triton.jit
def count_to(N: tl.constexpr):
    """0 ... N - 1, one to a thread where there are enough."""
    return tl.arange(0, N)


@triton.jit
def finish(best, out, count, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Turn `count` winners into tokens and zero their words. Only the last program of a launch runs this.

    WORDS: leave the winners as words, for other ranks to compare, signed as torch compares.
    """
    for start in range(0, count, BLOCK):
        slots = start + count_to(BLOCK).to(tl.int64)
        mask = slots < count
        word = tl.load(best + slots, mask=mask, other=0, volatile=True)
        if WORDS:
            token = word ^ 0x8000000000000000
        else:
            token = 0xFFFFFFFF - (word & 0xFFFFFFFF)
        tl.store(out + slots, token.to(tl.int64), mask=mask)
        tl.debug_barrier()  # the thread that zeroes a word need not be the one that has read it, and stored its token
        tl.store(best + slots, tl.zeros_like(slots).to(tl.uint64), mask=mask)
