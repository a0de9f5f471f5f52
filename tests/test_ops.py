"""The registered ops: opcheck over shapes, dtypes and operands, results against plain torch, and argument errors."""

from __future__ import annotations

import pytest
import torch
from idiom_cases import exact
from torch.library import opcheck

import fs_inductor.ops

OPS = torch.ops.flashsampling
CAP = "x0 = div(acc, 5.0); x1 = tanh(x0); x2 = mul(x1, 5.0); x3 = add(x2, a0); x4 = where(a1, -inf, x3)"
WHOLE = CAP + "; x5 = div(x4, a2); x6 = add(x5, a3)"


def matrices(batch=3, vocab=160, features=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(vocab + features)
    return exact(generator, batch, features).to(dtype), exact(generator, vocab, features).to(dtype)


def operands_of_all_kinds(batch, vocab):
    """Per token, full bool, per row, scalar of another dtype."""
    generator = torch.Generator().manual_seed(batch)
    return [
        exact(generator, vocab),
        torch.rand(batch, vocab, generator=generator) < 0.3,
        torch.rand(batch, 1, generator=generator) + 0.5,
        torch.tensor(2, dtype=torch.int64),
    ]


SHAPES = [(3, 160, 16), (1, 1, 8), (0, 160, 16), (5, 131, 7), (2, 1000, 33)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def sample_arguments(batch, vocab, features, dtype, per_row_seed=False, num_samples=1):
    seed = torch.arange(batch) if per_row_seed else torch.tensor(7)
    operands = operands_of_all_kinds(batch, vocab)
    return (*matrices(batch, vocab, features, dtype), seed, operands, WHOLE, num_samples)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_opcheck_sample(sizes, dtype):
    opcheck(OPS.sample.default, sample_arguments(*sizes, dtype))


@pytest.mark.parametrize("per_row_seed", [False, True])
@pytest.mark.parametrize("num_samples", [1, 5])
def test_opcheck_sample_seeds_and_draws(per_row_seed, num_samples):
    opcheck(OPS.sample.default, sample_arguments(4, 160, 16, torch.float32, per_row_seed, num_samples))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_opcheck_argmax(sizes, dtype):
    hidden, weight, _, operands, program, _ = sample_arguments(*sizes, dtype)
    opcheck(OPS.argmax.default, (hidden, weight, operands, program))
    opcheck(OPS.argmax.default, (hidden, weight, [], ""))


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_opcheck_sample_and_argmax(sizes):
    hidden, weight, seed, operands, program, _ = sample_arguments(*sizes, torch.bfloat16)
    opcheck(OPS.sample_and_argmax.default, (hidden, weight, seed, operands, program, CAP, 2))


def test_opcheck_strided_inputs():
    wide = exact(torch.Generator().manual_seed(1), 160, 64)
    for hidden, weight in (
        (wide[:8, ::4], wide[:, 1::4]),
        (wide[:16, :8].t(), wide[:, :16]),
        (wide[:3, :16], wide[:16, :60].t()),
        (wide[:1, :16].expand(5, 16), wide.flip(1)[:, :16]),
    ):
        opcheck(OPS.argmax.default, (hidden, weight, [], ""))
        opcheck(OPS.sample.default, (hidden, weight, torch.tensor(3), [], "", 2))
        assert torch.equal(OPS.argmax(hidden, weight, [], ""), (hidden @ weight.T).argmax(-1))
        same = OPS.sample(hidden.contiguous(), weight.contiguous(), torch.tensor(3), [], "", 2)
        assert torch.equal(OPS.sample(hidden, weight, torch.tensor(3), [], "", 2), same)


def test_shapes_and_ranges():
    for batch, vocab, features in SHAPES:
        hidden, weight, seed, operands, program, _ = sample_arguments(batch, vocab, features, torch.float32)
        tokens = OPS.sample(hidden, weight, seed, operands, program, 4)
        assert tokens.shape == (batch, 4)
        best = OPS.argmax(hidden, weight, operands, program)
        assert best.shape == (batch,)
        for result in (tokens, best):
            assert result.dtype is torch.int64
            assert ((result >= 0) & (result < vocab)).all()


def test_argmax_of_a_program():
    hidden, weight = matrices(64)
    token_bias, mask, rows, scalar = operands_of_all_kinds(64, 160)
    logits = 5 * torch.tanh(hidden @ weight.T / 5) + token_bias
    logits = logits.masked_fill(mask, -torch.inf) / rows + scalar
    tokens = OPS.argmax(hidden, weight, [token_bias, mask, rows, scalar], WHOLE)
    assert torch.equal(tokens, logits.argmax(-1))


def test_sample_and_argmax_is_the_two_ops():
    hidden, weight, seed, operands, program, _ = sample_arguments(40, 300, 16, torch.float32)
    tokens, best = OPS.sample_and_argmax(hidden, weight, seed, operands, program, CAP, 3)
    assert torch.equal(tokens, OPS.sample(hidden, weight, seed, operands, program, 3))
    assert torch.equal(best, OPS.argmax(hidden, weight, operands[:2], CAP))
    per_row = torch.arange(40)
    tokens, _ = OPS.sample_and_argmax(hidden, weight, per_row, operands, program, "", 1)
    assert torch.equal(tokens, OPS.sample(hidden, weight, per_row, operands, program, 1))


def test_sample_and_argmax_reads_operands_of_either_program():
    hidden, weight = matrices(8)
    low, high = torch.zeros(160), torch.zeros(160)
    low[3], high[5] = 1e4, 1e4
    tokens, best = OPS.sample_and_argmax(
        hidden, weight, torch.tensor(0), [low, high], "x0 = add(acc, a0)", "x0 = add(acc, a1)", 1
    )
    assert (tokens == 3).all()
    assert (best == 5).all()


def test_same_seed_same_tokens():
    hidden, weight = matrices(50)
    seeds = [torch.tensor(s) for s in (1, 1, 2, 1 + 2**32, -1, -(2**63))]
    tokens = [OPS.sample(hidden, weight, seed, [], "", 4) for seed in seeds]
    assert torch.equal(tokens[0], tokens[1])
    # Both halves of the seed count, and its sign.
    for other in tokens[2:]:
        assert not torch.equal(tokens[0], other)
    assert torch.equal(OPS.sample(hidden, weight, seeds[0], [], "", 1), tokens[0][:, :1])
    assert len({tuple(column.tolist()) for column in tokens[0].T}) == 4


def test_inputs_are_not_written():
    arguments = sample_arguments(4, 160, 16, torch.bfloat16)
    hidden, weight, seed, operands, program, n = arguments
    copies = [x.clone() for x in (hidden, weight, seed, *operands)]
    OPS.sample(hidden, weight, seed, operands, program, n)
    OPS.argmax(hidden, weight, operands, program)
    for before, after in zip(copies, (hidden, weight, seed, *operands), strict=True):
        assert torch.equal(before, after)


def test_fake_implementations_keep_a_symbolic_batch():
    """The fake implementation keeps a symbolic batch symbolic."""

    @torch.compile(backend="eager", dynamic=True, fullgraph=True)
    def shapes(hidden, weight, seed):
        return OPS.sample(hidden, weight, seed, [], "", 2).shape, OPS.argmax(hidden, weight, [], "").shape

    for batch in (2, 3):
        hidden, weight = matrices(batch)
        assert shapes(hidden, weight, torch.tensor(1)) == ((batch, 2), (batch,))


h, W = matrices()
seed = torch.tensor(1)
BAD = [
    ("hidden is 0-d", ValueError, lambda: OPS.argmax(torch.tensor(1.0), W, [], "")),
    (
        r"hidden has shape \(2, 3, 16\); it must be \[B, D\]",
        ValueError,
        lambda: OPS.argmax(h.expand(2, 3, 16), W, [], ""),
    ),
    (r"weight has shape \(16,\)", ValueError, lambda: OPS.argmax(h, W[0], [], "")),
    ("hidden has 16 features, but weight has 8", ValueError, lambda: OPS.argmax(h, W[:, :8], [], "")),
    ("weight has no rows", ValueError, lambda: OPS.argmax(h, W[:0], [], "")),
    ("hidden has dtype torch.float64", TypeError, lambda: OPS.argmax(h.double(), W.double(), [], "")),
    ("weight has dtype torch.int8", TypeError, lambda: OPS.argmax(h, W.to(torch.int8), [], "")),
    ("hidden is torch.float32, but weight is torch.bfloat16", TypeError, lambda: OPS.argmax(h, W.bfloat16(), [], "")),
    ("reads 1 operands, but 0 were passed", ValueError, lambda: OPS.argmax(h, W, [], "x0 = add(acc, a0)")),
    ("reads 0 operands, but 1 were passed", ValueError, lambda: OPS.argmax(h, W, [seed], "")),
    (r"operands\[0\] of shape \(161,\)", ValueError, lambda: OPS.argmax(h, W, [torch.ones(161)], "x0 = add(acc, a0)")),
    (
        r"operands\[0\] of shape \(2, 160\)",
        ValueError,
        lambda: OPS.argmax(h, W, [torch.ones(2, 160)], "x0 = add(acc, a0)"),
    ),
    (
        r"operands\[0\] of shape \(1, 3, 160\)",
        ValueError,
        lambda: OPS.argmax(h, W, [torch.ones(1, 3, 160)], "x0 = add(acc, a0)"),
    ),
    (
        r"operands\[0\] has dtype torch.complex64",
        TypeError,
        lambda: OPS.argmax(h, W, [torch.ones(1, dtype=torch.complex64)], "x0 = add(acc, a0)"),
    ),
    ("sinh", ValueError, lambda: OPS.argmax(h, W, [], "x0 = sinh(acc)")),
    ("seed has dtype torch.int32", TypeError, lambda: OPS.sample(h, W, seed.int(), [], "")),
    (r"seed has shape \(2,\)", ValueError, lambda: OPS.sample(h, W, torch.zeros(2, dtype=torch.int64), [], "")),
    ("num_samples must be at least 1, not 0", ValueError, lambda: OPS.sample(h, W, seed, [], "", 0)),
    ("num_samples must be at least 1, not -2", ValueError, lambda: OPS.sample_and_argmax(h, W, seed, [], "", "", -2)),
    (
        "reads 2 operands, but 1 were passed",
        ValueError,
        lambda: OPS.sample_and_argmax(h, W, seed, [seed], "x0 = add(acc, a0)", "x0 = add(acc, a1)"),
    ),
]


@pytest.mark.parametrize(("message", "error", "call"), BAD, ids=[message for message, _, _ in BAD])
def test_errors(message, error, call):
    with pytest.raises(error, match=message):
        call()


def test_two_devices():
    """The meta device stands in for a GPU."""
    with pytest.raises(ValueError, match="hidden is on cpu, but weight is on meta"):
        fs_inductor.ops.argmax(h, W.to("meta"), [], "")
    with pytest.raises(ValueError, match=r"operands\[0\] is on meta, but hidden is on cpu"):
        fs_inductor.ops.argmax(h, W, [torch.ones(1, device="meta")], "x0 = add(acc, a0)")
    with pytest.raises(ValueError, match="seed is on meta, but hidden is on cpu"):
        fs_inductor.ops.sample(h, W, seed.to("meta"), [], "")
