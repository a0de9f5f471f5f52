"""ATen's pointwise ops in the words of the epilogue program.

An entry maps an overload to a function of (emit, args, kwargs) that emits one or more program ops; ``emit(op, *args)``
returns the value of the new step. Values and numbers may both appear as arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

aten = torch.ops.aten
prims = torch.ops.prims

Emit = Callable[..., Any]
Spelling = Callable[..., Any]


def _same_name(op: str) -> Spelling:
    return lambda emit, *args: emit(op, *args)


def _add(emit: Emit, a: Any, b: Any, alpha: Any = 1) -> Any:
    return emit("add", a, b if alpha == 1 else emit("mul", b, alpha))


def _sub(emit: Emit, a: Any, b: Any, alpha: Any = 1) -> Any:
    return emit("sub", a, b if alpha == 1 else emit("mul", b, alpha))


def _rsub(emit: Emit, a: Any, b: Any, alpha: Any = 1) -> Any:
    return _sub(emit, b, a, alpha)


def _clamp(emit: Emit, x: Any, min: Any = None, max: Any = None) -> Any:
    x = x if min is None else emit("maximum", x, min)
    return x if max is None else emit("minimum", x, max)


POINTWISE: dict[Any, Spelling] = {
    aten.add.Tensor: _add,
    aten.add.Scalar: _add,
    aten.sub.Tensor: _sub,
    aten.sub.Scalar: _sub,
    aten.rsub.Tensor: _rsub,
    aten.rsub.Scalar: _rsub,
    aten.clamp.default: _clamp,
    aten.clamp.Tensor: _clamp,
    aten.clamp_min.default: _same_name("maximum"),
    aten.clamp_min.Tensor: _same_name("maximum"),
    aten.clamp_max.default: _same_name("minimum"),
    aten.clamp_max.Tensor: _same_name("minimum"),
    aten.reciprocal.default: lambda emit, x: emit("div", 1.0, x),
    aten.square.default: lambda emit, x: emit("mul", x, x),
    aten.isinf.default: lambda emit, x: emit("eq", emit("abs", x), math.inf),
    aten.where.self: _same_name("where"),
    aten.where.ScalarSelf: _same_name("where"),
    aten.where.ScalarOther: _same_name("where"),
    aten.where.Scalar: _same_name("where"),
    aten.masked_fill.Scalar: lambda emit, x, mask, value: emit("where", mask, value, x),
    aten.masked_fill.Tensor: lambda emit, x, mask, value: emit("where", mask, value, x),
    aten.pow.Tensor_Scalar: _same_name("pow"),
    aten.pow.Tensor_Tensor: _same_name("pow"),
    aten.pow.Scalar: _same_name("pow"),
}
for _name in ("mul", "div"):
    for _overload in ("Tensor", "Scalar"):
        POINTWISE[getattr(getattr(aten, _name), _overload)] = _same_name(_name)
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    for _overload in ("Tensor", "Scalar"):
        POINTWISE[getattr(getattr(aten, _name), _overload)] = _same_name(_name)
for _name in ("neg", "abs", "exp", "log", "log1p", "sqrt", "rsqrt", "tanh", "sigmoid", "relu", "erf", "isnan"):
    POINTWISE[getattr(aten, _name).default] = _same_name(_name)
for _name in ("maximum", "minimum", "logical_and", "logical_or", "logical_xor", "logical_not"):
    POINTWISE[getattr(aten, _name).default] = _same_name(_name)
# On booleans, the only place they can appear here (integers are refused), bitwise and logical ops agree.
for _name in ("and", "or", "xor"):
    POINTWISE[getattr(aten, f"bitwise_{_name}").Tensor] = _same_name(f"logical_{_name}")
POINTWISE[aten.bitwise_not.default] = _same_name("logical_not")

CASTS = {prims.convert_element_type.default, aten._to_copy.default}
# What a program can hold: `round` knows the 16-bit ones, and float64 is computed in float32. Float8 is none of them.
FLOATS = {torch.bfloat16, torch.float16, torch.float32, torch.float64}
# Ops that select among their inputs or flip a sign: exact in any float dtype, so nothing has to be rounded again.
EXACT = {"neg", "abs", "relu", "where", "maximum", "minimum", "round"}
BOOLEAN = {"eq", "ne", "lt", "le", "gt", "ge", "isnan"} | {f"logical_{w}" for w in ("and", "or", "xor", "not")}

# Logits with some entries overwritten; the walker turns them into `where(mask, value, logits)`.
SCATTER_TARGETS = {
    aten.index_put.default,
    aten.scatter.value,
    aten.select_scatter.default,
    aten.slice_scatter.default,
    aten.copy.default,
}
# Ops whose tensor argument gives a shape only.
FILL_LIKE = {
    aten.full_like.default: lambda node: node.args[1],
    aten.zeros_like.default: lambda node: 0.0,
    aten.ones_like.default: lambda node: 1.0,
}
POINTWISE_TARGETS = set(POINTWISE) | CASTS | set(FILL_LIKE)


def is_float_cast(node: Node) -> bool:
    return node.target in CASTS and node.meta["val"].dtype in FLOATS
