"""More of `idiom_cases`: K codebooks, sampled together. ``logits`` gives the rows in the order of the sink's own."""

from __future__ import annotations

import torch
from idiom_cases import INF, T_or_zero, W, Wb, bf16, draw, exact, greedy, h, h3, hb, ids, lin, mixed
from support import BATCH, FEATURES, VOCAB
from torch.nn import functional as F

HEADS = 3
_g = torch.Generator().manual_seed(23)
WK = exact(_g, HEADS * VOCAB, FEATURES)
WKb = WK.bfloat16()
Ws = tuple(WK.view(HEADS, VOCAB, FEATURES).unbind())
bias = exact(_g, HEADS * VOCAB)
head_bias = exact(_g, HEADS, VOCAB)
head_T = torch.rand(HEADS, 1, generator=_g) + 0.5
T = torch.rand(BATCH, 1, 1, generator=_g) + 0.5
T_each = torch.rand(BATCH, HEADS, 1, generator=_g) + 0.5
mask = torch.rand(VOCAB, generator=_g) < 0.3
row_mask = torch.rand(BATCH, HEADS * VOCAB, generator=_g) < 0.3
each_mask = torch.rand(BATCH, HEADS, VOCAB, generator=_g) < 0.3
each_ids = torch.randint(0, VOCAB, (BATCH, HEADS, 3), generator=_g)


def stacked(h, W=WK):
    """``[B, K, V]``."""
    return lin(h, W).unflatten(-1, (HEADS, VOCAB))


def block(head: int) -> slice:
    return slice(head * BATCH, (head + 1) * BATCH)


# -- one linear of K * V outputs ------------------------------------------------------------------------------------


@draw(18, h, WK, logits=stacked, heads=HEADS)
def one_linear(h, W):
    p = F.linear(h, W).view(-1, HEADS, VOCAB).softmax(-1)
    return torch.multinomial(p.view(-1, VOCAB), 1).view(-1, HEADS)


@greedy(18, h, WK, heads=HEADS)
def one_linear_greedy(h, W):
    return F.linear(h, W).view(h.shape[0], HEADS, -1).argmax(-1)


@greedy(18, hb, WKb, heads=HEADS)
def one_linear_keepdim(h, W):
    return F.linear(h, W).float().unflatten(-1, (HEADS, VOCAB)).max(-1, keepdim=True).indices


@draw(18, h3, WK, T, logits=lambda h, W, T: stacked(h[:, -1]) / T.double(), heads=HEADS)
def one_linear_last(h, W, T):
    logits = F.linear(h, W)[:, -1].reshape(-1, HEADS, VOCAB) / T
    return logits.flatten(0, 1).softmax(-1).multinomial(1)


@draw(
    18, h, WK, bias, row_mask, logits=lambda h, W, b, m: (lin(h, W) + b).masked_fill(m, -INF).view(-1, VOCAB),
    heads=HEADS,
)  # fmt: skip
def one_linear_processed_before(h, W, b, m):
    logits = F.linear(h, W, b).masked_fill(m, float("-inf"))
    return logits.view(-1, VOCAB).softmax(-1).multinomial(1)


@draw(
    18, h, WK, head_bias, head_T, mask,
    logits=lambda h, W, b, T, m: ((stacked(h) + b) / T.double()).masked_fill(m, -INF),
    heads=HEADS,
)  # fmt: skip
def one_linear_processed_by_head(h, W, b, T, m):
    logits = ((F.linear(h, W).view(-1, HEADS, VOCAB) + b) / T).masked_fill(m, float("-inf"))
    p = logits.softmax(-1)
    return (p / torch.empty_like(p).exponential_()).argmax(-1)


@draw(
    18, h, WK, T_each, each_mask,
    logits=lambda h, W, T, m: (stacked(h) / T.double()).masked_fill(m, -INF), heads=HEADS,
)  # fmt: skip
def one_linear_processed_after(h, W, T, m):
    logits = F.linear(h, W).view(-1, VOCAB) / T.view(-1, 1)
    return logits.masked_fill(m.view(-1, VOCAB), float("-inf")).softmax(-1).multinomial(1)


@draw(18, h, WK, ids, logits=lambda h, W, i: stacked(h).index_fill(-1, i, -INF), heads=HEADS)
def one_linear_banned(h, W, ids):
    logits = F.linear(h, W).view(-1, HEADS, VOCAB)
    logits[:, :, ids] = float("-inf")
    return logits.view(-1, VOCAB).softmax(-1).multinomial(1)


@draw(18, h, WK, each_ids, logits=lambda h, W, i: stacked(h).scatter(2, i, -INF), heads=HEADS)
def one_linear_scattered(h, W, ids):
    logits = F.linear(h, W).view(-1, HEADS, VOCAB).scatter(2, ids, float("-inf"))
    return (logits - torch.log(-torch.log(torch.rand_like(logits)))).argmax(-1)


@draw(18, h, WK, each_ids, logits=lambda h, W, i: stacked(h).scatter(2, i, -INF), heads=HEADS)
def one_linear_scattered_after(h, W, ids):
    logits = F.linear(h, W).view(-1, VOCAB).scatter(1, ids.view(-1, 3), float("-inf"))
    return logits.softmax(-1).multinomial(1)


@draw(18, h, WK, logits=lambda h, W: stacked(h)[..., :150], heads=HEADS)
def one_linear_sliced(h, W):
    logits = F.linear(h, W).view(-1, HEADS, VOCAB)[..., :150]
    return logits.flatten(0, 1).softmax(-1).multinomial(2, replacement=True)


@draw(18, h, WK, logits=lambda h, W: stacked(h).transpose(0, 1), heads=HEADS, head_rows=block)
def one_linear_head_first(h, W):
    logits = F.linear(h, W).view(-1, HEADS, VOCAB).transpose(0, 1)
    return logits.reshape(-1, VOCAB).softmax(-1).multinomial(1)


@draw(18, h3, WK, T_each, logits=lambda h, W, T: (stacked(h) / T.double()[:, None]).transpose(1, 2), heads=HEADS,
      head_rows=lambda k: torch.arange(BATCH * HEADS * 5).view(BATCH, HEADS, 5)[:, k].flatten())  # fmt: skip
def one_linear_every_position(h, W, T):
    logits = (F.linear(h, W).unflatten(-1, (HEADS, VOCAB)) / T[:, None]).transpose(1, 2)
    return torch.multinomial(logits.reshape(-1, VOCAB).softmax(-1), 1)


@greedy(18, h, WK.view(HEADS, VOCAB, FEATURES), heads=HEADS)
def one_einsum(h, W):
    return torch.einsum("bd,kvd->bkv", h, W).argmax(-1)


@mixed(
    18, h, WK, T_or_zero, logits=lambda h, W, T: stacked(h) / T.double()[:, None, None].clamp(min=1e-5), fused=2,
    heads=HEADS,
)  # fmt: skip
def one_linear_mixed(h, W, T):
    logits = F.linear(h, W).view(-1, HEADS, VOCAB)
    p = (logits / T.clamp(min=1e-5)[:, None, None]).softmax(-1)
    drawn = p.view(-1, VOCAB).multinomial(1).view(-1, HEADS)
    return torch.where(T[:, None] < 1e-5, logits.argmax(-1), drawn)


# -- K linears ------------------------------------------------------------------------------------------------------


def each(h, *Ws):
    return torch.stack([lin(h, W) for W in Ws], 1)


@draw(18, h, *Ws, logits=each, heads=HEADS)
def stack_of_linears(h, *Ws):
    logits = torch.stack([F.linear(h, W) for W in Ws], dim=1)
    return logits.view(-1, VOCAB).softmax(-1).multinomial(1).view(-1, HEADS)


@greedy(18, hb, Wb, Wb.flip(0), heads=2)
def stack_of_linears_greedy(h, *Ws):
    return (torch.stack([F.linear(h, W) for W in Ws], dim=1).float() / 0.7).argmax(-1)


@draw(18, h3, *Ws, T_each, logits=lambda h, *Ws: each(h[:, -1], *Ws[:-1]) / Ws[-1].double(), heads=HEADS)
def stack_of_linears_last(h, *rest):
    *Ws, T = rest
    logits = torch.stack([F.linear(h, W) for W in Ws], dim=1)
    logits = logits.reshape(-1, *logits.shape[2:])[:, -1, :] / T.view(-1, 1)
    return torch.multinomial(logits.softmax(-1), 1).squeeze(1)


@draw(18, h, *Ws, head_bias, logits=lambda h, *Ws: each(h, *Ws[:-1]) + Ws[-1], heads=HEADS)
def stack_of_biased_linears(h, *rest):
    *Ws, b = rest
    logits = torch.stack([F.linear(h, W, b[k]) for k, W in enumerate(Ws)], dim=1)
    p = logits.softmax(-1)
    return (p / torch.empty_like(p).exponential_()).argmax(-1)


@draw(18, hb, Wb, Wb.flip(0), T,
      logits=lambda h, W, V, T: torch.cat([bf16(lin(h, W) / 0.5), lin(h, V)]) / T[0].double(),
      heads=2, head_rows=block)  # fmt: skip
def cat_of_linears(h, W, V, T):
    logits = torch.cat([F.linear(h, W) / 0.5, F.linear(h, V)]).float()
    return (logits / T[0]).softmax(-1).multinomial(1)


@greedy(18, h, W, W.flip(0), heads=2)
def stack_of_linears_in_front(h, *Ws):
    return torch.stack([F.linear(h, W) for W in Ws]).argmax(-1)


# -- one head after another -------------------------------------------------------------------------------------------


@greedy(18, h, WK, fused=HEADS, heads=HEADS)
def one_by_one(h, W):
    logits = F.linear(h, W).view(-1, HEADS, VOCAB)
    return torch.stack([logits[:, k].argmax(-1) for k in range(HEADS)], 1)


@greedy(18, h, *Ws, fused=2, heads=2)
def one_by_one_of_stack(h, *Ws):
    logits = torch.stack([F.linear(h, W) for W in Ws], dim=1)
    return torch.stack([logits[:, 2].argmax(-1), logits[:, 0].argmax(-1)], 1)


@greedy(18, h, WK, fused=HEADS, heads=HEADS)
def one_by_one_of_chunks(h, W):
    return torch.stack([logits.argmax(-1) for logits in F.linear(h, W).chunk(HEADS, -1)], 1)
