"""The fused kernel for large batches on Hopper: two groups of warps take turns at the matrix unit.

While one multiplies its tile of [128 rows, 128 ids], the other one offers the candidates of its own, so that of the two
the longer is what a tile costs, and not their sum. A third group, a warp, keeps a ring of operand blocks filled for
both. Triton cannot say that on Hopper, so this is in Gluon; what becomes of a tile it shares with `gemm_sample.py`
through `gluon_twin.py`, and so all of the epilogue, the noise and the tournament.
"""

from __future__ import annotations

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

from . import math_triton, offers
from .epilogue import Kind, Program, emit, emit_loads
from .gluon_twin import instead_of, twin
from .rng import GROUP
from .tiles import Tile

# By their names in Triton 3.9, or in 3.6.
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret

_BLOCK = 128
"""Rows and ids of a tile: what half a multiprocessor has registers for."""

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
_PAIRS = gl.constexpr(  # of neighbours in a row
    gl.DistributedLinearLayout([[0, 4], [0, 8], [0, 16], [0, 32]], [[0, 1], [0, 2], *_LANES], _WARPS, [], [64, 64])
)
# Four threads share a row: one element each, for `_read_best`.
_FOURS = gl.constexpr(gl.DistributedLinearLayout([], [[0, 1], [0, 2], *_LANES], _WARPS, [], [64, 4]))

# One parameter a line would bury the code.
# fmt: off


@instead_of(offers.count_to)
@gluon.jit
def _count_to(N: gl.constexpr):
    return gl.arange(0, N, layout=gl.BlockedLayout([1], [32], [8], [0]))


@instead_of(offers.tile_rows)
@gluon.jit
def _half_rows(b0, BB: gl.constexpr):
    i = gl.arange(0, BB, layout=gl.SliceLayout(1, _HALF))
    return b0 + i // 8 * 16 + i % 8


@instead_of(offers.load_operands)
@gluon.jit
def _load_operands(LOADS: gl.constexpr, operands, strides, rows, v0, B, V, BV: gl.constexpr):
    if LOADS is None:
        return ()
    else:
        # Opaque, so that a half computes its addresses: else they would wait in registers for the next one.
        v0 = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [v0], dtype=gl.int32, is_pure=False, pack=1)
        return LOADS(operands, strides, rows, v0, B, V, BV)


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


@gluon.jit
def _read_best(best, b0, B):
    """`offers.read_best` of half a tile: of the four threads that share a row one reads, and all agree."""
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, _FOURS))[:, None]
    copy = gl.arange(0, 4, layout=gl.SliceLayout(0, _FOURS))[None, :]
    row = b0 + i // 8 * 16 + i % 8 + copy * 0
    return gl.load(best + row, mask=(row < B) & (copy == 0), other=0, volatile=True)


@instead_of(math_triton.four_bytes)
@gluon.jit
def _pair_bytes(pairs):
    """The bytes of pairs, int32 [64, 128]: each where it stands in its pair, zeros around it."""
    pairs = pairs.to(gl.int32)
    return gl.convert_layout(gl.join(pairs & 0xFF, pairs & 0xFF00).reshape(64, 128), _HALF)


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
def _before(stage, STAGES: gl.constexpr):
    return gl.where(stage == 0, STAGES - 1, stage - 1)


_offer_tile = twin(offers.offer_tile)
_finish = twin(offers.finish)


@gluon.jit
def _fill(hidden, weight, mask, h_ring, w_ring, masks, full, empty, masks_full, masks_empty, num_tiles, num_b, steps,
          shift, BLOCK: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr):
    """Copy the blocks of all the program's tiles, in their order, and each tile's mask along with them."""
    stage = 0
    phase = 1  # of a barrier that nobody has arrived at, the phase before counts as passed
    which = 0
    mask_phase = 1
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
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
            if mask is not None:
                # Once its group is at this tile, it has done with the mask of its last: no copy has to wait.
                if step == gl.minimum(steps - 1, STAGES):
                    mbarrier.wait(masks_empty.index(which), mask_phase)
                    mbarrier.expect(masks_full.index(which), BLOCK * BLOCK)
                    for i in range(16):
                        _copy(mask, [b0 + i // 8 * 8 + i % 8 * 16, v0], masks_full.index(which),
                              masks.index(which * 16 + i))
        if which == 1:
            mask_phase ^= 1
        which ^= 1


@gluon.jit
def _take_turns(WHICH: gl.constexpr, h_ring, w_ring, masks, full, empty, masks_full, masks_empty, turns, num_tiles,
                num_b, steps, shift, B, V, id_base, seed, best, operands, strides, EARLY: gl.constexpr,
                LATE: gl.constexpr, EPILOGUE: gl.constexpr, GREEDY: gl.constexpr, ROW_SEEDS: gl.constexpr,
                MASKED: gl.constexpr, PACK: gl.constexpr, G: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr):
    """Multiply and offer every second tile of the program, from its first one on or from its second."""
    step0 = WHICH * steps  # the program's steps before this tile
    turn = 0
    for tile in range(gl.program_id(0) + WHICH * gl.num_programs(0), num_tiles, 2 * gl.num_programs(0)):
        v0 = tile // num_b * BLOCK - shift
        b0 = tile % num_b * BLOCK
        words = _read_best(best, b0, B)
        early = _load_operands(EARLY, operands, strides, _half_rows(b0, BLOCK // 2), v0, B, V, BLOCK)
        acc = gl.zeros((BLOCK, BLOCK), gl.float32, _TILE)
        mbarrier.wait(turns.index(WHICH), turn)
        stage = step0 % STAGES
        phase = step0 // STAGES & 1
        for step in range(steps):
            mbarrier.wait(full.index(stage), phase)
            acc = warpgroup_mma(h_ring.index(stage), w_ring.index(stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            # An arrival is one thread's, and waits for all of the group first.
            mbarrier.arrive(empty.index(_before(stage, STAGES)), pred=step > 0)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        mbarrier.arrive(turns.index(1 - WHICH), count=1)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(_before(stage, STAGES)), count=1)
        if MASKED:
            mbarrier.wait(masks_full.index(WHICH), turn)
        x, other = _halves(acc if PACK is None else _pack(acc, PACK))
        for half in range(gl.where(b0 + 8 < B, 2, 1)):
            row0 = b0 + half * 8
            next_words = _read_best(best, b0 + 8, B)
            next_early = _load_operands(EARLY, operands, strides, _half_rows(b0 + 8, BLOCK // 2), v0, B, V, BLOCK)
            logits = x if PACK is None else _unpack(x, PACK)
            if MASKED:
                early = (masks.index(WHICH * 2 + half).load(_PAIRS),) + early  # noqa: RUF005 - no stars in kernels
            _offer_tile(logits, v0, row0, B, V, id_base, 1, seed, best, words, operands, strides, early, LATE,
                        EPILOGUE, None, GREEDY, False, ROW_SEEDS, True, G, BLOCK // 2, BLOCK, 256, False)
            words = next_words
            early = next_early
            x = other
        if MASKED:
            mbarrier.arrive(masks_empty.index(WHICH), count=1)
        step0 += 2 * steps
        turn ^= 1


@gluon.jit(do_not_specialize=["B", "id_base"])
def pingpong_kernel(hidden, weight, mask, seed, out, scratch_words, operands, strides, B, V, D, id_base, shift,
                    EARLY: gl.constexpr, LATE: gl.constexpr, EPILOGUE: gl.constexpr, GREEDY: gl.constexpr,
                    ROW_SEEDS: gl.constexpr, WORDS: gl.constexpr, PACK: gl.constexpr, G: gl.constexpr,
                    BLOCK: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr):
    """hidden [B, D], weight [V, D], mask None or bytes [B, V]: descriptors; out int64 [B, 1].

    PACK: None, or "bf16" or "f16", to which the program rounds first: left out of EPILOGUE, and done here.
    The other arguments are those of `gemm_sample_kernel`.
    """
    MASKED: gl.constexpr = mask is not None
    best = (scratch_words + 1).to(gl.pointer_type(gl.uint64), bitcast=True)
    num_b = gl.cdiv(B, BLOCK)
    num_tiles = gl.cdiv(V + shift, BLOCK) * num_b
    steps = gl.cdiv(D, BLOCK_D)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    h_ring = gl.allocate_shared_memory(hidden.dtype, [STAGES, BLOCK, BLOCK_D], hidden.layout)
    w_ring = gl.allocate_shared_memory(weight.dtype, [STAGES, BLOCK, BLOCK_D], weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    masks_full = turns  # of no use without a mask
    masks_empty = turns
    masks = turns
    pairs = turns
    if MASKED:
        masks_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
        masks_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
        masks = gl.allocate_shared_memory(mask.dtype, [32, 8, BLOCK], mask.layout)  # by warp, half and group
        pairs = _reinterpret(masks, gl.int16, [4, BLOCK // 2, BLOCK // 2], gl.NVMMASharedLayout(128, 16, 2))
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
        if MASKED:
            mbarrier.init(masks_full.index(i), count=1)
            mbarrier.init(masks_empty.index(i), count=1)
    mbarrier.arrive(turns.index(0), count=1)
    fence_async_shared()
    gl.warp_specialize([
        (_take_turns, (0, h_ring, w_ring, pairs, full, empty, masks_full, masks_empty, turns, num_tiles, num_b, steps,
                       shift, B, V, id_base, seed, best, operands, strides, EARLY, LATE, EPILOGUE, GREEDY, ROW_SEEDS,
                       MASKED, PACK, G, BLOCK, STAGES)),
        (_take_turns, (1, h_ring, w_ring, pairs, full, empty, masks_full, masks_empty, turns, num_tiles, num_b, steps,
                       shift, B, V, id_base, seed, best, operands, strides, EARLY, LATE, EPILOGUE, GREEDY, ROW_SEEDS,
                       MASKED, PACK, G, BLOCK, STAGES)),
        (_fill, (hidden, weight, mask, h_ring, w_ring, masks, full, empty, masks_full, masks_empty, num_tiles, num_b,
                 steps, shift, BLOCK, BLOCK_D, STAGES)),
    ], [8, 1], [112, 24])
    tl.debug_barrier()
    done = gl.atomic_add(scratch_words, 1, sem="acq_rel", scope="gpu")
    if done == gl.num_programs(0) - 1:
        _finish(best, out, B.to(gl.int64), WORDS, 1024)
        gl.store(scratch_words, 0)
    # Else what hands the counter around would lie where the copy engine has written.
    h_ring._keep_alive()
    w_ring._keep_alive()


# fmt: on


def can_read(operands: list[Tensor], kinds: tuple[Kind, ...], used: list[int], shift: int) -> bool:
    """Whether the kernel reads these operands: of those of [B, V], only one, a mask that the copy engine can take.

    shift: how far the first tile starts before the operands' first column.
    """
    masks = [n for n in used if kinds[n].shape == "full"]
    if len(masks) > 1 or any(kinds[n].dtype != torch.bool for n in masks):
        return False
    if masks and shift % 16:  # the copy engine's inner offset must be a multiple of 16 bytes
        return False
    for mask in (operands[n] for n in masks):
        rows, columns = mask.stride()
        if mask.data_ptr() % 16 or columns != 1 or rows % 16 or rows < mask.shape[1]:
            return False
    return True


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
    masks = tuple(n for n in used if kinds[n].shape == "full")
    kinds = tuple(kind._replace(by_four=n in masks) for n, kind in enumerate(kinds))  # here by pairs
    # A value a token would wait in a quarter of the registers, and is in the cache from the first quarter on.
    late = tuple(n for n in used if kinds[n].shape == "token")
    early = tuple(n for n in used if n not in masks + late)
    loads_early, loads_late = (loads and twin(loads) for loads in (emit_loads(kinds, early), emit_loads(kinds, late)))
    rounding, rest = program.after_rounding()
    num_tiles = -(-(vocab + shift) // _BLOCK) * -(-num_rows // _BLOCK)
    # fmt: off
    pingpong_kernel[(min(num_tiles, num_sms),)](
        _descriptor(hidden.base, hidden.strides, hidden.block_shape),
        _descriptor(weight.base, weight.strides, weight.block_shape),
        _descriptor(operands[masks[0]].view(torch.uint8), strides[masks[0]], [8, _BLOCK]) if masks else None,
        seed, out, scratch_words, tuple(operands), strides, num_rows, vocab, depth, id_base, shift,
        EARLY=loads_early, LATE=loads_late, EPILOGUE=twin(emit(rest, kinds, masks + early, late)),
        GREEDY=seed is None, ROW_SEEDS=seed is not None and seed.dim() == 1, WORDS=words, PACK=rounding, G=GROUP,
        BLOCK=_BLOCK, BLOCK_D=tile.block_d,
        STAGES=tile.num_stages - bool(masks),  # a mask takes the place of a stage
        num_warps=tile.num_warps, enable_fp_fusion=True,
    )
    # fmt: on


_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.uint8: gl.uint8}


def _descriptor(x: Tensor, strides: Sequence[int], block: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(block, _TYPES[x.dtype])
    return TensorDescriptor(x, list(x.shape), list(strides), block, layout)
