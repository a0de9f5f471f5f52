"""Groups of warps that only greet each other: what compute-sanitizer says of this kernel, it says of Triton.

compute-sanitizer --tool racecheck --racecheck-report all --print-limit 100000 python tests/gpu/handshake.py
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def _greet(out, barriers, count, WHICH: gl.constexpr):
    phase = 0
    for _ in range(count):
        if WHICH == 0:
            mbarrier.arrive(barriers.index(0), count=1)
        mbarrier.wait(barriers.index(WHICH ^ 1), phase)
        if WHICH == 1:
            mbarrier.arrive(barriers.index(1), count=1)
        phase ^= 1
    gl.store(out + WHICH * 256 + gl.arange(0, 256, layout=gl.BlockedLayout([1], [32], [8], [0])), WHICH + 1)


@gluon.jit
def _stand_by(out):
    gl.store(out + 512 + gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0])), 3)


@gluon.jit
def _kernel(out, count):
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(barriers.index(0), count=1)
    mbarrier.init(barriers.index(1), count=1)
    gl.warp_specialize(
        [(_greet, (out, barriers, count, 0)), (_greet, (out, barriers, count, 1)), (_stand_by, (out,))],
        [8, 1],
        [112, 24],
    )


def main() -> None:
    out = torch.zeros(544, dtype=torch.int32, device="cuda")
    _kernel[(132,)](out, 4, num_warps=8)
    assert out.bincount().tolist() == [0, 256, 256, 32]


if __name__ == "__main__":
    main()
