"""On CUDA, compiled DTensors wrap their random ops: such a draw is fused all the same."""

from __future__ import annotations

import multiprocessing

import pytest

from fs_inductor.recognise import dtensor_random

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(dtensor_random.WRAPPER is None, reason="this torch does not wrap random ops of DTensors"),
]


def _fuse() -> tuple[str, bool]:
    import torch
    import torch.distributed as dist
    from support import assert_fused, run_pass
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from fs_inductor.options import Options

    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    plan = ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
    head = parallelize_module(nn.Linear(16, 100, bias=False, device="cuda"), init_device_mesh("cuda", (2,)), plan)

    def step(x):
        return torch.multinomial((head(x) / 0.7).softmax(-1), 1).to_local()

    options = Options(min_vocab=0, max_batch=4)  # a float32 head does not pay on a GPU
    rewritten = run_pass(step, [torch.randn(4, 16, device="cuda")], options=options, execute=False)
    assert_fused(rewritten, 1)
    return rewritten.text(), "run_dtensor_rng_op" in rewritten.before


def test_a_draw_of_a_dtensor_is_fused():
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # a process has one process group
        text, wrapped = pool.apply(_fuse)
    assert text == (
        "sample_sharded(hidden f32[4, 16], weight f32[50, 16], seed i64[], vocab 100, capacity 50)\n"
        "  program: x0 = div(acc, 0.7)"
    )
    assert wrapped
