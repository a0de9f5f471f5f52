"""Tile shapes of the fused kernel by architecture, dtype and batch, and what the launcher must know of a device."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from .rng import GROUP


@dataclass(frozen=True)
class Tile:
    """One specialisation of the kernel.

    A program multiplies [block_b, block_d] by [block_v, block_d] at a time. `flatten` fuses the loop over tiles with
    the one over D, so that the loads of the next tile start before the epilogue of this one.
    """

    block_b: int
    block_v: int
    block_d: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    flatten: bool = True
    use_tma: bool = True

    def __post_init__(self):
        if self.block_v % GROUP:
            raise ValueError(f"block_v must be a multiple of the group size {GROUP}, not {self.block_v}")


@dataclass(frozen=True)
class DeviceInfo:
    """arch: "sm_90", "gfx942", …, or "cpu" for the interpreter."""

    arch: str
    num_sms: int
    has_tma: bool


@functools.lru_cache
def device_info(device: torch.device) -> DeviceInfo:
    if device.type != "cuda":
        return DeviceInfo("cpu", 2, True)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return DeviceInfo(properties.gcnArchName.split(":")[0], properties.multi_processor_count, False)
    arch = f"sm_{properties.major}{properties.minor}"
    return DeviceInfo(arch, properties.multi_processor_count, properties.major >= 9)


# The last row whose batch limit is not exceeded wins. sm_90, 16-bit: measured on an H200.
_HOPPER_16 = {
    16: Tile(16, 128, 128, num_warps=4, num_stages=4),
    32: Tile(32, 128, 128, num_warps=4, num_stages=4),
    64: Tile(64, 128, 128, num_warps=4, num_stages=4),
    128: Tile(128, 128, 64, num_warps=8, num_stages=5),
    None: Tile(128, 256, 64, num_warps=8, num_stages=4, flatten=False),
}
# With a [B, V] operand the epilogue outlasts the loads that are under way, and a second program fills the gap. At 64
# rows that pays only while tiles are short: two programs leave each fewer loads ahead.
_HOPPER_16_FULL = _HOPPER_16 | {16: Tile(16, 128, 128, num_warps=4, num_stages=3, programs_per_sm=2)}
_HOPPER_16_FULL_SHORT = _HOPPER_16_FULL | {
    32: Tile(32, 128, 64, num_warps=4, num_stages=5, programs_per_sm=2),
    64: Tile(64, 128, 64, num_warps=4, num_stages=4, programs_per_sm=2),
}
# Without the copy engine the pointers take registers, and shared memory ends at 100 KiB on consumer cards.
_POINTER_16 = {
    16: Tile(16, 128, 64, num_warps=4, num_stages=4, flatten=False, use_tma=False),
    32: Tile(32, 128, 64, num_warps=4, num_stages=4, flatten=False, use_tma=False),
    64: Tile(64, 128, 64, num_warps=4, num_stages=3, flatten=False, use_tma=False),
    None: Tile(128, 128, 64, num_warps=8, num_stages=3, flatten=False, use_tma=False),
}
_SINGLE = {
    16: Tile(16, 128, 32, num_warps=4, num_stages=3, flatten=False),
    None: Tile(64, 128, 32, num_warps=8, num_stages=3, flatten=False),
}
# The interpreter pays per program and per operation, not per lane.
_INTERPRETER = {16: Tile(16, 512, 256, 4, 1), None: Tile(64, 512, 256, 4, 1)}


@functools.lru_cache(maxsize=4096)
def pick(arch: str, dtype: torch.dtype, batch: int, vocab: int, hidden: int, full: bool = False) -> Tile:
    """The tile for a product of [batch, hidden] with [vocab, hidden] on `arch` (as in DeviceInfo).

    full: whether the epilogue reads an operand of [batch, vocab].
    """
    if arch == "cpu":
        table = _INTERPRETER
    elif dtype == torch.float32:
        table = _SINGLE
    elif arch in ("sm_90", "sm_100", "sm_103"):
        table = _HOPPER_16
        if full:
            table = _HOPPER_16_FULL_SHORT if hidden < 3072 else _HOPPER_16_FULL
    else:
        table = _POINTER_16
    tile = next(tile for limit, tile in table.items() if limit is None or batch <= limit)
    return replace(tile, use_tma=False) if arch.startswith("gfx") else tile
