"""The registered ops for an LM head whose vocabulary is sharded over the ranks of a process group.

Each rank multiplies by its own rows of the weight and finds its own winner a row; the ranks exchange winners, eight
or sixteen bytes a row, instead of logits. Nothing in an op's arguments depends on the rank, so that all ranks can
compile, and cache, the same graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .ops import _check_sampling, check_matrices

_library = torch.library.Library("flashsampling", "FRAGMENT")
_tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_library.define(
    "sample_sharded(Tensor hidden, Tensor weight, Tensor seed, Tensor[] operands, str program, int num_samples, "
    "SymInt vocab, SymInt capacity, str group_name) -> Tensor",
    tags=_tags,
)
_library.define(
    "argmax_sharded(Tensor hidden, Tensor weight, Tensor[] operands, str program, SymInt vocab, SymInt capacity, "
    "str group_name) -> Tensor",
    tags=_tags,
)


def sample_sharded(
    hidden: Tensor,
    weight: Tensor,
    seed: Tensor,
    operands: Sequence[Tensor],
    program: str,
    num_samples: int,
    vocab: int,
    capacity: int,
    group_name: str,
) -> Tensor:
    """``torch.ops.flashsampling.sample_sharded``: draws from the softmax over all ranks' logits, alike on every rank.

    hidden ``[B, D]``, the same on every rank, and weight ``[R, D]``, this rank's rows: ids ``rank * capacity`` to
    ``min(vocab, (rank + 1) * capacity)`` of the whole vocabulary. That may be fewer than ``capacity`` rows, or none;
    rows past the vocabulary (padding) are ignored. bfloat16, float16 or float32, one dtype, one device, any strides.
    seed: int64, 0-d or ``[B]``. operands: tensors broadcastable to ``[B, vocab]``, read at the shard's offset; or to
    ``[B, R]``, this rank's part of such a tensor. program: an epilogue program. Returns int64 ``[B, num_samples]``,
    global ids, the same on every rank.

    Ranks need not have the same seed. A row's token is the winner of the group of ids with the highest score, and
    every group lies in one shard and takes its noise from its own rank's seed alone. The noise of different groups is
    independent whatever the keys, so the row's winner is an exact draw for any seeds; and as all ranks compare the
    same words, it is one draw. With equal seeds, and shards that start at multiples of the group size of 128, it is
    the draw of one rank with the whole vocabulary. (A group that a boundary cuts becomes two, with noise of their
    own: just as exact, but another draw.)

    All ranks of the group must make their calls in one order and with one batch size, as for any collective.

    Raises:
        ValueError, TypeError: an argument of wrong rank, size, dtype, device or value.
        ExchangeError: a rank does not answer within the process group's timeout, or compiled something else.
    """
    _check_sampling(seed, hidden, num_samples)
    return _winners(hidden, weight, seed, operands, program, num_samples, vocab, capacity, group_name)


def argmax_sharded(
    hidden: Tensor,
    weight: Tensor,
    operands: Sequence[Tensor],
    program: str,
    vocab: int,
    capacity: int,
    group_name: str,
) -> Tensor:
    """``torch.ops.flashsampling.argmax_sharded``: the id of the largest logit of all ranks, the lowest among equals.

    Arguments and errors as for `sample_sharded`. Returns int64 ``[B]``, the same on every rank.
    """
    return _winners(hidden, weight, None, operands, program, 1, vocab, capacity, group_name).squeeze(1)


def _fake_sample(hidden, weight, seed, operands, program, num_samples, vocab, capacity, group_name):
    return hidden.new_empty((hidden.shape[0], num_samples), dtype=torch.int64)


def _fake_argmax(hidden, weight, operands, program, vocab, capacity, group_name):
    return hidden.new_empty((hidden.shape[0],), dtype=torch.int64)


for _name, _function, _fake in (
    ("sample_sharded", sample_sharded, _fake_sample),
    ("argmax_sharded", argmax_sharded, _fake_argmax),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _function, _key)
    torch.library.register_fake(f"flashsampling::{_name}", _fake, lib=_library)


def _winners(hidden, weight, seed, operands, program, num_samples, vocab, capacity, group_name):
    """int64 [B, num_samples]: the tokens, agreed on by all ranks. Without a seed, the argmax."""
    from .kernels import exchange

    group = exchange.group(group_name)
    _check(hidden, weight, operands, program, vocab, capacity, group)
    start = min(group.rank * capacity, vocab)
    rows = min(capacity, vocab - start)
    operands = [_part(operand, vocab, weight.shape[0], start, rows) for operand in operands]
    weight = weight[:rows]
    batch = hidden.shape[0]
    if batch == 0:
        # Before anything that counts calls: a rank may skip empty batches altogether.
        return hidden.new_empty((0, num_samples), dtype=torch.int64)
    site = (
        "argmax" if seed is None else f"{num_samples} samples a row",
        f"vocabulary {vocab}",
        f"{capacity} ids a rank",
        f"{hidden.dtype} on {hidden.device.type}",
        f"{len(operands)} operands",
        f"program {program!r}",
    )
    group.agree(site, batch)
    arguments = (hidden, weight, seed, operands, program, num_samples, start)
    if hidden.is_cuda:
        return _winners_cuda(group, *arguments)
    from .kernels import reference

    if rows == 0:
        words = torch.full((batch, num_samples), exchange.NOTHING)
    else:
        words = exchange.pack(*reference.winners(*arguments))
    return exchange.unpack(group.best(words))


def _winners_cuda(group, hidden, weight, seed, operands, program, num_samples, start):
    from .kernels import exchange, exchange_triton, gemm_sample

    shape = (hidden.shape[0], num_samples)
    channel = group.channel(hidden.device, shape[0] * shape[1])
    if weight.shape[0] == 0:
        words = torch.full(shape, exchange.NOTHING, device=hidden.device)
        if channel is not None:
            return exchange_triton.run(channel, words.view(-1)).view(shape)
    else:
        how = "words" if channel is None else channel
        if seed is None:
            found = gemm_sample.argmax(hidden, weight, operands, program, start, exchange=how)[:, None]
        else:
            found = gemm_sample.sample(hidden, weight, seed, operands, program, num_samples, start, exchange=how)
        if channel is not None:
            return found
        words = found
    return exchange.unpack(group.best(words))


def _part(operand: Tensor, vocab: int, given: int, start: int, rows: int) -> Tensor:
    """What this rank reads of an operand: given for the whole vocabulary, or already for its own rows."""
    width = operand.shape[-1] if operand.dim() else 1
    if width == vocab != 1:
        return operand.narrow(-1, start, rows)
    return operand.narrow(-1, 0, rows) if width == given != 1 else operand


def _check(hidden, weight, operands, program, vocab, capacity, group) -> None:
    from .kernels.epilogue import Program

    # A shard without rows is fine: check the rest of it as if it had one.
    check_matrices(hidden, weight if weight.dim() != 2 or len(weight) else weight.new_empty(1, weight.shape[1]))
    if hidden.dim() != 2:
        raise ValueError(f"hidden has shape {tuple(hidden.shape)}; it must be [B, D]")
    if vocab < 1 or capacity < 1:
        raise ValueError(f"vocab and capacity must be at least 1, not {vocab} and {capacity}")
    if vocab > capacity * group.world:
        raise ValueError(f"{group.world} ranks of capacity {capacity} do not hold a vocabulary of {vocab}")
    want = max(0, min(capacity, vocab - group.rank * capacity))
    if not want <= len(weight) <= max(want, capacity):
        raise ValueError(
            f"weight has {len(weight)} rows on rank {group.rank} of {group.world}; with vocab={vocab} and "
            f"capacity={capacity} it must have {want}, or up to {capacity} with padding"
        )
    wanted = Program.parse(program).num_operands
    if wanted != len(operands):
        raise ValueError(f"the program reads {wanted} operands, but {len(operands)} were passed")
    for i, x in enumerate(operands):
        if x.device != hidden.device:
            raise ValueError(f"operands[{i}] is on {x.device}, but hidden is on {hidden.device}")
        if x.is_complex():
            raise TypeError(f"operands[{i}] has dtype {x.dtype}; it must be real or bool")
        sizes = (1, 1, *x.shape)[-2:]
        if x.dim() > 2 or sizes[0] not in (1, len(hidden)) or sizes[1] not in (1, vocab, len(weight)):
            raise ValueError(
                f"operands[{i}] of shape {tuple(x.shape)} does not broadcast to [B, vocab] = [{len(hidden)}, {vocab}], "
                f"nor to this rank's [{len(hidden)}, {len(weight)}]"
            )
