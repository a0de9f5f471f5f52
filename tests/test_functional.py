"""`linear_sample` and `linear_argmax`: every argument, every error, seeds, shapes and the corners of the logits."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import pytest
import torch
from idiom_cases import exact
from torch.nn import functional as F

from fs_inductor import linear_argmax, linear_sample

BATCH, VOCAB, FEATURES = 6, 200, 16
_g = torch.Generator().manual_seed(8)
h, W, bias = exact(_g, BATCH, FEATURES), exact(_g, VOCAB, FEATURES), exact(_g, VOCAB)
mask = torch.rand(BATCH, VOCAB, generator=_g) < 0.5
row_bias = exact(_g, BATCH, VOCAB)
SEED = torch.tensor(1234)
INF, NAN = float("inf"), float("nan")


def logits_of(hidden, weight, b=None, softcap=None, m=None):
    """The documented processing, in float32 after the linear's own rounding."""
    own = b is not None and b.shape == weight.shape[:1]
    logits = F.linear(hidden, weight, b if own else None).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if b is not None and not own:
        logits = logits + b
    return logits if m is None else logits.masked_fill(m, -INF)


def rigged(values: list[float], batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and weight whose logits are ``values`` in every row."""
    return torch.ones(batch, 1), torch.tensor(values)[:, None]


# -- what the arguments mean --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"bias": bias},
        {"bias": row_bias},
        {"bias": row_bias[:1]},
        {"bias": row_bias[:, :1]},
        {"softcap": 3.0},
        {"mask": mask},
        {"mask": mask[0]},
        {"bias": bias, "softcap": 2, "mask": mask},
        {"bias": row_bias, "softcap": 2.5, "mask": mask[:1]},
    ],
    ids=" ".join,
)
def test_argmax_is_that_of_the_documented_logits(how, dtype):
    hidden, weight = h.to(dtype), W.to(dtype)
    given = {k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in how.items()}
    expected = logits_of(hidden, weight, given.get("bias"), given.get("softcap"), given.get("mask")).argmax(-1)
    tokens = linear_argmax(hidden, weight, **given)
    assert tokens.dtype is torch.int64
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 1e-6},
        {"temperature": torch.tensor(1e-6)},
        {"temperature": torch.tensor(1e-6, dtype=torch.float64)},
        {"temperature": torch.full((BATCH,), 1e-6)},
        {"temperature": torch.full((BATCH, 1), 1e-6)},
        {"temperature": 1e-6, "bias": bias, "softcap": 2.0, "mask": mask},
        {"temperature": 1e-6, "bias": row_bias},
    ],
    ids=" ".join,
)
def test_cold_draws_are_maxima(how):
    tokens = linear_sample(h, W, seed=SEED, **how)
    logits = logits_of(h, W, how.get("bias"), how.get("softcap"), how.get("mask"))
    assert torch.equal(logits.gather(1, tokens[:, None]).squeeze(1), logits.amax(-1))


def test_temperature_belongs_to_its_row():
    temperature = torch.tensor([1e-6, 1e6] * 3)
    tokens = linear_sample(h, W, temperature=temperature, seed=SEED, num_samples=200)
    cold, hot = tokens[::2], tokens[1::2]
    assert torch.equal(cold, linear_argmax(h, W)[::2, None].expand(-1, 200))
    # 200 draws of 200 equally likely tokens: 126.5 distinct on average, with a deviation of 4.4.
    for row in hot:
        assert 100 < len(row.unique()) < 153


def test_real_numbers_of_other_types():
    numbers = {"temperature": Fraction(1, 2), "softcap": Fraction(2)}  # as numpy's are
    tokens = linear_sample(h, W, **numbers, seed=SEED, num_samples=50)
    assert torch.equal(tokens, linear_sample(h, W, temperature=0.5, softcap=2.0, seed=SEED, num_samples=50))


@pytest.mark.parametrize("temperature", [torch.tensor(0.5), torch.full((BATCH, 1), 0.5)], ids=["0-d", "a row"])
def test_temperature_on_the_cpu_does_not_break_a_graph(temperature):
    def step(temperature):
        return linear_sample(h, W, temperature=temperature, seed=SEED, num_samples=50)

    tokens = torch.compile(step, backend="flashsampling", fullgraph=True)(temperature)
    assert torch.equal(tokens, step(temperature))


def test_temperature_scales_the_logits():
    n = 4_000
    hidden, weight = rigged([0.0, 1.0], n)
    for temperature in (0.5, 1, 2.0, torch.tensor(0.5), torch.tensor([2.0]).expand(n)):
        tokens = linear_sample(hidden, weight, temperature=temperature, seed=SEED)
        number = temperature.flatten()[0].item() if isinstance(temperature, torch.Tensor) else temperature
        expected = 1 / (1 + math.exp(-1 / number))
        sigma = (expected * (1 - expected) / n) ** 0.5
        assert abs(tokens.double().mean().item() - expected) < 4 * sigma


def test_masked_tokens_are_never_drawn():
    tokens = linear_sample(h, W, mask=mask, temperature=100.0, seed=SEED, num_samples=400)
    assert not mask.gather(1, tokens).any()
    # 400 draws of about 100 nearly equal tokens leave out one or two.
    assert all(len(row.unique()) > 80 for row in tokens)


# -- shapes -------------------------------------------------------------------------------------------------------


def test_one_row_without_a_batch():
    assert linear_argmax(h[0], W).shape == ()
    assert linear_argmax(h[0], W) == linear_argmax(h, W)[0]
    assert linear_sample(h[0], W, seed=SEED).shape == ()
    assert linear_sample(h[0], W, seed=SEED, num_samples=3).shape == (3,)
    assert torch.equal(
        linear_sample(h[0], W, seed=SEED, num_samples=3), linear_sample(h, W, seed=SEED, num_samples=3)[0]
    )
    assert linear_argmax(h[0], W, bias, softcap=2.0, mask=mask[0]) == linear_argmax(
        h[:1], W, bias, softcap=2.0, mask=mask[0]
    )


def test_more_than_two_dimensions():
    hidden = h.reshape(2, 3, FEATURES)
    assert torch.equal(linear_argmax(hidden, W), linear_argmax(h, W).reshape(2, 3))
    flat = linear_sample(h, W, seed=SEED, num_samples=4)
    assert torch.equal(linear_sample(hidden, W, seed=SEED, num_samples=4), flat.reshape(2, 3, 4))
    assert linear_sample(hidden, W, seed=SEED, num_samples=1).shape == (2, 3, 1)
    assert linear_sample(hidden, W, seed=SEED).shape == (2, 3)
    for mask3 in (mask.reshape(2, 3, VOCAB), mask[:2].reshape(2, 1, VOCAB), mask[:3], mask[0]):
        rows = mask3.expand(2, 3, VOCAB).reshape(BATCH, VOCAB)
        assert torch.equal(linear_argmax(hidden, W, mask=mask3).flatten(), linear_argmax(h, W, mask=rows))
    temperature = torch.rand(2, 3) + 0.5
    tokens = linear_sample(hidden, W, temperature=temperature, seed=SEED)
    assert torch.equal(tokens.flatten(), linear_sample(h, W, temperature=temperature.flatten(), seed=SEED))
    assert torch.equal(tokens, linear_sample(hidden, W, temperature=temperature[..., None], seed=SEED))
    seeds = torch.arange(6).reshape(2, 3)
    assert torch.equal(linear_sample(hidden, W, seed=seeds).flatten(), linear_sample(h, W, seed=seeds.flatten()))


def test_layouts_of_hidden_and_weight():
    wide = exact(torch.Generator().manual_seed(9), 4 * BATCH, VOCAB)
    for hidden, weight in (
        (wide[::4, :FEATURES], wide.t()[:, :FEATURES]),
        (wide[:FEATURES, :BATCH].t(), wide[:, ::12].t()[:, :FEATURES]),
        (wide[:1, :FEATURES].expand(BATCH, -1), W.flip(0)[::2]),
    ):
        assert torch.equal(linear_argmax(hidden, weight), (hidden @ weight.T).argmax(-1))
        tokens = linear_sample(hidden, weight, seed=SEED)
        assert torch.equal(tokens, linear_sample(hidden.contiguous(), weight.contiguous(), seed=SEED))


def test_empty_batch():
    assert linear_argmax(h[:0], W).shape == (0,)
    assert linear_sample(h[:0], W).shape == (0,)
    assert linear_sample(h[:0], W, seed=torch.zeros(0, dtype=torch.int64), num_samples=2).shape == (0, 2)
    everything = {"bias": row_bias[:0], "softcap": 2.0, "mask": mask[:0], "temperature": torch.ones(0)}
    assert linear_sample(h[:0], W, **everything).shape == (0,)
    assert linear_sample(h.reshape(2, 3, -1)[:, :0], W).shape == (2, 0)


def test_vocabulary_of_one():
    assert linear_argmax(h, W[:1]).tolist() == [0] * BATCH
    assert linear_sample(h, W[:1], bias[:1], seed=SEED, num_samples=2).tolist() == [[0, 0]] * BATCH


# -- the corners of the logits ------------------------------------------------------------------------------------


def test_nan_and_infinities():
    for values, expected in (
        ([0.0, NAN, 5.0, NAN], 1),
        ([INF, NAN], 1),
        ([-INF, -INF, -INF], 0),
        ([-INF, 3.0, -INF], 1),
        ([0.0, INF, 2.0, INF], 1),
        ([-1e38, -INF, -INF], 0),
        ([-INF, torch.finfo(torch.float32).min, -INF], 1),
    ):
        hidden, weight = rigged(values, 3)
        assert linear_argmax(hidden, weight).tolist() == [expected] * 3, values
        tokens = linear_sample(hidden, weight, seed=SEED, num_samples=50)
        assert (tokens == expected).all(), values


def test_argmax_takes_the_lowest_id_of_equals():
    hidden, weight = rigged([0.0] * 150 + [2.0] * 150)
    assert linear_argmax(hidden, weight).item() == 150
    assert linear_argmax(*rigged([-0.0, 0.0])).item() == 0


def test_a_bad_row_leaves_its_neighbours_alone():
    hidden = h.clone()
    hidden[2] = NAN
    good = [0, 1, 3, 4, 5]
    tokens = linear_sample(hidden, W, seed=SEED, num_samples=4)
    assert torch.equal(tokens[good], linear_sample(h, W, seed=SEED, num_samples=4)[good])
    assert (tokens[2] == 0).all()
    assert torch.equal(linear_argmax(hidden, W)[good], linear_argmax(h, W)[good])


# -- seeds --------------------------------------------------------------------------------------------------------


def test_seeds():
    draws = {"num_samples": 8}
    tokens = linear_sample(h, W, seed=SEED, **draws)
    assert torch.equal(tokens, linear_sample(h, W, seed=SEED.clone(), **draws))
    assert not torch.equal(tokens, linear_sample(h, W, seed=SEED + 1, **draws))
    # Longer runs start like shorter ones; draws and rows differ.
    assert torch.equal(tokens[:, :3], linear_sample(h, W, seed=SEED, num_samples=3))
    assert torch.equal(tokens[:, 0], linear_sample(h, W, seed=SEED))
    rows = linear_sample(h[:1].expand(BATCH, -1), W, seed=SEED, **draws)
    assert len({tuple(row) for row in rows.tolist()}) == BATCH


def test_a_seed_a_row_goes_with_its_row():
    seeds = torch.tensor([5, 2**40, -7, 5, 0, 99])
    tokens = linear_sample(h, W, seed=seeds, num_samples=8)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    assert torch.equal(linear_sample(h[order], W, seed=seeds[order], num_samples=8), tokens[order])
    alone = torch.stack(
        [linear_sample(h[i], W, seed=seeds[i : i + 1].reshape(()), num_samples=8) for i in range(BATCH)]
    )
    assert torch.equal(alone, tokens)
    same = linear_sample(h[:1].expand(BATCH, -1), W, seed=seeds, num_samples=8)
    assert torch.equal(same[0], same[3])
    assert len({tuple(row) for row in same.tolist()}) == BATCH - 1


def test_default_generator_and_generator():
    torch.manual_seed(3)
    first, second = (linear_sample(h, W, num_samples=8) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(linear_sample(h, W, num_samples=8), first)
    assert not torch.equal(first, second)
    generator = torch.Generator().manual_seed(4)
    state = torch.get_rng_state()
    first, second = (linear_sample(h, W, generator=generator, num_samples=8) for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    again = linear_sample(h, W, generator=torch.Generator().manual_seed(4), num_samples=8)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_gradients_are_not_asked_for():
    hidden, weight, b = (x.clone().requires_grad_() for x in (h, W, bias))
    temperature = torch.ones(BATCH, requires_grad=True)
    tokens = linear_sample(hidden, weight, b, temperature=temperature, seed=SEED)
    assert torch.equal(tokens, linear_sample(h, W, bias, seed=SEED))
    assert not tokens.requires_grad
    assert torch.equal(linear_argmax(hidden, weight, b), linear_argmax(h, W, bias))


def test_inputs_are_not_written():
    inputs = {"hidden": h, "weight": W, "bias": row_bias, "mask": mask, "temperature": torch.ones(BATCH), "seed": SEED}
    copies = {name: x.clone() for name, x in inputs.items()}
    linear_sample(**inputs, softcap=2.0, num_samples=2)
    assert all(torch.equal(x, copies[name]) for name, x in inputs.items())


# -- errors -------------------------------------------------------------------------------------------------------

ERRORS = [
    (TypeError, "hidden must be a tensor, not list", {"hidden": [1.0]}),
    (TypeError, "weight must be a tensor, not NoneType", {"weight": None}),
    (TypeError, "hidden has dtype torch.float64", {"hidden": h.double()}),
    (TypeError, "weight has dtype torch.int8", {"weight": W.to(torch.int8)}),
    (TypeError, "hidden is torch.bfloat16, but weight is torch.float32", {"hidden": h.bfloat16()}),
    (TypeError, "hidden is a nested tensor", {"hidden": torch.nested.nested_tensor([h, h], layout=torch.jagged)}),
    (ValueError, "hidden is 0-d", {"hidden": torch.tensor(1.0)}),
    (ValueError, "weight has shape (16,)", {"weight": W[0]}),
    (ValueError, "weight has shape (1, 200, 16)", {"weight": W[None]}),
    (ValueError, "hidden has 15 features, but weight has 16", {"hidden": h[:, :15]}),
    (ValueError, "weight has no rows", {"weight": W[:0]}),
    (ValueError, "hidden is on cpu, but weight is on meta", {"weight": W.to("meta")}),
    (TypeError, "bias must be a tensor, not float", {"bias": 1.0}),
    (ValueError, "bias of shape (199,)", {"bias": bias[:199]}),
    (ValueError, "bias of shape (5, 200)", {"bias": row_bias[:5]}),
    (ValueError, "bias of shape (1, 6, 200)", {"bias": row_bias[None]}),
    (ValueError, "bias is on meta", {"bias": bias.to("meta")}),
    (TypeError, "softcap must be a number, not '30'", {"softcap": "30"}),
    (TypeError, "softcap must be a number, not True", {"softcap": True}),
    (ValueError, "softcap must be a finite number > 0, not 0", {"softcap": 0}),
    (ValueError, "softcap must be a finite number > 0, not -3.0", {"softcap": -3.0}),
    (ValueError, "softcap must be a finite number > 0, not nan", {"softcap": NAN}),
    (ValueError, "softcap must be a finite number > 0, not inf", {"softcap": INF}),
    (TypeError, "mask must be a bool tensor (True: never drawn), not torch.float32", {"mask": row_bias}),
    (TypeError, "mask must be a tensor, not list", {"mask": [True] * VOCAB}),
    (ValueError, "mask of shape (6, 199)", {"mask": mask[:, :199]}),
    (ValueError, "mask is on meta", {"mask": mask.to("meta")}),
]
SAMPLE_ERRORS = [
    (ValueError, "temperature must be a finite number > 0, not 0", {"temperature": 0}),
    (ValueError, "temperature must be a finite number > 0, not -0.5", {"temperature": -0.5}),
    (ValueError, "temperature must be a finite number > 0, not nan", {"temperature": NAN}),
    (ValueError, "temperature must be a finite number > 0, not inf", {"temperature": INF}),
    (TypeError, "temperature must be a number or a tensor, not 'hot'", {"temperature": "hot"}),
    (TypeError, "temperature must be a number or a tensor, not True", {"temperature": True}),
    (TypeError, "temperature must be a number or a tensor, not None", {"temperature": None}),
    (ValueError, "temperature must be a finite number > 0, not 0.0", {"temperature": torch.tensor(0.0)}),
    (
        ValueError,
        "temperature must be a finite number > 0, not -2.0",
        {"temperature": torch.tensor([1, 1, -2.0, 1, 1, 1])},
    ),
    (ValueError, "temperature must be a finite number > 0, not nan", {"temperature": torch.tensor([NAN] * BATCH)}),
    (ValueError, "temperature has shape (5,)", {"temperature": torch.ones(5)}),
    (ValueError, "temperature has shape (1, 6)", {"temperature": torch.ones(1, BATCH)}),
    (ValueError, "temperature must be a finite number > 0, not 1000000", {"temperature": 10**400}),
    (ValueError, "seed is on meta, but hidden is on cpu", {"seed": torch.tensor(3, device="meta")}),
    (TypeError, "temperature must be a real tensor, not torch.bool", {"temperature": torch.tensor(True)}),
    (ValueError, "num_samples must be a positive int or None, not 0", {"num_samples": 0}),
    (ValueError, "num_samples must be a positive int or None, not -1", {"num_samples": -1}),
    (ValueError, "num_samples must be a positive int or None, not 1.5", {"num_samples": 1.5}),
    (ValueError, "num_samples must be a positive int or None, not True", {"num_samples": True}),
    (TypeError, "seed must be an int64 tensor, not int; write seed=torch.tensor(...)", {"seed": 3}),
    (TypeError, "seed has dtype torch.int32", {"seed": SEED.int()}),
    (ValueError, "seed has shape (5,)", {"seed": torch.zeros(5, dtype=torch.int64)}),
    (ValueError, "pass seed or generator, not both", {"seed": SEED, "generator": torch.Generator()}),
    (TypeError, "generator must be a torch.Generator, not int", {"generator": 3}),
]


@pytest.mark.parametrize(("error", "message", "wrong"), ERRORS, ids=[message for _, message, _ in ERRORS])
def test_errors(error, message, wrong):
    for function in (linear_argmax, linear_sample):
        with pytest.raises(error, match=re.escape(message)):
            function(**({"hidden": h, "weight": W} | wrong))


@pytest.mark.parametrize(("error", "message", "wrong"), SAMPLE_ERRORS, ids=[message for _, message, _ in SAMPLE_ERRORS])
def test_errors_of_sampling(error, message, wrong):
    with pytest.raises(error, match=re.escape(message)):
        linear_sample(**({"hidden": h, "weight": W} | wrong))
