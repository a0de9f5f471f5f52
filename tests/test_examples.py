"""The example runs from end to end on a very small model, and answers bad arguments with one line."""

import json
import shutil
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tqdm")

import compile_time
import decode
import measure
import tiny_lm

TINY = tiny_lm.Recipe(hidden_size=32, layers=1, heads=2, context=32, batch=2, seconds=30, max_steps=20)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_lm.load_or_train(torch.device("cpu"), TINY, root=tmp_path_factory.mktemp("cache"))


# --- decode.py ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, names",
    [
        (["--temperature", "0"], ["--temperature", "'0'"]),
        (["--temperature=-1"], ["--temperature", "'-1'"]),
        (["--temperature", "nan"], ["--temperature", "'nan'"]),
        (["--temperature", "inf"], ["--temperature", "'inf'"]),
        (["--temperature", "warm"], ["--temperature", "'warm'"]),
        (["--batch", "0"], ["--batch", "'0'"]),
        (["--batch", "1.5"], ["--batch", "'1.5'"]),
        (["--tokens", "0"], ["--tokens", "'0'"]),
        (["--tokens=-3"], ["--tokens", "'-3'"]),
        (["--seed=-1"], ["--seed", "'-1'"]),
        (["--seed", str(2**63)], ["--seed", str(2**63)]),
        (["--device", "warp"], ["--device", "'warp'"]),
        (["--device", "meta"], ["--device", "'meta'"]),
        (["--device", "cuda:99"], ["--device", "'cuda:99'"]),
        (["--model", "no/such/folder"], ["--model", "'no/such/folder'"]),
        (["--model", "."], ["--model", "config.json"]),
        (["--speed", "9"], ["--speed"]),
    ],
)
def test_a_bad_argument_gets_one_line(arguments, names, capsys):
    assert_one_line(arguments, names, capsys)


def assert_one_line(arguments, names, capsys):
    with pytest.raises(SystemExit) as stopped:
        decode.main(arguments)
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and message.endswith("\n"), message
    assert message.startswith("decode.py: error: ")
    for name in names:
        assert name in message


@pytest.mark.parametrize(
    "content",
    ["{", "{}", '{"model_type": "llama"}', '{"model_type": "no-such-model"}', '{"model_type": "vit"}'],
)
def test_a_broken_checkpoint_gets_one_line(content, tmp_path, capsys):
    (tmp_path / "config.json").write_text(content)
    assert_one_line(["--model", str(tmp_path)], ["--model", str(tmp_path)], capsys)


def test_damaged_weights_get_one_line(checkpoint, tmp_path, capsys):
    damaged = shutil.copytree(checkpoint, tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"not weights")
    assert_one_line(["--model", str(damaged)], ["--model", str(damaged)], capsys)


def test_a_cache_that_cannot_be_written_gets_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert_one_line([], ["XDG_CACHE_HOME"], capsys)


def test_more_tokens_than_positions_get_one_line(checkpoint, capsys):
    assert_one_line(["--model", str(checkpoint), "--tokens", "5000"], ["--tokens", "5000", "2048"], capsys)


def test_an_empty_prompt_gets_one_line(checkpoint, capsys):
    assert_one_line(["--model", str(checkpoint), "--prompt", ""], ["--prompt", "''"], capsys)


def test_decode_runs_every_backend_and_fuses_the_one_site(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(decode, "FIT_DRAWS", 400)
    monkeypatch.setattr(decode, "FIT_SECONDS", 30)
    decode.main(["--model", str(checkpoint), "--batch", "8", "--tokens", "3", "--prompt", "The list"])
    out = capsys.readouterr().out
    assert "1 fused, 0 missed" in out
    assert out.count("agree with eager, all 24") == 2
    assert out.count("400 draws") == 3
    assert out.count("tokens/s") == 3


# --- tiny_lm.py ---------------------------------------------------------------------------------


def test_the_checkpoint_has_the_vocabulary_that_was_asked_for(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["vocab_size"] == TINY.vocab_size >= 8000


def test_a_cached_model_is_used_again_and_a_damaged_one_is_not(checkpoint, monkeypatch, capsys):
    trained = []
    train = tiny_lm.train
    monkeypatch.setattr(tiny_lm, "train", lambda *args: trained.append(1) or train(*args))
    again = (torch.device("cpu"), TINY, checkpoint.parent)
    assert tiny_lm.load_or_train(*again) == checkpoint
    assert not trained

    weights = checkpoint / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert tiny_lm.load_or_train(*again) == checkpoint
    assert trained
    assert "damaged" in capsys.readouterr().out
    assert tiny_lm.is_intact(checkpoint)


def test_another_recipe_is_another_model():
    assert tiny_lm.cache_key(TINY) != tiny_lm.cache_key(tiny_lm.DEFAULT)


def test_prose_leaves_code_and_tables_out():
    text = "A statement of some length, in plain words.\n\n   x = f(1, 2)\n   y = x[0]\n\nA name.\n"
    assert tiny_lm.prose(text) == ["A statement of some length, in plain words."]


def test_known_words_share():
    assert tiny_lm.known_words_share("The statement xyzzy, the object qwerty") == pytest.approx(4 / 6)


# --- compile_time.py ----------------------------------------------------------------------------


class Output(NamedTuple):
    logits: torch.Tensor


class Head(torch.nn.Module):
    """As little of a language model as can be compiled."""

    def __init__(self):
        super().__init__()
        self.embedding, self.lm_head = torch.nn.Embedding(64, 8), torch.nn.Linear(8, 64, bias=False)

    def forward(self, ids):
        return Output(self.lm_head(self.embedding(ids)))


def test_compile_time_measures_and_compares(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(compile_time, "build", lambda args: Head().requires_grad_(False))
    arguments = ["--rounds", "1", "--vocab", "64", "--device", "cpu", "--out", str(tmp_path), "--quiet"]
    assert compile_time.main([*arguments, "--steps", "no sink"]) == 0
    result = json.loads((tmp_path / "compile_time.json").read_text())
    assert result["once_a_process"]["code without a sink"] == "the same"
    inductor, ours = result["rows"]
    assert (inductor["backend"], ours["backend"]) == ("inductor", "flashsampling")
    assert inductor["rounds"][0]["in_pass"] == 0 < ours["rounds"][0]["in_pass"] < ours["rounds"][0]["cpu"]
    assert "| no sink |" in capsys.readouterr().out


def test_compile_time_table():
    def row(backend, walls, in_pass):
        return compile_time.Row("draw", backend, [compile_time.Cost(w, w / 2, 1.0, in_pass) for w in walls])

    text = compile_time.report([row("inductor", [4.0, 9.0, 4.0], 0.0), row("flashsampling", [3.0, 3.0, 8.0], 0.02)])[-1]
    assert text == "| draw | 4.00 | 3.00 | 2.00 | 1.50 | 0.750 | 0.750 | 20.0 | 1.00% |"


@pytest.mark.parametrize(
    "arguments",
    [["--rounds", "0"], ["--layers", "x"], ["--hidden", "12"], ["--steps", "draw,beam"], ["--device", "tpu"]],
)
def test_compile_time_names_a_bad_argument(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        compile_time.main(arguments)
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err.splitlines()[-1]


# --- measure.py ---------------------------------------------------------------------------------


def test_goodness_of_fit_tells_right_draws_from_wrong_ones():
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.softmax(3 * torch.randn(1000, generator=generator, dtype=torch.float64), 0)
    draws = torch.multinomial(probabilities, 20_000, replacement=True, generator=generator)
    assert measure.goodness_of_fit(draws, probabilities).p_value > 0.01
    colder = torch.softmax(probabilities.log() * 1.1, 0)
    assert measure.goodness_of_fit(draws, colder).p_value < 1e-6


def test_goodness_of_fit_agrees_with_a_table():
    # 44 and 56 heads and tails: the statistic is 1.44, whose tail with one degree of freedom is 0.2301.
    fit = measure.goodness_of_fit(torch.tensor([0] * 44 + [1] * 56), torch.tensor([0.5, 0.5]).double())
    assert fit.statistic == pytest.approx(1.44)
    assert fit.p_value == pytest.approx(0.2301, abs=1e-4)


def test_peak_memory_counts_what_is_held_at_once():
    def step():
        first = torch.ones(1 << 18)  # 1 MiB
        del first
        second = torch.ones(1 << 18)
        return second + second

    peak = measure.peak_memory(step, torch.device("cpu"))
    assert 2 << 20 <= peak < 2.1 * (1 << 20)
