"""Epilogue programs: text and types, the torch interpreter, and its agreement with the emitted Triton."""

import itertools
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from epilogue_checks import DEVICE, close, run_triton

from fs_inductor.kernels import gemm_sample
from fs_inductor.kernels.epilogue import (
    OPS,
    Instruction,
    Program,
    ProgramError,
    Ref,
    emit,
    emit_loads,
    operand_kinds,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter

SHAPES = ["scalar", "row", "token", "full"]
SUBNORMAL, HUGE = 1e-40, 3e38
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -3.0, math.inf, -math.inf, math.nan, SUBNORMAL, HUGE]
SPECIAL += [1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, -1.0 - 2.0**-8, 65519.0, 65520.0, 1e-8, -1e-8, 88.5]

# How far an op may be from correct rounding, in units of 2**-24 of the result: the others are exact.
ROUNDING = {"sqrt": 2, "exp": 4, "log": 4, "log1p": 6, "rsqrt": 4, "tanh": 12, "sigmoid": 8, "erf": 6, "pow": 8}


def tile(seed=0, batch=3, vocab=50):
    generator = torch.Generator().manual_seed(seed)
    acc = torch.randn(batch, vocab, generator=generator) * 4
    return acc


def operands_of_each_shape(batch=3, vocab=50, seed=1):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"scalar": (), "row": (batch, 1), "token": (vocab,), "full": (batch, vocab)}
    return {name: torch.rand(shape, generator=generator) * 3 + 0.25 for name, shape in shapes.items()}


def exact(op, *args):
    """The op in f64, correctly rounded but for double rounding."""
    wide = [arg.double() if arg.dtype == torch.float32 else arg for arg in args]
    result = OPS[op].torch(*wide)
    return result if result.dtype == torch.bool else result.to(torch.float32)


# --- Text ------------------------------------------------------------------------------------------


def one_of_each():
    """A text for each op, with every kind of argument somewhere."""
    letters = {"f": ["acc", "a0", "2.5", "-inf", "3"], "b": ["a1", "true", "x0"], "d": ["bf16"]}
    for name, op in OPS.items():
        for n in range(3):
            args = [letters[kind][(n + i) % len(letters[kind])] for i, kind in enumerate(op.arguments)]
            last = "x2 = where(x1, acc, nan)" if op.result == "b" else "x2 = mul(x1, -0.001)"
            yield f"x0 = isnan(acc); x1 = {name}({', '.join(args)}); {last}"


@pytest.mark.parametrize("text", [*one_of_each(), "", "x0 = where(false, 1e-45, 1e+300)"])
def test_text_round_trips(text):
    program = Program.parse(text)
    assert str(program) == text
    assert Program.parse(str(program)) == program
    again = Program(program.instructions)
    assert again == program and hash(again) == hash(program) and str(again) == text


def test_parse_gives_structure():
    program = Program.parse("x0 = round(acc, bf16); x1 = where(a2, -inf, x0); x2 = div(x1, 2)")
    assert program.instructions == (
        Instruction("round", (Ref("acc"), "bf16")),
        Instruction("where", (Ref("a", 2), -math.inf, Ref("x", 0))),
        Instruction("div", (Ref("x", 1), 2)),
    )
    assert program.num_operands == 3
    assert program.operand_types == (None, None, "b")


def test_parse_is_lenient_about_spaces_and_cached():
    assert str(Program.parse("  x0=add( acc ,1.0 ) ;x1 = neg(x0)")) == ("x0 = add(acc, 1.0); x1 = neg(x0)")
    assert Program.parse("x0 = neg(acc)") is Program.parse("x0 = neg(acc)")


@pytest.mark.parametrize(
    "text, dtype, rest",
    [
        ("x0 = round(acc, bf16)", "bf16", ""),
        (
            "x0 = round(acc, f16); x1 = div(x0, a1); x2 = round(x1, f16); x3 = add(x2, x0)",
            "f16",
            "x0 = div(acc, a1); x1 = round(x0, f16); x2 = add(x1, acc)",
        ),
        ("x0 = round(acc, bf16); x1 = add(x0, acc)", None, "x0 = round(acc, bf16); x1 = add(x0, acc)"),
        ("x0 = mul(acc, 2.0); x1 = round(x0, bf16)", None, "x0 = mul(acc, 2.0); x1 = round(x0, bf16)"),
        ("x0 = round(a0, bf16); x1 = add(acc, x0)", None, "x0 = round(a0, bf16); x1 = add(acc, x0)"),
        ("", None, ""),
    ],
)
def test_what_is_left_after_rounding(text, dtype, rest):
    program = Program.parse(text)
    assert program.after_rounding() == (dtype, Program.parse(rest))
    acc, operands = tile(), [torch.tensor(1.5), torch.tensor(0.7)]
    rounded = acc if dtype is None else acc.to({"bf16": torch.bfloat16, "f16": torch.float16}[dtype]).float()
    assert torch.equal(Program.parse(rest).run(rounded, operands), program.run(acc, operands))


def test_programs_are_values():
    program = Program.parse("x0 = where(a0, nan, acc)")
    assert program == Program.parse(str(program)) and len({program, Program.parse(str(program))}) == 1
    assert program != Program.parse("x0 = where(a0, inf, acc)")
    assert pickle.loads(pickle.dumps(program)) == program
    with pytest.raises(AttributeError):
        program.instructions = ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x0 = frobnicate(acc)", "no op named 'frobnicate'"),
        ("x0 = add(acc)", "add takes 2 arguments, not 1"),
        ("x0 = neg()", "neg takes 1 arguments, not 0"),
        ("x1 = neg(acc)", "must define x0, not x1"),
        ("x0 = neg(acc); x0 = neg(x0)", "must define x1, not x0"),
        ("x0 = neg(x0)", "x0 is not defined before x0"),
        ("x0 = neg(acc); x1 = add(x0, x2)", "x2 is not defined before x1"),
        ("x0 = add(acc, true)", "argument 2 is a boolean, but add wants a float"),
        ("x0 = where(acc, 1.0, 2.0)", "argument 1 is a float, but where wants a boolean"),
        ("x0 = isnan(acc); x1 = add(x0, 1.0)", "argument 1 is a boolean"),
        ("x0 = isnan(acc)", "must be a float"),
        ("x0 = round(acc, 3.0)", "argument 2 is a float, but round wants a dtype name"),
        ("x0 = round(acc, f64)", "'f64' is not an argument"),
        ("x0 = add(acc, bf16)", "argument 2 is a dtype name"),
        ("x0 = add(acc, b0)", "'b0' is not an argument"),
        ("x0 = add(acc, x01)", "'x01' is not an argument"),
        ("x0 = add(acc, 1.0", "expected `xN = op"),
        ("x0 = neg(neg(acc))", "expected"),
        ("x0 = neg(acc);", "statement 1"),
        ("neg(acc)", "expected `x0 = op"),
        ("x0 = where(a0, a0, acc)", "here a0 is a float, but an earlier use made it a boolean"),
        ("x0 = __import__(acc)", "no op named"),
        ("x0 = add(acc, a1024)", "a1024 is too high: operands end at a1023"),
        ("x0 = add(acc, a999999999)", "a999999999 is too high"),
        ("x0 = add(acc, a" + "9" * 5000 + ")", "is not an argument"),
        ("x0 = tanh(acc); x1 = mul(x0, 1" + "0" * 320 + ")", "is not an argument"),
    ],
)
def test_errors_name_the_statement(text, message):
    with pytest.raises(ProgramError, match="statement") as error:
        Program.parse(text)
    assert message.replace("xN", "x0") in str(error.value).replace("xN", "x0")


def test_the_last_operand_may_be_used():
    assert Program.parse("x0 = add(acc, a1023)").num_operands == 1024


def test_instructions_are_checked_too():
    with pytest.raises(ProgramError, match="not an argument"):
        Program((Instruction("add", (Ref("acc"), None)),))
    with pytest.raises(ProgramError, match="not an argument"):
        Program((Instruction("round", (Ref("acc"), "fp8")),))


# --- The torch interpreter -------------------------------------------------------------------------


def test_run_follows_the_program():
    acc = tile()
    mask, temperature = torch.arange(50) % 3 == 0, torch.tensor([[0.5], [1.0], [2.0]])
    text = (
        "x0 = round(acc, bf16); x1 = div(x0, 30.0); x2 = tanh(x1); x3 = mul(x2, 30.0); "
        "x4 = where(a0, -inf, x3); x5 = div(x4, a1)"
    )
    expected = torch.tanh(acc.bfloat16().float() / 30) * 30
    expected = expected.masked_fill(mask, -math.inf) / temperature
    assert torch.equal(Program.parse(text).run(acc, [mask, temperature]), expected)


def test_run_of_nothing_is_the_accumulator():
    acc = tile()
    assert torch.equal(Program.parse("").run(acc, []), acc)


def test_run_converts_operands_and_broadcasts_the_result():
    acc = tile()
    program = Program.parse("x0 = mul(a0, a1)")
    got = program.run(acc, [torch.tensor(3), torch.full((3, 1), 0.1, dtype=torch.float64)])
    assert got.dtype == torch.float32 and got.shape == acc.shape
    assert torch.equal(got, torch.full_like(acc, 0.1) * 3)


def test_run_takes_known_results():
    acc = tile()
    program = Program.parse("x0 = add(acc, a0); x1 = round(x0, bf16); x2 = div(x1, 2.0)")
    known = torch.ones_like(acc)
    bias = torch.zeros(50)
    assert torch.equal(program.run(acc, [bias], (None, known)), known / 2)
    assert torch.equal(program.run(acc, [bias], (None, None, known)), known)


@pytest.mark.parametrize(
    ("text", "operands", "message"),
    [
        ("x0 = add(acc, a1)", [torch.ones(1)], "uses 2 operands, but got 1"),
        ("x0 = add(acc, a0)", [torch.ones(1, dtype=torch.bool)], "a0 is torch.bool"),
        ("x0 = where(a0, acc, 0.0)", [torch.ones(1)], "a0 is torch.float32"),
        ("x0 = add(acc, a0)", [torch.ones(1, dtype=torch.complex64)], "a0 is torch.complex64"),
    ],
)
def test_operands_must_fit(text, operands, message):
    program = Program.parse(text)
    with pytest.raises(ProgramError, match=message):
        program.run(tile(), operands)
    with pytest.raises(ProgramError, match=message):
        emit(program, operand_kinds(operands, 3, 50)[0], (), (0,), False)


# --- Kinds -----------------------------------------------------------------------------------------


def test_operand_kinds():
    full = torch.zeros(4, 6)
    cases = [
        (torch.tensor(1.0, dtype=torch.float64), "scalar", (0, 0)),
        (torch.zeros(1), "scalar", (0, 0)),
        (torch.zeros(1, 1), "scalar", (0, 0)),
        (torch.zeros(6), "token", (0, 1)),
        (torch.zeros(1, 12)[:, ::2], "token", (0, 2)),
        (torch.zeros(6).expand(4, 6), "token", (0, 1)),
        (torch.zeros(4, 1), "row", (1, 0)),
        (torch.zeros(4, 3)[:, :1].expand(4, 6), "row", (3, 0)),
        (torch.zeros(()).expand(4, 6), "scalar", (0, 0)),
        (full, "full", (6, 1)),
        (torch.zeros(6, 4).t(), "full", (1, 4)),
        (torch.zeros(4, 6, dtype=torch.bool), "full", (6, 1)),
    ]
    kinds, strides = operand_kinds([case[0] for case in cases], 4, 6)
    assert [kind.shape for kind in kinds] == [case[1] for case in cases]
    assert [kind.dtype for kind in kinds] == [case[0].dtype for case in cases]
    assert list(strides) == [case[2] for case in cases]


@pytest.mark.parametrize("shape", [(5,), (4,), (4, 5), (6, 1), (1, 4, 6)])
def test_operands_that_do_not_broadcast_are_named(shape):
    with pytest.raises(ValueError, match=r"operand a1 has shape .* \[4, 6\]"):
        operand_kinds([torch.zeros(6), torch.zeros(shape)], 4, 6)


# --- Triton agrees with torch ----------------------------------------------------------------------


@pytest.mark.parametrize("name", OPS)
def test_every_op_on_special_values(name):
    """All pairs of special values, and some ordinary ones, through torch and Triton."""
    op = OPS[name]
    values = torch.tensor(SPECIAL + torch.linspace(-9, 9, 44).tolist())
    left = values[:, None].expand(64, 64).contiguous()
    right = values[None, :].expand(64, 64).contiguous()
    if op.arguments == "f" or op.arguments == "fd":
        operands, args = [], ["acc", "bf16"][: len(op.arguments)]
    elif op.arguments == "bff":
        operands, args = [left > 0, right], ["a0", "acc", "a1"]
    elif op.arguments[0] == "b":
        operands, args = [left > 0, right > 0], ["a0", "a1"][: len(op.arguments)]
    else:
        operands, args = [right], ["acc", "a0"]
    text = f"x0 = {name}({', '.join(args)})"
    if op.result == "b":
        text += "; x1 = where(x0, 1.0, 0.0)"
    program = Program.parse(text)
    expected = program.run(left, operands)
    got = run_triton(program, left, operands)
    assert close(got, expected, 2 * ROUNDING.get(name, 0))


@pytest.mark.parametrize("name", ROUNDING)
def test_functions_are_accurate(name):
    """Triton's spelling against f64, over the range in which the result is a normal f32."""
    generator = torch.Generator().manual_seed(0)
    size = 2.0 ** (torch.rand(16, 1024, generator=generator) * 40 - 33)
    sign = torch.where(torch.rand(16, 1024, generator=generator) < 0.5, -1.0, 1.0)
    x = size * sign
    if name in ("log", "sqrt", "rsqrt"):
        x = size
    elif name == "log1p":
        x = torch.where(x < -0.99, -x, x)
    elif name == "exp" or name == "sigmoid":
        x = x.clamp(-80, 80)
    operands, text = [], f"x0 = {name}(acc)"
    if name == "pow":
        x, text = size, "x0 = pow(acc, a0)"
        operands = [torch.rand(1024, generator=generator) * 4 - 2]
    expected = exact(name, x, *operands)
    got = run_triton(Program.parse(text), x, operands)
    assert close(got, expected, ROUNDING[name] + 1)


@pytest.mark.parametrize("shapes", list(itertools.product(SHAPES, repeat=2)))
def test_operands_of_every_shape(shapes):
    acc, operand = tile(), operands_of_each_shape()
    operands = [operand[shapes[0]], operand[shapes[1]].to(torch.float64)]
    operands += [operand[shapes[0]] > 1.5, operand[shapes[1]].to(torch.bfloat16)]
    text = (
        "x0 = div(a0, a1); x1 = div(acc, x0); x2 = logical_not(a2); x3 = where(x2, x1, a3); "
        "x4 = lt(a0, a1); x5 = logical_and(x4, a2); x6 = where(x5, x3, acc); x7 = maximum(x6, -2.5); "
        "x8 = pow(a0, a1); x9 = sub(x7, x8)"
    )
    program = Program.parse(text)
    assert close(run_triton(program, acc, operands), program.run(acc, operands), 40)


@pytest.mark.parametrize("shape", ["scalar", "row", "token", "full"])
def test_a_result_that_ignores_the_accumulator_still_fills_the_tile(shape):
    acc, operand = tile(), operands_of_each_shape()[shape]
    for text in ("x0 = mul(a0, 2.0)", "x0 = mul(3.0, 2.0)"):
        program = Program.parse(text)
        assert close(run_triton(program, acc, [operand]), program.run(acc, [operand]))


def test_strided_and_wide_operands():
    acc = tile()
    column = torch.randn(3, 7)[:, 2:3]
    row = torch.randn(50, 3)[:, 1]
    transposed = torch.randn(50, 3).t()
    integers = torch.arange(50, dtype=torch.int64) - 25
    operands = [column, row, transposed, integers, torch.randn(1, 1).expand(3, 50)]
    program = Program.parse("x0 = add(acc, a0); x1 = mul(x0, a1); x2 = sub(x1, a2); x3 = add(x2, a3); x4 = mul(x3, a4)")
    assert close(run_triton(program, acc, operands), program.run(acc, operands), 1)


def test_nothing_is_loaded_behind_the_masks():
    """Operands end where the logits do; a tile is wider. A stray load would bring in the poison."""
    batch, vocab = 3, 50
    poison = torch.full((8, 64), math.nan)
    poison[:batch, :vocab] = torch.rand(batch, vocab) + 1
    operands = [poison[:batch, :vocab], poison[0, :vocab], poison[:batch, :1]]
    kinds, strides = operand_kinds(operands, batch, vocab)
    program = Program.parse("x0 = add(acc, a0); x1 = add(x0, a1); x2 = add(x1, a2)")
    out = torch.empty(4, 64, device=DEVICE)
    whole_tile_kernel[(1,)](
        torch.zeros(4, 64, device=DEVICE),
        out,
        tuple(one.to(DEVICE) for one in operands) if DEVICE == "cpu" else tuple(operands),
        strides,
        batch,
        vocab,
        emit_loads(kinds, (0, 1, 2)),
        emit(program, kinds, (), (0, 1, 2), False),
    )
    assert not out.isnan().any()


@triton.jit
def whole_tile_kernel(acc, out, operands, strides, B, V, LOADS: tl.constexpr, EPILOGUE: tl.constexpr):
    rows = tl.arange(0, 4)
    cols = tl.arange(0, 64)
    place = rows[:, None] * 64 + cols[None, :]
    value = tl.load(acc + place)
    value = EPILOGUE(value, (), LOADS(operands, strides, tl.arange(0, 4), 0, B, V, 64))
    tl.store(out + place, value)


@pytest.mark.parametrize("vocab", [52, 64])
def test_booleans_are_read_four_at_a_time(vocab):
    """Any byte but zero is true, as in eager; and a mask may begin at any fourth column of another."""
    acc = tile(vocab=vocab)
    whole = torch.randint(0, 3, (3, 128), dtype=torch.uint8).view(torch.bool)
    mask = whole[:, 4 : 4 + vocab]
    program = Program.parse("x0 = where(a0, -inf, acc); x1 = logical_not(a0); x2 = where(x1, x0, 1.5)")
    expected = torch.where(mask.view(torch.uint8) != 0, 1.5, acc)
    assert torch.equal(run_triton(program, acc, [mask], by_four=True), expected)


def test_an_operand_that_no_program_uses_is_not_loaded():
    hidden, weight = torch.randn(2, 16), torch.randn(64, 16)
    unused = torch.ones(64).to(torch.float8_e4m3fn)  # which the interpreter cannot load
    token = gemm_sample.argmax(hidden, weight, [torch.zeros(64), unused], "x0 = add(acc, a0)")
    assert torch.equal(token, (hidden @ weight.t()).argmax(1))


@pytest.mark.parametrize("unaligned", ["column", "stride", "vocab", "transposed"])
def test_booleans_that_four_at_a_time_would_misread(unaligned):
    whole = torch.rand(8, 131) < 0.5 if unaligned == "stride" else torch.rand(8, 128) < 0.5
    vocab = 50 if unaligned == "vocab" else 52
    mask = whole[:3, 3 : 3 + vocab] if unaligned == "column" else whole[:3, :vocab]
    if unaligned == "transposed":
        mask = (torch.rand(52, 4) < 0.5).t()[:3]
    acc = tile(vocab=vocab)
    program = Program.parse("x0 = where(a0, -inf, acc)")
    assert torch.equal(run_triton(program, acc, [mask], by_four=False), torch.where(mask, -math.inf, acc))


@pytest.mark.parametrize("literal", ["1e-40", "1e+300", "-1e+300", "nan", "-inf", "7", "-0.0", "0.1"])
@pytest.mark.parametrize("op", ["add", "mul", "div", "maximum", "minimum", "sub", "lt", "pow"])
def test_literals_stay_f32(op, literal):
    """A literal outside f32's normal range must neither widen the other side nor be an error."""
    acc = tile()
    acc[:, :20] = torch.tensor(SPECIAL)
    last = "x1 = where(x0, acc, -1.5)" if op == "lt" else "x1 = add(x0, 0.0)"
    program = Program.parse(f"x0 = {op}(acc, {literal}); {last}")
    assert close(run_triton(program, acc, []), program.run(acc, []), 2 + ROUNDING.get(op, 0))


def test_literal_arithmetic_is_folded_in_f32():
    acc = tile()
    text = "x0 = add(0.1, 0.2); x1 = lt(x0, 0.3); x2 = logical_not(x1); x3 = where(x2, x0, nan); "
    text += "x4 = round(x3, bf16); x5 = mul(acc, x4); x6 = where(x2, x5, acc)"
    program = Program.parse(text)
    assert close(run_triton(program, acc, []), program.run(acc, []))


@pytest.mark.parametrize("exponent", ["2", "3.0", "0.5", "-0.5", "-1", "-2.0", "0.0", "1.0", "2.5", "-3"])
def test_literal_exponents(exponent):
    acc = tile()
    acc[:, :20] = torch.tensor(SPECIAL)
    program = Program.parse(f"x0 = pow(acc, {exponent})")
    assert close(run_triton(program, acc, []), program.run(acc, []), 8)


def test_rounding_is_to_nearest_even():
    halfway = torch.arange(1, 65)[:, None] * 2.0**-8 + 1
    values = torch.cat([halfway, halfway + 2.0**-23, halfway - 2.0**-23], 1).reshape(3, 64)
    values[2, -4:] = torch.tensor([math.nan, 3.4e38, -3.4e38, 1e-41])
    for name, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        program = Program.parse(f"x0 = round(acc, {name})")
        for got in (run_triton(program, values, []), program.run(values, [])):
            assert close(got, values.to(dtype).float())


@pytest.mark.parametrize("divisor", ["scalar", "row", "token", "literal", "full"])
def test_quotients(divisor):
    """Within 2**-23, relative; correctly rounded where the divisor varies as the dividend does."""
    acc = tile()
    operand = operands_of_each_shape().get(divisor)
    text = "x0 = div(acc, 0.7)" if divisor == "literal" else "x0 = div(acc, a0)"
    got = run_triton(Program.parse(text), acc, [] if operand is None else [operand])
    by = torch.tensor(0.7) if operand is None else operand
    assert close(got, exact("div", acc, by), 0 if divisor == "full" else 2)
    if divisor == "literal":  # as CUDA eager: times the rounded reciprocal
        assert torch.equal(got, acc * (1 / by))


def test_division_by_zero_and_infinity_is_ieee():
    acc = torch.tensor([[1.0, -1.0, 0.0, math.inf, -math.inf, math.nan]])
    for by in (0.0, -0.0, math.inf, -math.inf, math.nan):
        literal = Program.parse(f"x0 = div(acc, {by!r})")
        assert close(run_triton(literal, acc, []), acc / torch.tensor(by))
        program = Program.parse("x0 = div(acc, a0)")
        operand = [torch.tensor(by)]
        assert close(run_triton(program, acc, operand), acc / torch.tensor(by))


# --- The emitted function --------------------------------------------------------------------------


def test_emit_is_cached_and_keyed_by_program_and_kinds():
    program = Program.parse("x0 = div(acc, a0)")
    row, token = torch.ones(3, 1), torch.ones(50)
    kinds = [operand_kinds([one], 3, 50)[0] for one in (row, token)]
    one = emit(program, kinds[0], (), (0,), False)
    assert one is emit(Program.parse(str(program)), kinds[0], (), (0,), False)
    assert one is not emit(program, kinds[1], (), (0,), False)


COMPILE = r"""
import sys, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import torch
sys.path.insert(0, sys.argv[1])
from fs_inductor.kernels.epilogue import OPS, Kind, Program, emit, emit_loads

SHAPES = ("scalar", "row", "token", "full")

@triton.jit
def kernel(acc, out, operands, strides, B, V, BB: tl.constexpr, BV: tl.constexpr, L: tl.constexpr, E: tl.constexpr):
    place = tl.arange(0, BB)[:, None] * BV + tl.arange(0, BV)[None, :]
    if L is None:
        value = E(tl.load(acc + place), (), ())
    else:
        value = E(tl.load(acc + place), (), L(operands, strides, tl.arange(0, BB), 0, B, V, BV))
    tl.store(out + place, value)

def ptx(text, operands):
    dtypes = {"f": ("*fp32", torch.float32), "b": ("*i1", torch.bool)}
    kinds = tuple(Kind(shape, dtypes[dtype][1]) for shape, dtype in operands)
    every = tuple(range(len(kinds)))
    function, loads = emit(Program.parse(text), kinds, (), every, False), emit_loads(kinds, every)
    assert function.cache_key == triton.jit(function.fn).cache_key
    signature = {"acc": "*fp32", "out": "*fp32",
                 "operands": tuple(dtypes[dtype][0] for _, dtype in operands),
                 "strides": tuple(("i64", "i64") for _ in operands), "B": "i32", "V": "i32",
                 "BB": "constexpr", "BV": "constexpr", "L": "constexpr", "E": "constexpr"}
    aligned = {(n,): [["tt.divisibility", 16]] for n in (0, 1)}
    source = ASTSource(kernel, signature, {(6,): 16, (7,): 128, (8,): loads, (9,): function}, aligned)
    options = {"num_warps": 4, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"].split(".section")[0]

# Every op in one program, on operands of every shape.
operands = [(shape, dtype) for dtype in "fb" for shape in SHAPES]
statements, last, n = [], "acc", 0
for name, op in OPS.items():
    for shift in range(len(SHAPES) if len(op.arguments) > 1 else 1):
        pick = {"f": [last, f"a{shift}", "1e-40"], "b": [f"a{4 + shift}", "a4", "true"], "d": ["bf16"]}
        args = [pick[kind][i % len(pick[kind])] for i, kind in enumerate(op.arguments)]
        statements.append(f"x{n} = {name}({', '.join(args)})"); n += 1
        if op.result == "b":
            statements.append(f"x{n} = where(x{n - 1}, {last}, 1e+300)"); n += 1
        last = f"x{n - 1}"
text = ptx("; ".join(statements), operands)
assert ".f64" not in text, "an op is computed in double precision"
assert "\tcall" not in text, "an op calls a function"

# A thread has four columns of four rows: a temperature per row costs it four divisions.
text = ptx("x0 = round(acc, bf16); x1 = div(x0, a0)", [("row", "f")])
assert text.count("div.rn.f32") == 4 and "div.full" not in text
assert text.count("cvt.rn.bf16") in (8, 16), "bf16 rounding was optimised away"
for shape in SHAPES:  # it takes elements in pairs, and a thread may have a single one
    for dtype in ("bf16", "f16"):
        text = ptx(f"x0 = round(a0, {dtype}); x1 = add(acc, x0)", [(shape, "f")])
        assert f"cvt.rn.{dtype}" in text
text = ptx("x0 = div(acc, 30.0); x1 = tanh(x0); x2 = mul(x1, 30.0)", [])
assert "div" not in text and text.count("rcp.approx") == text.count("ex2.approx") == 16
assert text.count("mul.f32") == text.count("fma.rn.f32") == 16, "the scales of a softcap cost nothing"
text = ptx("x0 = div(acc, 30.0); x1 = tanh(x0)", [])
assert "div" not in text and text.count("rcp.approx") == 16 and "ex2" not in text
assert text.count("mul.f32") == 48, "the scale of a tanh costs nothing"
assert "max.NaN" in ptx("x0 = maximum(acc, 0.0)", [])
print("ok")
"""


def test_compiles_for_sm90(tmp_path):
    """Offline, in a process of its own: here Triton may be the interpreter."""
    script = tmp_path / "compile_epilogue.py"
    script.write_text(COMPILE)
    root = Path(__file__).resolve().parent.parent
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    done = subprocess.run([sys.executable, script, root], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.endswith("ok\n"), done.stdout + done.stderr
