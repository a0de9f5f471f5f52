"""Linear-and-sample in plain torch: the specification of the kernel, and the path for machines without one.

Same noise, same rules and same arguments as `gemm_sample.py`, on any device. The vocabulary streams through in
chunks, so that the logits never exist as a whole; of each chunk only the log-sum-exp of its groups and, per row,
the logits of the best group so far survive. What happens inside a group cannot change that group's score, so
the tournament runs once per row, at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from .epilogue import Program, Ref
from .epilogue_ops import DTYPES
from .rng import GROUP, group_words, gumbel, level_bits, uniform

ROW_BLOCK = 512
"""Rows that go through the vocabulary together."""

CHUNK_LOGITS = 1 << 19
"""Logits of one chunk, at most: 2 MiB of f32, so that the passes over them stay in the cores' caches."""

DRAW_BLOCK = 8
"""Draws of a row that are scored together."""

NOISE_WORDS = 1 << 15
"""Words that are made together: Philox is a hundred small ops, too small to be worth sharing among threads."""


def sample(
    hidden: Tensor,
    weight: Tensor,
    seed: Tensor,
    operands: Sequence[Tensor],
    program: str,
    num_samples: int = 1,
    id_base: int = 0,
) -> Tensor:
    """Draws from softmax(epilogue(hidden @ weight.T)): int64 [B, num_samples], in [id_base, id_base + V).

    hidden: [B, D], weight: [V, D], one floating dtype, any strides. seed: int64 on their device, 0-d or [B].
    operands: what `program` calls a0, a1, ..., each broadcastable to [B, V]. With one seed a row, a row's draws
    do not depend on its place in the batch.

    A row that is -inf throughout gives id_base; one with +inf, the first such id; one with NaN, the first NaN.
    """
    return winners(hidden, weight, seed, operands, program, num_samples, id_base)[1]


def argmax(hidden: Tensor, weight: Tensor, operands: Sequence[Tensor], program: str, id_base: int = 0) -> Tensor:
    """The first id of the largest logit (of the first NaN, if there is one): int64 [B]. See `sample`."""
    return winners(hidden, weight, None, operands, program, 1, id_base)[1].squeeze(1)


def sample_and_argmax(
    hidden: Tensor,
    weight: Tensor,
    seed: Tensor,
    operands: Sequence[Tensor],
    program: str,
    greedy_program: str,
    num_samples: int = 1,
    id_base: int = 0,
) -> tuple[Tensor, Tensor]:
    """`sample` of one program and `argmax` of another, over one product: int64 [B, num_samples] and [B]."""
    wanted = [(program, seed, num_samples), (greedy_program, None, 1)]
    (_, drawn), (_, largest) = _reduce(hidden, weight, operands, wanted, id_base)
    return drawn, largest.squeeze(1)


def winners(
    hidden: Tensor,
    weight: Tensor,
    seed: Tensor | None,
    operands: Sequence[Tensor],
    program: str,
    num_samples: int = 1,
    id_base: int = 0,
) -> tuple[Tensor, Tensor]:
    """`sample`, or with no seed `argmax`, with the winners' scores: f32 [B, n], and their ids, int64 [B, n].

    Of several shards' winners of a row the one with the highest score, at a tie the lowest id, is the row's.
    """
    return _reduce(hidden, weight, operands, [(program, seed, num_samples)], id_base)[0]


@torch.no_grad()
def _reduce(
    hidden: Tensor,
    weight: Tensor,
    operands: Sequence[Tensor],
    wanted: Sequence[tuple[str, Tensor | None, int]],
    id_base: int,
) -> list[tuple[Tensor, Tensor]]:
    """Scores and ids, as `winners` gives them, for each (program, seed or None, draws) that is wanted."""
    batch, vocab = hidden.shape[0], weight.shape[0]
    programs = [Program.parse(text) for text, _, _ in wanted]
    results = [
        (
            torch.full((batch, draws), -torch.inf, device=hidden.device),
            torch.full((batch, draws), id_base, dtype=torch.int64, device=hidden.device),
        )
        for _, _, draws in wanted
    ]
    for first in range(0, batch, ROW_BLOCK):
        rows = slice(first, min(first + ROW_BLOCK, batch))
        operands_here = [_cut(operand, 0, batch, rows) for operand in operands]
        logits = _Logits(hidden[rows], weight, operands_here, programs)
        reductions: list[_Largest | _Drawn] = []
        for _, seed, draws in wanted:
            if seed is None:
                reductions.append(_Largest(logits, id_base))
                continue
            row = torch.arange(rows.start, rows.stop, device=hidden.device)
            if seed.dim():  # the seed tells rows apart
                row, seed = torch.zeros_like(row), seed[rows]
            noise = _Noise(seed.reshape(-1, 1, 1), row.reshape(-1, 1, 1), vocab, id_base)
            reductions.append(_Drawn(logits, noise, draws))
        for columns in logits.chunks(id_base % GROUP):
            for reduction, chunk in zip(reductions, logits.chunk(columns), strict=True):
                reduction.update(columns, chunk)
        for (score, ids), reduction in zip(results, reductions, strict=True):
            score[rows], ids[rows] = reduction.result()
    return results


def winner_in_group(logits: Tensor, words: Sequence[Tensor]) -> Tensor:
    """The tournament: int64 [...], a position in [0, G), for logits f32 [..., G] of one group each.

    Position i wins with probability softmax(logits)[i]; words[j], [...], decides level j. The first +inf or, before
    that, the first NaN wins outright. A group of nothing but -inf gives some position.
    """
    top = logits.amax(-1, keepdim=True)
    mass = (logits - torch.where(top == -torch.inf, 0, top)).exp()
    winner = torch.arange(GROUP, device=logits.device).expand(mass.shape)
    bits = sorted(level_bits(GROUP))
    for bit, word in zip(level_bits(GROUP), words, strict=False):
        # Pair the subtrees that differ in this bit; the bits still undecided number the axis between them.
        below = 1 << bits.index(bit)
        bits.remove(bit)
        mass0, mass1 = mass.unflatten(-1, (-1, 2, below)).unbind(-2)
        winner0, winner1 = winner.unflatten(-1, (-1, 2, below)).unbind(-2)
        mass = mass0 + mass1
        # Comparing with the smaller side keeps full relative precision on both.
        small_wins = uniform(word)[..., None, None] * mass < torch.minimum(mass0, mass1)
        winner = torch.where(small_wins == (mass1 < mass0), winner1, winner0).flatten(-2)
        mass = mass.flatten(-2)
    # torch's maximum is NaN where there is one, so these are the NaNs, or else the +infs.
    outright = torch.where(top.isnan(), logits.isnan(), logits == torch.inf)
    first = outright.to(torch.uint8).argmax(-1)
    return torch.where(outright.any(-1), first, winner.squeeze(-1))


def _beats(value: Tensor, best: Tensor) -> Tensor:
    """Whether a later value replaces an earlier one: it is larger, or the first NaN."""
    return (value > best) | (value.isnan() & ~best.isnan())


# --- The two reductions over the vocabulary --------------------------------------------------------


class _Largest:
    """Greedy."""

    def __init__(self, logits: _Logits, id_base: int):
        self.id_base = id_base
        self.best = torch.full((logits.batch,), -torch.inf, device=logits.device)
        self.index = torch.zeros(logits.batch, dtype=torch.int64, device=logits.device)

    def update(self, columns: slice, chunk: Tensor) -> None:
        """chunk: f32 [B, C], the logits of these columns."""
        value, here = chunk.max(1)
        better = _beats(value, self.best)
        self.best = torch.where(better, value, self.best)
        self.index = torch.where(better, here + columns.start, self.index)

    def result(self) -> tuple[Tensor, Tensor]:
        """f32 [B, 1] and int64 [B, 1]."""
        return self.best[:, None], self.index[:, None] + self.id_base


class _Drawn:
    """Group-Gumbel."""

    def __init__(self, logits: _Logits, noise: _Noise, num_samples: int):
        self.noise = noise
        draws = [slice(n, min(n + DRAW_BLOCK, num_samples)) for n in range(0, num_samples, DRAW_BLOCK)]
        self.best = [_Best(logits.batch, block, logits.device) for block in draws]
        # For one block of draws, the noise of all groups is small, and making it at once saves calls.
        self.kept = noise.gumbel(draws[0], slice(0, noise.groups)) if len(draws) == 1 else None

    def update(self, columns: slice, chunk: Tensor) -> None:
        """chunk: f32 [B, C], the logits of these columns, which cut no group but at the shard's ends."""
        before = columns.start + self.noise.shift
        groups = slice(before // GROUP, -(-(columns.stop + self.noise.shift) // GROUP))
        left = before - groups.start * GROUP
        right = groups.stop * GROUP - columns.stop - self.noise.shift
        if left or right:
            chunk = F.pad(chunk, (left, right), value=-torch.inf)
        chunk = chunk.unflatten(1, (-1, GROUP))
        log_mass = chunk.logsumexp(2)[:, None]
        for block in self.best:
            here = self.noise.gumbel(block.draws, groups) if self.kept is None else self.kept[:, :, groups]
            block.update(log_mass + here, chunk, groups.start)

    def result(self) -> tuple[Tensor, Tensor]:
        """f32 [B, n] and int64 [B, n]."""
        noise = self.noise
        score = torch.cat([block.score for block in self.best], 1)
        index = torch.cat([block.group * GROUP + block.winner(noise) for block in self.best], 1)
        return score, torch.where(score == -torch.inf, noise.id_base, index - noise.shift + noise.id_base)


class _Best:
    """The best group so far of every row and draw, for a block of draws."""

    def __init__(self, batch: int, draws: slice, device: torch.device):
        self.draws = draws
        shape = (batch, draws.stop - draws.start)
        self.score = torch.full(shape, -torch.inf, device=device)
        self.group = torch.zeros(shape, dtype=torch.int64, device=device)
        self.logits = torch.full((*shape, GROUP), -torch.inf, device=device)

    def update(self, scores: Tensor, chunk: Tensor, first_group: int) -> None:
        """scores: f32 [B, n, groups] and chunk: f32 [B, groups, G], of groups from `first_group` on."""
        score, group = scores.max(2)
        better = _beats(score, self.score)
        if better.any():
            logits = chunk.gather(1, group[:, :, None].expand(-1, -1, GROUP))
            self.score = torch.where(better, score, self.score)
            self.group = torch.where(better, group + first_group, self.group)
            self.logits = torch.where(better[:, :, None], logits, self.logits)

    def winner(self, noise: _Noise) -> Tensor:
        """The position of the winner in its group, int64 [B, n]."""
        return winner_in_group(self.logits, noise.words(self.draws, self.group))


@dataclass
class _Noise:
    """The random words of a block of rows, by draw and group."""

    seed: Tensor  # int64 [1 or B, 1, 1]
    row: Tensor  # int64 [B, 1, 1]
    vocab: int
    id_base: int

    @property
    def shift(self) -> int:
        """How far into its group the shard's first id is."""
        return self.id_base % GROUP

    @property
    def groups(self) -> int:
        return -(-(self.shift + self.vocab) // GROUP)

    def gumbel(self, draws: slice, groups: slice) -> Tensor:
        """The noise on the groups' scores, f32 [B, draws, groups]."""
        draw = torch.arange(draws.start, draws.stop, device=self.row.device)[:, None]
        group = torch.arange(groups.start, groups.stop, device=self.row.device)
        rows = max(1, NOISE_WORDS // (len(draw) * len(group)))
        blocks = [self._rows(slice(row, row + rows)) for row in range(0, len(self.row), rows)]
        return torch.cat([gumbel(block._words(draw, group, 1)[3]) for block in blocks])

    def words(self, draws: slice, group: Tensor) -> list[Tensor]:
        """All eight words, int64 [B, n] each, of one group for each row and draw, int64 [B, n]."""
        draw = torch.arange(draws.start, draws.stop, device=group.device)[:, None]
        halves = (self._words(draw, group[:, :, None], half) for half in (0, 1))
        return [word.squeeze(2) for words in halves for word in words]

    def _rows(self, rows: slice) -> _Noise:
        seed = self.seed if len(self.seed) == 1 else self.seed[rows]
        return replace(self, seed=seed, row=self.row[rows])

    def _words(self, draw: Tensor, group: Tensor, half: int) -> tuple[Tensor, ...]:
        # A shard that starts inside a group has its own noise there, keyed by its first id.
        first_id = (self.id_base - self.shift + group * GROUP).clamp_min(self.id_base)
        return group_words(self.seed, first_id, self.row, draw, half)


# --- Logits, a chunk at a time ---------------------------------------------------------------------


class _Logits:
    """The final logits of a block of rows, by one program or by several, in chunks of the vocabulary."""

    def __init__(self, hidden: Tensor, weight: Tensor, operands: Sequence[Tensor], programs: Sequence[Program]):
        self.batch, self.vocab = hidden.shape[0], weight.shape[0]
        self.device = hidden.device
        self._weight, self._operands, self._programs = weight, operands, programs
        self._bias = _fused_bias(programs[0], operands, weight)
        if any(_fused_bias(program, operands, weight) is not self._bias for program in programs):
            self._bias = None
        rounds = all(_rounds_acc(program, weight.dtype) for program in programs)
        self._known = 2 if self._bias is not None else int(rounds)
        # The machine's own matmul rounds its result to the dtype it works in, so low precision is
        # right exactly where the program rounds there first.
        dtype = weight.dtype if self._known else torch.float32
        self._hidden = hidden.to(dtype).contiguous()
        # No buffer, in f32, is as much as a quarter of the logits, in the weight's dtype.
        most = min(CHUNK_LOGITS // self.batch, self.vocab * weight.element_size() // 20)
        self._chunk = max(GROUP, most // GROUP * GROUP)
        self._staged = dtype != weight.dtype or not _is_blas_layout(weight)
        self._stage = max(16, self._chunk * self.batch // max(1, weight.shape[1]))

    def chunks(self, shift: int) -> Iterator[slice]:
        """Slices of the vocabulary; all but the first start, and all but the last end, a group.

        shift: the position of column 0 in its group.
        """
        start = 0
        while start < self.vocab:
            stop = min(start + self._chunk - (shift if start == 0 else 0), self.vocab)
            yield slice(start, stop)
            start = stop

    def chunk(self, columns: slice) -> list[Tensor]:
        """The final logits of these columns by each program, f32 [B, C]."""
        product = self._product(columns).contiguous().to(torch.float32)
        operands = [_cut(operand, 1, self.vocab, columns) for operand in self._operands]
        known = (None,) * (self._known - 1) + (product,) * bool(self._known)
        return [program.run(product, operands, known) for program in self._programs]

    def _product(self, columns: slice) -> Tensor:
        weight = self._weight[columns]
        bias = None if self._bias is None else self._bias[columns]
        if not self._staged:
            return self._matmul(weight, bias)
        # Convert, or copy, a few rows of the weight at a time: the result stays in cache.
        out = self._hidden.new_empty(self.batch, weight.shape[0])
        for start in range(0, weight.shape[0], self._stage):
            part = slice(start, start + self._stage)
            rows = weight[part].to(self._hidden.dtype).contiguous()
            out[:, part] = self._matmul(rows, None if bias is None else bias[part])
        return out

    def _matmul(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self._hidden.dtype != torch.float32:
            return F.linear(self._hidden, weight, bias)
        if self.batch == 1 and weight.shape[0] % GROUP == 0 and weight.is_contiguous():
            # A product with one vector runs on one thread; a batch of them on all.
            parts = weight.unflatten(0, (16, -1))
            return torch.bmm(parts, self._hidden.t().expand(16, -1, 1)).view(1, -1)
        # With the large matrix on the left, MKL is up to five times faster at small B.
        return torch.mm(weight, self._hidden.t()).t()


def _cut(operand: Tensor, axis: int, size: int, part: slice) -> Tensor:
    """The part of an operand, broadcastable to [B, V], along an axis of the logits of that size."""
    axis += operand.dim() - 2
    if axis < 0 or operand.shape[axis] != size:
        return operand
    return operand.narrow(axis, part.start, part.stop - part.start)


def _is_blas_layout(matrix: Tensor) -> bool:
    """Whether a matmul takes the matrix as it lies, without a copy of it."""
    (rows, columns), (down, right) = matrix.shape, matrix.stride()
    return (right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows))


def _rounds_acc(program: Program, dtype: torch.dtype) -> bool:
    """Whether the program starts by rounding the accumulator to this dtype, and uses it no further."""
    if dtype == torch.float32 or not program.instructions:
        return False
    op, args = program.instructions[0].op, program.instructions[0].args
    return op == "round" and args[0] == Ref("acc") and DTYPES[args[1]] == dtype and _uses(program, Ref("acc")) == 1


def _fused_bias(program: Program, operands: Sequence[Tensor], weight: Tensor) -> Tensor | None:
    """The bias [V], if the program starts as `addmm` does: adds it, then rounds to the weight's dtype."""
    if weight.dtype == torch.float32 or len(program.instructions) < 2:
        return None
    add, rounded = program.instructions[:2]
    if add.op != "add" or rounded.op != "round" or rounded.args[0] != Ref("x", 0):
        return None
    bias = [operands[arg.n] for arg in add.args if isinstance(arg, Ref) and arg.kind == "a"]
    once = _uses(program, Ref("acc")) == _uses(program, Ref("x", 0)) == 1
    if Ref("acc") not in add.args or not bias or not once or DTYPES[rounded.args[1]] != weight.dtype:
        return None
    return bias[0] if bias[0].shape == weight.shape[:1] and bias[0].dtype == weight.dtype else None


def _uses(program: Program, ref: Ref) -> int:
    return sum(one.args.count(ref) for one in program.instructions)
