"""How people write next-token sampling: a small step function for each spelling, and what it must sample from.

Hidden states and weights are small multiples of 1/8, so their products are exact in any order of summation, in float32
as in float64: what a test compares is the processing of the logits and the choice of the token, with no slack for the
matrix product, and ties between logits are common.

A case's ``logits`` gives the final logits (any constant per row may be added) in float64, a row for each drawn row,
from the same arguments. Greedy cases have none: eager's tokens are the expectation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from support import BATCH, FEATURES, LENGTH, VOCAB
from torch.nn import functional as F


@dataclass(frozen=True)
class Case:
    """One spelling. idiom: its number in the catalogue, which the table in README.md lists by.

    kind: greedy, draw, or mixed (both from one linear); fused: how many sinks it has.
    heads: how many calls of our ops they become; head_rows: which rows of the sink, and of ``logits``, a head has.
    """

    name: str
    idiom: int
    kind: str
    fn: Callable
    args: tuple
    logits: Callable | None
    fused: int = 1
    offset: int = 0
    heads: int = 1
    head_rows: Callable | None = None

    def rows_of(self, head: int) -> Any:
        return slice(head, None, self.heads) if self.head_rows is None else self.head_rows(head)


CASES: dict[str, Case] = {}


def _register(idiom: int, kind: str, args: tuple, logits: Callable | None, **more: Any) -> Callable:
    def register(fn: Callable) -> Callable:
        assert fn.__name__ not in CASES
        CASES[fn.__name__] = Case(fn.__name__, idiom, kind, fn, args, logits, **more)
        return fn

    return register


def draw(idiom: int, *args: Any, logits: Callable, **more: Any) -> Callable:
    return _register(idiom, "draw", args, logits, **more)


def greedy(idiom: int, *args: Any, **more: Any) -> Callable:
    return _register(idiom, "greedy", args, None, **more)


def mixed(idiom: int, *args: Any, logits: Callable, **more: Any) -> Callable:
    return _register(idiom, "mixed", args, logits, **more)


def exact(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Multiples of 1/8 in [-1, 1]: products of these, and sums of a thousand of them, are exact in float32."""
    return torch.randint(-8, 9, shape, generator=generator) / 8


def lin(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``F.linear`` in float64, rounded once to the dtype of the inputs."""
    return rounded(h.double() @ w.double().T, h.dtype)


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).double()


def bf16(x: torch.Tensor) -> torch.Tensor:
    return rounded(x, torch.bfloat16)


_g = torch.Generator().manual_seed(20)
h, h3, W = exact(_g, BATCH, FEATURES), exact(_g, BATCH, LENGTH, FEATURES), exact(_g, VOCAB, FEATURES)
hb, h3b, Wb = h.bfloat16(), h3.bfloat16(), W.bfloat16()
hh, Wh = h.half(), W.half()
bias, row_bias = exact(_g, VOCAB), exact(_g, BATCH, VOCAB)
T0 = torch.tensor(0.7)
T = torch.rand(BATCH, 1, generator=_g) + 0.5
T_or_zero = torch.tensor([0.0, 0.7, 1.0, 0.0])
mask = torch.rand(BATCH, VOCAB, generator=_g) < 0.3
ids = torch.tensor([1, 5, 7, 130])
row_ids = torch.randint(0, VOCAB, (BATCH, 3), generator=_g)
last = torch.tensor([0, 4, 2, 3])
INF = math.inf


# -- 1: softmax, multinomial --------------------------------------------------------------------------------------


@draw(1, h, W, logits=lin)
def plain(h, W):
    return torch.multinomial(torch.softmax(F.linear(h, W), dim=-1), num_samples=1)


@draw(1, h, W, 0.7, logits=lambda h, W, T: lin(h, W) / T)
def temperature(h, W, T):
    return torch.multinomial(torch.softmax(F.linear(h, W) / T, -1), 1).squeeze(-1)


@draw(1, h, W, T0, logits=lambda h, W, T: lin(h, W) / T.double())
def temperature_0d(h, W, T):
    return (F.linear(h, W) / T).softmax(-1).multinomial(1)


@draw(1, h, W, T, logits=lambda h, W, T: lin(h, W) / T.double())
def temperature_per_row(h, W, T):
    return torch.multinomial(F.softmax(F.linear(h, W) / T, dim=-1), 1)[:, 0]


@draw(1, h, W, T[:, 0], logits=lambda h, W, T: lin(h, W) / T.double()[:, None])
def temperature_vector(h, W, T):
    return torch.multinomial(F.softmax(F.linear(h, W).div_(T.unsqueeze(1)), dim=-1), 1).view(-1)


@draw(1, h, W, 0.3, logits=lambda h, W, T: lin(h, W) / T)
def temperature_guarded(h, W, T):
    return torch.multinomial(torch.softmax(F.linear(h, W) / max(T, 1e-5), -1), 1)


@draw(1, h, W, T, logits=lambda h, W, T: lin(h, W) / T.double())
def temperature_clamped(h, W, T):
    return torch.multinomial(torch.softmax(F.linear(h, W) / T.clamp(min=1e-5), -1), 1)


@draw(1, h, W, 0.7, logits=lambda h, W, T: lin(h, W) / T)
def temperature_inverse(h, W, T):
    return torch.multinomial(torch.softmax(F.linear(h, W) * (1 / T), -1), 1)


@draw(1, h, W, 2, logits=lambda h, W, T: lin(h, W) / T)
def temperature_int(h, W, T):
    return torch.multinomial(torch.softmax(F.linear(h, W) / T, -1), 1)


# -- 2: greedy ----------------------------------------------------------------------------------------------------


@greedy(2, h, W)
def argmax(h, W):
    return F.linear(h, W).argmax(-1)


@greedy(2, h, W)
def argmax_keepdim(h, W):
    return torch.argmax(F.linear(h, W), dim=-1, keepdim=True)


@greedy(2, h, W)
def max_indices(h, W):
    return F.linear(h, W).max(-1).indices


@greedy(2, h, W)
def max_unpacked(h, W):
    _, token = torch.max(F.linear(h, W), dim=-1, keepdim=True)
    return token


@greedy(2, h, W)
def topk_one(h, W):
    return torch.topk(F.linear(h, W), 1, dim=-1).indices


@greedy(2, h, W)
def topk_unpacked(h, W):
    _, token = F.linear(h, W).topk(k=1)
    return token.squeeze(-1)


@greedy(2, hb, Wb)
def argmax_float(h, W):
    return F.linear(h, W).float().argmax(-1)


@greedy(2, h, W)
def argmax_of_softmax(h, W):
    return F.linear(h, W).softmax(-1).argmax(-1)


@greedy(2, h, W)
def argmax_of_log_softmax(h, W):
    return F.log_softmax(F.linear(h, W), -1).argmax(-1)


@greedy(2, h[0], W)
def argmax_flat(h, W):
    return F.linear(h, W).argmax()


@greedy(2, h3, W)
def argmax_every_position(h, W):
    return F.linear(h, W).argmax(-1, keepdim=True)


# -- 3, 4: exponential races --------------------------------------------------------------------------------------


@draw(3, h, W, logits=lambda h, W: lin(h, W) / 0.8)
def race(h, W):
    p = torch.softmax(F.linear(h, W) / 0.8, -1)
    q = torch.empty_like(p).exponential_(1)
    return torch.argmax(p / q, dim=-1, keepdim=True).to(torch.int)


@draw(3, h, W, logits=lambda h, W: lin(h, W) / 0.8)
def race_in_place(h, W):
    p = torch.softmax(F.linear(h, W) / 0.8, -1)
    q = torch.empty_like(p)
    q.exponential_()
    return p.div_(q).argmax(dim=-1)


@draw(3, h, W, logits=lin)
def race_like_logits(h, W):
    logits = F.linear(h, W)
    q = torch.empty_like(logits).exponential_(1)
    return torch.argmax(F.softmax(logits, -1).div_(q), -1).view(-1)


@draw(3, hb, Wb, logits=lin)
def race_half_noise(h, W):
    logits = F.linear(h, W)
    q = torch.empty_like(logits).exponential_(1)
    return torch.argmax(logits.float().softmax(-1) / q, -1)


@draw(4, h, W, logits=lin)
def race_clamped(h, W):
    p = torch.softmax(F.linear(h, W), -1)
    q = torch.empty_like(p).exponential_(1).clamp_min_(1e-10)
    return p.div(q).argmax(-1)


@draw(4, h, W, logits=lin)
def race_log_rand(h, W):
    p = torch.softmax(F.linear(h, W), -1)
    return torch.argmax(p / -torch.log(torch.rand_like(p)), -1)


@draw(4, h, W, logits=lin)
def race_where(h, W):
    p = torch.softmax(F.linear(h, W), -1)
    u = torch.rand(p.shape, device=p.device)
    eps = torch.finfo(u.dtype).eps
    q = -torch.where(u >= 1 - eps / 2, -eps / 2, torch.log(u))
    return torch.argmax(p / q, dim=-1)


# -- 5: Gumbel ----------------------------------------------------------------------------------------------------


@draw(5, h, W, logits=lambda h, W: lin(h, W) / 0.7)
def gumbel(h, W):
    logits = F.linear(h, W) / 0.7
    return torch.argmax(logits - torch.log(-torch.log(torch.rand_like(logits))), -1)


@draw(5, h, W, logits=lambda h, W: lin(h, W) / 0.7)
def gumbel_eps(h, W):
    logits = F.linear(h, W).float()
    u = torch.rand_like(logits)
    return torch.argmax(logits / 0.7 - torch.log(-torch.log(u + 1e-10) + 1e-10), -1)


@draw(5, h, W, logits=lambda h, W: lin(h, W) / 0.7)
def gumbel_clamped(h, W):
    logits = F.linear(h, W)
    g = torch.zeros_like(logits).uniform_(1e-20, 1)
    g = -torch.log(-torch.log(g.clamp(min=1e-10)))
    return (logits / 0.7 + g).argmax(-1)


@draw(5, h, W, logits=lin)
def gumbel_exponential(h, W):
    logits = F.linear(h, W)
    return (-torch.empty_like(logits).exponential_().log() + logits).argmax(dim=-1, keepdim=True)


@draw(5, hb, Wb, logits=lin)
def gumbel_f32_noise(h, W):
    logits = F.linear(h, W)
    u = torch.rand(logits.shape, dtype=torch.float32, device=h.device)
    return torch.argmax(logits - torch.log(-torch.log(u)), -1)


@draw(5, h, W, logits=lin)
def gumbel_f64(h, W):
    logits = F.linear(h, W).to(torch.float64)
    noise = torch.rand_like(logits, dtype=torch.float64)
    return torch.argmax(logits - torch.log(-torch.log(noise)), dim=-1)


@draw(5, h, W, logits=lambda h, W: lin(h, W) / 0.7)
def gumbel_scaled_after(h, W):
    logits = F.linear(h, W) / 0.7
    return ((logits + -torch.log(-torch.log(torch.rand_like(logits)))) / 2.0).argmax(-1)


# -- 6: the temperature on the noise --------------------------------------------------------------------------------


@draw(6, h3, W, 0.7, logits=lambda h, W, T: lin(h, W) / T)
def noise_to_the_power(h, W, T):
    logits = F.linear(h, W).to(torch.float64)
    noise = torch.rand_like(logits, dtype=torch.float64)
    return (logits.exp() / (-torch.log(noise)) ** T).argmax(-1)


@draw(6, h, W, T, logits=lambda h, W, T: lin(h, W) / T.double())
def noise_to_the_power_per_row(h, W, T):
    logits = F.linear(h, W)
    return (logits.exp() / torch.empty_like(logits).exponential_() ** T).argmax(-1)


@draw(6, h, W, logits=lambda h, W: lin(h, W) / 0.7)
def noise_scaled(h, W):
    logits = F.linear(h, W)
    return (logits - 0.7 * torch.log(-torch.log(torch.rand_like(logits)))).argmax(-1)


# -- 7, 8: Categorical, log-softmax ---------------------------------------------------------------------------------


@draw(7, h, W, logits=lambda h, W: lin(h, W) / 0.7)
def categorical_logits(h, W):
    return torch.distributions.Categorical(logits=F.linear(h, W) / 0.7).sample()


@draw(7, h, W, logits=lambda h, W: lin(h, W) / 0.7)
def categorical_probs(h, W):
    return torch.distributions.Categorical(probs=F.softmax(F.linear(h, W) / 0.7, -1)).sample()


@draw(8, h, W, logits=lin)
def log_softmax_exp(h, W):
    return torch.multinomial(F.log_softmax(F.linear(h, W), -1).exp(), 1)


@draw(8, h, W, logits=lin)
def log_softmax_softmax(h, W):
    return torch.multinomial(F.softmax(F.log_softmax(F.linear(h, W), -1), -1), 1)


@draw(8, h, W, logits=lambda h, W: lin(h, W) / 0.7)
def log_softmax_temperature(h, W):
    return (F.log_softmax(F.linear(h, W), -1) / 0.7).softmax(-1).multinomial(1)


@draw(8, h, W, mask, logits=lambda h, W, m: (lin(h, W) / 0.7).masked_fill(m, -INF))
def log_softmax_masked(h, W, m):
    scores = F.log_softmax(F.linear(h, W), -1).masked_fill(m, -INF)
    return (scores / 0.7).softmax(-1).multinomial(1)


@draw(8, h, W, mask, logits=lambda h, W, m: lin(h, W).masked_fill(m, -INF))
def renormalised(h, W, m):
    p = F.linear(h, W).softmax(-1).masked_fill(m, 0)
    return torch.multinomial(p / p.sum(-1, keepdim=True).clamp_min(1e-9), 1)


# -- 16, 19: greedy rows among drawn ones, several samples ----------------------------------------------------------


@mixed(16, h, W, T_or_zero, logits=lambda h, W, T: lin(h, W) / T.double()[:, None].clamp(min=1e-5), fused=2)
def mixed_clamped(h, W, T):
    logits = F.linear(h, W)
    drawn = torch.multinomial((logits / T.clamp(min=1e-5)[:, None]).softmax(-1), 1).squeeze(-1)
    return torch.where(T < 1e-5, logits.argmax(-1), drawn)


@mixed(16, h, W, T_or_zero, logits=lambda h, W, T: lin(h, W) / torch.where(T < 1e-5, 1, T.double())[:, None], fused=2)
def mixed_race(h, W, T):
    logits = F.linear(h, W).float()
    best = logits.argmax(dim=-1)
    p = logits.div_(torch.where(T < 1e-5, 1.0, T).unsqueeze(1)).softmax(dim=-1, dtype=torch.float32)
    drawn = p.div(torch.empty_like(p).exponential_(1)).argmax(dim=-1).view(-1)
    return torch.where(T < 1e-5, best, drawn)


@draw(19, h, W, logits=lin)
def several(h, W):
    return F.linear(h, W).softmax(-1).multinomial(3, replacement=True)


@draw(19, h, W, logits=lin, fused=2)
def two_draws(h, W):
    p = F.linear(h, W).softmax(-1)
    return torch.cat([p.multinomial(1), p.multinomial(2, replacement=True)], 1)
