"""Golden op calls of sharded LM heads, alike on all ranks. EXPECTTEST_ACCEPT=1 rewrites them.

Each case is traced as the first and as the last of 2 and of 8 ranks, for vocabularies that divide evenly, do not, and
leave ranks without rows. Its golden text is one for all of those: B is the batch, V the vocabulary, C the capacity of a
rank, R the rows that a rank has.
"""

from __future__ import annotations

import functools
import multiprocessing
import re
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field

import expecttest
import pytest
import ranks  # noqa: F401 - sets up the server that processes are forked from
import torch
import tp_cases
from support import OPS, assert_fused, run_pass
from torch.fx.node import map_arg
from tp_cases import CASES, NOT_FUSED, RANKS, VOCABULARIES

from fs_inductor.graph_pass import FlashSamplingPass
from fs_inductor.options import Options
from fs_inductor.recognise import dtensor_random
from fs_inductor.report import Report


@dataclass
class Traced:
    """What one rank compiled, in plain values. shared: what all ranks of a group must have in common."""

    text: str
    shared: tuple
    targets: list[str]
    unchanged: bool
    codes: list[str] = field(default_factory=list)


def trace(name: str, vocab: int, dynamic: bool) -> Traced:
    """Runs in a process that has joined a fake group."""
    case, env, step, inputs = tp_cases.build(name, vocab)
    options = Options(min_vocab=0, **case.options)
    rewritten = run_pass(step, inputs, dynamic="batch" if dynamic else None, options=options, execute=False)
    targets = [str(node.target) for node in rewritten.nodes if node.op == "call_function"]
    result = Traced("", (), targets, rewritten.before == rewritten.after, [m.code for m in rewritten.report.missed])
    if name in CASES:
        assert_fused(rewritten, 1)
        (call,) = [node for node in rewritten.nodes if str(node.target).startswith("flashsampling.")]
        result.shared = _check_call(call, case, env)
        result.text = _canonical(rewritten.text(), env)
    return result


def _check_call(call, case, env) -> tuple:
    names = [argument.name for argument in call.target._schema.arguments]
    values = dict(zip(names, call.args, strict=True))
    assert call.target in (OPS.sample_sharded.default, OPS.argmax_sharded.default)
    assert values["vocab"] == env.vocab - case.cut
    assert values["capacity"] == env.capacity
    assert values["group_name"] == env.mesh.get_group().group_name
    assert values["weight"].meta["val"].shape[0] == env.rows
    plain = [value for key, value in values.items() if key not in ("hidden", "weight", "seed", "operands")]
    if case.two_dims:
        plain.remove(values["group_name"])  # the first and the last rank are in different groups
    return (str(call.target), *plain)


def _canonical(text: str, env) -> str:
    """The text with letters for the sizes that differ between vocabularies and ranks."""
    first, *rest = text.split("\n")
    first = re.sub(r"(weight \w+)\[\d+", r"\1[R", first)
    first = re.sub(rf"\b{env.capacity}\)$", "C)", first)
    first = re.sub(r"vocab (\d+)", lambda m: f"vocab V - {cut}" if (cut := env.vocab - int(m[1])) else "vocab V", first)
    head, operands, tail = first.partition("operands ")
    shapes, end, tail = tail.partition("]], ")
    shapes = re.sub(rf"\b{env.vocab}(?=\]|$)", "V", shapes)
    shapes = re.sub(rf"\b{env.rows}(?=\]|$)", "R", shapes)
    first = head + operands + shapes + end + tail
    if len(first) > 110:
        first = first.replace("operands", "\n  operands").replace(" \n", "\n")
    return "\n".join([first, *rest])


def trace_wrapped(name: str, vocab: int, min_vocab: int) -> Traced:
    """The case with its draw wrapped as compiled DTensors wrap it on CUDA. Runs in a process as `trace` does."""
    _, env, step, inputs = tp_cases.build(name, vocab)
    untouched = run_pass(step, inputs, options=Options(enabled=False, min_vocab=10**9), execute=False)
    (module,) = untouched.modules
    graph = module.graph
    (draw,) = graph.find_nodes(op="call_function", target=torch.ops.aten.multinomial.default)
    with graph.inserting_before(draw):
        wrapper = graph.call_function(dtensor_random.WRAPPER, (0, 4, draw.target, *draw.args), draw.kwargs)
    wrapper.meta = dict(draw.meta)
    draw.replace_all_uses_with(wrapper)
    graph.erase_node(draw)
    before = _plain(graph)
    report = Report()
    FlashSamplingPass(Options(min_vocab=min_vocab), report)(graph)
    targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    codes = [miss.code for miss in report.missed]
    return Traced(_canonical(untouched.text(), env), (), targets, before == _plain(graph), codes)


def _plain(graph) -> list:
    """The graph but for the names of its nodes, which are never used again."""
    numbers = {node: i for i, node in enumerate(graph.nodes)}
    return [(str(n.target), str(map_arg((n.args, n.kwargs), numbers.get))) for n in graph.nodes if n.op != "output"]


@functools.cache
def _rank(world: int, rank: int) -> ProcessPoolExecutor:
    """A process that plays this rank until the module's tests are over."""
    forkserver = multiprocessing.get_context("forkserver")
    return ProcessPoolExecutor(1, forkserver, initializer=tp_cases.start, initargs=(world, rank))


_started: set[tuple[int, int]] = set()


def on_rank(world: int, rank: int, function: Callable, *args) -> Future:
    _started.add((world, rank))
    return _rank(world, rank).submit(function, *args)


def tearDownModule() -> None:
    for world, rank in _started:
        _rank(world, rank).shutdown()
    _rank.cache_clear()


DYNAMIC = (8, 7, 96)
"""World, rank and vocabulary of the one trace with a dynamic batch, which takes three times as long as the others."""


class TpGoldenTestCase(expecttest.TestCase):
    maxDiff = None

    def golden(self, name: str, expected: str) -> None:
        keys = [(world, rank, vocab) for world, rank in RANKS for vocab in VOCABULARIES]
        dynamic = CASES[name].dynamic
        runs = {key: on_rank(key[0], key[1], trace, name, key[2], dynamic and key == DYNAMIC) for key in keys}
        traced = {key: run.result(timeout=120) for key, run in runs.items()}
        for (world, rank, vocab), mine in traced.items():
            with self.subTest(world=world, rank=rank, vocab=vocab):
                self.assertEqual(mine.codes, [])
                for word in ("all_gather", "wait_tensor", "cat.default", "constant_pad"):
                    self.assertFalse([target for target in mine.targets if word in target])
                first = traced[world, 0, vocab]
                self.assertEqual(mine.shared, first.shared)
                if (world, rank, vocab) != DYNAMIC:
                    self.assertEqual(mine.targets, first.targets)
                self.assertMultiLineEqual(mine.text.replace("[B,", "[4,"), traced[DYNAMIC].text.replace("[B,", "[4,"))
        self.assertExpectedInline(traced[DYNAMIC].text, expected, skip=1)


class Goldens(TpGoldenTestCase):
    def test_colwise(self):
        self.golden(
            "colwise",
            """\
sample_sharded(hidden f32[B, 16], weight f32[R, 16], seed i64[], vocab V, capacity C)
  program: x0 = div(acc, 0.7)""",
        )

    def test_colwise_one_row(self):
        self.golden(
            "colwise_one_row",
            """\
sample_sharded(hidden f32[1, 16], weight f32[R, 16], seed i64[], vocab V, capacity C)
  program: x0 = div(acc, 0.7)""",
        )

    def test_colwise_last_position(self):
        self.golden(
            "colwise_last_position",
            """\
sample_sharded(hidden f32[B, 16], weight f32[R, 16], seed i64[], vocab V, capacity C)
  program: x0 = div(acc, 0.7)""",
        )

    def test_colwise_last_position_first(self):
        self.golden(
            "colwise_last_position_first",
            """\
sample_sharded(hidden f32[B, 16], weight f32[R, 16], seed i64[], vocab V, capacity C)
  program: x0 = div(acc, 0.7)""",
        )

    def test_colwise_position_of_each_row(self):
        self.golden(
            "colwise_position_of_each_row",
            """\
sample_sharded(hidden f32[4, 16], weight f32[R, 16], seed i64[], vocab V, capacity C)
  program: x0 = div(acc, 0.7)""",
        )

    def test_colwise_greedy(self):
        self.golden(
            "colwise_greedy",
            """\
argmax_sharded(hidden f32[B, 16], weight f32[R, 16], vocab V, capacity C)
  program: acc""",
        )

    def test_colwise_several_draws(self):
        self.golden(
            "colwise_several_draws",
            """\
sample_sharded(hidden f32[B, 16], weight f32[R, 16], seed i64[], num_samples 3, vocab V, capacity C)
  program: acc""",
        )

    def test_colwise_race(self):
        self.golden(
            "colwise_race",
            """\
sample_sharded(hidden f32[B, 16], weight f32[R, 16], seed i64[], vocab V, capacity C)
  program: acc""",
        )

    def test_colwise_padded_vocabulary(self):
        self.golden(
            "colwise_padded_vocabulary",
            """\
sample_sharded(hidden f32[B, 16], weight f32[R, 16], seed i64[], vocab V - 3, capacity C)
  program: x0 = div(acc, 0.7)""",
        )

    def test_colwise_mesh_of_two_dimensions(self):
        self.golden(
            "colwise_mesh_of_two_dimensions",
            """\
sample_sharded(hidden f32[B, 16], weight f32[R, 16], seed i64[], vocab V, capacity C)
  program: x0 = div(acc, 0.7)""",
        )

    def test_dtensor_to_local(self):
        self.golden(
            "dtensor_to_local",
            """\
sample_sharded(hidden f32[B, 16], weight f32[R, 16], seed i64[], vocab V, capacity C)
  program: x0 = div(acc, 0.7)""",
        )

    def test_dtensor_full_tensor(self):
        self.golden(
            "dtensor_full_tensor",
            """\
sample_sharded(hidden f32[B, 16], weight f32[R, 16], seed i64[], vocab V, capacity C)
  program: x0 = div(acc, 0.7)""",
        )

    def test_dtensor_draw(self):
        self.golden(
            "dtensor_draw",
            """\
sample_sharded(hidden f32[B, 16], weight f32[R, 16], seed i64[], vocab V, capacity C)
  program: x0 = div(acc, 0.7)""",
        )

    def test_dtensor_argmax(self):
        self.golden(
            "dtensor_argmax",
            """\
argmax_sharded(hidden f32[B, 16], weight f32[R, 16], vocab V, capacity C)
  program: acc""",
        )

    def test_shard_redistribute(self):
        self.golden(
            "shard_redistribute",
            """\
sample_sharded(hidden f32[B, 16], weight f32[R, 16], seed i64[], vocab V, capacity C)
  program: x0 = div(acc, 0.7)""",
        )

    def test_shard_full_tensor(self):
        self.golden(
            "shard_full_tensor",
            """\
sample_sharded(hidden f32[B, 16], weight f32[R, 16], seed i64[], vocab V, capacity C)
  program: x0 = div(acc, 0.7)""",
        )

    def test_shard_one_row(self):
        self.golden(
            "shard_one_row",
            """\
sample_sharded(hidden f32[1, 16], weight f32[R, 16], seed i64[], vocab V, capacity C)
  program: x0 = div(acc, 0.7)""",
        )

    def test_shard_last_position(self):
        self.golden(
            "shard_last_position",
            """\
argmax_sharded(hidden f32[B, 16], weight f32[R, 16], vocab V, capacity C)
  program: x0 = mul(acc, 0.5)""",
        )

    def test_shard_pointwise_in_float32(self):
        self.golden(
            "shard_pointwise_in_float32",
            """\
sample_sharded(hidden bf16[B, 16], weight bf16[R, 16], seed i64[], vocab V, capacity C)
  program: x0 = round(acc, bf16); x1 = div(x0, 30.0); x2 = tanh(x1); x3 = mul(x2, 30.0);
    x4 = div(x3, 0.7)""",
        )

    def test_shard_mesh_of_two_dimensions(self):
        self.golden(
            "shard_mesh_of_two_dimensions",
            """\
argmax_sharded(hidden f32[B, 16], weight f32[R, 16], vocab V, capacity C)
  program: acc""",
        )

    def test_shard_bias_of_the_shard(self):
        self.golden(
            "shard_bias_of_the_shard",
            """\
sample_sharded(hidden f32[B, 16], weight f32[R, 16], seed i64[], operands [f32[R]], vocab V, capacity C)
  program: x0 = add(acc, a0); x1 = div(x0, 0.7)""",
        )

    def test_explicit(self):
        self.golden(
            "explicit",
            """\
argmax_sharded(hidden f32[B, 16], weight f32[R, 16], vocab V, capacity C)
  program: acc""",
        )

    def test_into_one_tensor_moved(self):
        self.golden(
            "into_one_tensor_moved",
            """\
sample_sharded(hidden f32[B, 16], weight f32[R, 16], seed i64[], vocab V, capacity C)
  program: x0 = div(acc, 0.7)""",
        )

    def test_into_one_tensor_cut(self):
        self.golden(
            "into_one_tensor_cut",
            """\
sample_sharded(hidden f32[B, 16], weight f32[R, 16], seed i64[], vocab V, capacity C)
  program: x0 = div(acc, 0.7)""",
        )

    def test_into_a_list(self):
        self.golden(
            "into_a_list",
            """\
argmax_sharded(hidden f32[B, 16], weight f32[R, 16], vocab V, capacity C)
  program: acc""",
        )

    def test_explicit_last_position(self):
        self.golden(
            "explicit_last_position",
            """\
sample_sharded(hidden f32[B, 16], weight f32[R, 16], seed i64[], vocab V, capacity C)
  program: x0 = mul(acc, 0.5); x1 = div(x0, 0.7)""",
        )

    def test_bias_of_the_head(self):
        self.golden(
            "bias_of_the_head",
            """\
sample_sharded(hidden f32[B, 16], weight f32[R, 16], seed i64[], operands [f32[R]], vocab V, capacity C)
  program: x0 = add(acc, a0); x1 = div(x0, 0.7)""",
        )

    def test_bias_after(self):
        self.golden(
            "bias_after",
            """\
sample_sharded(hidden f32[B, 16], weight f32[R, 16], seed i64[], operands [f32[V]], vocab V, capacity C)
  program: x0 = add(acc, a0); x1 = div(x0, 0.7)""",
        )

    def test_mask_after(self):
        self.golden(
            "mask_after",
            """\
sample_sharded(hidden f32[B, 16], weight f32[R, 16], seed i64[], operands [bool[B, V]], vocab V, capacity C)
  program: x0 = where(a0, -inf, acc); x1 = div(x0, 0.7)""",
        )

    def test_everything_after(self):
        self.golden(
            "everything_after",
            """\
sample_sharded(hidden bf16[B, 16], weight bf16[R, 16], seed i64[],
  operands [bf16[R], f32[V], f32[B, 1], bool[B, V]], vocab V, capacity C)
  program: x0 = add(acc, a0); x1 = round(x0, bf16); x2 = add(x1, a1); x3 = div(x2, a2);
    x4 = where(a3, -inf, x3)""",
        )


CODES = {
    "rows_gathered": "TP_LAYOUT",
    "positions_gathered": "TP_LAYOUT",
    "softmax_of_the_shard": "EPILOGUE_OP",
    "probabilities_of_the_shard": "TP_LAYOUT",
    "two_gathers": "TP_LAYOUT",
    "another_order": "TP_LAYOUT",
    "a_part_of_each_shard": "TP_LAYOUT",
    "padding_in_front": "TP_LAYOUT",
    "switched_off": "TP_LAYOUT",
    "another_order_moved": "TP_LAYOUT",
    "another_order_in_a_list": "TP_LAYOUT",
    "rows_of_this_rank": "TP_LAYOUT",
    "piece_of_this_rank": "TP_LAYOUT",
    "position_of_this_rank": "TP_LAYOUT",
    "row_of_this_rank_from_the_end": "TP_LAYOUT",
    "row_of_this_rank_selected_from_the_end": "TP_LAYOUT",
    "rows_of_this_rank_by_a_constant": "TP_LAYOUT",
    "rows_by_a_step_of_this_rank": "TP_LAYOUT",
    "rows_rolled": "TP_LAYOUT",
}


def test_every_case_is_tested():
    tested = {name.removeprefix("test_") for name in vars(Goldens) if name.startswith("test_")}
    assert tested == set(CASES)
    assert set(CODES) == set(NOT_FUSED)


@pytest.mark.parametrize("name", NOT_FUSED)
def test_what_is_no_gather_of_shards_is_left_alone(name):
    runs = [on_rank(world, rank, trace, name, 96, False) for world, rank in RANKS]
    for run in runs:
        mine = run.result(timeout=120)
        assert mine.codes == [CODES[name]]
        assert mine.unchanged


@pytest.mark.skipif(dtensor_random.WRAPPER is None, reason="this torch does not wrap random ops of DTensors")
def test_a_wrapped_draw_is_seen_and_one_that_is_not_fused_stays_wrapped():
    fused = on_rank(8, 7, trace_wrapped, "dtensor_draw", 100, 0).result(timeout=120)
    assert fused.codes == []
    assert "flashsampling.sample_sharded.default" in fused.targets
    assert not any(word in target for target in fused.targets for word in ("rng_op", "multinomial", "all_gather"))
    missed = on_rank(8, 7, trace_wrapped, "dtensor_draw", 100, 10**6).result(timeout=120)
    assert missed.codes == ["SMALL_VOCAB"]
    assert missed.unchanged
    assert "run_dtensor_rng_op" in missed.targets


@pytest.mark.parametrize("name", ["colwise", "colwise_one_row", "shard_one_row", "bias_of_the_head"])
def test_a_rank_with_one_row_decides_as_the_others(name):
    # 57 ids are eight for each of seven ranks, and one for the last, where Inductor decomposes products of one element.
    first, last = (on_rank(8, rank, trace, name, 57, False).result(timeout=120) for rank in (0, 7))
    assert last.codes == first.codes == []
    assert last.shared == first.shared
