"""Golden op calls of processed probabilities and of logits cut into pieces. EXPECTTEST_ACCEPT=1 rewrites them."""

from __future__ import annotations

import idiom_cases_more  # noqa: F401 - adds its cases
from golden import GoldenTestCase
from idiom_cases import CASES


class More(GoldenTestCase):
    def test_probabilities_to_a_power(self):
        self.golden(
            CASES["probabilities_to_a_power"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: x0 = mul(acc, 1.4285714285714286)""",
        )

    def test_probabilities_to_a_power_per_row(self):
        self.golden(
            CASES["probabilities_to_a_power_per_row"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[B, 1]])
  program: x0 = mul(acc, a0)""",
        )

    def test_race_of_squares(self):
        self.golden(
            CASES["race_of_squares"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: x0 = mul(acc, 2.0)""",
        )

    def test_gumbel_on_log_probabilities(self):
        self.golden(
            CASES["gumbel_on_log_probabilities"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: acc""",
        )

    def test_log_of_softmax_tempered(self):
        self.golden(
            CASES["log_of_softmax_tempered"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: x0 = div(acc, 0.7)""",
        )

    def test_log_softmax_biased(self):
        self.golden(
            CASES["log_softmax_biased"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[160], f32[B, 160]])
  program: x0 = add(acc, a0); x1 = sub(x0, a1); x2 = div(x1, 0.7)""",
        )

    def test_log_softmaxes_of_two_heads(self):
        self.golden(
            CASES["log_softmaxes_of_two_heads"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[B, 160]])
  program: x0 = mul(acc, 0.5); x1 = sub(a0, x0)""",
        )

    def test_log_softmax_subtracted(self):
        self.golden(
            CASES["log_softmax_subtracted"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[B, 160]])
  program: x0 = sub(a0, acc)""",
        )

    def test_log_softmax_biased_greedy(self):
        self.golden(
            CASES["log_softmax_biased_greedy"],
            """\
argmax(hidden f32[B, 16], weight f32[160, 16], operands [f32[B, 160]])
  program: x0 = mul(acc, 8.0); x1 = add(x0, a0)""",
        )

    def test_probabilities_times_mask(self):
        self.golden(
            CASES["probabilities_times_mask"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [bool[B, 160]])
  program: x0 = where(a0, acc, -inf)""",
        )

    def test_float_mask_times_probabilities(self):
        self.golden(
            CASES["float_mask_times_probabilities"],
            """\
sample(hidden bf16[B, 16], weight bf16[160, 16], seed i64[], operands [bool[160]])
  program: x0 = round(acc, bf16); x1 = where(a0, x0, -inf)""",
        )

    def test_unbound_position(self):
        self.golden(
            CASES["unbound_position"],
            """\
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc""",
        )

    def test_split_positions(self):
        self.golden(
            CASES["split_positions"],
            """\
sample(hidden f32[2*B, 16], weight f32[160, 16], seed i64[], operands [f32[2*B, 1]])
  program: x0 = div(acc, a0)""",
        )

    def test_half_of_the_rows(self):
        self.golden(
            CASES["half_of_the_rows"],
            """\
argmax(hidden f32[B - (((B + 1)//2)), 16], weight f32[160, 16])
  program: acc""",
        )

    def test_chunk_of_vocabulary(self):
        self.golden(
            CASES["chunk_of_vocabulary"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: acc""",
        )

    def test_last_piece_of_vocabulary(self):
        self.golden(
            CASES["last_piece_of_vocabulary"],
            """\
sample(hidden f32[B, 16], weight f32[50, 16], seed i64[], operands [f32[50]])
  program: x0 = add(acc, a0)""",
        )

    def test_middle_piece_of_vocabulary(self):
        self.golden(
            CASES["middle_piece_of_vocabulary"],
            """\
sample(hidden f32[B, 16], weight f32[100, 16], seed i64[], operands [bool[B, 100]])
  program: x0 = where(a0, -inf, acc)""",
        )

    def test_masked_in_place_at_the_last_position(self):
        self.golden(
            CASES["masked_in_place_at_the_last_position"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [bool[160]])
  program: x0 = where(a0, -inf, acc)""",
        )

    def test_scaled_in_place_at_the_last_position(self):
        self.golden(
            CASES["scaled_in_place_at_the_last_position"],
            """\
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: x0 = add(acc, 0.5); x1 = div(x0, 0.7)""",
        )

    def test_band_masked_in_place(self):
        self.golden(
            CASES["band_masked_in_place"],
            """\
argmax(hidden f32[B, 16], weight f32[138, 16], operands [bool[138], bool[138]])
  program: x0 = where(a0, -inf, acc); x1 = where(a1, -inf, x0)""",
        )

    def test_half_noise_tempered_by_a_number(self):
        self.golden(
            CASES["half_noise_tempered_by_a_number"],
            """\
sample(hidden f16[B, 16], weight f16[160, 16], seed i64[])
  program: x0 = round(acc, f16); x1 = div(x0, 0.7)""",
        )
