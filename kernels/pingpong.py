"""The fused kernel for large batches on Hopper: two groups of warps take turns at the matrix unit.

While one multiplies its tile of [128 rows, 128 ids], the other one offers the candidates of its own, so that of the two
the longer is what a tile costs, and not their sum. A warp keeps a ring of operand blocks filled for both, and two more
lay out a mask, as bits, and values by token. Triton cannot say that on Hopper, so this is in Gluon; what becomes of a
tile it shares with `gemm_sample.py` through `gluon_twin.py`, and so all of the epilogue, the noise and the tournament.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor as TritonDescriptor

from . import math_triton, offers
from .epilogue import Kind, Program, emit, emit_loads
from .gluon_twin import instead_of, twin
from .rng import GROUP
from .tiles import Tile

# By their names in Triton 3.9, or before.
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret

_BLOCK = 128
"""Rows and ids of a tile: what half a multiprocessor has registers for."""

_IN_FLIGHT = gl.constexpr(2)
"""Steps of a product that the matrix unit has yet to finish when a group gives the stage before them back."""

# A tile is offered half at a time: the code of a whole one, twice, would not fit the instruction cache, and that costs
# more than all it does. The matrix unit leaves rows 16 w + 8 h + r in warp w, as h of its registers.
_TILE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 128, 16]))
_LANES = [[1, 0], [2, 0], [4, 0]]
_WARPS = [[8, 0], [16, 0], [32, 0]]
_HALF = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 8], [0, 16], [0, 32], [0, 64]], [[0, 2], [0, 4], *_LANES], _WARPS, [], [64, 128]
    )
)
# Where a mask is packed, by two warps, [16, 32] words of four bytes at a time; and where half a tile reads it, [64, 4]
# words of 32 bits, which the four threads that share a row share too (the last axis).
_FOURS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [2, 1], [1, 0]))
_BITS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1, 0], [0, 2, 0]],
        [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[8, 0, 0], [16, 0, 0], [32, 0, 0]],
        [],
        [64, 4, 4],
    )
)
_IN_ORDER_1 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_IN_ORDER = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
# Four threads share a row: one element each, for `_read_best`.
_COPIES = gl.constexpr(gl.DistributedLinearLayout([], [[0, 1], [0, 2], *_LANES], _WARPS, [], [64, 4]))

# One parameter a line would bury the code.
# fmt: off


@instead_of(offers.count_to)
@gluon.jit
def _count_to(N: gl.constexpr):
    return gl.arange(0, N, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))


@instead_of(offers.tile_rows)
@gluon.jit
def _half_rows(b0, BB: gl.constexpr):
    i = gl.arange(0, BB, layout=gl.SliceLayout(1, _HALF))
    return b0 + i // 8 * 16 + i % 8


@instead_of(math_triton.spread)
@gluon.jit
def _spread(x, acc):
    return x.load(gl.SliceLayout(0, acc.type.layout))[None, :]


@instead_of(offers.laid_as)
@gluon.jit
def _laid_as(x, like):
    if isinstance(x.type.layout, gl.AutoLayout):
        return gl.set_auto_layout(x, like.type.layout)
    else:
        return gl.convert_layout(x, like.type.layout)


@instead_of(offers.keep_highest)
@gluon.jit
def _keep_highest(slots, word, mask):
    gl.atomic_max(gl.convert_layout(slots, word.type.layout), word, mask=mask, sem="relaxed", scope="gpu")


@instead_of(offers.best_key_of)
@gluon.jit
def _best_key_of(words, BB: gl.constexpr):
    return gl.max((words >> 32).to(gl.uint32), 1)


_split = twin(offers.halves)


@instead_of(offers.group_top)
@gluon.jit
def _group_top(x):
    # As a tree: a reduction would be a chain in each thread.
    BB: gl.constexpr = x.shape[0]
    NG: gl.constexpr = x.shape[1]
    G: gl.constexpr = x.shape[2]
    LEVELS: gl.constexpr = offers.levels(G)
    top = x
    for level in gl.static_range(LEVELS):
        a, b = _split(top, BB, NG, G >> level)
        top = gl.maximum(a, b)
    return gl.convert_layout(gl.max(top, 2), gl.SliceLayout(2, x.type.layout))


_by_thread = twin(offers.by_thread)
_from_first = twin(offers.from_first)


@instead_of(offers.lowest)
@gluon.jit
def _lowest(mask, N: gl.constexpr):
    mask = _by_thread(mask)
    if len(mask.shape) == 5:
        own = gl.min(gl.min(gl.where(mask, _from_first(N)[None, None], N), 4), 2)
        return gl.min(own + gl.arange(0, 4)[None, None, :] * 2, 2)
    else:
        own = gl.min(gl.min(gl.where(mask, _from_first(N)[None], N), 3), 1)
        return gl.min(own + gl.arange(0, 4)[None, :] * 2, 1)


@gluon.jit
def _read_best(best, b0, B):
    """`offers.read_best` of half a tile: of the four threads that share a row one reads, and all agree."""
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, _COPIES))[:, None]
    copy = gl.arange(0, 4, layout=gl.SliceLayout(0, _COPIES))[None, :]
    row = b0 + i // 8 * 16 + i % 8 + copy * 0
    return gl.load(best + row, mask=(row < B) & (copy == 0), other=0, volatile=True)


@gluon.jit
def _lay_out(masks, columns, laid_out, used, shift, B, V, operands, strides, MASKS: gl.constexpr,
             TOKENS: gl.constexpr, NUM_TOKENS: gl.constexpr, BLOCK: gl.constexpr):
    """Put each tile's values by token, and its mask as bits, where the group whose tile it is will find them.

    Of 32 columns of a mask, bit 8 i + j is column 4 j + i.
    """
    if MASKS is not None or NUM_TOKENS:
        which = 0
        phase = 1
        num_b, num_tiles = _tiles(B, V, shift, BLOCK)
        for tile in range(_program(), num_tiles, gl.num_programs(0)):
            v0 = tile // num_b * BLOCK - shift
            b0 = tile % num_b * BLOCK
            i = gl.arange(0, 16, layout=gl.SliceLayout(1, _FOURS))
            mbarrier.wait(used.index(which), phase)
            values = _load_operands(TOKENS, operands, strides, b0 + i, v0, B, V, BLOCK)
            for n in gl.static_range(NUM_TOKENS):
                values_n = gl.set_auto_layout(values[n], gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
                columns.index(which * NUM_TOKENS + n).store(values_n.to(gl.float32))
            if MASKS is not None:
                for part in range(8):  # four to a half
                    rows = b0 + part // 4 * 8 + part % 4 * 32 + i // 8 * 16 + i % 8
                    words = MASKS(operands, strides, rows, v0, B, V, BLOCK)[0]
                    words |= (words & 0x7F7F7F7F) + 0x7F7F7F7F  # the sign of each byte: whether it is not zero
                    words = words.reshape(16, 4, 8)
                    j = gl.arange(0, 8)[None, None, :]
                    bits = gl.sum((words >> (7 - j)) & (0x01010101 << j), 2)
                    masks.index(which * 8 + part).store(bits)
            mbarrier.arrive(laid_out.index(which), count=1)
            if which == 1:
                phase ^= 1
            which ^= 1


# As functions, for what an epilogue calls: with a constexpr global, Triton 3.6 keys its cache by what else the process
# compiled before.
@triton.constexpr_function
def _bits():
    return _BITS.value


@triton.constexpr_function
def _half():
    return _HALF.value


@instead_of(math_triton.four_bytes)
@gluon.jit
def _spread_bits(mask):
    """The mask of half a tile, int32 [64, 128]: all ones or zero. mask: its bits, from `_lay_out`."""
    thread = gl.arange(0, 4)[None, None, :]  # of a row: it has columns 2 thread + e of every eight
    bits = mask.load(gl.SliceLayout(2, _bits()))[:, :, None] >> (thread % 2 * 16 + thread // 2)
    # A permutation of bytes can spread a byte's sign over a word.
    TEXT: gl.constexpr = (
        "{ .reg .b32 t; shl.b32 t, $8, 7; prmt.b32 $0, t, 0, 0x8888; prmt.b32 $1, t, 0, 0x9999; "
        "shl.b32 t, $8, 5; prmt.b32 $2, t, 0, 0x8888; prmt.b32 $3, t, 0, 0x9999; "
        "shl.b32 t, $8, 3; prmt.b32 $4, t, 0, 0x8888; prmt.b32 $5, t, 0, 0x9999; "
        "shl.b32 t, $8, 1; prmt.b32 $6, t, 0, 0x8888; prmt.b32 $7, t, 0, 0x9999; }"
    )
    x00, x01, x10, x11, x20, x21, x30, x31 = gl.inline_asm_elementwise(
        TEXT, "=r,=r,=r,=r,=r,=r,=r,=r,r", [bits], is_pure=True, pack=1,
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32))
    low = gl.join(gl.join(x00, x01), gl.join(x10, x11))
    high = gl.join(gl.join(x20, x21), gl.join(x30, x31))
    x = gl.join(low, high).permute(0, 1, 5, 4, 2, 3)  # row, 32 columns, 16, 8, thread, e
    return gl.convert_layout(x.reshape(64, 128), _half())


@instead_of(math_triton.where_word)
@gluon.jit
def _where_word(mask, x, y):
    # Not by comparing: predicates are few, and moving them to a register and back costs more than all of this.
    return gl.inline_asm_elementwise("lop3.b32 $0, $1, $2, $3, 0xca;", "=r,r,f,f", [mask, x, y], dtype=gl.float32,
                                     is_pure=True, pack=1)


@gluon.jit
def _pack(acc, PACK: gl.constexpr):
    """Two logits that are rounded to 16 bits to a word [128, 64]: to wait, they take half the registers."""
    even, odd = gl.split(acc.reshape(128, 64, 2))
    return gl.inline_asm_elementwise(f"cvt.rn.{PACK}x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32,
                                     is_pure=True, pack=1)


@gluon.jit
def _unpack(words, PACK: gl.constexpr):
    if PACK == "f16":
        TEXT: gl.constexpr = "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }"
    else:
        TEXT: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    even, odd = gl.inline_asm_elementwise(TEXT, "=f,=f,r" if PACK == "f16" else "=r,=r,r", [words],
                                          dtype=(gl.float32, gl.float32), is_pure=True, pack=1)
    return gl.convert_layout(gl.join(even, odd).reshape(64, 128), _HALF)


@gluon.jit
def _halves(x):
    COLUMNS: gl.constexpr = x.shape[1]
    h0, h1 = gl.split(x.reshape(8, 2, 8, COLUMNS).permute(0, 2, 3, 1))
    return h0.reshape(64, COLUMNS), h1.reshape(64, COLUMNS)


@gluon.jit
def _split_columns(x):
    return gl.split(x.reshape(64, 2, x.shape[1] // 2).permute(0, 2, 1))


@gluon.jit
def _join_columns(x, y):
    return gl.join(x, y).permute(0, 2, 1).reshape(64, 2 * x.shape[1])


@gluon.jit
def _pieces(x):
    """Half a tile, as [64, 64] words or [64, 128] logits, in pieces of 32 columns."""
    low, high = _split_columns(x)
    if x.shape[1] == 64:
        return low, high
    else:
        x0, x1 = _split_columns(low)
        x2, x3 = _split_columns(high)
        return x0, x1, x2, x3


@gluon.jit
def _whole(pieces):
    if len(pieces) == 2:
        return _join_columns(pieces[0], pieces[1])
    else:
        return _join_columns(_join_columns(pieces[0], pieces[1]), _join_columns(pieces[2], pieces[3]))


@gluon.jit
def _by_four(piece):
    """A piece as it waits, [2, 1024]: four values of a thread, then those of the next one."""
    E: gl.constexpr = 1 if piece.dtype == gl.int32 else 2  # neighbours that a thread has
    return piece.reshape(64, 2, 4 // E, 4, E).permute(1, 0, 3, 2, 4).reshape(2, 1024)


@gluon.jit
def _fetch(place, like):
    """The piece that waits at `place`, in the layout of another one."""
    E: gl.constexpr = 1 if like.dtype == gl.int32 else 2
    x = place.load(_by_four(like).type.layout)
    return gl.convert_layout(x.reshape(2, 64, 4, 4 // E, E).permute(1, 0, 3, 2, 4).reshape(64, 32), like.type.layout)


@gluon.jit
def _program():
    """gl.program_id(0), asked for where it is needed: the compiler would do so before all groups' code, and spill."""
    return gl.inline_asm_elementwise("mov.u32 $0, %ctaid.x;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _tiles(B, V, shift, BLOCK: gl.constexpr):
    """How many tiles one of ids has, a tile a block of rows, and how many there are."""
    num_b = gl.cdiv(B, BLOCK)
    return num_b, gl.cdiv(V + shift, BLOCK) * num_b


@gluon.jit
def _before(stage, N: gl.constexpr, STAGES: gl.constexpr):
    return gl.where(stage < N, stage + STAGES - N, stage - N)


_load_operands = twin(offers.load_operands)
_offer_tile = twin(offers.offer_tile)
_finish = twin(offers.finish)


@gluon.jit
def _fill(hidden, weight, h_ring, w_ring, full, empty, B, V, steps, shift, BLOCK: gl.constexpr,
          BLOCK_D: gl.constexpr, STAGES: gl.constexpr):
    """Copy the blocks of all the program's tiles, in their order."""
    num_b, num_tiles = _tiles(B, V, shift, BLOCK)
    stage = 0
    phase = 1  # of a barrier that nobody has arrived at, the phase before counts as passed
    for tile in range(_program(), num_tiles, gl.num_programs(0)):
        v0 = tile // num_b * BLOCK - shift
        b0 = tile % num_b * BLOCK
        for step in range(steps):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), 2 * BLOCK * BLOCK_D * 2)  # bytes of two blocks of 16-bit values
            _copy(hidden, [b0, step * BLOCK_D], full.index(stage), h_ring.index(stage))
            _copy(weight, [v0, step * BLOCK_D], full.index(stage), w_ring.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _take_turns(WHICH: gl.constexpr, h_ring, w_ring, aside, masks, columns, full, empty, laid_out, used, turns, steps,
                shift, B, V, id_base, seed, best, operands, strides, NUM_TOKENS: gl.constexpr, ROWS: gl.constexpr,
                EPILOGUE: gl.constexpr, GREEDY: gl.constexpr, ROW_SEEDS: gl.constexpr, MASKED: gl.constexpr,
                PACK: gl.constexpr, ASIDE: gl.constexpr, G: gl.constexpr, BLOCK: gl.constexpr,
                STAGES: gl.constexpr):
    """Multiply and offer every second tile of the program, from its first one on or from its second."""
    num_b, num_tiles = _tiles(B, V, shift, BLOCK)
    step0 = WHICH * steps  # the program's steps before this tile
    turn = 0
    for tile in range(_program() + WHICH * gl.num_programs(0), num_tiles, 2 * gl.num_programs(0)):
        v0 = tile // num_b * BLOCK - shift
        b0 = tile % num_b * BLOCK
        # All that does not need the product.
        words = _read_best(best, b0, B)
        next_words = _read_best(best, b0 + 8, B)
        rows = _load_operands(ROWS, operands, strides, _half_rows(b0, BLOCK // 2), v0, B, V, BLOCK)
        next_rows = _load_operands(ROWS, operands, strides, _half_rows(b0 + 8, BLOCK // 2), v0, B, V, BLOCK)
        acc = gl.zeros((BLOCK, BLOCK), gl.float32, _TILE)
        mbarrier.wait(turns.index(WHICH), turn)
        stage = step0 % STAGES
        phase = step0 // STAGES & 1
        for step in range(steps):
            mbarrier.wait(full.index(stage), phase)
            acc = warpgroup_mma(h_ring.index(stage), w_ring.index(stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(_IN_FLIGHT, deps=[acc])
            # An arrival is one thread's, and waits for all of the group first.
            mbarrier.arrive(empty.index(_before(stage, _IN_FLIGHT, STAGES)), pred=step >= _IN_FLIGHT)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        mbarrier.arrive(turns.index(1 - WHICH), count=1)
        acc = warpgroup_mma_wait(0, deps=[acc])
        for n in gl.static_range(1, _IN_FLIGHT + 1):
            mbarrier.arrive(empty.index(_before(stage, n, STAGES)), pred=steps >= n)
        x, next_x = _halves(acc if PACK is None else _pack(acc, PACK))
        if ASIDE:
            pieces = _pieces(next_x)
            next_x = pieces[0]
            for n in gl.static_range(ASIDE):
                aside.index(WHICH * ASIDE + n).store(_by_four(pieces[1 + n]))
        tokens = ()
        for n in gl.static_range(NUM_TOKENS):
            tokens = tokens + (columns.index(WHICH * NUM_TOKENS + n),)  # noqa: RUF005 - no stars in kernels
        if MASKED or NUM_TOKENS:
            mbarrier.wait(laid_out.index(WHICH), turn)
        for half in range(gl.where(b0 + 8 < B, 2, 1)):
            logits = x if PACK is None else _unpack(x, PACK)
            kept = tokens + rows
            if MASKED:
                kept = (masks.index(WHICH * 2 + half),) + kept  # noqa: RUF005 - no stars in kernels
            _offer_tile(logits, v0, b0 + half * 8, B, V, id_base, 1, seed, best, words, operands, strides, kept, None,
                        EPILOGUE, None, GREEDY, False, ROW_SEEDS, True, G, BLOCK // 2, BLOCK, 256, False)
            if ASIDE:
                pieces = (next_x,)
                for n in gl.static_range(ASIDE):
                    pieces = pieces + (_fetch(aside.index(WHICH * ASIDE + n), next_x),)  # noqa: RUF005
                x = gl.convert_layout(_whole(pieces), x.type.layout)
            else:
                x = next_x
            words = next_words
            rows = next_rows
        if MASKED or NUM_TOKENS:
            mbarrier.arrive(used.index(WHICH), count=1)
        step0 += 2 * steps
        turn ^= 1


@gluon.jit(do_not_specialize=["B", "id_base"], do_not_specialize_on_alignment=["seed"])
def pingpong_kernel(hidden, weight, seed, out, scratch_words, operands, strides, B, V, D, id_base, shift,
                    MASKS: gl.constexpr, TOKENS: gl.constexpr, NUM_TOKENS: gl.constexpr, ROWS: gl.constexpr,
                    EPILOGUE: gl.constexpr, GREEDY: gl.constexpr, ROW_SEEDS: gl.constexpr, WORDS: gl.constexpr,
                    PACK: gl.constexpr, ASIDE: gl.constexpr, G: gl.constexpr, BLOCK: gl.constexpr,
                    BLOCK_D: gl.constexpr, STAGES: gl.constexpr):
    """hidden [B, D], weight [V, D]: descriptors; out int64 [B, 1].

    MASKS, TOKENS, ROWS: how to load a mask, NUM_TOKENS operands by token, and those by row or of one value.
    PACK: None, or "bf16" or "f16", to which the program rounds first: left out of EPILOGUE, and done here.
    ASIDE: of the second half of a tile, how many pieces wait in shared memory while the first is offered.
    The other arguments are those of `gemm_sample_kernel`.
    """
    MASKED: gl.constexpr = MASKS is not None
    best = (scratch_words + 1).to(gl.pointer_type(gl.uint64), bitcast=True)
    steps = gl.cdiv(D, BLOCK_D)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    h_ring = gl.allocate_shared_memory(hidden.dtype, [STAGES, BLOCK, BLOCK_D], hidden.layout)
    w_ring = gl.allocate_shared_memory(weight.dtype, [STAGES, BLOCK, BLOCK_D], weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    laid_out = turns  # these stand in where a program has nothing to lay out
    used = turns
    columns = turns
    masks = turns
    halves_masks = turns
    aside = turns
    if ASIDE:
        aside = gl.allocate_shared_memory(gl.float32 if PACK is None else gl.int32, [2 * ASIDE, 2, 1024], _IN_ORDER)
    if MASKED or NUM_TOKENS:
        laid_out = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
        used = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    if NUM_TOKENS:
        columns = gl.allocate_shared_memory(gl.float32, [2 * NUM_TOKENS, BLOCK], _IN_ORDER_1)
    if MASKED:
        masks = gl.allocate_shared_memory(gl.int32, [16, BLOCK // 8, BLOCK // 32], _IN_ORDER)
        halves_masks = _reinterpret(masks, gl.int32, [4, BLOCK // 2, BLOCK // 32], _IN_ORDER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
        if MASKED or NUM_TOKENS:
            mbarrier.init(laid_out.index(i), count=1)
            mbarrier.init(used.index(i), count=1)
    mbarrier.arrive(turns.index(0), count=1)
    fence_async_shared()
    gl.warp_specialize([
        (_take_turns, (0, h_ring, w_ring, aside, halves_masks, columns, full, empty, laid_out, used, turns, steps,
                       shift, B, V, id_base, seed, best, operands, strides, NUM_TOKENS, ROWS, EPILOGUE, GREEDY,
                       ROW_SEEDS, MASKED, PACK, ASIDE, G, BLOCK, STAGES)),
        (_take_turns, (1, h_ring, w_ring, aside, halves_masks, columns, full, empty, laid_out, used, turns, steps,
                       shift, B, V, id_base, seed, best, operands, strides, NUM_TOKENS, ROWS, EPILOGUE, GREEDY,
                       ROW_SEEDS, MASKED, PACK, ASIDE, G, BLOCK, STAGES)),
        (_fill, (hidden, weight, h_ring, w_ring, full, empty, B, V, steps, shift, BLOCK, BLOCK_D, STAGES)),
        (_lay_out, (masks, columns, laid_out, used, shift, B, V, operands, strides, MASKS, TOKENS, NUM_TOKENS,
                    BLOCK)),
    ], [8, 1, 2], [112, 32, 32])
    tl.debug_barrier()
    done = gl.atomic_add(scratch_words, 1, sem="acq_rel", scope="gpu")
    if done + 1 == gl.num_programs(0):
        _finish(best, out, B.to(gl.int64), WORDS, 1024)
        gl.store(scratch_words, 0)
    # Else what hands the counter around would lie where the copy engine has written.
    h_ring._keep_alive()
    w_ring._keep_alive()


# fmt: on


def can_read(kinds: list[Kind]) -> bool:
    """Whether the kernel reads these operands: of those of [B, V] only one, a mask that can be read four at a time."""
    full = [kind for kind in kinds if kind.shape == "full"]
    tokens = sum(kind.shape == "token" for kind in kinds)
    return len(full) <= 1 and all(kind.by_four for kind in full) and tokens <= _MAX_TOKENS


def launch(
    hidden: TritonDescriptor,
    weight: TritonDescriptor,
    seed: Tensor | None,
    out: Tensor,
    scratch_words: Tensor,
    operands: list[Tensor],
    strides: tuple[tuple[int, int], ...],
    id_base: int,
    program: Program,
    kinds: tuple[Kind, ...],
    used: list[int],
    words: bool,
    tile: Tile,
    num_sms: int,
) -> None:
    """Draw for every row of out, int64 [B, 1], or without a seed find its argmax. Arguments as `gemm_sample` has them.

    Operands as `can_read` allows. words: leave the winners as words.
    """
    num_rows, depth = hidden.shape
    vocab = weight.shape[0]
    shift = id_base % GROUP
    functions, num_masks, num_tokens = _functions(program, kinds, tuple(used), seed is None)
    # What registers have no room for: three of four where logits wait as they are, one of two words beside a mask.
    aside = 3 if functions["PACK"] is None else num_masks
    num_tiles = -(-(vocab + shift) // _BLOCK) * -(-num_rows // _BLOCK)
    # fmt: off
    pingpong_kernel[(min(num_tiles, num_sms),)](
        _descriptor(hidden.base, hidden.strides, hidden.block_shape),
        _descriptor(weight.base, weight.strides, weight.block_shape),
        seed, out, scratch_words, tuple(operands), strides, num_rows, vocab, depth, id_base, shift,
        **functions, NUM_TOKENS=num_tokens, GREEDY=seed is None, ROW_SEEDS=seed is not None and seed.dim() == 1,
        WORDS=words, ASIDE=aside, G=GROUP, BLOCK=_BLOCK, BLOCK_D=tile.block_d,
        STAGES=_stages(tile, num_masks, num_tokens, aside),
        num_warps=tile.num_warps, enable_fp_fusion=True, sanitize_overflow=False,  # integers here wrap on purpose
    )
    # fmt: on


@functools.lru_cache(maxsize=1024)
def _functions(program: Program, kinds: tuple[Kind, ...], used: tuple[int, ...], greedy: bool) -> tuple[dict, int, int]:
    """The kernel's arguments that come of the program, and how many masks and operands by token it reads."""
    masks = tuple(n for n in used if kinds[n].shape == "full")
    tokens = tuple(n for n in used if kinds[n].shape == "token")
    rows = tuple(n for n in used if n not in masks + tokens)
    loads = [emit_loads(kinds, some) for some in (masks, tokens, rows)]
    rounding, rest = program.after_rounding()
    functions = dict(zip(("MASKS", "TOKENS", "ROWS"), (some and twin(some) for some in loads), strict=True))
    functions |= {"EPILOGUE": twin(emit(rest, kinds, masks + tokens + rows, (), greedy)), "PACK": rounding}
    return functions, len(masks), len(tokens)


def _stages(tile: Tile, num_masks: int, num_tokens: int, aside: int) -> int:
    """As many as the tile asks for and shared memory has room for, beside what each group's tile needs."""
    waiting = num_masks * _BLOCK * _BLOCK // 8 + num_tokens * _BLOCK * 4 + aside * 64 * 32 * 4
    rest = 2 * waiting + 2048  # barriers, and what reductions need
    return min(tile.num_stages, (_SHARED_MEMORY - rest) // (2 * _BLOCK * tile.block_d * 2))


_MAX_TOKENS = 8  # operands: they take a kilobyte each
_SHARED_MEMORY = 232448  # bytes that a program can have on sm_90
_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def _descriptor(x: Tensor, strides: Sequence[int], block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(strides), block, _layout(x.dtype, *block))


@functools.lru_cache
def _layout(dtype: torch.dtype, rows: int, columns: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], _TYPES[dtype])
