"""README's table of idioms is what the cases and their goldens say."""

from __future__ import annotations

import idiom_cases
import idiom_cases_misses
import idiom_table
import pytest
import torch
from idiom_table import README, golden_ops, table, written


def test_readme_is_up_to_date():
    readme = README.read_text()
    assert readme == written(readme), "run `make idioms`"


def test_a_stale_table_is_replaced_and_nothing_else_is():
    readme = README.read_text()
    assert written(readme.replace(table(), "| something old |\n")) == readme
    assert written(f"a\n{idiom_table.BEGIN}{idiom_table.END}b\n") == (
        f"a\n{idiom_table.BEGIN}{table()}{idiom_table.END}b\n"
    )
    with pytest.raises(ValueError, match="no table between"):
        written(readme.replace(idiom_table.END, ""))


def test_outcomes_are_ops_and_codes():
    assert len(table().splitlines()) == 2 + 25
    assert set(golden_ops()) == set(idiom_cases.CASES)
    ops = {op for text in golden_ops().values() for op in text.replace("`", "").split()}
    assert ops >= {"sample", "argmax", "sample_and_argmax"}
    assert all(hasattr(torch.ops.flashsampling, op) for op in ops)


def case_without_golden(monkeypatch):
    monkeypatch.setattr(idiom_table, "golden_ops", dict)


def idiom_without_case(monkeypatch):
    monkeypatch.setattr(idiom_table, "CASES", {})
    monkeypatch.setattr(idiom_table, "MISSES", {})


def idiom_without_name(monkeypatch):
    monkeypatch.setattr(idiom_table, "IDIOMS", idiom_table.IDIOMS[:10])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (case_without_golden, "'plain' needs a golden text"),
        (idiom_without_case, r"idiom 1 \(softmax, multinomial\) has no case"),
        (idiom_without_name, "an idiom from 1 to 10"),
    ],
)
def test_a_table_with_holes_is_an_error(monkeypatch, change, words):
    change(monkeypatch)
    with pytest.raises(ValueError, match=words):
        table()


def test_counts_follow_the_cases(monkeypatch):
    """One more miss of an idiom: one more spelling, and its code."""
    before = table().splitlines()
    extra = idiom_cases_misses.MISSES["unknown_op_between"]
    changed = idiom_cases_misses.MissCase("extra", 1, extra.fn, extra.args, ["NO_LINEAR"], "")
    monkeypatch.setattr(idiom_table, "MISSES", {**idiom_cases_misses.MISSES, "extra": changed})
    after = table().splitlines()
    assert before[:2] + before[3:] == after[:2] + after[3:]
    count = int(before[2].split(" | ")[2])
    assert f"| {count + 1} |" in after[2]
    assert "`NO_LINEAR`" in after[2] and "`NO_LINEAR`" not in before[2]
