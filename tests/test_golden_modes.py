"""The rewrite does not depend on how gradients are handled, and follows the graph's own dtypes."""

from __future__ import annotations

import contextlib

import idiom_cases_heads  # noqa: F401 - adds its cases
import idiom_cases_logits  # noqa: F401 - adds its cases
import idiom_cases_more  # noqa: F401 - adds its cases
import pytest
import torch
from golden import GoldenTestCase
from idiom_cases import CASES, W, bias, exact, h, mask
from support import FEATURES, VOCAB, assert_fused, run_pass
from torch.nn import functional as F


@pytest.mark.parametrize("name", CASES)
def test_grad_modes_agree(name):
    case = CASES[name]
    expected = run_pass(case.fn, case.args, execute=False).text()
    wants_grad = [
        a.clone().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in case.args
    ]
    for mode, args in ((torch.inference_mode, case.args), (contextlib.nullcontext, wants_grad)):
        rewritten = run_pass(case.fn, args, mode=mode, execute=False)
        assert_fused(rewritten, case.fused)
        assert rewritten.text() == expected


def processed(h, W, b, m):
    logits = F.linear(h, W, b) / 0.7
    logits = (5.0 * torch.tanh(logits / 5.0)).masked_fill(m, float("-inf"))
    return torch.multinomial(logits.softmax(-1, dtype=torch.float32), 1)


class Head(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(FEATURES, VOCAB)

    def forward(self, x):
        return self.head(x).softmax(-1).multinomial(1)


class Dtypes(GoldenTestCase):
    def text(self, fn, args, **how):
        rewritten = run_pass(fn, args, **how)
        assert_fused(rewritten, 1)
        return rewritten.text(symbols=False)

    def test_dtypes(self):
        texts = [
            self.text(processed, [x.to(dtype) for x in (h, W, bias)] + [mask])
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        ]
        self.assertExpectedInline(
            "\n".join(texts),
            """\
sample(hidden f32[4, 16], weight f32[160, 16], seed i64[], operands [f32[160], bool[4, 160]])
  program: x0 = add(acc, a0); x1 = div(x0, 0.7); x2 = div(x1, 5.0); x3 = tanh(x2); x4 = mul(x3, 5.0);
    x5 = where(a1, -inf, x4)
sample(hidden bf16[4, 16], weight bf16[160, 16], seed i64[], operands [bf16[160], bool[4, 160]])
  program: x0 = add(acc, a0); x1 = round(x0, bf16); x2 = div(x1, 0.7); x3 = round(x2, bf16);
    x4 = div(x3, 5.0); x5 = round(x4, bf16); x6 = tanh(x5); x7 = round(x6, bf16); x8 = mul(x7, 5.0);
    x9 = round(x8, bf16); x10 = where(a1, -inf, x9)
sample(hidden f16[4, 16], weight f16[160, 16], seed i64[], operands [f16[160], bool[4, 160]])
  program: x0 = add(acc, a0); x1 = round(x0, f16); x2 = div(x1, 0.7); x3 = round(x2, f16);
    x4 = div(x3, 5.0); x5 = round(x4, f16); x6 = tanh(x5); x7 = round(x6, f16); x8 = mul(x7, 5.0);
    x9 = round(x8, f16); x10 = where(a1, -inf, x9)""",
        )

    def test_temperature_becomes_a_tensor(self):
        """Dynamo's spelling of a Python number from the second value on: an operand, not a literal."""
        texts = [self.text(CASES[n].fn, CASES[n].args, dynamic="all") for n in ("temperature", "temperature_int")]
        self.assertExpectedInline(
            "\n".join(texts),
            """\
sample(hidden f32[4, 16], weight f32[160, 16], seed i64[], operands [f32[]])
  program: x0 = div(acc, a0)
sample(hidden f32[4, 16], weight f32[160, 16], seed i64[], operands [f32[]])
  program: x0 = div(acc, a0)""",
        )

    def test_autocast(self):
        def autocast():
            stack = contextlib.ExitStack()
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            return stack

        texts = [self.text(fn, args, mode=autocast) for fn, args in ((processed, (h, W, bias, mask)), (greedy, (h, W)))]
        self.assertExpectedInline(
            "\n".join(texts),
            """\
sample(hidden bf16[4, 16], weight bf16[160, 16], seed i64[], operands [bf16[160], bool[4, 160]])
  program: x0 = add(acc, a0); x1 = round(x0, bf16); x2 = div(x1, 0.7); x3 = round(x2, bf16);
    x4 = div(x3, 5.0); x5 = round(x4, bf16); x6 = tanh(x5); x7 = round(x6, bf16); x8 = mul(x7, 5.0);
    x9 = round(x8, bf16); x10 = where(a1, -inf, x9)
argmax(hidden bf16[4, 16], weight bf16[160, 16])
  program: x0 = round(acc, bf16)""",
        )

    def test_freezing(self):
        model = Head().requires_grad_(False).eval()
        self.assertExpectedInline(
            self.text(model, [h], config={"freezing": True}),
            """\
sample(hidden f32[4, 16], weight f32[160, 16], seed i64[], operands [f32[160]])
  program: x0 = add(acc, a0)""",
        )

    def test_strided_weight(self):
        """A strided weight, a slice of a larger tensor, is passed as it lies."""
        wide = exact(torch.Generator().manual_seed(3), VOCAB, 2 * FEATURES)
        rewritten = run_pass(greedy, [h, wide[:, ::2]])
        assert_fused(rewritten, 1)
        assert torch.equal(rewritten.result, greedy(h, wide[:, ::2]))


def greedy(h, W):
    return F.linear(h, W).argmax(-1)
