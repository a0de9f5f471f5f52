"""The right distribution, through the compiled step: chi-squared against a float64 softmax, and independence.

Seeds are fixed, so a result does not change from run to run. ALPHA is the probability with which a correct sampler
would fail one of the tests below had its seed been drawn at random.
"""

from __future__ import annotations

import pytest
import torch
from distribution_checks import chi_squared
from idiom_cases import exact
from torch.nn import functional as F

ALPHA = 1e-4
VOCAB, FEATURES = 5003, 16
MASKED_FROM = 4900

_g = torch.Generator().manual_seed(30)
row, W = exact(_g, 1, FEATURES), exact(_g, VOCAB, FEATURES)
mask = torch.rand(VOCAB, generator=_g) < 0.2
mask[MASKED_FROM:] = True


def softmax_multinomial(h, W, m):
    return (F.linear(h, W) / 0.7).masked_fill(m, -torch.inf).softmax(-1).multinomial(1).squeeze(-1)


def race(h, W, m):
    p = (F.linear(h, W) / 0.7).masked_fill(m, -torch.inf).softmax(-1)
    return p.div_(torch.empty_like(p).exponential_(1)).argmax(dim=-1)


def gumbel(h, W, m):
    logits = F.linear(h, W) / 0.7
    logits[:, m] = -torch.inf
    return (logits - torch.log(-torch.log(torch.rand_like(logits)))).argmax(-1)


def categorical(h, W, m):
    return torch.distributions.Categorical(logits=torch.where(m, -torch.inf, F.linear(h, W) / 0.7)).sample()


def compiled(fn, **options):
    options = {"flashsampling.strict": True, "flashsampling.min_vocab": 0} | {
        f"flashsampling.{k}": v for k, v in options.items()
    }
    torch._dynamo.reset()
    return torch.compile(fn, backend="flashsampling", options=options, fullgraph=True)


def target(temperature: float = 0.7) -> torch.Tensor:
    """The distribution to draw from, float64 [V]."""
    logits = (row.double() @ W.double().T)[0] / temperature
    return logits.masked_fill(mask, -torch.inf).softmax(-1)


@pytest.mark.parametrize("fn", [softmax_multinomial, race, gumbel, categorical], ids=lambda fn: fn.__name__)
def test_chi_squared_and_masks(fn):
    hidden = row.expand(30_000, -1)
    torch.manual_seed(40)
    with torch.no_grad():
        tokens = compiled(fn)(hidden, W, mask)
    assert tokens.max() < MASKED_FROM
    assert not mask[tokens].any()
    counts = tokens.bincount(minlength=VOCAB)
    assert chi_squared(counts, target()) > ALPHA
    # A temperature four hundredths off would not pass.
    assert chi_squared(counts, target(0.74)) < ALPHA


def test_rows_draws_calls_and_sites_are_independent():
    """Pairs of tokens, binned two ways, against the product of their distributions."""

    def step(h, W, V, m):
        logits = F.linear(h, W).masked_fill(m, -torch.inf) / 0.7
        other = F.linear(h, V).masked_fill(m, -torch.inf) / 0.7
        return logits.softmax(-1).multinomial(2, replacement=True), other.softmax(-1).multinomial(1)

    hidden = row.expand(16_000, -1)
    step = compiled(step)
    torch.manual_seed(41)
    with torch.no_grad():
        (first, site), (again, site_again) = step(hidden, W, W.clone(), mask), step(hidden, W, W.clone(), mask)
    pairs = {
        "rows": (first[:-1, 0], first[1:, 0]),
        "rows of a block": (first[:-128, 0], first[128:, 0]),
        "draws": (first[:, 0], first[:, 1]),
        "draw and next row": (first[:-1, 1], first[1:, 0]),
        "calls": (first[:, 0], again[:, 0]),
        "sites": (first[:, 0], site[:, 0]),
        "site and second draw": (first[:, 1], site[:, 0]),
        "site and next call": (site[:, 0], again[:, 0]),
        "a site's calls": (site[:, 0], site_again[:, 0]),
    }
    ids = torch.arange(VOCAB)
    for name, (a, b) in pairs.items():
        # Ids that share a group of the kernel, and ids that share a place in their groups.
        for bins in ((ids // 128) % 8, ids % 8, (ids // 16) % 8):
            p = torch.zeros(8, dtype=torch.float64).index_add_(0, bins, target())
            counts = (bins[a] * 8 + bins[b]).bincount(minlength=64)
            assert chi_squared(counts, torch.outer(p, p).flatten()) > ALPHA / len(pairs), name


def test_the_independence_test_can_fail():
    """Tokens that agree by force in three pairs of a hundred are noticed."""
    generator = torch.Generator().manual_seed(42)
    a, b = (target().multinomial(16_000, replacement=True, generator=generator) for _ in range(2))
    b = torch.where(torch.rand(16_000, generator=generator) < 0.03, a, b)
    bins = torch.arange(VOCAB) % 8
    p = torch.zeros(8, dtype=torch.float64).index_add_(0, bins, target())
    counts = (bins[a] * 8 + bins[b]).bincount(minlength=64)
    assert chi_squared(counts, torch.outer(p, p).flatten()) < ALPHA


def test_manual_seed_reproduces():
    step, hidden = compiled(softmax_multinomial), row.expand(200, -1)
    with torch.no_grad():
        torch.manual_seed(43)
        runs = [step(hidden, W, mask) for _ in range(3)]
        torch.manual_seed(43)
        again = [step(hidden, W, mask) for _ in range(3)]
        torch.manual_seed(44)
        other = step(hidden, W, mask)
    assert all(torch.equal(a, b) for a, b in zip(runs, again, strict=True))
    # Equal tokens at equal places are the exception: the likeliest token has a probability of a few percent.
    likeliest = target().square().sum().item()
    for a, b in ((runs[0], runs[1]), (runs[1], runs[2]), (runs[0], other)):
        assert (a == b).sum() < 200 * likeliest + 5 * (200 * likeliest) ** 0.5
