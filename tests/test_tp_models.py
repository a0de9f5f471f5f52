"""A `transformers` model sharded with DTensor decodes in real processes: what all ranks draw, and that it is right.

Graphs go through the backend's pass and are then run op by op: what Inductor would generate is not at stake here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from ranks import run_ranks

WINDOW, BATCH, TEMPERATURE = 6, 2, 0.9


def _model(vocab: int):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(15)  # or all tokens would be about as likely
    return model


def _shard(model, world: int):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    plan = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(model, init_device_mesh("cpu", (world,)), plan)


def draw(model, window):
    """int64 `[B, 1]`, from the softmax at the last position of `window` `[B, WINDOW]`."""
    logits = model(input_ids=window).logits[:, -1]
    return torch.multinomial(torch.softmax(logits / TEMPERATURE, dim=-1), num_samples=1)


def greedy(model, window):
    return model(input_ids=window).logits[:, -1].argmax(dim=-1, keepdim=True)


def _compile(step: Callable, left: list[str]) -> Callable:
    """`step` after the pass; appends the names of the ops in its graphs to `left`."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    from fs_inductor.graph_pass import FlashSamplingPass
    from fs_inductor.options import Options
    from fs_inductor.report import Report

    def run_pass(gm, _inputs):
        FlashSamplingPass(Options(min_vocab=0, strict=True), Report())(gm.graph)
        gm.recompile()
        left.extend(str(node.target) for node in gm.graph.nodes if node.op == "call_function")
        return torch._functorch.aot_autograd.make_boxed_func(gm.forward)

    return torch.compile(step, backend=aot_autograd(fw_compiler=run_pass, decompositions=select_decomp_table()))


@torch.no_grad()
def _decode(step: Callable, model, tokens: int) -> torch.Tensor:
    torch.manual_seed(1)
    history = torch.arange(BATCH * WINDOW).view(BATCH, WINDOW) % 12
    for _ in range(tokens):
        history = torch.cat([history, step(model, history[:, -WINDOW:])], dim=1)
    return history[:, WINDOW:]


@torch.no_grad()
def _run(rank: int, world: int, vocab: int, tokens: int, draws: int) -> tuple:
    """Greedy and drawn tokens of a decode, draws of one next token, and the ops that were in the graphs."""
    left: list[str] = []
    model = _shard(_model(vocab), world)
    step = _compile(draw, left)
    decoded = [_decode(_compile(greedy, left), model, tokens), _decode(step, model, tokens)]
    torch.manual_seed(rank)  # ranks need not share a seed
    if draws:
        window = torch.arange(WINDOW).expand(draws // 4, -1)
        decoded.append(torch.cat([step(model, window) for _ in range(4)]))
    return *decoded, left


@pytest.mark.parametrize(
    ("world", "vocab", "tokens", "draws"), [(4, 512, 200, 0), (2, 100, 200, 8192), (8, 100, 0, 8192)]
)
def test_a_sharded_model_decodes_and_draws_as_the_whole_one(world, vocab, tokens, draws):
    results = run_ranks(_run, world, vocab, tokens, draws, seconds=300)
    for rank, (*mine, left) in enumerate(results):
        assert all(torch.equal(a, b) for a, b in zip(mine, results[0], strict=False)), f"rank {rank} differs"
        # Neither the logits' gather is left, nor what followed it.
        assert not any("all_gather" in name or "multinomial" in name or "argmax.default" in name for name in left)
        assert any("_sharded" in name for name in left)
    model = _model(vocab)
    assert torch.equal(results[0][0], _decode(greedy, model, tokens))
    if math.ceil(vocab / world) % 128 == 0:
        assert torch.equal(results[0][1], _decode(_compile(draw, []), model, tokens))
    if draws:
        logits = model(input_ids=torch.arange(WINDOW)[None]).logits[0, -1].detach().double()
        expected = torch.softmax(logits / TEMPERATURE, -1) * draws
        counts = torch.bincount(results[0][2].flatten(), minlength=vocab)
        statistic = float(((counts - expected) ** 2 / expected).sum())
        dof = vocab - 1
        # Fixed seeds; an honest sampler is beyond this once in thousands.
        assert statistic < dof + 4 * math.sqrt(2 * dof) + 8
