"""Graphs that once were rewritten wrongly: each is right now, or left alone."""

import math

import pytest
import torch
from idiom_cases import exact
from support import assert_fused, run_pass
from torch.nn import functional as F

B, V, D = 4, 160, 16
torch.manual_seed(0)
h, h2, h3 = torch.randn(B, D), torch.randn(B, D), torch.randn(B, 5, D)
W, W2 = torch.randn(V, D), torch.randn(V, D)
TABLE = torch.randn(V, V)


def token_feeds_another_head(h, W, h2, W2):
    token = (h @ W.t()).argmax(-1, keepdim=True)
    logits = (h2 @ W2.t()) * 0 + torch.arange(V)
    return token, torch.where(logits == token, math.inf, logits * 0).argmax(-1, keepdim=True)


def argmax_of_everything(h, W):
    return (h[:1] @ W.t()).argmax()


def operand_of_some_rows(h3, W, t):
    return (F.linear(h3, W) / t).argmax(-1)


def mask_of_some_rows(h3, W, mask):
    return F.linear(h3, W).masked_fill(mask, -math.inf).argmax(-1)


def noisy_hidden(h, W):
    return (F.dropout(h, 0.0) @ W.t()).argmax(-1)


def token_written_through_a_transpose(h, W):
    logits = h @ W.t()
    logits.t()[3] = 100
    return logits.argmax(-1)


def tokens_written_through_a_transpose(h, W, ids):
    logits = h @ W.t()
    logits.t()[ids] = 9
    return logits.argmax(-1)


def slice_written_through_a_transpose(h3, W):
    logits = F.linear(h3, W)
    logits.transpose(1, 2)[:, 3:150] = 0
    return logits[:, 1:].argmax(-1)


def integer_constant(h, W):
    return (h @ W.t() * torch.full((V,), 3.7, dtype=torch.int64)).argmax(-1)


RIGHT = [
    (token_feeds_another_head, (h, W, h2, W2), 2),
    (argmax_of_everything, (h, W), 1),
    (operand_of_some_rows, (h3, W, torch.rand(B, 1, 1) + 0.1), 1),
    (operand_of_some_rows, (h3, W, torch.rand(1, 5, 1) + 0.1), 1),
    (mask_of_some_rows, (h3, W, torch.rand(B, 1, V) > 0.5), 1),
    (noisy_hidden, (h, W), 1),
    (integer_constant, (h, W), 1),
    (token_written_through_a_transpose, (h, W), 1),
    (tokens_written_through_a_transpose, (h, W, torch.tensor([3, 77, 9])), 1),
    (slice_written_through_a_transpose, (h3, W), 1),
]


@pytest.mark.parametrize(
    ("fn", "args", "fused"), RIGHT, ids=[f"{fn.__name__}-{i}" for i, (fn, _, _) in enumerate(RIGHT)]
)
def test_greedy_tokens_are_eagers(fn, args, fused):
    rewritten = run_pass(fn, args)
    assert_fused(rewritten, fused)
    got, want = rewritten.result, fn(*args)
    got = got if isinstance(got, tuple | list) else (got,)
    want = want if isinstance(want, tuple) else (want,)
    assert len(got) == len(want)
    for ours, eager in zip(got, want, strict=True):
        assert ours.shape == eager.shape and ours.dtype == eager.dtype and ours.equal(eager)


# Beside bf16 or fp16 logits eager rounds integers first, but not the numbers of some ops.
MIXED = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: y - x,
    "mul": lambda x, y: x * y,
    "mul_first": lambda x, y: y * x,
    "div": lambda x, y: x / y,
    "div_first": lambda x, y: y / x,
    "maximum": lambda x, y: torch.maximum(400 * x, y),
    "clamp": lambda x, y: torch.clamp(400 * x, max=y),
    "gt": lambda x, y: torch.where(400 * x > y, 1.0, x),
    "le": lambda x, y: torch.where(y <= 400 * x, 1.0, x),
    "constant": lambda x, y: x * torch.full((V,), 773),
}
LONG = torch.arange(773, 773 + V)
NUMBERS = {
    "token": LONG,
    "row": LONG[:B, None],
    "one": LONG[:1],
    "scalar": LONG[0],
    "float": torch.tensor(771.3),
    "wide": LONG * 97,  # infinite in fp16
    "exact": LONG + 2**24,  # not even float32 has all of these
    "small": (LONG - 700).to(torch.uint8),
    "bool": LONG % 2 == 0,
}


def logits_of(op, dtype, number, dynamic=None):
    generator = torch.Generator().manual_seed(3)
    h, W = exact(generator, B, D).to(dtype), exact(generator, V, D).to(dtype)
    rewritten = run_pass(lambda h, W, y: op(h @ W.t(), y).argmax(-1), (h, W, number), dynamic=dynamic)
    assert_fused(rewritten, 1)
    return rewritten.calls[0].logits(), op(h @ W.t(), number).float()


@pytest.mark.parametrize("op", MIXED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_integers_beside_low_precision_logits(op, dtype):
    for name in ("token", "row", "one", "scalar", "float", "wide"):
        ours, eagers = logits_of(MIXED[op], dtype, NUMBERS[name])
        torch.testing.assert_close(ours, eagers, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("name", ["exact", "small", "bool"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_integers_of_other_sizes(name, dtype):
    for op in ("add", "mul", "gt"):
        ours, eagers = logits_of(MIXED[op], dtype, NUMBERS[name])
        torch.testing.assert_close(ours, eagers, rtol=0, atol=0, msg=op)


@pytest.mark.parametrize("number", [773, 771.3])
def test_symbolic_numbers_used_twice(number):
    ours, eagers = logits_of(lambda x, y: (x + y) * y, torch.bfloat16, number, dynamic="all")
    assert ours.equal(eagers)


def probabilities_of_one_row(h, W):
    return ((h[:1] @ W.t()).softmax(-1) / torch.empty(6, V).exponential_(1)).argmax(-1)


def statistic_of_more_rows(h, W):
    logits = h @ W.t()
    return (logits[:1] - logits.amax(-1, keepdim=True)).argmax(-1)


def sum_of_more_rows(h, W):
    weights = (h @ W.t()).exp()
    return torch.multinomial(weights[:1] / weights.sum(-1, keepdim=True), 1)


def factor_of_more_rows(h, W, s):
    return (F.log_softmax(h[:1] @ W.t(), -1) * s).argmax(-1)


def no_matrix_product(x, s):
    return (x * s).sum(1).argmax(0)


@pytest.mark.parametrize(
    ("fn", "args", "code"),
    [
        (probabilities_of_one_row, (h, W), "NOISE"),
        (statistic_of_more_rows, (h, W), "LAYOUT"),
        (sum_of_more_rows, (h, W), "EPILOGUE_OP"),
        (factor_of_more_rows, (h, W, torch.rand(B, 1)), "LAYOUT"),
        (no_matrix_product, (torch.randn(V, D), torch.randn(1)), "NO_LINEAR"),
    ],
)
def test_left_alone(fn, args, code):
    report = run_pass(fn, args).report
    assert not report.fused and [miss.code for miss in report.missed] == [code]


def test_corners_where_eager_raises_or_overflows():
    """README's "Corners": what is not eager's is at least what is written there."""
    greedy = (h @ W.t()).argmax(-1)
    for t in (torch.zeros(B, 1), torch.full((B, 1), math.nan)):
        token = run_pass(lambda h, W, t: (h @ W.t() / t).softmax(-1).multinomial(1), (h, W, t)).result
        logits = h @ W.t() / t
        want = logits.isnan() | (logits == math.inf)  # the first of these
        assert token.equal(want.long().argmax(-1, keepdim=True))

    def overflowing(h, W):
        weights = (40 * (h @ W.t())).exp()
        return (weights / weights.sum(-1, keepdim=True)).argmax(-1), weights.argmax(-1)

    assert overflowing(h, W)[1].ne(greedy).any()
    assert all(token.equal(greedy) for token in run_pass(overflowing, (h, W)).result)


def test_no_samples_are_eagers_error():
    for replacement in (False, True):
        report = run_pass(
            lambda h, W, r=replacement: (h @ W.t()).softmax(-1).multinomial(0, r), (h, W), execute=False
        ).report
        assert not report.fused and [miss.code for miss in report.missed] == ["NUM_SAMPLES"]


def test_heads_that_wait_for_each_other():
    """One call for each head would need the other's token first."""

    def crossed(h, W, h2, W2):
        a, b = h @ W.t(), h2 @ W2.t()
        a1, b1 = a.argmax(-1), b.argmax(-1)
        a2 = torch.multinomial((a + TABLE[b1]).softmax(-1), 1)
        b2 = torch.multinomial((b + TABLE[a1]).softmax(-1), 1)
        return a1, b1, a2, b2

    report = run_pass(crossed, (h, W, h2, W2)).report
    assert len(report.fused) == 2 and {miss.code for miss in report.missed} == {"LOGITS_ESCAPE"}


def test_two_draws_are_tensors_of_their_own():
    def two(h, W):
        p = (h @ W.t()).softmax(-1)
        return torch.multinomial(p, 1), torch.multinomial(p, 3, replacement=True)

    one, three = run_pass(two, (h, W)).result
    assert one.stride() == (1, 1) and three.stride() == (3, 1)
