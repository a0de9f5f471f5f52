"""Golden op calls of several heads that one sink samples. EXPECTTEST_ACCEPT=1 rewrites them."""

from __future__ import annotations

import idiom_cases_heads  # noqa: F401 - adds its cases
from golden import GoldenTestCase
from idiom_cases import CASES


class Heads(GoldenTestCase):
    def test_one_linear(self):
        self.golden(
            CASES["one_linear"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: acc
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: acc
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: acc""",
        )

    def test_one_linear_greedy(self):
        self.golden(
            CASES["one_linear_greedy"],
            """\
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc""",
        )

    def test_one_linear_keepdim(self):
        self.golden(
            CASES["one_linear_keepdim"],
            """\
argmax(hidden bf16[B, 16], weight bf16[160, 16])
  program: x0 = round(acc, bf16)
argmax(hidden bf16[B, 16], weight bf16[160, 16])
  program: x0 = round(acc, bf16)
argmax(hidden bf16[B, 16], weight bf16[160, 16])
  program: x0 = round(acc, bf16)""",
        )

    def test_one_linear_last(self):
        self.golden(
            CASES["one_linear_last"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[B, 1]])
  program: x0 = div(acc, a0)
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[B, 1]])
  program: x0 = div(acc, a0)
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[B, 1]])
  program: x0 = div(acc, a0)""",
        )

    def test_one_linear_processed_before(self):
        self.golden(
            CASES["one_linear_processed_before"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[160], bool[B, 160]])
  program: x0 = add(acc, a0); x1 = where(a1, -inf, x0)
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[160], bool[B, 160]])
  program: x0 = add(acc, a0); x1 = where(a1, -inf, x0)
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[160], bool[B, 160]])
  program: x0 = add(acc, a0); x1 = where(a1, -inf, x0)""",
        )

    def test_one_linear_processed_by_head(self):
        self.golden(
            CASES["one_linear_processed_by_head"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[160], f32[], bool[160]])
  program: x0 = add(acc, a0); x1 = div(x0, a1); x2 = where(a2, -inf, x1)
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[160], f32[], bool[160]])
  program: x0 = add(acc, a0); x1 = div(x0, a1); x2 = where(a2, -inf, x1)
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[160], f32[], bool[160]])
  program: x0 = add(acc, a0); x1 = div(x0, a1); x2 = where(a2, -inf, x1)""",
        )

    def test_one_linear_processed_after(self):
        self.golden(
            CASES["one_linear_processed_after"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[B, 1], bool[B, 160]])
  program: x0 = div(acc, a0); x1 = where(a1, -inf, x0)
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[B, 1], bool[B, 160]])
  program: x0 = div(acc, a0); x1 = where(a1, -inf, x0)
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[B, 1], bool[B, 160]])
  program: x0 = div(acc, a0); x1 = where(a1, -inf, x0)""",
        )

    def test_one_linear_banned(self):
        self.golden(
            CASES["one_linear_banned"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [bool[160]])
  program: x0 = where(a0, -inf, acc)
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [bool[160]])
  program: x0 = where(a0, -inf, acc)
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [bool[160]])
  program: x0 = where(a0, -inf, acc)""",
        )

    def test_one_linear_scattered(self):
        self.golden(
            CASES["one_linear_scattered"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [bool[B, 160]])
  program: x0 = where(a0, -inf, acc)
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [bool[B, 160]])
  program: x0 = where(a0, -inf, acc)
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [bool[B, 160]])
  program: x0 = where(a0, -inf, acc)""",
        )

    def test_one_linear_scattered_after(self):
        self.golden(
            CASES["one_linear_scattered_after"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [bool[B, 160]])
  program: x0 = where(a0, -inf, acc)
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [bool[B, 160]])
  program: x0 = where(a0, -inf, acc)
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [bool[B, 160]])
  program: x0 = where(a0, -inf, acc)""",
        )

    def test_one_linear_sliced(self):
        self.golden(
            CASES["one_linear_sliced"],
            """\
sample(hidden f32[B, 16], weight f32[150, 16], seed i64[], num_samples 2)
  program: acc
sample(hidden f32[B, 16], weight f32[150, 16], seed i64[], num_samples 2)
  program: acc
sample(hidden f32[B, 16], weight f32[150, 16], seed i64[], num_samples 2)
  program: acc""",
        )

    def test_one_linear_head_first(self):
        self.golden(
            CASES["one_linear_head_first"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: acc
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: acc
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: acc""",
        )

    def test_one_linear_every_position(self):
        self.golden(
            CASES["one_linear_every_position"],
            """\
sample(hidden f32[5*B, 16], weight f32[160, 16], seed i64[], operands [f32[5*B, 1]])
  program: x0 = div(acc, a0)
sample(hidden f32[5*B, 16], weight f32[160, 16], seed i64[], operands [f32[5*B, 1]])
  program: x0 = div(acc, a0)
sample(hidden f32[5*B, 16], weight f32[160, 16], seed i64[], operands [f32[5*B, 1]])
  program: x0 = div(acc, a0)""",
        )

    def test_one_einsum(self):
        self.golden(
            CASES["one_einsum"],
            """\
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc""",
        )

    def test_one_linear_mixed(self):
        self.golden(
            CASES["one_linear_mixed"],
            """\
sample_and_argmax(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[B, 1]])
  program: x0 = div(acc, a0)
  greedy_program: acc
sample_and_argmax(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[B, 1]])
  program: x0 = div(acc, a0)
  greedy_program: acc
sample_and_argmax(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[B, 1]])
  program: x0 = div(acc, a0)
  greedy_program: acc""",
        )

    def test_stack_of_linears(self):
        self.golden(
            CASES["stack_of_linears"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: acc
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: acc
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: acc""",
        )

    def test_stack_of_linears_greedy(self):
        self.golden(
            CASES["stack_of_linears_greedy"],
            """\
argmax(hidden bf16[B, 16], weight bf16[160, 16])
  program: x0 = round(acc, bf16); x1 = div(x0, 0.7)
argmax(hidden bf16[B, 16], weight bf16[160, 16])
  program: x0 = round(acc, bf16); x1 = div(x0, 0.7)""",
        )

    def test_stack_of_linears_last(self):
        self.golden(
            CASES["stack_of_linears_last"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[B, 1]])
  program: x0 = div(acc, a0)
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[B, 1]])
  program: x0 = div(acc, a0)
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[B, 1]])
  program: x0 = div(acc, a0)""",
        )

    def test_stack_of_biased_linears(self):
        self.golden(
            CASES["stack_of_biased_linears"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[160]])
  program: x0 = add(acc, a0)
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[160]])
  program: x0 = add(acc, a0)
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[160]])
  program: x0 = add(acc, a0)""",
        )

    def test_cat_of_linears(self):
        self.golden(
            CASES["cat_of_linears"],
            """\
sample(hidden bf16[B, 16], weight bf16[160, 16], seed i64[], operands [f32[]])
  program: x0 = round(acc, bf16); x1 = div(x0, 0.5); x2 = round(x1, bf16); x3 = div(x2, a0)
sample(hidden bf16[B, 16], weight bf16[160, 16], seed i64[], operands [f32[]])
  program: x0 = round(acc, bf16); x1 = div(x0, a0)""",
        )

    def test_stack_of_linears_in_front(self):
        self.golden(
            CASES["stack_of_linears_in_front"],
            """\
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc""",
        )

    def test_one_by_one(self):
        self.golden(
            CASES["one_by_one"],
            """\
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc""",
        )

    def test_one_by_one_of_stack(self):
        self.golden(
            CASES["one_by_one_of_stack"],
            """\
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc""",
        )

    def test_one_by_one_of_chunks(self):
        self.golden(
            CASES["one_by_one_of_chunks"],
            """\
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc""",
        )
