"""The epilogue program as Triton functions: the loads of its operands, and the source it becomes.

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
from .epilogue import Arg, Kind, Program, Ref
from .epilogue_ops import OPS, Term, constant, spell, spell_block, to_f32
from .softcap import find_softcaps

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
    "by four": (
        "tl.load(operands[{n}].to(tl.pointer_type(tl.int32), bitcast=True)"
        " + (rows.to(tl.int64) * (strides[{n}][0] // 4))[:, None] + fours[None, :],"
        " mask=row_mask[:, None] & four_mask[None, :], other=0)"
    ),
}
# Every value has two axes: the interpreter makes a float of a boolean scalar that meets a block.
_WIDEN = {
    "scalar": "tl.full((1, 1), {}, {})",
    "row": "{}[:, None]",
    "full": "{}",
}


@lru_cache(maxsize=1024)
def emit(
    program: Program, kinds: tuple[Kind, ...], early: tuple[int, ...], late: tuple[int, ...], greedy: bool
) -> triton.JITFunction:
    """See `epilogue.emit`."""
    program.check_operands([kind.dtype for kind in kinds])
    return _function(_source(program, kinds, early, late, greedy))


@lru_cache(maxsize=1024)
def emit_loads(kinds: tuple[Kind, ...], which: tuple[int, ...]) -> triton.JITFunction | None:
    """See `epilogue.emit_loads`."""
    if not which:
        return None
    lines = [
        "(operands, strides, rows, v0, B, V, BV: tl.constexpr):",
        "    row_mask = rows < B",
        "    cols = v0 + tl.arange(0, BV)",
        "    col_mask = (cols >= 0) & (cols < V)",
        "    fours = v0 // 4 + tl.arange(0, BV // 4)",
        "    four_mask = (fours >= 0) & (fours < V // 4)",
    ]
    for n in which:
        load = _LOADS["by four" if kinds[n].by_four else kinds[n].shape].format(n=n)
        if kinds[n] == Kind("full", torch.bool):  # as bytes, whose layout changes in half the instructions
            load = load.replace(f"operands[{n}]", f"operands[{n}].to(tl.pointer_type(tl.int8), bitcast=True)", 1)
        lines.append(f"    r{n} = {load}")
    lines.append(f"    return ({' '.join(f'r{n},' for n in which)})")
    return _function("\n".join(lines) + "\n")


def _function(source: str) -> triton.JITFunction:
    # Triton takes two functions of one kernel for one if their names and the types of their arguments agree.
    name = f"f_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    source = f"def {name}{source}"
    # Triton, its interpreter and tracebacks all read the source back through linecache.
    filename = f"<{name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = {one: getattr(math_triton, one) for one in math_triton.__all__}
    namespace |= {"tl": tl, "__name__": __name__}
    exec(compile(source, filename, "exec"), namespace)
    return triton.jit(namespace[name])


def _source(program: Program, kinds: Sequence[Kind], early: Sequence[int], late: Sequence[int], greedy: bool) -> str:
    """The epilogue's source but for its name."""
    lines = ["(acc, early, late):"]
    if program.instructions:
        lines.append(f'    """{program}"""')
    terms = {"acc": Term("acc", frozenset({"row", "token"}))}
    unread, masks = {}, {}
    for n, (use, kind) in enumerate(zip(program.operand_types, kinds, strict=False)):
        if use is not None:
            place = f"early[{early.index(n)}]" if n in early else f"late[{late.index(n)}]"
            terms[f"a{n}"] = Term(f"a{n}", frozenset(_AXES[kind.shape].split()))
            # An operand changes layout where it becomes a value, and takes registers from there on: not before its use.
            # But fours change it first: smaller tiles have the registers, and what comes before their use hides it.
            if kind.by_four:
                lines.append(f"    b{n} = four_bytes({place})")
                place = f"b{n}"
            unread[f"a{n}"] = f"    a{n} = {_value(place, use, kind)}"
            if kind.shape == "full" and kind.dtype == torch.bool:
                masks[f"a{n}"] = "where_word" if kind.by_four else "where_byte", place
    softcaps = find_softcaps(program, kinds, greedy)
    result = terms["acc"]
    for n, one in enumerate(program.instructions):
        if n in softcaps and softcaps[n] is None:
            continue
        softcap = softcaps.get(n)
        args = (softcap.x,) if softcap else one.args
        inputs = [terms[str(arg)] if isinstance(arg, Ref) else _literal(arg) for arg in args]
        result = Term(f"x{n}", frozenset().union(*(term.axes for term in inputs)))
        mask = masks.get(inputs[0].text) if one.op == "where" else None
        lines += [unread.pop(term.text) for term in inputs[bool(mask) :] if term.text in unread]
        op = softcap or OPS[one.op]
        if all(term.literal is not None for term in inputs):
            result = _literal(op.torch(*(constant(term.literal) for term in inputs)).item())
        elif mask:
            values = (term.text if term.literal is None else spell_block(term.literal) for term in inputs[1:])
            where, place = mask
            lines.append(f"    x{n} = {where}({place}, {', '.join(values)})")
        else:
            lines.append(f"    x{n} = {op.spell(*inputs)}")
        terms[f"x{n}"] = result
    widen = "" if len(result.axes) == 2 else "tl.zeros_like(acc) + "
    lines.append(f"    return {widen}{result.text}")
    return "\n".join(lines) + "\n"


def _value(place: str, use: str, kind: Kind) -> str:
    convert = "({} != 0)" if use == "b" else "{}.to(tl.float32)"
    if kind.shape == "token":
        return convert.format(f"spread({place}, acc)")
    return _WIDEN[kind.shape].format(convert.format(place), "tl.int1" if use == "b" else "tl.float32")


def _literal(value: Arg) -> Term:
    if isinstance(value, str):
        return Term(value, frozenset(), value)
    if isinstance(value, bool):
        return Term(f"tl.full((1, 1), {int(value)}, tl.int1)", frozenset(), value)
    value = to_f32(value)
    return Term(spell(value), frozenset(), value)
