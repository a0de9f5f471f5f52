"""Under `max_autotune`, the fastest of several tiles is chosen at compile time, and is remembered."""

from __future__ import annotations

import pytest
import torch
import triton.testing
from support import assert_fused, run_pass
from torch.nn import functional as F

from fs_inductor import tuning
from fs_inductor.kernels import autotune, tiles
from fs_inductor.kernels.tiles import Case, Tile

SLOW, FAST, BROKEN = Tile(16, 256, 64, 4, 1), Tile(16, 128, 64, 4, 1), Tile(16, 128, 32, 4, 1)
CASE = Case("cpu", torch.float32, 4, 160, 16)


@pytest.fixture(autouse=True)
def measured(monkeypatch, tmp_path):
    """A cache of its own, three candidates, and a clock by which FAST is fastest; the tiles that were measured."""
    log = []

    def run(call, warmup, rep, return_mode):
        (tile,) = call.args
        log.append(tile)
        call()
        return {SLOW: 2.0, FAST: 1.0}[tile]

    monkeypatch.setattr(autotune, "_file", lambda: tmp_path / "deep" / "tiles.json")
    monkeypatch.setattr(tiles, "candidates", lambda case: [SLOW, BROKEN, FAST])
    monkeypatch.setattr(triton.testing, "do_bench", run)
    autotune.forget()
    yield log
    autotune.forget()


def launch(tile: Tile) -> None:
    if tile == BROKEN:
        raise RuntimeError("out of resource: shared memory")


def test_the_fastest_is_chosen_and_shared_by_batches_of_one_bucket(measured):
    table = tiles.pick(CASE)
    assert autotune.pick(CASE) == table
    assert autotune.tune(CASE, launch) == FAST
    assert measured == [SLOW, BROKEN, FAST]
    assert autotune.pick(CASE) == autotune.pick(CASE._replace(batch=16)) == FAST
    for other in (
        {"batch": 17},
        {"vocab": 161},
        {"hidden": 17},
        {"late": True},
        {"turns": True},
        {"dtype": torch.float16},
    ):
        assert autotune.pick(CASE._replace(**other)) not in (SLOW, FAST)


def test_another_process_finds_the_choice(measured):
    autotune.tune(CASE, launch)
    autotune.forget()
    assert autotune.pick(CASE) == FAST
    assert autotune.tune(CASE, launch) == FAST
    assert len(measured) == 3


def test_a_broken_file_is_no_obstacle(measured):
    autotune._file().parent.mkdir()
    autotune._file().write_text('{"arch=cpu')
    assert autotune.pick(CASE) == tiles.pick(CASE)
    assert autotune.tune(CASE, launch) == FAST


def test_where_no_candidate_runs_the_table_decides(measured, monkeypatch):
    monkeypatch.setattr(tiles, "candidates", lambda case: [BROKEN])
    assert autotune.tune(CASE, launch) == tiles.pick(CASE)


@pytest.mark.parametrize("T", [torch.tensor(0.7), torch.full((4, 1), 0.7)], ids=["a number", "a row"])
@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("flag", ["max_autotune", "max_autotune_gemm", None])
def test_the_calls_of_a_graph_are_tuned_where_torch_is_told_to(measured, monkeypatch, flag, sampled, T):
    monkeypatch.setattr(tuning, "_DEVICES", ("cpu",))
    monkeypatch.setattr(tiles, "candidates", lambda case: [SLOW, FAST])

    def step(h, W, mask, T):
        logits = F.linear(h, W).masked_fill(mask, float("-inf")) / T
        return torch.multinomial(logits.softmax(-1), 1) if sampled else logits.argmax(-1)

    args = (torch.randn(4, 16), torch.randn(160, 16), torch.rand(4, 160) < 0.5, T)
    rewritten = run_pass(step, args, dynamic="batch", config={flag: True} if flag else None)
    assert_fused(rewritten, 1)
    assert measured == ([SLOW, FAST] if flag else [])
    if flag:
        assert autotune.pick(CASE) == FAST


def test_every_bucket_has_a_tile_of_its_own():
    tiles_of = {}
    for batch in (1, 16, 17, 32, 64, 128, 129, 4096):
        case = Case("sm_90", torch.bfloat16, batch, 151936, 4096)
        tiles_of[batch] = tiles.pick(case)
        assert tiles_of[batch].block_b >= min(batch, 128)
    assert tiles_of[1] == tiles_of[16] != tiles_of[17] != tiles_of[64] != tiles_of[128] != tiles_of[129]
    assert [tiles.bucket(batch) for batch in tiles_of] == [16, 16, 32, 32, 64, 128, 0, 0]
