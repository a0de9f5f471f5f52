"""Checks of a rewritten call with real tensors, on any device."""

from __future__ import annotations

import copy

import torch
from idiom_cases import Case
from support import assert_fused, fresh, run_pass

from fs_inductor.options import Options

STRICT = Options(min_vocab=0, strict=True)

# Logits of the cases are below 64 in magnitude and pass at most four inexact float32 steps.
RELATIVE_ERROR = 4 * 64 * 2.0**-24 * 4


def first_argmax(logits: torch.Tensor) -> torch.Tensor:
    """The lowest id of the maximum, whatever torch's argmax does with ties."""
    return (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)


def arguments_on(device: str, case: Case) -> list:
    """The case's arguments on ``device``, but for 0-d tensors: such a temperature usually lives on the CPU."""

    def moves(x) -> bool:
        return isinstance(x, torch.nn.Module) or (isinstance(x, torch.Tensor) and x.dim() > 0)

    return [copy.deepcopy(a).to(device) if moves(a) else a for a in case.args]


def check_rewritten_call(case: Case, device: str) -> None:
    """The case's rewritten call samples from what the case expects, or takes eager's tokens.

    Nothing here is random: the tensors that reach the op are taken from an execution of the rewritten graph.
    """
    args = arguments_on(device, case)
    torch.manual_seed(0)
    with torch.no_grad():
        eager = case.fn(*fresh(args))
    rewritten = run_pass(case.fn, args, options=STRICT)
    assert_fused(rewritten, case.fused)
    assert len(rewritten.calls) == case.heads
    tokens = rewritten.result
    assert tokens.shape == eager.shape
    assert tokens.dtype == eager.dtype
    vocabulary = rewritten.calls[0].weight.shape[0]
    assert ((tokens >= case.offset) & (tokens < case.offset + vocabulary)).all()

    if case.kind != "draw":
        rows = ...
        if case.kind == "mixed":
            rows = args[2] < 1e-5
            assert rows.any() and not rows.all()
        # Sums of the cases are exact, so eager has no rounding of its own: no near-tie is excused.
        assert torch.equal(tokens[rows], eager[rows])
        if case.name != "band" and case.heads == 1:  # band adds its offset after the op
            greedy = first_argmax(rewritten.calls[0].logits(rewritten.calls[0].greedy_program))
            assert torch.equal(greedy[rows], eager[rows].flatten())
    if case.kind != "greedy":
        wanted = case.logits(*fresh(case.args)).reshape(-1, vocabulary).double().softmax(-1)
        drawn = tokens.cpu().reshape(wanted.shape[0], -1).long() - case.offset
        assert (wanted.gather(1, drawn) > 0).all()
        for head, call in enumerate(rewritten.calls):
            expected = wanted[case.rows_of(head)]
            actual = call.logits().cpu().double().softmax(-1)
            assert torch.equal(actual == 0, expected == 0)
            torch.testing.assert_close(actual, expected, rtol=RELATIVE_ERROR, atol=0)
            # The case can tell: without its program the call would draw from something else.
            assert (call.program == "") == torch.equal(actual, call.logits("").cpu().double().softmax(-1))
