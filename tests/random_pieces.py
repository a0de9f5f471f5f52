"""What random steps are made of: tables of source text, each row one way to write one part of a step.

Every piece works on the logits ``x``, the probabilities ``p`` and the tokens ``token``. A word in braces is a number or
an argument that `random_steps.KINDS` makes up; within one piece the same word is the same argument.
"""

from __future__ import annotations

from dataclasses import dataclass

INF = "float('inf')"


@dataclass(frozen=True)
class Piece:
    """Some lines of a step.

    idioms: the numbers of the idioms they spell. fuses: whether the pass should take them; None where it may do either.
    finite: the lines need finite logits, so they cannot follow a mask. masks: they may leave logits that are not.
    rows: they need a dimension of rows.
    """

    name: str
    text: str
    idioms: tuple[int, ...] = ()
    fuses: bool | None = True
    finite: bool = False
    masks: bool = False
    rows: bool = False


@dataclass(frozen=True)
class Head(Piece):
    """A product. layout: the rows of the hidden states, see `random_steps.LAYOUTS`."""

    layout: str = "2d"


@dataclass(frozen=True)
class Selection(Piece):
    """Picks or reshapes rows. layouts: where it applies; left: the sizes of the rows that are left, given ``rows``."""

    layouts: tuple[str, ...] = ()
    left: str = "rows"


@dataclass(frozen=True)
class Probs(Piece):
    """From ``x`` to ``p``. score: the logarithm of p, up to a constant per row, from ``x`` in float64."""

    score: str = "x"


@dataclass(frozen=True)
class Sink(Piece):
    """From ``x`` or ``p`` to ``token``.

    needs: "x" or "p". draws: tokens a row, 0 for greedy. sinks: sampling ops in it. keeps: token has a last dimension for
    the draws. score: as in Probs. greedy: rows that are greedy all the same. rank: None, or the only rank of x it takes.
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
    """What must not be fused as if it were something else. stage: what it takes the place of: logits, tail or result."""

    stage: str = "logits"
    sinks: int = 0
    fuses: bool | None = False


HEADS = [
    Head("linear", "x = F.linear({hidden}, {weight})"),
    Head("linear of a scaled hidden", "x = F.linear({hidden} * 0.5, {weight})", (12,)),
    Head("linear cast to f32", "x = F.linear({hidden}.float(), {weight}.float())", (10,)),
    Head("linear with bias", "x = F.linear({hidden}, {weight}, {head_bias})", (14,)),
    Head("matmul by t()", "x = {hidden} @ {weight}.t()", (17,)),
    Head("matmul by mT", "x = torch.matmul({hidden}, {weight}.mT)", (17,)),
    Head("mm", "x = torch.mm({hidden}, {weight_t})", (17,)),
    Head("addmm", "x = torch.addmm({head_bias}, {hidden}, {weight_t})", (14, 17)),
    Head("addmm, scaled", "x = torch.addmm({head_bias}, {hidden}, {weight_t}, beta=0.5, alpha=2.0)", (14, 17)),
    Head("einsum", "x = torch.einsum('bd,vd->bv', {hidden}, {weight})", (17,)),
    Head("vocabulary first", "x = torch.mm({weight}, {hidden}.t()).t()", (17,)),
    Head("unsqueezed", "x = F.linear({hidden}.unsqueeze(1), {weight}).squeeze(1)", (17,)),
    Head("bmm of one", "x = torch.bmm({hidden}[None], {weight_t}[None])[0]", (17,)),
    Head("tied embedding", "x = {weight}[{tokens}] @ {weight}.t()", (17,)),
    Head("tied embedding, F.linear", "x = F.linear(F.embedding({tokens}, {weight}), {weight})", (17,)),
    Head("adapter", "x = F.linear({hidden}, {weight}) + F.linear(F.linear({hidden}, {low}), {up}) * 0.5", (14,)),
    Head("low rank logits", "x = F.linear({hidden}, {weight}) + {adapted} @ {up}.t()", (14,)),
    Head("3-D linear", "x = F.linear({hidden}, {weight})", layout="3d"),
    Head("3-D linear with bias", "x = F.linear({hidden}, {weight}, {head_bias})", (14,), layout="3d"),
    Head("3-D matmul", "x = {hidden} @ {weight}.t()", (17,), layout="3d"),
    Head("3-D matmul by W[D, V]", "x = torch.matmul({hidden}, {weight_t})", (17,), layout="3d"),
    Head("3-D einsum", "x = torch.einsum('bsd,vd->bsv', {hidden}, {weight})", (17,), layout="3d"),
    Head("hidden sliced first", "x = F.linear({sequence}[:, -1], {weight})"),
    Head("mv", "x = torch.mv({weight}, {hidden})", (17,), layout="flat"),
    Head("1-D linear", "x = F.linear({hidden}, {weight})", (17,), layout="flat"),
    Head("1-D matmul", "x = {weight} @ {hidden}", (17,), layout="flat"),
    Head("batch of one", "x = F.linear({hidden}, {weight})", layout="one"),
    Head("codebooks, one head", "x = F.linear({hidden}, {weight})", (18,), layout="codebooks"),
    Head("codebooks, stacked head", "x = F.linear({hidden}, {stacked}).view(-1, 2, {width})", (18,), None, layout="stack"),
    Head("codebooks, einsum", "x = torch.einsum('bd,kvd->bkv', {hidden}, {codebooks})", (18,), None, layout="stack"),
]

SELECTIONS = [
    Selection("last", "x = x[:, -1]", (9,), layouts=("3d",), left="rows[:1]"),
    Selection("last, with a colon", "x = x[:, -1, :]", (9,), layouts=("3d",), left="rows[:1]"),
    Selection("last, kept", "x = x[:, [-1], :]", (9,), layouts=("3d",), left="[rows[0], 1]"),
    Selection("last, as a slice", "x = x[:, -1:]", (9,), layouts=("3d",), left="[rows[0], 1]"),
    Selection("last, squeezed", "x = x[:, -1:].squeeze(1)", (9,), layouts=("3d",), left="rows[:1]"),
    Selection("last two", "x = x[:, -2:]", (9,), layouts=("3d",), left="[rows[0], 2]"),
    Selection("first by select", "x = x.select(1, 0)", (9,), layouts=("3d",), left="rows[:1]"),
    Selection("transposed", "x = x.transpose(0, 1)[-1]", (9,), layouts=("3d",), left="rows[:1]"),
    Selection("last of each", "x = x[torch.arange(x.shape[0]), {last}]", (9,), layouts=("3d",), left="rows[:1]"),
    Selection("all, flattened", "x = x.flatten(0, 1)", (9,), layouts=("3d",), left="[rows[0] * rows[1]]"),
    Selection("all, viewed", "x = x.reshape(-1, x.shape[-1])", (9,), layouts=("3d",), left="[rows[0] * rows[1]]"),
    Selection("all", "", layouts=("3d",)),
    Selection("batch of one, 1-D", "x = x[0, -1]", (9,), layouts=("one",), left="[]"),
    Selection("batch of one, sliced", "x = x[0, -1:]", (9,), layouts=("one",), left="[1]"),
    Selection("codebooks as rows", "x = x.view(-1, x.shape[-1])", (18,), layouts=("codebooks", "stack"), left="[6]"),
    Selection("codebooks as they are", "", (18,), layouts=("codebooks", "stack")),
    Selection("none", "", layouts=("2d", "flat")),
    Selection("gathered", "x = x[{order}]", (9,), layouts=("2d",)),
    Selection("index_select", "x = x.index_select(0, {order})", (9,), layouts=("2d",)),
]

EPILOGUE = [
    Piece("temperature", "x = x / {positive}", (1,)),
    Piece("temperature, in place", "x /= {positive}", (1,)),
    Piece("temperature, div_", "x.div_({positive})", (1,)),
    Piece("inverse temperature", "x = x * (1 / {positive})", (1,)),
    Piece("guarded temperature", "x = x / max({float}, 1e-5)", (1,)),
    Piece("clamped temperature", "x = x / {row_tensor}.clamp(min=1e-5)", (1,)),
    Piece("whole temperature", "x = x / {int}", (1,)),
    Piece("bias", "x = x + {operand}", (14,)),
    Piece("bias, subtracted", "x = x.sub({operand}, alpha=2)", (14,)),
    Piece("bias, in place", "x += {operand}", (14,)),
    Piece("whole bias", "x = x + {integers}", (14,)),
    Piece("bias by position", "x = x - 0.01 * torch.arange(x.shape[-1])", (14,)),
    Piece("bias by token id", "x = x + torch.linspace(-1.0, 1.0, {width})", (14,)),
    Piece("one minus", "x = 1.0 - x", finite=True),
    Piece("operand minus", "x = {operand} - x", finite=True),
    Piece("scale", "x = x * {positive}", (12,)),
    Piece("scale, in place", "x *= 0.125\nx *= 6.0", (12,)),
    Piece("logits scaling", "x = x / 2.0 * {number}", (12,)),
    Piece("softcap", "x = {cap} * torch.tanh(x / {cap})", (11,)),
    Piece("softcap, in place", "x = x.div({cap}).tanh_().mul_({cap})", (11,)),
    Piece("softcap, by steps", "x = x / {cap}\nx = torch.tanh(x)\nx = x * {cap}", (11,)),
    Piece("no softcap", "x = x * torch.tanh(x / {cap})", (11,), finite=True),
    Piece("tanh", "x = x + 0.5 * torch.tanh(x)"),
    Piece("neg", "x = -x", finite=True),
    Piece("abs", "x = x.abs()", finite=True),
    Piece("exp", "x = torch.exp(x.clamp(max=2.0))"),
    Piece("log", "x = torch.log(x.abs() + 0.5)", finite=True),
    Piece("log1p", "x = 2.0 * torch.log1p(x.abs())", finite=True),
    Piece("sqrt", "x = torch.sqrt(x.abs() + 0.5)", finite=True),
    Piece("rsqrt", "x = 3.0 * torch.rsqrt(x.abs() + 0.5)", finite=True),
    Piece("sigmoid", "x = 4.0 * torch.sigmoid(x)"),
    Piece("relu", "x = F.relu(x)"),
    Piece("relu6", "x = F.relu6(x)"),
    Piece("leaky relu", "x = F.leaky_relu(x, 0.1)"),
    Piece("hardtanh", "x = F.hardtanh(x, -4.0, 4.0)"),
    Piece("erf", "x = 3.0 * torch.erf(x)"),
    Piece("gelu", "x = F.gelu(x)", finite=True),
    Piece("gelu, tanh", "x = F.gelu(x, approximate='tanh')", finite=True),
    Piece("silu", "x = F.silu(x)", finite=True),
    Piece("softplus", "x = F.softplus(x)"),
    Piece("logsigmoid", "x = F.logsigmoid(x)", fuses=None),
    Piece("pow", "x = torch.pow(x.abs() + 0.5, 1.5)", finite=True),
    Piece("square", "x = 0.25 * x.square()", finite=True),
    Piece("cube", "x = 0.1 * x**3"),
    Piece("pow of tensors", "x = (x.abs() + 0.5) ** {positive}", finite=True),
    Piece("power of two", "x = 2.0 ** x.clamp(-4.0, 2.0)"),
    Piece("reciprocal", "x = 4.0 * (x.abs() + 0.5).reciprocal()", finite=True),
    Piece("maximum", "x = torch.maximum(x, {tensor})"),
    Piece("minimum", "x = torch.minimum(x, {tensor})"),
    Piece("clamp", "x = x.clamp(-4.0, 4.0)"),
    Piece("clamp_min", "x = x.clamp_min(-3.0)"),
    Piece("clamp_max", "x = x.clamp(max=3.0)"),
    Piece("clamp by a tensor", "x = torch.clamp(x, min={tensor})"),
    Piece("minimum of full_like", "x = torch.minimum(x, torch.full_like(x, 3.0))"),
    Piece("maximum of zeros_like", "x = torch.maximum(x, torch.zeros_like(x))"),
    Piece("compared", "x = torch.where(x {compare} {operand}, x, x * 0.5)"),
    Piece("compared with a number", "x = torch.where(x {compare} 0.5, x * 1.2, x - 0.5)"),
    Piece("band", "x = torch.where((x > -1.0) {logic} (x < 1.0), x / 1.2, x - 0.25)"),
    Piece("band, logical", "x = torch.where(torch.logical_{word}(x > -1.0, x < {operand}), x, x - 1.0)"),
    Piece("not", "x = torch.where(~(x > 0.5), x, x * 1.5)"),
    Piece("logical_not", "x = torch.where(torch.logical_not(x > {operand}), x, x * 0.75)"),
    Piece("mask and logits", "x = torch.where((x > 0.0) {logic} {any_mask}, x, x - 0.5)"),
    Piece("masks combined", "x = torch.where({any_mask} {logic} ~{any_mask2}, x - 1.0, x)"),
    Piece("nan to zero", "x = torch.where(torch.isnan(x), 0.0, x)"),
    Piece("nan_to_num", "x = torch.nan_to_num(x, nan=0.0, posinf=30.0, neginf=-30.0)"),
    Piece("isinf", "x = torch.where(x.isinf(), -20.0, x)"),
    Piece("bool to float", "x = x + (x > {operand}).float()"),
    Piece("bool times number", "x = x - 0.5 * (x < 1.0)"),
    Piece("penalty", "x = torch.where({any_mask}, x / 1.2, x * 1.2)", (15,)),
    Piece("signed penalty", "x = torch.where({any_mask}, torch.where(x > 0, x / 1.2, x * 1.2), x)", (15,)),
    Piece("lerp", "x = torch.lerp(x, x * 0.5, 0.25)", finite=True),
    Piece("addcmul", "x = torch.addcmul(x, x, torch.ones_like(x), value=0.5)", fuses=None),
    Piece("float()", "x = x.float()", (10,)),
    Piece("to(float32, copy)", "x = x.to(torch.float32, copy=True)", (10,)),
    Piece("double()", "x = x.double()", (10,)),
    Piece("bfloat16()", "x = x.bfloat16()", (10,)),
    Piece("half()", "x = x.half()", (10,)),
    Piece("bfloat16().float()", "x = x.bfloat16().float()", (10,)),
    Piece("contiguous", "x = x.contiguous()"),
    Piece("clone", "x = x.clone()"),
    Piece("unsqueezed and back", "x = x.unsqueeze(0).squeeze(0)", (17,)),
]

MASKS = [
    Piece("masked_fill", "x = x.masked_fill({mask}, -float('inf'))", (15,), masks=True),
    Piece("masked_fill, in place", "x.masked_fill_({mask}, float('-inf'))", (15,), masks=True),
    Piece("where", "x = torch.where({mask}, -float('inf'), x)", (15,), masks=True),
    Piece("where, kept", "x = torch.where(~{mask}, x, float('-inf'))", (15,), masks=True),
    Piece("where, tensor", "x = torch.where({mask}, torch.full_like(x, -float('inf')), x)", (15,), masks=True),
    Piece("assigned", "x[{full_mask}] = -float('inf')", (15,), masks=True),
    Piece("banned ids", "x[..., {ids}] = -float('inf')", (15,), masks=True),
    Piece("banned constants", "x[..., [3, 5]] = -float('inf')\nx[..., 7] = -float('inf')", (15,), masks=True),
    Piece("banned tail", "x[..., -9:] = -float('inf')", (15,), masks=True),
    Piece("index_fill", "x = x.index_fill(-1, {ids}, -float('inf'))", (15,), None, masks=True),
    Piece("scatter", "x = x.scatter(-1, {row_ids}, -float('inf'))", (15,), masks=True),
    Piece("scatter_", "x.scatter_(-1, {row_ids}, -float('inf'))", (15,), masks=True),
    Piece("added", "x = x + {minus_infinity}", (14, 15), masks=True),
    Piece("finite", "x = x.masked_fill({mask}, -1e4)", (15,), masks=True),
    Piece("lowest", "x = torch.where({mask}, torch.finfo(x.dtype).min, x)", (15,), masks=True),
    Piece("by threshold", "x = x.masked_fill(x < x.new_full((), -9.0), -float('inf'))", (15,), None, masks=True),
    Piece("by number", "x = x.masked_fill(x < -9.0, -float('inf'))", (15,), masks=True),
    Piece("by number, assigned", "x[x < -9.0] = -float('inf')", (15,), masks=True),
    Piece("whole rows", "x[{leading_mask}] = 0.25", (15,), rows=True),
]

SLICES = [
    Piece("first ids", "x = x[..., :{high}]", (13,)),
    Piece("a band", "x = x[..., {first}:{high}]", (13,)),
    Piece("narrow", "x = x.narrow(-1, 0, {high})", (13,)),
]

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
    Probs("minus logsumexp", "p = (x - x.logsumexp(-1, keepdim=True)).exp()", (8,)),
]

SINKS = [
    Sink("multinomial", "token = torch.multinomial(p, num_samples=1)", (1,), keeps=True, max_rank=2),
    Sink("method multinomial", "token = p.multinomial(1)", (1,), keeps=True, max_rank=2),
    Sink("argmax", "token = x.argmax(-1)", (2,), needs="x", draws=0),
    Sink("argmax, keepdim", "token = torch.argmax(x, dim=-1, keepdim=True)", (2,), needs="x", draws=0, keeps=True),
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
        "g = -torch.log(-torch.log(torch.rand_like(x)))\ntoken = (x + {positive_row} * g).argmax(-1)",
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
    Refusal("kthvalue", "x = x.float()\nx = torch.where(x < x.kthvalue(x.shape[-1] - 4, -1, True).values, -30.0, x)", (20,)),
    Refusal(
        "top-k gather",
        "v, ids = torch.topk(x, 5)\ntoken = ids.gather(-1, v.softmax(-1).multinomial(1))",
        (21,),
        stage="tail", sinks=1,
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
        stage="tail", sinks=1,
    ),
    Refusal("min-p", "p = x.softmax(-1)\nx = x.masked_fill(p < 0.1 * p.amax(-1, keepdim=True), -float('inf'))", (23,)),
    Refusal(
        "probabilities returned",
        "p = x.softmax(-1)\ntoken = p.multinomial(1)\nbeside = p",
        (24,),
        stage="tail", sinks=1,
    ),
    Refusal("logits returned", "token = x.argmax(-1)\nbeside = x", (24,), stage="tail", sinks=1),
    Refusal(
        "log-probability",
        "token = x.softmax(-1).multinomial(1)\nbeside = x.log_softmax(-1).gather(-1, token)",
        (25,),
        stage="tail", sinks=1,
    ),
    Refusal("value and index", "beside, token = x.max(-1)", (25,), stage="tail", sinks=1),
    Refusal(
        "Categorical's log_prob",
        "d = torch.distributions.Categorical(logits=x)\ntoken = d.sample()\nbeside = d.log_prob(token)",
        (7, 25),
        stage="tail", sinks=1,
    ),
    Refusal("sampled along rows", "token = x.softmax(0).multinomial(1)", stage="tail", sinks=1, finite=True),
    Refusal("no replacement", "token = x.softmax(-1).multinomial(2)", (19,), stage="tail", sinks=1),
    Refusal("probabilities squared", "token = x.softmax(-1).square().multinomial(1)", stage="tail", sinks=1),
    Refusal("weights without softmax", "token = (x.sigmoid() + 0.1).multinomial(1)", stage="tail", sinks=1),
    Refusal("wrong sign", "token = (x + torch.log(-torch.log(torch.rand_like(x)))).argmax(-1)", (5,), stage="tail", sinks=1),
    Refusal(
        "noise shared by rows",
        "token = (x - torch.log(-torch.log(torch.rand_like(x[:1])))).argmax(-1)",
        (5,),
        stage="tail", sinks=1,
    ),
    Refusal("uniform noise", "token = (x + torch.rand_like(x)).argmax(-1)", (5,), stage="tail", sinks=1),
    Refusal("normal noise", "token = (x + torch.randn_like(x)).argmax(-1)", (5,), stage="tail", sinks=1),
    Refusal(
        "noise tempered by token",
        "g = -torch.log(-torch.log(torch.rand_like(x)))\ntoken = (x + torch.linspace(0.5, 1.5, {width}) * g).argmax(-1)",
        (6,),
        stage="tail", sinks=1,
    ),
    Refusal(
        "race with a rate",
        "p = x.softmax(-1)\ntoken = (p / torch.empty_like(p).exponential_(2.0).clamp_min(1e-3)).argmax(-1)",
        (4,),
        stage="tail", sinks=1,
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
    Refusal("floor division", "x = torch.div(x, 0.5, rounding_mode='floor')"),
    Refusal("sign", "x = x + torch.sign(x)"),
    Refusal(
        "repetition penalty",
        "seen = x.gather(-1, {row_ids})\nx = x.scatter(-1, {row_ids}, torch.where(seen < 0, seen * 1.2, seen / 1.2))",
        (15,),
    ),
    Refusal("frequency penalty", "x = x.index_add(-1, {ids}, x[..., {ids}], alpha=-0.5)", (15,), finite=True),
    Refusal("split vocabulary", "token = x[..., :80].unflatten(-1, (2, -1)).sum(-2).argmax(-1)", (13,), stage="tail", sinks=1),
]
