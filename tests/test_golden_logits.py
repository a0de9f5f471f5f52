"""Golden op calls, one for each way to process logits and to spell the LM head. EXPECTTEST_ACCEPT=1 rewrites them."""

from __future__ import annotations

import idiom_cases_logits  # noqa: F401 - adds its cases
from golden import GoldenTestCase
from idiom_cases import CASES


class Logits(GoldenTestCase):
    # -- 9: the rows that are needed ---------------------------------------------------------------------------------

    def test_last_position(self):
        self.golden(
            CASES["last_position"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: acc""",
        )

    def test_last_position_after(self):
        self.golden(
            CASES["last_position_after"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: x0 = div(acc, 0.7)""",
        )

    def test_last_position_list(self):
        self.golden(
            CASES["last_position_list"],
            """\
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc""",
        )

    def test_last_position_slice(self):
        self.golden(
            CASES["last_position_slice"],
            """\
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc""",
        )

    def test_last_position_flat(self):
        self.golden(
            CASES["last_position_flat"],
            """\
argmax(hidden f32[1, 16], weight f32[160, 16])
  program: acc""",
        )

    def test_last_position_flat_draw(self):
        self.golden(
            CASES["last_position_flat_draw"],
            """\
sample(hidden f32[1, 16], weight f32[160, 16], seed i64[])
  program: acc""",
        )

    def test_last_positions(self):
        self.golden(
            CASES["last_positions"],
            """\
argmax(hidden f32[2*B, 16], weight f32[160, 16])
  program: acc""",
        )

    def test_last_position_of_each(self):
        self.golden(
            CASES["last_position_of_each"],
            """\
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc""",
        )

    def test_last_position_of_processed(self):
        self.golden(
            CASES["last_position_of_processed"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[160], bool[B, 160], f32[B, 1]])
  program: x0 = add(acc, a0); x1 = where(a1, -inf, x0); x2 = div(x1, a2)""",
        )

    def test_every_position(self):
        self.golden(
            CASES["every_position"],
            """\
sample(hidden f32[5*B, 16], weight f32[150, 16], seed i64[], operands [f32[5*B, 1]])
  program: x0 = div(acc, a0)""",
        )

    # -- 10: casts ---------------------------------------------------------------------------------------------------

    def test_float_first(self):
        self.golden(
            CASES["float_first"],
            """\
sample(hidden bf16[B, 16], weight bf16[160, 16], seed i64[])
  program: x0 = round(acc, bf16); x1 = div(x0, 0.7)""",
        )

    def test_float_copy(self):
        self.golden(
            CASES["float_copy"],
            """\
sample(hidden bf16[B, 16], weight bf16[160, 16], seed i64[])
  program: x0 = round(acc, bf16)""",
        )

    def test_bf16_throughout(self):
        self.golden(
            CASES["bf16_throughout"],
            """\
sample(hidden bf16[B, 16], weight bf16[160, 16], seed i64[])
  program: x0 = round(acc, bf16); x1 = div(x0, 0.7); x2 = round(x1, bf16)""",
        )

    def test_f16_softmax_f32(self):
        self.golden(
            CASES["f16_softmax_f32"],
            """\
sample(hidden f16[B, 16], weight f16[160, 16], seed i64[])
  program: x0 = round(acc, f16); x1 = div(x0, 0.7); x2 = round(x1, f16)""",
        )

    def test_bf16_by_f32_scalar(self):
        self.golden(
            CASES["bf16_by_f32_scalar"],
            """\
sample(hidden bf16[B, 16], weight bf16[160, 16], seed i64[], operands [f32[]])
  program: x0 = round(acc, bf16); x1 = div(x0, a0); x2 = round(x1, bf16)""",
        )

    def test_bf16_by_f32_rows(self):
        self.golden(
            CASES["bf16_by_f32_rows"],
            """\
sample(hidden bf16[B, 16], weight bf16[160, 16], seed i64[], operands [f32[B, 1]])
  program: x0 = round(acc, bf16); x1 = div(x0, a0)""",
        )

    def test_double(self):
        self.golden(
            CASES["double"],
            """\
sample(hidden bf16[B, 16], weight bf16[160, 16], seed i64[])
  program: x0 = round(acc, bf16); x1 = div(x0, 0.7)""",
        )

    def test_bf16_argmax(self):
        self.golden(
            CASES["bf16_argmax"],
            """\
argmax(hidden bf16[B, 16], weight bf16[160, 16])
  program: x0 = round(acc, bf16); x1 = mul(x0, 1.7); x2 = round(x1, bf16); x3 = add(x2, 0.25);
    x4 = round(x3, bf16)""",
        )

    def test_bf16_log_softmax_argmax(self):
        self.golden(
            CASES["bf16_log_softmax_argmax"],
            """\
argmax(hidden bf16[B, 16], weight bf16[160, 16])
  program: x0 = round(acc, bf16)""",
        )

    # -- 11: softcap -------------------------------------------------------------------------------------------------

    def test_softcap(self):
        self.golden(
            CASES["softcap"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: x0 = div(acc, 5.0); x1 = tanh(x0); x2 = mul(x1, 5.0)""",
        )

    def test_softcap_bf16(self):
        self.golden(
            CASES["softcap_bf16"],
            """\
sample(hidden bf16[B, 16], weight bf16[160, 16], seed i64[])
  program: x0 = round(acc, bf16); x1 = div(x0, 30.0); x2 = round(x1, bf16); x3 = tanh(x2);
    x4 = round(x3, bf16); x5 = mul(x4, 30.0); x6 = round(x5, bf16)""",
        )

    def test_softcap_greedy(self):
        self.golden(
            CASES["softcap_greedy"],
            """\
argmax(hidden bf16[B, 16], weight bf16[160, 16])
  program: x0 = round(acc, bf16); x1 = div(x0, 8.0); x2 = round(x1, bf16); x3 = tanh(x2);
    x4 = round(x3, bf16); x5 = mul(x4, 8.0); x6 = round(x5, bf16)""",
        )

    def test_not_a_softcap(self):
        self.golden(
            CASES["not_a_softcap"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: x0 = div(acc, 5.0); x1 = tanh(x0); x2 = mul(acc, x1)""",
        )

    # -- 12: scale ---------------------------------------------------------------------------------------------------

    def test_scale_in_place(self):
        self.golden(
            CASES["scale_in_place"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: x0 = mul(acc, 0.125); x1 = div(x0, 0.7)""",
        )

    def test_scale_before_slice(self):
        self.golden(
            CASES["scale_before_slice"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: x0 = div(acc, 8.0)""",
        )

    def test_scale_after_slice(self):
        self.golden(
            CASES["scale_after_slice"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: x0 = mul(acc, 0.25)""",
        )

    def test_scale_hidden(self):
        self.golden(
            CASES["scale_hidden"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: x0 = mul(acc, 4.0)""",
        )

    # -- 13: slices of the vocabulary --------------------------------------------------------------------------------

    def test_vocab_slice(self):
        self.golden(
            CASES["vocab_slice"],
            """\
sample(hidden f32[B, 16], weight f32[150, 16], seed i64[])
  program: acc""",
        )

    def test_vocab_slice_last(self):
        self.golden(
            CASES["vocab_slice_last"],
            """\
sample(hidden f32[B, 16], weight f32[150, 16], seed i64[], operands [f32[150]])
  program: x0 = add(acc, a0); x1 = div(x0, 0.7)""",
        )

    def test_band(self):
        self.golden(
            CASES["band"],
            """\
argmax(hidden f32[B, 16], weight f32[140, 16])
  program: acc""",
        )

    def test_band_of_masked(self):
        self.golden(
            CASES["band_of_masked"],
            """\
sample(hidden f32[B, 16], weight f32[120, 16], seed i64[], operands [bool[B, 120]])
  program: x0 = where(a0, -inf, acc)""",
        )

    # -- 14: bias ----------------------------------------------------------------------------------------------------

    def test_bias_of_linear(self):
        self.golden(
            CASES["bias_of_linear"],
            """\
argmax(hidden f32[B, 16], weight f32[160, 16], operands [f32[160]])
  program: x0 = add(acc, a0)""",
        )

    def test_bias_of_linear_bf16(self):
        self.golden(
            CASES["bias_of_linear_bf16"],
            """\
sample(hidden bf16[B, 16], weight bf16[160, 16], seed i64[], operands [bf16[160]])
  program: x0 = add(acc, a0); x1 = round(x0, bf16)""",
        )

    def test_bias_of_linear_last(self):
        self.golden(
            CASES["bias_of_linear_last"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[160]])
  program: x0 = add(acc, a0)""",
        )

    def test_bias_added_bf16(self):
        self.golden(
            CASES["bias_added_bf16"],
            """\
argmax(hidden bf16[B, 16], weight bf16[160, 16], operands [bf16[160]])
  program: x0 = round(acc, bf16); x1 = add(x0, a0); x2 = round(x1, bf16)""",
        )

    def test_biases_added(self):
        self.golden(
            CASES["biases_added"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[160], f32[B, 160]])
  program: x0 = add(acc, a0); x1 = mul(a1, 2.0); x2 = sub(x0, x1)""",
        )

    def test_low_rank_added(self):
        self.golden(
            CASES["low_rank_added"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[B, 160]])
  program: x0 = add(acc, a0)""",
        )

    # -- 15: masks ---------------------------------------------------------------------------------------------------

    def test_masked_fill(self):
        self.golden(
            CASES["masked_fill"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [bool[B, 160]])
  program: x0 = where(a0, -inf, acc)""",
        )

    def test_masked_where(self):
        self.golden(
            CASES["masked_where"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [bool[B, 160]])
  program: x0 = where(a0, acc, -inf)""",
        )

    def test_masked_assign(self):
        self.golden(
            CASES["masked_assign"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [bool[B, 160]])
  program: x0 = where(a0, -inf, acc)""",
        )

    def test_banned_ids(self):
        self.golden(
            CASES["banned_ids"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [bool[160]])
  program: x0 = where(a0, -inf, acc)""",
        )

    def test_banned_constants(self):
        self.golden(
            CASES["banned_constants"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [bool[160], bool[160], bool[160]])
  program: x0 = where(a0, -inf, acc); x1 = where(a1, -inf, x0); x2 = where(a2, -inf, x1)""",
        )

    def test_banned_scatter(self):
        self.golden(
            CASES["banned_scatter"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [bool[B, 160]])
  program: x0 = where(a0, -inf, acc)""",
        )

    def test_banned_per_row(self):
        self.golden(
            CASES["banned_per_row"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [bool[B, 160]])
  program: x0 = where(a0, -inf, acc)""",
        )

    def test_masked_finite_bf16(self):
        self.golden(
            CASES["masked_finite_bf16"],
            """\
sample(hidden bf16[B, 16], weight bf16[160, 16], seed i64[], operands [bool[B, 160]])
  program: x0 = round(acc, bf16); x1 = where(a0, -9984.0, x0)""",
        )

    def test_masked_combined(self):
        self.golden(
            CASES["masked_combined"],
            """\
argmax(hidden f32[B, 16], weight f32[160, 16], operands [bool[B, 160]])
  program: x0 = where(a0, -3.4028234663852886e+38, acc)""",
        )

    def test_masked_rows(self):
        self.golden(
            CASES["masked_rows"],
            """\
argmax(hidden f32[B, 16], weight f32[160, 16], operands [bool[B, 1]])
  program: x0 = where(a0, 0.25, acc)""",
        )

    def test_banned_before_slice(self):
        self.golden(
            CASES["banned_before_slice"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [bool[160]])
  program: x0 = where(a0, -inf, acc)""",
        )

    def test_penalty(self):
        self.golden(
            CASES["penalty"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [bool[B, 160]])
  program: x0 = div(acc, 1.2); x1 = mul(acc, 1.2); x2 = where(a0, x0, x1)""",
        )

    # -- 17: layouts -------------------------------------------------------------------------------------------------

    def test_matmul_transposed(self):
        self.golden(
            CASES["matmul_transposed"],
            """\
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc""",
        )

    def test_mm_stored_transposed(self):
        self.golden(
            CASES["mm_stored_transposed"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: acc""",
        )

    def test_matvec(self):
        self.golden(
            CASES["matvec"],
            """\
argmax(hidden f32[1, 16], weight f32[160, 16])
  program: acc""",
        )

    def test_matvec_bf16(self):
        self.golden(
            CASES["matvec_bf16"],
            """\
argmax(hidden bf16[1, 16], weight bf16[160, 16])
  program: x0 = round(acc, bf16)""",
        )

    def test_linear_flat(self):
        self.golden(
            CASES["linear_flat"],
            """\
sample(hidden f32[1, 16], weight f32[160, 16], seed i64[])
  program: acc""",
        )

    def test_einsum(self):
        self.golden(
            CASES["einsum"],
            """\
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc""",
        )

    def test_einsum_last(self):
        self.golden(
            CASES["einsum_last"],
            """\
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc""",
        )

    def test_squeezed(self):
        self.golden(
            CASES["squeezed"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: acc""",
        )

    def test_unsqueezed(self):
        self.golden(
            CASES["unsqueezed"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: acc""",
        )

    def test_vocab_first(self):
        self.golden(
            CASES["vocab_first"],
            """\
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc""",
        )

    def test_four_dims(self):
        self.golden(
            CASES["four_dims"],
            """\
argmax(hidden bf16[B, 16], weight bf16[160, 16])
  program: x0 = round(acc, bf16)""",
        )

    def test_tied_module(self):
        self.golden(
            CASES["tied_module"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: acc""",
        )
