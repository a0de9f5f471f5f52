"""The exchange through peers' memory: device code in Triton's interpreter, ranks as processes that share memory."""

from __future__ import annotations

import contextlib
import functools
import time
from types import SimpleNamespace

import pytest
import torch
import triton.language as tl
from ranks import run_ranks
from triton.runtime import interpreter

from fs_inductor.kernels import exchange, exchange_triton, gemm_sample, peers, reference
from fs_inductor.kernels.peers import Block, ExchangeError, PeerMemory
from fs_inductor.kernels.rng import GROUP

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")

CAPACITY = 16


def _shared_blocks(world: int, capacity: int = CAPACITY) -> list[torch.Tensor]:
    words = peers.HEADER_WORDS + peers.channel_words(world, capacity)
    return [torch.zeros(words, dtype=torch.int64).share_memory_() for _ in range(world)]


def _block(blocks: list[torch.Tensor], rank: int, timeout: float = 30.0) -> Block:
    return Block(blocks[rank], rank, [words.data_ptr() for words in blocks], timeout, torch.zeros(2, dtype=torch.int64))


def _patch_once() -> None:
    """The interpreter patches `tl` again at every call of a function, half of its cost: once is enough here."""
    for fn in (exchange_triton.exchange_kernel.fn, tl.max.fn):  # for what it sees: `tl` here, and `tl.core` there
        interpreter._patch_lang(fn)
    interpreter._patch_lang = lambda fn: SimpleNamespace(restore=lambda: None)


def _words(world: int, batches: list[int], seed: int = 0) -> list[torch.Tensor]:
    """One tensor [world, B] of random winners a step, the same in every process."""
    g = torch.Generator().manual_seed(seed)
    steps = []
    for batch in batches:
        ids = torch.randint(0, 2**32, (world, batch), generator=g)
        steps.append(exchange.pack(torch.randn(world, batch, generator=g), ids))
    return steps


def _expected(steps: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([exchange.unpack(words.amax(0)) for words in steps])


def _epoch(block: Block, channel: peers.Channel) -> int:
    return int(block.words[channel.offset])


# --- the protocol --------------------------------------------------------------------------------


def _run_steps(rank, world, blocks, batches, first_epoch, delays=False, late=0.0, slow_from=None):
    _patch_once()
    block = _block(blocks, rank)
    channel = block.carve(CAPACITY)
    block.words[channel.offset] = first_epoch
    if rank == world - 1:
        time.sleep(late)
    tokens = []
    for i, words in enumerate(_words(world, batches)):
        if delays and i % 25 == rank:
            time.sleep(0.01)
        if slow_from is not None and i >= slow_from and rank == i % world:
            time.sleep(0.2)  # the others look at this rank's slots long before it has written to them
        tokens.append(exchange_triton.run(channel, words[rank]))
    return torch.cat(tokens), _epoch(block, channel)


def _check_steps(world: int, batches: list[int], first_epoch: int = 0, blocks=None, **how):
    blocks = blocks or _shared_blocks(world)
    step = functools.partial(_run_steps, **how)
    results = run_ranks(step, world, blocks, batches, first_epoch, seconds=300)
    expected = _expected(_words(world, batches))
    for rank, (tokens, epoch) in enumerate(results):
        wrong = int((tokens != expected).sum())
        assert wrong == 0, f"rank {rank}: {wrong} of {len(expected)} tokens are wrong"
        assert epoch == (first_epoch + sum(batch > 0 for batch in batches)) % 2**32


@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_thousand_steps_with_slow_and_late_ranks(world):
    batches = [1 + 7 * i % CAPACITY for i in range(1000)]
    _check_steps(world, batches, delays=True, late=1.0)


def test_three_ranks():
    _check_steps(3, [5] * 20)


def test_a_batch_that_shrinks_for_5000_steps_and_grows_again():
    _check_steps(2, [CAPACITY] * 3 + [1] * 5000 + [CAPACITY] * 3, slow_from=5003)


def test_empty_batches_leave_the_epoch_alone():
    _check_steps(2, [0, 3, 0, 0, 2, 0])


def test_the_epoch_wraps_around():
    _check_steps(2, [4] * 12, first_epoch=2**32 - 6)


def test_words_of_an_epoch_that_comes_again_are_gone_by_then():
    """What a slot would hold after a batch had been small for 2**32 exchanges: a word with the current epoch."""
    blocks, first_epoch, grows = _shared_blocks(2), 2**31 - 3, 6
    every_slot = []
    for rank in (0, 1):
        channel = _block(blocks, rank).carve(CAPACITY)
        slots = blocks[rank][channel.offset + peers.CHANNEL_HEADER_WORDS :][: 4 * 2 * CAPACITY].view(2, 2, CAPACITY, 2)
        every_slot.append(slots)
        for epoch in (first_epoch + 1 + grows, first_epoch + 2 + grows):
            slots[epoch % 2, :, 1:] = (epoch - 2**32) * 2**32 + 0xFFFFFFFF
    _check_steps(2, [1] * grows, first_epoch, blocks)
    epochs = (torch.stack(every_slot) >> 32) & 0xFFFFFFFF
    assert epochs[..., 1:, :].unique().tolist() == [2**31 - 2, 2**31 - 1]
    _check_steps(2, [CAPACITY] * 4, first_epoch + grows, blocks)


def test_more_rows_than_are_handled_at_a_time():
    world, capacity = 2, 1200
    blocks = _shared_blocks(world, capacity)
    results = run_ranks(_run_large, world, blocks, capacity)
    expected = _expected(_words(world, [capacity, 5, 513]))
    for tokens in results:
        assert torch.equal(tokens, expected)


def _run_large(rank, world, blocks, capacity):
    channel = _block(blocks, rank).carve(capacity)
    return torch.cat([exchange_triton.run(channel, words[rank]) for words in _words(world, [capacity, 5, 513])])


def test_two_words_a_row_go_to_each_peer_and_nothing_else():
    world, batch = 4, 5
    blocks = _shared_blocks(world)
    made = [_block(blocks, rank) for rank in range(world)]
    channels = [block.carve(CAPACITY) for block in made]
    _answer_for(blocks, channels[0], [1, 2, 3], epoch=1, batch=batch)
    before = [words.clone() for words in blocks]
    exchange_triton.run(channels[0], _words(world, [batch])[0][0])
    for rank in (1, 2, 3):
        assert int((blocks[rank] != before[rank]).sum()) == 2 * batch
    assert int((blocks[0] != before[0]).sum()) == 2 * batch + 1  # its own slots, and its epoch


def _answer_for(blocks, channel, ranks, epoch, batch) -> None:
    """Put the words of other ranks into rank 0's slots, as if they had sent them."""
    world = channel.block.world
    slots = blocks[0][channel.offset + peers.CHANNEL_HEADER_WORDS :][: 4 * world * CAPACITY]
    slots = slots.view(2, world, CAPACITY, 2)
    for rank in ranks:
        slots[epoch % 2, rank, :batch] = (epoch << 32) + 0x80000000 + rank


# --- failures ------------------------------------------------------------------------------------


def _message(function, *args) -> str:
    try:
        function(*args)
    except ExchangeError as error:
        return str(error)
    return ""


def _run_with_a_silent_rank(rank, world, blocks):
    block = _block(blocks, rank, timeout=1.0)
    channel = block.carve(CAPACITY)
    steps = _words(world, [3] * 6)
    for words in steps[:3]:
        exchange_triton.run(channel, words[rank])
    if rank == 2:
        return None  # it is gone
    start = time.monotonic()
    tokens = exchange_triton.run(channel, steps[3][rank])
    seconds = time.monotonic() - start
    messages = [_message(exchange_triton.run, channel, words[rank]) for words in steps[4:]]
    other = block.carve(1) if block.room else channel
    messages.append(_message(exchange_triton.run, other, steps[5][rank][:1]))
    return tokens.tolist(), seconds, messages, _epoch(block, channel)


def test_a_rank_that_is_gone_ends_the_wait_and_every_later_call():
    results = run_ranks(_run_with_a_silent_rank, 3, _shared_blocks(3))
    for rank in (0, 1):
        tokens, seconds, messages, epoch = results[rank]
        assert tokens == [-1, -1, -1]
        assert 1.0 <= seconds < 10
        assert epoch == 3
        for message in messages:
            assert "rank 2 did not send its winners within 1 s (exchange 4 of its channel" in message


def _run_with_a_rank_that_comes_too_late(rank, world, blocks):
    block = _block(blocks, rank, timeout=0.5)
    channel = block.carve(CAPACITY)
    steps = _words(world, [CAPACITY] * 4)
    if rank == 1:
        time.sleep(3)
    tokens = [exchange_triton.run(channel, steps[0][rank]).tolist()]
    # As a replayed graph would: nothing on the host stops the next launches.
    channel.block._status_view = torch.zeros(2, dtype=torch.int64).numpy()
    tokens += [exchange_triton.run(channel, words[rank]).tolist() for words in steps[1:]]
    return tokens, block._status.tolist()


def test_a_rank_that_comes_too_late_fails_too():
    (first, first_status), (second, second_status) = run_ranks(
        _run_with_a_rank_that_comes_too_late, 2, _shared_blocks(2)
    )
    assert first == [[-1] * CAPACITY] * 4
    assert first_status == [2, 1]
    # Its peer's words of the first exchange were there; of later ones none came.
    assert second == [_expected(_words(2, [CAPACITY])).tolist()] + [[-1] * CAPACITY] * 3
    assert second_status == [1, 2]


def test_calls_that_do_not_fit_are_refused():
    channel = _block(_shared_blocks(1), 0).carve(CAPACITY)
    with pytest.raises(ValueError, match="17 words are more than the channel's capacity of 16"):
        exchange_triton.run(channel, torch.zeros(17, dtype=torch.int64))


def test_a_rank_without_candidates_loses():
    channel = _block(_shared_blocks(1), 0).carve(CAPACITY)
    scores = torch.tensor([-torch.inf, torch.nan, torch.inf, -0.0])
    ids = torch.tensor([3, 0, 2**32 - 1, 7])
    words = exchange.pack(scores, ids)
    assert torch.equal(exchange_triton.run(channel, words), ids)
    assert torch.equal(exchange_triton.run(channel, words), ids)  # the winners given to it are not changed


# --- memory --------------------------------------------------------------------------------------


def _run_memory(rank, world, pool):
    """Streams, growing batches and captured calls, over blocks from a pool that all ranks share."""
    blocks = iter(pool)
    memory = PeerMemory(world, lambda words: _block(next(blocks), rank))
    memory.warm_up()
    small, other = memory.channel(4, stream=0, capturing=False), memory.channel(4, stream=1, capturing=False)
    captured = [memory.channel(8, stream=0, capturing=True) for _ in range(2)]
    large = memory.channel(300, stream=0, capturing=False)
    plan = [(small, 4), (other, 4), (captured[0], 8), (large, 300), (captured[1], 8), (small, 3), (captured[0], 8)]
    steps = _words(world, [batch for _, batch in plan])
    tokens = [exchange_triton.run(channel, words[rank]) for (channel, _), words in zip(plan, steps, strict=True)]
    again = memory.channel(200, stream=0, capturing=False)
    return torch.cat(tokens), len(memory.blocks), again == large, [channel.capacity for channel, _ in plan]


def test_channels_of_streams_graphs_and_growing_batches():
    world = 2
    pool = [
        [torch.zeros(peers.BLOCK_WORDS // 128, dtype=torch.int64).share_memory_() for _ in range(world)]
        for _ in range(3)
    ]
    for tokens, blocks, kept, capacities in run_ranks(_run_memory, world, pool):
        assert torch.equal(tokens, _expected(_words(world, [4, 4, 8, 300, 8, 3, 8])))
        assert blocks > 1 and kept
        assert capacities == [256, 256, 8, 512, 8, 256, 8]


def test_memory_takes_what_fits_only():
    memory = PeerMemory(1, lambda words: _block([torch.zeros(words, dtype=torch.int64)], 0))
    assert memory.channel(2, 0, capturing=True) is None  # nothing can be allocated for it now
    memory.warm_up()
    assert len(memory.blocks) == 1
    assert memory.channel(peers.MAX_CAPACITY + 1, 0, capturing=False) is None
    assert memory.channel(peers.MAX_CAPACITY, 0, capturing=False).capacity == peers.MAX_CAPACITY
    while memory.channel(2**14, 0, capturing=True) is not None:
        pass
    blocks = len(memory.blocks)
    assert memory.channel(2, 0, capturing=False).capacity == peers.MAX_CAPACITY
    assert len(memory.blocks) == blocks + 1  # an eager call makes room for the next graph
    assert memory.channel(2**14, 0, capturing=True) is not None


# --- setting up, with the parts that need a GPU replaced ------------------------------------------


@contextlib.contextmanager
def _without_a_gpu(rank: int, blocks: list[torch.Tensor], fail: str):
    """Symmetric memory out of shared tensors; rank 1 fails at the step called `fail`."""
    from torch.distributed import _symmetric_memory as symmetric

    here = fail if rank == 1 else ""

    def empty(*size, dtype, device):
        if here == "allocate":
            raise RuntimeError("no memory\nand a trace")
        return blocks[rank][16:]

    def rendezvous(tensor, group):
        if here == "rendezvous":
            raise RuntimeError("no access")
        # Pointers to the allocations, which start before the tensors.
        return SimpleNamespace(buffer_ptrs=[words.data_ptr() for words in blocks], offset=16 * 8)

    patch = pytest.MonkeyPatch()
    with patch.context() as p:
        p.setattr(symmetric, "empty", empty)
        p.setattr(symmetric, "rendezvous", rendezvous)
        p.setattr(torch.cuda, "synchronize", lambda device=None: None)
        p.setattr(torch.cuda, "set_device", lambda device: None)
        p.setattr(exchange, "_status_words", lambda: torch.zeros(2, dtype=torch.int64))
        p.setattr(exchange, "_obstacle", lambda world: "no Triton" if here == "offer" else "")
        p.setattr(exchange, "_host", lambda: f"host {rank if fail == 'hosts' else 0}")
        p.setattr(exchange, "_device_id", lambda device: f"device {rank}")
        p.setattr(exchange, "_unreachable", lambda device, ids: "no link" if here == "access" else "")
        yield


def _run_connect(rank, world, blocks, fail):
    group = exchange.group(torch.distributed.group.WORLD.group_name)
    device = torch.device("cuda", 0)
    with _without_a_gpu(rank, blocks, fail):
        memory = group._connect(device)
        group._memory[device] = memory
        if memory is None:
            return None, group.describe(device)
        channel = memory.channel(3, 0, capturing=False)
        tokens = [exchange_triton.run(channel, words[rank]) for words in _words(world, [3, 3])]
        timeout = int(channel.block.words[peers.TIMEOUT])
        return torch.cat(tokens), group.describe(device), timeout


def _symmetric_blocks(world: int) -> list[torch.Tensor]:
    return [torch.zeros(1 << 15, dtype=torch.int64).share_memory_() for _ in range(world)]


def test_ranks_connect():
    for tokens, text, timeout in run_ranks(_run_connect, 2, _symmetric_blocks(2), "", group_seconds=20):
        assert torch.equal(tokens, _expected(_words(2, [3, 3])))
        assert text == "2 ranks, 16 bytes a row to each peer's memory, in the same launch"
        assert timeout == 20 * 10**9


@pytest.mark.parametrize("fail", ["offer", "hosts", "access", "allocate", "rendezvous"])
def test_all_ranks_use_the_all_gather_if_one_must(fail):
    for tokens, text in run_ranks(_run_connect, 2, _symmetric_blocks(2), fail):
        assert tokens is None
        assert "one all-gather of 8 bytes a row" in text


def _run_check(rank, world, blocks):
    group = exchange.group(torch.distributed.group.WORLD.group_name)
    exchange.check()
    memory = PeerMemory(world, lambda words: _block(blocks, rank))
    memory.warm_up()
    group._memory[torch.device("cuda", 0)] = memory
    exchange.check()
    memory.blocks[0]._status_view[:] = (2, 77)
    return _message(exchange.check)


def test_check_raises_what_a_kernel_reported():
    (message,) = run_ranks(_run_check, 1, _shared_blocks(1))
    assert "rank 1 did not send its winners" in message and "exchange 77" in message


# --- in the launch of the fused kernel -------------------------------------------------------------


def _run_kernel(rank, world, blocks, vocab, capacity):
    """The kernel's own exchange, and its winners as words."""
    hidden, weight, mask = _kernel_case(vocab)
    start = min(rank * capacity, vocab)
    mine = weight[start : start + capacity]
    operands = [mask[:, start : start + capacity]]
    channel = _block(blocks, rank).carve(CAPACITY)
    args = (hidden, mine, torch.tensor(5), operands, _MASKED)
    tokens = [gemm_sample.sample(*args, 2, start, exchange=channel) for _ in range(2)]
    tokens.append(gemm_sample.argmax(hidden, mine, operands, _MASKED, start, exchange=channel))
    return tokens, gemm_sample.sample(*args, 2, start, exchange="words")


_MASKED = "x0 = where(a0, -inf, acc)"


def _kernel_case(vocab: int):
    g = torch.Generator().manual_seed(vocab)
    hidden, weight = torch.randn(3, 16, generator=g), torch.randn(vocab, 16, generator=g)
    return hidden, weight, torch.rand(3, vocab, generator=g) < 0.3


@pytest.mark.parametrize(("vocab", "capacity"), [(500, 256), (100, 50), (257, 256)])
def test_the_fused_kernel_exchanges_in_its_launch(vocab, capacity):
    results = run_ranks(_run_kernel, 2, _shared_blocks(2), vocab, capacity)
    hidden, weight, mask = _kernel_case(vocab)
    words = torch.stack([words for _, words in results])
    for (first, second, greedy), _ in results:
        assert torch.equal(first, exchange.unpack(words.amax(0)))
        assert torch.equal(second, first)
        assert torch.equal(greedy, reference.argmax(hidden, weight, [mask], _MASKED))
        if capacity % GROUP == 0:
            assert torch.equal(first, reference.sample(hidden, weight, torch.tensor(5), [mask], _MASKED, 2))
