"""How ranks agree on one winner a row through each other's memory: the device's side.

Each rank of the group has a block of memory that all others can write (`peers.py`). For every exchange, each rank
sends two words a row to every rank, itself included:

    (epoch << 32) | key of its best score        (epoch << 32) | inverted id of its best candidate

then watches its own slots until both words of every sender carry the current epoch, and keeps the largest. The epoch
counts the exchanges of a channel, modulo 2**32; slots are doubled, and an exchange uses those of its epoch's parity.

Why that is enough, without flags, fences or barriers:

- What is read is what was sent. A word is written and read whole, and it says which exchange it belongs to, so no
  order between two words matters: neither that of a row's score and id, nor that of different rows.
- Nothing is overwritten before it was read. A rank writes for epoch e + 2 into the slots of epoch e. By then it has
  finished e + 1, so it has seen every peer's words of e + 1, which a peer sends only after it has finished e: its last
  read of those slots decided that it could go on.
- Nothing old is taken for new. The word in a slot is of an earlier exchange of the same parity; it could pass for the
  current one only after 2**32 exchanges that left the slot alone, as when a batch shrinks for days. So every 2**31
  exchanges two in a row, one of each parity, send all slots, used or not. Memory starts as zeros, epochs at 1.
- A slot has one writer, whose launches are ordered by their stream, or by the graph they are part of.

All accesses to slots are relaxed and of system scope: for reading volatile loads, which PTX defines to be relaxed loads
of system scope, and for writing relaxed stores, both words of a row at once: a vector is as many single accesses, in no
order. A plain store here would be a data race. (Atomic exchanges would do too, but travel one by one, and answer.)
"""

from __future__ import annotations

import time

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from . import peers

_FAILED = tl.constexpr(peers.FAILED)
_RANK = tl.constexpr(peers.RANK)
_WORLD = tl.constexpr(peers.WORLD)
_TIMEOUT = tl.constexpr(peers.TIMEOUT)
_STATUS = tl.constexpr(peers.STATUS)
_PEERS = tl.constexpr(peers.PEERS)
_CHANNEL_HEADER = tl.constexpr(peers.CHANNEL_HEADER_WORDS)
_LOW = tl.constexpr(0xFFFFFFFF)

# Elements of [ranks, rows] handled at a time. At least the threads of a program: were an element held by two threads,
# they could look at its slot at different times and disagree on whether to go on waiting.
_ELEMENTS = tl.constexpr(1024)

if triton.knobs.runtime.interpret:

    def _now():
        """Nanoseconds. Sleeps: with an interpreter, ranks share cores with those they wait for."""
        time.sleep(2e-4)
        return time.monotonic_ns()

    @triton.jit
    def _send(slots, score, index, mask):
        """Store the words of winners in slots, addresses of two words each."""
        slots = slots.to(tl.pointer_type(tl.uint64))
        tl.atomic_xchg(slots, score, mask=mask, sem="relaxed", scope="sys")
        tl.atomic_xchg(slots + 1, index, mask=mask, sem="relaxed", scope="sys")

else:

    @triton.jit
    def _now():
        """Nanoseconds, of a clock that all multiprocessors share."""
        return globaltimer()

    @triton.jit
    def _send(slots, score, index, mask):
        """Store the words of winners in slots, addresses of two words each."""
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $4, 0; mov.b32 $0, 0; @p st.relaxed.sys.global.v2.b64 [$1], {$2, $3}; }",
            "=r,l,l,l,r",
            [slots, score, index, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _look(slots, mask, stamp, deadline):
    """What is in slots [W, R] now.

    Returns the winners, uint64 as in `gemm_sample`; where they are not those of the stamp's epoch; and whether it is
    worth looking again.
    """
    score = tl.load(slots, mask=mask, other=0, volatile=True)
    index = tl.load(slots + 1, mask=mask, other=0, volatile=True)
    late = mask & ((((score ^ stamp) | (index ^ stamp)) >> 32) != 0)
    # Each element's thread reads the clock for itself; only the reduction is the same for all of them.
    again = tl.max((late & (_now() < deadline)).to(tl.int32), axis=None) != 0
    return (score << 32) | (index & _LOW), late, again


@triton.jit
def exchange_winners(best, out, count, block, channel, capacity, WORLD: tl.constexpr):
    """Exchange `count` winners and store the tokens agreed on; -1, and a note to the host, if a rank stays silent.

    One program of a launch runs this. best: uint64 [count], the winners; left zero. out: int64 [count].
    block: address of this rank's block. channel: the channel's offset in words. capacity: its slots, at least `count`.
    WORLD: the number of ranks, rounded up to a power of two.
    """
    ROWS: tl.constexpr = _ELEMENTS // WORLD
    block = block.to(tl.pointer_type(tl.int64))
    rank = tl.load(block + _RANK)
    world = tl.load(block + _WORLD)
    working = tl.load(block + _FAILED) == 0
    epoch = (tl.load(block + channel) + 1) & _LOW
    stamp = epoch.to(tl.uint64) << 32
    ranks = tl.arange(0, WORLD)
    peer_slots = tl.load(block + _PEERS + ranks, mask=ranks < world, other=0) + 8 * (channel + _CHANNEL_HEADER)
    my_slots = tl.load(block + _PEERS + rank) + 8 * (channel + _CHANNEL_HEADER)
    first = (epoch & 1) * world  # of this parity's senders

    # A rank that has failed sends no more: its peers shall fail too, not go on with what it draws from its -1s.
    receivers = tl.where(working, world, 0)
    to_send = count.to(tl.int64)
    if (epoch & 0x7FFFFFFE) == 0x7FFFFFFE:
        to_send = capacity.to(tl.int64)
    for start in range(0, to_send, ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        word = tl.load(best + rows, mask=rows < count, other=0, volatile=True)
        slots = peer_slots[:, None] + 16 * ((first + rank) * capacity + rows)[None, :]
        mask = (ranks < receivers)[:, None] & (rows < to_send)[None, :]
        _send(slots, (stamp | (word >> 32))[None, :], (stamp | (word & _LOW))[None, :], mask)

    tl.debug_barrier()  # all threads have read their winners, which are zeroed below
    deadline = _now() + tl.where(working, tl.load(block + _TIMEOUT), 0)
    silent = WORLD
    for start in range(0, count, ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        slots = my_slots + 16 * ((first + ranks)[:, None] * capacity + rows[None, :])
        slots = slots.to(tl.pointer_type(tl.uint64))
        mask = (ranks < world)[:, None] & (rows < count)[None, :]
        word, late, again = _look(slots, mask, stamp, deadline)
        while again:
            word, late, again = _look(slots, mask, stamp, deadline)
        missing = tl.min(tl.where(late, ranks[:, None], WORLD), 0)  # the first silent rank of each row
        silent = tl.minimum(silent, tl.min(missing, 0))
        token = ((tl.max(word, 0) & _LOW) ^ _LOW).to(tl.int64)
        tl.store(out + rows, tl.where(missing < WORLD, -1, token), mask=rows < count)
        tl.store(best + rows, stamp & 0, mask=rows < count)

    tl.debug_barrier()  # all threads have read the header
    if silent == WORLD:
        tl.store(block + channel, epoch)
    elif working:
        tl.store(block + _FAILED, silent.to(tl.int64) + 1)
        status = tl.load(block + _STATUS).to(tl.pointer_type(tl.int64))
        tl.store(status + 1, epoch)
        tl.store(status, silent.to(tl.int64) + 1)


@triton.jit(do_not_specialize=["count", "block", "channel", "capacity"])
def exchange_kernel(best, out, count, block, channel, capacity, WORLD: tl.constexpr):
    """`exchange_winners` in a launch of its own. best: int64 [count], whose bits are the winners'."""
    best = best.to(tl.pointer_type(tl.uint64), bitcast=True)
    exchange_winners(best, out, count, block, channel, capacity, WORLD)


def world_block(channel: peers.Channel) -> int:
    """WORLD for a launch that uses the channel."""
    return triton.next_power_of_2(channel.block.world)


def run(channel: peers.Channel, words: Tensor) -> Tensor:
    """The tokens of all ranks' largest words, as one launch: for words that no kernel of ours found.

    words: int64 [N], contiguous, as from `exchange.pack`. Returns int64 [N]; -1 where a rank stayed silent.
    Raises ExchangeError if that has happened before, and ValueError if N is more than the channel's capacity.
    """
    channel.block.raise_if_failed()
    count = words.numel()
    if count > channel.capacity:
        raise ValueError(f"{count} words are more than the channel's capacity of {channel.capacity}")
    out = torch.empty_like(words)
    if count:  # an empty batch leaves the epoch alone
        best = words ^ peers.NOTHING  # the device compares without a sign
        exchange_kernel[(1,)](
            best, out, count, channel.block.address, channel.offset, channel.capacity, WORLD=world_block(channel)
        )
    return out
