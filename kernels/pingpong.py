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

from . import offers
from .epilogue import Kind, Program, emit, emit_loads
from .gluon_twin import twin
from .pingpong_halves import TILE, by_four, fetch, half_rows, halves, pack, pieces_of, read_best, unpack, whole
from .rng import GROUP
from .tiles import Tile

# By their names in Triton 3.9, or before.
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret

_BLOCK = 128
"""Rows and ids of a tile: what half a multiprocessor has registers for."""

_IN_FLIGHT = gl.constexpr(2)
"""Steps of a product that the matrix unit has yet to finish when a group gives the stage before them back."""

# Where a mask is packed, by two warps, [16, 32] words of four bytes at a time.
_FOURS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [2, 1], [1, 0]))
_IN_ORDER_1 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_IN_ORDER = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))

# One parameter a line would bury the code.
# fmt: off


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


@gluon.jit
def _program():
    """gl.program_id(0), asked for where it is needed: the compiler would do so before all groups' code, and spill."""
    return gl.inline_asm_elementwise("mov.u32 $0, %ctaid.x;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _tiles(B, V, shift, BLOCK: gl.constexpr):
    """How many blocks of rows there are, and how many tiles: a block of rows by a block of ids each."""
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
        words = read_best(best, b0, B)
        next_words = read_best(best, b0 + 8, B)
        rows = _load_operands(ROWS, operands, strides, half_rows(b0, BLOCK // 2), v0, B, V, BLOCK)
        next_rows = _load_operands(ROWS, operands, strides, half_rows(b0 + 8, BLOCK // 2), v0, B, V, BLOCK)
        acc = gl.zeros((BLOCK, BLOCK), gl.float32, TILE)
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
        x, next_x = halves(acc if PACK is None else pack(acc, PACK))
        if ASIDE:
            pieces = pieces_of(next_x)
            next_x = pieces[0]
            for n in gl.static_range(ASIDE):
                aside.index(WHICH * ASIDE + n).store(by_four(pieces[1 + n]))
        tokens = ()
        for n in gl.static_range(NUM_TOKENS):
            tokens = tokens + (columns.index(WHICH * NUM_TOKENS + n),)  # noqa: RUF005 - no stars in kernels
        if MASKED or NUM_TOKENS:
            mbarrier.wait(laid_out.index(WHICH), turn)
        for half in range(gl.where(b0 + 8 < B, 2, 1)):
            logits = x if PACK is None else unpack(x, PACK)
            kept = tokens + rows
            if MASKED:
                kept = (masks.index(WHICH * 2 + half),) + kept  # noqa: RUF005 - no stars in kernels
            _offer_tile(logits, v0, b0 + half * 8, B, V, id_base, 1, seed, best, words, operands, strides, kept, None,
                        EPILOGUE, None, GREEDY, False, ROW_SEEDS, True, G, BLOCK // 2, BLOCK, 256, False)
            if ASIDE:
                pieces = (next_x,)
                for n in gl.static_range(ASIDE):
                    pieces = pieces + (fetch(aside.index(WHICH * ASIDE + n), next_x),)  # noqa: RUF005
                x = gl.convert_layout(whole(pieces), x.type.layout)
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
    if done + 1 == gl.num_programs(0):  # not their number less one: that would be reckoned at the start, and spilled
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
    # What registers have no room for: three of four where logits wait as they are, one of two beside a mask, or where
    # unpacking takes registers too.
    aside = {None: 3, "f16": 1, "bf16": num_masks}[functions["PACK"]]
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
