"""The catalogue of idioms is covered: each has a golden, a strict positive run or a miss of its own."""

import idiom_cases_heads  # noqa: F401 - adds its cases
import idiom_cases_logits  # noqa: F401 - adds its cases
import idiom_cases_more  # noqa: F401 - adds its cases
import test_golden
import test_golden_heads
import test_golden_logits
import test_golden_more
from idiom_cases import CASES
from idiom_cases_misses import MISSES

FUSED, LATER = set(range(1, 20)), set(range(20, 26))
GOLDENS = (test_golden.Tails, test_golden_logits.Logits, test_golden_more.More, test_golden_heads.Heads)


def test_every_case_has_a_golden():
    tested = [name.removeprefix("test_") for kind in GOLDENS for name in vars(kind) if name.startswith("test_")]
    assert sorted(tested) == sorted(CASES)


def test_every_idiom_is_fused_or_missed():
    assert {case.idiom for case in CASES.values()} == FUSED
    assert {case.idiom for case in MISSES.values()} - {None} >= LATER


def test_idioms_that_are_not_supported_have_codes_of_their_own():
    codes = {}
    for case in MISSES.values():
        codes.setdefault(case.idiom, set()).update(case.codes)
    wanted = ["TOP_K", "TOP_K", "TOP_P", "MIN_P", "PROBS_ESCAPE", "LOGPROBS"]
    assert [codes[idiom] for idiom in sorted(LATER)] == [{code} for code in wanted]
