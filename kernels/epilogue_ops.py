"""The ops of an epilogue program: one row each, with its type, its torch and its Triton spelling.

Adding an op is adding a row. A Triton spelling may use `tl` and the functions of `math_triton.py`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Term(NamedTuple):
    """An argument to the emitter: its Triton spelling, the axes it varies on, its literal value."""

    text: str
    axes: frozenset[str]
    literal: float | bool | str | None = None


@dataclass(frozen=True)
class Op:
    """One row of the table.

    signature: a letter for each argument and, after the arrow, the result: f (f32), b (bool), d (a
    dtype name).
    torch: the function on tensors. triton: a format string over the arguments, or a function of the
    Terms.
    """

    signature: str
    torch: Callable[..., Tensor]
    triton: str | Callable[..., str]

    @property
    def arguments(self) -> str:
        return self.signature.partition("->")[0]

    @property
    def result(self) -> str:
        return self.signature.partition("->")[2]

    def spell(self, *terms: Term) -> str:
        """The op on these arguments, in Triton."""
        if callable(self.triton):
            return self.triton(*terms)
        return self.triton.format(*(term.text for term in terms))


def _div(x: Term, y: Term) -> str:
    """One multiplication where the divisor is constant along an axis that the dividend varies on.

    The reciprocal is rounded to f32 first, as CUDA eager does for Python scalars, so the quotient
    is off by at most 2**-23 of itself. A true f32 division costs eight instructions or more an
    element, in a kernel whose epilogue is bound by arithmetic.
    """
    if y.literal is not None:
        inverse = to_f32(1.0 / y.literal) if y.literal else math.copysign(math.inf, y.literal)
        if y.literal == 0 or 2.0**-126 <= abs(inverse) < math.inf:
            return f"{x.text} * {spell(inverse)}"
    elif y.axes < x.axes:
        return f"{x.text} * reciprocal({y.text})"
    return f"tl.div_rn({x.text}, {y.text})"


def _pow(x: Term, y: Term) -> str:
    """Small whole exponents by multiplication; libdevice for the rest."""
    easy = {
        2.0: "{x} * {x}",
        3.0: "{x} * {x} * {x}",
        -1.0: "reciprocal({x})",
        -2.0: "reciprocal({x} * {x})",
    }
    if y.literal in easy:
        return easy[y.literal].format(x=x.text)
    base, exponent = (one.text if one.literal is None else spell_block(one.literal) for one in (x, y))
    return f"pow({base}, {exponent})"


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).to(torch.float32)


OPS: dict[str, Op] = {
    "add": Op("ff->f", torch.add, "{} + {}"),
    "sub": Op("ff->f", torch.sub, "{} - {}"),
    "mul": Op("ff->f", torch.mul, "{} * {}"),
    "div": Op("ff->f", torch.div, _div),
    "neg": Op("f->f", torch.neg, "{} * -1.0"),  # Triton's own -x is 0 - x: +0.0 for +0.0
    "abs": Op("f->f", torch.abs, "tl.abs({})"),
    "exp": Op("f->f", torch.exp, "exp({})"),
    "log": Op("f->f", torch.log, "tl.log({})"),
    "log1p": Op("f->f", torch.log1p, "log1p({})"),
    "sqrt": Op("f->f", torch.sqrt, "tl.sqrt_rn({})"),
    "rsqrt": Op("f->f", torch.rsqrt, "tl.rsqrt({})"),
    "tanh": Op("f->f", torch.tanh, "tanh({})"),
    "sigmoid": Op("f->f", torch.sigmoid, "sigmoid({})"),
    "relu": Op("f->f", torch.relu, "maximum({}, 0.0)"),
    "erf": Op("f->f", torch.erf, "tl.erf({})"),
    "pow": Op("ff->f", torch.pow, _pow),
    "maximum": Op("ff->f", torch.maximum, "maximum({}, {})"),
    "minimum": Op("ff->f", torch.minimum, "minimum({}, {})"),
    "eq": Op("ff->b", torch.eq, "{} == {}"),
    "ne": Op("ff->b", torch.ne, "{} != {}"),
    "lt": Op("ff->b", torch.lt, "{} < {}"),
    "le": Op("ff->b", torch.le, "{} <= {}"),
    "gt": Op("ff->b", torch.gt, "{} > {}"),
    "ge": Op("ff->b", torch.ge, "{} >= {}"),
    "logical_and": Op("bb->b", torch.logical_and, "{} & {}"),
    "logical_or": Op("bb->b", torch.logical_or, "{} | {}"),
    "logical_xor": Op("bb->b", torch.logical_xor, "{} ^ {}"),
    "logical_not": Op("b->b", torch.logical_not, "{} == 0"),
    "where": Op("bff->f", torch.where, "tl.where({}, {}, {})"),
    "isnan": Op("f->b", torch.isnan, "{0} != {0}"),
    "round": Op("fd->f", _round, "round_{1}({0})"),
}

DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "f16": torch.float16}
"""The dtype names that `round` takes."""

TYPE_NAMES = {"f": "a float", "b": "a boolean", "d": f"a dtype name ({', '.join(DTYPES)})"}


def constant(literal: float | bool | str) -> Tensor | torch.dtype:
    """A literal as an argument of a torch op, f32 where it is a number.

    A 0-d CPU tensor works beside tensors of any device, and, unlike a Python number, in every op.
    """
    if isinstance(literal, str):
        return DTYPES[literal]
    if isinstance(literal, bool):
        return torch.tensor(literal)
    return torch.tensor(to_f32(literal), dtype=torch.float32)


def to_f32(number: float) -> float:
    """The nearest f32, infinite where it overflows, as a Python float."""
    try:
        return struct.unpack("f", struct.pack("f", number))[0]
    except OverflowError:
        return math.copysign(math.inf, number)


def spell(number: float) -> str:
    """An f32 in Triton. Below f32's normal range a bare number would make the other side f64."""
    return spell_block(number) if 0 < abs(number) < 2.0**-126 else _bare(number)


def spell_block(number: float) -> str:
    """An f32 in Triton as a block of one element, for functions that do not take bare numbers."""
    return f"tl.full((1, 1), {_bare(number)}, tl.float32)"


def _bare(number: float) -> str:
    return repr(number) if math.isfinite(number) else f'float("{number}")'
