"""Comparing two samplers index for index: the data that makes it exact, and the excuse a difference needs."""

from __future__ import annotations

import torch

from fs_inductor.kernels import gemm_sample, reference, rng
from fs_inductor.kernels.epilogue import Program

# A score is a sum of three f32 values each good to a few ulp; a merge compares products of f32 sums of 127 terms.
SCORE_ULPS = 16
MERGE_ERROR = 2.0**-18


def exact_inputs(batch, vocab, depth, dtype, device="cpu", seed=0, scale=1.0):
    """hidden [B, D] and weight [V, D] whose product is exact in f32 in any order of summation, about N(0, scale)."""
    generator = torch.Generator().manual_seed(seed)
    steps = max(1, round(16 * scale / (2.0 * depth**0.5)))
    hidden = torch.randint(-2, 3, (batch, depth), generator=generator) / 4
    weight = torch.randint(-steps, steps + 1, (vocab, depth), generator=generator) / 4
    return hidden.to(device, dtype), weight.to(device, dtype)


def check_numbers_that_mask(hidden, weight, seed, config=None):
    """Assert that masking by any large number is masking by infinity, where whole groups are masked and where parts."""
    ids = torch.arange(weight.shape[0], device=weight.device)
    mask = (ids // rng.GROUP % 3 != 1) | (ids % 5 == 0)
    wanted = gemm_sample.sample(hidden, weight, seed, [mask], "x0 = where(a0, -inf, acc)", 1, 0, config)
    assert not mask[wanted].any()
    lowest = [torch.finfo(dtype).min for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    for number in (-1e4, -1e8, -1e9, -3e9, -1e10, -1e11, -1e12, -1e15, -1e20, -1e30, -1e32, -1e35, -1e38, *lowest):
        bias, number = torch.where(mask, number, 0.0), torch.tensor(number, device=mask.device)
        for operands, program in (([mask, number], "x0 = where(a0, a1, acc)"), ([bias], "x0 = add(acc, a0)")):
            drawn = gemm_sample.sample(hidden, weight, seed, operands, program, 1, 0, config)
            assert torch.equal(drawn, wanted), (program, number.item())


def check_cold_draws(hidden, weight, seed, config=None):
    """Assert that draws at temperatures near zero are the largest logit, up to where float32 ends."""
    logits = hidden.float() @ weight.float().t()
    for temperature in (1e-4, 1e-7, 1e-8, 1e-9, 1e-10, 1e-11, 1e-12, 1e-15, 1e-20, 1e-30, 1e-36):
        operands = [torch.tensor(temperature, device=hidden.device)]
        drawn = gemm_sample.sample(hidden, weight, seed, operands, "x0 = div(acc, a0)", 1, 0, config)
        assert torch.equal(logits.gather(1, drawn), logits.amax(1, keepdim=True)), temperature


def check_same_tokens(got, hidden, weight, seed, operands, program, num_samples=1, id_base=0, allow=0):
    """Assert that `got` [B, n] are the reference's tokens, but for at most `allow` near ties."""
    _, want = reference.winners(hidden, weight, seed, operands, program, num_samples, id_base)
    assert got.shape == want.shape and got.dtype == torch.int64
    wrong = (got != want).nonzero().tolist()
    if not wrong:
        return
    logits = Program.parse(program).run(hidden.float() @ weight.float().t(), operands).double().cpu()
    for row, draw in wrong:
        ids = got[row, draw].item(), want[row, draw].item()
        key = 0 if seed.dim() else row, draw, (seed[row] if seed.dim() else seed).item()
        excuse = near_tie(logits[row], *key, *ids, id_base)
        assert excuse, f"row {row} draw {draw}: kernel {ids[0]}, reference {ids[1]}, and no near tie between them"
    assert len(wrong) <= allow, f"{len(wrong)} near ties of {got.numel()} draws, where {allow} were to be expected"


def near_tie(logits, row, draw, seed, id_a, id_b, id_base):
    """Whether rounding may decide between two ids of a row of final logits (f64 [V]): in f64, are they that close?"""
    (score_a, path_a), (score_b, path_b) = (_rank(logits, row, draw, seed, i, id_base) for i in (id_a, id_b))
    if id_a // rng.GROUP != id_b // rng.GROUP:
        ulp = 2.0**-23 * max(1.0, abs(score_a), abs(score_b))
        # The one that lost the comparison of groups must also have won its own group, or nearly.
        return abs(score_a - score_b) <= SCORE_ULPS * ulp and path_a >= -MERGE_ERROR and path_b >= -MERGE_ERROR
    return path_a >= -MERGE_ERROR and path_b >= -MERGE_ERROR


def _rank(logits, row, draw, seed, token, id_base):
    """In f64: the score of the token's group, and by how much the token wins its closest merge (negative: loses)."""
    group = rng.GROUP
    start = token // group * group
    ids = torch.arange(start, start + group)
    inside = (ids >= id_base) & (ids < id_base + logits.numel())
    x = torch.full((group,), -torch.inf, dtype=torch.float64)
    x[inside] = logits[ids[inside] - id_base]
    first = torch.tensor(max(start, id_base))
    args = torch.tensor(seed), first, torch.tensor(row), torch.tensor(draw)
    words = [*rng.group_words(*args, 0), *rng.group_words(*args, 1)]
    score = (torch.logsumexp(x, 0) + rng.gumbel(words[7]).double()).item()
    mass = (x - x.max()).exp()
    margin = 1.0
    bits = rng.level_bits(group)
    position = torch.arange(group)
    for level, bit in enumerate(bits):
        # Positions agreeing with the token on the bits not decided yet, split by this bit.
        later = sum(1 << b for b in bits[level + 1 :])
        mine = (position & later) == ((token - start) & later)
        s0 = mass[mine & (position & (1 << bit) == 0)].sum().item()
        s1 = mass[mine & (position & (1 << bit) != 0)].sum().item()
        total = s0 + s1
        low, small_is_1 = min(s0, s1), s1 < s0
        distance = (low - rng.uniform(words[level]).item() * total) / total  # positive: the smaller side wins
        side = bool((token - start) >> bit & 1)
        margin = min(margin, distance if side == small_is_1 else -distance)
    return score, margin
