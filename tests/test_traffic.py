"""The traffic model, and the decision whether a fusion pays, with rules made up for the purpose."""

from __future__ import annotations

import pytest
import sympy
import torch
import torch.distributed as dist
from support import BATCH, EVERY_SIZE, FEATURES, LENGTH, VOCAB, assert_fused, run_pass
from torch._dynamo.source import ConstantSource
from torch._inductor import config as inductor_config
from torch.distributed import _functional_collectives as collectives
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StrictMinMaxConstraint
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._sympy.value_ranges import ValueRanges

from fs_inductor import gain, traffic
from fs_inductor.backend import compile_graph
from fs_inductor.gain import Rule
from fs_inductor.graph_pass import FlashSamplingPass
from fs_inductor.options import Options
from fs_inductor.recognise.miss import Miss
from fs_inductor.report import Report

h, h3, W = torch.randn(BATCH, FEATURES), torch.randn(BATCH, LENGTH, FEATURES), torch.randn(VOCAB, FEATURES)
WEIGHT, HIDDEN, LOGITS, TOKENS = 4 * VOCAB * FEATURES, 4 * BATCH * FEATURES, 4 * BATCH * VOCAB, 8 * BATCH


def draw(h, W):
    return (F.linear(h, W) / 0.7).softmax(-1).multinomial(1)


def greedy(h, W):
    return F.linear(h, W).argmax(-1)


def race(h, W):
    p = F.linear(h, W).softmax(-1)
    return (p / torch.empty_like(p).exponential_(1)).argmax(-1)


def drawn_and_greedy(h, W):
    logits = F.linear(h, W)
    return logits.softmax(-1).multinomial(1), logits.argmax(-1)


def last_position(h, W):
    return F.linear(h, W)[:, -1].argmax(-1)


def every_position(h, W):
    return F.linear(h, W).argmax(-1)


def sliced(h, W):
    return F.linear(h, W)[:, :100].argmax(-1)


def the_record(fn, *args, **how):
    rewritten = run_pass(fn, args, execute=False, **how)
    assert_fused(rewritten, 1)
    return rewritten.report.fused[0]


def the_miss(fn, *args, **how):
    rewritten = run_pass(fn, args, execute=False, **how)
    assert rewritten.report.fused == []
    return rewritten.report.missed[0]


@pytest.fixture
def rule(monkeypatch):
    """Puts a rule in the place of the CPU's."""

    def put(**fields) -> None:
        monkeypatch.setitem(gain.RULES, "cpu", Rule(**{"min_vocab": 0} | fields))

    return put


# -- bytes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "args", "unfused", "saved"),
    [
        (greedy, (h, W), WEIGHT + HIDDEN + 2 * LOGITS + TOKENS, 2 * LOGITS),
        (race, (h, W), WEIGHT + HIDDEN + 5 * LOGITS + TOKENS, 5 * LOGITS),
        (draw, (h, W), WEIGHT + HIDDEN + 7 * LOGITS + TOKENS, 7 * LOGITS),
        # All positions are multiplied and written, one is read: the fused call reads one position's hidden states.
        (last_position, (h3, W), WEIGHT + 5 * HIDDEN + 6 * LOGITS + TOKENS, 4 * HIDDEN + 6 * LOGITS),
        (every_position, (h3, W), WEIGHT + 5 * HIDDEN + 10 * LOGITS + 5 * TOKENS, 10 * LOGITS),
        # 60 ids are multiplied and written in vain.
        (
            sliced,
            (h, W),
            WEIGHT + HIDDEN + LOGITS * 260 // 160 + TOKENS,
            4 * 60 * FEATURES + LOGITS * 260 // 160,
        ),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
@pytest.mark.parametrize("dynamic", [None, "batch"])
def test_bytes(fn, args, unfused, saved, dynamic):
    record = the_record(fn, *args, dynamic=dynamic)
    if dynamic:
        assert record.bytes_saved.free_symbols == {traffic.BATCH}
        batch = BATCH * LENGTH if fn is every_position else BATCH
        assert record.bytes_saved.subs(traffic.BATCH, batch) == saved
        assert record.bytes_unfused.subs(traffic.BATCH, batch) == unfused
    else:
        assert (record.bytes_saved, record.bytes_unfused) == (saved, unfused)


def test_half_precision_moves_half_of_the_weight_and_of_the_logits():
    record = the_record(greedy, h.bfloat16(), W.bfloat16())
    assert 2 * (record.bytes_unfused - TOKENS) == WEIGHT + HIDDEN + 2 * LOGITS
    assert 2 * record.bytes_saved == 2 * LOGITS


def test_symbols_stay_where_nothing_is_known():
    """The batch is static here and the length is not: rows of the product are no multiple of the rows sampled."""

    def step(h, W):
        torch._check(h.shape[0] == BATCH)
        return last_position(h, W)

    record = the_record(step, h3, W, dynamic="all")
    assert traffic.ROWS in record.bytes_saved.free_symbols
    assert traffic.BATCH not in record.bytes_saved.free_symbols
    assert "a call" in str(record) and "R: rows of the unfused product" in str(record)


def test_the_text_for_a_dynamic_batch_has_no_symbols_of_torch():
    text = str(the_record(draw, h, W, dynamic="batch")).splitlines()[0]
    assert text.endswith("-> flashsampling.sample  saves 4,480 bytes a row")
    text = str(the_record(draw, h, W, dynamic="all")).splitlines()[0]
    assert text.endswith("saves 28 bytes x V a row (V: vocabulary)")


# -- the decision -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [None, "batch", "all"])
def test_smallest_vocabulary(rule, dynamic):
    """A dynamic vocabulary is judged by the size it has in the call that is compiled."""
    rule(min_vocab=VOCAB)
    assert_fused(run_pass(draw, [h, W], options=Options(), dynamic=dynamic, execute=False), 1)
    rule(min_vocab=VOCAB + 1)
    miss = the_miss(draw, h, W, options=Options(), dynamic=dynamic)
    assert miss.code == "SMALL_VOCAB"
    assert "has 160 entries, fewer than 161" in miss.reason
    assert "'flashsampling.min_vocab': 160" in miss.hint
    assert_fused(run_pass(draw, [h, W], options=Options(min_vocab=VOCAB), dynamic=dynamic, execute=False), 1)


@pytest.mark.parametrize("dynamic", [None, "batch", "all"])
def test_largest_batch(rule, dynamic):
    rule(max_batch=BATCH)
    assert_fused(run_pass(draw, [h, W], options=Options(), dynamic=dynamic, execute=False), 1)
    rule(max_batch=BATCH - 1)
    miss = the_miss(draw, h, W, options=Options(), dynamic=dynamic)
    assert miss.code == "NO_GAIN"
    assert "4 rows are sampled, more than flashsampling.max_batch, 3" in miss.reason
    assert "'flashsampling.max_batch': 4" in miss.hint
    assert_fused(run_pass(draw, [h, W], options=Options(max_batch=BATCH), dynamic=dynamic, execute=False), 1)


def test_every_position_counts_as_a_row(rule):
    rule(max_batch=BATCH * LENGTH - 1)
    assert the_miss(every_position, h3, W, options=Options(), dynamic="batch").code == "NO_GAIN"
    rule(max_batch=BATCH * LENGTH)
    the_record(every_position, h3, W, options=Options(), dynamic="batch")


@pytest.mark.parametrize("dynamic", [None, "batch", "all"])
def test_past_the_largest_batch_what_is_saved_decides(rule, dynamic):
    """Float32 greedy saves 8 bytes of each logit, a draw 28; a logit costs FEATURES multiply-adds."""
    rule(max_batch=1, min_saving=20 / FEATURES)
    the_record(draw, h, W, options=Options(), dynamic=dynamic)
    assert the_miss(greedy, h, W, options=Options(), dynamic=dynamic).code == "NO_GAIN"
    rule(max_batch=1, min_saving=8 / FEATURES)
    the_record(greedy, h, W, options=Options(), dynamic=dynamic)
    rule(max_batch=1, min_saving=29 / FEATURES)
    assert the_miss(draw, h, W, options=Options(), dynamic=dynamic).code == "NO_GAIN"


def test_sinks_of_one_linear_are_decided_together(rule):
    """Greedy alone would not pay here; beside the draw, which pays, it costs nothing."""
    rule(max_batch=1, min_saving=20 / FEATURES)
    assert_fused(run_pass(drawn_and_greedy, [h, W], options=Options(), execute=False), 2)
    rule(max_batch=1, min_saving=40 / FEATURES)
    report = run_pass(drawn_and_greedy, [h, W], options=Options(), execute=False).report
    assert [miss.code for miss in report.missed] == ["NO_GAIN", "NO_GAIN"]


@pytest.mark.parametrize("dynamic", [None, "batch", "all"])
def test_rows_that_are_not_sampled_pay(rule, dynamic):
    """Unfused, every position is multiplied. A limit that the user sets is a limit all the same."""
    rule(max_batch=1, min_saving=1e9)
    the_record(last_position, h3, W, options=Options(), dynamic=dynamic)
    assert the_miss(every_position, h3, W, options=Options(), dynamic=dynamic).code == "NO_GAIN"
    options = Options(max_batch=1)
    assert the_miss(last_position, h3, W, options=options, dynamic=dynamic).code == "NO_GAIN"


def test_options_take_the_place_of_what_was_measured(rule):
    rule(min_vocab=7, max_batch=8, min_saving=0.5)
    assert Options().rule("cpu") == Rule(7, 8, 0.5)
    assert Options(min_vocab=0).rule("cpu") == Rule(0, 8, 0.5)
    assert Options(max_batch=9).rule("cpu") == Rule(7, 9, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_only_exact_float32_on_gpus_has_a_measured_limit(dtype):
    assert EVERY_SIZE.rule("cpu", dtype) == Rule(min_vocab=0)
    limits = {}
    try:
        for precision in ("high", "highest"):
            torch.set_float32_matmul_precision(precision)
            limits[precision] = EVERY_SIZE.rule("cuda", dtype).max_batch
    finally:
        torch.set_float32_matmul_precision("highest")
    assert limits == ({"highest": 0, "high": None} if dtype == torch.float32 else {"highest": None, "high": None})
    assert Options(max_batch=7).rule("cuda", torch.float32).max_batch == 7


def test_exact_float32_on_a_gpu_is_told_what_to_do(rule):
    rule(max_batch=0, exact_float32=True)
    miss = the_miss(draw, h, W, options=Options())
    assert miss.code == "NO_GAIN" and "float32" in miss.reason
    assert "set_float32_matmul_precision('high')" in miss.hint and "'flashsampling.max_batch': 4" in miss.hint


def test_a_limit_of_zero_says_nothing_of_float32():
    miss = the_miss(draw, h, W, options=Options(min_vocab=0, max_batch=0))
    assert miss.code == "NO_GAIN" and "float32" not in miss.reason + miss.hint


def graphs_of(batches, declared=None):
    """Runs greedy at each batch and returns how many sinks each of the graphs fused that this took."""
    reports = []

    def backend(gm, inputs):
        reports.append(Report())
        return compile_graph(gm, inputs, None, {}, reports[-1])

    torch._dynamo.reset()
    step = torch.compile(greedy, backend=backend, dynamic=True, fullgraph=True)
    with torch.no_grad(), inductor_config.patch(force_disable_caches=True):
        for batch in batches:
            hidden = torch.randn(batch, FEATURES)
            if declared:
                torch._dynamo.mark_dynamic(hidden, 0, **declared)
            assert step(hidden, W).shape == (batch,)
    return [len(report.fused) for report in reports]


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
@pytest.mark.parametrize("fields", [{}, {"min_saving": 20 / FEATURES}], ids=["plain", "by_saving"])
@pytest.mark.parametrize(
    ("batches", "fused"), [((4, 16, 8, 3, 500, 9), [1, 0]), ((500, 8, 16), [0, 1])], ids=["below", "above"]
)
def test_a_dynamic_batch_has_one_graph_for_each_side_of_the_limit(rule, fields, batches, fused):
    rule(max_batch=8, **fields)
    assert graphs_of(batches) == fused


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
@pytest.mark.parametrize(("batches", "fused"), [((4, 16), [1]), ((16, 4), [0])], ids=["below", "above"])
def test_inside_of_declared_bounds_the_first_batch_decides(rule, batches, fused):
    """Torch takes a guard there for a broken promise."""
    rule(max_batch=8)
    assert graphs_of(batches, {"min": 2, "max": 100}) == fused


def test_a_cached_graphs_guard_does_not_reach_declared_bounds():
    ids = {FlashSamplingPass(EVERY_SIZE, guards=guards).uuid() for guards in (True, False)}
    assert len(ids) == 2


# -- sharded vocabularies -----------------------------------------------------------------------------------------


@pytest.fixture
def gathered():
    """Greedy over the shards of two ranks, of which this process is the first."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield lambda h, W: collectives.all_gather_tensor(F.linear(h, W), 1, dist.group.WORLD).argmax(-1)
    dist.destroy_process_group()


@pytest.mark.parametrize("dynamic", [None, "batch"])
def test_bytes_of_one_rank(gathered, dynamic):
    """Half of the logits are written, read to be sent, and all of them written by the gather and read."""
    record = the_record(gathered, h, W[::2], dynamic=dynamic)
    saved, unfused = record.bytes_saved, record.bytes_unfused
    if dynamic:
        saved, unfused = saved.subs(traffic.BATCH, BATCH), unfused.subs(traffic.BATCH, BATCH)
    assert saved == 3 * LOGITS
    assert unfused == WEIGHT // 2 + HIDDEN + 3 * LOGITS + TOKENS


def test_ranks_decide_by_what_they_share(gathered, rule):
    """The vocabulary that counts is the whole one; a dynamic batch is left out, since the ranks' calls may differ."""
    rule(min_vocab=VOCAB, max_batch=BATCH)
    the_record(gathered, h, W[::2], options=Options())
    rule(min_vocab=VOCAB + 1)
    assert the_miss(gathered, h, W[::2], options=Options()).code == "SMALL_VOCAB"
    rule(max_batch=BATCH - 1)
    assert the_miss(gathered, h, W[::2], options=Options()).code == "NO_GAIN"
    the_record(gathered, h, W[::2], options=Options(), dynamic="batch")


# -- sizes by themselves ------------------------------------------------------------------------------------------


@pytest.fixture
def batch_of_five():
    """A dynamic size between 3 and 100 that is 5 in the call that is compiled."""
    env = ShapeEnv()
    source = ConstantSource("batch")
    constraint = StrictMinMaxConstraint(vr=ValueRanges(3, 100), warn_only=False)
    symbol = env.create_symbol(5, source, DimDynamic.DYNAMIC, constraint_dim=constraint)
    return env.create_symintnode(symbol, hint=5, source=source)


def decided(batch, limit, sharded, guards=False, **fields) -> bool:
    """Whether greedy float32 rows, ``batch`` of them, are fused under a limit."""
    B, R, V, N, D = traffic.BATCH, traffic.ROWS, traffic.VOCAB, traffic.WIDTH, traffic.FEATURES
    moved = traffic.Traffic(8 * B * V + D * V, D * V, {B: batch, R: batch, V: VOCAB, N: VOCAB, D: FEATURES})
    try:
        gain.check_batch(moved, Rule(0, limit, **fields), sharded, None, guards)
    except Miss:
        return False
    return True


@pytest.mark.parametrize("sharded", [False, True])
def test_bounds_decide_first(batch_of_five, sharded):
    assert decided(batch_of_five, 100, sharded)
    assert not decided(batch_of_five, 2, sharded)
    assert batch_of_five.node.shape_env.guards == []


def test_between_the_bounds_this_call_decides_unless_ranks_could_differ(batch_of_five):
    assert decided(batch_of_five, 5, sharded=False)
    assert not decided(batch_of_five, 4, sharded=False)
    assert decided(batch_of_five, 4, sharded=True)
    assert batch_of_five.node.shape_env.guards == []


@pytest.mark.parametrize(("limit", "guarded"), [(5, True), (4, True), (2, False), (100, False)])
def test_what_this_call_decides_is_guarded(batch_of_five, limit, guarded):
    env = batch_of_five.node.shape_env
    assert decided(batch_of_five, limit, sharded=True, guards=True) == (limit >= 4)
    assert env.guards == []
    assert decided(batch_of_five, limit, sharded=False, guards=True) == (limit >= 5)
    symbol = batch_of_five.node.expr
    expected = (symbol <= limit) if limit >= 5 else (symbol > limit)
    assert [sympy.simplify(guard.expr) for guard in env.guards] == [expected] * guarded


def test_sharded_savings_count_where_the_batch_cancels(batch_of_five):
    saving = 8 / FEATURES
    assert decided(batch_of_five, 2, sharded=True, min_saving=saving)
    assert not decided(batch_of_five, 2, sharded=True, min_saving=2 * saving)


def test_a_size_that_depends_on_data(rule):
    """Nothing is known of the batch: the fusion has the benefit of the doubt, unless the bounds rule it out."""
    size = ShapeEnv().create_unbacked_symint()
    torch._check(size >= 3)
    assert decided(size, 1000, sharded=False)
    assert not decided(size, 2, sharded=False)
    assert decided(size, 2, sharded=False, min_saving=8 / FEATURES)
