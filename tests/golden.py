"""Golden texts of our op calls. EXPECTTEST_ACCEPT=1 rewrites them in the tests' sources."""

from __future__ import annotations

from typing import Any

import expecttest
from support import assert_fused, run_pass


class GoldenTestCase(expecttest.TestCase):
    """Golden texts that cannot bless a miss: a case must be fused, completely, before its text is looked at."""

    def golden(self, case: Any, expected: str) -> None:
        """Compares the op calls of ``case``, which must be alike for static and dynamic batch, with ``expected``."""
        static = run_pass(case.fn, case.args, execute=False)
        dynamic = run_pass(case.fn, case.args, dynamic="batch", execute=False)
        assert_fused(static, case.fused)
        assert_fused(dynamic, case.fused)
        self.assertMultiLineEqual(static.text(), dynamic.text(symbols=False))
        self.assertExpectedInline(dynamic.text(), expected, skip=1)
