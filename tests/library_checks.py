"""What a decode step of somebody else's library must do: fuse its one site, and sample what eager would.

Steps go through the graph pass and are then run op by op, in float32, so that a difference from eager is rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from support import OPS, Rewritten, run_pass

from fs_inductor.options import Options

VOCAB, ROWS, LENGTH = 307, 64, 6
TEMPERATURE = 0.7
STRICT = Options(strict=True, min_vocab=0)


def prompts() -> torch.Tensor:
    """int64 `[ROWS, LENGTH]`, without the ids of special tokens."""
    return torch.randint(3, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def spread_logits(head: torch.nn.Linear, logits: Callable[[], torch.Tensor]) -> None:
    """Random weights (and biases) for `head`, with which `logits()` spreads by about 2.5.

    A fresh model's logits are all but equal: its distribution would be flat whatever was done to them.
    """
    head.weight.normal_()
    if head.bias is not None:
        head.bias.normal_()
    factor = 2.5 / logits().std()
    head.weight *= factor
    if head.bias is not None:
        head.bias *= factor


def check_draw(step: Callable, ids: torch.Tensor, logits: torch.Tensor, **how) -> Rewritten:
    """`step(ids)` draws one token per row from the softmax of `logits` `[B, V]`, eager's final ones.

    The step's result may be the tokens, or sequences that end in them.
    """
    rewritten = run_pass(step, [ids], options=STRICT, **how)
    (call,) = assert_one_site(rewritten).calls
    assert call.op == "sample"
    have = torch.softmax(call.logits().double(), dim=-1)
    torch.testing.assert_close(have, torch.softmax(logits.double(), dim=-1), rtol=1e-3, atol=1e-6)
    # One hundredth off would not pass: the distribution is not flat.
    assert not torch.allclose(have, torch.softmax(1.01 * logits.double(), dim=-1), rtol=1e-3, atol=1e-6)
    drawn = OPS.sample(call.hidden, call.weight, call.seed, call.operands, call.program, 1)
    assert torch.equal(last(rewritten.result), drawn.flatten())
    return rewritten


def check_greedy(step: Callable, ids: torch.Tensor, logits: torch.Tensor, **how) -> Rewritten:
    """`step(ids)` gives the best token of each row of `logits`, but for one near-tie in all rows at most."""
    rewritten = assert_one_site(run_pass(step, [ids], options=STRICT, **how))
    assert [call.op for call in rewritten.calls] == ["argmax"]
    assert_best(last(rewritten.result), logits)
    return rewritten


def assert_one_site(rewritten: Rewritten) -> Rewritten:
    """One sink was fused and none was missed. What may be left is a mixture of experts' own choice of experts."""
    assert rewritten.report.missed == [], str(rewritten.report)
    assert len(rewritten.report.fused) == 1, str(rewritten.report)
    assert [op for op in rewritten.left_over() if not op.startswith("aten.topk")] == []
    return rewritten


def assert_best(tokens: torch.Tensor, logits: torch.Tensor) -> None:
    """`tokens` [B] are eager's greedy ones; where two logits are within rounding of each other, either will do."""
    best, second = logits.topk(2, dim=-1).values.unbind(-1)
    near_tie = best - second < 1e-4
    assert near_tie.sum() <= 1, "another seed would test more rows"
    assert torch.equal(tokens[~near_tie], logits.argmax(dim=-1)[~near_tie])


def last(result: torch.Tensor) -> torch.Tensor:
    """The last token of each row, `[B]`."""
    return result if result.dim() == 1 else result[:, -1]
