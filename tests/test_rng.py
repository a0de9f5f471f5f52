"""The noise: published answers for Philox, and the torch and Triton halves word for word."""

import math

import pytest
import torch
import triton
import triton.language as tl

from fs_inductor.kernels import rng, rng_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALL_ONES = 0xFFFFFFFF
EXTREME_WORDS = torch.tensor(
    [0, 1, 2, 2**23, 2**24 - 1, 2**24, 2**24 + 1, 2**31 - 1, 2**31, 2**31 + 1] + [2**32 - 2**k for k in range(11)]
)


@triton.jit
def words_kernel(seeds, out, first_id, first_row, draw, B: tl.constexpr, N: tl.constexpr):
    row = tl.arange(0, B)[:, None]
    group = tl.arange(0, N)[None, :]
    seed = tl.load(seeds + row)
    words = rng_triton.group_words(seed, first_id + group * 128, first_row + row, draw)
    for j in tl.static_range(8):
        tl.store(out + j * B * N + row * N + group, words[j].to(tl.int64))


@triton.jit
def noise_kernel(words, uniforms, gumbels, N: tl.constexpr):
    i = tl.arange(0, N)
    word = tl.load(words + i).to(tl.uint32)
    tl.store(uniforms + i, rng_triton.uniform(word))
    tl.store(gumbels + i, rng_triton.gumbel(word))


def sample_words(n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, 2**32, (n,), generator=generator)
    words[: len(EXTREME_WORDS)] = EXTREME_WORDS
    # Small words, where the noise is largest, on a logarithmic scale.
    words[len(EXTREME_WORDS) : n // 2] >>= torch.arange(n // 2 - len(EXTREME_WORDS)) % 32
    return words


def bisect_words(holds, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """How many words from 0 on satisfy a predicate that holds for small words only."""
    while bool((high > low).any()):
        middle = (low + high) // 2
        ok = holds(middle.clamp_max(ALL_ONES)) & (middle <= ALL_ONES)
        low, high = torch.where(ok, middle + 1, low), torch.where(ok, high, middle)
    return low


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (ALL_ONES,) * 4,
            (ALL_ONES,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, answer):
    words = rng.philox4x32(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(map(int, words)) == answer


def test_group_words_lay_out_key_and_counter_as_documented():
    # The third known answer again, as (seed, first id, row, draw, half), with a last word of 1.
    seed = torch.tensor(0x299F31D0_A4093822)
    args = (torch.tensor(0x243F6A88), torch.tensor(0x85A308D3), torch.tensor(0x13198A2E))
    got = rng.group_words(seed, *args, half=1)
    key = (torch.tensor(0xA4093822), torch.tensor(0x299F31D0))
    assert got == rng.philox4x32((*args, torch.tensor(1)), key)


@pytest.mark.parametrize("first_id", [0, 5, 2**31 - 200, 2**32 - 300])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF])
def test_torch_and_triton_words_are_equal(seed, first_id):
    rows, groups, draw = 4, 16, 3
    seeds = torch.full((rows,), seed)
    seeds[1] ^= 1 << 40  # a seed of its own for one row
    out = torch.zeros(8, rows, groups, dtype=torch.int64, device=DEVICE)
    words_kernel[(1,)](seeds.to(DEVICE), out, first_id, 7, draw, rows, groups)
    ids = first_id + 128 * torch.arange(groups)
    row = 7 + torch.arange(rows)[:, None]
    expected = [
        word.expand(rows, groups)
        for half in (0, 1)
        for word in rng.group_words(seeds[:, None], ids, row, torch.tensor(draw), half)
    ]
    torch.testing.assert_close(out.cpu(), torch.stack(expected), rtol=0, atol=0)


def test_every_part_of_the_counter_matters():
    base = {"seed": 1, "first_id": 256, "row": 3, "draw": 2, "half": 0}
    changes = [
        {},
        {"seed": 2},
        {"seed": 1 + (1 << 32)},
        {"first_id": 257},
        {"row": 4},
        {"draw": 3},
        {"half": 1},
    ]
    drawn = set()
    for change in changes:
        args = base | change
        half = args.pop("half")
        words = rng.group_words(*(torch.tensor(v) for v in args.values()), half)
        drawn |= {int(word) for word in words}
    assert len(drawn) == 4 * len(changes)


def test_uniforms_are_equal_open_and_ordered():
    words = sample_words(4096)
    uniforms, gumbels = torch.empty(2, 4096, device=DEVICE)
    noise_kernel[(1,)](words.to(DEVICE), uniforms, gumbels, 4096)
    expected = rng.uniform(words)
    assert torch.equal(uniforms.cpu(), expected)
    assert expected.min() == 2.0**-33 and expected.max() == 1 - 2.0**-24
    assert (rng.uniform(words.sort().values).diff() >= 0).all()


def test_gumbels_are_finite_and_accurate():
    words = sample_words(4096)
    uniforms, gumbels = torch.empty(2, 4096, device=DEVICE)
    noise_kernel[(1,)](words.to(DEVICE), uniforms, gumbels, 4096)
    exact = -torch.log(-torch.log1p(-rng.uniform(words).double()))
    for got in (gumbels.cpu(), rng.gumbel(words)):
        assert got.isfinite().all()
        # 2 ulp at |g| >= 1; absolute near zero, where the score is the sum of g and larger terms.
        assert ((got - exact).abs() <= 2.5e-7 * exact.abs().clamp_min(1)).all()
    assert rng.gumbel(torch.tensor(0)) > 22.8
    assert -2.82 < rng.gumbel(torch.tensor(ALL_ONES)) < -2.8


def test_gumbel_tail_has_the_right_measure():
    """Of the 2**32 words, those that give more than x number 2**32 P(Gumbel > x), for x to 22."""
    x = torch.linspace(-2.5, 22, 200)
    low = torch.zeros(200, dtype=torch.int64)
    count = bisect_words(lambda word: rng.gumbel(word) > x, low, low + 2**32)
    expected = -torch.expm1(-torch.exp(-x.double())) * 2.0**32
    # One word of discretisation, and f32's rounding of g and of v.
    assert ((count - expected).abs() <= 1 + 2e-6 * expected).all()


def test_gumbel_moments():
    n = 1 << 18
    words = rng.philox4x32(
        (*(torch.tensor(v) for v in (0, 1, 2)), torch.arange(n)),
        (torch.tensor(1), torch.tensor(2)),
    )
    noise = torch.stack([rng.gumbel(word) for word in words]).double()
    # Mean 0.5772 and variance pi^2/6; 4.5 standard errors of each, with a kurtosis of 5.4.
    std = math.pi / math.sqrt(6)
    assert abs(noise.mean() - 0.5772156649) < 4.5 * std / math.sqrt(4 * n)
    assert abs(noise.var() - std**2) < 4.5 * std**2 * math.sqrt(4.4 / (4 * n))
    correlation = torch.corrcoef(noise) - torch.eye(4)
    assert correlation.abs().max() < 4.5 / math.sqrt(n)


def test_level_bits():
    assert rng.level_bits() == (6, 5, 4, 3, 0, 2, 1)
    assert rng.level_bits(64) == (5, 4, 3, 0, 2, 1)
    assert rng.level_bits(32) == (4, 3, 0, 2, 1)
    assert rng.level_bits(16) == (3, 0, 2, 1)
    assert len(rng.level_bits()) < rng.NUM_WORDS  # the last word is the score's


@pytest.mark.parametrize("group", [0, 8, 100, 256])
def test_level_bits_refuses_other_sizes(group):
    with pytest.raises(ValueError, match=f"not {group}"):
        rng.level_bits(group)
