"""Softcaps in epilogue programs: which are found, and how accurate they are in draws and in greedy tokens."""

import math

import pytest
import torch
from epilogue_checks import close, run_triton

from fs_inductor.kernels.epilogue import Program, operand_kinds
from fs_inductor.kernels.softcap import find_softcaps

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter

# What they do to x, and their cap where a draw's errors may be in proportion to it: else they are to the result.
CAP = "x0 = div(acc, 30.0); x1 = tanh(x0); x2 = mul(x1, 30.0)"
SOFTCAPS = {
    CAP: (lambda x: 30 * torch.tanh(x / 30), 30),
    "x0 = mul(acc, 0.02); x1 = tanh(x0); x2 = div(x1, 0.02)": (lambda x: torch.tanh(x * 0.02) / 0.02, 50),
    "x0 = mul(acc, 1000.0); x1 = tanh(x0)": (lambda x: torch.tanh(1000 * x), 0),
    "x0 = tanh(acc); x1 = mul(x0, 0.001)": (lambda x: torch.tanh(x) * 0.001, 0.001),
    "x0 = tanh(acc); x1 = mul(x0, 0.5); x2 = tanh(x1)": (lambda x: torch.tanh(torch.tanh(x) * 0.5), 0),
    "x0 = mul(acc, 0.5); x1 = tanh(x0); x2 = mul(x1, 2.0); x3 = tanh(x2); x4 = mul(x3, 3.0)": (
        lambda x: 3 * torch.tanh(2 * torch.tanh(x * 0.5)),
        3,
    ),
    "x0 = tanh(acc); x1 = tanh(x0); x2 = div(x1, 1024.0); x3 = tanh(x2)": (
        lambda x: torch.tanh(torch.tanh(torch.tanh(x)) / 1024),
        0,
    ),
    # What may follow, and what may not: the last bits of small values would matter.
    f"{CAP}; x3 = where(false, -inf, x2); x4 = add(x3, 0.5); x5 = div(x4, a0)": (
        lambda x: (30 * torch.tanh(x / 30) + 0.5) / 0.7,
        30 / 0.7,
    ),
    f"{CAP}; x3 = abs(x2); x4 = log(x3)": (lambda x: (30 * torch.tanh(x / 30)).abs().log(), 0),
    f"{CAP}; x3 = mul(x2, 0.5); x4 = div(7.0, x3)": (lambda x: 14 / (30 * torch.tanh(x / 30)), 0),
    f"{CAP}; x3 = mul(x2, 10000000.0)": (lambda x: 3e8 * torch.tanh(x / 30), 0),
    f"{CAP}; x3 = mul(x2, a1)": (lambda x: 6e7 * torch.tanh(x / 30), 0),
    "x0 = div(acc, 1000.0); x1 = tanh(x0); x2 = mul(x1, 1000.0)": (lambda x: 1000 * torch.tanh(x / 1000), 0),
    # Factors that the fit does not take in: negative, too large or small, before or after a rounding, or read twice.
    "x0 = div(acc, -30.0); x1 = tanh(x0); x2 = mul(x1, -30.0)": (lambda x: 30 * torch.tanh(x / 30), 0),
    "x0 = mul(acc, 1e-06); x1 = tanh(x0); x2 = mul(x1, 1000000.0)": (lambda x: 1e6 * torch.tanh(x / 1e6), 0),
    "x0 = div(acc, 30.0); x1 = tanh(x0); x2 = add(x1, x0)": (lambda x: torch.tanh(x / 30) + x / 30, 0),
    "x0 = div(acc, 30.0); x1 = tanh(x0); x2 = mul(x1, 2.0); x3 = add(x2, x1)": (lambda x: 3 * torch.tanh(x / 30), 0),
    "x0 = mul(2.0, acc); x1 = tanh(x0); x2 = mul(x1, x1)": (lambda x: torch.tanh(2 * x) ** 2, 0),
    "x0 = mul(2.0, acc); x1 = tanh(x0); x2 = mul(x1, 3.0); x3 = mul(x2, acc)": (lambda x: 3 * torch.tanh(2 * x) * x, 0),
    "x0 = div(a0, 30.0); x1 = tanh(x0); x2 = mul(x1, 30.0); x3 = mul(acc, x2)": (
        lambda x: x * 30 * math.tanh(0.7 / 30),
        0,
    ),
}


@pytest.mark.parametrize("greedy", [False, True], ids=["draw", "greedy"])
@pytest.mark.parametrize("text", SOFTCAPS)
def test_softcaps(text, greedy):
    """Factors next to a tanh become part of it."""
    x = torch.linspace(-400, 400, 16 * 64).view(16, 64)
    x = torch.cat([x, torch.tensor([1e-6, -1e-3, math.inf, -math.inf, math.nan, 1e30, -1e30, 2.0]).repeat(8)[None]])
    program = Program.parse(text)
    operands = [torch.tensor(0.7), torch.full((64,), 2e6)][: program.num_operands]
    expected, cap = SOFTCAPS[text][0](x.double()), SOFTCAPS[text][1]
    cap = 0 if greedy else cap
    assert close(run_triton(program, x, operands, greedy=greedy), expected, 8 if cap else 16, cap)
    assert close(program.run(x, operands), expected, 16)
    found = find_softcaps(program, operand_kinds(operands, *x.shape)[0], greedy).values()
    assert any(one and one.function == "softcap" for one in found) == (cap > 0)


@pytest.mark.parametrize("greedy", [False, True], ids=["draw", "greedy"])
@pytest.mark.parametrize(
    "text",
    [
        "x0 = tanh(acc); x1 = sub(1.0, x0); x2 = log(x1)",
        "x0 = tanh(acc); x1 = mul(x0, x0); x2 = sub(1.0, x1); x3 = sqrt(x2)",
        "x0 = tanh(acc); x1 = mul(x0, 30.0); x2 = add(x1, 30.0); x3 = log(x2)",
    ],
)
def test_a_tanh_is_within_its_cap_where_beyond_there_is_nothing(text, greedy):
    """There a NaN would be taken for the largest logit."""
    first, last = (torch.tensor(x).view(torch.int32).item() for x in (7.9, 9.1))
    x = torch.arange(first, last, 19, dtype=torch.int32).view(torch.float32)[: 64 * 1024].view(64, 1024)
    assert not run_triton(Program.parse(text), torch.cat([x, -x]), [], greedy=greedy).isnan().any()
