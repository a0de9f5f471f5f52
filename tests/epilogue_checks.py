"""What an emitted epilogue makes of a tile, and how far that may be from the truth."""

import torch
import triton
import triton.language as tl

from fs_inductor.kernels.epilogue import Program, emit, emit_loads, operand_kinds
from fs_inductor.kernels.offers import load_operands

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def tile_kernel(
    acc,
    out,
    operands,
    strides,
    B,
    V,
    BB: tl.constexpr,
    BV: tl.constexpr,
    EARLY: tl.constexpr,
    LATE: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    rows = tl.arange(0, BB)
    cols = tl.arange(0, BV)
    mask = (rows < B)[:, None] & (cols < V)[None, :]
    place = rows[:, None] * V + cols[None, :]
    value = tl.load(acc + place, mask=mask, other=0.0)
    early = load_operands(EARLY, operands, strides, rows, 0, B, V, BV)
    value = EPILOGUE(value, early, load_operands(LATE, operands, strides, rows, 0, B, V, BV))
    tl.store(out + place, value, mask=mask)


def run_triton(program: Program, acc, operands, by_four=None, greedy=False):
    """What the emitted function makes of acc, the same whether operands are loaded early or late."""
    batch, vocab = acc.shape
    acc, operands = acc.to(DEVICE), [operand.to(DEVICE) for operand in operands]
    kinds, strides = operand_kinds(operands, batch, vocab)
    assert by_four in (None, any(kind.by_four for kind in kinds))
    block = (triton.next_power_of_2(batch), triton.next_power_of_2(vocab))
    every = tuple(range(len(operands)))
    results = []
    for early, late in ((every, ()), (every[::2], every[1::2]), ((), every))[: 3 if every else 1]:
        out = torch.empty_like(acc)
        functions = (emit_loads(kinds, early), emit_loads(kinds, late), emit(program, kinds, early, late, greedy))
        tile_kernel[(1,)](acc, out, tuple(operands), strides, batch, vocab, *block, *functions)
        results.append(out.cpu())
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0, equal_nan=True)
    return results[0]


def close(got, expected, units=0, of=0.0):
    """NaN and infinity in the same places, the rest within `units` of 2**-24 of the result, or of `of`."""
    # Results too small for f32's normal range may be flushed to zero on the device.
    error = (got.double() - expected.double()).abs() - units * 2.0**-24 * expected.double().abs().clamp(min=of)
    same = (got == expected) | (got.isnan() & expected.isnan()) | (error <= units * 2.0**-126)
    return bool(same.all())
