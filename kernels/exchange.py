"""How the ranks that share a vocabulary agree on one winner a row: the host's side.

Each rank has a winner a row: a score and an id. As one 64-bit word, whose order is first the score's and then that of
lower ids, the row's token is the largest word of all ranks. Words travel either through each other's memory, in the
launch that found them (`exchange_triton.py`), or in one all-gather. Which of the two is chosen once per group, by all
ranks together, and said in the log.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from .peers import MAX_WORLD, NOTHING, Block, Channel, ExchangeError, PeerMemory
from .scratch import outside_pools

__all__ = ["NOTHING", "Channel", "ExchangeError", "Group", "check", "describe", "group", "pack", "unpack"]

log = logging.getLogger(__name__)

_MASK = 0xFFFFFFFF

# torch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def pack(score: Tensor, ids: Tensor) -> Tensor:
    """Words for winners: score f32 and ids int64 in [0, 2**32), one shape; int64, whose order is the winners'.

    Among equal scores the lower id is the larger word. -0.0 equals 0.0, and every NaN is above +inf.
    """
    bits = (score + 0.0).view(torch.int32)  # adding turns -0.0 into 0.0
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    # NaNs differ in sign and payload from machine to machine.
    key = torch.where(score.isnan(), 0x7FFFFFFF, key)
    return key.to(torch.int64) * 2**32 + (_MASK - ids)


def unpack(words: Tensor) -> Tensor:
    """The ids of `pack`'s words."""
    return _MASK - (words & _MASK)


class Group:
    """One process group, as the exchange sees it. Made by `group`."""

    def __init__(self, process_group: dist.ProcessGroup):
        self.process_group = process_group
        self.name = process_group.group_name
        self.rank = process_group.rank()
        self.world = process_group.size()
        self._sites: set[tuple] = set()
        self._memory: dict[torch.device, PeerMemory | None] = {}
        self._incarnation = 0
        self._meetings = 0
        self._said = False
        self._lock = threading.RLock()
        self._alone = self.world == 1 or dist.get_backend(process_group) == "fake"

    def agree(self, site: tuple, batch: int) -> None:
        """Make sure that all ranks are about to run the same sampling step. Free after a site's first call.

        site: plain values that describe it. batch: rows of this call. Raises ExchangeError, on every rank, if the
        ranks' differ.
        """
        if site in self._sites:
            return
        with self._lock:
            if not self._alone:
                # The number of sites is compared too: a rank with one site more is found at the next new one.
                mine = f"site {len(self._sites) + 1}: {', '.join(str(part) for part in site)}, {batch} rows"
                texts = self._gather("site", mine)
                if len(set(texts)) > 1:
                    listing = "\n".join(f"  rank {rank}, {text}" for rank, text in enumerate(texts))
                    raise ExchangeError(
                        f"the ranks of process group {self.name!r} are about to run different sampling steps:\n"
                        f"{listing}\nAll ranks must compile the same code for the same vocabulary, and call it with "
                        "the same number of rows."
                    )
            self._sites.add(site)

    def best(self, words: Tensor) -> Tensor:
        """The largest of all ranks' words, elementwise, by one all-gather. int64, any shape."""
        if self.world == 1:
            return words
        if not self._said:
            self._said = True
            log.info("process group %r exchanges winners by all-gather on %s", self.name, words.device)
        # Without a backend for GPUs, words go over the CPU, which any group can gather on.
        mine = words.reshape(-1).cpu() if self._gathers_on_cpu(words.device) else words.reshape(-1)
        everyone = mine.new_empty(self.world * mine.numel())
        try:
            _all_gather(everyone, mine, group=self.process_group)
        except RuntimeError as error:
            raise ExchangeError(
                f"the ranks of process group {self.name!r} could not exchange their winners; did one stop? ({error})"
            ) from error
        return everyone.view(self.world, -1).amax(0).view(words.shape).to(words.device)

    def _gathers_on_cpu(self, device: torch.device) -> bool:
        try:
            return self.process_group._get_backend(device).name() == "gloo"
        except RuntimeError:
            return True

    def channel(self, device: torch.device, count: int) -> Channel | None:
        """Where a launch on the current stream exchanges `count` tokens; None: use `best` instead.

        The first call is where ranks set up their memory, together. Raises ExchangeError if a peer is lost.
        """
        if device.type != "cuda" or self._alone:
            return None
        capturing = torch.cuda.is_current_stream_capturing()
        with self._lock:
            if device not in self._memory:
                if capturing:
                    raise ExchangeError(
                        f"the first exchange of process group {self.name!r} is being captured in a CUDA graph, where "
                        "ranks cannot set up their memory: run the step once before capturing it"
                    )
                self._memory[device] = self._connect(device)
            memory = self._memory[device]
        if memory is None:
            return None
        channel = memory.channel(count, torch.cuda.current_stream(device).cuda_stream, capturing)
        if channel is None:
            log.warning("an exchange of %d tokens a call goes by all-gather: it does not fit the peers' memory", count)
        return channel

    def describe(self, device: torch.device) -> str:
        """How winners travel, in words: for reports. Says so if that is not settled yet."""
        if self._alone or device.type != "cuda":
            return f"{self.world} ranks, one all-gather of 8 bytes a row"
        if device not in self._memory:
            return f"{self.world} ranks, through peers' memory if all of them reach it (settled at the first call)"
        if self._memory[device] is None:
            return f"{self.world} ranks, one all-gather of 8 bytes a row (peers' memory cannot be had)"
        return f"{self.world} ranks, 16 bytes a row to each peer's memory, in the same launch"

    def raise_if_failed(self) -> None:
        for memory in self._memory.values():
            if memory is not None:
                memory.raise_if_failed()

    # -- setting up ----------------------------------------------------------------------------------------------------

    @property
    def timeout(self) -> timedelta:
        """How long the process group waits for a peer."""
        try:
            device = self.process_group._device_types[0]
            return self.process_group._get_backend(device).options._timeout
        except (AttributeError, IndexError, RuntimeError):
            return distributed_c10d.default_pg_timeout

    def _gather(self, topic: str, mine: object) -> list:
        """What each rank passed, in the order of ranks.

        Goes through the group's key-value store: that works with every backend, and while a graph is captured.
        """
        store = distributed_c10d._get_process_group_store(self.process_group)
        if not self._incarnation:
            # Under torchrun the store outlives the group: what an earlier one of this name left there is not ours.
            self._incarnation = store.add(f"flashsampling/{self.name}/{self.rank}", 1)
        prefix = f"flashsampling/{self.name}/{self._incarnation}/{self._meetings}/"
        self._meetings += 1
        # Pairs, because a rank that is at another topic must be found out, not waited for.
        store.set(prefix + str(self.rank), json.dumps([topic, mine]))
        everyone = []
        for rank in range(self.world):
            try:
                store.wait([prefix + str(rank)], self.timeout)
                everyone.append(json.loads(store.get(prefix + str(rank))))
            except RuntimeError as error:
                raise ExchangeError(
                    f"rank {rank} of process group {self.name!r} did not come to the exchange within "
                    f"{self.timeout.total_seconds():g} s: rank {self.rank} waits for it at {topic!r} ({mine})"
                ) from error
        if any(other != topic for other, _ in everyone):
            raise ExchangeError(
                f"the ranks of process group {self.name!r} are at different places: "
                f"{', '.join(f'rank {rank} at {other!r}' for rank, (other, _) in enumerate(everyone))}"
            )
        return [value for _, value in everyone]

    def _connect(self, device: torch.device) -> PeerMemory | None:
        """Try to reach the peers' memory; None if any rank cannot. All ranks decide alike."""
        offers = self._gather("offer", [_obstacle(self.world), _host(), _device_id(device)])
        reasons = [obstacle for obstacle, _, _ in offers]
        hosts = {host for _, host, _ in offers}
        if len(hosts) > 1:
            reasons.append(f"its ranks are on {len(hosts)} hosts")
        memory = None
        if not any(reasons):
            memory = PeerMemory(self.world, lambda words: outside_pools(lambda: self._allocate(device, words)))
            try:
                self._vote("access", _unreachable(device, {peer for _, _, peer in offers}))
                memory.warm_up()
            except _Unreachable as error:
                memory, reasons = None, [str(error)]
        reason = next((reason for reason in reasons if reason), None)
        if memory is None:
            log.warning("process group %r exchanges winners by all-gather on %s: %s", self.name, device, reason)
        else:
            log.info("process group %r exchanges winners through peers' memory on %s", self.name, device)
        return memory

    def _allocate(self, device: torch.device, words: int) -> Block:
        """A block that all ranks of the group can write to. After each step that may fail, the ranks compare notes."""
        from torch.distributed import _symmetric_memory

        torch.cuda.set_device(device)  # of this thread
        reason, block = "", None
        try:
            tensor = _symmetric_memory.empty(words, dtype=torch.int64, device=device).zero_()
            status = _status_words()
            torch.cuda.synchronize(device)  # zero before a peer can write
        except RuntimeError as error:
            reason = f"rank {self.rank} cannot allocate symmetric memory: {_first_line(error)}"
        self._vote("allocate", reason)
        try:
            handle = _symmetric_memory.rendezvous(tensor, self.name)
            # Pointers are to the allocation, of which our tensor may be a part.
            addresses = [pointer + handle.offset for pointer in handle.buffer_ptrs]
            block = Block(tensor, self.rank, addresses, self.timeout.total_seconds(), status)
            block.keep_alive = handle
            torch.cuda.synchronize(device)  # the header is there for every stream
        except RuntimeError as error:
            reason = f"rank {self.rank} cannot map its peers' memory: {_first_line(error)}"
        self._vote("rendezvous", reason)
        return block

    def _vote(self, topic: str, reason: str) -> None:
        failures = [text for text in self._gather(topic, reason) if text]
        if failures:
            raise _Unreachable(failures[0])


class _Unreachable(ExchangeError):
    """Symmetric memory cannot be had; raised by all ranks alike."""


def _status_words() -> Tensor:
    """What a kernel that gives up writes to: the device reaches it, and the host reads it without a synchronisation."""
    return torch.zeros(2, dtype=torch.int64, pin_memory=True)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _obstacle(world: int) -> str:
    """Why this rank cannot take part in an exchange through memory; empty if nothing is known to be in the way."""
    if torch.version.hip:
        return "the exchange through memory is written for CUDA"
    if world > MAX_WORLD:
        return f"{world} ranks are more than {MAX_WORLD}"
    try:
        import triton  # noqa: F401
        from torch.distributed import _symmetric_memory  # noqa: F401
    except ImportError as error:
        return str(error)
    return ""


def _device_id(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _unreachable(device: torch.device, peers: set[str]) -> str:
    """Which of the peers' devices, of those this process sees, `device` cannot address; empty if none."""
    mine = device.index if device.index is not None else torch.cuda.current_device()
    for other in range(torch.cuda.device_count()):
        if other != mine and _device_id(torch.device("cuda", other)) in peers:
            if not torch.cuda.can_device_access_peer(mine, other):
                return f"device {mine} cannot reach the memory of device {other}"
    return ""


def _host() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return os.uname().nodename


_groups: dict[str, Group] = {}
_groups_lock = threading.Lock()


def group(name: str) -> Group:
    """The process group of that name, with what the exchange knows of it.

    Raises ExchangeError if there is no such group in this process.
    """
    try:
        process_group = distributed_c10d._resolve_process_group(name)
    except (RuntimeError, ValueError, KeyError) as error:
        raise ExchangeError(
            f"there is no process group {name!r} here: call torch.distributed.init_process_group first, and run the "
            "compiled step in the processes, and with the device mesh, that it was compiled for"
        ) from error
    with _groups_lock:
        known = _groups.get(name)
        if known is None or known.process_group is not process_group:
            known = _groups[name] = Group(process_group)
        return known


def describe(name: str, device: torch.device) -> str:
    """How winners travel between the ranks of that process group, in words: for reports. See `Group.describe`."""
    return group(name).describe(device)


def check(groups: Sequence[Group] | None = None) -> None:
    """Raise ExchangeError if an exchange of this process has failed: a rank did not answer in time.

    A kernel cannot raise. Eager calls check before they launch; CUDA graphs replay without any call, so a loop of
    replays should call this now and then. It does not synchronise: it sees the launches that have finished.
    """
    for one in list(_groups.values()) if groups is None else groups:
        one.raise_if_failed()
