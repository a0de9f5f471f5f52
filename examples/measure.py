"""What the examples measure: peak memory, and whether draws fit a distribution."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Fit:
    """Pearson's chi-squared test of `draws` draws; `p_value` is near 0 when they do not fit."""

    statistic: float
    bins: int
    draws: int
    p_value: float

    def __str__(self) -> str:
        if self.bins < 2:
            return f"{self.draws:,} draws are too few for a test"
        return f"chi-squared {self.statistic:.1f} over {self.bins} bins, {self.draws:,} draws, p = {self.p_value:.3f}"


def goodness_of_fit(draws: torch.Tensor, probabilities: torch.Tensor) -> Fit:
    """Test token ids `draws`, int64 `[N]`, against `probabilities`, float64 `[V]`.

    Tokens expected at least five times get a bin each; the others share one, as the test's
    approximation needs counts that are not tiny.
    """
    counts = torch.bincount(draws.cpu(), minlength=probabilities.numel()).double()
    expected = probabilities.cpu().double() * draws.numel()
    common = expected >= 5
    observed_bins, expected_bins = counts[common], expected[common]
    rest = expected[~common].sum()
    if rest >= 5:
        observed_bins = torch.cat([observed_bins, counts[~common].sum().view(1)])
        expected_bins = torch.cat([expected_bins, rest.view(1)])
    # Without a bin for the rest, its few draws are left out: scale what remains to the same total.
    expected_bins = expected_bins * (observed_bins.sum() / expected_bins.sum())
    statistic = ((observed_bins - expected_bins) ** 2 / expected_bins).sum()
    freedom = torch.tensor(max(1, observed_bins.numel() - 1)).double()
    p_value = torch.special.gammaincc(freedom / 2, statistic / 2)
    return Fit(statistic.item(), observed_bins.numel(), draws.numel(), p_value.item())


def peak_memory(fn: Callable[[], object], device: torch.device) -> int:
    """The most bytes that one call of `fn` holds at once, beyond what was allocated before it."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        fn()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        fn()
    # The trace has every allocation and release with the running total; the profiler's tables have sums only.
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [event["args"] for event in sorted(events, key=lambda e: e["ts"]) if event["name"] == "[memory]"]
    if not changes:
        return 0
    before = changes[0]["Total Allocated"] - changes[0]["Bytes"]
    return max(change["Total Allocated"] for change in changes) - before
