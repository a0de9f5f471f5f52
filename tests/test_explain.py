"""`explain`: what it says, as text for people and as records for programs."""

from __future__ import annotations

import functools
import re

import expecttest
import idiom_cases_logits  # noqa: F401 - adds its cases
import pytest
import torch
from idiom_cases import CASES, W, h
from support import run_pass
from torch._dynamo.utils import counters
from torch.nn import functional as F

import fs_inductor
from fs_inductor.report import Fused, Missed, NotFusedError, Report
from fs_inductor.traffic import BATCH, FEATURES, ROWS, VOCAB

FUSE = {"flashsampling.min_vocab": 0}


def step(h, W):
    return (F.linear(h, W) / 0.7).softmax(-1).multinomial(1)


def step_and_escape(h, W):
    token = step(h, W)
    logits = F.linear(h * 2, W)
    return token, logits.argmax(-1), logits


def no_sink(h, W):
    return F.linear(h, W)


def by_hand(h, W):
    token = fs_inductor.linear_sample(h, W, temperature=0.7)
    return token, fs_inductor.linear_argmax(h, W)


def generator_in_the_way(h, W, generator):
    return torch.multinomial(F.linear(h, W).softmax(-1), 1, generator=generator)


def item_in_the_way(h, W, temperature):
    return (F.linear(h, W) / temperature.item()).softmax(-1).multinomial(1)


def branch_in_the_way(h, W, temperature):
    logits = F.linear(h, W)
    if temperature > 0:
        return (logits / temperature).softmax(-1).multinomial(1)
    return logits.argmax(-1, keepdim=True)


def explain(fn, *args, options=None, dynamic=None):
    with torch.no_grad():
        return fs_inductor.explain(fn, options=FUSE if options is None else options, dynamic=dynamic)(*args)


def printed(report) -> str:
    """The printed report without what depends on where this file lies."""
    return re.sub(r"at \S*/(test_explain\.py):\d+ ", r"at \1:LINE ", str(report))


def saves(saved, unfused) -> str:
    return str(Fused("s", "l", "o", "", saved, unfused)).splitlines()[0].removeprefix("fused   s -> o  saves ")


class Printed(expecttest.TestCase):
    def test_fused_and_missed(self):
        self.assertExpectedInline(
            printed(explain(step_and_escape, h, W)),
            """\
flashsampling: 1 fused, 1 missed
fused   aten.multinomial -> flashsampling.sample  saves 18 KB of 28 KB a call
        at test_explain.py:LINE (step) return (F.linear(h, W) / 0.7).softmax(-1).multinomial(1)
        epilogue: x0 = div(acc, 0.7)
missed  aten.argmax [PROBS_ESCAPE]
        at test_explain.py:LINE (step_and_escape) return token, logits.argmax(-1), logits
        why: the logits are also returned
        what to do: return only the tokens under torch.no_grad(), or compute the other result in a separate call""",
        )

    def test_nothing_to_fuse(self):
        self.assertExpectedInline(
            printed(explain(no_sink, h, W)),
            """\
flashsampling: 0 fused, 0 missed
no multinomial, argmax, max(dim).indices or topk(1).indices is in the compiled code: compile a function that includes the LM head and the sampling, not the model's forward alone, and write the draw as one of these""",  # noqa: E501
        )

    def test_too_small_by_default(self):
        self.assertExpectedInline(
            printed(explain(step, h, W, options={})),
            """\
flashsampling: 0 fused, 1 missed
missed  aten.multinomial [SMALL_VOCAB]
        at test_explain.py:LINE (step) return (F.linear(h, W) / 0.7).softmax(-1).multinomial(1)
        why: the vocabulary has 160 entries, fewer than 50000: a fused kernel would not pay
        what to do: set options={'flashsampling.min_vocab': 160} to fuse it all the same (with mode=, FLASHSAMPLING_MIN_VOCAB=160)""",  # noqa: E501
        )

    def test_nothing_compiled(self):
        self.assertExpectedInline(
            str(Report()),
            """\
flashsampling: 0 fused, 0 missed
nothing was compiled: pass the uncompiled function that runs the LM head and the sampling""",
        )

    def test_large_amounts(self):
        amounts = [(10, 90), (9_999, 10_000), (123_456, 10**7 - 1), (5 * 10**7, 3 * 10**10)]
        self.assertExpectedInline(
            "\n".join(saves(*each) for each in amounts),
            """\
10 bytes of 90 bytes a call
9,999 bytes of 10 KB a call
123 KB of 10,000 KB a call
50 MB of 30.0 GB a call""",
        )

    def test_amounts_where_sizes_are_dynamic(self):
        B, V, R, D = BATCH, VOCAB, ROWS, FEATURES
        amounts = [7000 * 160 * B, 28 * B * V, 22 * B * V + 2 * B, 100_000 * R + 3_000_000 * B, 4 * R * V - 2 * B * D]
        self.assertExpectedInline(
            "\n".join(saves(each, 5 * V + each) for each in amounts),
            """\
1,120 KB a row
28 bytes x V a row (V: vocabulary)
2 bytes + 22 bytes x V a row (V: vocabulary)
3,000 KB x B + 100 KB x R a call (B: rows sampled, R: rows of the unfused product)
2 bytes x B x D + 4 bytes x R x V a call (B: rows sampled, D: hidden size, R: rows of the unfused product, V: vocabulary)""",  # noqa: E501
        )

    def test_called_by_hand(self):
        self.assertExpectedInline(
            printed(explain(by_hand, h, W)),
            """\
flashsampling: 0 fused, 0 missed, 2 called by hand
called  flashsampling.sample
        at test_explain.py:LINE (by_hand) token = fs_inductor.linear_sample(h, W, temperature=0.7)
called  flashsampling.argmax
        at test_explain.py:LINE (by_hand) return token, fs_inductor.linear_argmax(h, W)""",
        )


def test_records():
    report = explain(step_and_escape, h, W)
    assert isinstance(report, Report)
    assert len(report.fused) == len(report.missed) == 1
    (fused,), (missed,) = report.fused, report.missed
    assert isinstance(fused, Fused) and isinstance(missed, Missed)
    assert (fused.sink, fused.op, fused.epilogue) == ("aten.multinomial", "flashsampling.sample", "x0 = div(acc, 0.7)")
    line = step.__code__.co_firstlineno + 1
    assert fused.location == f"{__file__}:{line} (step) return (F.linear(h, W) / 0.7).softmax(-1).multinomial(1)"
    # Float32 logits are written once and read twice, probabilities written and read, a race written and read.
    assert fused.bytes_saved == 7 * 4 * h.shape[0] * W.shape[0]
    assert (missed.sink, missed.code) == ("aten.argmax", "PROBS_ESCAPE")
    line = step_and_escape.__code__.co_firstlineno + 3
    assert missed.location.startswith(f"{__file__}:{line} (step_and_escape) ")
    assert report.graph_breaks == []
    assert report.graphs == 1


def test_calls_by_hand_beside_a_sink():
    report = run_pass(lambda h, W: (step(h, W), fs_inductor.linear_argmax(h, W)), [h, W]).report
    assert [record.op for record in report.fused] == ["flashsampling.sample"]
    assert [record.op for record in report.called] == ["flashsampling.argmax"]
    assert str(report).startswith("flashsampling: 1 fused, 0 missed, 1 called by hand\n")


def test_traffic_by_kind():
    """Greedy moves the least, a race spelled with noise less than multinomial, bfloat16 logits less than float32."""
    names = ("argmax", "race_like_logits", "plain", "float_copy")
    saved = {n: run_pass(CASES[n].fn, CASES[n].args).report.fused[0].bytes_saved for n in names}
    assert saved["argmax"] < saved["race_like_logits"] < saved["plain"]
    assert saved["float_copy"] < saved["plain"]


def test_dynamic_batch_gives_an_expression():
    saved = explain(step, h, W, dynamic=True).fused[0].bytes_saved
    assert saved == 7 * 4 * BATCH * VOCAB


@pytest.mark.parametrize(
    ("fn", "extra", "words"),
    [
        (generator_in_the_way, torch.Generator(), "enerator"),
        (item_in_the_way, torch.tensor(0.7), "Tensor.item()"),
        (branch_in_the_way, torch.tensor(0.7), "a Python branch on the value of a tensor"),
    ],
    ids=["generator", "item", "branch"],
)
def test_graph_breaks_are_said_in_words(fn, extra, words):
    report = explain(fn, h, W, extra)
    assert any(words in text for text in report.graph_breaks), report
    text = str(report)
    assert "break   " in text
    assert ". What to do: " in text
    assert all(reason in text for reason in report.graph_breaks)
    assert report.fused == []


def test_a_break_says_where():
    report = explain(branch_in_the_way, h, W, torch.tensor(0.7))
    line = branch_in_the_way.__code__.co_firstlineno + 2
    assert report.graph_breaks[0].startswith(f"{__file__}:{line} (branch_in_the_way): ")
    # What stands after the break is a sink without its linear.
    assert [m.code for m in report.missed] == ["NO_LINEAR"]
    assert "(branch_in_the_way)" in report.missed[0].location


def test_compiled_functions_are_explained():
    class Module(torch.nn.Module):
        def forward(self, h, W):
            return step(h, W)

    in_place = Module()
    in_place.compile()
    strict = {"flashsampling.strict": True}
    for fn in (
        torch.compile(step),
        torch.compile(step, backend="flashsampling", options=strict),
        torch.compile(Module()),
        Module(),
        in_place,
    ):
        report = explain(fn, h, W)
        assert len(report.fused) == 1, (fn, str(report))


def compiled_step(kind, compile):
    """Greedy, compiled by ``compile`` as a ``kind`` of callable."""

    class Step(torch.nn.Module):
        def forward(self, x):
            return F.linear(x, W).argmax(-1)

    if kind == "module, in place":
        module = Step()
        module.compile(**compile.keywords)
        return module
    if kind == "module, its forward":
        module = Step()
        module.forward = compile(module.forward)
        return module
    if kind.endswith("decorated"):
        Step.forward = compile(Step.forward)
        return Step().forward if kind == "method, decorated" else Step()
    made = {"function": lambda x: F.linear(x, W).argmax(-1), "module": Step(), "method": Step().forward}[kind]
    return compile(made)


@pytest.mark.parametrize(
    "kind",
    [
        "function",
        "module",
        "method",
        "module, in place",
        "module, its forward",
        "module, decorated",
        "method, decorated",
    ],
)
def test_a_compiled_functions_own_options_count(kind):
    with torch.no_grad():
        for smallest, fused in ((0, 1), (1000, 0)):
            options = {"flashsampling.min_vocab": smallest}
            compiled = compiled_step(kind, functools.partial(torch.compile, backend="flashsampling", options=options))
            assert len(fs_inductor.explain(compiled)(h).fused) == fused
        assert len(fs_inductor.explain(compiled, options=FUSE)(h).fused) == 1


def test_strict_is_ignored_and_other_options_count():
    report = explain(step_and_escape, h, W, options={**FUSE, "flashsampling.strict": True})
    assert len(report.missed) == 1
    report = explain(step, h, W, options={"flashsampling.min_vocab": 1000})
    assert [m.code for m in report.missed] == ["SMALL_VOCAB"]


def test_bad_options_are_an_error_at_once():
    with pytest.raises(ValueError, match=r"did you mean 'flashsampling.min_vocab'"):
        fs_inductor.explain(step, options={"flashsampling.min_vocap": 3})
    with pytest.raises(TypeError, match=r"flashsampling.strict must be True or False"):
        fs_inductor.explain(step, options={"flashsampling.strict": 1})


def test_errors_of_the_function_reach_the_caller():
    with pytest.raises(Exception, match=r"must match|incompatible|cannot be multiplied|size"):
        explain(step, h, W[:, :3])


def test_keyword_arguments():
    with torch.no_grad():
        report = fs_inductor.explain(step, options=FUSE)(h, W=W)
    assert len(report.fused) == 1


def test_a_second_report_is_as_complete_as_the_first():
    """Dynamo's counters know the break already, and its caches the graphs."""
    first, second = (explain(branch_in_the_way, h, W, torch.tensor(0.7)) for _ in range(2))
    assert str(first) == str(second)
    assert first.missed and first.graph_breaks


def test_error_of_strict_prints_the_report():
    report = explain(step_and_escape, h, W)
    error = NotFusedError(report)
    assert error.report is report
    assert str(error).startswith(str(report))


def test_counters_survive():
    """`explain` looks at Dynamo's counters and leaves them to their owner."""
    counters["graph_break"]["somebody else's"] = 3
    explain(no_sink, h, W)
    assert counters["graph_break"]["somebody else's"] == 3
    del counters["graph_break"]["somebody else's"]


def test_what_is_no_function_is_said_at_once():
    with pytest.raises(TypeError, match=r"explain takes the function or module that torch.compile would, not int"):
        explain(3)
