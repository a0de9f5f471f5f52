"""Golden op calls, one for each way to turn logits into a token. EXPECTTEST_ACCEPT=1 rewrites them."""

from __future__ import annotations

from golden import GoldenTestCase
from idiom_cases import CASES


class Tails(GoldenTestCase):
    # -- 1: softmax, multinomial -------------------------------------------------------------------------------------

    def test_plain(self):
        self.golden(
            CASES["plain"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: acc""",
        )

    def test_temperature(self):
        self.golden(
            CASES["temperature"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: x0 = div(acc, 0.7)""",
        )

    def test_temperature_0d(self):
        self.golden(
            CASES["temperature_0d"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[]])
  program: x0 = div(acc, a0)""",
        )

    def test_temperature_per_row(self):
        self.golden(
            CASES["temperature_per_row"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[B, 1]])
  program: x0 = div(acc, a0)""",
        )

    def test_temperature_vector(self):
        self.golden(
            CASES["temperature_vector"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[B, 1]])
  program: x0 = div(acc, a0)""",
        )

    def test_temperature_guarded(self):
        self.golden(
            CASES["temperature_guarded"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: x0 = div(acc, 0.3)""",
        )

    def test_temperature_clamped(self):
        self.golden(
            CASES["temperature_clamped"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[B, 1]])
  program: x0 = div(acc, a0)""",
        )

    def test_temperature_inverse(self):
        self.golden(
            CASES["temperature_inverse"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: x0 = mul(acc, 1.4285714285714286)""",
        )

    def test_temperature_int(self):
        self.golden(
            CASES["temperature_int"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: x0 = div(acc, 2.0)""",
        )

    # -- 2: greedy ---------------------------------------------------------------------------------------------------

    def test_argmax(self):
        self.golden(
            CASES["argmax"],
            """\
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc""",
        )

    def test_argmax_keepdim(self):
        self.golden(
            CASES["argmax_keepdim"],
            """\
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc""",
        )

    def test_max_indices(self):
        self.golden(
            CASES["max_indices"],
            """\
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc""",
        )

    def test_max_unpacked(self):
        self.golden(
            CASES["max_unpacked"],
            """\
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc""",
        )

    def test_topk_one(self):
        self.golden(
            CASES["topk_one"],
            """\
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc""",
        )

    def test_topk_unpacked(self):
        self.golden(
            CASES["topk_unpacked"],
            """\
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc""",
        )

    def test_argmax_float(self):
        self.golden(
            CASES["argmax_float"],
            """\
argmax(hidden bf16[B, 16], weight bf16[160, 16])
  program: x0 = round(acc, bf16)""",
        )

    def test_argmax_of_softmax(self):
        self.golden(
            CASES["argmax_of_softmax"],
            """\
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc""",
        )

    def test_argmax_of_log_softmax(self):
        self.golden(
            CASES["argmax_of_log_softmax"],
            """\
argmax(hidden f32[B, 16], weight f32[160, 16])
  program: acc""",
        )

    def test_argmax_flat(self):
        self.golden(
            CASES["argmax_flat"],
            """\
argmax(hidden f32[1, 16], weight f32[160, 16])
  program: acc""",
        )

    def test_argmax_every_position(self):
        self.golden(
            CASES["argmax_every_position"],
            """\
argmax(hidden f32[5*B, 16], weight f32[160, 16])
  program: acc""",
        )

    # -- 3: exponential race -----------------------------------------------------------------------------------------

    def test_race(self):
        self.golden(
            CASES["race"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: x0 = div(acc, 0.8)""",
        )

    def test_race_in_place(self):
        self.golden(
            CASES["race_in_place"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: x0 = div(acc, 0.8)""",
        )

    def test_race_like_logits(self):
        self.golden(
            CASES["race_like_logits"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: acc""",
        )

    def test_race_half_noise(self):
        self.golden(
            CASES["race_half_noise"],
            """\
sample(hidden bf16[B, 16], weight bf16[160, 16], seed i64[])
  program: x0 = round(acc, bf16)""",
        )

    # -- 4: exponential race with guards -----------------------------------------------------------------------------

    def test_race_clamped(self):
        self.golden(
            CASES["race_clamped"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: acc""",
        )

    def test_race_log_rand(self):
        self.golden(
            CASES["race_log_rand"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: acc""",
        )

    def test_race_where(self):
        self.golden(
            CASES["race_where"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: acc""",
        )

    # -- 5: Gumbel ---------------------------------------------------------------------------------------------------

    def test_gumbel(self):
        self.golden(
            CASES["gumbel"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: x0 = div(acc, 0.7)""",
        )

    def test_gumbel_eps(self):
        self.golden(
            CASES["gumbel_eps"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: x0 = div(acc, 0.7)""",
        )

    def test_gumbel_clamped(self):
        self.golden(
            CASES["gumbel_clamped"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: x0 = div(acc, 0.7)""",
        )

    def test_gumbel_exponential(self):
        self.golden(
            CASES["gumbel_exponential"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: acc""",
        )

    def test_gumbel_f32_noise(self):
        self.golden(
            CASES["gumbel_f32_noise"],
            """\
sample(hidden bf16[B, 16], weight bf16[160, 16], seed i64[])
  program: x0 = round(acc, bf16)""",
        )

    def test_gumbel_f64(self):
        self.golden(
            CASES["gumbel_f64"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: acc""",
        )

    def test_gumbel_scaled_after(self):
        self.golden(
            CASES["gumbel_scaled_after"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: x0 = div(acc, 0.7)""",
        )

    # -- 6: the temperature on the noise -----------------------------------------------------------------------------

    def test_noise_to_the_power(self):
        self.golden(
            CASES["noise_to_the_power"],
            """\
sample(hidden f32[5*B, 16], weight f32[160, 16], seed i64[])
  program: x0 = div(acc, 0.7)""",
        )

    def test_noise_to_the_power_per_row(self):
        self.golden(
            CASES["noise_to_the_power_per_row"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[B, 1]])
  program: x0 = maximum(a0, 1e-30); x1 = div(acc, x0)""",
        )

    def test_noise_scaled(self):
        self.golden(
            CASES["noise_scaled"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: x0 = div(acc, 0.7)""",
        )

    # -- 7: Categorical ----------------------------------------------------------------------------------------------

    def test_categorical_logits(self):
        self.golden(
            CASES["categorical_logits"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: x0 = div(acc, 0.7)""",
        )

    def test_categorical_probs(self):
        self.golden(
            CASES["categorical_probs"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: x0 = div(acc, 0.7)""",
        )

    # -- 8: log-softmax ----------------------------------------------------------------------------------------------

    def test_log_softmax_exp(self):
        self.golden(
            CASES["log_softmax_exp"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: acc""",
        )

    def test_log_softmax_softmax(self):
        self.golden(
            CASES["log_softmax_softmax"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: acc""",
        )

    def test_log_softmax_temperature(self):
        self.golden(
            CASES["log_softmax_temperature"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[])
  program: x0 = div(acc, 0.7)""",
        )

    def test_log_softmax_masked(self):
        self.golden(
            CASES["log_softmax_masked"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [bool[B, 160]])
  program: x0 = where(a0, -inf, acc); x1 = div(x0, 0.7)""",
        )

    def test_renormalised(self):
        self.golden(
            CASES["renormalised"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [bool[B, 160]])
  program: x0 = where(a0, -inf, acc)""",
        )

    # -- 16: greedy rows among drawn ones ----------------------------------------------------------------------------

    def test_mixed_clamped(self):
        self.golden(
            CASES["mixed_clamped"],
            """\
sample_and_argmax(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[B, 1]])
  program: x0 = div(acc, a0)
  greedy_program: acc""",
        )

    def test_mixed_race(self):
        self.golden(
            CASES["mixed_race"],
            """\
sample_and_argmax(hidden f32[B, 16], weight f32[160, 16], seed i64[], operands [f32[B, 1]])
  program: x0 = div(acc, a0)
  greedy_program: acc""",
        )

    # -- 19: several samples -----------------------------------------------------------------------------------------

    def test_several(self):
        self.golden(
            CASES["several"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], num_samples 3)
  program: acc""",
        )

    def test_two_draws(self):
        self.golden(
            CASES["two_draws"],
            """\
sample(hidden f32[B, 16], weight f32[160, 16], seed i64[], num_samples 3)
  program: acc""",
        )
