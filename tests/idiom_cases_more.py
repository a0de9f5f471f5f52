"""More of `idiom_cases`: processed probabilities and log-probabilities, and logits cut into pieces."""

from __future__ import annotations

import torch
from idiom_cases import INF, T, W, Wb, Wh, bias, draw, exact, greedy, h, h3, hb, hh, lin, mask, row_bias
from support import FEATURES, VOCAB
from torch.nn import functional as F

_g = torch.Generator().manual_seed(22)
W2 = exact(_g, 2 * VOCAB, FEATURES)


def kept(logits, mask):
    return logits.masked_fill(~mask, -INF)


# -- probabilities that are processed -----------------------------------------------------------------------------


@draw(1, h, W, 0.7, logits=lambda h, W, T: lin(h, W) / T)
def probabilities_to_a_power(h, W, T):
    p = F.linear(h, W).softmax(-1) ** (1 / T)
    return torch.multinomial(p / p.sum(-1, keepdim=True), 1)


@draw(1, h, W, T, logits=lambda h, W, T: lin(h, W) / T.double())
def probabilities_to_a_power_per_row(h, W, T):
    return torch.multinomial(F.linear(h, W).softmax(-1).pow(1 / T), 1)


@draw(3, h, W, logits=lambda h, W: lin(h, W) * 2)
def race_of_squares(h, W):
    p = F.linear(h, W).softmax(-1).square()
    return (p / torch.empty_like(p).exponential_()).argmax(-1)


@draw(5, h, W, logits=lin)
def gumbel_on_log_probabilities(h, W):
    p = F.linear(h, W).softmax(-1)
    return (p.log() - torch.log(-torch.log(torch.rand_like(p)))).argmax(-1)


@draw(8, h, W, logits=lambda h, W: lin(h, W) / 0.7)
def log_of_softmax_tempered(h, W):
    return (F.linear(h, W).softmax(-1).log() / 0.7).softmax(-1).multinomial(1)


@draw(8, h, W, bias, row_bias, logits=lambda h, W, a, b: (lin(h, W) + a - b.double()) / 0.7)
def log_softmax_biased(h, W, a, b):
    scores = a + F.log_softmax(F.linear(h, W), -1) - b
    return (scores / 0.7).softmax(-1).multinomial(1)


@draw(8, h, W, W.flip(0), logits=lambda h, W, V: 1.5 * lin(h, W) - 0.5 * lin(h, V))
def log_softmaxes_of_two_heads(h, W, V):
    expert, amateur = (F.log_softmax(F.linear(h, weight), -1) for weight in (W, V))
    return (1.5 * expert - 0.5 * amateur).softmax(-1).multinomial(1)


@draw(8, h, W, row_bias, logits=lambda h, W, b: b.double() - lin(h, W))
def log_softmax_subtracted(h, W, b):
    return (b - F.log_softmax(F.linear(h, W), -1)).softmax(-1).multinomial(1)


@greedy(8, h, W, row_bias)
def log_softmax_biased_greedy(h, W, b):
    # Multiples of 1/8 with one maximum a row: the rounding of log-probabilities in eager decides nothing.
    return (F.log_softmax(F.linear(h, W) * 8, -1) + (b * 8)).argmax(-1)


@draw(15, h, W, mask, logits=lambda h, W, m: kept(lin(h, W), m))
def probabilities_times_mask(h, W, m):
    p = F.linear(h, W).softmax(-1) * m
    return torch.multinomial(p / p.sum(-1, keepdim=True), 1)


@draw(15, hb, Wb, mask, logits=lambda h, W, m: kept(lin(h, W), m[0]))
def float_mask_times_probabilities(h, W, m):
    return torch.multinomial(m[0].float() * F.linear(h, W).softmax(-1, dtype=torch.float32), 1)


# -- pieces -------------------------------------------------------------------------------------------------------


@greedy(9, h3, W)
def unbound_position(h, W):
    return F.linear(h, W).unbind(1)[-1].argmax(-1)


@draw(9, h3, W, T, logits=lambda h, W, T: lin(h[:, 3:5], W).flatten(0, 1) / T.double().repeat_interleave(2, 0))
def split_positions(h, W, T):
    _, logits = (F.linear(h, W) / T[:, :, None]).split([3, 2], dim=1)
    return logits.reshape(-1, logits.shape[-1]).softmax(-1).multinomial(1)


@greedy(9, h, W)
def half_of_the_rows(h, W):
    _, logits = F.linear(h, W).chunk(2)
    return logits.argmax(-1)


@draw(13, h, W2, logits=lambda h, W: lin(h, W)[:, :VOCAB])
def chunk_of_vocabulary(h, W):
    logits, _ = F.linear(h, W).chunk(2, -1)
    return logits.softmax(-1).multinomial(1)


@draw(13, h, W, bias, logits=lambda h, W, b: (lin(h, W) + b)[:, 110:], offset=110)
def last_piece_of_vocabulary(h, W, b):
    return F.linear(h, W, b).split(55, -1)[-1].softmax(-1).multinomial(1) + 110


@draw(13, h, W, mask, logits=lambda h, W, m: lin(h, W).masked_fill(m, -INF)[:, 30:130], offset=30)
def middle_piece_of_vocabulary(h, W, m):
    logits = F.linear(h, W).masked_fill(m, float("-inf"))
    return logits.split([30, 100, 30], -1)[1].softmax(-1).multinomial(1) + 30


# -- written in place, through a view of the logits ---------------------------------------------------------------

columns = mask[0]


@draw(15, h3, W, columns, logits=lambda h, W, m: lin(h[:, -1], W).masked_fill(m, -INF))
def masked_in_place_at_the_last_position(h, W, m):
    logits = F.linear(h, W)[:, -1]
    logits[:, m] = -INF
    return torch.multinomial(logits.softmax(-1), 1)


@greedy(12, h3, W)
def scaled_in_place_at_the_last_position(h, W):
    logits = F.linear(h, W)[:, -1]
    logits += 0.5
    logits /= 0.7
    return logits.argmax(-1)


@greedy(13, h3, W)
def band_masked_in_place(h, W):
    logits = F.linear(h, W)[:, -1][..., 12:150]
    logits[..., -9:] = -INF
    logits[:, 3] = -INF
    return logits.argmax(-1)


@draw(6, hh, Wh, logits=lambda h, W: lin(h, W) / 0.7)
def half_noise_tempered_by_a_number(h, W):
    logits = F.linear(h, W)
    noise = -torch.log(-torch.log(torch.rand_like(logits)))
    return (logits + 0.7 * noise).argmax(-1)
