"""Random step functions against eager: every sink is fused or untouched, and what is fused picks the right tokens.

    RANDOM_STEPS=2000 RANDOM_SEED=1 python -m pytest tests/test_random_steps.py

runs more steps than the suite does, or other ones. From 1,000 on, every op and every idiom must occur. Each run prints
what occurred. A failure prints the step as a script that runs in `tests/`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from random_checks import COPIES, Tally, check_independence, check_look, check_step, check_tokens, seed_draws
from random_steps import Output, Step, seeded_steps, steps
from support import fresh
from torch._dynamo.utils import counters

from fs_inductor.kernels.epilogue_ops import OPS

STEPS = int(os.environ.get("RANDOM_STEPS", "150"))
LONG = STEPS >= 1000
SEED = os.environ.get("RANDOM_SEED")
COMPILED = 10
ALPHA = 1e-3
"""With which a correct sampler would fail the run, had its seeds been drawn at random."""


def explore(check: Callable[[Step], None], examples: int, accept: Callable[[Step], bool] = lambda step: True) -> None:
    """Calls ``check`` with steps of the grammar, the same ones in each run; a failing step is printed.

    Short runs shrink it first; long ones look further instead.
    """
    strategy, phases = (seeded_steps(), (Phase.generate,)) if LONG else (steps(), (Phase.generate, Phase.shrink))

    @settings(
        max_examples=examples,
        derandomize=SEED is None,
        database=None,
        deadline=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy.filter(accept))
    def run(step: Step) -> None:
        hypothesis.note(repr(step))
        check(step)

    (hypothesis.seed(int(SEED))(run) if SEED else run)()


def test_random_steps(capsys):
    tally = Tally()
    # Each step has a handful of tests of a distribution: fits of its outputs, and pairs that must be independent.
    explore(lambda step: check_step(step, tally, ALPHA / (5 * STEPS)), STEPS)
    with capsys.disabled():
        print(f"\n{tally}")
    check_tally(tally)


def check_tally(tally: Tally) -> None:
    assert tally.steps >= STEPS
    assert tally.fused >= 0.6 * tally.steps
    # Steps that the grammar expects to fuse are missed now and then, never many.
    assert sum(tally.counts.get("missed unexpectedly", {}).values()) <= 0.03 * tally.steps
    rows = tally.counts["greedy rows"]
    assert rows["near-tie"] <= 0.01 * rows["all"]
    for name, p_values in (("fit", tally.fits), ("independence", tally.independences)):
        check_uniform(name, p_values)
    if STEPS >= 2000:  # in fewer, the rarest op may not occur
        assert set(OPS) <= set(tally.counts["epilogue ops"])
        assert set(range(1, 20)) <= set(tally.counts["idioms fused"])
        assert set(range(20, 26)) <= set(tally.counts["idioms missed"])


def check_uniform(name: str, p_values: list[float]) -> None:
    """A correct sampler's p-values are uniform: as many below 1 % and 10 % as these say, within five deviations."""
    n = len(p_values)
    for level in (0.01, 0.1):
        below = sum(p < level for p in p_values)
        # Chi-squared with cells of ten is an approximation, by a tenth at these levels.
        assert below <= 1.1 * n * level + 5 * math.sqrt(n * level), f"{name}: {below} of {n} p-values below {level}"


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Compiles anew, and leaves nothing behind in the user's cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_random_steps_compiled_whole(own_cache, capsys):
    """Through Inductor, at several batch sizes and temperatures: right tokens, and no graph for each of them."""
    tally, graphs = Tally(), []

    def check(step: Step) -> None:
        torch._dynamo.reset()
        counters.clear()
        seed_draws(step)
        options = {"flashsampling.min_vocab": 0}
        compiled = torch.compile(step.function(), backend="flashsampling", options=options, fullgraph=True)
        for copies, number in ((1, 0.7), (2, 0.8), (3, 0.9), (4, 1.3), (150, 1.1)):
            numbers = [number] * len(step.numbers)
            arguments = step.arguments(copies, numbers)
            with torch.no_grad():
                result, eager = compiled(*fresh(arguments)), step.function()(*fresh(arguments))
            check_look(result, eager)
            results = result, eager
            check_tokens(step, arguments, step.arguments(1, numbers), results, [], tally, ALPHA / (25 * COMPILED))
        graphs.append(counters["stats"]["unique_graphs"])
        assert graphs[-1] <= 3, f"{graphs[-1]} graphs"
        tally.steps += 1

    explore(check, COMPILED, lambda step: step.fuses and step.outputs and all(o.tiled for o in step.outputs))
    with capsys.disabled():
        print(f"\ncompiled whole: {tally.steps} steps, {sum(graphs)} graphs, at most {max(graphs)} for one")


# -- the checks can fail --------------------------------------------------------------------------------------------


def plain_step(line: str, oracle: str, draws: int = 1) -> Step:
    """A step whose last line but one is ``line``, and whose target is ``oracle``."""
    return Step(
        lines=("x = F.linear(h, W)", line, "return token"),
        oracle=("x = F.linear(h, W).double()", f"targets.append(({oracle}, {draws == 0}))"),
        parameters={"h": "tile(exact(3, 16))", "W": "exact(160, 16)"},
        outputs=(Output(draws, 3, True),),
        dynamic=False,
        seed=1,
        sinks=1,
        fuses=True,
        idioms=frozenset(),
        pieces=(),
        numbers=(),
        dtype="float32",
    )


DRAW, PAIR = "token = (x / 0.7).softmax(-1).multinomial(1)", "token = x.softmax(-1).multinomial(2, replacement=True)"


def test_right_steps_pass():
    for step in (plain_step(DRAW, "x / 0.7"), plain_step("token = x.argmax(-1)", "x", 0), plain_step(PAIR, "x", 2)):
        check_step(step, Tally(), 1e-6)


@pytest.mark.parametrize(
    ("line", "oracle", "draws", "complaint"),
    [
        (DRAW, "x / 0.71", 1, "logits differ"),
        (DRAW, "x / 1.4", 1, "draws do not fit"),
        (DRAW, "(x / 0.7).index_fill(-1, x[0].topk(3).indices, -torch.inf)", 1, "a token of probability zero"),
        ("token = x.argmax(-1)", "-x", 0, "greedy"),
        ("token = x.argmax(-1)", "x + 0.1 * torch.arange(160)", 0, "greedy"),
    ],
)
def test_wrong_targets_are_noticed(line, oracle, draws, complaint):
    with pytest.raises(AssertionError, match=complaint):
        check_step(plain_step(line, oracle, draws), Tally(), 1e-6)


def test_dependent_draws_are_noticed():
    p = torch.full((3, 160), 1 / 160, dtype=torch.float64)
    ids = torch.randint(0, 160, (3, COPIES, 1), generator=torch.Generator().manual_seed(1))
    check_independence([(ids, p)], Tally(), 1e-6)
    for dependent in (torch.cat([ids, ids], 2), ids[:, :1].expand(-1, COPIES, -1)):
        with pytest.raises(AssertionError, match="draws depend"):
            check_independence([(dependent, p)], Tally(), 1e-6)


def test_wrong_reports_are_noticed():
    step = plain_step(DRAW, "x / 0.7")
    with pytest.raises(AssertionError):
        check_step(replace(step, sinks=2), Tally(), 1e-6)
    with pytest.raises(AssertionError):
        check_step(replace(step, fuses=False), Tally(), 1e-6)


def test_a_step_prints_as_a_script(capsys):
    exec(repr(plain_step(DRAW, "x / 0.7")), {})
    assert "1 fused, 0 missed" in capsys.readouterr().out
