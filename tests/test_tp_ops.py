"""The ops for sharded heads, in real processes over gloo: all ranks agree, and on what one rank would draw."""

from __future__ import annotations

import math
import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, run_ranks

import fs_inductor.tp_ops  # noqa: F401 - registers the ops
from fs_inductor.kernels import exchange, reference

OPS = torch.ops.flashsampling
WORLDS = (2, 4, 8)
HIDDEN = 16

# name: (program, names of operands)
PROGRAMS = {
    "plain": ("", ()),
    "bias": ("x0 = add(acc, a0)", ("bias",)),
    "all": (
        "x0 = add(acc, a0); x1 = div(x0, 5.0); x2 = tanh(x1); x3 = mul(x2, a3); x4 = where(a1, -inf, x3); "
        "x5 = div(x4, a2)",
        ("bias", "mask", "temperature", "scalar"),
    ),
}


def _case(vocab: int, batch: int = 6, dtype: torch.dtype = torch.float32):
    """hidden, the whole weight, and operands by name: the same on every rank."""
    g = torch.Generator().manual_seed(vocab)
    hidden = torch.randn(batch, HIDDEN, generator=g).to(dtype)
    weight = torch.randn(vocab, HIDDEN, generator=g).to(dtype)
    operands = {
        "bias": torch.randn(vocab, generator=g),
        "mask": torch.rand(batch, vocab, generator=g) < 0.5,
        "temperature": 0.5 + torch.rand(batch, 1, generator=g),
        "scalar": torch.tensor(4.0),
    }
    operands["mask"][:, vocab // 2] = False
    return hidden, weight, operands


def _shard(weight: torch.Tensor, rank: int, capacity: int) -> torch.Tensor:
    return weight[min(rank * capacity, len(weight)) : (rank + 1) * capacity]


def _capacity(vocab: int, world: int) -> int:
    return math.ceil(vocab / world)


def _world_name() -> str:
    return dist.group.WORLD.group_name


def _agreed(results: list[dict]) -> dict:
    """What every rank returned, which must be the same for all."""
    for rank, result in enumerate(results):
        for key, value in result.items():
            assert torch.equal(value, results[0][key]), f"{key}: rank {rank} differs from rank 0"
    return results[0]


def _chi_squared_z(counts: torch.Tensor, p: torch.Tensor) -> float:
    """Normal quantile, about, of the chi-squared statistic of counts against probabilities p, float64."""
    expected = p * counts.sum()
    dof = len(p) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    # Wilson and Hilferty: the cube root of a chi-squared variable is close to normal.
    return ((statistic / dof) ** (1 / 3) - (1 - 2 / (9 * dof))) / math.sqrt(2 / (9 * dof))


# --- equal to one rank --------------------------------------------------------------------------


def _equal_cases(world: int):
    """(name, vocabulary, capacity, dtype): capacities are multiples of the group size."""
    yield "even", 128 * world, 128, torch.float32
    yield "uneven", 128 * world - 37, 128, torch.float32
    yield "an empty rank", 128 * (world - 1), 128, torch.float32
    yield "bf16", 128 * world - 100, 128, torch.bfloat16


def _run_equal(rank: int, world: int) -> dict:
    results = {}
    for name, vocab, capacity, dtype in _equal_cases(world):
        hidden, weight, operands = _case(vocab, dtype=dtype)
        mine = _shard(weight, rank, capacity)
        for key, (program, names) in PROGRAMS.items():
            args = ([operands[n] for n in names], program)
            rest = (vocab, capacity, _world_name())
            results[f"{name}/{key}/draws"] = OPS.sample_sharded(hidden, mine, torch.tensor(7), *args, 3, *rest)
            seeds = torch.arange(len(hidden))
            results[f"{name}/{key}/row seeds"] = OPS.sample_sharded(hidden, mine, seeds, *args, 1, *rest)
            results[f"{name}/{key}/greedy"] = OPS.argmax_sharded(hidden, mine, *args, *rest)
    return results


@pytest.mark.parametrize("world", WORLDS)
def test_equals_one_rank_where_shards_are_whole_groups(world):
    results = _agreed(run_ranks(_run_equal, world))
    for name, vocab, _, dtype in _equal_cases(world):
        hidden, weight, operands = _case(vocab, dtype=dtype)
        for key, (program, names) in PROGRAMS.items():
            args = ([operands[n] for n in names], program)
            draws = reference.sample(hidden, weight, torch.tensor(7), *args, 3)
            assert torch.equal(results[f"{name}/{key}/draws"], draws)
            seeds = torch.arange(len(hidden))
            assert torch.equal(results[f"{name}/{key}/row seeds"], reference.sample(hidden, weight, seeds, *args))
            assert torch.equal(results[f"{name}/{key}/greedy"], reference.argmax(hidden, weight, *args))


# --- exact where groups are cut -------------------------------------------------------------------

ROWS, DRAWS = 16, 2048
CUT = ((100, 2), (100, 8), (12, 8), (200, 4))


def _run_cut(rank: int, world: int, vocab: int, seeds: str) -> dict:
    hidden, weight, _ = _case(vocab, batch=1)
    hidden = hidden.expand(ROWS, -1) / 2
    capacity = _capacity(vocab, world)
    seed = torch.tensor(rank if seeds == "own seeds" else 3)
    args = (hidden, _shard(weight, rank, capacity))
    rest = (vocab, capacity, _world_name())
    return {
        "draws": OPS.sample_sharded(*args, seed, [], "", DRAWS, *rest),
        "greedy": OPS.argmax_sharded(*args, [], "", *rest),
    }


@pytest.mark.parametrize("seeds", ["one seed", "own seeds"])
@pytest.mark.parametrize(("vocab", "world"), CUT)
def test_exact_draws_where_shards_cut_groups(vocab, world, seeds):
    results = _agreed(run_ranks(_run_cut, world, vocab, seeds))
    hidden, weight, _ = _case(vocab, batch=1)
    p = torch.softmax((hidden.double() / 2) @ weight.double().T, -1)[0]
    counts = torch.bincount(results["draws"].flatten(), minlength=vocab)
    # Fixed seeds; |z| < 4 would fail one honest sampler in 16,000.
    assert abs(_chi_squared_z(counts, p)) < 4
    assert torch.equal(results["greedy"], p.argmax().expand(ROWS))


# --- corners ---------------------------------------------------------------------------------------


def _run_corners(rank: int, world: int) -> dict:
    vocab, capacity = 12, _capacity(12, world)
    rest = (vocab, capacity, _world_name())
    hidden, weight, operands = _case(vocab)
    mine = _shard(weight, rank, capacity)
    seed = torch.tensor(1)
    results = {
        "no rows": OPS.sample_sharded(hidden[:0], mine, seed, [], "", 2, *rest),
        "after no rows": OPS.argmax_sharded(hidden, mine, [], "", *rest),
    }
    # Rows that pad the last shard, and would win if they were looked at.
    padding = torch.full((capacity - len(mine), HIDDEN), 1e3) * hidden[:1].sign()
    padded = torch.cat([mine, padding])
    results["padded"] = OPS.argmax_sharded(hidden, padded, [], "", *rest)
    results["padded, bias"] = OPS.argmax_sharded(hidden, padded, [operands["bias"]], PROGRAMS["bias"][0], *rest)
    local = torch.cat([_shard(operands["bias"], rank, capacity), torch.zeros(len(padding))])
    results["padded, local bias"] = OPS.argmax_sharded(hidden, padded, [local], PROGRAMS["bias"][0], *rest)
    for name, special in _special_logits(vocab).items():
        args = (hidden, mine, [special], PROGRAMS["bias"][0])
        results[name] = OPS.argmax_sharded(*args, *rest)
        results[f"{name}, drawn"] = OPS.sample_sharded(*args[:2], seed, *args[2:], 1, *rest)[:, 0]
    return results


def _special_logits(vocab: int) -> dict[str, torch.Tensor]:
    cases = {
        "ties": torch.zeros(vocab).index_fill_(0, torch.tensor([vocab - 1, 5, 7]), 1e4),
        "all -inf": torch.full((vocab,), -torch.inf),
        "one finite": torch.full((vocab,), -torch.inf).index_fill_(0, torch.tensor([9]), 0.0),
        "two +inf": torch.zeros(vocab).index_fill_(0, torch.tensor([8, 6]), torch.inf),
        "NaN and +inf": torch.zeros(vocab).index_fill_(0, torch.tensor([1, 2]), torch.inf),
    }
    cases["NaN and +inf"][torch.tensor([10, 4])] = torch.nan
    return cases


@pytest.mark.parametrize("world", (2, 8))
def test_corners(world):
    vocab = 12
    results = _agreed(run_ranks(_run_corners, world))
    hidden, weight, operands = _case(vocab)
    greedy = reference.argmax(hidden, weight, [], "")
    assert results["no rows"].shape == (0, 2)
    assert torch.equal(results["after no rows"], greedy)
    assert torch.equal(results["padded"], greedy)
    biased = reference.argmax(hidden, weight, [operands["bias"]], PROGRAMS["bias"][0])
    assert torch.equal(results["padded, bias"], biased)
    assert torch.equal(results["padded, local bias"], biased)
    logits = hidden @ weight.T
    assert torch.equal(results["ties"], (logits + _special_logits(vocab)["ties"]).argmax(-1))
    for name, token in (("all -inf", 0), ("one finite", 9), ("two +inf", 6), ("NaN and +inf", 4)):
        assert results[name].tolist() == [token] * len(hidden), name
        assert results[f"{name}, drawn"].tolist() == [token] * len(hidden), name


def _run_subgroups(rank: int, world: int) -> torch.Tensor:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = rank // 2
    hidden, weight, _ = _case(256 + half)
    mine = _shard(weight, rank % 2, 256)
    args = (torch.tensor(half), [], "", 3, len(weight), 256, groups[half].group_name)
    return OPS.sample_sharded(hidden, mine, *args)


def test_each_group_has_its_own_vocabulary():
    results = run_ranks(_run_subgroups, 4)
    for half in (0, 1):
        hidden, weight, _ = _case(256 + half)
        expected = reference.sample(hidden, weight, torch.tensor(half), [], "", 3)
        assert torch.equal(results[2 * half], expected)
        assert torch.equal(results[2 * half + 1], expected)


# --- failures --------------------------------------------------------------------------------------


def _message(function, *args) -> str:
    try:
        function(*args)
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _run_different(rank: int, world: int) -> list[str]:
    hidden, weight, _ = _case(100)
    mine, rest = _shard(weight, rank, 50), (100, 50, _world_name())
    OPS.argmax_sharded(hidden, mine, [], "", *rest)
    program = "x0 = tanh(acc)" if rank else "x0 = exp(acc)"
    return [_message(OPS.argmax_sharded, hidden, mine, [], program, *rest)]


def test_ranks_that_compiled_different_programs():
    for (message,) in run_ranks(_run_different, 2):
        assert message.startswith("ExchangeError: the ranks of process group")
        assert "rank 0, site 2" in message and "exp(acc)" in message
        assert "rank 1, site 2" in message and "tanh(acc)" in message


def _run_other_batch(rank: int, world: int) -> str:
    hidden, weight, _ = _case(100, batch=6 + rank)
    return _message(OPS.argmax_sharded, hidden, _shard(weight, rank, 50), [], "", 100, 50, _world_name())


def test_ranks_with_other_numbers_of_rows():
    for message in run_ranks(_run_other_batch, 2):
        assert message.startswith("ExchangeError: the ranks of process group")
        assert "6 rows" in message and "7 rows" in message


def _run_again(rank: int, world: int) -> list[torch.Tensor]:
    """Two groups of one name, one after the other, over one store, as torchrun's agent keeps it."""
    tokens = []
    for vocab in (100, 64):
        exchange._groups.clear()
        time.sleep(0.3 * rank)  # time for rank 0 to read what is left of the first group
        hidden, weight, _ = _case(vocab)
        capacity = vocab // world
        shard = _shard(weight, rank, capacity)
        tokens.append(OPS.argmax_sharded(hidden, shard, [], "", vocab, capacity, _world_name()))
    return tokens


def test_a_group_that_is_made_again():
    for tokens in run_ranks(_run_again, 2):
        for vocab, mine in zip((100, 64), tokens, strict=True):
            hidden, weight, _ = _case(vocab)
            assert torch.equal(mine, OPS.argmax(hidden, weight, [], ""))


def _run_dying(rank: int, world: int, when: str) -> str:
    hidden, weight, _ = _case(100)
    args = (hidden, _shard(weight, rank, 50), [], "", 100, 50, _world_name())
    if when == "later":
        OPS.argmax_sharded(*args)
    if rank == 1:
        os._exit(3)
    message = _message(OPS.argmax_sharded, *args)
    raise RuntimeError(f"rank 0 saw: {message}")


@pytest.mark.parametrize(
    ("when", "message"), [("at first", "rank 1 of process group"), ("later", "could not exchange their winners")]
)
def test_a_rank_that_dies(when, message):
    # Whichever is noticed first: the death, or what the survivor says of it.
    with pytest.raises(RankError, match=f"rank 1 of 2 died|rank 0 saw: ExchangeError.*{message}"):
        run_ranks(_run_dying, 2, when, group_seconds=2)
    survivors = run_ranks(_run_alone, 2, when, group_seconds=2)
    assert message in survivors[0]


def _run_alone(rank: int, world: int, when: str) -> str:
    """As `_run_dying`, but rank 1 lives on without taking part, so that rank 0 can be heard."""
    hidden, weight, _ = _case(100)
    args = (hidden, _shard(weight, rank, 50), [], "", 100, 50, _world_name())
    if when == "later":
        OPS.argmax_sharded(*args)
    return "" if rank == 1 else _message(OPS.argmax_sharded, *args)


def _run_single(rank: int, world: int) -> dict:
    """What needs a process group, but only one rank."""
    hidden, weight, operands = _case(20)
    group = _world_name()
    seed = torch.tensor(3)
    good = {"hidden": hidden, "weight": weight, "operands": [], "program": "", "vocab": 20, "capacity": 20}
    good["group_name"] = group
    bad = {
        "weight rows": {"weight": weight[:19]},
        "too small": {"vocab": 21},
        "nothing": {"capacity": 0},
        "features": {"weight": weight[:, :8]},
        "dtype": {"hidden": hidden.double()},
        "rank": {"hidden": hidden[0]},
        "count": {"program": "x0 = add(acc, a0)"},
        "operand": {"program": "x0 = add(acc, a0)", "operands": [torch.zeros(7)]},
        "group": {"group_name": "nobody"},
    }
    messages = {
        key: _message(lambda kwargs: OPS.argmax_sharded(**kwargs), good | change) for key, change in bad.items()
    }
    messages["seed"] = _message(lambda: OPS.sample_sharded(hidden, weight, torch.tensor(1.0), [], "", 1, 20, 20, group))
    torch.library.opcheck(
        OPS.sample_sharded.default, (hidden, weight, seed, [operands["bias"]], "x0 = add(acc, a0)", 2, 20, 20, group)
    )
    torch.library.opcheck(OPS.argmax_sharded.default, (hidden, weight, [], "", 20, 20, group))

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def step(hidden):
        return OPS.sample_sharded(hidden, weight, seed, [], "", 2, 20, 20, group)

    same = all(torch.equal(step(hidden[:n]), reference.sample(hidden[:n], weight, seed, [], "", 2)) for n in (6, 3, 2))
    return {"messages": messages, "same": same}


def test_single_rank_checks_opcheck_and_dynamic_shapes():
    (result,) = run_ranks(_run_single, 1)
    assert result["same"]
    for key, words in {
        "weight rows": "weight has 19 rows on rank 0 of 1",
        "too small": "1 ranks of capacity 20 do not hold a vocabulary of 21",
        "nothing": "must be at least 1",
        "features": "features",
        "dtype": "dtype torch.float64",
        "rank": "must be [B, D]",
        "count": "reads 1 operands, but 0 were passed",
        "operand": "operands[0] of shape (7,)",
        "group": "there is no process group 'nobody'",
        "seed": "seed has dtype torch.float32",
    }.items():
        assert words in result["messages"][key]


# --- words -----------------------------------------------------------------------------------------


def test_words_order_as_scores_then_lower_ids():
    nan = torch.tensor([0x7FC00000, -0x400000, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert nan.isnan().all()
    scores = [-torch.inf, -1e30, -1.0, -1e-40, 0.0, 1e-40, 1.0, 1e30, torch.inf, *nan.tolist()]
    words = exchange.pack(torch.tensor(scores), torch.full((len(scores),), 9))
    assert (words[1:9] > words[:8]).all()
    assert (words[9:] == words[9]).all() and words[9] > words[8]
    assert words[0] > exchange.NOTHING
    zeros = exchange.pack(torch.tensor([0.0, -0.0]), torch.tensor([4, 4]))
    assert zeros[0] == zeros[1]
    ids = torch.tensor([0, 1, 2**31, 2**32 - 1])
    tied = exchange.pack(torch.zeros(4), ids)
    assert (tied[1:] < tied[:-1]).all()
    assert torch.equal(exchange.unpack(tied), ids)
