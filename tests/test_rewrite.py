"""For every spelling, the rewritten call samples from the distribution that the user wrote, or takes eager's tokens."""

import idiom_cases_logits  # noqa: F401 - adds its cases
import pytest
from idiom_cases import CASES
from rewrite_checks import check_rewritten_call


@pytest.mark.parametrize("name", CASES)
def test_rewritten_call(name):
    check_rewritten_call(CASES[name], "cpu")
