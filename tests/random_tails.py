"""More of `random_pieces`: from logits to probabilities ``p`` and tokens ``token``, and what must not be fused."""

from __future__ import annotations

from dataclasses import dataclass

from random_pieces import Piece


@dataclass(frozen=True)
class Probs(Piece):
    """From ``x`` to ``p``. score: the logarithm of p, up to a constant per row, from ``x`` in float64."""

    score: str = "x"


@dataclass(frozen=True)
class Sink(Piece):
    """From ``x`` or ``p`` to ``token``.

    needs: "x" or "p". draws: tokens a row, 0 for greedy. sinks: sampling ops in it. keeps: token has a last dimension
    for the draws. score: as in Probs. greedy: rows that are greedy all the same. rank: the only rank of x it takes, if
    there is one; max_rank: the highest.
    """

    needs: str = "p"
    draws: int = 1
    sinks: int = 1
    keeps: bool = False
    score: str = "x"
    greedy: str = ""
    rank: int | None = None
    max_rank: int = 4


@dataclass(frozen=True)
class Refusal(Piece):
    """What must not be fused: in the logits' processing, or, with the stage "tail", in place of ``p`` and ``token``.

    Another result of the step is called ``beside``.
    """

    stage: str = "logits"
    sinks: int = 0
    fuses: bool | None = False


PROBS = [
    Probs("softmax", "p = torch.softmax(x, dim=-1)"),
    Probs("F.softmax, f32", "p = F.softmax(x, dim=-1, dtype=torch.float32)", (10,)),
    Probs("softmax of float()", "p = x.float().softmax(-1)", (10,)),
    Probs("log_softmax, exp", "p = F.log_softmax(x, dim=-1).exp()", (8,)),
    Probs("log_softmax, softmax", "p = F.log_softmax(x, dim=-1).softmax(-1)", (8,)),
    Probs("log_softmax, f32, tempered", "p = (F.log_softmax(x.float(), -1) / 0.7).softmax(-1)", (8,), score="x / 0.7"),
    Probs(
        "log_softmax, masked",
        "p = F.log_softmax(x.float(), -1).masked_fill({mask}, -float('inf')).softmax(-1)",
        (8, 15),
        score="x.masked_fill({mask}, -float('inf'))",
    ),
    Probs(
        "renormalised",
        "p = x.softmax(-1).masked_fill({mask}, 0.0)\np = p / p.sum(-1, keepdim=True)",
        (8, 15),
        score="x.masked_fill({mask}, -float('inf'))",
    ),
    Probs("by hand", "p = torch.exp(x - x.max(dim=-1, keepdim=True).values)\np = p / p.sum(-1, keepdim=True)"),
    Probs("unnormalised", "p = (x - x.amax(-1, keepdim=True)).exp()"),
    Probs("squared", "p = x.float().softmax(-1).square()", fuses=None, score="2.0 * x"),
    Probs("minus logsumexp", "p = (x - x.logsumexp(-1, keepdim=True)).exp()", (8,)),
]

# An argmax with keepdim is a method here: Inductor of torch 2.13 fails on `torch.argmax(x / 0.7, dim=-1, keepdim=True)`
# before our pass runs.
SINKS = [
    Sink("multinomial", "token = torch.multinomial(p, num_samples=1)", (1,), keeps=True, max_rank=2),
    Sink("method multinomial", "token = p.multinomial(1)", (1,), keeps=True, max_rank=2),
    Sink("argmax", "token = x.argmax(-1)", (2,), needs="x", draws=0),
    Sink("argmax, keepdim", "token = x.argmax(-1, keepdim=True)", (2,), needs="x", draws=0, keeps=True),
    Sink("argmax of float()", "token = x.float().argmax(dim=-1)", (2, 10), needs="x", draws=0),
    Sink("argmax of softmax", "token = p.argmax(-1)", (2,), draws=0),
    Sink("argmax of log_softmax", "token = F.log_softmax(x, dim=-1).argmax(-1)", (2,), needs="x", draws=0),
    Sink("max indices", "token = x.max(-1).indices", (2,), needs="x", draws=0),
    Sink("max unpacked", "_, token = torch.max(x, dim=-1, keepdim=True)", (2,), needs="x", draws=0, keeps=True),
    Sink("topk(1)", "token = torch.topk(x, 1, dim=-1).indices", (2,), needs="x", draws=0, keeps=True),
    Sink("flat argmax", "token = x.argmax()", (2,), needs="x", draws=0, rank=1),
    Sink("race", "q = torch.empty_like(p).exponential_(1)\ntoken = torch.argmax(p / q, dim=-1)", (3,)),
    Sink(
        "race, in place",
        "token = p.div_(torch.empty_like(p).exponential_()).argmax(dim=-1, keepdim=True)",
        (3,),
        keeps=True,
    ),
    Sink("race, noise like logits", "token = (p / torch.empty_like(x).exponential_(1)).argmax(-1)", (3,)),
    Sink("race, max", "token = (p / torch.empty_like(p).exponential_(1)).max(-1).indices", (3,)),
    Sink("race, clamped", "token = (p / torch.empty_like(p).exponential_(1).clamp_min_(1e-10)).argmax(-1)", (4,)),
    Sink("race, -log(rand)", "token = torch.argmax(p / -torch.log(torch.rand_like(p)), -1)", (4,)),
    Sink(
        "race, -log(rand + eps)",
        "token = (p / -(torch.rand_like(p, dtype=torch.float32) + 1e-10).log()).argmax(-1)",
        (4,),
    ),
    Sink(
        "race, where",
        "u = torch.rand(p.shape)\neps = torch.finfo(u.dtype).eps\n"
        "token = (p / -torch.where(u >= 1 - eps / 2, -eps / 2, torch.log(u))).argmax(-1)",
        (4,),
    ),
    Sink("Gumbel", "token = (x - torch.log(-torch.log(torch.rand_like(x)))).argmax(-1)", (5,), needs="x"),
    Sink(
        "Gumbel, eps",
        "u = torch.rand_like(x, dtype=torch.float32)\n"
        "token = torch.argmax(x.float() - torch.log(-torch.log(u + 1e-10) + 1e-10), -1)",
        (5,),
        needs="x",
    ),
    Sink(
        "Gumbel, clamped",
        "u = torch.zeros_like(x, dtype=torch.float32).uniform_(1e-20, 1)\n"
        "token = (-torch.log(-torch.log(u.clamp(min=1e-10))) + x).argmax(-1)",
        (5,),
        needs="x",
    ),
    Sink(
        "Gumbel of exponential",
        "g = -torch.empty_like(x).exponential_().log()\ntoken = (x + g).argmax(dim=-1, keepdim=True)",
        (5,),
        needs="x",
        keeps=True,
    ),
    Sink(
        "Gumbel, f64",
        "x = x.double()\ntoken = (x - torch.log(-torch.log(torch.rand_like(x)))).argmax(-1)",
        (5, 10),
        needs="x",
    ),
    Sink(
        "Gumbel on log_softmax",
        "g = -torch.log(-torch.log(torch.rand_like(x)))\ntoken = (F.log_softmax(x, -1) + g).argmax(-1)",
        (5, 8),
        needs="x",
    ),
    Sink(
        "Gumbel, scaled after",
        "g = -torch.log(-torch.log(torch.rand_like(x)))\ntoken = ((x + g) / 2.0).topk(1).indices",
        (5,),
        needs="x",
        keeps=True,
    ),
    Sink(
        "temperature on Gumbel",
        # The noise comes first: eager rounds a 0-d temperature to the noise's dtype where that is the first factor.
        "g = -torch.log(-torch.log(torch.rand_like(x)))\ntoken = (x + g * {positive_row}).argmax(-1)",
        (6,),
        needs="x",
        score="x / {positive_row}",
    ),
    Sink(
        "temperature on the race",
        "x = x.to(torch.float64)\ne = -torch.log(torch.rand_like(x))\n"
        "token = (x.exp() / e ** {positive_row}).argmax(-1)",
        (6,),
        needs="x",
        score="x / {positive_row}",
    ),
    Sink("Categorical(logits)", "token = torch.distributions.Categorical(logits=x).sample()", (7,), needs="x"),
    Sink("Categorical(probs)", "token = torch.distributions.Categorical(probs=p, validate_args=False).sample()", (7,)),
    Sink(
        "mixed",
        "drawn = (x / {cold}.clamp(min=1e-5)[:, None]).softmax(-1).multinomial(1).squeeze(-1)\n"
        "token = torch.where({cold} < 1e-5, x.argmax(-1), drawn)",
        (16,),
        needs="x",
        sinks=2,
        score="torch.where({cold}[:, None] < 1e-5, x, x / {cold}.double().clamp(min=1e-5)[:, None])",
        greedy="{cold} < 1e-5",
        rank=2,
    ),
    Sink(
        "mixed race",
        "best = x.argmax(dim=-1)\np = (x / torch.where({cold} < 1e-5, 1.0, {cold}).unsqueeze(1)).softmax(-1)\n"
        "drawn = p.div(torch.empty_like(p).exponential_(1)).argmax(dim=-1)\n"
        "token = torch.where({cold} < 1e-5, best, drawn)",
        (16,),
        needs="x",
        sinks=2,
        score="torch.where({cold}[:, None] < 1e-5, x, x / {cold}.double().clamp(min=1e-5)[:, None])",
        greedy="{cold} < 1e-5",
        rank=2,
    ),
    Sink("three", "token = torch.multinomial(p, 3, replacement=True)", (19,), draws=3, keeps=True, max_rank=2),
    Sink(
        "one and two",
        "token = torch.cat([p.multinomial(1), p.multinomial(2, replacement=True)], dim=-1)",
        (19,),
        draws=3,
        sinks=2,
        keeps=True,
        max_rank=2,
    ),
]

REFUSALS = [
    Refusal("top-k", "v = torch.topk(x, 5).values\nx = x.masked_fill(x < v[..., -1:], -float('inf'))", (20,)),
    Refusal(
        "kthvalue", "x = x.float()\nx = torch.where(x < x.kthvalue(x.shape[-1] - 4, -1, True).values, -30.0, x)", (20,)
    ),
    Refusal(
        "top-k gather",
        "v, ids = torch.topk(x, 5)\ntoken = ids.gather(-1, v.softmax(-1).multinomial(1))",
        (21,),
        stage="tail",
        sinks=1,
    ),
    Refusal(
        "top-p",
        "ordered, ids = torch.sort(x, descending=True)\nremove = ordered.softmax(-1).cumsum(-1) > 0.9\n"
        "remove[..., 1:] = remove[..., :-1].clone()\nremove[..., 0] = False\n"
        "x = x.masked_fill(remove.scatter(-1, ids, remove), -float('inf'))",
        (22,),
    ),
    Refusal(
        "top-p, sorted draw",
        "ordered, ids = torch.sort(x.softmax(-1), dim=-1, descending=True)\n"
        "ordered[ordered.cumsum(-1) - ordered > 0.8] = 0.0\n"
        "token = ids.gather(-1, torch.multinomial(ordered, 1))",
        (22,),
        stage="tail",
        sinks=1,
    ),
    Refusal("min-p", "p = x.softmax(-1)\nx = x.masked_fill(p < 0.1 * p.amax(-1, keepdim=True), -float('inf'))", (23,)),
    Refusal(
        "probabilities returned",
        "p = x.softmax(-1)\ntoken = p.multinomial(1)\nbeside = p",
        (24,),
        stage="tail",
        sinks=1,
    ),
    Refusal("logits returned", "token = x.argmax(-1)\nbeside = x", (24,), stage="tail", sinks=1),
    Refusal(
        "log-probability",
        "token = x.softmax(-1).multinomial(1)\nbeside = x.log_softmax(-1).gather(-1, token)",
        (25,),
        stage="tail",
        sinks=1,
    ),
    Refusal("value and index", "beside, token = x.max(-1)", (25,), stage="tail", sinks=1),
    Refusal(
        "Categorical's log_prob",
        "d = torch.distributions.Categorical(logits=x)\ntoken = d.sample()\nbeside = d.log_prob(token)",
        (7, 25),
        stage="tail",
        sinks=1,
    ),
    Refusal("sampled along rows", "token = x.softmax(0).multinomial(1)", stage="tail", sinks=1, finite=True),
    Refusal("no replacement", "token = x.softmax(-1).multinomial(2)", (19,), stage="tail", sinks=1),
    Refusal("weights without softmax", "token = (x.sigmoid() + 0.1).multinomial(1)", stage="tail", sinks=1),
    Refusal(
        "wrong sign", "token = (x + torch.log(-torch.log(torch.rand_like(x)))).argmax(-1)", (5,), stage="tail", sinks=1
    ),
    Refusal(
        "noise shared by rows",
        "token = (x - torch.log(-torch.log(torch.rand_like(x[:1])))).argmax(-1)",
        (5,),
        stage="tail",
        sinks=1,
    ),
    Refusal("uniform noise", "token = (x + torch.rand_like(x)).argmax(-1)", (5,), stage="tail", sinks=1),
    Refusal("normal noise", "token = (x + torch.randn_like(x)).argmax(-1)", (5,), stage="tail", sinks=1),
    Refusal(
        "noise tempered by token",
        "g = -torch.log(-torch.log(torch.rand_like(x)))\n"
        "token = (x + torch.linspace(0.5, 1.5, {width}) * g).argmax(-1)",
        (6,),
        stage="tail",
        sinks=1,
    ),
    Refusal(
        "race with a rate",
        "p = x.softmax(-1)\ntoken = (p / torch.empty_like(p).exponential_(2.0).clamp_min(1e-3)).argmax(-1)",
        (4,),
        stage="tail",
        sinks=1,
    ),
    Refusal("dropout", "token = F.dropout(x, 0.5).argmax(-1)", stage="tail", sinks=1),
    Refusal(
        "two temperatures",
        "token = torch.cat([x.softmax(-1).multinomial(1), (x / 0.5).softmax(-1).multinomial(1)], -1)",
        stage="tail",
        sinks=2,
    ),
    Refusal(
        "one noise, two sinks",
        "s = x - torch.log(-torch.log(torch.rand_like(x)))\ntoken = torch.stack([s.argmax(-1), s.max(-1).indices], -1)",
        stage="tail",
        sinks=2,
    ),
    Refusal("flip", "x = x.flip(-1)"),
    Refusal("roll", "x = x.roll(1, -1)"),
    Refusal("sorted", "x = x.sort(-1).values"),
    Refusal("cumsum", "x = 0.1 * x.cumsum(-1)", finite=True),
    Refusal("own deviation", "x = x / x.std(-1, keepdim=True)", finite=True),
    Refusal("own mean", "x = (x - x.mean(-1, keepdim=True)).tanh()", finite=True),
    Refusal("own maximum, as a factor", "x = x * x.amax(-1, keepdim=True)", finite=True),
    Refusal("picked ids", "token = x[..., {ids}].argmax(-1)", (13,), stage="tail", sinks=1),
    Refusal("whole logits", "token = x.int().argmax(-1)", (10,), stage="tail", sinks=1),
    Refusal("sin", "x = torch.sin(x)", finite=True),
    Refusal("floor", "x = torch.floor(x)"),
    # Eager's floor division makes a NaN of -inf, which it then refuses to draw from.
    Refusal("floor division", "x = torch.div(x.clamp(min=-30.0), 0.5, rounding_mode='floor')"),
    Refusal("sign", "x = x + torch.sign(x)"),
    Refusal(
        "repetition penalty",
        "seen = x.gather(-1, {row_ids})\nx = x.scatter(-1, {row_ids}, torch.where(seen < 0, seen * 1.2, seen / 1.2))",
        (15,),
    ),
    Refusal("frequency penalty", "x = x.index_add(-1, {ids}, x[..., {ids}], alpha=-0.5)", (15,), finite=True),
    Refusal(
        "split vocabulary",
        "token = x[..., :80].unflatten(-1, (2, -1)).sum(-2).argmax(-1)",
        (13,),
        stage="tail",
        sinks=1,
    ),
]
