"""The zeroed words in which a launch keeps its winners: who may use which, and when.

A launch leaves its words zero, so launches of one stream can share them: they run one after the other. Graphs
captured on one stream may replay side by side, so every captured call has words of its own. All of them are carved
from one block per device that is allocated neither under capture nor inside a CUDA-graph pool, whose memory is
handed to other tensors between replays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

BLOCK_WORDS = 1 << 16  # 512 KiB: some 250 captured calls at batch 256
_STREAM_WORDS = 1 << 10  # the least a stream is given, so that growing batches do not each take new words


@dataclass
class _Device:
    blocks: list[Tensor] = field(default_factory=list)  # all kept: captured graphs hold bare pointers into them
    used: int = 0  # words of the last block
    by_stream: dict[int, Tensor] = field(default_factory=dict)

    @property
    def room(self) -> int:
        return self.blocks[-1].numel() - self.used if self.blocks else 0

    def carve(self, count: int) -> Tensor | None:
        count = -(-count // 16) * 16  # whole 128-byte lines: neighbours do not share one
        if count > self.room:
            return None
        words = self.blocks[-1][self.used : self.used + count]
        self.used += count
        return words


_devices: dict[torch.device, _Device] = {}
_lock = threading.Lock()


def reserve(device: torch.device) -> None:
    """Make sure that calls on `device` find zeroed words, and captured ones too. Call it at compile time.

    Does nothing while a CUDA graph is being captured, or while at least half the block is left.
    """
    device = _with_index(device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    with _lock:
        _reserve(_devices.setdefault(device, _Device()), device, BLOCK_WORDS // 2)


def take(device: torch.device, count: int) -> Tensor:
    """`count` or more zero words (int64) for one launch on the current stream, which must leave them zero."""
    device = _with_index(device)
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    with _lock:
        state = _devices.setdefault(device, _Device())
        if capturing:
            words = state.carve(count)
        else:
            words = state.by_stream.get(stream)
            if words is None or words.numel() < count:
                rounded = max(count, _STREAM_WORDS)
                if rounded <= BLOCK_WORDS // 4:
                    _reserve(state, device, rounded)
                    words = state.by_stream[stream] = state.carve(rounded)
                else:
                    words = None
    # Too many for the block, or captured after it ran out: a temporary, at the price of one more launch.
    return torch.zeros(count, dtype=torch.int64, device=device) if words is None else words


def _reserve(state: _Device, device: torch.device, count: int) -> None:
    if state.room >= count:
        return

    def allocate():
        block = torch.zeros(BLOCK_WORDS, dtype=torch.int64, device=device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # zero for every stream from here on
        state.blocks.append(block)
        state.used = 0

    outside_pools(allocate)


def outside_pools(function: Callable[[], T]) -> T:
    """`function()`, whose device memory may outlive a run that Inductor makes inside a CUDA-graph pool.

    Cudagraph trees give a warm-up run a pool, and want back what was allocated there. Pools are routed by thread, so a
    fresh one is outside of them; its current device is the default one.
    """
    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(function).result()


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
