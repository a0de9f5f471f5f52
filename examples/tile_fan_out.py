"""What sharded sampling costs if every tile's candidate is sent to every rank, and reduced there. For benchmark_tp.py.

An emulation of the published kernel's exchange: the local kernel is ours, whose winner of a row stands in for the
candidates of all of the row's tiles. What follows it is as published: 12 bytes a row and tile (a word and the tile's
number) are stored to each peer, all ranks meet at a barrier, and a last kernel takes each row's largest word.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed it


def tile_fan_out(
    rank: int, world: int, hidden, shard, seed, rest: tuple, vocab: int, capacity: int
) -> Callable[[], torch.Tensor]:
    """A call that draws one token a row; int64 [B, 1].

    hidden [B, D]; shard [<= capacity, D], this rank's rows of the weight; rest: operands, program and draws, as for
    `flashsampling.sample`. On CPUs the words travel in one all-gather, without the tiles' numbers.
    """
    from fs_inductor.kernels import exchange, reference

    start, rows = min(rank * capacity, vocab), hidden.shape[0]
    if not hidden.is_cuda:
        tiles = -(-capacity // 128)
        everyone = torch.empty(world * tiles, rows, dtype=torch.int64)

        def call() -> torch.Tensor:
            mine = torch.full((rows, 1), exchange.NOTHING)
            if len(shard):
                mine = exchange.pack(*reference.winners(hidden, shard, seed, *rest, start))
            _gather(everyone, mine.t().expand(tiles, -1).contiguous())
            return exchange.unpack(everyone.amax(0))[:, None]

        return call

    from torch.distributed import _symmetric_memory

    from fs_inductor.kernels import autotune, gemm_sample

    tiles = -(-capacity // autotune.pick(gemm_sample.case_of(hidden, shard, [], simple=True)).block_v)
    send, largest = _kernels()
    # Two boxes in turn: a fast rank's next words must not overwrite what a slow one still reads.
    boxes = [_symmetric_memory.empty(2, world, tiles, rows, dtype=torch.int64, device=hidden.device) for _ in range(2)]
    meetings = [_symmetric_memory.rendezvous(box, dist.group.WORLD.group_name) for box in boxes]
    turns = [
        (box, meeting, torch.tensor([at + meeting.offset for at in meeting.buffer_ptrs], device=hidden.device))
        for box, meeting in zip(boxes, meetings, strict=True)
    ]
    nothing = torch.full((rows, 1), exchange.NOTHING, device=hidden.device)

    def call() -> torch.Tensor:
        turns.reverse()
        box, meeting, addresses = turns[0]
        mine = gemm_sample.sample(hidden, shard, seed, *rest, start, exchange="words") if len(shard) else nothing
        send[(tiles,)](mine, addresses, rank, rows, tiles, WORLD=world)
        meeting.barrier()
        tokens = torch.empty(rows, 1, dtype=torch.int64, device=hidden.device)
        largest[(rows,)](box, tokens, rows, world * tiles)
        return tokens

    call()
    return call


def _kernels():
    # Here, so that the CPU needs no Triton.
    import triton
    import triton.language as tl

    @triton.jit
    def send(mine, addresses, rank, rows, tiles, WORLD: tl.constexpr):
        tile = tl.program_id(0)
        for first in range(0, rows, 128):
            row = first + tl.arange(0, 128)
            word = tl.load(mine + row, mask=row < rows, other=0)
            for peer in tl.static_range(WORLD):
                box = tl.load(addresses + peer).to(tl.pointer_type(tl.int64))
                slot = (rank * tiles + tile) * rows + row
                tl.store(box + slot, word, mask=row < rows)
                numbers = (box + WORLD * tiles * rows).to(tl.pointer_type(tl.int32))
                tl.store(numbers + slot, tile + tl.zeros_like(row), mask=row < rows)

    @triton.jit
    def largest(box, tokens, rows, count):
        row = tl.program_id(0)
        best = tl.full((256,), -(2**63), tl.int64)
        for first in range(0, count, 256):
            at = first + tl.arange(0, 256)
            word = tl.load(box + at.to(tl.int64) * rows + row, mask=at < count, other=-(2**63))
            best = tl.maximum(best, word)
        tl.store(tokens + row, 0xFFFFFFFF - (tl.max(best, 0) & 0xFFFFFFFF))

    return send, largest
