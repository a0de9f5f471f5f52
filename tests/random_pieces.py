"""What random steps are made of: tables of source text, each row one way to write one part of a step.

Here are LM heads, row selections and the processing of logits ``x``; `random_tails` has what follows them. A word in
braces is a number or an argument that `random_words.KINDS` makes up; within one piece the same word is the same
argument.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    """A product. layout: the rows of the hidden states, see `LAYOUTS`."""

    layout: str = "2d"


@dataclass(frozen=True)
class Selection(Piece):
    """Picks or reshapes rows. layouts: where it applies; left: the sizes of the rows that are left, given ``rows``."""

    layouts: tuple[str, ...] = ()
    left: str = "rows"


ROWS, LENGTH, FEATURES = 3, 5, 16
LAYOUTS = {"2d": [ROWS], "3d": [ROWS, LENGTH], "flat": [], "one": [1, LENGTH], "codebooks": [ROWS, 2], "stack": [ROWS]}
"""The rows of the hidden states. The first are repeated to fill the batch, but for "flat" and "one"."""

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
    Head(
        "codebooks, stacked head", "x = F.linear({hidden}, {stacked}).view(-1, 2, {width})", (18,), None, layout="stack"
    ),
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
    Piece("cube", "x = 0.1 * x.float() ** 3"),
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
