"""The elementary functions of the epilogue in Triton, accurate to a few ulp of f32, NaN in NaN out.

Triton's own spellings are not all usable: `tl.exp` loses a bit for every doubling of |x|, `/` is an
approximation that is zero for divisors above 2**126, `tl.minimum` drops NaN, and tanh, log1p and
pow exist only in libdevice, which the interpreter does not have. Where a formula serves both, it
stands here once; where it does not, the interpreter gets one of its own, chosen when the function
is defined, as `triton.jit` itself chooses.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language import target_info
from triton.language.extra import libdevice

__all__ = [
    "bounded_tanh",
    "exp",
    "four_bytes",
    "log1p",
    "maximum",
    "minimum",
    "pow",
    "reciprocal",
    "round_bf16",
    "round_f16",
    "sigmoid",
    "softcap",
    "spread",
    "tanh",
    "where_byte",
    "where_word",
]

INTERPRET = triton.knobs.runtime.interpret
"""Whether `triton.jit` made interpreted functions of the ones below."""


@triton.jit
def maximum(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def tanh(x, IN: tl.constexpr = 1.0, OUT: tl.constexpr = 1.0):
    """OUT * tanh(IN * x), at the price of the tanh alone. IN > 0."""
    # x P(x^2) / Q(x^2), a minimax fit of relative error 2^-25.5.
    LIMIT: tl.constexpr = 9.02 / IN  # where the tanh of an f32 rounds to one
    S: tl.constexpr = IN * IN
    x = _clamp(x, LIMIT)
    z = x * x
    p = 2.1643002057203375e-08 * OUT * IN * S * S * S * S * z + 3.3447795431129634e-05 * OUT * IN * S * S * S
    p = p * z + 0.005677783861756325 * OUT * IN * S * S
    p = p * z + 0.21742023527622223 * OUT * IN * S
    p = p * z + 1.625 * OUT * IN
    q = 1.2613078297363245e-06 * S * S * S * S * z + 0.0005334989400580525 * S * S * S
    q = q * z + 0.04204041138291359 * S * S
    q = q * z + 0.7590866088867188 * S
    q = q * z + 1.625
    return _quotient(x * p, q)


@triton.jit
def bounded_tanh(x, IN: tl.constexpr, OUT: tl.constexpr):
    """`tanh`, but nowhere beyond OUT > 0: the fit passes it by an ulp or three from 7.9 on, where log(1 - t) is NaN."""
    return _clamp(tanh(x, IN, OUT), OUT)


@triton.jit
def softcap(x, IN: tl.constexpr, OUT: tl.constexpr):
    """OUT * tanh(IN * x) within 2^-21 OUT, however small x is, by a third of the instructions of `tanh`. IN > 0."""
    TWICE_LOG2_E: tl.constexpr = 2.8853900817779268
    return _inverse(1.0 + tl.exp2(x * (TWICE_LOG2_E * IN))) * (-2.0 * OUT) + OUT


@triton.jit
def spread(x, acc):
    """x [BV], a value a token, as a row [1, BV] of acc [BB, BV]."""
    return x[None, :]


@triton.jit
def four_bytes(words):
    """The bytes of words [BB, BV / 4], int32 [BB, BV]: each where it stands in its word, zeros around it."""
    BB: tl.constexpr = words.shape[0]
    BV: tl.constexpr = words.shape[1] * 4
    byte = 0xFF << (tl.arange(0, BV) % 4 * 8)
    return tl.broadcast_to(words[:, :, None], (BB, BV // 4, 4)).reshape(BB, BV) & byte[None, :]


@triton.jit
def where_word(mask, x, y):
    """x where mask, of `four_bytes`, is not zero, else y."""
    return tl.where(mask != 0, x, y)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + exp(-x))


@triton.jit
def log1p(x):
    # log(w) belongs to w = 1 + x rounded; x / (w - 1) is the correction to first order.
    w = 1.0 + x
    ratio = tl.where((w == 1.0) | (tl.abs(x) > 16777216.0), 1.0, x / (w - 1.0))
    return tl.where(w == 1.0, x, tl.log(w) * ratio)


@triton.jit
def reciprocal(x):
    return tl.div_rn(1.0, x)


if INTERPRET:

    @triton.jit
    def exp(x):
        return tl.exp(x)

    @triton.jit
    def pow(x, y):
        # In f64, where exp(y log x) keeps more digits than f32 has. The rest is IEEE 754's
        # special cases.
        x = x.to(tl.float64)
        y = y.to(tl.float64)
        negative = (x < 0.0) | (1.0 / x == -float("inf"))
        size = tl.abs(x)
        power = tl.exp2(tl.where(size == 1.0, 0.0, y * tl.log2(size)))
        whole = tl.floor(y) == y
        odd = whole & (tl.floor(y * 0.5) * 2.0 != y)
        power = tl.where(negative & odd, -power, power)
        power = tl.where((x < 0.0) & (size != float("inf")) & (whole == 0), float("nan"), power)
        power = tl.where((y == 0.0) | (x == 1.0), 1.0, power)
        return power.to(tl.float32)

else:

    @triton.jit
    def exp(x):
        return libdevice.exp(x)

    @triton.jit
    def pow(x, y):
        return libdevice.pow(x, y)


# What the interpreter or AMD's compiler lacks is chosen here, and not by a constexpr global, with which Triton 3.6 keys
# its cache by what else the process compiled before.
if INTERPRET or torch.version.hip is not None:

    @triton.jit
    def _clamp(x, LIMIT: tl.constexpr):
        return maximum(minimum(x, LIMIT), -LIMIT)

    @triton.jit
    def _quotient(x, y):
        return x / y

    @triton.jit
    def _inverse(x):
        return 1.0 / x

    @triton.jit
    def where_byte(mask, x, y):
        return tl.where(mask != 0, x, y)

else:

    @triton.jit
    def _clamp(x, LIMIT: tl.constexpr):
        if target_info.cuda_capability_geq(8, 6):  # one instruction: the smaller size, and the sign of x
            limit = tl.full(x.shape, LIMIT, tl.float32)
            return tl.inline_asm_elementwise(
                "min.NaN.xorsign.abs.f32 $0, $1, $2;", "=f,f,f", [x, limit], dtype=tl.float32, is_pure=True, pack=1
            )
        else:  # the compiler reads on after a return
            return maximum(minimum(x, LIMIT), -LIMIT)

    @triton.jit
    def _quotient(x, y):
        # Opaque to LLVM, which would move the product into a sum that follows and keep both factors in registers until
        # the sum's own operand is there. y is far from where the reciprocal underflows.
        return tl.inline_asm_elementwise(
            "{ .reg .f32 r; rcp.approx.ftz.f32 r, $2; mul.f32 $0, $1, r; }",
            "=f,f,f",
            [x, y],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )

    @triton.jit
    def _inverse(x):
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def where_byte(mask, x, y):
        # Four at a time, as their bytes lie in a register: extracting each first costs one instruction more.
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .pred a, b, c, d; "
            "and.b32 t, $4, 0xff; setp.ne.b32 a, t, 0; and.b32 t, $4, 0xff00; setp.ne.b32 b, t, 0; "
            "and.b32 t, $4, 0xff0000; setp.ne.b32 c, t, 0; and.b32 t, $4, 0xff000000; setp.ne.b32 d, t, 0; "
            "selp.f32 $0, $5, $9, a; selp.f32 $1, $6, $10, b; selp.f32 $2, $7, $11, c; selp.f32 $3, $8, $12, d; }",
            "=f,=f,=f,=f,r,f,f,f,f,f,f,f,f",
            [mask, x, y],
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )


if INTERPRET:

    @triton.jit
    def round_f16(x):
        return x.to(tl.float16).to(tl.float32)

    @triton.jit
    def round_bf16(x):
        # The interpreter's own cast truncates.
        bits = x.to(tl.uint32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(x == x, even.to(tl.float32, bitcast=True), x)

elif torch.version.hip is not None:

    @triton.jit
    def round_f16(x):
        return x.to(tl.float16).to(tl.float32)

    @triton.jit
    def round_bf16(x):
        return x.to(tl.bfloat16).to(tl.float32)

else:
    # Two at a time, and opaque: a widening cast tempts Triton to move the whole tile through shared memory in its
    # 16-bit form and to compute what follows twice, only to change the layout of a row's maximum.

    @triton.jit
    def round_f16(x):
        if x.numel == 1:  # no pair
            return x.to(tl.float16).to(tl.float32)
        else:  # the compiler reads on after a return
            return tl.inline_asm_elementwise(
                "{ .reg .b16 a, b; .reg .b32 t; cvt.rn.f16x2.f32 t, $3, $2; mov.b32 {a, b}, t; "
                "cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
                "=f,=f,f,f",
                [x],
                dtype=tl.float32,
                is_pure=True,
                pack=2,
            )

    @triton.jit
    def round_bf16(x):
        if x.numel == 1:  # no pair
            return x.to(tl.bfloat16).to(tl.float32)
        else:  # the compiler reads on after a return
            return tl.inline_asm_elementwise(
                "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000; }",
                "=r,=r,f,f",
                [x],
                dtype=tl.float32,
                is_pure=True,
                pack=2,
            )
