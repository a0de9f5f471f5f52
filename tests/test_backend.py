"""`torch.compile(..., backend="flashsampling")`: options, modes, caches, users' own passes, repeated calls."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from idiom_cases import W, exact, h
from support import BATCH, FEATURES, VOCAB, run_pass
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

import fs_inductor
from fs_inductor import graph_pass
from fs_inductor.backend import flashsampling
from fs_inductor.graph_pass import FlashSamplingPass, PassSequence
from fs_inductor.options import Options
from fs_inductor.seeds import SeedViews

ROOT = Path(__file__).parents[1]
FUSE = {"flashsampling.min_vocab": 0}


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    """Each test compiles anew, and leaves nothing behind in the user's cache."""
    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for variable in [name for name in os.environ if name.startswith("FLASHSAMPLING_")]:
        monkeypatch.delenv(variable)
    yield
    torch._dynamo.reset()


def compiled(fn, options=None, **how):
    return torch.compile(fn, backend="flashsampling", options=FUSE if options is None else options, **how)


def greedy(h, W):
    return F.linear(h, W).argmax(-1)


def draw(h, W):
    return F.linear(h, W).softmax(-1).multinomial(1).squeeze(-1)


def draw_at(h, W, temperature):
    return (F.linear(h, W) / temperature).softmax(-1).multinomial(1).squeeze(-1)


def peaked(batch: int, peak: int = 17) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and weight with one likely token, so that a draw can be checked by its value."""
    weight = torch.zeros(VOCAB, FEATURES)
    weight[peak] = 1
    return torch.full((batch, FEATURES), 4.0), weight


def calls_in(code: list[str]) -> int:
    return sum(len(re.findall(r"= torch\.ops\.flashsampling\.\w+\.default\(", text)) for text in code)


def generated(fn, *args):
    """Output and code of a compiled function."""
    with torch.no_grad():
        return run_and_get_code(fn, *args)


# -- the entry ----------------------------------------------------------------------------------------------------


def test_entry_point_names_the_backend():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, attribute = project["entry-points"]["torch_dynamo_backends"]["flashsampling"].partition(":")
    assert getattr(__import__(module, fromlist=[attribute]), attribute) is flashsampling
    assert "flashsampling" in torch._dynamo.list_backends(exclude_tags=())


def test_default_mode_fuses_and_agrees_with_eager():
    tokens, code = generated(compiled(greedy, fullgraph=True), h, W)
    assert torch.equal(tokens, greedy(h, W))
    assert calls_in(code) == 1
    assert "mm(" not in "".join(code)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes(mode, monkeypatch):
    """A mode reaches Inductor as its settings; that it does what it says there is Inductor's business."""
    seen = []

    def inductor(self, gm, example_inputs):
        seen.append(dict(self.config))
        return gm

    monkeypatch.setattr(torch._TorchCompileInductorWrapper, "__call__", inductor)
    torch.compile(greedy, backend=flashsampling, mode=mode)(h, W)
    expected = torch._TorchCompileInductorWrapper(mode, None, None).config
    ours = seen[0].pop("joint_custom_pre_pass")
    assert isinstance(seen[0].pop("joint_custom_post_pass"), SeedViews)
    assert isinstance(ours, FlashSamplingPass)
    assert seen[0] == expected


@pytest.mark.parametrize("how", ["option", "mode"])
def test_where_inductor_runs_no_passes_that_is_said(how, caplog, monkeypatch):
    if how == "mode" and "lite" not in torch._inductor.list_mode_options():
        pytest.skip("this torch has no mode of that name")
    monkeypatch.setenv("FLASHSAMPLING_MIN_VOCAB", "0")
    chosen = {"mode": "lite"} if how == "mode" else {"options": {"use_joint_graph_passes": False}}
    step = torch.compile(greedy, backend="flashsampling", **chosen)
    tokens, code = generated(step, h, W)
    assert torch.equal(tokens, greedy(h, W))
    assert calls_in(code) == 0
    assert "use_joint_graph_passes is False" in caplog.text
    caplog.clear()
    report = fs_inductor.explain(step)(h, W)
    assert "use_joint_graph_passes is False" in str(report) and report.no_passes
    assert "use_joint_graph_passes" not in caplog.text  # said once
    monkeypatch.setenv("FLASHSAMPLING_STRICT", "1")
    torch._dynamo.reset()
    with pytest.raises(Exception, match="strict is set, but nothing can be fused"):
        step(h, W)


def test_inductors_options_are_kept(monkeypatch):
    seen = []

    def inductor(self, gm, example_inputs):
        seen.append(dict(self.config))
        return gm

    monkeypatch.setattr(torch._TorchCompileInductorWrapper, "__call__", inductor)
    options = {"max_autotune": True, "flashsampling.strict": True, "epilogue_fusion": False}
    torch.compile(greedy, backend="flashsampling", options=options)(h, W)
    assert seen[0]["max_autotune"] is True
    assert seen[0]["epilogue_fusion"] is False
    assert seen[0]["joint_custom_pre_pass"].options == Options(strict=True)
    assert not any(key.startswith("flashsampling") for key in seen[0])


def test_unknown_inductor_option_is_inductors_error():
    with pytest.raises(Exception, match="max_autotuna"):
        compiled(greedy, {"max_autotuna": True})(h, W)


def test_dynamic_batch_compiles_once():
    step = compiled(draw, {**FUSE, "flashsampling.strict": True}, dynamic=True, fullgraph=True)
    counters.clear()
    with torch.no_grad():
        for batch in (2, 5, 9):
            hidden, weight = peaked(batch)
            assert step(hidden, weight).tolist() == [17] * batch
    assert counters["stats"]["unique_graphs"] == 1


def test_freezing_keeps_two_draws_apart():
    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(FEATURES, VOCAB)

        def forward(self, x):
            # Neither result is an output of the graph: calls without seeds would be merged.
            a = self.head(x).softmax(-1).multinomial(1)
            b = self.head(x * 1.0).softmax(-1).multinomial(1)
            return (a == b).float()

    model = Head().requires_grad_(False).eval()
    model.head.weight.zero_()
    model.head.bias.zero_()
    equal, code = generated(compiled(model, {**FUSE, "freezing": True}), torch.ones(512, FEATURES))
    assert calls_in(code) >= 1
    # Uniform over 160 tokens: 512 pairs agree about three times; 512 times if they share noise.
    assert equal.sum() < 30


# -- our options --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("strikt", "strict"),
        ("min_vocabulary", "min_vocab"),
        ("enable", "enabled"),
        ("tpp", "tp"),
        ("Strict", "strict"),
    ],
)
def test_unknown_option_names_the_nearest(wrong, nearest):
    with pytest.raises(ValueError, match=f"'flashsampling.{wrong}'; did you mean 'flashsampling.{nearest}'"):
        Options.split({f"flashsampling.{wrong}": True})


def test_unknown_option_reaches_the_user():
    with pytest.raises(Exception, match=r"unknown option 'flashsampling\.strikt'; did you mean"):
        compiled(greedy, {"flashsampling.strikt": True})(h, W)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("strict", 1, TypeError),
        ("enabled", "yes", TypeError),
        ("tp", None, TypeError),
        ("min_vocab", 1.5, TypeError),
        ("min_vocab", True, TypeError),
        ("min_vocab", "8", TypeError),
        ("min_vocab", -1, ValueError),
        ("max_batch", 2.0, TypeError),
        ("max_batch", -4, ValueError),
    ],
)
def test_wrong_values(name, value, error):
    with pytest.raises(error, match=rf"flashsampling\.{name} must .*{value!r}"):
        Options.split({f"flashsampling.{name}": value})


def test_split_keeps_what_is_not_ours():
    given = {"flashsampling.strict": True, "max_autotune": True}
    ours, rest = Options.split(given)
    assert ours == Options(strict=True)
    assert rest == {"max_autotune": True}
    assert given == {"flashsampling.strict": True, "max_autotune": True}
    assert Options.split(None) == (Options(), {})


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("FLASHSAMPLING_STRICT", "1", Options(strict=True)),
        ("FLASHSAMPLING_ENABLED", " False ", Options(enabled=False)),
        ("FLASHSAMPLING_TP", "0", Options(tp=False)),
        ("FLASHSAMPLING_MIN_VOCAB", "77", Options(min_vocab=77)),
        ("FLASHSAMPLING_MAX_BATCH", "512", Options(max_batch=512)),
    ],
)
def test_environment(monkeypatch, variable, text, expected):
    monkeypatch.setenv(variable, text)
    assert Options.split(None)[0] == expected


def test_an_option_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("FLASHSAMPLING_STRICT", "1")
    assert Options.split({"flashsampling.strict": False})[0] == Options()


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("FLASHSAMPLING_STRICT", "maybe"),
        ("FLASHSAMPLING_MIN_VOCAB", "-3"),
        ("FLASHSAMPLING_MAX_BATCH", "none"),
        ("FLASHSAMPLING_TP", ""),
    ],
)
def test_bad_environment(monkeypatch, variable, text):
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=f"{variable} must be .*{text!r}"):
        Options.split(None)


def test_default_smallest_vocabulary_depends_on_the_device():
    assert Options().rule("cpu").min_vocab > Options().rule("cuda").min_vocab > 0
    assert Options(min_vocab=3).rule("cpu").min_vocab == Options(min_vocab=3).rule("cuda").min_vocab == 3


def test_strict_raises_with_the_report():
    def step(h, W):
        logits = F.linear(h, W)
        return logits.argmax(-1), logits

    with pytest.raises(fs_inductor.NotFusedError, match="PROBS_ESCAPE") as caught:
        compiled(step, {**FUSE, "flashsampling.strict": True})(h, W)
    assert type(caught.value) is fs_inductor.NotFusedError
    assert [m.code for m in caught.value.report.missed] == ["PROBS_ESCAPE"]
    assert caught.value.report.fused == []


def escaping(h, W):
    logits = F.linear(h, W)
    return logits * logits.argmax(-1, keepdim=True)


@pytest.mark.parametrize("fn", [greedy, lambda h, W: torch.tanh(h) @ W.T, escaping])
def test_left_alone_compiles_to_inductors_code(fn):
    """Switched off, without a sink, or missed: Inductor's code, byte for byte but for paths and names of files."""
    off = {"flashsampling.enabled": False} if fn is greedy else FUSE

    def code(step):
        torch._dynamo.reset()
        result, texts = generated(step, h, W)
        lines = [line for text in texts for line in text.splitlines()]
        return result, [line for line in lines if not line.lstrip().startswith("#") and "/" not in line]

    result, ours = code(compiled(fn, off))
    expected, inductors = code(torch.compile(fn, backend="inductor"))
    assert torch.equal(result, expected)
    assert len(inductors) > 20
    assert ours == inductors


# -- users' own passes ----------------------------------------------------------------------------------------------


class Recording(CustomGraphPass):
    def __init__(self):
        self.graphs = []

    def __call__(self, graph):
        self.graphs.append(str(graph))

    def uuid(self):
        return b"recording"


@pytest.mark.parametrize("kind", ["callable", "custom pass", "list"])
def test_users_own_pass_runs_before_ours(kind):
    users = Recording()
    value = {"callable": lambda graph: users(graph), "custom pass": users, "list": [users]}[kind]
    if kind == "list" and inductor_config._config["joint_custom_pre_pass"].value_type is None:
        pytest.skip("this torch takes one pass only")
    step = compiled(greedy, {**FUSE, "joint_custom_pre_pass": value})
    tokens, code = generated(step, h, W)
    assert torch.equal(tokens, greedy(h, W))
    assert calls_in(code) == 1
    assert len(users.graphs) == 1
    assert "aten.argmax" in users.graphs[0]


@pytest.mark.parametrize("name", ["joint_custom_pre_pass", "joint_custom_post_pass"])
def test_users_pass_from_the_global_config_runs(name):
    users = Recording()
    with inductor_config.patch({name: users}):
        _, code = generated(compiled(greedy), h, W)
    assert len(users.graphs) == 1
    assert calls_in(code) == 1


def test_uuid_follows_options_and_the_users_pass():
    ids = [FlashSamplingPass(options).uuid() for options in (Options(), Options(min_vocab=1), Options(strict=True))]
    assert len(set(ids)) == 3
    assert FlashSamplingPass(Options()).uuid() == ids[0]
    both = PassSequence([Recording(), FlashSamplingPass(Options())])
    assert both.uuid() not in (*ids, None)
    assert both.uuid() == PassSequence([Recording(), FlashSamplingPass(Options())]).uuid()
    # Without an id of its own, a callable turns the cache off: nobody could tell when it changes.
    assert PassSequence([print, FlashSamplingPass(Options())]).uuid() is None


CACHE_SCRIPT = """
import json, sys, torch
from torch._dynamo.utils import counters
import fs_inductor.backend
print(fs_inductor.__file__)
def step(h, W):
    return torch.nn.functional.linear(h, W).softmax(-1).multinomial(1)
weight = torch.zeros(160, 16); weight[17] = 1
for smallest in json.loads(sys.argv[1]):
    counters.clear()
    torch._dynamo.reset()
    with torch.no_grad():
        options = {"flashsampling.min_vocab": smallest}
        tokens = torch.compile(step, backend="flashsampling", options=options)(torch.full((4, 16), 4.0), weight)
    assert tokens.tolist() == [[17]] * 4
    print("cache", json.dumps([counters["inductor"]["fxgraph_cache_" + what] for what in ("hit", "miss")]))
"""


def test_second_process_hits_the_cache_and_changed_options_or_rules_miss_it(tmp_path):
    """Runs a copy of the package, whose rules it edits."""
    shutil.copytree(ROOT / "fs_inductor", tmp_path / "fs_inductor", ignore=shutil.ignore_patterns("__pycache__"))

    def run(*smallest):
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-c", CACHE_SCRIPT, json.dumps(smallest)]
        # Its own folder, as Python looks in the current one first.
        output = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=True
        )
        assert str(tmp_path) in output.stdout
        return [json.loads(line[6:]) for line in output.stdout.splitlines() if line.startswith("cache ")]

    assert run(0) == [[0, 1]]
    assert run(0, 1) == [[1, 0], [0, 1]]
    with open(tmp_path / "fs_inductor" / "recognise" / "tails.py", "a") as rules:
        rules.write("\n# Edited.\n")
    assert run(0) == [[0, 1]]


def test_a_graph_from_the_cache_is_logged_as_such(caplog):
    """Records are logged once: what a cached graph fused is not known any more, and the log says that."""
    caplog.set_level(logging.INFO, "fs_inductor")
    lines = []
    for smallest in (0, 0, 1):
        torch._dynamo.reset()
        caplog.clear()
        with torch.no_grad():
            compiled(greedy, {"flashsampling.min_vocab": smallest})(h, W)
        lines.append([record.getMessage() for record in caplog.records])
    assert [len(messages) for messages in lines] == [1, 1, 1]
    assert lines[0][0].startswith("fused   aten.argmax") and lines[2] == lines[0]
    assert "from the cache" in lines[1][0] and "explain" in lines[1][0]


def test_every_source_file_is_part_of_the_key():
    files = {path.resolve() for folder in ("fs_inductor", "kernels") for path in (ROOT / folder).rglob("*.py")}
    assert {Path(path).resolve() for path in graph_pass._sources()} == files


# -- more than one graph, more than one call --------------------------------------------------------------------------


def test_reports_of_subgraphs_accumulate():
    def step(h, W, flag):
        inner = torch.cond(flag, lambda h, W: F.linear(h, W).argmax(-1), lambda h, W: F.linear(h, W).argmin(-1), (h, W))
        return inner, F.linear(h * 2.0, W).softmax(-1).multinomial(1)

    report = fs_inductor.explain(step, options=FUSE)(h, W, torch.tensor(True))
    assert sorted(r.sink for r in report.fused) == ["aten.argmax", "aten.multinomial"], str(report)
    assert report.missed == []


def share_of_first(temperature: float) -> float:
    """The probability of the first of two tokens that are one nat apart at temperature 1."""
    return 1 / (1 + math.exp(-1 / temperature))


def test_five_temperatures():
    """Right results at each of them, and no graph per temperature."""
    n, numbers = 10_000, (0.7, 0.8, 0.9, 1, 2)
    step = compiled(draw_at, {**FUSE, "flashsampling.strict": True}, fullgraph=True)
    hidden, weight = torch.zeros(n, FEATURES), torch.zeros(VOCAB, FEATURES)
    hidden[:, 0], weight[:, 0] = 1, -100
    weight[:2, 0] = torch.tensor([1.0, 0.0])
    sigma = 0.5 / n**0.5
    # Neighbours can be told apart.
    assert all(share_of_first(a) - share_of_first(b) > 4 * sigma for a, b in itertools.pairwise(numbers))
    counters.clear()
    torch.manual_seed(11)
    for temperature in numbers:
        with torch.no_grad():
            tokens = step(hidden, weight, temperature)
        assert abs((tokens == 0).double().mean().item() - share_of_first(temperature)) < 4 * sigma
    # A literal, a 0-d tensor for the floats to come, and the integers.
    assert counters["stats"]["unique_graphs"] <= 3


def test_weight_updated_in_place_is_used():
    step = compiled(draw)
    hidden, weight = peaked(6)
    weight = torch.nn.Parameter(weight)
    with torch.no_grad():
        assert step(hidden, weight).tolist() == [17] * 6
        weight[17], weight[121] = 0, 1
        before = weight.clone()
        assert step(hidden, weight).tolist() == [121] * 6
        assert torch.equal(weight, before)


def test_two_heads_and_the_same_head_twice_never_share_noise():
    def step(h, h2, W, V):
        first = F.linear(h, W).softmax(-1).multinomial(1)
        other_head = F.linear(h, V).softmax(-1).multinomial(1)
        other_hidden = F.linear(h2, W).softmax(-1).multinomial(1)
        same_logits = F.linear(h, W).softmax(-1).multinomial(1)
        return torch.cat([first, other_head, other_hidden, same_logits], 1)

    n = 20_000
    zeros = (
        torch.zeros(n, FEATURES),
        torch.zeros(n, FEATURES) * 2,
        torch.zeros(VOCAB, FEATURES),
        torch.ones(VOCAB, FEATURES),
    )
    torch.manual_seed(3)
    with torch.no_grad():
        tokens = compiled(step, {**FUSE, "flashsampling.strict": True})(*zeros)
    for i in range(4):
        for j in range(i):
            # All four are uniform over 160 tokens: two agree with probability 1/160, here within five deviations.
            agreements = (tokens[:, i] == tokens[:, j]).sum().item()
            assert abs(agreements - n / VOCAB) < 5 * (n / VOCAB) ** 0.5, (i, j, agreements)


def test_calls_differ_and_manual_seed_reproduces():
    step = compiled(draw)
    flat = torch.zeros(64, FEATURES), torch.zeros(VOCAB, FEATURES)
    with torch.no_grad():
        torch.manual_seed(1)
        first = [step(*flat), step(*flat)]
        torch.manual_seed(1)
        again = [step(*flat), step(*flat)]
        torch.manual_seed(2)
        other = step(*flat)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    for a, b in ((first[0], first[1]), (first[0], other)):
        # 64 uniform tokens of 160: seven agreements would be a one in 10^7 event.
        assert (a == b).sum() < 7


def test_seeds_of_several_draws_are_one_launch_and_no_copies():
    def step(h, weights):
        return [draw(h, W) for W in weights]

    flat = torch.zeros(64, FEATURES), [torch.zeros(VOCAB, FEATURES) for _ in range(3)]
    with torch.no_grad():
        tokens, code = generated(compiled(step, {**FUSE, "flashsampling.strict": True}), *flat)
    assert calls_in(code) == 3
    text = "".join(code)
    assert text.count("aten.randint.low_out(") == 1
    assert "cpp_fused" not in text
    for a, b in itertools.combinations(tokens, 2):
        assert (a == b).sum() < 7  # of 64, with probability 1/160 each


def test_a_draw_and_a_dropout_have_seeds_of_their_own():
    """The partitioner takes equal seed nodes for one; Inductor's dropout has such a node too."""

    def step(x, W):
        return F.dropout(x).sum(), draw(x, W)

    x = torch.zeros(64, FEATURES, requires_grad=True)
    (loss, _), code = run_and_get_code(compiled(step, {**FUSE, "flashsampling.strict": True}), x, W)
    loss.backward()
    assert calls_in(code) == 1
    (count,) = re.findall(r"aten\.randint\.low_out\(.*?, \[(\d+)\], out=", "".join(code))
    assert count == "2"
    assert set(x.grad.unique().tolist()) == {0.0, 2.0}


def test_mixed_greedy_rows():
    def step(h, W, T):
        logits = F.linear(h, W)
        safe = torch.where(T < 1e-5, 1.0, T)[:, None]
        return torch.where(T < 1e-5, logits.argmax(-1), (logits / safe).softmax(-1).multinomial(1).squeeze(-1))

    temperature = torch.tensor([0.0, 1.0] * 500)
    hidden, weight = exact(torch.Generator().manual_seed(4), 1, FEATURES).expand(1000, -1), W
    with torch.no_grad():
        tokens, code = generated(compiled(step, {**FUSE, "flashsampling.strict": True}), hidden, weight, temperature)
        best = F.linear(hidden[:1], weight).argmax().item()
    assert calls_in(code) == 1
    assert (tokens[::2] == best).all()
    assert len(tokens[1::2].unique()) > 10


def test_graph_with_gradients_beside_the_token():
    """A loss through the hidden states, and a token: the token is fused in the joint graph, the gradient is right."""

    def step(x, W):
        hidden = torch.tanh(x)
        return hidden.sum(), F.linear(hidden, W).argmax(-1)

    inputs = [exact(torch.Generator().manual_seed(5), BATCH, FEATURES).requires_grad_() for _ in range(2)]
    report = run_pass(step, [inputs[0], W], mode=contextlib.nullcontext).report
    assert len(report.fused) == 1, str(report)
    loss, token = compiled(step)(inputs[0], W)
    expected_loss, _ = step(inputs[1], W)
    loss.backward()
    expected_loss.backward()
    assert torch.equal(token, greedy(torch.tanh(inputs[0]).detach(), W))
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
