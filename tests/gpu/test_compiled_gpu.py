"""The compiled step on a real GPU: the same rewrite as on the CPU, CUDA-graph replays, distributions, streams."""

from __future__ import annotations

import itertools
import math

import idiom_cases_heads  # noqa: F401 - adds its cases
import idiom_cases_logits  # noqa: F401 - adds its cases
import idiom_cases_more  # noqa: F401 - adds its cases
import pytest
import torch
from distribution_checks import chi_squared
from idiom_cases import CASES, exact
from rewrite_checks import arguments_on, check_rewritten_call
from support import assert_fused, run_pass
from torch._dynamo.utils import counters
from torch.nn import functional as F

from fs_inductor import linear_sample

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
ALPHA = 1e-4
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
STRICT = {"flashsampling.strict": True}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def exact_products():
    """Float32 products that are exact on the CPU must be exact here: no TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def compiled(fn, mode=None, **options):
    """``fn`` through our backend. With a mode, torch takes no options: FLASHSAMPLING_STRICT does it there."""
    options = STRICT | {f"flashsampling.{k}": v for k, v in options.items()}
    how = {"mode": mode} if mode else {"options": options}
    return torch.compile(fn, backend="flashsampling", fullgraph=True, **how)


def matrices(batch, vocab, features, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(vocab)
    return exact(generator, batch, features).to(DEVICE, dtype), exact(generator, vocab, features).to(DEVICE, dtype)


def greedy(h, W):
    return F.linear(h, W).argmax(-1)


def draw(h, W):
    return F.linear(h, W).softmax(-1).multinomial(1).squeeze(-1)


def draw_at(h, W, temperature):
    return (F.linear(h, W) / temperature).softmax(-1).multinomial(1).squeeze(-1)


# -- the rewrite --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_rewrite_is_that_of_the_cpu(name):
    case = CASES[name]
    args = arguments_on(DEVICE, case)
    for dynamic in (None, "batch"):
        rewritten = run_pass(case.fn, args, dynamic=dynamic, execute=False)
        assert_fused(rewritten, case.fused)
        assert rewritten.text() == run_pass(case.fn, case.args, dynamic=dynamic, execute=False).text()


@pytest.mark.parametrize(
    "name",
    [
        "temperature_per_row",
        "mixed_clamped",
        "several",
        "softcap_bf16",
        "every_position",
        "band_of_masked",
        "matvec_bf16",
    ],
)
def test_rewritten_call(name):
    check_rewritten_call(CASES[name], DEVICE)


def test_temperature_on_the_cpu_is_moved_to_the_gpu():
    h, W = matrices(4, 160, 16, torch.float32)
    rewritten = run_pass(draw_at, [h, W, torch.tensor(0.7)])
    assert_fused(rewritten, 1)
    (operand,) = rewritten.calls[0].operands
    assert operand.device == h.device
    assert operand.item() == pytest.approx(0.7, rel=1e-6)


# -- compiled steps -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_steps(dtype):
    def step(h, W, bias, mask):
        logits = F.linear(h, W, bias)[..., :5003]
        logits = logits.masked_fill(mask, -torch.inf)
        return logits.argmax(-1), (logits / 1e-3).float().softmax(-1).multinomial(1).squeeze(-1)

    step = compiled(step)
    for batch in (1, 40):
        h, W = matrices(batch, 5120, 64, dtype)
        bias = exact(torch.Generator().manual_seed(1), 5120).to(DEVICE, dtype)
        mask = torch.rand(batch, 5003, device=DEVICE) < 0.3
        with torch.no_grad():
            best, cold = step(h, W, bias, mask)
            logits = F.linear(h, W, bias)[..., :5003].masked_fill(mask, -torch.inf)
        assert best.dtype is cold.dtype is torch.int64
        # Products and bias are exact, so all roundings are eager's; draws at T = 0.001 are some maximum.
        assert torch.equal(best, logits.argmax(-1))
        assert torch.equal(logits.gather(1, cold[:, None]).squeeze(1), logits.amax(-1))


def test_logits_are_never_allocated():
    batch, vocab = 256, 128_000
    h, W = matrices(batch, vocab, 128)
    step = compiled(draw)
    with torch.no_grad():
        step(h, W)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(h, W)
        torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < batch * vocab * 2 / 4


@pytest.mark.parametrize("batch", [4, 256])
def test_a_step_is_one_launch_and_one_for_its_seed(batch):
    h, W = matrices(batch, 128_000, 128)
    step = compiled(draw)
    with torch.no_grad():
        step(h, W)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            step(h, W)
            torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    ours = "gemm_sample_kernel" if batch == 4 or torch.cuda.get_device_capability() != (9, 0) else "pingpong_kernel"
    assert len(kernels) == 2, kernels
    assert kernels[1] == ours


def test_two_draws_of_one_step_differ():
    def step(h, W):
        return draw(h, W), draw(h * 1.0, W)

    h, W = torch.zeros(4096, 64, device=DEVICE), torch.zeros(5003, 64, device=DEVICE)
    with torch.no_grad():
        a, b = compiled(step)(h, W)
    # Uniform over 5003 tokens: less than one agreement is expected among 4096 pairs.
    assert (a == b).sum() < 12


# -- CUDA graphs --------------------------------------------------------------------------------------------------


def replayed(step, *args):
    """One call of a step in mode "reduce-overhead"; the result is copied out of the graph's memory."""
    torch.compiler.cudagraph_mark_step_begin()
    with torch.no_grad():
        return step(*args).clone()


def warm(step, *args):
    """The calls that compile, warm up and capture; after them every call is a replay."""
    for _ in range(4):
        replayed(step, *args)
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.fixture
def strict(monkeypatch):
    monkeypatch.setenv("FLASHSAMPLING_STRICT", "1")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_replays_give_fresh_tokens_and_follow_the_seed(dtype, strict):
    step = compiled(draw, mode="reduce-overhead")
    # Uniform over 5003 tokens: 64 rows agree in no place, or in one, if their noise is fresh.
    args = torch.zeros(64, 64, device=DEVICE, dtype=dtype), torch.zeros(5003, 64, device=DEVICE, dtype=dtype)
    warm(step, *args)
    tokens = [replayed(step, *args) for _ in range(20)]
    for a, b in itertools.combinations(tokens, 2):
        assert (a == b).sum() < 5
    for reseed in (torch.manual_seed, torch.cuda.manual_seed):
        runs = []
        for seed in (7, 7, 8):
            reseed(seed)
            runs.append([replayed(step, *args) for _ in range(3)])
        assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[1], strict=True))
        for a, b in itertools.combinations([*runs[0], *runs[2]], 2):
            assert (a == b).sum() < 5


@pytest.mark.parametrize("batch", [8, 200])
def test_a_tuned_tile_draws_the_same_tokens(batch, monkeypatch, tmp_path):
    from fs_inductor.kernels import autotune

    monkeypatch.setattr(autotune, "_file", lambda: tmp_path / "tiles.json")
    autotune.forget()
    args = matrices(batch, 5003, 64)
    tokens = []
    for options in ({}, {"max_autotune": True, "max_autotune_gemm_backends": "ATEN"}):
        torch._dynamo.reset()
        step = torch.compile(draw, backend="flashsampling", fullgraph=True, options=STRICT | options)
        torch.manual_seed(3)
        tokens.append(step(*args))
    assert torch.equal(*tokens)
    assert "vocab=5003" in (tmp_path / "tiles.json").read_text()
    autotune.forget()


def test_replays_read_the_inputs_as_they_are_now(strict):
    step = compiled(greedy, mode="reduce-overhead")
    h, W = matrices(8, 5003, 64)
    W = torch.nn.Parameter(W, requires_grad=False)
    warm(step, h, W)
    for seed in range(3):
        h.copy_(exact(torch.Generator().manual_seed(seed), 8, 64))
        with torch.no_grad():
            W.copy_(exact(torch.Generator().manual_seed(100 + seed), 5003, 64))
            expected = greedy(h, W)
        assert torch.equal(replayed(step, h, W), expected)


def test_five_temperatures_with_replays(strict):
    step = compiled(draw_at, mode="reduce-overhead")
    n, numbers = 40_000, (0.7, 0.8, 0.9, 1, 2)
    h, W = torch.zeros(n, 64, device=DEVICE), torch.zeros(5003, 64, device=DEVICE)
    h[:, 0], W[:, 0] = 1, -100
    W[:2, 0] = torch.tensor([1.0, 0.0])
    sigma = 0.5 / n**0.5
    shares = [1 / (1 + math.exp(-1 / t)) for t in numbers]
    assert all(a - b > 8 * sigma for a, b in itertools.pairwise(shares))
    torch.manual_seed(12)
    for temperature, share in [*zip(numbers, shares, strict=True)] * 3:
        tokens = replayed(step, h, W, temperature)
        assert abs((tokens == 0).double().mean().item() - share) < 4 * sigma
    assert counters["stats"]["unique_graphs"] <= 3


def test_temperature_tensor_is_read_at_replay(strict):
    step = compiled(draw_at, mode="reduce-overhead")
    h, W = matrices(64, 5003, 64)
    temperature = torch.full((64, 1), 1e4, device=DEVICE)
    warm(step, h, W, temperature)
    with torch.no_grad():
        logits = F.linear(h, W).float()
    hot = replayed(step, h, W, temperature)
    assert (logits.gather(1, hot[:, None]).squeeze(1) < logits.amax(-1)).sum() > 32
    temperature.fill_(1e-4)
    cold = replayed(step, h, W, temperature)
    assert torch.equal(logits.gather(1, cold[:, None]).squeeze(1), logits.amax(-1))


# -- distributions ------------------------------------------------------------------------------------------------

VOCAB, MASKED_FROM = 5003, 4900


def one_row_problem(dtype=torch.float32):
    """A row of hidden states, a weight, and a mask with a masked tail."""
    generator = torch.Generator().manual_seed(50)
    row, W = exact(generator, 1, 64), exact(generator, VOCAB, 64)
    mask = torch.rand(VOCAB, generator=generator) < 0.2
    mask[MASKED_FROM:] = True
    return row.to(DEVICE, dtype), W.to(DEVICE, dtype), mask.to(DEVICE)


def target(row, W, mask, temperature):
    logits = (row.double() @ W.double().T)[0].to(row.dtype).double() / temperature
    return logits.masked_fill(mask, -torch.inf).softmax(-1)


def test_a_hundred_million_draws():
    """Through the compiled step, 2^17 draws a call; a temperature off by one part in 500 would be noticed."""

    def step(h, W, mask):
        logits = (F.linear(h, W) / 1.3).masked_fill(mask, -torch.inf)
        return logits.softmax(-1).multinomial(16, replacement=True)

    row, W, mask = one_row_problem()
    hidden = row.expand(8192, -1).contiguous()
    step = compiled(step)
    counts = torch.zeros(VOCAB, dtype=torch.int64, device=DEVICE)
    torch.manual_seed(51)
    calls = -(-(10**8) // (8192 * 16))
    with torch.no_grad():
        for _ in range(calls):
            counts += step(hidden, W, mask).flatten().bincount(minlength=VOCAB)
    assert counts.sum() == calls * 8192 * 16 >= 10**8
    assert counts[mask].sum() == 0
    assert chi_squared(counts, target(row, W, mask, 1.3)) > ALPHA
    assert chi_squared(counts, target(row, W, mask, 1.3026)) < ALPHA


def race(h, W, mask):
    p = (F.linear(h, W).float() / 1.3).masked_fill(mask, -torch.inf).softmax(-1)
    return (p / torch.empty_like(p).exponential_(1)).argmax(-1)


def gumbel(h, W, mask):
    logits = (F.linear(h, W).float() / 1.3).masked_fill(mask, -torch.inf)
    return (logits - torch.log(-torch.log(torch.rand_like(logits)))).argmax(-1)


def multinomial(h, W, mask):
    return (F.linear(h, W).float() / 1.3).masked_fill(mask, -torch.inf).softmax(-1).multinomial(1).squeeze(-1)


@pytest.mark.parametrize(
    ("fn", "dtype"),
    list(zip((race, gumbel, multinomial), DTYPES, strict=True)),
    ids=["race-bf16", "gumbel-fp16", "multinomial-fp32"],
)
def test_draws_of_many_rows_in_each_dtype(fn, dtype):
    """A draw a row, four million in all."""
    row, W, mask = one_row_problem(dtype)
    hidden = row.expand(65_536, -1).contiguous()
    step = compiled(fn)
    counts = torch.zeros(VOCAB, dtype=torch.int64, device=DEVICE)
    torch.manual_seed(52)
    with torch.no_grad():
        for _ in range(64):
            counts += step(hidden, W, mask).bincount(minlength=VOCAB)
    assert counts[mask].sum() == 0
    assert chi_squared(counts, target(row, W, mask, 1.3)) > ALPHA
    assert chi_squared(counts, target(row, W, mask, 1.31)) < ALPHA


def test_replays_have_the_right_distribution_and_are_independent(strict):
    row, W, mask = one_row_problem()
    hidden = row.expand(4096, -1).contiguous()
    step = compiled(multinomial, mode="reduce-overhead")
    warm(step, hidden, W, mask)
    torch.manual_seed(53)
    tokens = torch.stack([replayed(step, hidden, W, mask) for _ in range(1000)])
    p = target(row, W, mask, 1.3)
    assert chi_squared(tokens.flatten().bincount(minlength=VOCAB), p) > ALPHA
    bins = torch.arange(VOCAB, device=DEVICE) % 8
    q = torch.zeros(8, dtype=torch.float64, device=DEVICE).index_add(0, bins, p)
    for a, b in ((tokens[:-1], tokens[1:]), (tokens[:, :-1], tokens[:, 1:])):
        counts = (bins[a] * 8 + bins[b]).flatten().bincount(minlength=64)
        assert chi_squared(counts, torch.outer(q, q).flatten()) > ALPHA


# -- streams ------------------------------------------------------------------------------------------------------


def test_two_streams_at_once():
    """Compiled greedy steps and plain draws, side by side on two streams, give what they give alone."""
    step = compiled(greedy)
    problems = [matrices(200 + i, 20_000, 256) for i in range(2)]
    seed = torch.tensor(5, device=DEVICE)
    with torch.no_grad():
        alone = [(step(h, W), linear_sample(h, W, seed=seed)) for h, W in problems]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in problems]
        results = [[] for _ in problems]
        for _ in range(50):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    h, W = problems[i]
                    results[i].append((step(h, W), linear_sample(h, W, seed=seed)))
        torch.cuda.synchronize()
    for (best, drawn), runs in zip(alone, results, strict=True):
        assert all(torch.equal(best, b) and torch.equal(drawn, d) for b, d in runs)
    for (best, _), (h, W) in zip(alone, problems, strict=True):
        assert torch.equal(best, greedy(h, W))
