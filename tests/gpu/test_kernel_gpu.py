"""The kernel on a real GPU: the reference's tokens, softmax at scale, CUDA graphs, streams."""

from dataclasses import replace

import pytest
import torch
from kernel_checks import check_cold_draws, check_numbers_that_mask, check_same_tokens, exact_inputs

from fs_inductor.kernels import gemm_sample, reference, scratch
from fs_inductor.kernels.rng import GROUP
from fs_inductor.kernels.tiles import TURNS, Tile

pytestmark = pytest.mark.gpu

ROUND = {torch.bfloat16: "x0 = round(acc, bf16)", torch.float16: "x0 = round(acc, f16)", torch.float32: "x0 = neg(acc)"}
DTYPES = list(ROUND)
USUAL = (
    "; x1 = div(x0, 30.0); x2 = tanh(x1); x3 = mul(x2, 30.0); x4 = div(x3, a0); x5 = add(x4, a1); "
    "x6 = where(a2, -inf, x5)"
)


def seed_tensor(value=0x1234_5678_9ABC):
    return torch.tensor(value, device="cuda")


def usual_operands(batch, vocab):
    generator = torch.Generator("cuda").manual_seed(3)
    make = {"device": "cuda", "generator": generator}
    temperature = torch.rand(batch, 1, **make) + 0.5
    return [temperature, torch.randn(vocab, **make), torch.rand(batch, vocab, **make) < 0.3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 7, 32, 64, 100, 256, 300])
def test_tokens_are_the_references(batch, dtype):
    hidden, weight = exact_inputs(batch, 2500, 136, dtype, "cuda")
    seed, id_base = seed_tensor(), 3 * GROUP if batch % 2 else 0
    for program, operands, draws in (
        (ROUND[dtype], [], 1),
        (ROUND[dtype], [], 3),
        (ROUND[dtype] + USUAL, usual_operands(batch, 2500), 1),
    ):
        got = gemm_sample.sample(hidden, weight, seed, operands, program, draws, id_base)
        check_same_tokens(got, hidden, weight, seed, operands, program, draws, id_base, allow=1)
    greedy = gemm_sample.argmax(hidden, weight, [], ROUND[dtype], id_base)
    assert torch.equal(greedy, reference.argmax(hidden, weight, [], ROUND[dtype], id_base))


@pytest.mark.parametrize("batch", [7, 32, 64, 100, 300])
@pytest.mark.parametrize("depth", [136, 4096])
def test_a_draw_and_a_greedy_token_by_different_programs(batch, depth):
    hidden, weight = exact_inputs(batch, 2500, depth, torch.bfloat16, "cuda")
    operands = usual_operands(batch, 2500)
    program, greedy_program = "x0 = where(a2, -inf, acc); x1 = div(x0, a0)", "x0 = neg(acc); x1 = add(x0, a1)"
    drawn, greedy = gemm_sample.sample_and_argmax(hidden, weight, seed_tensor(), operands, program, greedy_program)
    check_same_tokens(drawn, hidden, weight, seed_tensor(), operands, program, allow=1)
    assert torch.equal(greedy, reference.argmax(hidden, weight, operands, greedy_program))


@pytest.mark.parametrize("batch", [7, 32, 64, 100, 300])
@pytest.mark.parametrize("kind", ["mask", "odd mask", "transposed mask", "two masks", "f32", "bf16"])
@pytest.mark.parametrize("id_base", [0, 40, 37])
def test_operands_of_every_logit(batch, kind, id_base):
    """Masks by fours and one by one, numbers: each is read early or late, as there are registers for it."""
    vocab = 2501 if kind == "odd mask" else 2500
    hidden, weight = exact_inputs(batch, vocab, 264, torch.bfloat16, "cuda")
    masks = [torch.rand(batch, vocab, device="cuda") < 0.3 for _ in range(2)]
    program, operands = "x0 = where(a0, -inf, acc)", masks[:1]
    if kind == "transposed mask":
        operands = [masks[0].t().contiguous().t()]
    elif kind == "two masks":
        program, operands = "x0 = logical_or(a0, a1); x1 = where(x0, -2.5, acc)", masks
    elif "mask" not in kind:
        dtype = torch.float32 if kind == "f32" else torch.bfloat16
        program, operands = "x0 = add(acc, a0)", [torch.randn(batch, vocab, device="cuda").to(dtype)]
    got = gemm_sample.sample(hidden, weight, seed_tensor(), operands, program, 1, id_base)
    check_same_tokens(got, hidden, weight, seed_tensor(), operands, program, 1, id_base, allow=1)
    greedy = gemm_sample.argmax(hidden, weight, operands, program, id_base)
    assert torch.equal(greedy, reference.argmax(hidden, weight, operands, program, id_base))


@pytest.mark.parametrize("layout", ["transposed", "odd vocabulary", "unaligned", "every other column", "wide rows"])
@pytest.mark.parametrize("id_base", [0, 8, 37])
def test_layouts(layout, id_base):
    hidden, weight = exact_inputs(40, 1503, 72, torch.bfloat16, "cuda")
    if layout == "transposed":
        weight = weight[:1496].t().contiguous().t()
    elif layout == "odd vocabulary":
        weight = weight.t().contiguous().t()
    elif layout == "unaligned":
        weight = torch.cat([weight.flatten(), weight[0]])[1 : 1 + weight.numel()].view_as(weight)
    elif layout == "every other column":
        hidden, weight = (x.repeat_interleave(2, 1)[:, ::2] for x in (hidden, weight))
    else:
        hidden, weight = (torch.cat([x, torch.full_like(x, torch.nan)], 1)[:, :72] for x in (hidden, weight))
    seeds = torch.arange(40, device="cuda") // 2
    got = gemm_sample.sample(hidden, weight, seeds, [], "x0 = round(acc, bf16)", 1, id_base)
    check_same_tokens(got, hidden, weight, seeds, [], "x0 = round(acc, bf16)", 1, id_base, allow=1)
    greedy = gemm_sample.argmax(hidden, weight, [], "", id_base)
    assert torch.equal(greedy, reference.argmax(hidden, weight, [], "", id_base))


def test_tokens_do_not_depend_on_the_tile():
    hidden, weight = exact_inputs(200, 3000, 256, torch.bfloat16, "cuda")
    tiles = [
        Tile(16, 128, 128, 4, 4),
        Tile(64, 128, 64, 4, 4),
        Tile(128, 256, 64, 8, 3, flatten=False),
        Tile(128, 128, 64, 8, 3, use_tma=False),
        TURNS,
    ]
    draws = [gemm_sample.sample(hidden, weight, seed_tensor(), [], "x0 = mul(acc, 0.7)", 1, 0, t) for t in tiles]
    for other in draws[1:]:
        assert torch.equal(draws[0], other)


def test_tokens_do_not_depend_on_programs_that_start_late():
    hidden, weight = exact_inputs(40, 80_000, 64, torch.bfloat16, "cuda")  # enough tiles for that
    tile = Tile(64, 128, 64, 4, 4)
    for config in (tile, replace(tile, stagger=6000)):
        args = hidden, weight, seed_tensor(), [], "x0 = round(acc, bf16)", 1, 0
        check_same_tokens(gemm_sample.sample(*args, config), *args, allow=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [7, 32, 64, 100, 300])
def test_large_numbers(batch, dtype):
    inputs = *exact_inputs(batch, 2500, 136, dtype, "cuda"), seed_tensor()
    check_numbers_that_mask(*inputs)
    check_cold_draws(*inputs)


def test_many_rows_and_corners():
    hidden, weight = exact_inputs(5000, 700, 64, torch.bfloat16, "cuda")
    bias = torch.zeros(5000, 700, device="cuda")
    bias[0] = -torch.inf
    bias[1, [5, 600]] = torch.nan
    bias[2, [7, 8]] = torch.inf
    bias[4999] = -torch.inf
    bias[4999, 699] = -1e30
    bias[4998] = -torch.inf
    bias[4998, 650] = torch.finfo(torch.float32).min
    got = gemm_sample.sample(hidden, weight, seed_tensor(), [bias], "x0 = add(acc, a0)", 2)
    assert got[[0, 1, 2, 4998, 4999]].tolist() == [[0, 0], [5, 5], [7, 7], [650, 650], [699, 699]]
    greedy = gemm_sample.argmax(hidden, weight, [bias], "x0 = add(acc, a0)")
    assert greedy[[0, 1, 2, 4999]].tolist() == [0, 5, 7, 699]
    rest = slice(3, 4998)
    args = hidden[rest], weight, seed_tensor(), [bias[rest]], "x0 = add(acc, a0)"
    check_same_tokens(gemm_sample.sample(*args), *args, allow=1)


def test_float32_follows_torchs_precision(monkeypatch):
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(64, 512, device="cuda", generator=generator)
    weight = torch.randn(4096, 512, device="cuda", generator=generator)
    truth = hidden.double() @ weight.double().t()
    for precision, bound in (("ieee", 1e-4), ("tf32", 0.5)):
        monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", precision)
        token = gemm_sample.argmax(hidden, weight, [], "")
        lost = truth.amax(1) - truth.gather(1, token[:, None])[:, 0]
        assert lost.max() < bound


@pytest.mark.parametrize("vocab, tile", [(100, None), (5003, None), (5003, Tile(128, 256, 64, 8, 3))])
def test_the_distribution_is_softmax(vocab, tile):
    rows, rounds = 1 << 14, 16
    generator = torch.Generator("cuda").manual_seed(1)
    weight = (torch.randn(vocab, 64, device="cuda", generator=generator) * 0.3).bfloat16()
    hidden = torch.randn(1, 64, device="cuda", generator=generator).bfloat16().repeat(rows, 1)
    logits = reference_logits(hidden[:1], weight)
    counts = torch.zeros(vocab, device="cuda", dtype=torch.float64)
    for n in range(rounds):
        drawn = gemm_sample.sample(hidden, weight, seed_tensor(100 + n), [], ROUND[torch.bfloat16], 1, 0, tile)
        counts += drawn.flatten().bincount(minlength=vocab)
    expected = logits.softmax(1)[0] * rows * rounds
    enough = expected >= 5
    freedom = enough.sum() - 1
    chi2 = ((counts - expected)[enough].square() / expected[enough]).sum()
    assert abs((chi2 - freedom) / (2 * freedom) ** 0.5) < 4


def reference_logits(hidden, weight):
    return (hidden.double() @ weight.double().t()).bfloat16().double()


@pytest.mark.parametrize("heads", [[5], [5, 9], [5, 100]])
def test_a_tail_far_below_is_drawn_at_its_rate(heads):
    rows, rounds, gap, vocab = 1 << 14, 1000, 14.0, 128
    weight = torch.zeros(vocab, 64, device="cuda", dtype=torch.bfloat16)
    weight[heads, 0] = gap
    hidden = torch.zeros(rows, 64, device="cuda", dtype=torch.bfloat16)
    hidden[:, 0] = 1
    counts = torch.zeros(vocab, device="cuda", dtype=torch.int64)
    for n in range(rounds):
        drawn = gemm_sample.sample(hidden, weight, seed_tensor(7 + n), [], "")
        counts += drawn.flatten().bincount(minlength=vocab)
    tail = (vocab - len(heads)) * torch.tensor(-gap).exp()
    expected = rows * rounds * (tail / (len(heads) + tail)).item()
    counts[heads] = 0
    assert abs(counts.sum().item() - expected) < 4 * expected**0.5


def capture(function):
    """A CUDA graph of `function` after a warm-up, and what it returned under capture."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


BATCHES = pytest.mark.parametrize("batch, tile", [(16, None), (256, None), (256, TURNS)])


@BATCHES
def test_graph_replays_follow_the_seed(batch, tile):
    scratch.reserve(torch.device("cuda"))
    hidden, weight = exact_inputs(batch, 5000, 128, torch.bfloat16, "cuda")
    seed = seed_tensor()
    graph, out = capture(lambda: gemm_sample.sample(hidden, weight, seed, [], "x0 = mul(acc, 0.5)", config=tile))
    seen = []
    for n in range(5):
        seed.fill_(n)
        graph.replay()
        seen.append(out.clone())
        assert torch.equal(seen[-1], gemm_sample.sample(hidden, weight, seed, [], "x0 = mul(acc, 0.5)", config=tile))
    assert not torch.equal(seen[0], seen[1])


@BATCHES
def test_two_graphs_replay_at_once(batch, tile):
    scratch.reserve(torch.device("cuda"))
    hidden, weight = exact_inputs(batch, 60000, 256, torch.bfloat16, "cuda")
    seeds = [seed_tensor(1), seed_tensor(2)]
    want = [gemm_sample.sample(hidden, weight, s, [], "x0 = mul(acc, 0.5)", config=tile) for s in seeds]
    graphs = [
        capture(lambda s=s: gemm_sample.sample(hidden, weight, s, [], "x0 = mul(acc, 0.5)", config=tile)) for s in seeds
    ]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(50):
        for (graph, _), stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for (_, out), tokens in zip(graphs, want, strict=True):
        assert torch.equal(out, tokens)


@BATCHES
def test_two_streams_at_once(batch, tile):
    hidden, weight = exact_inputs(batch, 60000, 256, torch.bfloat16, "cuda")
    seeds = [seed_tensor(1), seed_tensor(2)]
    want = [gemm_sample.sample(hidden, weight, s, [], "x0 = mul(acc, 0.5)", config=tile) for s in seeds]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    got = [[], []]
    for _ in range(50):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[n].append(gemm_sample.sample(hidden, weight, seeds[n], [], "x0 = mul(acc, 0.5)", config=tile))
    torch.cuda.synchronize()
    for n in range(2):
        assert all(torch.equal(one, want[n]) for one in got[n])


def test_a_graph_captured_without_room_is_still_right(monkeypatch):
    hidden, weight = exact_inputs(16, 5000, 128, torch.bfloat16, "cuda")
    want = gemm_sample.sample(hidden, weight, seed_tensor(), [], "")
    monkeypatch.setattr(scratch._Device, "carve", lambda self, count: None)
    graph, out = capture(lambda: gemm_sample.sample(hidden, weight, seed_tensor_static, [], ""))
    for _ in range(3):
        graph.replay()
        assert torch.equal(out, want)


seed_tensor_static = torch.tensor(0x1234_5678_9ABC, device="cuda") if torch.cuda.is_available() else None


def test_memory_beside_the_inputs():
    hidden = torch.randn(256, 1024, device="cuda").bfloat16()
    weight = torch.randn(151936, 1024, device="cuda").bfloat16()
    scratch._devices.clear()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gemm_sample.sample(hidden, weight, seed_tensor_static, [], "")
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 1 << 20
