"""Two groups that take turns: the reference's tokens whatever the operands, and the other kernel where it must be."""

import math
from dataclasses import replace

import pytest
import torch
from kernel_checks import check_same_tokens, exact_inputs

from fs_inductor.kernels import gemm_sample, reference
from fs_inductor.kernels.tiles import TURNS, WIDE, device_info

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or device_info(torch.device("cuda", 0)).arch != "sm_90",
        reason="needs the matrix unit of Hopper",
    ),
]

SEED = 0x1234_5678_9ABC
ROUND = {torch.bfloat16: "x0 = round(acc, bf16)", torch.float16: "x0 = round(acc, f16)"}


@pytest.fixture
def launches(monkeypatch):
    """One for each launch of that kernel."""
    pingpong = gemm_sample._pingpong()
    found, launch = [], pingpong.launch
    monkeypatch.setattr(pingpong, "launch", lambda *args: (found.append(args), launch(*args))[1])
    return found


def check(hidden, weight, operands, program, id_base=0, seed=None, tile=TURNS):
    seed = torch.tensor(SEED, device="cuda") if seed is None else seed
    got = gemm_sample.sample(hidden, weight, seed, operands, program, 1, id_base, tile)
    check_same_tokens(got, hidden, weight, seed, operands, program, 1, id_base, allow=1)
    greedy = gemm_sample.argmax(hidden, weight, operands, program, id_base, tile)
    assert torch.equal(greedy, reference.argmax(hidden, weight, operands, program, id_base))


def random(*shape, scale=1.0):
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(5)) * scale


@pytest.mark.parametrize("dtype", list(ROUND))
@pytest.mark.parametrize("batch", [65, 128, 129, 200, 257, 1000])
@pytest.mark.parametrize("vocab, depth", [(2500, 136), (20000, 1024), (90, 64)])
def test_tokens_are_the_references(launches, batch, vocab, depth, dtype):
    hidden, weight = exact_inputs(batch, vocab, depth, dtype, "cuda")
    check(hidden, weight, [], ROUND[dtype])
    assert len(launches) == 2


PROGRAMS = {
    "nothing": ("", ""),
    "twice": ("x0 = round(acc, bf16); x1 = mul(acc, 0.5); x2 = add(x0, x1)", ""),
    "rounded twice": ("x0 = round(acc, bf16); x1 = div(x0, 0.7); x2 = round(x1, bf16)", ""),
    "a constant": ("x0 = add(1.0, 2.0)", ""),
    "many biases": ("; ".join(f"x{n} = add({f'x{n - 1}' if n else 'acc'}, a{n})" for n in range(8)), "t" * 8),
    "scalar": ("x0 = round(acc, bf16); x1 = div(x0, a0)", "s"),
    "row": ("x0 = round(acc, bf16); x1 = div(x0, a0)", "r"),
    "token": ("x0 = add(acc, a0)", "t"),
    "mask": ("x0 = round(acc, bf16); x1 = where(a0, -inf, x0)", "m"),
    "mask as a number": ("x0 = where(a0, 1.0, 0.0); x1 = mul(acc, x0)", "m"),
    "all": (
        "x0 = round(acc, bf16); x1 = div(x0, 30.0); x2 = tanh(x1); x3 = mul(x2, 30.0); x4 = add(x3, a2); "
        "x5 = where(a3, -inf, x4); x6 = div(x5, a1); x7 = mul(x6, a0)",
        "srtm",
    ),
    "functions": ("x0 = exp(acc); x1 = add(x0, 1.0); x2 = log(x1); x3 = sigmoid(x2); x4 = mul(x3, a0)", "r"),
}


def operands_of(letters, batch, vocab):
    make = {
        "s": lambda: torch.tensor(0.8, device="cuda"),
        "r": lambda: random(batch, 1).abs() + 0.5,
        "t": lambda: random(vocab),
        "m": lambda: random(batch, vocab) < -0.5,
    }
    return [make[one]() for one in letters]


@pytest.mark.parametrize("name", list(PROGRAMS))
@pytest.mark.parametrize("id_base", [0, 384, 37])
def test_programs_and_shards(launches, name, id_base):
    program, letters = PROGRAMS[name]
    hidden, weight = exact_inputs(300, 2512, 264, torch.bfloat16, "cuda", scale=0.5)
    check(hidden, weight, operands_of(letters, 300, 2512), program, id_base)
    assert len(launches) == (0 if "m" in letters and id_base % 4 else 2)


@pytest.mark.parametrize("stages", [3, 4, 7])
@pytest.mark.parametrize("depth", [64, 192, 640, 4096])
def test_rings_of_all_lengths(launches, stages, depth):
    """Fewer and more steps than stages, and many tiles a program."""
    tile = replace(TURNS, num_stages=stages)
    hidden, weight = exact_inputs(256, 40000, depth, torch.bfloat16, "cuda")
    check(hidden, weight, [], "x0 = round(acc, bf16)", tile=tile)
    check(hidden, weight, operands_of("m", 256, 40000), "x0 = where(a0, -inf, acc)", tile=tile)
    assert len(launches) == 4


def test_a_mask_from_the_middle_of_wide_rows(launches):
    hidden, weight = exact_inputs(200, 2500, 128, torch.bfloat16, "cuda")
    mask = (random(200, 2512) < 0)[:, 4:2504]
    assert mask.stride() == (2512, 1)
    check(hidden, weight, [mask], "x0 = where(a0, -inf, acc)")
    assert len(launches) == 2


def test_a_mask_of_any_bytes(launches):
    """A byte is true if it is not zero, as where torch reads one."""
    hidden, weight = exact_inputs(200, 2500, 128, torch.bfloat16, "cuda")
    numbers = torch.tensor([0, 0, 1, 2, 127, 128, 255], dtype=torch.uint8, device="cuda")
    mask = numbers[torch.randint(7, (200, 2500), device="cuda", generator=torch.Generator("cuda").manual_seed(5))]
    seed = torch.tensor(SEED, device="cuda")
    args = hidden, weight, seed
    program = "x0 = where(a0, -inf, acc)"
    got = gemm_sample.sample(*args, [mask.view(torch.bool)], program, config=TURNS)
    assert torch.equal(got, gemm_sample.sample(*args, [mask != 0], program, config=WIDE))
    assert len(launches) == 1


def test_a_seed_a_row(launches):
    hidden, weight = exact_inputs(300, 5000, 128, torch.bfloat16, "cuda")
    seeds = torch.arange(300, device="cuda") // 2
    check(hidden, weight, [], "x0 = round(acc, bf16)", 37, seeds)
    assert len(launches) == 2


def test_corners(launches):
    """Rows of nothing but -inf, with a NaN, with two infinities; and a NaN in the hidden states."""
    hidden, weight = exact_inputs(200, 1024, 128, torch.bfloat16, "cuda")
    scale = torch.ones(200, 1, device="cuda")
    scale[0], scale[1] = -math.inf, math.nan
    bias = torch.zeros(1024, device="cuda")
    bias[[7, 300]] = math.inf
    args = hidden, weight, torch.tensor(SEED, device="cuda")
    assert gemm_sample.sample(*args, [bias], "x0 = add(acc, a0)", config=TURNS).unique().tolist() == [7]
    assert gemm_sample.argmax(*args[:2], [bias], "x0 = add(acc, a0)", config=TURNS).unique().tolist() == [7]
    program = "x0 = abs(acc); x1 = add(x0, 1.0); x2 = mul(x1, a0)"
    everything = gemm_sample.sample(*args, [scale], program, config=TURNS)
    assert everything[:2].tolist() == [[0], [0]]
    masked = torch.ones(200, 1024, dtype=torch.bool, device="cuda")
    masked[:, 1000] = False
    found = gemm_sample.sample(*args, [masked], "x0 = where(a0, -inf, acc)", config=TURNS)
    assert found.unique().tolist() == [1000]
    hidden = hidden.clone()
    hidden[5, 3] = math.nan
    assert gemm_sample.sample(hidden, *args[1:], [], "x0 = round(acc, bf16)", config=TURNS)[5].item() == 0
    assert len(launches) == 5


def test_the_distribution_is_softmax(launches):
    vocab, rows = 700, 1 << 15
    weight = random(vocab, 64, scale=0.1).bfloat16()
    hidden = random(1, 64).bfloat16().expand(rows, -1).contiguous()
    counts = torch.zeros(vocab, device="cuda", dtype=torch.float64)
    for n in range(16):
        seed = torch.tensor(n, device="cuda")
        drawn = gemm_sample.sample(hidden, weight, seed, [], "x0 = round(acc, bf16)", config=TURNS)
        counts += drawn.flatten().bincount(minlength=vocab)
    logits = (hidden[:1].float() @ weight.float().t()).bfloat16().double()
    expected = logits.softmax(1)[0] * rows * 16
    freedom = vocab - 1
    chi2 = ((counts - expected).square() / expected).sum()
    assert expected.min() > 5 and abs((chi2 - freedom) / (2 * freedom) ** 0.5) < 4
    assert len(launches) == 16


ELSEWHERE = ["draws", "a pair", "two masks", "many biases", "numbers", "odd mask", "transposed", "unaligned"]


@pytest.mark.parametrize("what", ELSEWHERE)
def test_what_it_cannot_do_the_other_kernel_does(launches, what):
    hidden, weight = exact_inputs(200, 2512, 128, torch.bfloat16, "cuda")
    masks = operands_of("m", 200, 2512) * 2
    seed = torch.tensor(SEED, device="cuda")
    if what == "draws":
        got = gemm_sample.sample(hidden, weight, seed, [], "", 3, config=TURNS)
        check_same_tokens(got, hidden, weight, seed, [], "", 3, allow=1)
    elif what == "a pair":
        drawn, greedy = gemm_sample.sample_and_argmax(hidden, weight, seed, [], "", "x0 = neg(acc)", config=TURNS)
        check_same_tokens(drawn, hidden, weight, seed, [], "", allow=1)
        assert torch.equal(greedy, reference.argmax(hidden, weight, [], "x0 = neg(acc)"))
    elif what == "two masks":
        check(hidden, weight, masks, "x0 = logical_or(a0, a1); x1 = where(x0, -inf, acc)")
    elif what == "numbers":
        check(hidden, weight, [random(200, 2512)], "x0 = add(acc, a0)")
    elif what == "odd mask":
        check(hidden, weight[:2501], [masks[0][:, :2501].contiguous()], "x0 = where(a0, -inf, acc)")
    elif what == "transposed":
        check(hidden, weight.t().contiguous().t(), [], "")
    elif what == "unaligned":
        weight = torch.cat([weight.flatten(), weight[0]])[1 : 1 + weight.numel()].view_as(weight)
        check(hidden, weight, [], "")
    else:
        program = "; ".join(f"x{n} = add({f'x{n - 1}' if n else 'acc'}, a{n})" for n in range(9))
        check(hidden, weight, operands_of("t" * 9, 200, 2512), program)
    assert not launches
