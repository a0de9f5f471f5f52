"""What must not be fused is not: a stable code, a reason that names the culprit, a hint, the user's line, one graph."""

from __future__ import annotations

import pytest
import torch
from idiom_cases import W, h
from idiom_cases_misses import MISSES
from support import BATCH, EVERY_SIZE, FEATURES, VOCAB, assert_fused, run_pass
from torch._inductor import config as inductor_config
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import fs_inductor
from fs_inductor import graph_pass
from fs_inductor.options import Options
from fs_inductor.recognise.miss import CODES
from fs_inductor.report import Report


def check_records(report, codes, culprit, function):
    assert [m.code for m in report.missed] == codes, str(report)
    assert culprit in report.missed[0].reason, report.missed[0].reason
    for record in report.missed:
        assert len(record.reason.split()) >= 4
        assert len(record.hint.split()) >= 4
        assert record.sink in ("aten.multinomial", "aten.argmax", "aten.max.dim")
        line = record.location.removeprefix(f"{function.__code__.co_filename}:")
        assert line != record.location, f"not in the function's file: {record.location}"
        number, _, rest = line.partition(" ")
        first = function.__code__.co_firstlineno
        assert first < int(number) <= max(n for _, _, n in function.__code__.co_lines() if n), record.location
        assert rest.startswith(f"({function.__name__}) ")
        assert any(word in rest for word in ("multinomial(", "argmax(", ".max(", ".sample("))


@pytest.mark.parametrize("name", MISSES)
def test_miss(name):
    case = MISSES[name]
    rewritten = run_pass(case.fn, case.args)
    assert rewritten.report.fused == []
    check_records(rewritten.report, case.codes, case.culprit, case.fn)
    assert rewritten.after == rewritten.before


@pytest.mark.parametrize("name", ["uneven_gumbel", "noise_used_twice", "top_k_gather", "min_p", "logits_returned"])
def test_miss_with_dynamic_shapes(name):
    case = MISSES[name]
    rewritten = run_pass(case.fn, case.args, dynamic="batch")
    check_records(rewritten.report, case.codes, case.culprit, case.fn)
    assert rewritten.after == rewritten.before


# What transformers' own warpers are: each is a filter, and the reason names all that stand in a row.
WARPERS = {
    "TopK": ("TOP_K", [("TopKLogitsWarper", 5)]),
    "TopP": ("TOP_P", [("TopPLogitsWarper", 0.9)]),
    "MinP": ("MIN_P", [("MinPLogitsWarper", 0.1)]),
    "Typical": ("TOP_P", [("TypicalLogitsWarper", 0.9)]),
    "Epsilon": ("MIN_P", [("EpsilonLogitsWarper", 1e-3)]),
    "Eta": ("MIN_P", [("EtaLogitsWarper", 1e-3)]),
    "all": ("TOP_P", [("TopKLogitsWarper", 50), ("TopPLogitsWarper", 0.9), ("MinPLogitsWarper", 0.1)]),
}


@pytest.mark.parametrize("name", WARPERS)
def test_warpers_of_transformers(name):
    from transformers.generation import logits_process

    code, warpers = WARPERS[name]
    warpers = [getattr(logits_process, kind)(number) for kind, number in warpers]

    def step(h, W):
        logits = F.linear(h, W) / 0.7
        for warper in warpers:
            logits = warper(None, logits)
        return logits.softmax(-1).multinomial(1)

    rewritten = run_pass(step, [h, W])
    assert rewritten.report.fused == []
    *inner, miss = rewritten.report.missed
    assert (miss.sink, miss.code) == ("aten.multinomial", code)
    # MinP keeps the likeliest token by a topk(1) of its own.
    assert [other.sink for other in inner] == ["aten.topk"] * (name in ("MinP", "all"))
    assert rewritten.after == rewritten.before
    if name == "all":
        assert all(word in miss.reason for word in ("top-p", "top-k", "min-p"))


def draw(h, W):
    return F.linear(h, W).softmax(-1).multinomial(1)


def greedy(h, W):
    return F.linear(h, W).argmax(-1)


def penalised(h, W, ids):
    logits = F.linear(h, W)
    seen = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return torch.where(seen, torch.where(logits > 0, logits / 1.2, logits * 1.2), logits).softmax(-1).multinomial(1)


# For each miss: words of its hint, and a function that does as they say.
ADVICE = {
    "inverse_cdf": ("torch.multinomial(probs, 1), which is fused", draw),
    "some_logits_raised": (
        "torch.zeros(V).index_fill(0, ids, 2.0), which is fused",
        lambda h, W, ids: (F.linear(h, W) + torch.zeros(VOCAB).index_fill(0, ids, 2.0)).softmax(-1).multinomial(1),
    ),
    "some_logits_penalised": ("torch.where and a [V] or [B, V] mask", penalised),
    "argmax_over_positions": ("dim=-1", greedy),
}


@pytest.mark.parametrize("name", ADVICE)
def test_advice_leads_to_a_fusion(name):
    case = MISSES[name]
    words, advised = ADVICE[name]
    assert words in run_pass(case.fn, case.args, execute=False).report.missed[0].hint
    assert_fused(run_pass(advised, case.args, execute=False), 1)


def test_guidance_of_log_probabilities_is_led_to_mixed_hidden_states():
    case = MISSES["guidance_of_log_probabilities"]
    assert "leave out the log_softmax" in run_pass(case.fn, case.args).report.missed[0].hint

    def logits_mixed(h, W):
        wanted, unwanted = F.linear(h, W).chunk(2)
        return (unwanted + 1.5 * (wanted - unwanted)).argmax(-1)

    # The draw is the same, and the next hint the one for guidance.
    assert torch.equal(logits_mixed(h, W), case.fn(h, W))
    assert "mix hidden states" in run_pass(logits_mixed, [h, W]).report.missed[0].hint


def test_small_vocabulary():
    rewritten = run_pass(draw, [h, W], options=Options())
    check_records(rewritten.report, ["SMALL_VOCAB"], "160", draw)
    assert "flashsampling.min_vocab" in rewritten.report.missed[0].hint
    assert rewritten.after == rewritten.before
    assert_fused(run_pass(draw, [h, W], options=Options(min_vocab=VOCAB)), 1)
    rewritten = run_pass(draw, [h, W], options=Options(min_vocab=VOCAB + 1))
    check_records(rewritten.report, ["SMALL_VOCAB"], "161", draw)


def test_few_rows_taken_for_a_vocabulary():
    def down(h, W):
        return F.linear(h, W).argmax(0)

    rewritten = run_pass(down, [h, W], options=Options(min_vocab=VOCAB))
    check_records(
        rewritten.report, ["SMALL_VOCAB"], f"sampled dimension, 0, taken for the vocabulary, has {BATCH}", down
    )
    assert f"dim=-1, whose {VOCAB} entries" in rewritten.report.missed[0].hint


@pytest.mark.parametrize("also", [True, False], ids=["returned too", "kept only"])
def test_what_autograd_keeps_is_named_where_nothing_else_escapes(also):
    def step(h, W):
        logits = F.linear(h, W).log_softmax(-1)
        token = logits.exp().multinomial(1)
        return token, logits if also else logits.gather(-1, token)

    report = fs_inductor.explain(step, options={"flashsampling.min_vocab": 0})(h.clone().requires_grad_(), W)
    (missed,) = report.missed
    assert missed.code == "PROBS_ESCAPE"
    assert missed.reason == f"the logits are also {'returned' if also else 'kept for the backward pass'}"


def test_fallback_random_keeps_eagers_numbers_and_fuses_argmax():
    def both(h, W, W2):
        return greedy(h, W), draw(h, W2)

    with inductor_config.patch(fallback_random=True):
        rewritten = run_pass(draw, [h, W])
        check_records(rewritten.report, ["FALLBACK_RANDOM"], "fallback_random", draw)
        assert rewritten.after == rewritten.before
        rewritten = run_pass(both, [h, W, W.flip(0)])
    assert [r.op for r in rewritten.report.fused] == ["flashsampling.argmax"]
    assert [m.code for m in rewritten.report.missed] == ["FALLBACK_RANDOM"]
    assert "inductor_seed" not in rewritten.after


def guided(c, u):
    return u + 3 * (c - u)


def softcap(logits):
    return 30 * torch.tanh(logits / 30)


def untouched(logits):
    return logits


# The linear's bias or None, what the logits go through first, the mix, and what the hint must say of it.
MIXES = {
    "guidance": (None, untouched, guided, "a weighted sum of rows"),
    "guidance of scaled logits": (None, lambda logits: logits.float() * 20 / 30, guided, "a weighted sum of rows"),
    "sum": (None, untouched, torch.add, "a weighted sum of rows"),
    "guidance with a bias": (W[:, 0], untouched, guided, "a mix of rows whose weights add up to one"),
    "guidance of softcapped logits": (None, softcap, guided, "aten.tanh.default is not linear"),
    "guidance of masked logits": (None, lambda logits: logits.masked_fill(W[:, 0] > 0, -1e4), guided, "aten.where"),
    "softcapped rows": (None, untouched, lambda c, u: guided(softcap(c), softcap(u)), "aten.tanh.default"),
    "product of rows": (None, untouched, torch.mul, "aten.mul.Tensor is not linear"),
}


@pytest.mark.parametrize("name", MIXES)
def test_hidden_states_are_to_be_mixed_only_where_that_gives_the_same_logits(name):
    bias, process, mix, words = MIXES[name]

    def logits_mixed(h, W):
        return mix(*process(F.linear(h, W, bias)).chunk(2)).argmax(-1)

    def hidden_mixed(h, W):
        return process(F.linear(mix(*h.chunk(2)), W, bias)).argmax(-1)

    (miss,) = run_pass(logits_mixed, [h, W]).report.missed
    assert miss.code == "LAYOUT" and words in miss.hint
    if "is not linear" not in miss.hint:
        rewritten = run_pass(hidden_mixed, [h, W])
        assert_fused(rewritten, 1)
        assert torch.equal(rewritten.result, logits_mixed(h, W))


def test_device_without_a_kernel():
    # There is no such device here, but a graph over fake tensors can be made for one.
    with FakeTensorMode():
        check_device("xpu")


def test_meta_tensors():
    """Inductor's pattern matcher passes over them, so that the sink has to be found without it."""
    check_device("meta")


def check_device(device):
    hidden, weight = torch.empty(BATCH, FEATURES, device=device), torch.empty(FEATURES, VOCAB, device=device)
    graph = make_fx(lambda h, W: torch.mm(h, W).argmax(-1))(hidden, weight).graph
    before = str(graph)
    report = Report()
    graph_pass.FlashSamplingPass(EVERY_SIZE, report)(graph)
    assert [m.code for m in report.missed] == ["DEVICE"]
    assert f"{device!r}" in report.missed[0].reason
    assert str(graph) == before


def test_a_failure_of_the_pass_is_a_miss(monkeypatch):
    def recognise(sink):
        raise KeyError("surprise")

    monkeypatch.setattr(graph_pass, "recognise", recognise)
    rewritten = run_pass(greedy, [h, W])
    check_records(rewritten.report, ["INTERNAL"], "KeyError: 'surprise'", greedy)
    assert rewritten.after == rewritten.before
    assert torch.equal(rewritten.result, greedy(h, W))


@pytest.fixture
def two_ranks():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def test_collective_that_does_not_join_a_vocabulary(two_ranks):
    from torch.distributed import _functional_collectives as collectives

    def summed(h, W):
        return collectives.all_reduce(F.linear(h, W), "sum", two_ranks).argmax(-1)

    def gathered_rows(h, W):
        return collectives.all_gather_tensor(F.linear(h, W), 0, two_ranks).argmax(-1)

    for fn in (summed, gathered_rows):
        rewritten = run_pass(fn, [h, W])
        check_records(rewritten.report, ["TP_LAYOUT"], "_c10d_functional", fn)
        assert rewritten.after == rewritten.before


def test_guidance_behind_a_gather_is_told_of_hidden_states(two_ranks):
    from torch.distributed import _functional_collectives as collectives

    def step(h, W):
        return guided(*collectives.all_gather_tensor(F.linear(h, W), 1, two_ranks).chunk(2)).argmax(-1)

    (miss,) = run_pass(step, [h, W], execute=False).report.missed
    assert miss.code == "LAYOUT" and "mix hidden states, not logits" in miss.hint, miss


def test_every_code_is_tested():
    tested = {code for case in MISSES.values() for code in case.codes}
    tested |= {"SMALL_VOCAB", "NO_GAIN", "FALLBACK_RANDOM", "DEVICE", "INTERNAL", "TP_LAYOUT"}
    assert tested == set(CODES)


def test_features_that_may_be_none():
    rewritten = run_pass(lambda h, W, n: F.linear(h[:, :n], W[:, :n]).argmax(-1), [h, W, 7], dynamic="all")
    assert [m.code for m in rewritten.report.missed] == ["NO_LINEAR"]
    assert "may be none" in rewritten.report.missed[0].reason
    assert_fused(run_pass(greedy, [h, W], dynamic="all"), 1)


def test_topk_of_several_is_no_sink():
    rewritten = run_pass(lambda h, W: torch.topk(F.linear(h, W), 5).indices, [h, W])
    assert rewritten.report.missed == rewritten.report.fused == []


def test_unfused_results_are_inductors():
    """One real compilation with several misses beside each other: token for token what Inductor gives."""

    names = ("top_k_gather", "uneven_gumbel", "without_replacement", "logits_returned")
    fns = [MISSES[name].fn for name in names]

    def step(h, W):
        return [fn(h * (i + 1), W) for i, fn in enumerate(fns)]

    results = []
    for backend, options in (("inductor", None), ("flashsampling", {"flashsampling.min_vocab": 0})):
        torch._dynamo.reset()
        with torch.no_grad():
            compiled = torch.compile(step, backend=backend, options=options)
            torch.manual_seed(5)
            results.append([compiled(h, W), compiled(h, W)])
    for ours, inductors in zip(*map(torch.utils._pytree.tree_leaves, results), strict=True):
        assert torch.equal(ours, inductors)
