"""The Triton kernel in the interpreter is the reference, index for index."""

import pytest
import torch
from kernel_checks import check_cold_draws, check_numbers_that_mask, check_same_tokens, exact_inputs

from fs_inductor.kernels import gemm_sample, reference, scratch
from fs_inductor.kernels.epilogue_ops import OPS
from fs_inductor.kernels.rng import GROUP
from fs_inductor.kernels.tiles import Tile

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter; see tests/gpu")

WIDE = Tile(16, 512, 64, 4, 1)
TILES = {
    "wide": WIDE,
    "narrow": Tile(16, 128, 32, 4, 1),
    "two groups": Tile(32, 256, 16, 4, 1),
    "not flattened": Tile(16, 256, 64, 4, 1, flatten=False),
    "pointers": Tile(16, 256, 32, 4, 1, use_tma=False),
    "staggered": Tile(16, 128, 32, 4, 1, stagger=6000),
}
SEED = torch.tensor(0x1234_5678_9ABC)


def check(hidden, weight, seed=SEED, operands=(), program="", num_samples=1, id_base=0, config=WIDE):
    operands = list(operands)
    got = gemm_sample.sample(hidden, weight, seed, operands, program, num_samples, id_base, config)
    check_same_tokens(got, hidden, weight, seed, operands, program, num_samples, id_base)
    greedy = gemm_sample.argmax(hidden, weight, operands, program, id_base, config)
    assert torch.equal(greedy, reference.argmax(hidden, weight, operands, program, id_base))
    return got


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 8), (5, 300, 24), (17, 129, 40), (3, 515, 7)], ids=str)
def test_shapes_and_dtypes(shape, dtype):
    program = {torch.bfloat16: "x0 = round(acc, bf16)", torch.float16: "x0 = round(acc, f16)"}.get(dtype, "")
    check(*exact_inputs(*shape, dtype), program=program)


@pytest.mark.parametrize("name", TILES)
def test_tokens_do_not_depend_on_the_tile(name):
    hidden, weight = exact_inputs(19, 390, 40, torch.bfloat16)
    check(hidden, weight, num_samples=2, config=TILES[name])


# Every op of the table, and operands of every kind and dtype the emitter loads.
PROGRAMS = {
    "usual": "x0 = round(acc, bf16); x1 = div(x0, 30.0); x2 = tanh(x1); x3 = mul(x2, 30.0); x4 = add(x3, a1); "
    "x5 = where(a3, -inf, x4); x6 = div(x5, a2)",
    "arithmetic": "x0 = sub(acc, a1); x1 = neg(x0); x2 = abs(x1); x3 = sqrt(x2); x4 = add(x2, 1.0); x5 = rsqrt(x4); "
    "x6 = log(x4); x7 = log1p(x2); x8 = exp(x1); x9 = minimum(x8, 8.0); x10 = maximum(x9, a0); x11 = mul(x3, x5); "
    "x12 = add(x6, x7); x13 = add(x10, x11); x14 = sub(x13, x12); x15 = pow(x2, 1.5); x16 = relu(x14); "
    "x17 = sigmoid(x15); x18 = erf(x17); x19 = add(x16, x18); x20 = round(x19, f16); x21 = mul(x20, 4.0)",
    "logic": "x0 = lt(acc, a1); x1 = le(acc, a4); x2 = gt(acc, a2); x3 = ge(acc, a0); x4 = eq(acc, 0.5); "
    "x5 = ne(acc, 0.25); x6 = isnan(acc); x7 = logical_and(x0, x1); x8 = logical_or(x2, x3); x9 = logical_xor(x4, x5); "
    "x10 = logical_not(x6); x11 = logical_and(x7, x8); x12 = logical_or(x11, x9); x13 = logical_and(x12, x10); "
    "x14 = logical_xor(x13, a5); x15 = where(x14, acc, -4.0)",
}


def operands_for(batch, vocab):
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(batch, vocab + 8, generator=generator)
    return [
        torch.tensor(0.75, dtype=torch.float64),
        torch.randn(vocab, generator=generator).bfloat16(),
        torch.rand(batch, 1, generator=generator) + 0.5,
        torch.rand(batch, vocab, generator=generator) < 0.3,
        wide[:, 3 : vocab + 3],
        torch.rand(vocab, batch, generator=generator).t() < 0.5,
    ]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("tile", ["wide", "not flattened"])
def test_epilogue_programs(name, tile):
    hidden, weight = exact_inputs(18, 600, 16, torch.float32)
    check(hidden, weight, operands=operands_for(18, 600), program=PROGRAMS[name], config=TILES[tile])


def test_the_largest_of_small_softcapped_logits():
    """A greedy token hangs on last bits that a draw may leave to rounding."""
    hidden, weight = torch.eye(1, 16), torch.zeros(700, 16)
    weight[:, 0], weight[3, 0], weight[5, 0] = -1, 0.5e-6, 1e-6
    program = "x0 = div(acc, 30.0); x1 = tanh(x0); x2 = mul(x1, 30.0)"
    assert gemm_sample.argmax(hidden, weight, [], program).item() == 5
    assert gemm_sample.sample_and_argmax(hidden, weight, SEED, [], program, program)[1].item() == 5


def test_the_programs_cover_every_op():
    text = " ".join(PROGRAMS.values())
    assert [op for op in OPS if f" {op}(" not in text] == []


def test_draws_and_row_seeds():
    hidden, weight = exact_inputs(6, 260, 16, torch.float32)
    draws = check(hidden, weight, num_samples=5)
    assert torch.equal(draws[:, :2], check(hidden, weight, num_samples=2))
    assert draws.unique().numel() > 5
    seeds = torch.tensor([3, 5, 7, 3, 9, -1])
    rows = check(hidden, weight, seed=seeds, num_samples=3)
    back = check(hidden.flip(0), weight, seed=seeds.flip(0), num_samples=3)
    assert torch.equal(rows, back.flip(0)), "with its own seed, a row's tokens must not depend on its place"


@pytest.mark.parametrize("num_samples", [1, 3])
def test_draws_and_a_greedy_token_in_one_launch(num_samples):
    hidden, weight = exact_inputs(5, 300, 24, torch.float32)
    operands = [torch.rand(5, 1) + 0.5, torch.rand(300) < 0.3]
    drawn, greedy = gemm_sample.sample_and_argmax(
        hidden, weight, SEED, operands, "x0 = div(acc, a0)", "x0 = where(a1, -inf, acc)", num_samples, 0, WIDE
    )
    check_same_tokens(drawn, hidden, weight, SEED, operands, "x0 = div(acc, a0)", num_samples)
    want = (hidden @ weight.t()).masked_fill(operands[1], -torch.inf).argmax(1)
    assert greedy.equal(want)


@pytest.mark.parametrize("id_base", [GROUP, 127, 3 * GROUP + 40, 2**31 + 5])
@pytest.mark.parametrize("tile", ["wide", "pointers"])
def test_a_shard_starts_anywhere(id_base, tile):
    hidden, weight = exact_inputs(4, 300, 16, torch.bfloat16)
    got = check(hidden, weight, id_base=id_base, num_samples=2, config=TILES[tile])
    assert (got >= id_base).all() and (got < id_base + 300).all()


def test_a_row_of_shards_is_the_whole():
    hidden, weight = exact_inputs(4, 3 * GROUP, 16, torch.float32)
    whole = gemm_sample.sample(hidden, weight, SEED, [], "", config=WIDE)
    parts = []
    for start in range(0, 3 * GROUP, GROUP):
        shard = weight[start : start + GROUP]
        token = gemm_sample.sample(hidden, shard, SEED, [], "", id_base=start, config=WIDE)
        score, same = reference.winners(hidden, shard, SEED, [], "", 1, start)
        assert torch.equal(token, same)
        parts.append((score, token))
    best = torch.stack([score for score, _ in parts]).argmax(0, keepdim=True)
    assert torch.equal(torch.stack([token for _, token in parts]).gather(0, best)[0], whole)


def _layouts():
    hidden, weight = exact_inputs(5, 260, 32, torch.float16)
    yield "weight [D, V]", hidden, weight.t().contiguous().t()
    yield "weight [D, V], odd", hidden, weight.t().contiguous().t()[:259]
    yield "weight in a wider one", hidden, weight.repeat(1, 2)[:, :48][:, :32]
    yield "unaligned weight", hidden, torch.cat([weight.flatten(), weight[0]])[1:8321].view(260, 32)
    yield "every other row", hidden, weight.repeat_interleave(2, 0)[::2]
    yield "expanded weight", hidden, weight[:1].expand(260, 32)
    yield "every other column", hidden.repeat_interleave(2, 1)[:, ::2], weight.repeat_interleave(2, 1)[:, ::2]
    yield "transposed hidden", hidden.t().contiguous().t(), weight
    yield "last position", torch.stack([hidden + 1, hidden], 1)[:, -1], weight
    yield "one row, odd stride", torch.cat([hidden, hidden[:, :3]], 1)[:1, :32], weight
    yield "depth 9", hidden[:, :9], weight[:, :9]
    yield "depth 1", hidden[:, :1], weight[:, :1]


@pytest.mark.parametrize("hidden, weight", [pytest.param(h, w, id=name) for name, h, w in _layouts()])
def test_layouts(hidden, weight):
    before = hidden.clone(), weight.clone()
    for id_base in (0, 8):  # 8: where a transposed weight may still be read by descriptor
        check(hidden, weight, id_base=id_base)
    assert torch.equal(hidden, before[0]) and torch.equal(weight, before[1])


def test_nothing_between_the_rows_is_read():
    hidden, weight = exact_inputs(3, 260, 16, torch.float32)
    padded = [torch.full((x.shape[0], 24), torch.nan) for x in (hidden, weight)]
    for x, into in zip((hidden, weight), padded, strict=True):
        into[:, :16] = x
    for tile in (WIDE, TILES["pointers"]):
        got = check(padded[0][:, :16], padded[1][:, :16], config=tile)
        assert torch.equal(got, check(hidden, weight, config=tile))


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("id_base", [0, 40])
@pytest.mark.parametrize(
    "marks, want",
    [
        ({7: NAN, 300: NAN}, 7),
        ({300: NAN, 9: INF}, 300),
        ({450: INF, 301: INF, 302: INF}, 301),
        (dict.fromkeys(range(512), -INF), 0),
        ({i: -INF for i in range(512) if i != 411}, 411),
        ({i: -0.0 if i % 2 else -INF for i in range(512)} | {2: 0.0}, 1),
    ],
    ids=["nan", "nan and inf", "inf", "nothing", "one left", "zeros"],
)
def test_corner_logits(marks, want, id_base):
    hidden, weight = exact_inputs(3, 512, 16, torch.float32)
    row = torch.arange(512.0) * 1e-3
    row[list(marks)] = torch.tensor(list(marks.values()))
    logits = torch.stack([row, torch.zeros(512), row])
    for tile in ("wide", "narrow"):
        args = [hidden * 0, weight, [logits], "x0 = add(acc, a0)"]
        greedy = gemm_sample.argmax(*args, id_base, TILES[tile])
        assert greedy.tolist() == [want + id_base, id_base, want + id_base]
        drawn = gemm_sample.sample(*args[:2], SEED, *args[2:], 1, id_base, TILES[tile])
        assert torch.equal(drawn, reference.sample(*args[:2], SEED, *args[2:], 1, id_base))
        if want != 1:  # zeros are a draw like any other
            assert drawn[0].item() == drawn[2].item() == want + id_base


@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min, -2.2e38, -1e9])
def test_masks_by_finfo_min_are_above_masks_by_infinity(lowest):
    logits = torch.full((40, 300), -INF)
    logits[:, [50, 51, 200]] = lowest
    hidden, weight = exact_inputs(40, 300, 16, torch.float32)
    for tile in ("wide", "narrow"):
        args = hidden * 0, weight, SEED, [logits], "x0 = add(acc, a0)", 1, 0
        drawn = gemm_sample.sample(*args, TILES[tile])
        assert set(drawn.unique().tolist()) == {50, 51}  # so low, what noise is added to a group's score is lost
        assert torch.equal(drawn, reference.sample(*args))


def test_large_numbers():
    """Multiply-adds are not contracted here: what that does to large numbers, only the test on a GPU can see."""
    inputs = *exact_inputs(9, 1000, 16, torch.float32), SEED, WIDE
    check_numbers_that_mask(*inputs)
    check_cold_draws(*inputs)


def test_a_zero_temperature_row_does_not_touch_its_neighbours():
    hidden, weight = exact_inputs(3, 260, 16, torch.float32)
    temperature = torch.tensor([[1.0], [0.0], [1e-5]])
    got = gemm_sample.sample(hidden, weight, SEED, [temperature], "x0 = div(acc, a0)", config=WIDE)
    alone = gemm_sample.sample(hidden, weight, SEED, [torch.ones(3, 1)], "x0 = div(acc, a0)", config=WIDE)
    assert got[0] == alone[0]
    assert got[2].item() in ((hidden[2] @ weight.t()) == (hidden[2] @ weight.t()).max()).nonzero()


def test_empty_batches():
    hidden, weight = exact_inputs(0, 64, 16, torch.float32)
    assert gemm_sample.sample(hidden, weight, SEED, [], "", 3).shape == (0, 3)
    assert gemm_sample.argmax(hidden, weight, [], "").shape == (0,)
    empty = torch.zeros(2, 0), torch.zeros(40, 0)
    assert gemm_sample.argmax(*empty, [torch.arange(40.0)], "x0 = add(acc, a0)").tolist() == [39, 39]


def test_ids_past_32_bits_are_refused():
    hidden, weight = exact_inputs(1, 64, 16, torch.float32)
    with pytest.raises(ValueError, match="id_base"):
        gemm_sample.sample(hidden, weight, SEED, [], "", id_base=2**32 - 8)


def test_scratch_is_left_zero_and_shared_by_a_stream():
    hidden, weight = exact_inputs(40, 300, 16, torch.float32)
    gemm_sample.sample(hidden, weight, SEED, [], "", 3)
    words = scratch.take(hidden.device, 121)
    assert words.data_ptr() == scratch.take(hidden.device, 5).data_ptr()
    assert not words.any()
    many = scratch.take(hidden.device, scratch.BLOCK_WORDS)
    assert many.numel() >= scratch.BLOCK_WORDS and not many.any()


def test_the_distribution_is_softmax():
    vocab, rows = 300, 1 << 13
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(2)) * 2
    logits[::7] = -INF
    hidden, weight = torch.zeros(rows, 16), torch.zeros(vocab, 16)
    tile = Tile(1 << 11, 512, 16, 4, 1)
    drawn = gemm_sample.sample(hidden, weight, SEED, [logits], "x0 = add(acc, a0)", 2, config=tile)
    counts = drawn.flatten().bincount(minlength=vocab).double()
    expected = logits.double().softmax(0) * drawn.numel()
    assert counts[::7].sum() == 0
    enough = expected >= 5
    chi2 = ((counts - expected)[enough].square() / expected[enough]).sum()
    freedom = enough.sum() - 1
    assert (chi2 - freedom) / (2 * freedom) ** 0.5 < 4  # alpha about 1e-4, and the seed is fixed
