"""What the groups of `pingpong.py` offer: half a tile, as it lies in registers, and while it waits.

With it the twins of what `offers.py` and epilogues call, where they must know that layout, and a mask as bits.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import math_triton, offers
from .gluon_twin import instead_of, twin

# A tile is offered half at a time: the code of a whole one, twice, would not fit the instruction cache, and that costs
# more than all it does. The matrix unit leaves rows 16 w + 8 h + r in warp w, as h of its registers.
TILE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 128, 16]))
_LANES = [[1, 0], [2, 0], [4, 0]]
_WARPS = [[8, 0], [16, 0], [32, 0]]
HALF = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 8], [0, 16], [0, 32], [0, 64]], [[0, 2], [0, 4], *_LANES], _WARPS, [], [64, 128]
    )
)
# Where half a tile reads a mask, [64, 4] words of 32 bits, which the four threads that share a row share too (the last
# axis).
_BITS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1, 0], [0, 2, 0]],
        [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[8, 0, 0], [16, 0, 0], [32, 0, 0]],
        [],
        [64, 4, 4],
    )
)
# The four threads that share a row, one element each.
_COPIES = gl.constexpr(gl.DistributedLinearLayout([], [[0, 1], [0, 2], *_LANES], _WARPS, [], [64, 4]))

# One parameter a line would bury the code.
# fmt: off


@instead_of(offers.count_to)
@gluon.jit
def _count_to(N: gl.constexpr):
    return gl.arange(0, N, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))


@instead_of(offers.tile_rows)
@gluon.jit
def half_rows(b0, BB: gl.constexpr):
    """The rows of half a tile whose first one is b0."""
    i = gl.arange(0, BB, layout=gl.SliceLayout(1, HALF))
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
def read_best(best, b0, B):
    """`offers.read_best` of half a tile: of the four threads that share a row one reads, and all agree."""
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, _COPIES))[:, None]
    copy = gl.arange(0, 4, layout=gl.SliceLayout(0, _COPIES))[None, :]
    row = b0 + i // 8 * 16 + i % 8 + copy * 0
    return gl.load(best + row, mask=(row < B) & (copy == 0), other=0, volatile=True)


# As functions, for what an epilogue calls: with a constexpr global, Triton 3.6 keys its cache by what else the process
# compiled before.
@triton.constexpr_function
def _bits():
    return _BITS.value


@triton.constexpr_function
def _half():
    return HALF.value


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
def pack(acc, PACK: gl.constexpr):
    """Two logits that are rounded to 16 bits to a word [128, 64]: to wait, they take half the registers."""
    even, odd = gl.split(acc.reshape(128, 64, 2))
    return gl.inline_asm_elementwise(f"cvt.rn.{PACK}x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32,
                                     is_pure=True, pack=1)


@gluon.jit
def unpack(words, PACK: gl.constexpr):
    """Half a tile's logits."""
    if PACK == "f16":
        TEXT: gl.constexpr = "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }"
    else:
        TEXT: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    even, odd = gl.inline_asm_elementwise(TEXT, "=f,=f,r" if PACK == "f16" else "=r,=r,r", [words],
                                          dtype=(gl.float32, gl.float32), is_pure=True, pack=1)
    return gl.convert_layout(gl.join(even, odd).reshape(64, 128), HALF)


@gluon.jit
def halves(x):
    """Rows 16 w + r of a tile, and rows 16 w + 8 + r."""
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
def pieces_of(x):
    """Half a tile, as [64, 64] words or [64, 128] logits, in pieces of 32 columns."""
    low, high = _split_columns(x)
    if x.shape[1] == 64:
        return low, high
    else:
        x0, x1 = _split_columns(low)
        x2, x3 = _split_columns(high)
        return x0, x1, x2, x3


@gluon.jit
def whole(pieces):
    """What `pieces_of` took apart."""
    if len(pieces) == 2:
        return _join_columns(pieces[0], pieces[1])
    else:
        return _join_columns(_join_columns(pieces[0], pieces[1]), _join_columns(pieces[2], pieces[3]))


@gluon.jit
def by_four(piece):
    """A piece as it waits, [2, 1024]: four values of a thread, then those of the next one."""
    E: gl.constexpr = 1 if piece.dtype == gl.int32 else 2  # neighbours that a thread has
    return piece.reshape(64, 2, 4 // E, 4, E).permute(1, 0, 3, 2, 4).reshape(2, 1024)


@gluon.jit
def fetch(place, like):
    """The piece that waits at `place`, in the layout of another one."""
    E: gl.constexpr = 1 if like.dtype == gl.int32 else 2
    x = place.load(by_four(like).type.layout)
    return gl.convert_layout(x.reshape(2, 64, 4, 4 // E, E).permute(1, 0, 3, 2, 4).reshape(64, 32), like.type.layout)


# fmt: on
