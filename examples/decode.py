"""Decode text with an unmodified `transformers` model, three ways, and see what was fused.

    python examples/decode.py                          # a small model, trained here once and cached
    python examples/decode.py --model DIR              # a local Hugging Face checkpoint
    python examples/decode.py --device cuda --batch 64 --temperature 0.7

The same step runs eagerly, through stock Inductor and through `backend="flashsampling"`. Nothing in the
step, or in the model, knows which.
"""

import argparse
import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Everything is local: a wrong path must not go looking on the hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Threads that wait by spinning make small steps ten times slower when another process wants a core.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# PyTorch's profiler announces itself on stderr below this level.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

import measure
import tiny_lm
import torch
import transformers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, StaticCache

import fs_inductor

BACKENDS = ("eager", "inductor", "flashsampling")
# A small float32 model: its vocabulary on a CPU, and its dtype on a GPU, do not pay. Fuse it all the same, to show it.
OPTIONS = {"flashsampling.min_vocab": 0, "flashsampling.max_batch": 1 << 31}
# A fixed number, so that the test of the draws comes out alike in every run; the clock only stops large checkpoints.
FIT_DRAWS = 10_000
FIT_SECONDS = 60.0

# --- the code under test: what anyone would write -----------------------------------------------


def sample_step(model, tokens, cache, temperature):
    """Tokens `[B, 1]` in, the next tokens `[B, 1]` out, drawn at `temperature`."""
    logits = model(input_ids=tokens, past_key_values=cache).logits[:, -1]
    probabilities = torch.softmax(logits / temperature, dim=-1)
    return torch.multinomial(probabilities, num_samples=1)


def greedy_step(model, tokens, cache):
    """Tokens `[B, 1]` in, the likeliest next tokens `[B, 1]` out."""
    logits = model(input_ids=tokens, past_key_values=cache).logits[:, -1]
    return logits.argmax(dim=-1, keepdim=True)


# --- decoding -----------------------------------------------------------------------------------


class Decoder:
    """A model, a prompt repeated over the batch, and the cache that every backend decodes into."""

    def __init__(self, model, prompt_ids: torch.Tensor, batch: int, tokens: int):
        self.model = model
        self.prompt = prompt_ids.expand(batch, -1)
        self.tokens = tokens
        # One cache for all: a new one would be a new object to torch.compile's guards.
        self.cache = StaticCache(config=model.config, max_cache_len=self.prompt.shape[1] + tokens)

    def prefill(self) -> torch.Tensor:
        """Fill the cache with the prompt but for its last token, which is returned, `[B, 1]`."""
        self.cache.reset()
        self.model(input_ids=self.prompt[:, :-1], past_key_values=self.cache)
        return self.prompt[:, -1:].contiguous()

    def decode(self, step: Callable, *args) -> torch.Tensor:
        """Run `step` for the asked number of tokens; returns them as `[B, tokens]` on the CPU."""
        last, out = self.prefill(), []
        for _ in range(self.tokens):
            last = step(self.model, last, self.cache, *args)
            out.append(last)
        return torch.cat(out, dim=1).cpu()

    def redraw(self, step: Callable, temperature: float, name: str) -> torch.Tensor:
        """Draw the prompt's next token again and again; returns int64 `[N]`, FIT_DRAWS of them if time allows."""
        out, start = [], time.monotonic()
        with tqdm(total=FIT_DRAWS, desc=f"{name}: draws", leave=False) as bar:
            while bar.n < FIT_DRAWS and time.monotonic() - start < FIT_SECONDS:
                out.append(step(self.model, self.prefill(), self.cache, temperature))
                bar.update(len(self.prompt))
        return torch.cat(out).flatten()[:FIT_DRAWS].cpu()

    def probabilities(self, temperature: float) -> torch.Tensor:
        """What the prompt's next token should be drawn from, float64 `[V]`."""
        last = self.prefill()
        logits = self.model(input_ids=last, past_key_values=self.cache).logits[0, -1]
        return torch.softmax(logits.double() / temperature, dim=-1)


@dataclass
class Outcome:
    """What one backend did with the prompt."""

    sampled: torch.Tensor
    greedy: torch.Tensor
    fit: measure.Fit
    tokens_per_second: float
    peak_bytes: int


def run_backend(name: str, decoder: Decoder, temperature: float, seed: int) -> Outcome:
    if name == "eager":
        sample, greedy = sample_step, greedy_step
    else:
        options = OPTIONS if name == "flashsampling" else None
        sample = torch.compile(sample_step, backend=name, options=options)
        greedy = torch.compile(greedy_step, backend=name, options=options)

    with tqdm(total=2, desc=f"{name}: first steps", leave=False) as bar:  # where compilation happens
        for step, args in ((greedy, ()), (sample, (temperature,))):
            step(decoder.model, decoder.prefill(), decoder.cache, *args)
            bar.update()

    torch.manual_seed(seed)
    synchronize(decoder.prompt.device)
    start = time.perf_counter()
    sampled = decoder.decode(sample, temperature)
    seconds = time.perf_counter() - start

    greedy_tokens = decoder.decode(greedy)
    draws = decoder.redraw(sample, temperature, name)
    fit = measure.goodness_of_fit(draws, decoder.probabilities(temperature))
    last = decoder.prefill()
    peak = measure.peak_memory(lambda: sample(decoder.model, last, decoder.cache, temperature), last.device)
    return Outcome(sampled, greedy_tokens, fit, sampled.numel() / seconds, peak)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- the report ---------------------------------------------------------------------------------


def print_outcomes(outcomes: dict[str, Outcome], tokenizer, prompt_ids: torch.Tensor, trained_here: bool) -> None:
    def text(tokens: torch.Tensor) -> str:
        ids = torch.cat([prompt_ids[0].cpu(), tokens])
        return tokenizer.decode(ids, skip_special_tokens=True).strip()

    for name, outcome in outcomes.items():
        print(f"\n--- {name}, sampled\n{text(outcome.sampled[0])}")
    ours = outcomes["flashsampling"]
    print(f"\n--- flashsampling, greedy\n{text(ours.greedy[0])}")
    if trained_here:
        share = tiny_lm.known_words_share(" ".join(text(row) for row in ours.sampled))
        print(f"\n{share:.1%} of the words that flashsampling printed occur in the training text")

    print("\ngreedy tokens")
    for name in BACKENDS[1:]:
        print(f"  {name:14} {compare_tokens(outcomes[name].greedy, outcomes['eager'].greedy)}")
    # Eager and Inductor spend the same random numbers on the same draws, so their two lines tend to be equal.
    print("\nfirst sampled token against the model's softmax in float64")
    print("  right draws give any p from 0 to 1 alike, another one with another --seed; below 0.001 is suspicious")
    for name, outcome in outcomes.items():
        print(f"  {name:14} {outcome.fit}")
    print("\nspeed, and peak memory of one step beyond weights and cache")
    for name, outcome in outcomes.items():
        speed = f"{outcome.tokens_per_second:,.0f} tokens/s"
        print(f"  {name:14} {speed:>18} {outcome.peak_bytes / 2**20:10.2f} MiB")


def compare_tokens(tokens: torch.Tensor, reference: torch.Tensor) -> str:
    """One line on whether `tokens` equal `reference`, both int64 `[B, tokens]`."""
    same = tokens == reference
    if same.all():
        return f"agree with eager, all {same.numel():,}"
    first = int((~same).any(dim=0).nonzero()[0])
    rows = int((~same[:, first]).sum())
    return f"differ from eager from token {first} on, in {rows} of {len(same)} rows (a near-tie?)"


# --- command line -------------------------------------------------------------------------------


def quiet_transformers() -> None:
    """No progress bars, no advice, and not the deprecation that we know of; other warnings are shown."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # `past_key_values` is the name that all versions of transformers 5 up to 5.39 take.
    warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}\n")


def count(text: str) -> int:
    value = int(text) if text.lstrip("+-").isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def seed_number(text: str) -> int:
    if not text.isdigit() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2**63 - 1")
    return int(text)


def temperature_value(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number greater than 0")
    return value


def device_name(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{text!r} is not cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not there: this PyTorch sees {torch.cuda.device_count()} CUDA devices"
        )
    return device


def checkpoint_folder(text: str) -> Path:
    if not (Path(text) / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder with a config.json")
    return Path(text)


def parse(argv: list[str] | None) -> tuple[Parser, argparse.Namespace]:
    parser = Parser(prog="decode.py", description=__doc__.split("\n")[0])
    option = parser.add_argument
    option("--model", type=checkpoint_folder, metavar="DIR", help="a local Hugging Face checkpoint")
    option("--device", type=device_name, default="cuda" if torch.cuda.is_available() else "cpu")
    option("--batch", type=count, default=16, help="rows decoded together (default: %(default)s)")
    option("--tokens", type=count, default=60, help="new tokens per row (default: %(default)s)")
    option("--temperature", type=temperature_value, default=0.8, help="(default: %(default)s)")
    option("--prompt", default="The value of", help="(default: %(default)r)")
    option("--seed", type=seed_number, default=0, help="(default: %(default)s)")
    return parser, parser.parse_args(argv)


@torch.no_grad()
def main(argv: list[str] | None = None, recipe: tiny_lm.Recipe = tiny_lm.DEFAULT) -> None:
    parser, args = parse(argv)
    quiet_transformers()
    folder = args.model
    if folder is None:
        try:
            with torch.enable_grad():
                folder = tiny_lm.load_or_train(args.device, recipe)
        except OSError as error:
            parser.error(f"cannot keep the trained model: {error}; set XDG_CACHE_HOME to a folder that is writable")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(args.device).eval()
    except Exception as error:  # what is raised for a bad checkpoint depends on the file and on the library's version
        parser.error(f"argument --model: cannot load {str(folder)!r}: {str(error).strip().splitlines()[0]}")

    prompt_ids = tokenizer(args.prompt, return_tensors="pt").input_ids.to(args.device)
    config = model.config.get_text_config()
    length, limit = prompt_ids.shape[1], getattr(config, "max_position_embeddings", math.inf)
    if length < 2:
        parser.error(f"argument --prompt: {args.prompt!r} is {length} tokens long, at least 2 are needed")
    if length + args.tokens > limit:
        parser.error(
            f"argument --tokens: {length} prompt tokens and {args.tokens} new ones are more than "
            f"the model's {limit} positions"
        )

    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{type(model).__name__}, {parameters / 1e6:.1f} M parameters, vocabulary {config.vocab_size:,}, "
        f"{model.dtype}, on {args.device}; batch {args.batch}, temperature {args.temperature}"
    )
    decoder = Decoder(model, prompt_ids, args.batch, args.tokens)
    outcomes = {
        name: run_backend(name, decoder, args.temperature, args.seed)
        for name in tqdm(BACKENDS, desc="backends", leave=False)
    }
    print_outcomes(outcomes, tokenizer, prompt_ids, trained_here=args.model is None)
    print("\nwhat was fused in one sampling step")
    report = fs_inductor.explain(sample_step, options=OPTIONS)(
        model, decoder.prefill(), decoder.cache, args.temperature
    )
    print(report)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
