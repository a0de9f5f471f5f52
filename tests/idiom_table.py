"""Writes README's table of idioms: what becomes of each way to write next-token sampling.

    python tests/idiom_table.py

Nothing in the table is written by hand but the idioms' names. A spelling is a case of `idiom_cases` or of
`idiom_cases_misses`. Its outcome is what the tests hold it to: the ops in its golden text, or its miss codes.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import idiom_cases_heads  # noqa: F401 - adds its cases
import idiom_cases_logits  # noqa: F401 - adds its cases
import idiom_cases_more  # noqa: F401 - adds its cases
from idiom_cases import CASES
from idiom_cases_misses import MISSES

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
GOLDENS = ("test_golden.py", "test_golden_logits.py", "test_golden_more.py", "test_golden_heads.py")
BEGIN, END = "<!-- idioms: begin; written by tests/idiom_table.py -->\n", "<!-- idioms: end -->\n"

IDIOMS = (
    "softmax, multinomial",
    "argmax, `max`, `topk(1)`",
    "exponential race",
    "exponential race, clamped",
    "Gumbel noise",
    "temperature on the noise",
    "`Categorical`",
    "log-softmax",
    "last position",
    "casts",
    "softcap",
    "scale",
    "slice of the vocabulary",
    "bias",
    "mask",
    "greedy and drawn rows mixed",
    "layouts of the head",
    "stacked codebooks",
    "several samples",
    "top-k by threshold",
    "top-k by gather",
    "top-p",
    "min-p",
    "probabilities or logits returned too",
    "token and log-probability",
)
"""Names of the idioms; the first is number 1."""


def table() -> str:
    """The table in Markdown.

    Raises:
        ValueError: a case has no golden text or no known idiom, or an idiom has no case.
    """
    fused: dict[int, Counter] = {number: Counter() for number in range(1, len(IDIOMS) + 1)}
    missed: dict[int, Counter] = {number: Counter() for number in fused}
    ops = golden_ops()
    for case in CASES.values():
        if case.name not in ops or case.idiom not in fused:
            raise ValueError(f"case {case.name!r} needs a golden text, and an idiom from 1 to {len(IDIOMS)}")
        fused[case.idiom][ops[case.name]] += 1
    for case in MISSES.values():
        if case.idiom is None:
            continue  # a near miss of something else
        if case.idiom not in fused:
            raise ValueError(f"case {case.name!r} needs an idiom from 1 to {len(IDIOMS)}, or None")
        missed[case.idiom][" ".join(f"`{code}`" for code in sorted(set(case.codes)))] += 1
    lines = ["| | idiom | spellings tested | fused into | not fused |", "| --- | --- | --- | --- | --- |"]
    for number, name in enumerate(IDIOMS, 1):
        spellings = fused[number].total() + missed[number].total()
        if not spellings:
            raise ValueError(f"idiom {number} ({name}) has no case")
        lines.append(f"| {number} | {name} | {spellings} | {_counts(fused[number])} | {_counts(missed[number])} |")
    return "\n".join(lines) + "\n"


def golden_ops() -> dict[str, str]:
    """The ops in each case's golden text, read from the tests' sources."""
    found = {}
    for file in GOLDENS:
        for node in ast.walk(ast.parse((HERE / file).read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "golden":
                case, text = node.args
                ops = re.findall(r"^(\w+)\(", text.value, re.MULTILINE)
                found[case.slice.value] = " ".join(f"`{op}`" for op in dict.fromkeys(ops))
    return found


def written(readme: str) -> str:
    """``readme`` with the table between its marks as it should be."""
    before, _, rest = readme.partition(BEGIN)
    after = rest.partition(END)[2]
    if END not in rest:
        raise ValueError(f"the text has no table between {BEGIN.strip()!r} and {END.strip()!r}")
    return before + BEGIN + table() + END + after


def _counts(outcomes: Counter) -> str:
    """Each outcome, the most frequent first, with its count where there are several."""
    ordered = sorted(outcomes.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{outcome} ({count})" if len(ordered) > 1 else outcome for outcome, count in ordered)


if __name__ == "__main__":
    README.write_text(written(README.read_text()))
