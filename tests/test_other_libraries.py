"""Decode code of packages that know nothing of this one, called as it is installed."""

from __future__ import annotations

import pytest
import torch
from distribution_checks import chi_squared
from library_checks import STRICT, TEMPERATURE, VOCAB, assert_best, check_draw, check_greedy, prompts, spread_logits
from support import assert_fused, run_pass

ids = prompts()


# -- x-transformers -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def x_transformer():
    x_transformers = pytest.importorskip("x_transformers")
    torch.manual_seed(0)
    layers = x_transformers.Decoder(dim=32, depth=1, heads=1, attn_dim_head=32, rotary_pos_emb=True)
    net = x_transformers.TransformerWrapper(num_tokens=VOCAB, max_seq_len=64, attn_layers=layers)
    model = x_transformers.AutoregressiveWrapper(net).eval().requires_grad_(False)
    spread_logits(net.to_logits, lambda: net(ids)[:, -1])
    return model


def test_x_transformers_generate_draws(x_transformer):
    def step(ids):
        return x_transformer.generate(ids, 1, temperature=TEMPERATURE, filter_logits_fn=lambda logits: logits)

    check_draw(step, ids, x_transformer.net(ids)[:, -1] / TEMPERATURE)


def test_x_transformers_generate_is_greedy_at_temperature_zero(x_transformer):
    check_greedy(lambda ids: x_transformer.generate(ids, 1, temperature=0.0), ids, x_transformer.net(ids)[:, -1])


def test_x_transformers_gumbel_sample(x_transformer):
    from x_transformers.autoregressive_wrapper import gumbel_sample

    def step(ids):
        return gumbel_sample(x_transformer.net(ids)[:, -1], TEMPERATURE)

    check_draw(step, ids, x_transformer.net(ids)[:, -1] / TEMPERATURE)


def test_x_transformers_generate_of_two_tokens(x_transformer):
    """One graph: a site for each token, and the second token follows from the first as in eager."""
    rewritten = run_pass(lambda ids: x_transformer.generate(ids, 2, temperature=0.0), [ids], options=STRICT)
    assert_fused(rewritten, 2)
    first, second = rewritten.result.unbind(dim=1)
    assert_best(first, x_transformer.net(ids)[:, -1])
    assert_best(second, x_transformer.net(torch.cat([ids, first[:, None]], dim=1))[:, -1])


# -- minimamba ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def minimamba():
    package = pytest.importorskip("minimamba")
    torch.manual_seed(0)
    config = package.MambaLMConfig(d_model=32, n_layer=1, d_state=8, vocab_size=VOCAB)
    model = package.MambaForCausalLM(config).eval().requires_grad_(False)
    spread_logits(model.lm_head.lm_head, lambda: model(ids)[:, -1])
    return model


def test_minimamba_generate_draws(minimamba):
    def step(ids):
        return minimamba.generate(ids, max_new_tokens=1, temperature=TEMPERATURE, top_p=1.0)

    check_draw(step, ids, minimamba(ids)[:, -1] / TEMPERATURE)


def test_minimamba_generate_is_greedy(minimamba):
    def step(ids):
        return minimamba.generate(ids, max_new_tokens=1, top_p=1.0, do_sample=False)

    # A pass of torch 2.13's own, which looks for a race in every argmax of a quotient, fails on a Python divisor.
    check_greedy(step, ids, minimamba(ids)[:, -1], config={"apply_gumbel_max_trick": False})


def test_minimamba_compiled_whole(minimamba, tmp_path, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    @torch.compile(
        backend="flashsampling",
        options={"flashsampling.strict": True, "flashsampling.min_vocab": 0},
        fullgraph=True,
    )
    def step(ids):
        return minimamba.generate(ids, max_new_tokens=1, temperature=TEMPERATURE, top_p=1.0)

    logits = minimamba(ids)[:, -1].double()
    row = logits.softmax(dim=-1).amax(dim=-1).argmin()  # the one that is least sure
    torch.manual_seed(51)
    sequences = step(ids[row].repeat(8192, 1))
    assert torch.equal(sequences[:, :-1], ids[row].expand(8192, -1))
    counts = sequences[:, -1].bincount(minlength=logits.shape[-1])
    assert chi_squared(counts, torch.softmax(logits[row] / TEMPERATURE, dim=-1)) > 1e-4
    assert chi_squared(counts, torch.softmax(logits[row] / 0.75, dim=-1)) < 1e-4
