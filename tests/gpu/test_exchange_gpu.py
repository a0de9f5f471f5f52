"""The exchange on a GPU that several ranks share. They take turns on it: right or wrong is seen, speed is not."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import fs_inductor.tp_ops  # noqa: F401 - registers the ops
from fs_inductor.kernels import exchange, exchange_triton

pytestmark = pytest.mark.gpu

OPS = torch.ops.flashsampling
WORLDS = (2, 4, 8)
HIDDEN = 256
BIAS = "x0 = add(acc, a0); x1 = div(x0, a1)"
STEPS = int(os.environ.get("EXCHANGE_TEST_STEPS", "1000"))
"""Steps, and replays of a graph, in the long tests. Ranks that share a GPU need milliseconds a step."""


def _start() -> torch.device:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def _case(vocab: int, batch: int, device, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(vocab + batch)
    hidden = torch.randn(batch, HIDDEN, generator=g) / HIDDEN**0.5
    weight, bias = torch.randn(vocab, HIDDEN, generator=g), torch.randn(vocab, generator=g)
    temperature = 0.5 + torch.rand(batch, 1, generator=g)
    return hidden.to(device, dtype), weight.to(device, dtype), [bias.to(device), temperature.to(device)]


def _shard(weight, rank: int, capacity: int):
    return weight[min(rank * capacity, len(weight)) : (rank + 1) * capacity]


def _rest(vocab: int, capacity: int):
    return vocab, capacity, dist.group.WORLD.group_name


def _cpu(results: dict) -> dict:
    return {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in results.items()}


def _agreed(results: list[dict]) -> dict:
    for rank, result in enumerate(results):
        for key, value in result.items():
            same = torch.equal(value, results[0][key]) if isinstance(value, torch.Tensor) else value == results[0][key]
            assert same, f"{key}: rank {rank} differs from rank 0"
    return results[0]


# --- the same tokens as one rank -------------------------------------------------------------------


def _sizes(world: int):
    """(vocabulary, capacity) of shards that are whole groups: even, uneven, and with an empty last rank."""
    yield 1280 * world, 1280
    yield 1280 * world - 77, 1280
    yield 1280 * (world - 1), 1280


def _run_equal(rank, world, by_memory):
    device = _start()
    if not by_memory:
        exchange._obstacle = lambda world: "switched off by a test"
    results = {}
    for vocab, capacity in _sizes(world):
        for batch in (1, 16, 200):
            hidden, weight, operands = _case(vocab, batch, device)
            mine, rest = _shard(weight, rank, capacity), _rest(vocab, capacity)
            seed = torch.tensor(11, device=device)
            key = f"{vocab}/{batch}"
            results[f"{key}/drawn"] = OPS.sample_sharded(hidden, mine, seed, operands, BIAS, 1, *rest)
            results[f"{key}/drawn twice"] = OPS.sample_sharded(hidden, mine, seed, operands, BIAS, 2, *rest)
            results[f"{key}/greedy"] = OPS.argmax_sharded(hidden, mine, operands, BIAS, *rest)
    torch.cuda.synchronize()
    exchange.check()
    results["how"] = exchange.group(dist.group.WORLD.group_name).describe(device)
    return _cpu(results)


@pytest.mark.parametrize("by_memory", [True, False], ids=["memory", "all-gather"])
@pytest.mark.parametrize("world", WORLDS)
def test_equals_one_rank_where_shards_are_whole_groups(world, by_memory):
    results = _agreed(run_ranks(_run_equal, world, by_memory, seconds=300, group_seconds=120))
    assert ("16 bytes a row to each peer's memory" in results.pop("how")) == by_memory
    from fs_inductor.kernels import gemm_sample

    device = torch.device("cuda", 0)
    for vocab, _ in _sizes(world):
        for batch in (1, 16, 200):
            hidden, weight, operands = _case(vocab, batch, device)
            seed = torch.tensor(11, device=device)
            key = f"{vocab}/{batch}"
            for name, draws in (("drawn", 1), ("drawn twice", 2)):
                expected = gemm_sample.sample(hidden, weight, seed, operands, BIAS, draws).cpu()
                assert torch.equal(results[f"{key}/{name}"], expected), key
            expected = gemm_sample.argmax(hidden, weight, operands, BIAS).cpu()
            assert torch.equal(results[f"{key}/greedy"], expected), key


def _run_cut(rank, world, vocab):
    device = _start()
    hidden, weight, _ = _case(vocab, 1, device, torch.float32)
    capacity = -(-vocab // world)
    seed = torch.tensor(rank, device=device)  # every rank has its own
    draws = OPS.sample_sharded(
        hidden.expand(32, -1), _shard(weight, rank, capacity), seed, [], "", 2048, *_rest(vocab, capacity)
    )
    return _cpu({"draws": draws})


@pytest.mark.parametrize(("vocab", "world"), [(100, 2), (100, 8), (12, 8)])
def test_exact_draws_where_shards_cut_groups(vocab, world):
    draws = _agreed(run_ranks(_run_cut, world, vocab, seconds=300, group_seconds=120))["draws"]
    hidden, weight, _ = _case(vocab, 1, "cpu", torch.float64)
    p = torch.softmax(hidden @ weight.T, -1)[0]
    expected = p * draws.numel()
    statistic = float(((torch.bincount(draws.flatten(), minlength=vocab) - expected) ** 2 / expected).sum())
    dof = vocab - 1
    # Fixed seeds; beyond four standard deviations is one honest sampler in thousands.
    assert statistic < dof + 4 * (2 * dof) ** 0.5 + 8


# --- many steps, and graphs ------------------------------------------------------------------------


def _run_steps(rank, world):
    device = _start()
    vocab, capacity = 1280 * world - 77, 1280
    hidden, weight, operands = _case(vocab, 32, device)
    mine, rest = _shard(weight, rank, capacity), _rest(vocab, capacity)
    tokens = []
    for step in range(STEPS):
        batch = 1 + step % 32
        args = [operands[0], operands[1][:batch]]
        seed = torch.tensor(step, device=device)
        tokens.append(OPS.sample_sharded(hidden[:batch], mine, seed, args, BIAS, 1, *rest).flatten())
        if step % 97 == 5 * rank:
            time.sleep(0.01)
    torch.cuda.synchronize()
    exchange.check()
    return _cpu({"tokens": torch.cat(tokens)})


@pytest.mark.parametrize("world", WORLDS)
def test_many_steps(world):
    results = _agreed(run_ranks(_run_steps, world, seconds=500, group_seconds=120))
    from fs_inductor.kernels import gemm_sample

    device = torch.device("cuda", 0)
    hidden, weight, operands = _case(1280 * world - 77, 32, device)
    expected = []
    for step in range(STEPS):
        batch = 1 + step % 32
        args = [operands[0], operands[1][:batch]]
        seed = torch.tensor(step, device=device)
        expected.append(gemm_sample.sample(hidden[:batch], weight, seed, args, BIAS).flatten())
    assert torch.equal(results["tokens"], torch.cat(expected).cpu())


def _run_graphs(rank, world):
    """Two graphs captured on one stream, of different batches, replayed in turn; the second has two exchanges in it."""
    device = _start()
    vocab, capacity = 1280 * world - 77, 1280
    weight = _case(vocab, 32, device)[1]
    mine, rest = _shard(weight, rank, capacity), _rest(vocab, capacity)
    seed = torch.zeros((), dtype=torch.int64, device=device)
    graphs, outs, inputs = [], [], []
    for batch in (4, 32):
        hidden, _, operands = _case(vocab, batch, device)
        inputs.append((hidden, operands))  # a graph reads them where they are, and does not keep them

        def step(hidden=hidden, operands=operands):
            drawn = OPS.sample_sharded(hidden, mine, seed, operands, BIAS, 1, *rest)
            return (drawn, OPS.argmax_sharded(hidden, mine, operands, BIAS, *rest)) if len(hidden) == 32 else (drawn,)

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append(step())
        graphs.append(graph)
    history = []
    for i in range(STEPS):
        seed.fill_(i)
        graphs[i % 2].replay()
        history.append(torch.cat([out.flatten() for out in outs[i % 2]]))
    torch.cuda.synchronize()
    exchange.check()
    return _cpu({"tokens": torch.cat(history)})


@pytest.mark.parametrize("world", WORLDS)
def test_graph_replays(world):
    results = _agreed(run_ranks(_run_graphs, world, seconds=500, group_seconds=120))
    from fs_inductor.kernels import gemm_sample

    device = torch.device("cuda", 0)
    vocab = 1280 * world - 77
    weight = _case(vocab, 32, device)[1]
    expected = []
    for i in range(STEPS):
        hidden, _, operands = _case(vocab, (4, 32)[i % 2], device)
        seed = torch.tensor(i, device=device)
        expected.append(gemm_sample.sample(hidden, weight, seed, operands, BIAS).flatten())
        if i % 2:
            expected.append(gemm_sample.argmax(hidden, weight, operands, BIAS))
    assert torch.equal(results["tokens"], torch.cat(expected).cpu())


def _run_reduce_overhead(rank, world):
    """A step that gathers its logits explicitly, and the same step on one rank; both in mode "reduce-overhead"."""
    import torch.distributed._functional_collectives as collectives
    from torch.nn import functional as F

    import fs_inductor.backend  # noqa: F401 - registers the backend

    os.environ |= {"FLASHSAMPLING_MIN_VOCAB": "0", "FLASHSAMPLING_STRICT": "1"}
    device = _start()
    vocab = 1280 * world
    hidden, weight, _ = _case(vocab, 16, device)
    shard, name = _shard(weight, rank, 1280).clone(), dist.group.WORLD.group_name

    def draw(logits):
        return torch.multinomial(torch.softmax(logits.float() / 0.7, -1), 1)

    def sharded(hidden):
        # What `all_gather_tensor` does with the last dimension, which torch 2.11 cannot trace.
        logits = collectives.all_gather_tensor(F.linear(hidden, shard), 0, name)
        return draw(torch.cat(logits.chunk(world), 1))

    def whole(hidden):
        return draw(F.linear(hidden, weight))

    how = {"backend": "flashsampling", "mode": "reduce-overhead", "fullgraph": True}
    steps = [torch.compile(fn, **how) for fn in (sharded, whole)]
    tokens = []
    for i in range(STEPS):
        row = []
        for step in steps:
            torch.manual_seed(i)
            torch.compiler.cudagraph_mark_step_begin()
            row.append(step(hidden).clone())
        tokens.append(torch.stack(row))
    torch.cuda.synchronize()
    exchange.check()
    return _cpu({"tokens": torch.stack(tokens)})


@pytest.mark.parametrize("world", WORLDS)
def test_reduce_overhead(world):
    tokens = _agreed(run_ranks(_run_reduce_overhead, world, seconds=500, group_seconds=120))["tokens"]
    assert torch.equal(tokens[:, 0], tokens[:, 1])
    assert len(tokens[:, 0].unique()) > 50


# --- cost ------------------------------------------------------------------------------------------


def _run_profile(rank, world):
    device = _start()
    hidden, weight, operands = _case(1280 * world, 16, device)
    args = (hidden, _shard(weight, rank, 1280), torch.tensor(1, device=device), operands, BIAS, 1)
    rest = _rest(1280 * world, 1280)
    OPS.sample_sharded(*args, *rest)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            OPS.sample_sharded(*args, *rest)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    block = exchange.group(rest[2])._memory[device].blocks[0]
    before = block.words.clone()
    torch.cuda.synchronize()
    dist.barrier()  # a peer that is a step ahead would have written before we look
    OPS.sample_sharded(*args, *rest)
    torch.cuda.synchronize()
    return kernels, int((block.words != before).sum())


def test_one_launch_and_sixteen_bytes_a_row_and_peer():
    world = 2
    for kernels, changed in run_ranks(_run_profile, world, seconds=200, group_seconds=60):
        assert len(kernels) == 5 and all("gemm_sample" in name for name in kernels), kernels
        assert changed == 16 * 2 * world + 1  # two words a row from each rank, itself included, and the epoch


# --- failures --------------------------------------------------------------------------------------


def _run_silent(rank, world):
    device = _start()
    hidden, weight, operands = _case(1280 * world, 8, device)
    args = (hidden, _shard(weight, rank, 1280), torch.tensor(1, device=device), operands, BIAS, 1)
    rest = _rest(1280 * world, 1280)
    for _ in range(3):
        OPS.sample_sharded(*args, *rest)
    torch.cuda.synchronize()
    if rank == 1:
        return None
    start = time.monotonic()
    tokens = OPS.sample_sharded(*args, *rest).cpu()
    seconds = time.monotonic() - start
    messages = []
    for call in (exchange.check, lambda: OPS.sample_sharded(*args, *rest), lambda: OPS.sample_sharded(*args, *rest)):
        try:
            call()
            messages.append("")
        except RuntimeError as error:
            messages.append(str(error))
    return tokens, seconds, messages


def test_a_rank_that_falls_silent():
    tokens, seconds, messages = run_ranks(_run_silent, 2, seconds=120, group_seconds=15)[0]
    assert (tokens == -1).all()
    assert 10 < seconds < 60
    for message in messages:
        assert "rank 1 did not send its winners within 15 s" in message


def test_the_interpreters_clock_is_not_used():
    assert not isinstance(exchange_triton._now, type(lambda: 0))
