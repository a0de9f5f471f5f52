"""Memory in which the ranks of one node write to each other: its layout, and which part of it a call may use.

A block is one allocation that every rank makes alike, at a time when all of them are at the same place. Calls get
channels, carved from it without any communication, in the order of the calls, so that all ranks carve alike.
What the words mean, and why no barrier is needed, is in `exchange_triton.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# The header of a block, in int64 words. Only the rank that owns the block reads or writes it.
FAILED = 0  # 1 + the rank that did not answer, once one has not
RANK = 1
WORLD = 2
TIMEOUT = 3  # nanoseconds
STATUS = 4  # address of the two words of host memory that say FAILED and the epoch of it
PEERS = 5  # the address of every rank's block

MAX_WORLD = 64
HEADER_WORDS = 80

# A channel: its epoch, then slots [2 (parity of the epoch), world (sender), capacity, 2 (score, id)].
CHANNEL_HEADER_WORDS = 16

BLOCK_WORDS = 1 << 20  # 8 MiB: with eight ranks, 128 captured calls at batch 256, or 2,000 at batch 16
STREAM_CAPACITY = 256  # the least an eager channel is made for, so that growing batches do not each take a new one
MAX_CAPACITY = 1 << 16  # tokens of one call; more go another way


NOTHING = -(2**63)
"""The word of a rank that has no candidate for a row: below every other."""


class ExchangeError(RuntimeError):
    """Ranks of a sharded vocabulary do not answer each other, or did not compile the same thing."""


class Block:
    """One rank's block, and where its peers' are.

    words: int64, zero everywhere before any peer can reach it. addresses: of every rank's words, as this rank sees
    them. timeout: seconds a kernel waits for its peers. status: int64 [2], zero, host memory the device can write.
    """

    def __init__(self, words: Tensor, rank: int, addresses: Sequence[int], timeout: float, status: Tensor):
        self.words, self.rank, self.world = words, rank, len(addresses)
        self.address = words.data_ptr()
        self.timeout = timeout
        self.used = HEADER_WORDS
        self.keep_alive: object = None
        self._status = status
        self._status_view = status.numpy()  # reading it must not cost a launch a microsecond
        header = [0, rank, self.world, int(timeout * 1e9), status.data_ptr(), *addresses]
        words[: len(header)].copy_(torch.tensor(header, dtype=torch.int64))

    @property
    def room(self) -> int:
        return self.words.numel() - self.used

    def carve(self, capacity: int) -> Channel | None:
        """A channel for up to `capacity` tokens a call, or None if there is no room left."""
        count = channel_words(self.world, capacity)
        if count > self.room:
            return None
        channel = Channel(self, self.used, capacity)
        self.used += count
        return channel

    def raise_if_failed(self) -> None:
        """Raises ExchangeError if a kernel gave up waiting. Sees what launches that have finished reported."""
        silent, epoch = self._status_view.tolist()
        if silent:
            raise ExchangeError(
                f"rank {silent - 1} did not send its winners within {self.timeout:g} s (exchange {epoch} of its "
                f"channel, seen by rank {self.rank}). Tokens drawn since then are -1, and this process can exchange no "
                "more: restart all ranks. Did that rank stop, or run something else?"
            )


@dataclass(frozen=True)
class Channel:
    """Slots for one stream's, or one captured call's, exchanges: the words of `block` from `offset` on."""

    block: Block
    offset: int
    capacity: int


def channel_words(world: int, capacity: int) -> int:
    """The int64 words of a channel: whole 128-byte lines, so that neighbours do not share one."""
    return -(-(CHANNEL_HEADER_WORDS + 4 * world * capacity) // 16) * 16


@dataclass
class PeerMemory:
    """The blocks and channels of one group on one device.

    allocate(words) makes a block of at least that many words. It is called by all ranks at the same place: what is
    decided here depends only on the order of the calls, their sizes, and whether they are being captured.
    """

    world: int
    allocate: Callable[[int], Block]
    blocks: list[Block] = field(default_factory=list)  # all kept: captured graphs hold bare pointers into them
    _by_stream: dict[int, Channel] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def channel(self, count: int, stream: int, capturing: bool) -> Channel | None:
        """The channel for a call that exchanges `count` tokens, or None if it has to go another way.

        Eager calls of a stream run one after the other and share a channel. Graphs captured on one stream may replay
        side by side, so a captured call has its own; nothing is allocated for it. Raises ExchangeError if a peer
        has failed to answer before.
        """
        with self._lock:
            self.raise_if_failed()
            if count > MAX_CAPACITY:
                return None
            if capturing:
                return self.blocks[-1].carve(count) if self.blocks else None
            channel = self._by_stream.get(stream)
            if channel is None or channel.capacity < count:
                capacity = max(STREAM_CAPACITY, 1 << (count - 1).bit_length())
                channel = self._by_stream[stream] = self._carve(capacity)
            elif self.blocks[-1].room < BLOCK_WORDS // 4:
                self._grow(0)  # what is left would soon be too little for a graph
            return channel

    def warm_up(self) -> None:
        """Allocate the first block, so that eager calls and captured ones find room."""
        with self._lock:
            self._grow(STREAM_CAPACITY)

    def raise_if_failed(self) -> None:
        for block in self.blocks:
            block.raise_if_failed()

    def _carve(self, capacity: int) -> Channel:
        channel = self.blocks[-1].carve(capacity) if self.blocks else None
        if channel is None:
            self._grow(capacity)
            channel = self.blocks[-1].carve(capacity)
        return channel

    def _grow(self, capacity: int) -> None:
        self.blocks.append(self.allocate(max(BLOCK_WORDS, HEADER_WORDS + channel_words(self.world, capacity))))
