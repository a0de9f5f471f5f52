"""The arguments of random steps: what the words in braces stand for, and the tensors themselves."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from random_pieces import FEATURES, LENGTH, ROWS

if TYPE_CHECKING:
    from random_steps import Writer


class Data:
    """Makes a step's arguments: each from a seed of its own, so that they can be made again for another batch."""

    def __init__(self, seed: int, copies: int):
        self.seed, self.copies = seed, copies
        self.generator = torch.Generator()

    def of(self, name: str, text: str) -> Any:
        """The argument ``name``, by the expression ``text`` in the methods of this class."""
        self.generator.manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        words = {word: getattr(self, word) for word in dir(self) if not word.startswith("_")}
        return eval(text, {"torch": torch, **words})

    def exact(self, *shape: int) -> torch.Tensor:
        return torch.randint(-8, 9, shape, generator=self.generator) / 8

    def positive(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator) + 0.5

    def mask(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator) < 0.3

    def minus_infinity(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape).masked_fill(self.mask(*shape), -torch.inf)

    def whole(self, *shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=self.generator)

    def below(self, n: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, n, shape, generator=self.generator)

    def distinct(self, n: int, vocab: int) -> torch.Tensor:
        return torch.randperm(vocab, generator=self.generator)[:n]

    def order(self) -> torch.Tensor:
        """Some order of the rows, the same in each copy."""
        return (torch.arange(self.copies)[:, None] * ROWS + self.distinct(ROWS, ROWS)).flatten()

    def tile(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(self.copies, *[1] * (x.dim() - 1))


def _operand(name: str, maker: str, *forms: str) -> Callable[[Writer], str]:
    """A word that is a number, a Python float among the arguments, or a tensor, as one of ``forms``."""

    def make(w: Writer) -> str:
        form = w.choose(forms)
        if form in NUMBERS:
            return w.choose(NUMBERS[form])
        if form == "float":
            return w.number("f", w.choose(("0.7", "0.9", "1.4")))
        suffix = ""
        if maker in (POSITIVE, REAL):
            dtype = w.choose(("float32", "float32", w.dtype, "bfloat16", "float16", "float64"))
            suffix = "" if dtype == "float32" else f".to(torch.{dtype})"
        sizes = {"scalar": [], "row": _row_sizes(w), "vocab": [w.width], "full": [*w.rows, w.width]}
        return w.tensor(name, maker, sizes[form], suffix)

    return make


def _row_sizes(w: Writer) -> list[int]:
    """The shape of something with one value a row, or one for several rows of a batch element."""
    if len(w.rows) < 2:
        return [*w.rows, 1]
    return w.choose(([*w.rows, 1], [w.rows[0], 1, 1], [1, w.rows[1], 1]))


def _in_dtype(name: str, *sizes: Any, repeats: bool = False) -> Callable[[Writer], str]:
    """Hidden states and weights: exact numbers in the step's dtype. V is the vocabulary, R the rows."""

    def make(w: Writer) -> str:
        known = {"V": [w.vocab], "2V": [2 * w.vocab], "D": [FEATURES], "R": w.rows}
        flat = [n for size in sizes for n in known.get(size, [size])]
        suffix = "" if w.dtype == "float32" else f".to(torch.{w.dtype})"
        text = f"exact({', '.join(map(str, flat))}){suffix}"
        return w.shared(name, f"tile({text})" if repeats and w.tiled else text)

    return make


FIRST, TAIL = 12, 10
"""How many ids slices of the vocabulary leave out at its beginning and at its end."""
NUMBERS = {"positive number": ("0.7", "1.3", "2.0"), "number": ("0.5", "-0.25", "1.5")}
POSITIVE, REAL, MASK, BIASES, WHOLE = "positive({})", "exact({})", "mask({})", "minus_infinity({})", "whole({})"
"""Methods of `Data`, with the sizes to come."""

KINDS: dict[str, Callable[[Writer], str]] = {
    "hidden": _in_dtype("h", "R", "D", repeats=True),
    "sequence": _in_dtype("h", "R", LENGTH, "D", repeats=True),
    "adapted": _in_dtype("a", "R", 4, repeats=True),
    "weight": _in_dtype("W", "V", "D"),
    "weight_t": _in_dtype("W", "D", "V"),
    "stacked": _in_dtype("W", "2V", "D"),
    "codebooks": _in_dtype("W", 2, "V", "D"),
    "head_bias": _in_dtype("b", "V"),
    "low": _in_dtype("A", 4, "D"),
    "up": _in_dtype("U", "V", 4),
    "tokens": lambda w: w.parameter("ids", f"tile(below({w.vocab}, {ROWS}))"),
    "last": lambda w: w.parameter("last", f"tile(below({LENGTH}, {ROWS}))"),
    "order": lambda w: w.parameter("order", "order()"),
    "width": lambda w: str(w.width),
    "first": lambda w: str(FIRST),
    "high": lambda w: str(w.width - TAIL),
    "number": lambda w: w.choose(NUMBERS["positive number"]),
    "cap": lambda w: w.choose(("5.0", "2.0", "30.0")),
    "float": lambda w: w.number("f", w.choose(("0.7", "0.9", "1.4"))),
    "int": lambda w: w.parameter("n", "2"),
    "positive": _operand("t", POSITIVE, "positive number", "float", "scalar", "row", "vocab", "full"),
    "positive_row": _operand("t", POSITIVE, "positive number", "float", "scalar", "row"),
    "row_tensor": _operand("t", POSITIVE, "row"),
    "operand": _operand("c", REAL, "number", "scalar", "row", "vocab", "full"),
    "tensor": _operand("c", REAL, "scalar", "row", "vocab", "full"),
    "integers": _operand("c", WHOLE, "row", "vocab", "full"),
    "mask": _operand("m", MASK, "vocab", "full"),
    "any_mask": _operand("m", MASK, "row", "vocab", "full"),
    "full_mask": _operand("m", MASK, "full"),
    "minus_infinity": _operand("c", BIASES, "vocab", "full"),
    "leading_mask": lambda w: w.leading_mask(),
    "ids": lambda w: w.parameter("ids", f"distinct(4, {w.width})"),
    "row_ids": lambda w: w.tensor("ids", f"below({w.width}, {{}})", [*w.rows, 3]),
    "compare": lambda w: w.choose((">", "<", ">=", "<=", "==", "!=")),
    "logic": lambda w: w.choose(("&", "|", "^")),
    "word": lambda w: w.choose(("and", "or", "xor")),
    "cold": lambda w: w.parameter("t", "tile(torch.tensor([0.0, 0.7, 1.2]))"),
}
