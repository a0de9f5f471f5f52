"""The reference: its distribution, its corners, and that a token depends on what it may depend on."""

import itertools
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fs_inductor.kernels import reference, rng
from fs_inductor.kernels.reference import argmax, sample, winners

G = rng.GROUP
ALPHA = 1e-3
"""Each statistical test fails a correct sampler with this probability; with fixed seeds, once for all."""


@pytest.fixture(autouse=True)
def one_thread():
    """Most of these are thousands of small ops, between which two threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def seed(n: int) -> torch.Tensor:
    return torch.tensor(n)


def problem(batch, vocab, dim=16, dtype=torch.float32, scale=0.6, n=0):
    """Hidden states and a weight whose logits have a standard deviation of `scale * sqrt(dim)`."""
    generator = torch.Generator().manual_seed(n)
    hidden = torch.randn(batch, dim, generator=generator)
    weight = torch.randn(vocab, dim, generator=generator) * scale
    return hidden.to(dtype), weight.to(dtype)


def from_logits(logits):
    """A problem of inner dimension V whose logits are exactly these: [B, V]."""
    return logits, torch.eye(logits.shape[1])


def chi_squared_p(counts, probabilities):
    """The p-value of counts under probabilities. Rare ids share cells of 5 expected counts or more."""
    order = probabilities.argsort()
    expected = probabilities.double()[order] * counts.sum()
    cell = (expected.cumsum(0) / 5).floor().long()
    cell = cell.unique(return_inverse=True)[1]
    cell.clamp_(max=int(cell.max()) - 1)  # the last may be too small
    cells = torch.zeros(int(cell.max()) + 1, dtype=torch.float64)
    got, expected = (cells.index_add(0, cell, x.double()) for x in (counts[order], expected))
    assert len(got) > 2, "too few draws to tell anything"
    statistic = ((got - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(got) - 1) / 2).double(), statistic / 2))


def poisson_interval(mean, alpha=ALPHA):
    """The counts that a Poisson variable of this mean stays within, but for alpha."""
    k = torch.arange(int(mean + 20 * math.sqrt(mean) + 20)).double()
    below = torch.special.gammaincc(k + 1, torch.tensor(mean).double())
    return int((below < alpha / 2).sum()), int((below < 1 - alpha / 2).sum())


# --- The tournament, exactly -----------------------------------------------------------------------


def tournament_measure(logits):
    """For each position, the share of all words that let it win: f64 [G].

    With a word of 0 the smaller side of a pair wins, with the largest word the larger one: the 2**7
    combinations reach each position that has any mass once. From there, the words of one level that
    keep the winner are found by bisection.
    """
    levels = len(rng.level_bits())
    extreme = torch.tensor(list(itertools.product([0, 2**32 - 1], repeat=levels)))
    home = reference.winner_in_group(logits.expand(len(extreme), G), extreme.unbind(1))
    measure = torch.ones(len(extreme), dtype=torch.float64)
    for level in range(levels):
        smaller_wins = extreme[:, level] == 0
        low = torch.zeros(len(extreme), dtype=torch.int64)
        high = low + 2**32
        for _ in range(33):  # the first word at which the smaller side no longer wins
            middle = (low + high) // 2
            words = extreme.clone()
            words[:, level] = middle.clamp_max(2**32 - 1)
            same = reference.winner_in_group(logits.expand(len(extreme), G), words.unbind(1)) == home
            up = (same == smaller_wins) & (middle < 2**32) & (low < high)
            low, high = torch.where(up, middle + 1, low), torch.where(up, high, middle)
        share = low.double() / 2**32
        measure *= torch.where(smaller_wins, share, 1 - share)
    # Where one side of a pair has no mass, both words reach the same position.
    visits = torch.bincount(home, minlength=G).clamp_min(1)
    return torch.zeros(G, dtype=torch.float64).index_add_(0, home, measure) / visits


HEADS = {"one head": [5], "two heads": [5, 70], "two heads in a pair": [64, 65], "last": [127]}


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("gap", [0.0, 3.0, 12.0, 18.0])
def test_tournament_is_exact_to_the_word(heads, gap):
    logits = torch.full((G,), -gap)
    logits[heads] = 0.0
    expected = logits.double().softmax(0)
    # Each of seven levels is cut at a whole word, and its masses are rounded to f32.
    tolerance = 1e-6 * expected + 2.0**-32
    assert ((tournament_measure(logits) - expected).abs() <= tolerance).all()


def test_tournament_on_uneven_logits():
    logits = torch.randn(G, generator=torch.Generator().manual_seed(3)) * 4
    logits[::5] = -math.inf
    expected = logits.double().softmax(0)
    measure = tournament_measure(logits)
    assert ((measure - expected).abs() <= 1e-6 * expected + 2.0**-32).all()
    assert (measure[::5] == 0).all()


def test_of_equal_sides_the_first_counts_as_the_smaller():
    words = [torch.tensor([0, 2**32 - 1])] * 7
    assert reference.winner_in_group(torch.zeros(2, G), words).tolist() == [0, G - 1]


# --- The specification, spelled out ----------------------------------------------------------------


def by_hand(logits, seed, row, draw, id_base=0):
    """One draw for one row of logits (f64 list), following the contract word for word."""
    candidates = []
    vocab = len(logits)
    for start in range(id_base // G * G, id_base + vocab, G):
        ids = range(max(start, id_base), min(start + G, id_base + vocab))
        args = (torch.tensor(v) for v in (seed, ids[0], row, draw))
        seed_, first, row_, draw_ = args
        words = [int(w) for h in (0, 1) for w in rng.group_words(seed_, first, row_, draw_, h)]
        uniforms = [min((word + 0.5) / 2**32, 1 - 2**-24) for word in words]
        top = max(logits[i - id_base] for i in ids)
        if top == -math.inf:
            continue
        nodes = {i % G: (math.exp(logits[i - id_base] - top), i) for i in ids}
        for level, bit in enumerate(rng.level_bits()):
            merged = {}
            for place in {place & ~(1 << bit) for place in nodes}:
                mass0, winner0 = nodes.get(place, (0.0, -1))
                mass1, winner1 = nodes.get(place | 1 << bit, (0.0, -1))
                small = uniforms[level] * (mass0 + mass1) < min(mass0, mass1)
                side1_is_small = mass1 < mass0
                merged[place] = (mass0 + mass1, winner1 if small == side1_is_small else winner0)
            nodes = merged
        ((mass, winner),) = nodes.values()
        gumbel = -math.log(-math.log1p(-uniforms[7]))
        candidates.append((top + math.log(mass) + gumbel, -winner))
    best = max(candidates)
    return -best[1], best[0]


@pytest.mark.parametrize("id_base", [0, 1000, 128 * 7])
@pytest.mark.parametrize("vocab", [1, 100, 128, 700])
def test_every_token_follows_the_contract(vocab, id_base):
    hidden, weight = problem(5, vocab, n=vocab)
    score, ids = winners(hidden, weight, seed(77), [], "", 3, id_base)
    logits = (hidden @ weight.t()).double().tolist()
    for row, draw in itertools.product(range(5), range(3)):
        expected, expected_score = by_hand(logits[row], 77, row, draw, id_base)
        assert ids[row, draw] == expected
        assert abs(score[row, draw] - expected_score) < 1e-5


# --- Distribution ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "scale"), [(100, 0.5), (512, 0.6), (5003, 0.8)])
def test_distribution_is_softmax(vocab, scale, dtype):
    """Chi-squared against softmax in f64, of 75 000 draws from one row of logits."""
    hidden, weight = problem(1, vocab, scale=scale, dtype=dtype, n=vocab)
    rows, draws = 300, 250
    program = "x0 = div(acc, a0)"
    if dtype == torch.bfloat16:
        program = "x0 = round(acc, bf16); x1 = div(x0, a0)"
    ids = sample(hidden.expand(rows, -1), weight, seed(5), [torch.tensor(1.5)], program, draws)
    logits = torch.nn.functional.linear(hidden, weight)[0]
    probabilities = (logits.double() / 1.5).softmax(0)
    counts = torch.bincount(ids.flatten(), minlength=vocab)
    assert chi_squared_p(counts, probabilities) > ALPHA
    # One draw of many rows, and many draws of one row.
    for part in (ids[:, 0], ids[0]):
        counts = torch.bincount(part, minlength=vocab)
        assert chi_squared_p(counts, probabilities) > ALPHA


def test_chi_squared_can_fail():
    """The same test on a sampler that is a little wrong: temperature 1.4 for 1.5."""
    hidden, weight = problem(1, 512, n=512)
    program = "x0 = div(acc, a0)"
    ids = sample(hidden.expand(300, -1), weight, seed(5), [torch.tensor(1.4)], program, 250)
    counts = torch.bincount(ids.flatten(), minlength=512)
    probabilities = ((hidden @ weight.t())[0].double() / 1.5).softmax(0)
    assert chi_squared_p(counts, probabilities) < 1e-9


def test_first_and_second_draws_are_independent():
    """Pairs of draws, of rows and of seeds: the joint distribution is the product."""
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5])
    hidden, weight = from_logits(logits.expand(4000, 4).contiguous())
    pair = logits.double().softmax(0)
    joint = (pair[:, None] * pair).flatten()
    ids = sample(hidden, weight, seed(9), [], "", 6)
    other = sample(hidden, weight, seed(10), [], "", 6)
    for first, second in (
        (ids[:, :-1], ids[:, 1:]),
        (ids[:-1], ids[1:]),
        (ids, other),
        (ids, torch.roll(ids, 1000, 0)),
    ):
        counts = torch.bincount((first * 4 + second).flatten(), minlength=16)
        assert chi_squared_p(counts, joint) > ALPHA


@pytest.mark.parametrize(("heads", "gap"), [([7], 10.0), ([7, 9000], 10.0), ([7, 9000], 18.0)])
def test_tail_across_groups(heads, gap):
    """Far below the heads one tail token is nothing, and 20 000 of them are drawn at their rate."""
    vocab, rows, draws = 20_000, 256, 128
    weight = torch.full((vocab, 1), -gap)
    weight[heads] = 0.0
    ids = sample(torch.ones(rows, 1), weight, seed(3), [], "", draws).flatten()
    tail = ids[~torch.isin(ids, torch.tensor(heads))]
    mass = (vocab - len(heads)) * math.exp(-gap)
    low, high = poisson_interval(rows * draws * mass / (len(heads) + mass))
    assert low <= len(tail) <= high
    missed = vocab * (1 - 1 / vocab) ** len(tail)  # distinct ids, were all equally likely
    low, high = poisson_interval(missed - (vocab - len(tail)))
    assert low <= len(tail) - len(tail.unique()) <= high  # no tail token is a favourite
    beside_heads = torch.isin(tail // G, torch.tensor(heads) // G).sum()
    low, high = poisson_interval(len(tail) * len(heads) * (G - 1) / vocab)
    assert low <= beside_heads <= high


def test_tail_inside_a_group():
    """8 nats below a head of the same group, 127 tail tokens."""
    rows, draws = 512, 128
    weight = torch.full((G, 1), -8.0)
    weight[70] = 0.0
    ids = sample(torch.ones(rows, 1), weight, seed(4), [], "", draws).flatten()
    counts = torch.bincount(ids, minlength=G)
    assert chi_squared_p(counts, weight[:, 0].double().softmax(0)) > ALPHA
    mass = 127 * math.exp(-8)
    low, high = poisson_interval(rows * draws * mass / (1 + mass))
    assert low <= counts.sum() - counts[70] <= high


def test_masked_tokens_are_never_drawn():
    batch, vocab = 64, 1000
    hidden, weight = problem(batch, vocab)
    mask = torch.rand(batch, vocab, generator=torch.Generator().manual_seed(1)) < 0.9
    mask[0] = True
    mask[0, 777] = False  # all but one
    mask[1, : 7 * G] = True  # whole groups
    program = "x0 = where(a0, -inf, acc)"
    ids = sample(hidden, weight, seed(1), [mask], program, 64)
    assert not mask.gather(1, ids).any()
    assert (ids[0] == 777).all()
    greedy = argmax(hidden, weight, [mask], program)
    assert torch.equal(greedy, (hidden @ weight.t()).masked_fill(mask, -math.inf).argmax(1))


@pytest.mark.parametrize("temperature", [1e-5, 1e-10])
def test_low_temperature_is_greedy(temperature):
    hidden, weight = problem(32, 5003)
    operand = torch.ones(32, 1)
    operand[::2] = temperature
    ids = sample(hidden, weight, seed(1), [operand], "x0 = div(acc, a0)", 4)
    assert (ids[::2] == argmax(hidden, weight, [], "")[::2, None]).all()
    hot = sample(hidden, weight, seed(1), [torch.ones(32, 1)], "x0 = div(acc, a0)", 4)
    assert torch.equal(ids[1::2], hot[1::2])  # rows do not see each other


# --- What a token depends on -----------------------------------------------------------------------


def integer_problem(batch, vocab, dim=12, n=0):
    """Logits that are exact in any order of summation, so that every difference is a real one."""
    generator = torch.Generator().manual_seed(n)
    hidden = torch.randint(-2, 3, (batch, dim), generator=generator).float()
    weight = torch.randint(-2, 3, (vocab, dim), generator=generator).float()
    return hidden, weight


def test_a_row_draws_the_same_in_any_batch_and_place():
    hidden, weight = integer_problem(40, 3000)
    seeds = torch.arange(40) * 7919 - 5
    whole = sample(hidden, weight, seeds, [], "x0 = div(acc, 4.0)", 3)
    shuffled = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    again = sample(hidden[shuffled], weight, seeds[shuffled], [], "x0 = div(acc, 4.0)", 3)
    assert torch.equal(again, whole[shuffled])
    for row in (0, 17, 39):
        alone = sample(hidden[[row]], weight, seeds[[row]], [], "x0 = div(acc, 4.0)", 3)
        assert torch.equal(alone, whole[[row]])
    # With one seed for all, a row's place counts, and its batch-mates do not.
    common = sample(hidden, weight, seed(11), [], "x0 = div(acc, 4.0)", 3)
    assert torch.equal(sample(hidden[:9], weight, seed(11), [], "x0 = div(acc, 4.0)", 3), common[:9])
    same = sample(hidden[:1].expand(40, -1), weight, seed(11), [], "x0 = div(acc, 4.0)")
    assert len(same.unique()) > 10


def test_a_draw_is_the_same_however_many_are_asked_for():
    hidden, weight = integer_problem(3, 2000)
    many = sample(hidden, weight, seed(2), [], "x0 = div(acc, 4.0)", 21)
    for n in (1, 8, 9):
        assert torch.equal(sample(hidden, weight, seed(2), [], "x0 = div(acc, 4.0)", n), many[:, :n])
    assert len(many[0].unique()) > 5


@pytest.mark.parametrize(("chunk", "rows"), [(1, 512), (1 << 12, 3), (1 << 30, 1)])
def test_chunks_do_not_show(chunk, rows, monkeypatch):
    hidden, weight = integer_problem(10, 4001)
    operands = [torch.full((10, 1), 3.0), torch.arange(4001) % 7 == 0, torch.randn(10, 4001)]
    program = "x0 = div(acc, a0); x1 = where(a1, -inf, x0); x2 = add(x1, a2)"
    args = (hidden, weight, seed(6), operands, program, 2, 50)
    ids, greedy = sample(*args), argmax(hidden, weight, operands, program, 50)
    monkeypatch.setattr(reference, "CHUNK_LOGITS", chunk)
    monkeypatch.setattr(reference, "ROW_BLOCK", rows)
    assert torch.equal(sample(*args), ids)
    assert torch.equal(argmax(hidden, weight, operands, program, 50), greedy)


@pytest.mark.parametrize("boundary", [1024, 1000])
def test_shards_agree_with_the_whole(boundary):
    """Cut at a group's edge, two shards draw what one does; cut elsewhere, still the distribution."""
    hidden, weight = integer_problem(200, 2000)
    hidden[:] = hidden[0]
    program, draws = "x0 = div(acc, 4.0)", 50
    parts = [
        winners(hidden, weight[:boundary], seed(8), [], program, draws),
        winners(hidden, weight[boundary:], seed(8), [], program, draws, boundary),
    ]
    (score0, ids0), (score1, ids1) = parts
    assert ids0.max() < boundary <= ids1.min()
    ids = torch.where(score1 > score0, ids1, ids0)
    if boundary % G == 0:
        assert torch.equal(ids, sample(hidden, weight, seed(8), [], program, draws))
    probabilities = ((hidden[0] @ weight.t()).double() / 4).softmax(0)
    counts = torch.bincount(ids.flatten(), minlength=2000)
    assert chi_squared_p(counts, probabilities) > ALPHA


def test_seeds_matter_in_all_their_bits():
    hidden, weight = integer_problem(1, 1000)
    args = ([], "x0 = div(acc, 8.0)", 8)
    drawn = {tuple(sample(hidden, weight, seed(1 << k), *args)[0].tolist()) for k in range(63)}
    drawn.add(tuple(sample(hidden, weight, seed(-1), *args)[0].tolist()))
    assert len(drawn) == 64


# --- Layouts, dtypes and programs ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layouts_do_not_matter(dtype):
    hidden, weight = (one.to(dtype) for one in integer_problem(6, 600, 16))
    program = "x0 = round(acc, bf16); x1 = div(x0, 4.0)"
    expected = sample(hidden, weight, seed(1), [], program)
    greedy = argmax(hidden, weight, [], program)
    wide = torch.zeros(600, 32, dtype=dtype)
    wide[:, ::2] = weight
    tall = torch.zeros(1200, 16, dtype=dtype)
    tall[::2] = weight
    layouts = [weight.t().contiguous().t(), wide[:, ::2], tall[::2]]
    hiddens = [hidden, hidden.t().contiguous().t(), torch.cat([hidden, hidden], 1)[:, :16]]
    for one, other in itertools.product(hiddens, layouts):
        assert torch.equal(sample(one, other, seed(1), [], program), expected)
        assert torch.equal(argmax(one, other, [], program), greedy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_where_the_program_puts_it(dtype):
    """Greedy ties are eager's when the program rounds, and gone when it does not."""
    name = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    hidden, weight = problem(64, 3000, 64, dtype)
    bias = torch.randn(3000, generator=torch.Generator().manual_seed(1)).to(dtype)
    linear = torch.nn.functional.linear
    exact = hidden.float() @ weight.float().t()
    cases = [
        (f"x0 = round(acc, {name})", [], linear(hidden, weight)),
        (f"x0 = add(acc, a0); x1 = round(x0, {name})", [bias], linear(hidden, weight, bias)),
        (f"x0 = add(a0, acc); x1 = round(x0, {name})", [bias], linear(hidden, weight, bias)),
        (f"x0 = add(acc, a0); x1 = round(x0, {name})", [bias[:1]], (exact + bias[0].float()).to(dtype)),
        ("", [], exact),
        ("x0 = add(acc, a0)", [bias], exact + bias.float()),
        (f"x0 = add(acc, a0); x1 = round(x0, {name}); x2 = add(x0, x1)", [bias], None),
        (f"x0 = round(acc, {name}); x1 = sub(acc, x0); x2 = abs(x1)", [], None),
    ]
    for program, operands, logits in cases:
        if logits is None:
            x = exact + bias.float() if operands else exact
            rounded = x.to(dtype).float()
            logits = x + rounded if operands else (x - rounded).abs()
        score, ids = winners(hidden, weight, None, operands, program)
        # As large as the largest, up to the order of summation.
        best = logits.float().max(1).values
        near = 2.0**-6 if "round" in program else 1e-4
        assert ((logits.float().gather(1, ids)[:, 0] - best).abs() <= near * best.abs()).all()
        if program.endswith(f"{name})"):
            assert torch.equal(ids[:, 0], logits.argmax(1))
            assert torch.equal(score[:, 0], best)


def test_operands_of_every_shape_reach_their_logits():
    hidden, weight = integer_problem(5, 1300)
    generator = torch.Generator().manual_seed(0)
    shapes = [(), (1,), (5, 1), (1300,), (1, 1300), (5, 1300)]
    operands = [torch.randint(1, 4, shape, generator=generator) for shape in shapes]
    operands.append(torch.rand(5, 1300, generator=generator) < 0.5)
    program = "; ".join(f"x{n} = add({f'x{n - 1}' if n else 'acc'}, a{n})" for n in range(6))
    program += "; x6 = where(a6, x5, -9.0)"
    logits = (hidden @ weight.t()) + sum(operands[:6])
    logits = torch.where(operands[6], logits, -9.0)
    assert torch.equal(argmax(hidden, weight, operands, program), logits.argmax(1))
    score, _ = winners(hidden, weight, None, operands, program)
    assert torch.equal(score[:, 0], logits.max(1).values)


def test_inputs_are_left_alone_and_carry_no_gradient():
    hidden, weight = (one.requires_grad_() for one in problem(2, 300))
    operand = torch.ones(2, 1, requires_grad=True)
    before = [one.detach().clone() for one in (hidden, weight, operand)]
    score, _ = winners(hidden, weight, seed(0), [operand], "x0 = mul(acc, a0)")
    assert not score.requires_grad
    assert all(map(torch.equal, (hidden, weight, operand), before))


# --- Corners ---------------------------------------------------------------------------------------


def test_nan_gives_the_first_nan():
    logits = torch.randn(4, 700, generator=torch.Generator().manual_seed(0))
    logits[1, [650, 300, 299]] = math.nan
    logits[2, 5] = math.inf
    logits[2, 600] = math.nan
    logits[3] = math.nan
    nan_bits = torch.tensor([0x7FC00001, -0x3FFFFF], dtype=torch.int32).view(torch.float32)
    logits[1, 299], logits[1, 650] = nan_bits  # of either sign, and with a payload
    args = (torch.zeros(4, 1), torch.zeros(700, 1), [logits], "x0 = add(acc, a0)")
    hidden, weight, operands, program = args
    greedy = argmax(hidden, weight, operands, program)
    assert greedy.tolist() == [int(logits[0].argmax()), 299, 600, 0]
    drawn = sample(hidden, weight, seed(0), operands, program, 9)
    assert (drawn[1:] == greedy[1:, None]).all()
    assert len(drawn[0].unique()) > 5


def test_infinity_gives_the_first_infinity():
    logits = torch.zeros(2, 700)
    logits[0, [300, 301, 600]] = math.inf
    logits[1, 699] = math.inf
    args = (torch.zeros(2, 1), torch.zeros(700, 1))
    program = "x0 = add(acc, a0)"
    assert argmax(*args, [logits], program).tolist() == [300, 699]
    score, ids = winners(*args, seed(0), [logits], program, 5)
    assert (ids == torch.tensor([[300], [699]])).all() and (score == math.inf).all()


def test_all_minus_infinity_gives_the_first_id():
    logits = torch.full((2, 300), -math.inf)
    logits[1, 200] = -1e30  # far below, and still the only one
    args = (torch.zeros(2, 1), torch.zeros(300, 1))
    for id_base in (0, 1000):
        expected = [id_base, id_base + 200]
        program = "x0 = add(acc, a0)"
        assert argmax(*args, [logits], program, id_base).tolist() == expected
        score, ids = winners(*args, seed(0), [logits], program, 3, id_base)
        assert (ids == torch.tensor(expected)[:, None]).all()
        assert (score[0] == -math.inf).all() and score[1].isfinite().all()


def test_ties_go_to_the_first():
    hidden, weight = torch.ones(3, 1), torch.zeros(1000, 1)
    assert argmax(hidden, weight, [], "").tolist() == [0, 0, 0]
    weight[[400, 900]] = 1.0
    assert argmax(hidden, weight, [], "").tolist() == [400] * 3
    weight[:] = -0.0
    weight[900] = 0.0  # equal to -0.0
    assert argmax(hidden, weight, [], "").tolist() == [0] * 3


def test_huge_logits_stay_finite():
    logits = torch.full((1, 300), -3e38)
    logits[0, 100] = 3e38
    args = (torch.zeros(1, 1), torch.zeros(300, 1))
    score, ids = winners(*args, seed(0), [logits], "x0 = add(acc, a0)", 3)
    assert (ids == 100).all() and score.isfinite().all()


@pytest.mark.parametrize(("batch", "vocab", "dim"), [(0, 50, 4), (3, 1, 4), (1, 1, 1), (2, 50, 0), (0, 1, 0)])
def test_degenerate_sizes(batch, vocab, dim):
    hidden, weight = torch.ones(batch, dim), torch.ones(vocab, dim)
    for one in (seed(1), torch.arange(batch)):
        ids = sample(hidden, weight, one, [], "", 2, 40)
        assert ids.shape == (batch, 2) and ids.dtype == torch.int64
        assert ((ids >= 40) & (ids < 40 + vocab)).all()
    greedy = argmax(hidden, weight, [], "", 40)
    assert greedy.shape == (batch,) and (greedy == 40).all()


def test_ids_above_24_and_31_bits():
    hidden, weight = integer_problem(4, 300)
    for id_base in (2**24 + 1, 2**31 - 100, 2**32 + 128):
        ids = sample(hidden, weight, seed(1), [], "", 2, id_base)
        assert ((ids >= id_base) & (ids < id_base + 300)).all()


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # so that importing it fails
sys.path.insert(0, sys.argv[1])
import torch
from fs_inductor.kernels.reference import sample
ids = sample(torch.ones(2, 4), torch.ones(300, 4), torch.tensor(1), [], "x0 = tanh(acc)")
assert ids.shape == (2, 1)
"""


def test_needs_no_triton():
    root = str(Path(__file__).resolve().parent.parent)
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON, root], check=True, timeout=120)


# --- Memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize(
    ("dtype", "program", "draws"),
    [
        (torch.float32, "x0 = div(acc, a0); x1 = tanh(x0)", 1),
        (torch.bfloat16, "x0 = round(acc, bf16); x1 = div(x0, a0)", 1),
        (torch.bfloat16, "x0 = div(acc, a0)", 1),
        (torch.float32, "", 9),
        (torch.float32, None, 1),
    ],
)
def test_no_allocation_comes_near_the_logits(dtype, program, draws, batch):
    """Every allocation is under a quarter of [B, V]; no program stands for greedy."""
    vocab = 151_936
    hidden, weight = torch.ones(batch, 64, dtype=dtype), torch.ones(vocab, 64, dtype=dtype)
    operands = [torch.ones(batch, 1)]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        if program is None:
            argmax(hidden, weight, operands, "x0 = mul(acc, a0)")
        else:
            sample(hidden, weight, seed(1), operands, program, draws)
    events = recorded.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    assert 0 < max(sizes) < batch * vocab * weight.element_size() / 4
