"""The epilogue program as a Triton function: how operands are loaded, and the source it becomes.

An operand is loaded once per tile in its own shape (one value, one per row, one per token, or a
full tile) and values keep the smallest shape they can, so that work on temperatures is done per row
and not per logit.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from . import math_triton
from .epilogue import Arg, Instruction, Kind, Program, Ref
from .epilogue_ops import OPS, Term, constant, spell, spell_block, to_f32

_AXES = {"scalar": "", "row": "row", "token": "token", "full": "row token"}

_LOADS = {
    "scalar": "tl.load(operands[{n}])",
    "row": "tl.load(operands[{n}] + rows.to(tl.int64) * strides[{n}][0], mask=row_mask, other=0)",
    "token": "tl.load(operands[{n}] + cols.to(tl.int64) * strides[{n}][1], mask=col_mask, other=0)",
    "full": (
        "tl.load(operands[{n}] + (rows.to(tl.int64) * strides[{n}][0])[:, None]"
        " + (cols.to(tl.int64) * strides[{n}][1])[None, :],"
        " mask=row_mask[:, None] & col_mask[None, :], other=0)"
    ),
}
_CONVERT = {"f": "{}.to(tl.float32)", "b": "({} != 0)"}
# Every value has two axes: the interpreter makes a float of a boolean scalar that meets a block.
_WIDEN = {
    "scalar": "tl.full((1, 1), {}, {})",
    "row": "{}[:, None]",
    "token": "{}[None, :]",
    "full": "{}",
}


@lru_cache(maxsize=1024)
def emit(program: Program, kinds: tuple[Kind, ...]) -> triton.JITFunction:
    """See `epilogue.emit`."""
    program.check_operands([kind.dtype for kind in kinds])
    source = _source(program, kinds)
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    # Triton, its interpreter and tracebacks all read the source back through linecache.
    filename = f"<epilogue {digest}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = {name: getattr(math_triton, name) for name in math_triton.__all__}
    namespace |= {"tl": tl, "__name__": __name__}
    exec(compile(source, filename, "exec"), namespace)
    return triton.jit(namespace["epilogue"])


def _source(program: Program, kinds: Sequence[Kind]) -> str:
    lines = ["def epilogue(acc, rows, cols, row_mask, col_mask, operands, strides):"]
    if program.instructions:
        lines.append(f'    """{program}"""')
    terms = {"acc": Term("acc", frozenset({"row", "token"}))}
    unread, masks = {}, {}
    for n, (use, kind) in enumerate(zip(program.operand_types, kinds, strict=False)):
        if use is not None:
            lines.append(f"    r{n} = {_load(n, kind)}")
            terms[f"a{n}"] = Term(f"a{n}", frozenset(_AXES[kind.shape].split()))
            unread[f"a{n}"] = f"    a{n} = {_value(n, use, kind)}"
            if kind == Kind("full", torch.bool):
                masks[f"a{n}"] = f"r{n}"
    readers = _readers(program)
    held: dict[str, tuple[Term, float]] = {}  # values that their only reader computes: a scaled one, or its tanh
    result = terms["acc"]
    for n, one in enumerate(program.instructions):
        op = one.op
        inputs = [terms[str(arg)] if isinstance(arg, Ref) else _literal(arg) for arg in one.args]
        result = Term(f"x{n}", frozenset().union(*(term.axes for term in inputs)))
        mask = masks.get(inputs[0].text) if op == "where" else None
        # A full operand changes layout where it becomes a value, and waits for its load there: not before its use.
        for term in inputs[1:] if mask else inputs:
            if term.text in unread:
                lines.append(unread.pop(term.text))
        factor, reader = _factor(one), readers.get(f"x{n}", "")
        if all(term.literal is not None for term in inputs):
            result = _literal(OPS[op].torch(*(constant(term.literal) for term in inputs)).item())
        elif factor and inputs[0].text in held:
            lines.append(f"    x{n} = {_tanh(*held[inputs[0].text], factor)}")
        elif factor and reader == "tanh":
            held[result.text] = inputs[0], factor
        elif op == "tanh" and (inputs[0].text in held or reader == "factor"):
            held[result.text] = held.get(inputs[0].text, (inputs[0], 1.0))
            if reader != "factor":
                lines.append(f"    x{n} = {_tanh(*held.pop(result.text), 1.0)}")
        elif mask:
            values = (term.text if term.literal is None else spell_block(term.literal) for term in inputs[1:])
            lines.append(f"    x{n} = where_byte({mask}, {', '.join(values)})")
        else:
            lines.append(f"    x{n} = {OPS[op].spell(*inputs)}")
        terms[f"x{n}"] = result
    widen = "" if len(result.axes) == 2 else "tl.full(acc.shape, 0.0, tl.float32) + "
    lines.append(f"    return {widen}{result.text}")
    return "\n".join(lines) + "\n"


def _readers(program: Program) -> dict[str, str]:
    """What reads the values that are read once: "factor" for a product as in `_factor`, or the name of an op."""
    reads: dict[str, list[str]] = {}
    for one in program.instructions:
        for arg in one.args:
            reads.setdefault(str(arg), []).append("factor" if _factor(one) else one.op)
    return {name: ops[0] for name, ops in reads.items() if len(ops) == 1}


def _factor(one: Instruction) -> float | None:
    """The positive number that a value is multiplied by, of a size that `tanh` can take into its fit."""
    if one.op not in ("mul", "div") or not isinstance(one.args[0], Ref) or isinstance(one.args[1], Ref):
        return None
    number = float(one.args[1])
    factor = number if one.op == "mul" or number == 0 else 1 / number
    return factor if 2.0**-10 <= factor <= 2.0**10 else None


def _tanh(x: Term, inside: float, outside: float) -> str:
    return f"tanh({x.text}, {inside!r}, {outside!r})"


def _load(n: int, kind: Kind) -> str:
    load = _LOADS[kind.shape].format(n=n)
    if kind.dtype == torch.bool:  # as bytes, whose layout changes in half the instructions
        load = load.replace(f"operands[{n}]", f"operands[{n}].to(tl.pointer_type(tl.int8), bitcast=True)", 1)
    return load


def _value(n: int, use: str, kind: Kind) -> str:
    return _WIDEN[kind.shape].format(_CONVERT[use].format(f"r{n}"), "tl.int1" if use == "b" else "tl.float32")


def _literal(value: Arg) -> Term:
    if isinstance(value, str):
        return Term(value, frozenset(), value)
    if isinstance(value, bool):
        return Term(f"tl.full((1, 1), {int(value)}, tl.int1)", frozenset(), value)
    value = to_f32(value)
    return Term(spell(value), frozenset(), value)
