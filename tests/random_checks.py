"""What must hold of a random step after the pass, and a tally of what occurred."""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from dataclasses import dataclass, field
from unittest import mock

import support
import torch
from distribution_checks import chi_squared
from random_pieces import ROWS
from random_steps import Output, Step
from support import OPS, OpCall, Rewritten, fresh, run_pass

from fs_inductor.kernels.epilogue import Program

COPIES = 400
"""How often the rows of a step are repeated: the draws of each distribution in one call."""
FLOAT_ERROR = 1e-5
"""Of a logit, by the largest of its row: some float32 roundings, which logits processing may amplify a little."""
SINK_OPS = ("multinomial", "argmax", "max.dim", "topk")
SINKS = re.compile(r"torch\.ops\.aten\.(multinomial|argmax|max\.dim|topk)\b")


@dataclass
class Tally:
    """What occurred in a run: counters by name, and one number for each test of a distribution."""

    steps: int = 0
    fused: int = 0
    counts: dict[str, Counter] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    fits: list[float] = field(default_factory=list)
    independences: list[float] = field(default_factory=list)
    worst: float = 0.0

    def count(self, what: str, *names: object, by: int = 1) -> None:
        for name in names:
            self.counts.setdefault(what, Counter())[name] += by

    def __str__(self) -> str:
        lines = [f"random steps: {self.steps}, all sinks fused in {self.fused} ({self.fused / self.steps:.1%})"]
        for what, counter in self.counts.items():
            ordered = sorted(counter.items(), key=lambda item: (isinstance(item[0], str), item[0]))
            lines.append(f"{what}: " + ", ".join(f"{name} {n}" for name, n in ordered))
        for name, values in (("fit", self.fits), ("independence", self.independences)):
            tenths = Counter(min(int(10 * p), 9) for p in values)
            lines.append(
                f"p-values of {name}: {len(values)}, smallest {min(values, default=1):.2g}, "
                f"by tenths {[tenths[i] for i in range(10)]}"
            )
        lines.append(f"largest error of a logit: {self.worst:.2f} of its bound")
        return "\n".join(lines + self.unexpected)


def check_step(step: Step, tally: Tally, alpha: float) -> None:
    """Runs the pass on the step and checks everything; ``alpha`` is the level of one test of a distribution."""
    arguments = step.arguments(COPIES)
    seed_draws(step)
    with mock.patch.object(support, "BATCH", COPIES * ROWS):  # the size that run_pass takes to be the batch
        rewritten = run_pass(step.function(), arguments, dynamic="batch" if step.dynamic else None)
    report = rewritten.report
    check_report(step, rewritten)
    tally.steps += 1
    tally.count("dtypes", step.dtype)
    tally.count("codes", *(miss.code for miss in report.missed))
    all_fused = not report.missed
    tally.fused += all_fused
    if step.fuses and not all_fused:
        tally.count("missed unexpectedly", *{miss.code for miss in report.missed})
        tally.unexpected += [f"{step!r}\n{miss}" for miss in report.missed]
    tally.count("idioms fused" if all_fused else "idioms missed", *step.idioms)
    tally.count("pieces fused" if all_fused else "pieces missed", *step.pieces)
    for record in report.fused:
        tally.count("sinks", record.sink)
        tally.count("kernel ops", record.op)
        tally.count("epilogue ops", *(one.op for one in Program.parse(record.epilogue).instructions))
    with torch.no_grad():
        eager = step.function()(*fresh(arguments))
    check_look(rewritten.result, eager)
    if report.fused:
        check_tokens(step, arguments, step.arguments(1), (rewritten.result, eager), rewritten.calls, tally, alpha)


def seed_draws(step: Step) -> None:
    """A seed for each step, so that a step's draws do not depend on the steps before it."""
    torch.manual_seed(zlib.crc32(repr(step).encode()))


def check_report(step: Step, rewritten: Rewritten) -> None:
    """Every sink is either fused or untouched, and says so."""
    report = rewritten.report
    assert len(report.fused) + len(report.missed) == step.sinks, report
    assert all(miss.code != "INTERNAL" for miss in report.missed), report
    were, left = (Counter(SINKS.findall(text)) for text in (rewritten.before, rewritten.after))
    for sink in SINK_OPS:
        fused, missed = ([one.sink for one in part].count(f"aten.{sink}") for part in (report.fused, report.missed))
        # A max or a topk for its values is no sink, and goes with what it was for.
        assert left[sink] == missed if sink in ("multinomial", "argmax") else left[sink] >= missed, report
        assert were[sink] == fused + missed if sink in ("multinomial", "argmax") else were[sink] >= fused + missed
    if not report.fused:
        assert rewritten.after == rewritten.before
    if not report.missed:
        assert rewritten.left_over() == []
    if step.fuses is False:
        assert not report.fused, report


def check_look(result: object, eager: object) -> None:
    """Shapes and dtypes are eager's."""
    result, eager = ([x] if isinstance(x, torch.Tensor) else list(x) for x in (result, eager))
    assert [(x.shape, x.dtype) for x in result] == [(x.shape, x.dtype) for x in eager]


def check_tokens(
    step: Step,
    arguments: list,
    rows: list,
    results: tuple[object, object],
    calls: list[OpCall],
    tally: Tally,
    alpha: float,
) -> None:
    """Greedy tokens are eager's, and draws come from the target distributions, independently of each other.

    rows: the arguments with each row once. results: the rewritten step's and eager's. calls: of our ops, if known.
    """
    values = dict(zip(step.parameters, arguments, strict=True))
    targets = step.targets(rows)
    result, eager = ([x] if isinstance(x, torch.Tensor) else x for x in results)
    drawn: list[tuple[torch.Tensor, torch.Tensor]] = []
    for output, tokens, want, (score, greedy) in zip(step.outputs, result, eager, targets, strict=True):
        assert not score.isnan().any() and not (score == math.inf).any(), "the grammar made no distribution"
        ids, want = by_row(output, tokens, values), by_row(output, want, values)
        vocab = score.shape[-1]
        assert ((ids >= 0) & (ids < vocab)).all(), f"token ids from {ids.min()} to {ids.max()}"
        check_greedy(step, score[greedy], ids[greedy], want[greedy], tally)
        ids, p = ids[~greedy], score[~greedy].softmax(-1)
        assert (p.gather(1, ids.flatten(1)) > 0).all(), "a token of probability zero was drawn"
        if not output.tiled:
            ids = more_draws(calls, len(step.outputs), p)
        if ids is not None and len(p):
            check_fit(ids, p, tally, alpha)
            if output.tiled:
                drawn.append((ids, p))
    check_independence(drawn, tally, alpha)
    if len(calls) == 1 and len(step.outputs) == 1 and calls[0].op != "argmax":
        score, greedy = targets[0]
        check_logits(calls[0], score, ~greedy, step, tally)


def by_row(output: Output, tokens: torch.Tensor, values: dict) -> torch.Tensor:
    """Token ids as [different rows, repetitions, draws]."""
    ids = tokens.long() - output.offset
    if output.table is not None:
        ids = values[output.table].argsort()[ids]
    return ids.reshape(-1, output.rows, max(output.draws, 1)).transpose(0, 1)


def check_greedy(step: Step, score: torch.Tensor, ids: torch.Tensor, want: torch.Tensor, tally: Tally) -> None:
    """Equal to eager's tokens, but for ties and near-ties of the scores, which are counted by rows."""
    ids, want = ids.flatten(1), want.flatten(1)
    ours, eagers = score.gather(1, ids), score.gather(1, want)
    gap = torch.where(ours == eagers, 0.0, (ours - eagers).abs())
    top = score.amax(-1, keepdim=True)
    bound = near_tie(step) * top.abs().clamp(min=1.0)
    differs = ids != want
    assert (gap <= bound)[differs].all(), f"greedy tokens differ, by {gap[differs].unique()}"
    assert (ours >= top - bound).all(), "greedy tokens are not those of the largest score"
    tally.count("greedy rows", "all", by=len(ids))
    tally.count("greedy rows", "equal scores", by=int((differs & (gap == 0)).any(1).sum()))
    tally.count("greedy rows", "near-tie", by=int((differs & (gap > 0)).any(1).sum()))


def near_tie(step: Step) -> float:
    """The relative gap of two scores that rounding may exchange: sixteen units of the coarsest dtype in the step."""
    words = step.source + " ".join(step.parameters.values()) + step.dtype
    coarse = torch.bfloat16 if "bfloat16" in words else torch.float16 if "float16" in words or "half" in words else None
    return 16 * torch.finfo(coarse or torch.float32).eps


def more_draws(calls: list[OpCall], outputs: int, p: torch.Tensor) -> torch.Tensor | None:
    """Draws of a single row by the op, with the arguments that it got: [1, draws, 1], or None if it was not one row."""
    if len(calls) != 1 or calls[0].op != "sample" or outputs != 1 or calls[0].hidden.shape[0] != 1 or len(p) != 1:
        return None
    call = calls[0]
    hidden = call.hidden.expand(2 * COPIES, -1)
    return OPS.sample(hidden, call.weight, call.seed + 1, call.operands, call.program, 1)[None]


def check_fit(ids: torch.Tensor, p: torch.Tensor, tally: Tally, alpha: float) -> None:
    """Chi-squared of the draws [rows, repetitions, draws] against p, float64 [rows, V]."""
    vocab = p.shape[-1]
    fits = [p_value(row.flatten().bincount(minlength=vocab), target) for row, target in zip(ids, p, strict=True)]
    fits = [fit for fit in fits if fit is not None]
    tally.fits += fits
    assert min(fits, default=1.0) > alpha / max(len(fits), 1), f"draws do not fit, p = {min(fits)}"


def p_value(counts: torch.Tensor, p: torch.Tensor) -> float | None:
    """`chi_squared`'s; None where nearly all draws are one token, which leaves too little to test."""
    return None if counts.sum() * (1 - p.max()) < 20 else chi_squared(counts, p)


def check_independence(drawn: list[tuple[torch.Tensor, torch.Tensor]], tally: Tally, alpha: float) -> None:
    """Draws of one row, of neighbouring repetitions of it, and of two sinks are independent."""
    columns = [(ids[:, :, i], p) for ids, p in drawn for i in range(ids.shape[2])]
    pairs = [(columns[i], columns[j]) for i in range(len(columns)) for j in range(i)]
    # No repetition is in two pairs: overlapping pairs would not follow the chi-squared distribution.
    pairs += [((ids[:, 1::2], p), (ids[:, : ids.shape[1] // 2 * 2 : 2], p)) for ids, p in columns]
    for (a, pa), (b, pb) in pairs:
        if len(pa) != len(pb):
            continue
        found = [_independence(*row) for row in zip(a, b, pa, pb, strict=True)]
        found = [p for p in found if p is not None]
        tally.independences += found
        assert min(found, default=1.0) > alpha / max(len(found) * len(pairs), 1), f"draws depend, p = {min(found)}"


def _independence(a: torch.Tensor, b: torch.Tensor, pa: torch.Tensor, pb: torch.Tensor) -> float | None:
    """Pairs of tokens in four bins each, against the product of their distributions."""
    sums = [torch.zeros(4, dtype=torch.float64).index_add_(0, torch.arange(len(p)) % 4, p) for p in (pa, pb)]
    return p_value((a % 4 * 4 + b % 4).bincount(minlength=16), torch.outer(*sums).flatten())


def check_logits(call: OpCall, score: torch.Tensor, drawn: torch.Tensor, step: Step, tally: Tally) -> None:
    """The logits that the op draws from, at the first repetition, are eager's up to a constant per row.

    Where a step rounds to a low precision, a last bit of float32 may tip a rounding: some units of the coarse dtype, in
    few places. (Eager itself rounds the last elements of a tensor, which fill no vector, otherwise than the rest.)
    Otherwise float32's error is all there is.
    """
    ours, score = call.logits()[: len(score)].double()[drawn], score[drawn]
    possible = score > score.amax(-1, keepdim=True) - 1e3
    assert torch.equal(possible, ours > ours.amax(-1, keepdim=True) - 1e3), "logits differ in what is masked"
    error = (ours - score).masked_fill(~possible, torch.nan)
    scale = score.masked_fill(~possible, 0).abs().amax(-1, keepdim=True).clamp(min=1.0)
    error = ((error - error.nanmedian(-1, keepdim=True).values).abs() / scale)[possible]
    bound = max(near_tie(step), FLOAT_ERROR)
    tipped = int((error > FLOAT_ERROR).sum())
    tally.count("logits", "all", by=len(error))
    tally.count("logits", "off by a rounding", by=tipped)
    tally.worst = max(tally.worst, float(error.max()) / bound)
    assert error.max() <= bound, f"logits differ by {error.max()} of the largest"
    assert tipped <= 0.02 * len(error) + 3, f"logits differ in {tipped} of {len(error)}"
