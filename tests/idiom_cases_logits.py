"""More of `idiom_cases`: what people do to the logits before they sample, and how they spell the LM head."""

from __future__ import annotations

import torch
from idiom_cases import (
    INF,
    T0,
    T,
    W,
    Wb,
    Wh,
    bf16,
    bias,
    draw,
    exact,
    greedy,
    h,
    h3,
    h3b,
    hb,
    hh,
    ids,
    last,
    lin,
    mask,
    rounded,
    row_bias,
    row_ids,
)
from support import BATCH, FEATURES, LENGTH, VOCAB
from torch.nn import functional as F

_g = torch.Generator().manual_seed(21)
mask3 = torch.rand(BATCH, LENGTH, VOCAB, generator=_g) < 0.3
T3 = torch.rand(BATCH, 1, 1, generator=_g) + 0.5
row_mask = torch.tensor([True, False, False, True])
adapter = exact(_g, BATCH, 8), exact(_g, VOCAB, 8)
x32 = torch.randn(BATCH, VOCAB, generator=_g)


def without(logits, columns):
    return logits.index_fill(-1, torch.as_tensor(columns), -INF)


# -- 9: the rows that are needed ----------------------------------------------------------------------------------


@draw(9, h3, W, logits=lambda h, W: lin(h[:, -1], W))
def last_position(h, W):
    logits = F.linear(h, W)[:, -1]
    return torch.multinomial(F.softmax(logits.float(), dim=-1), num_samples=1).squeeze(1)


@draw(9, h3, W, logits=lambda h, W: lin(h[:, -1], W) / 0.7)
def last_position_after(h, W):
    return torch.multinomial((F.linear(h, W) / 0.7)[:, -1, :].softmax(-1), 1)


@greedy(9, h3, W)
def last_position_list(h, W):
    return F.linear(h, W)[:, [-1], :].argmax(-1)


@greedy(9, h3, W)
def last_position_slice(h, W):
    return F.linear(h, W)[:, -1:, :].argmax(dim=-1, keepdim=True)


@greedy(9, h3[:1], W)
def last_position_flat(h, W):
    return F.linear(h, W)[0, -1].argmax()


@draw(9, h3[:1], W, logits=lambda h, W: lin(h[0, -1:], W))
def last_position_flat_draw(h, W):
    return F.linear(h, W)[0, -1].softmax(-1).multinomial(1)


@greedy(9, h3, W)
def last_positions(h, W):
    return F.linear(h, W)[:, -2:].argmax(-1)


@greedy(9, h3, W, last)
def last_position_of_each(h, W, last):
    return F.linear(h, W)[torch.arange(h.shape[0], device=h.device), last].argmax(-1)


@draw(9, h3, W, mask3, T3, bias, logits=lambda h, W, m, T, b: ((lin(h, W) + b).masked_fill(m, -INF) / T)[:, -1])
def last_position_of_processed(h, W, m, T, b):
    logits = (F.linear(h, W) + b).masked_fill(m, float("-inf")) / T
    return torch.multinomial(logits[:, -1].softmax(-1), 1)


@draw(9, h3, W, T3, logits=lambda h, W, T: (lin(h, W) / T.double()).view(-1, VOCAB)[:, :150])
def every_position(h, W, T):
    logits = F.linear(h, W) / T
    return torch.multinomial(logits.view(-1, logits.shape[-1])[..., :150].softmax(-1), 1)


# -- 10: casts ------------------------------------------------------------------------------------------------------


@draw(10, hb, Wb, logits=lambda h, W: lin(h, W) / 0.7)
def float_first(h, W):
    return torch.multinomial((F.linear(h, W).float() / 0.7).softmax(-1), 1)


@draw(10, hb, Wb, logits=lin)
def float_copy(h, W):
    return torch.multinomial(F.linear(h, W).to(torch.float32, copy=True).softmax(-1), 1)


@draw(10, hb, Wb, logits=lambda h, W: bf16(lin(h, W) / 0.7))
def bf16_throughout(h, W):
    return torch.multinomial(F.softmax(F.linear(h, W) / 0.7, -1), 1)


@draw(10, hh, Wh, logits=lambda h, W: rounded(lin(h, W) / 0.7, torch.float16))
def f16_softmax_f32(h, W):
    return torch.multinomial(F.softmax(F.linear(h, W) / 0.7, -1, dtype=torch.float32), 1)


@draw(10, hb, Wb, T0, logits=lambda h, W, T: bf16(lin(h, W) / T.double()))
def bf16_by_f32_scalar(h, W, T):
    return (F.linear(h, W) / T).softmax(-1).multinomial(1)


@draw(10, hb, Wb, T, logits=lambda h, W, T: lin(h, W) / T.double())
def bf16_by_f32_rows(h, W, T):
    return (F.linear(h, W) / T).softmax(-1).multinomial(1)


@draw(10, hb, Wb, logits=lambda h, W: lin(h, W) / 0.7)
def double(h, W):
    return (F.linear(h, W).double() / 0.7).softmax(-1).multinomial(1)


@greedy(10, hb, Wb)
def bf16_argmax(h, W):
    return (F.linear(h, W) * 1.7 + 0.25).argmax(-1)


@greedy(10, hb, Wb)
def bf16_log_softmax_argmax(h, W):
    return F.log_softmax(F.linear(h, W), -1, dtype=torch.float32).argmax(-1)


# -- 11: softcap ----------------------------------------------------------------------------------------------------


@draw(11, h, W, logits=lambda h, W: 5 * torch.tanh(lin(h, W) / 5))
def softcap(h, W):
    return (5.0 * torch.tanh(F.linear(h, W) / 5.0)).softmax(-1).multinomial(1)


@draw(11, hb, Wb, logits=lambda h, W: bf16(bf16(torch.tanh(bf16(lin(h, W) / 30))) * 30))
def softcap_bf16(h, W):
    logits = F.linear(h, W)
    logits = logits / 30.0
    logits = torch.tanh(logits)
    logits = logits * 30.0
    return torch.multinomial(logits.softmax(-1, dtype=torch.float32), 1)


@greedy(11, hb, Wb)
def softcap_greedy(h, W):
    return F.linear(h, W).div(8.0).tanh_().mul_(8.0).argmax(-1)


@draw(11, h, W, logits=lambda h, W: lin(h, W) * torch.tanh(lin(h, W) / 5))
def not_a_softcap(h, W):
    logits = F.linear(h, W)
    return (logits * torch.tanh(logits / 5.0)).softmax(-1).multinomial(1)


# -- 12: scale ------------------------------------------------------------------------------------------------------


@draw(12, h, W, logits=lambda h, W: lin(h, W) * 0.125 / 0.7)
def scale_in_place(h, W):
    logits = F.linear(h, W)
    logits *= 0.125
    logits.div_(0.7)
    return torch.multinomial(logits.softmax(-1), 1)


@draw(12, h3, W, logits=lambda h, W: lin(h, W)[:, -1] / 8)
def scale_before_slice(h, W):
    logits = F.linear(h, W) / 8.0
    return logits[:, -1].softmax(-1).multinomial(1)


@draw(12, h3, W, logits=lambda h, W: lin(h, W)[:, -1] * 0.25)
def scale_after_slice(h, W):
    return (0.25 * F.linear(h, W)[:, -1]).softmax(-1).multinomial(1)


@draw(12, h, W, logits=lambda h, W: lin(h * 0.5, W) * 4)
def scale_hidden(h, W):
    return (F.linear(h * 0.5, W) * 4.0).softmax(-1).multinomial(1)


# -- 13: slices of the vocabulary -------------------------------------------------------------------------------------


@draw(13, h, W, logits=lambda h, W: lin(h, W)[..., :150])
def vocab_slice(h, W):
    return F.linear(h, W)[..., :150].softmax(-1).multinomial(1)


@draw(13, h3, W, bias, logits=lambda h, W, b: (lin(h, W) + b)[:, -1, :150] / 0.7)
def vocab_slice_last(h, W, b):
    logits = F.linear(h, W, b)[:, -1, :150].float()
    return (logits / 0.7).softmax(-1).multinomial(1)


@greedy(13, h, W)
def band(h, W):
    return F.linear(h, W)[..., 10:150].argmax(-1) + 10


@draw(13, h, W, mask, logits=lambda h, W, m: lin(h, W).masked_fill(m, -INF)[:, 20:140], offset=20)
def band_of_masked(h, W, m):
    logits = F.linear(h, W).masked_fill(m, float("-inf"))[:, 20:140]
    return 20 + logits.softmax(-1).multinomial(1)


# -- 14: bias ---------------------------------------------------------------------------------------------------------


@greedy(14, h, W, bias)
def bias_of_linear(h, W, b):
    return F.linear(h, W, b).argmax(-1)


@draw(14, hb, Wb, bias.bfloat16(), logits=lambda h, W, b: bf16(h.double() @ W.double().T + b.double()))
def bias_of_linear_bf16(h, W, b):
    return F.linear(h, W, b).softmax(-1).multinomial(1)


@draw(14, h3, W, bias, logits=lambda h, W, b: (lin(h, W) + b)[:, -1])
def bias_of_linear_last(h, W, b):
    return F.linear(h, W, b)[:, -1].softmax(-1).multinomial(1)


@greedy(14, hb, Wb, bias.bfloat16())
def bias_added_bf16(h, W, b):
    return (F.linear(h, W) + b).argmax(-1)


@draw(14, h, W, bias, row_bias, logits=lambda h, W, a, b: lin(h, W) + a - 2 * b.double())
def biases_added(h, W, a, b):
    logits = F.linear(h, W) + a
    logits = logits.sub(b, alpha=2)
    return logits.softmax(-1).multinomial(1)


@draw(14, h, W, *adapter, logits=lambda h, W, x, A: lin(h, W) + lin(x, A) * 0.5)
def low_rank_added(h, W, x, A):
    return (F.linear(h, W) + F.linear(x, A) * 0.5).softmax(-1).multinomial(1)


# -- 15: masks --------------------------------------------------------------------------------------------------------


@draw(15, h, W, mask, logits=lambda h, W, m: lin(h, W).masked_fill(m, -INF))
def masked_fill(h, W, m):
    return F.linear(h, W).masked_fill(m, float("-inf")).softmax(-1).multinomial(1)


@draw(15, h, W, mask, logits=lambda h, W, m: lin(h, W).masked_fill(~m, -INF))
def masked_where(h, W, m):
    return torch.where(m, F.linear(h, W), float("-inf")).softmax(-1).multinomial(1)


@draw(15, h, W, mask, logits=lambda h, W, m: lin(h, W).masked_fill(m, -INF))
def masked_assign(h, W, m):
    logits = F.linear(h, W)
    logits[m] = -float("inf")
    return logits.softmax(-1).multinomial(1)


@draw(15, h, W, ids, logits=lambda h, W, i: without(lin(h, W), i))
def banned_ids(h, W, ids):
    logits = F.linear(h, W)
    logits[:, ids] = -float("inf")
    return logits.softmax(-1).multinomial(1)


@draw(15, h, W, logits=lambda h, W: without(lin(h, W), [3, 5, 7, *range(150, VOCAB)]))
def banned_constants(h, W):
    logits = F.linear(h, W)
    logits[:, [3, 5]] = -float("inf")
    logits[:, 7] = -float("inf")
    logits[..., 150:] = -float("inf")
    return logits.softmax(-1).multinomial(1)


@draw(15, h, W, row_ids, logits=lambda h, W, i: lin(h, W).scatter(1, i, -INF))
def banned_scatter(h, W, ids):
    return F.linear(h, W).scatter_(1, ids, float("-inf")).softmax(-1).multinomial(1)


@draw(15, h, W, row_ids, logits=lambda h, W, i: lin(h, W).scatter(1, i, -INF))
def banned_per_row(h, W, ids):
    logits = F.linear(h, W)
    logits[torch.arange(h.shape[0], device=h.device)[:, None], ids] = float("-inf")
    return logits.softmax(-1).multinomial(1)


@draw(15, hb, Wb, mask, logits=lambda h, W, m: lin(h, W).masked_fill(m, bf16(torch.tensor(-1e4)).item()))
def masked_finite_bf16(h, W, m):
    return F.linear(h, W).masked_fill(m, -1e4).softmax(-1).multinomial(1)


@greedy(15, h, W, mask, row_mask)
def masked_combined(h, W, m, rows):
    logits = F.linear(h, W)
    return torch.where(m & ~rows[:, None], torch.finfo(logits.dtype).min, logits).argmax(-1)


@greedy(15, h, W, row_mask)
def masked_rows(h, W, rows):
    logits = F.linear(h, W)
    logits[rows] = 0.25
    return logits.argmax(-1)


@draw(15, h3, W, ids, logits=lambda h, W, i: without(lin(h, W), i)[:, -1])
def banned_before_slice(h, W, ids):
    logits = F.linear(h, W)
    logits[:, :, ids] = float("-inf")
    return logits[:, -1].softmax(-1).multinomial(1)


@draw(15, h, W, x32, logits=lambda h, W, x: torch.where(x > 0, lin(h, W) / 1.2, lin(h, W) * 1.2))
def penalty(h, W, x):
    logits = F.linear(h, W)
    return torch.where(x > 0, logits / 1.2, logits * 1.2).softmax(-1).multinomial(1)


# -- 17: layouts ------------------------------------------------------------------------------------------------------


@greedy(17, h, W)
def matmul_transposed(h, E):
    return (h @ E.t()).argmax(-1)


@draw(17, h, W.t().contiguous(), logits=lambda h, W: lin(h, W.t()))
def mm_stored_transposed(h, W):
    return torch.mm(h, W).softmax(-1).multinomial(1)


@greedy(17, h[0], W)
def matvec(h, W):
    return torch.mv(W, h).argmax(-1)


@greedy(17, hb[0], Wb)
def matvec_bf16(h, W):
    return torch.mv(W, h).argmax(-1)


@draw(17, h[0], W, logits=lambda h, W: lin(h[None], W))
def linear_flat(h, W):
    return F.linear(h, W).softmax(-1).multinomial(1)


@greedy(17, h, W)
def einsum(h, W):
    return torch.einsum("bd,vd->bv", h, W).argmax(-1)


@greedy(17, h3, W)
def einsum_last(h, W):
    return torch.einsum("bsd,vd->bsv", h, W)[:, -1].argmax(-1)


@draw(17, h[:, None], W, logits=lambda h, W: lin(h[:, 0], W))
def squeezed(h, W):
    return F.linear(h, W).squeeze(1).softmax(-1).multinomial(1)


@draw(17, h, W, logits=lin)
def unsqueezed(h, W):
    return F.linear(h.unsqueeze(1), W).squeeze(1).softmax(-1).multinomial(1)


@greedy(17, h, W)
def vocab_first(h, W):
    return torch.mm(W, h.t()).argmax(0)


@greedy(17, h3b[:, :, None], Wb)
def four_dims(h, W):
    return (h @ W.T)[:, -1].argmax(-1)


class Tied(torch.nn.Module):
    """A model whose LM head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, FEATURES)
        self.head = torch.nn.Linear(FEATURES, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.embed.weight.data.copy_(W)


@draw(17, Tied(), last, logits=lambda model, tokens: lin(W[tokens], W))
def tied_module(model, tokens):
    logits = model.head(model.embed(tokens)).float()
    return torch.multinomial(logits.softmax(-1), 1)
