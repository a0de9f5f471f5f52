"""Stacked heads: each has noise of its own, one sink is one line of the report, and positions keep their tokens."""

from __future__ import annotations

import pytest
import torch
from distribution_checks import chi_squared
from idiom_cases import exact
from support import assert_fused, run_pass
from torch.nn import functional as F

ROWS, HEADS, FEATURES, VOCAB = 8_000, 2, 16, 160
ALPHA = 1e-4
_g = torch.Generator().manual_seed(50)
row, W = exact(_g, 1, FEATURES), exact(_g, VOCAB, FEATURES)
hidden = row.expand(ROWS, -1)


def one_linear(h, W):
    p = F.linear(h, torch.cat([W, W])).view(-1, HEADS, VOCAB).softmax(-1)
    return p.view(-1, VOCAB).multinomial(1).view(-1, HEADS)


def two_linears(h, W):
    p = torch.stack([F.linear(h, W), F.linear(h, W.clone())], 1).softmax(-1)
    return (p / torch.empty_like(p).exponential_()).argmax(-1)


def one_after_another(h, W):
    p = F.linear(h, torch.cat([W, W])).view(-1, HEADS, VOCAB).softmax(-1)
    return torch.cat([p[:, k].multinomial(1) for k in range(HEADS)], 1)


def kept_apart_until_the_end(h, W):
    return torch.cat([F.linear(h, W), F.linear(h, W.clone())]).softmax(-1).multinomial(1).view(HEADS, -1).t()


STEPS = [one_linear, two_linears, one_after_another, kept_apart_until_the_end]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_heads_do_not_share_noise(step):
    """Equal heads of equal rows: pairs of their tokens against the product of the distributions."""
    torch.manual_seed(51)
    rewritten = run_pass(step, [hidden, W])
    assert_fused(rewritten, HEADS if step is one_after_another else 1)
    first, second = rewritten.result.unbind(1)
    p = torch.softmax((row.double() @ W.double().T)[0], 0)
    for tokens in (first, second):
        assert chi_squared(tokens.bincount(minlength=VOCAB), p) > ALPHA
    bins = torch.arange(VOCAB) % 8
    q = torch.zeros(8, dtype=torch.float64).index_add_(0, bins, p)
    for a, b in ((first, second), (first[:-1], second[1:]), (first[1:], second[:-1])):
        assert chi_squared((bins[a] * 8 + bins[b]).bincount(minlength=64), torch.outer(q, q).flatten()) > ALPHA


def test_report():
    rewritten = run_pass(one_linear, [hidden[:4], W], dynamic=None)
    (record,) = rewritten.report.fused
    assert record.heads == HEADS
    assert "aten.multinomial -> flashsampling.sample for each of 2 heads  saves" in str(record)
    # Both heads' logits are written and read unfused; fused, each head reads the hidden states once more.
    assert record.bytes_saved == 7 * 4 * 4 * HEADS * VOCAB - 4 * 4 * (HEADS - 1) * FEATURES

    def two_products(h, W):
        return torch.stack([F.linear(h, W), F.linear(h, W + 1)], 1).view(-1, VOCAB).softmax(-1).multinomial(1)

    (record,) = run_pass(two_products, [hidden[:4], W]).report.fused
    assert (record.heads, record.bytes_saved) == (HEADS, 7 * 4 * 4 * HEADS * VOCAB)
    (single,) = run_pass(lambda h, W: F.linear(h, W).softmax(-1).multinomial(1), [hidden[:4], W]).report.fused
    assert single.heads == 1 and "for each of" not in str(single)


def test_compiled():
    """Through code generation: tokens of a strict compilation, greedy ones equal to eager's, in eager's layout."""

    def step(h, W, V):
        logits = F.linear(h, torch.cat([W, V])).view(-1, HEADS, VOCAB) / 0.7
        drawn = logits.view(-1, VOCAB).softmax(-1).multinomial(1)
        return drawn.view(-1, HEADS), torch.stack([F.linear(h, V), F.linear(h, W)], 1).argmax(-1)

    h, V = exact(_g, 4, FEATURES), W.flip(0)
    torch._dynamo.reset()
    options = {"flashsampling.strict": True, "flashsampling.min_vocab": 0}
    with torch.no_grad():
        drawn, greedy = torch.compile(step, backend="flashsampling", options=options, fullgraph=True)(h, W, V)
        eagers = step(h, W, V)
    assert torch.equal(greedy, eagers[1])
    assert [x.stride() for x in (drawn, greedy)] == [x.stride() for x in eagers]
    assert drawn.shape == (4, HEADS) and ((drawn >= 0) & (drawn < VOCAB)).all()


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows):
    for step in STEPS:
        rewritten = run_pass(step, [hidden[:rows], W])
        assert_fused(rewritten, HEADS if step is one_after_another else 1)
        assert rewritten.result.shape == (rows, HEADS)


def test_hidden_states_without_a_batch():
    weight = exact(_g, HEADS * VOCAB, FEATURES)

    def step(h, W):
        return F.linear(h, W).view(HEADS, VOCAB).argmax(-1)

    rewritten = run_pass(step, [row[0], weight])
    assert_fused(rewritten, 1)
    assert torch.equal(rewritten.result, step(row[0], weight))


def test_weight_is_read_once():
    """Each head's call has its own rows of the weight, as a view."""
    weight = exact(_g, HEADS * VOCAB, FEATURES)
    calls = run_pass(lambda h, W: F.linear(h, W).view(-1, HEADS, VOCAB).argmax(-1), [hidden[:4], weight]).calls
    for head, call in enumerate(calls):
        assert torch.equal(call.weight, weight[head * VOCAB : (head + 1) * VOCAB])
    assert calls[0].weight.untyped_storage().data_ptr() == calls[1].weight.untyped_storage().data_ptr()


@pytest.mark.parametrize("chosen", range(3))
def test_one_head_of_several(chosen):
    """Only the head that is sampled is multiplied."""
    heads = [exact(_g, VOCAB, FEATURES) for _ in range(3)]
    h = exact(_g, 4, FEATURES)
    wanted = F.linear(h, heads[chosen]).argmax(-1)

    def of_one(h, W):
        return F.linear(h, W).view(-1, 3, VOCAB)[:, chosen].argmax(-1)

    def of_several(h, *Ws):
        return torch.stack([F.linear(h, W) for W in Ws], 1)[:, chosen].argmax(-1)

    for rewritten in (run_pass(of_one, [h, torch.cat(heads)]), run_pass(of_several, [h, *heads])):
        assert_fused(rewritten, 1)
        assert len(rewritten.calls) == 1
        assert "aten.mm" not in rewritten.after
        assert torch.equal(rewritten.result, wanted)


def test_masks_that_read_another_heads_token():
    """Codebooks that wait for each other cannot come from one set of calls."""

    def step(h, W, table):
        logits = F.linear(h, W).view(-1, HEADS, VOCAB)
        first = logits[:, 0].argmax(-1)
        return first, (logits[:, 1] + table[first]).softmax(-1).multinomial(1)

    arguments = [hidden[:4], torch.cat([W, W]), exact(_g, VOCAB, VOCAB)]
    report = run_pass(step, arguments).report
    assert not report.fused and [miss.code for miss in report.missed] == ["LOGITS_ESCAPE", "NO_LINEAR"]


@pytest.mark.parametrize(
    "finish",
    [
        lambda x: x.argmax(-1),
        lambda x: x.argmax(-1, keepdim=True),
        lambda x: x.reshape(-1, VOCAB).argmax(-1),
        lambda x: x.transpose(0, 1).argmax(-1),
        lambda x: x.permute(1, 0, 2).reshape(-1, VOCAB).argmax(-1),
    ],
    ids=["plain", "keepdim", "flat", "transposed", "head by head"],
)
@pytest.mark.parametrize(("batch", "heads", "length"), [(6, 3, 7), (4, 3, 3), (3, 3, 3)])
def test_heads_written_in_place_keep_their_tokens(finish, batch, heads, length):
    """A view of some positions that is written to and read again: the heads stay where they are."""
    weight = exact(_g, heads * VOCAB, FEATURES)

    def of_last_position(h, W):
        logits = F.linear(h, W).view(length, batch, heads, VOCAB)
        view = logits[-1]
        view *= 2
        return finish(logits[-1])

    def of_last_column(h, W):
        logits = F.linear(h, W).view(batch, length, heads, VOCAB)
        view = logits[:, -1]
        view *= 2
        return finish(logits[:, -1])

    h = exact(_g, length * batch, FEATURES)
    for step in (of_last_position, of_last_column):
        rewritten = run_pass(step, [h, weight])
        assert_fused(rewritten, 1)
        assert torch.equal(rewritten.result, step(h, weight))
