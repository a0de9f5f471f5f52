"""For every spelling, the rewritten call samples from the distribution that the user wrote, or takes eager's tokens."""

import idiom_cases_heads  # noqa: F401 - adds its cases
import idiom_cases_logits  # noqa: F401 - adds its cases
import idiom_cases_more  # noqa: F401 - adds its cases
import pytest
import torch
from idiom_cases import CASES, W, h
from rewrite_checks import check_rewritten_call
from support import assert_fused, run_pass
from torch.nn import functional as F


@pytest.mark.parametrize("name", CASES)
def test_rewritten_call(name):
    check_rewritten_call(CASES[name], "cpu")


NUMBERS = {
    "add": lambda x, n: x + n,
    "add_": lambda x, n: x.add_(n),
    "sub": lambda x, n: x - n,
    "rsub": lambda x, n: n - x,
    "mul": lambda x, n: x * n,
    "div": lambda x, n: x / n,
    "where": lambda x, n: torch.where(x > 0, x, n),
    "gt": lambda x, n: torch.where(x > n, x, -1.0),
    "masked_fill": lambda x, n: x.masked_fill(x.abs() > 1, n),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", NUMBERS)
def test_numbers_are_rounded_as_eager_rounds_them(op, dtype):
    """Bit for bit, for literals, 0-d tensors, and numbers that Dynamo made dynamic."""

    def step(h, W, number):
        return NUMBERS[op](F.linear(h, W), number).argmax(-1)

    def logits(number):
        return NUMBERS[op](F.linear(h.to(dtype), W.to(dtype)), number).float()

    # 0.3 is no number of bfloat16 or float16.
    as_tensors = [(torch.tensor(0.3), None), (torch.tensor(0.3, dtype=torch.float64), None)]
    for number, dynamic in ((0.3, None), (0.3, "all"), *as_tensors):
        rewritten = run_pass(step, [h.to(dtype), W.to(dtype), number], dynamic=dynamic)
        assert_fused(rewritten, 1)
        assert torch.equal(rewritten.calls[0].logits(), logits(number))
