"""Stock `transformers` models with its own temperature processor: every family's decode step fuses its one site."""

from __future__ import annotations

import re

import pytest
import torch
from distribution_checks import chi_squared
from library_checks import TEMPERATURE, assert_best, check_draw, check_greedy, prompts
from model_families import DECODERS, bart, decoder, t5
from torch.distributions import Categorical

transformers = pytest.importorskip("transformers")

STRICT = {"flashsampling.strict": True, "flashsampling.min_vocab": 0}
warper = transformers.TemperatureLogitsWarper(TEMPERATURE)
ids = prompts()


def ops(epilogue: str) -> list[str]:
    return re.findall(r"= (\w+)\(", epilogue)


@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name):
    model = decoder(name)

    def draw(ids):
        probs = torch.softmax(warper(ids, model(ids).logits[:, -1]), dim=-1)
        return torch.multinomial(probs, num_samples=1)

    def greedy(ids):
        return model(ids).logits[:, -1].argmax(dim=-1)

    logits = model(ids).logits[:, -1]
    (drawn,) = check_draw(draw, ids, logits / TEMPERATURE).report.fused
    (best,) = check_greedy(greedy, ids, logits).report.fused
    assert ops(drawn.epilogue) == [*DECODERS[name].ops, "div"]
    assert ops(best.epilogue) == [*DECODERS[name].ops]


@pytest.mark.parametrize("make", [bart, t5])
def test_encoders_with_decoders(make):
    model = make()

    def draw(ids):
        logits = model(input_ids=ids, decoder_input_ids=ids[:, :3]).logits[:, -1]
        return torch.multinomial(torch.softmax(warper(ids, logits), dim=-1), num_samples=1)

    logits = model(input_ids=ids, decoder_input_ids=ids[:, :3]).logits[:, -1]
    check_draw(draw, ids, logits / TEMPERATURE)


@pytest.mark.parametrize("of", ["logits", "probs"])
def test_categorical(of):
    model = decoder("gemma2")

    def draw(ids):
        logits = warper(ids, model(ids).logits[:, -1])
        if of == "logits":
            return Categorical(logits=logits).sample()
        return Categorical(probs=logits.softmax(dim=-1)).sample()

    check_draw(draw, ids, model(ids).logits[:, -1] / TEMPERATURE)


def test_list_of_logits_processors():
    """Those that overwrite, add to or normalise the logits, one after another, as `generate` calls them."""
    model = decoder("llama")
    likely = model(ids).logits[:, -1].mean(dim=0).topk(8).indices.tolist()
    processors = transformers.LogitsProcessorList(
        [
            transformers.SuppressTokensLogitsProcessor(likely[:2], device="cpu"),
            transformers.NoBadWordsLogitsProcessor([[likely[2]], [likely[3]]], eos_token_id=2),
            transformers.MinLengthLogitsProcessor(10, eos_token_id=likely[4], device="cpu"),
            transformers.SequenceBiasLogitsProcessor({(likely[5],): -2.0, (likely[6],): 3.0}),
            warper,
            transformers.LogitNormalization(),
        ]
    )

    def draw(ids):
        return torch.multinomial(torch.softmax(processors(ids, model(ids).logits[:, -1]), dim=-1), num_samples=1)

    expected = processors(ids, model(ids).logits[:, -1])
    assert (expected == -torch.inf).sum() == 5 * len(ids)
    check_draw(draw, ids, expected)


# -- compiled whole -------------------------------------------------------------------------------------------------


@pytest.fixture
def own_caches(tmp_path, monkeypatch):
    """Compile anew."""
    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("own_caches")
def test_a_compiled_model_draws_what_eager_would():
    model = decoder("gemma2")

    @torch.compile(backend="flashsampling", options=STRICT, fullgraph=True)
    def step(ids):
        probs = torch.softmax(warper(ids, model(ids).logits[:, -1]), dim=-1)
        return torch.multinomial(probs, num_samples=1)

    rows = model(ids).logits[:, -1].double()
    row = rows.softmax(dim=-1).amax(dim=-1).argmin()  # the one that is least sure
    logits = rows[row]
    torch.manual_seed(50)
    with torch.no_grad():
        counts = step(ids[row].repeat(8192, 1)).flatten().bincount(minlength=len(logits))
    assert chi_squared(counts, torch.softmax(logits / TEMPERATURE, dim=-1)) > 1e-4
    # Another temperature, or no softcap, would not pass.
    assert chi_squared(counts, torch.softmax(logits / 0.75, dim=-1)) < 1e-4
    uncapped = 30 * torch.atanh(logits / 30)
    assert chi_squared(counts, torch.softmax(uncapped / TEMPERATURE, dim=-1)) < 1e-4


@pytest.mark.usefixtures("own_caches")
def test_a_compiled_model_takes_eagers_best_tokens():
    model = decoder("phi")

    @torch.compile(backend="flashsampling", options=STRICT, fullgraph=True)
    def step(ids):
        return model(ids).logits[:, -1].argmax(dim=-1)

    with torch.no_grad():
        assert_best(step(ids), model(ids).logits[:, -1])
