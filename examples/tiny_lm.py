"""A small English language model, made on this machine: nothing is downloaded.

The text is the prose of `pydoc_data.topics`, the language reference that ships with CPython. The model
is a stock `transformers` Llama, trained for about two minutes on two CPU cores, and its folder is an
ordinary checkpoint that `AutoModelForCausalLM` reads.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data import topics

import tokenizers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|end|>"
WORD = re.compile(r"[A-Za-z]+")


@dataclass(frozen=True)
class Recipe:
    """Everything that decides which model comes out; part of the cache key."""

    vocab_size: int = 8192
    hidden_size: int = 128
    layers: int = 2
    heads: int = 4
    context: int = 128
    batch: int = 4
    learning_rate: float = 5e-3
    warmup: float = 0.05
    """Share of the training time in which the learning rate rises."""
    seconds: float = 110.0
    max_steps: int = 4000
    """A fast machine stops here, before the clock."""
    seed: int = 0


DEFAULT = Recipe()


def reference_text() -> str:
    return "\n\n".join(topics.topics.values())


def prose(text: str) -> list[str]:
    """The paragraphs of `text` that are sentences: no code, no grammar rules, no tables."""
    paragraphs = []
    for block in re.split(r"\n\s*\n", text):
        paragraph = " ".join(block.split())
        letters = sum(c.isalpha() or c == " " for c in paragraph)
        if len(paragraph) >= 40 and paragraph[-1] in ".:" and letters > 0.85 * len(paragraph):
            paragraphs.append(paragraph)
    return paragraphs


def known_words_share(text: str) -> float:
    """Share of the words of `text` that occur in the training text, 0 to 1."""
    known = set(WORD.findall(" ".join(prose(reference_text()))))
    words = WORD.findall(text)
    return sum(word in known for word in words) / max(1, len(words))


def build_tokenizer(text: str, vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE on the whole text, code included: its prose alone has too few words for the size."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator([text], trainer)
    # A prompt is the start of a paragraph.
    bpe.post_processor = processors.TemplateProcessing(f"{END} $A", special_tokens=[(END, bpe.token_to_id(END))])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, bos_token=END)


def train(recipe: Recipe, tokenizer, device: torch.device) -> LlamaForCausalLM:
    """Train from scratch for `recipe.seconds`, with a bar that shows the clock and the loss."""
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=3 * recipe.hidden_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config).to(device)
    text = END.join(prose(reference_text()))
    ids = tokenizer(text, return_tensors="pt").input_ids[0].to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)

    # The schedule follows the clock, so that a slow machine also ends with a small learning rate.
    start, done, step = time.monotonic(), 0.0, 0
    offsets = torch.arange(recipe.context, device=device)
    with tqdm(total=100, desc="training", unit="%", bar_format=BAR) as bar:
        while done < 1:
            rate = min(done / recipe.warmup, (1 - done) / (1 - recipe.warmup))
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * max(rate, 0.01)
            first = torch.randint(len(ids) - recipe.context, (recipe.batch, 1), device=device)
            batch = ids[first + offsets]
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            done = max((time.monotonic() - start) / recipe.seconds, step / recipe.max_steps)
            bar.set_postfix_str(f"step {step}, loss {loss.item():.2f}", refresh=False)
            bar.update(min(100.0, 100 * done) - bar.n)
    return model.eval()


BAR = "{desc}: {percentage:3.0f}% |{bar}| {elapsed}<{remaining}, {postfix}"


# --- the cache ---------------------------------------------------------------------------------


def cache_root() -> Path:
    """`$XDG_CACHE_HOME/fs-inductor`, by default `~/.cache/fs-inductor`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fs-inductor"


def cache_key(recipe: Recipe) -> str:
    """Changes with the recipe, this file, the training text and the libraries that read or write it."""
    parts = [
        json.dumps(asdict(recipe), sort_keys=True),
        Path(__file__).read_text(),
        reference_text(),
        *(m.__version__ for m in (torch, transformers, tokenizers)),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def checksums(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.iterdir() if p.name != "checksums.json")
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def is_intact(folder: Path) -> bool:
    try:
        return json.loads((folder / "checksums.json").read_text()) == checksums(folder)
    except (OSError, ValueError):
        return False


def load_or_train(device: torch.device, recipe: Recipe = DEFAULT, root: Path | None = None) -> Path:
    """The folder of the trained checkpoint, made now unless an intact one is cached."""
    root = root or cache_root()
    folder = root / f"tiny-lm-{cache_key(recipe)}"
    if is_intact(folder):
        print(f"model: cached in {folder}")
        return folder
    if folder.exists():
        print(f"model: {folder} is damaged; training again")
        shutil.rmtree(folder)

    root.mkdir(parents=True, exist_ok=True)  # before the training, as it may fail
    tokenizer = build_tokenizer(reference_text(), recipe.vocab_size)
    model = train(recipe, tokenizer, device)
    # Written aside and renamed, so that an interrupted run leaves nothing that looks finished.
    with tempfile.TemporaryDirectory(dir=root) as parent:
        draft = Path(parent) / "checkpoint"
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        (draft / "checksums.json").write_text(json.dumps(checksums(draft), indent=1))
        draft.rename(folder)
    return folder
