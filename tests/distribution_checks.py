"""Goodness of fit, for tests of distributions on the CPU and on GPUs."""

from __future__ import annotations

import torch


def chi_squared(counts: torch.Tensor, p: torch.Tensor) -> float:
    """The p-value of ``counts`` [V] under the probabilities ``p``, float64 [V]; no token with p = 0 may be counted.

    Cells that expect fewer than ten are merged with the next rarer ones.
    """
    expected = counts.sum() * p
    assert (counts[p == 0] == 0).all(), "a token of probability zero was drawn"
    order = expected.argsort(descending=True)
    expected, observed = expected[order], counts[order].double()
    # The cell of a token is the number of complete tens that the commoner tokens expect; common ones are alone.
    alone = torch.arange(len(p), device=p.device)
    cells = torch.where(expected >= 10, alone, len(p) + (expected.cumsum(0) / 10).long())
    cells = torch.unique_consecutive(cells, return_inverse=True)[1]
    empty = torch.zeros(int(cells.max()) + 1, dtype=torch.float64, device=p.device)
    expected, observed = empty.index_add(0, cells, expected), empty.index_add(0, cells, observed)
    # What is left of the last ten is too little for a cell of its own.
    full = expected > 5
    statistic = ((observed - expected)[full] ** 2 / expected[full]).sum()
    return torch.special.gammaincc((full.sum().double() - 1) / 2, statistic / 2).item()
