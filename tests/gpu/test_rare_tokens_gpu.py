"""Tokens far below the likeliest are drawn at their rate, and masked ones never, in very many draws."""

from __future__ import annotations

import math
import os

import pytest
import torch

import fs_inductor.ops  # noqa: F401 - registers the ops
from fs_inductor.kernels.rng import GROUP

pytestmark = pytest.mark.gpu

DRAWS = int(float(os.environ.get("RARE_TOKEN_DRAWS", "2e7")))
"""Draws of each case. There are eight cases: 1.3e8 makes 10**9 in all."""

PROGRAM = "x0 = where(a0, -inf, acc)"


def _case(inside: bool, heads: int, nats: int):
    """Logits [V], and a mask [V] that is True on what must never be drawn.

    inside: heads and tail share one group; else the heads have a group of their own, and the tail many others.
    """
    vocab = GROUP if inside else 158 * GROUP
    logits, mask = torch.zeros(vocab), torch.zeros(vocab, dtype=torch.bool)
    mask[7::9] = True
    if not inside:
        mask[:GROUP] = True
    at = torch.tensor([5, 77])[:heads]
    logits[at], mask[at] = float(nats), False
    return logits, mask, at


@pytest.mark.parametrize("nats", [18, 20])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("inside", [True, False], ids=["inside a group", "between groups"])
def test_rare_tokens_come_at_their_rate(inside, heads, nats):
    logits, mask, at = _case(inside, heads, nats)
    device, depth = torch.device("cuda"), 16
    # Small whole numbers, so that bf16 products are exact.
    weight = torch.zeros(len(logits), depth, dtype=torch.bfloat16, device=device)
    weight[:, 0] = logits.to(device)
    rows, samples = (16384, 256) if inside else (512, 256)
    hidden = torch.zeros(rows, depth, dtype=torch.bfloat16, device=device)
    hidden[:, 0] = 1
    counts = torch.zeros(len(logits), dtype=torch.int64, device=device)
    calls = -(-DRAWS // (rows * samples))
    for call in range(calls):
        seed = torch.tensor(call, device=device)
        drawn = torch.ops.flashsampling.sample(hidden, weight, seed, [mask.to(device)], PROGRAM, samples)
        counts += torch.bincount(drawn.flatten(), minlength=len(logits))
    counts, draws = counts.cpu(), calls * rows * samples
    assert counts.sum() == draws
    assert counts[mask].sum() == 0
    weights = torch.exp(logits.double() - nats).masked_fill(mask, 0)
    expected = weights / weights.sum() * draws
    tail = ~mask
    tail[at] = False
    found = int(counts[tail].sum())
    print(f"{draws} draws, {nats} nats, {heads} heads: tail {found}, expected {expected[tail].sum():.1f}")
    # Five standard deviations: of tails, of each of two heads, and of the half of a tail behind the first head.
    halves = [tail & (torch.arange(len(logits)) > at[0]), tail, tail & (torch.arange(len(logits)) > at[-1])]
    for part in halves:
        assert abs(int(counts[part].sum()) - float(expected[part].sum())) < 5 * math.sqrt(expected[part].sum()) + 5
    share = float(expected[at[0]]) / draws
    assert abs(int(counts[at[0]]) - share * draws) < 5 * math.sqrt(draws * share * (1 - share)) + 5
    # Every tail id alike: a chi-squared statistic, whose deviation is sqrt(2 dof) and more where few are expected.
    mean = float(expected[tail].mean())
    statistic = float(((counts[tail] - mean) ** 2 / mean).sum())
    dof = int(tail.sum()) - 1
    assert statistic < dof + 5 * math.sqrt(dof * (2 + 1 / mean))
