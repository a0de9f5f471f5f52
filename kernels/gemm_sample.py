"""The fused kernel: multiply by the LM head, process the logits, sample: one launch, and no logits in memory.

Persistent programs walk over tiles of [BLOCK_B rows, BLOCK_V ids]. A tile's logits never leave registers: the
epilogue program runs on the accumulator, each group of ids is reduced to one perturbed score, and one 64-bit
`atomic_max` a row keeps the best. The program that finishes last turns the winners into tokens and leaves the
scratch words zero for the next launch.

Accumulators are [batch, vocabulary], so that the ids of a row sit in a few threads' registers: a row's reductions
stay there, and splitting a group in halves only renames registers. `offers.py` has that part.
"""

from __future__ import annotations

import functools
import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import autotune, scratch, tiles
from .epilogue import Kind, Program, emit, emit_loads, operand_kinds
from .exchange_triton import exchange_winners, world_block
from .offers import finish, load_operands, offer_tile, read_best, tile_rows
from .peers import Channel
from .rng import GROUP

log = logging.getLogger(__name__)

# How the kernel reads an operand of the product.
_POINTER = tl.constexpr(0)  # any strides, any alignment
_TMA = tl.constexpr(1)  # a descriptor of the [rows, D] tensor, D contiguous
_TMA_TRANSPOSED = tl.constexpr(2)  # a descriptor of the [D, rows] view, rows contiguous

# One parameter a line would bury the code.
# fmt: off


@triton.jit
def _load_rows(source, row0, d, num_rows, D, stride_r, stride_d, EVEN_D: tl.constexpr, MODE: tl.constexpr,
               BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, INTERPRET: tl.constexpr):
    """The block [BLOCK_R, BLOCK_D] of a [num_rows, D] matrix at (row0, d), zero outside it; row0 may be negative."""
    if MODE == _TMA:
        block = source.load([row0, d])
    elif MODE == _TMA_TRANSPOSED:
        block = source.load([d, row0]).T
    else:
        rows = row0 + tl.arange(0, BLOCK_R)
        ds = d + tl.arange(0, BLOCK_D)
        mask = ((rows >= 0) & (rows < num_rows))[:, None]
        if not EVEN_D:
            mask = mask & (ds < D)[None, :]
        # rows * stride passes 2**31 for a vocabulary of 262144 with D = 8192.
        pointers = source + rows.to(tl.int64)[:, None] * stride_r + ds.to(tl.int64)[None, :] * stride_d
        block = tl.load(pointers, mask=mask, other=0.0)
    if INTERPRET:  # its bf16 product is wrong
        block = block.to(tl.float32)
    return block


@triton.jit
def _multiply(acc, hidden, weight, b0, v0, d, B, V, D, stride_hb, stride_hd, stride_wv, stride_wd,
              EVEN_D: tl.constexpr, HIDDEN_MODE: tl.constexpr, WEIGHT_MODE: tl.constexpr, PRECISION: tl.constexpr,
              BLOCK_B: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, INTERPRET: tl.constexpr):
    """Add the product over D from d to d + BLOCK_D to the accumulator."""
    h = _load_rows(hidden, b0, d, B, D, stride_hb, stride_hd, EVEN_D, HIDDEN_MODE, BLOCK_B, BLOCK_D, INTERPRET)
    w = _load_rows(weight, v0, d, V, D, stride_wv, stride_wd, EVEN_D, WEIGHT_MODE, BLOCK_V, BLOCK_D, INTERPRET)
    return tl.dot(h, w.T, acc, input_precision=PRECISION)


@triton.jit(
    do_not_specialize=["B", "id_base", "num_draws", "block", "channel", "capacity"],
    do_not_specialize_on_alignment=["seed"],
)
def gemm_sample_kernel(
    hidden, weight, seed, out, greedy_out, scratch_words, block, channel, capacity, operands, operand_strides,
    B, V, D, id_base, shift, num_draws, stride_hb, stride_hd, stride_wv, stride_wd,
    EVEN_D: tl.constexpr, EARLY: tl.constexpr, LATE: tl.constexpr, EPILOGUE: tl.constexpr,
    GREEDY_EPILOGUE: tl.constexpr, GREEDY: tl.constexpr, MANY_DRAWS: tl.constexpr, ROW_SEEDS: tl.constexpr,
    HIDDEN_MODE: tl.constexpr, WEIGHT_MODE: tl.constexpr, PRECISION: tl.constexpr, SELECT: tl.constexpr,
    G: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, FLATTEN: tl.constexpr,
    HEAD: tl.constexpr, STAGGER: tl.constexpr, WORLD: tl.constexpr, WORDS: tl.constexpr, THREADS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """hidden [B, D], weight [V, D]: descriptors or pointers by *_MODE; out int64 [B, num_draws].

    scratch_words: int64, zero: a counter, then one word for each output.
    EARLY, LATE: what loads the operands of the epilogues while a tile's product is under way, and after it, or None.
    GREEDY_EPILOGUE: None, or a second epilogue of the same product, whose argmax goes to greedy_out, int64 [B].
    WORLD: 0, or the ranks to agree with on the winners (`exchange_triton.py` says on block, channel and capacity).
    shift: id_base % G. Groups start at global multiples of G, so tiles do too, and the first one reaches that far
    before the shard. An argument of its own, because its divisibility is what makes loads of operands wide.
    HEAD: where the epilogue of a tile stands in the flattened loop: at the tail of the tile's last round, or at the
    head of the next, before the product. Triton lets the layout of whichever comes last spread first, and were that a
    late load of a [B, V] operand, it would take whole tiles through shared memory, and reckon them twice, to suit it.
    At the head it does not come last, but then the product of one round must end before the next begins.
    STAGGER: nanoseconds by which every second program starts late. Such a program is alone on its multiprocessor, where
    nobody fills its waits: it asks early for the best words so far too.
    """
    best = (scratch_words + 1).to(tl.pointer_type(tl.uint64), bitcast=True)
    num_b = tl.cdiv(B, BLOCK_B)
    num_tiles = tl.cdiv(V + shift, BLOCK_V) * num_b
    pid = tl.program_id(0)
    num_programs = tl.num_programs(0)
    v0 = 0
    b0 = 0
    acc = tl.zeros((BLOCK_B, BLOCK_V), tl.float32)
    early = load_operands(EARLY, operands, operand_strides, tile_rows(b0, BLOCK_B), v0, 0, 0, BLOCK_V)
    # Rows are the inner direction of tiles: the programs that run together share a weight tile in L2.
    if FLATTEN:
        # One loop over tiles and depth, so that the loads of the next tile are under way during an epilogue. (What
        # tl.range's flatten=True does, but that fails to compile with branches in the epilogue.)
        steps = tl.cdiv(D, BLOCK_D)
        rounds = tl.cdiv(num_tiles - pid, num_programs) * steps
        tile = pid - num_programs
        step = steps - 1
        early_step = tl.minimum(steps - 1, 1)
        if STAGGER > 0:
            words = read_best(best, 0, 1, 0, 0, BLOCK_B, THREADS)
            if not INTERPRET:
                late = tl.where(num_tiles < 4 * num_programs, 0, pid % 2 * STAGGER)
                tl.inline_asm_elementwise("nanosleep.u32 $1; mov.u32 $0, $1;", "=r,r", [late], dtype=tl.int32,
                                          is_pure=False, pack=1)
        for i in range(rounds + 1 if HEAD else rounds):
            if HEAD:
                if (step == steps - 1) & (i > 0):
                    words = read_best(best, b0, 1, b0, B, BLOCK_B, THREADS)
                    offer_tile(acc, v0, b0, B, V, id_base, num_draws, seed, best, words, operands, operand_strides,
                                early, LATE, EPILOGUE, GREEDY_EPILOGUE, GREEDY, MANY_DRAWS, ROW_SEEDS, SELECT, G,
                                BLOCK_B, BLOCK_V, THREADS, INTERPRET)
                    acc = tl.zeros((BLOCK_B, BLOCK_V), tl.float32)
            step = tl.where(step == steps - 1, 0, step + 1)
            if step == 0:
                tile += num_programs
                v0 = (tile // num_b) * BLOCK_V - shift
                b0 = (tile % num_b) * BLOCK_B
            if (EARLY is not None) | (STAGGER > 0):
                # Not in the branch above: the weights' loads need that one, and are three rounds ahead.
                if step == early_step:
                    if STAGGER > 0:
                        words = read_best(best, b0, 1, b0, B, BLOCK_B, THREADS)
                    early = load_operands(EARLY, operands, operand_strides, tile_rows(b0, BLOCK_B), v0, B, V, BLOCK_V)
            acc = _multiply(acc, hidden, weight, b0, v0, step * BLOCK_D, B, V, D, stride_hb, stride_hd, stride_wv,
                            stride_wd, EVEN_D, HIDDEN_MODE, WEIGHT_MODE, PRECISION, BLOCK_B, BLOCK_V, BLOCK_D,
                            INTERPRET)
            if not HEAD:
                if step == steps - 1:
                    if STAGGER == 0:
                        words = read_best(best, b0, 1, b0, B, BLOCK_B, THREADS)
                    offer_tile(acc, v0, b0, B, V, id_base, num_draws, seed, best, words, operands, operand_strides,
                                early, LATE, EPILOGUE, GREEDY_EPILOGUE, GREEDY, MANY_DRAWS, ROW_SEEDS, SELECT, G,
                                BLOCK_B, BLOCK_V, THREADS, INTERPRET)
                    acc = tl.zeros((BLOCK_B, BLOCK_V), tl.float32)
    else:
        words = read_best(best, 0, 1, 0, 0, BLOCK_B, THREADS)
        for tile in range(pid, num_tiles + num_programs, num_programs):
            if tile > pid:
                offer_tile(acc, v0, b0, B, V, id_base, num_draws, seed, best, words, operands, operand_strides,
                            early, LATE, EPILOGUE, GREEDY_EPILOGUE, GREEDY, MANY_DRAWS, ROW_SEEDS, SELECT, G,
                            BLOCK_B, BLOCK_V, THREADS, INTERPRET)
            v0 = (tile // num_b) * BLOCK_V - shift
            b0 = (tile % num_b) * BLOCK_B
            acc = tl.zeros((BLOCK_B, BLOCK_V), tl.float32)
            words = read_best(best, b0, 1, b0, B, BLOCK_B, THREADS)  # early: the product hides the wait
            if EARLY is not None:
                early = load_operands(EARLY, operands, operand_strides, tile_rows(b0, BLOCK_B), v0, B, V, BLOCK_V)
            for d in range(0, tl.where(tile < num_tiles, D, 0), BLOCK_D):
                acc = _multiply(acc, hidden, weight, b0, v0, d, B, V, D, stride_hb, stride_hd, stride_wv, stride_wd,
                                EVEN_D, HIDDEN_MODE, WEIGHT_MODE, PRECISION, BLOCK_B, BLOCK_V, BLOCK_D, INTERPRET)

    # The barrier orders this program's updates before its one thread counts; the counter orders programs.
    tl.debug_barrier()
    done = tl.atomic_add(scratch_words, 1, sem="acq_rel", scope="gpu")
    if done + 1 == tl.num_programs(0):  # not their number less one: that would be reckoned at the start, and spilled
        if WORLD > 0:
            exchange_winners(best, out, B.to(tl.int64) * num_draws, block, channel, capacity, WORLD)
        else:
            count = B.to(tl.int64) * num_draws
            finish(best, out, count, WORDS, 1024)
            if GREEDY_EPILOGUE is not None:
                finish(best + count, greedy_out, B, WORDS, 1024)
        tl.store(scratch_words, 0)


# fmt: on

_INTERPRET = bool(triton.knobs.runtime.interpret)


def sample(
    hidden: Tensor,
    weight: Tensor,
    seed: Tensor,
    operands: list[Tensor],
    program: str,
    num_samples: int = 1,
    id_base: int = 0,
    config: tiles.Tile | None = None,
    exchange: Channel | Literal["words"] | None = None,
) -> Tensor:
    """Draw `num_samples` token ids a row from softmax(program(hidden @ weight.T)); int64 [B, num_samples].

    hidden [B, D] and weight [V, D]: bf16, f16 or f32, any strides. seed: int64, 0-d, or [B] for a seed a row.
    operands broadcast to [B, V]. Ids are in [id_base, id_base + V). `config` overrides the measured tile.
    exchange: with a channel, the ids are those that all ranks agree on; with "words", the result is the winners'
    words, for `exchange.Group.best`.
    """
    return _launch(hidden, weight, seed, operands, program, None, num_samples, id_base, config, exchange)[0]


def sample_and_argmax(
    hidden: Tensor,
    weight: Tensor,
    seed: Tensor,
    operands: list[Tensor],
    program: str,
    greedy_program: str,
    num_samples: int = 1,
    id_base: int = 0,
    config: tiles.Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """`sample` of one program and `argmax` of another in one launch; int64 [B, num_samples] and [B]."""
    return _launch(hidden, weight, seed, operands, program, greedy_program, num_samples, id_base, config, None)


def argmax(
    hidden: Tensor,
    weight: Tensor,
    operands: list[Tensor],
    program: str,
    id_base: int = 0,
    config: tiles.Tile | None = None,
    exchange: Channel | Literal["words"] | None = None,
) -> Tensor:
    """The lowest id of the largest of program(hidden @ weight.T) in each row; int64 [B]. Arguments as `sample`."""
    return _launch(hidden, weight, None, operands, program, None, 1, id_base, config, exchange)[0][:, 0]


def _launch(hidden, weight, seed, operands, program, greedy_program, num_draws, id_base, config, exchange):
    num_rows, depth = hidden.shape
    vocab = weight.shape[0]
    if id_base + vocab >= 2**32:
        raise ValueError(f"ids must fit 32 bits, but id_base={id_base} and {vocab} ids reach {id_base + vocab}")
    out = torch.empty((num_rows, num_draws), dtype=torch.int64, device=hidden.device)
    greedy_out = out if greedy_program is None else out.new_empty(num_rows)
    if out.numel() == 0:
        return out, greedy_out
    device = tiles.device_info(hidden.device)
    shift = id_base % GROUP
    kinds, strides = operand_kinds(operands, num_rows, vocab, shift)
    programs = [Program.parse(text) for text in (program, greedy_program) if text is not None]
    used = [n for n in range(len(kinds)) if any(one.uses(n) for one in programs)]
    simple = len(programs) == num_draws == 1 and not isinstance(exchange, Channel)
    case = case_of(hidden, weight, [kinds[n] for n in used], simple)
    tile = config or autotune.pick(case)
    if tile.pingpong and not case.turns:
        tile = tiles.one_group(num_rows)
    hidden_arg, hidden_mode = _operand(hidden, tile, device, tile.block_b, None)
    weight_arg, weight_mode = _operand(weight, tile, device, tile.block_v, shift)
    words = scratch.take(hidden.device, 1 + out.numel() + num_rows * (greedy_program is not None))
    if tile.pingpong:
        args = (seed, out, words, operands, strides, id_base, programs[0], kinds, used, exchange == "words")
        with _on(hidden.device):
            _pingpong().launch(hidden_arg, weight_arg, *args, tile, device.num_sms)
        return out, greedy_out
    early, late = _loads_of(kinds, used, tile, device.warp_size)
    # Late, words would take more registers than bytes do.
    kinds = tuple(kind._replace(by_four=kind.by_four and n in early) for n, kind in enumerate(kinds))
    late_full = any(kinds[n].shape == "full" for n in late)
    head = late_full and not device.arch.startswith("sm_10")  # on Blackwell it crashes Triton's pipeliner
    flatten = tile.flatten and depth > 0 and not (late_full and tile.block_b > 64)
    num_tiles = -(-(vocab + shift) // tile.block_v) * -(-num_rows // tile.block_b)
    grid = (min(num_tiles, device.num_sms * tile.programs_per_sm),)
    channel, world = (0, 0, 0), 0
    if isinstance(exchange, Channel):
        channel, world = (exchange.block.address, exchange.offset, exchange.capacity), world_block(exchange)

    # fmt: off
    with _on(hidden.device):
        gemm_sample_kernel[grid](
            hidden_arg, weight_arg, seed, out, greedy_out, words, *channel, tuple(operands), strides,
            num_rows, vocab, depth, id_base, shift, num_draws, *hidden.stride(), *weight.stride(),
            EVEN_D=depth % tile.block_d == 0, EARLY=emit_loads(kinds, early), LATE=emit_loads(kinds, late),
            EPILOGUE=emit(programs[0], kinds, early, late, seed is None),
            GREEDY_EPILOGUE=emit(programs[1], kinds, early, late, True) if programs[1:] else None,
            GREEDY=seed is None, MANY_DRAWS=num_draws > 1, ROW_SEEDS=seed is not None and seed.dim() == 1,
            HIDDEN_MODE=hidden_mode, WEIGHT_MODE=weight_mode, PRECISION=_precision(hidden.dtype),
            SELECT=device.arch in ("sm_90", "cpu"), G=GROUP,
            BLOCK_B=tile.block_b, BLOCK_V=tile.block_v, BLOCK_D=tile.block_d, FLATTEN=flatten, HEAD=head,
            STAGGER=tile.stagger, WORLD=world, WORDS=exchange == "words",
            THREADS=device.warp_size * tile.num_warps, INTERPRET=_INTERPRET,
            num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True,
        )
    # fmt: on
    return out, greedy_out


def _on(device: torch.device) -> AbstractContextManager:
    """Where a launch goes to `device`."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return nullcontext()


@functools.cache
def _pingpong():
    """The module of that kernel, or None where this Triton's Gluon is not the one it is written in, or interprets."""
    if _INTERPRET:
        return None
    try:
        from . import pingpong
    except Exception as error:
        log.warning("tiles of two groups that take turns run as one group's: %s", error)
        return None
    return pingpong


def case_of(hidden: Tensor, weight: Tensor, kinds: list[Kind], simple: bool) -> tiles.Case:
    """What the tile for a product is chosen by. kinds: as from `operand_kinds`, of the operands that are used.

    simple: whether this is one program and one draw, without an exchange inside the kernel.
    """
    device = tiles.device_info(hidden.device)
    tf32 = hidden.dtype == torch.float32 and _precision(hidden.dtype) == "tf32"
    late = any(kind.shape == "full" and not kind.by_four for kind in kinds)
    turns = simple and not late and device.arch == "sm_90" and hidden.element_size() == 2
    turns = turns and _row_stride(hidden) is not None and _row_stride(weight) is not None
    turns = turns and (pingpong := _pingpong()) is not None and pingpong.can_read(kinds)
    return tiles.Case(device.arch, hidden.dtype, hidden.shape[0], *weight.shape, late, tf32, turns)


def _loads_of(kinds, used, tile, warp_size):
    """The numbers of the used operands to load while the product is under way, and of those to load after it.

    Early, nothing waits for them, but they take registers from the product, which has few left on tiles that do not go
    on loading during an epilogue: these are the largest.
    """
    early, left, threads = [], 40, tile.num_warps * warp_size
    for n in used:
        kind = kinds[n]
        if kind.shape == "full":
            fits, registers = tile.flatten, tile.block_b * tile.block_v // threads // (4 if kind.by_four else 1)
        else:  # of fewer ids than threads, Triton would load as many as the product's layout has in each thread
            fits, registers = kind.shape != "token" or tile.block_v >= threads, 1
        if fits and registers <= left:
            early.append(n)
            left -= registers
    return tuple(early), tuple(n for n in used if n not in early)


def _operand(x, tile, device, block_rows, shift):
    """How to read x [R, D]: (descriptor, mode) if the copy engine can, else (x, pointer mode).

    shift: how far the first tile starts before row 0, for an operand that may be read transposed; else None.
    """
    rows, depth = x.shape
    if tile.use_tma and device.has_tma:
        if (row_stride := _row_stride(x)) is not None:
            return TensorDescriptor(x, [rows, depth], [row_stride, 1], [block_rows, tile.block_d]), _TMA.value
        # The copy engine's inner offset must be a multiple of 16 bytes; the matrix unit transposes 16-bit types only.
        transposable = shift is not None and x.element_size() == 2 and shift % 8 == 0 < depth
        if transposable and (stride := _row_stride(x.t())) is not None:
            block = [tile.block_d, block_rows]
            return TensorDescriptor(x.t(), [depth, rows], [stride, 1], block), _TMA_TRANSPOSED.value
    return x, _POINTER.value


def _row_stride(x):
    """How far apart the rows of x are, in elements, where the copy engine can read them; else None."""
    rows, depth = x.shape
    row_stride, stride = x.stride()
    if rows == 1:  # the stride of a dimension of one is anything
        row_stride = -(-depth // 8) * 8
    aligned = x.data_ptr() % 16 == 0 and row_stride * x.element_size() % 16 == 0
    return row_stride if aligned and stride == 1 and row_stride >= depth > 0 else None


def _precision(dtype):
    # PyTorch's own switch for float32 products on CUDA; 16-bit products have one precision only.
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32":
        return "ieee"
    return "tf32"
