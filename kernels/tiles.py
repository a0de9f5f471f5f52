"""Tile shapes of the fused kernel by architecture, dtype and batch, and what the launcher must know of a device."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from .rng import GROUP


@dataclass(frozen=True)
class Tile:
    """One specialisation of the kernel.

    A program multiplies [block_b, block_d] by [block_v, block_d] at a time. `flatten` fuses the loop over tiles with
    the one over D, so that the loads of the next tile start before the epilogue of this one. `stagger`: nanoseconds by
    which every second program starts late, so that not all of them are at their epilogues, and load nothing, at a time.
    `pingpong` asks for the kernel of `pingpong.py`: two groups of num_warps take turns, each with tiles of its own.
    """

    block_b: int
    block_v: int
    block_d: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    flatten: bool = True
    use_tma: bool = True
    stagger: int = 0
    pingpong: bool = False

    def __post_init__(self):
        if self.pingpong and (self.block_b, self.block_v, self.num_warps) != (128, 128, 8):
            raise ValueError(f"tiles of two groups that take turns are 128 by 128, by eight warps each, not {self}")
        if self.pingpong and not self.use_tma:
            raise ValueError(f"two groups that take turns are fed by the copy engine, and want use_tma, not {self}")
        if self.pingpong and (self.num_stages < 3 or self.block_d > 64):  # fewer would have no room, and deadlock
            raise ValueError(f"two groups that take turns need three stages or more, of 64 deep at most, not {self}")
        if self.block_v % GROUP:
            raise ValueError(f"block_v must be a multiple of the group size {GROUP}, not {self.block_v}")


class Case(NamedTuple):
    """What a tile is chosen by: a product of [batch, hidden] with [vocab, hidden] on `arch` (as in DeviceInfo).

    late: whether the epilogue reads an operand of [batch, vocab] that is not booleans by fours.
    tf32: whether float32 products may use it.
    turns: whether this is a call for two groups that take turns, as `gemm_sample.case_of` knows.
    """

    arch: str
    dtype: torch.dtype
    batch: int
    vocab: int
    hidden: int
    late: bool = False
    tf32: bool = False
    turns: bool = False


@dataclass(frozen=True)
class DeviceInfo:
    """arch: "sm_90", "gfx942", …, or "cpu" for the interpreter."""

    arch: str
    num_sms: int
    has_tma: bool
    warp_size: int = 32


@functools.lru_cache
def device_info(device: torch.device) -> DeviceInfo:
    if device.type != "cuda":
        return DeviceInfo("cpu", 2, True)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        arch = properties.gcnArchName.split(":")[0]
        return DeviceInfo(arch, properties.multi_processor_count, False, properties.warp_size)
    arch = f"sm_{properties.major}{properties.minor}"
    return DeviceInfo(arch, properties.multi_processor_count, properties.major >= 9)


TURNS = Tile(128, 128, 64, num_warps=8, num_stages=6, pingpong=True)
# What a call gets that TURNS is not for: several draws, say, or a weight that the copy engine cannot read.
SQUARE = Tile(128, 128, 64, num_warps=8, num_stages=6)
WIDE = Tile(128, 256, 64, num_warps=8, num_stages=3, flatten=False)
_ONE_GROUP = {128: SQUARE, None: WIDE}
# The last row whose batch limit is not exceeded wins. sm_90, 16-bit: measured on an H200.
# Up to 64 rows two programs share a multiprocessor, and the loads of one fill the other's epilogue. Above, tiles are
# too large for that, and two groups of warps take turns.
_HOPPER_16 = {
    16: Tile(16, 128, 128, num_warps=4, num_stages=3, programs_per_sm=2),
    32: Tile(32, 128, 128, num_warps=4, num_stages=3, programs_per_sm=2),
    64: Tile(64, 128, 64, num_warps=4, num_stages=4, programs_per_sm=2),
    128: TURNS,
    None: TURNS,
}
# At 64 rows and D = 2048 one program with deeper steps is faster. (Shorter products were not measured.)
_HOPPER_16_SHORT = _HOPPER_16 | {64: Tile(64, 128, 128, num_warps=4, num_stages=4, stagger=6000)}
# At 128 rows, long products hide what the wide tile's epilogue costs, and read the hidden states half as often. Memory
# is the limit there: a stage more.
_HOPPER_16_LONG = _HOPPER_16 | {128: replace(WIDE, num_stages=4)}
# With numbers of the logits' shape the wide tile spills: 80 to 280 bytes, 400 to 600 with a mask beside them. The
# square one does not, and is as fast on average: 10 % slower above 128 rows, up to 24 % faster at 128 or with a mask.
_HOPPER_16_LATE = _HOPPER_16 | {128: SQUARE, None: SQUARE}
# Without the copy engine the pointers take registers, and shared memory ends at 100 KiB on consumer cards.
_POINTER_16 = {
    16: Tile(16, 128, 64, num_warps=4, num_stages=4, flatten=False, use_tma=False),
    32: Tile(32, 128, 64, num_warps=4, num_stages=4, flatten=False, use_tma=False),
    64: Tile(64, 128, 64, num_warps=4, num_stages=3, flatten=False, use_tma=False),
    None: Tile(128, 128, 64, num_warps=8, num_stages=3, flatten=False, use_tma=False),
}
_SINGLE = {
    16: Tile(16, 128, 32, num_warps=4, num_stages=3, flatten=False),
    None: Tile(64, 128, 16, num_warps=8, num_stages=4, flatten=False),
}
_SINGLE_TF32 = {
    16: Tile(16, 128, 64, num_warps=4, num_stages=4),
    32: Tile(32, 128, 64, num_warps=4, num_stages=4),
    64: Tile(64, 128, 64, num_warps=4, num_stages=4),
    128: Tile(128, 128, 32, num_warps=8, num_stages=5),
    None: Tile(128, 256, 32, num_warps=8, num_stages=3, flatten=False),
}
# What else max_autotune tries.
_MORE_16 = {
    16: (Tile(16, 128, 128, num_warps=4, num_stages=5), Tile(16, 256, 64, num_warps=4, num_stages=5)),
    32: (Tile(32, 128, 128, num_warps=4, num_stages=5), Tile(32, 128, 64, num_warps=4, num_stages=5)),
    64: (Tile(64, 128, 64, num_warps=4, num_stages=8), Tile(64, 256, 64, num_warps=8, num_stages=4)),
    128: (SQUARE, Tile(128, 256, 64, num_warps=8, num_stages=4)),
    None: (WIDE, replace(WIDE, num_stages=4)),
}
# The interpreter pays per program and per operation, not per lane.
_INTERPRETER = {16: Tile(16, 512, 256, 4, 1), None: Tile(64, 512, 256, 4, 1)}


def pick(case: Case) -> Tile:
    """The table's tile for `case`."""
    return _fit(_of(_table(case), case.batch), case)


def candidates(case: Case) -> list[Tile]:
    """Tiles worth measuring for `case`, the table's first."""
    found = [pick(case)]
    if case.arch != "cpu" and case.dtype != torch.float32:
        tables = (_HOPPER_16, _HOPPER_16_SHORT, _HOPPER_16_LONG)
        others = [_of(table, case.batch) for table in (tables if case.arch.startswith("sm_") else ())]
        others += [_of(_POINTER_16, case.batch), *_of(_MORE_16, case.batch)]
        found += [_fit(tile, case) for tile in others]
    return list(dict.fromkeys(found))


def bucket(batch: int) -> int:
    """The largest batch that shares a tile with `batch`; 0 for those beyond the tables."""
    return next((limit for limit in (16, 32, 64, 128) if batch <= limit), 0)


def _table(case: Case) -> dict[int | None, Tile]:
    if case.arch == "cpu":
        return _INTERPRETER
    if case.dtype == torch.float32:
        return _SINGLE_TF32 if case.tf32 and case.arch == "sm_90" else _SINGLE
    if case.arch not in ("sm_90", "sm_100", "sm_103"):
        return _POINTER_16
    if case.late:
        return _HOPPER_16_LATE
    if case.hidden > 6144:
        return _HOPPER_16_LONG
    return _HOPPER_16 if case.hidden > 2048 else _HOPPER_16_SHORT


def _of(table, batch: int):
    return next(tile for limit, tile in table.items() if limit is None or batch <= limit)


def _fit(tile: Tile, case: Case) -> Tile:
    if tile.pingpong and not case.turns:
        tile = one_group(case.batch)
    return replace(tile, use_tma=False) if case.arch.startswith("gfx") else tile


def one_group(batch: int) -> Tile:
    """The tile for `batch` rows instead of TURNS."""
    return _of(_ONE_GROUP, batch)
