"""The op for hand-written engines: the same kernel as the compiled graphs call, behind checked arguments."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor

from . import ops


def linear_sample(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    mask: Tensor | None = None,
    seed: Tensor | None = None,
    generator: torch.Generator | None = None,
    num_samples: int | None = None,
) -> Tensor:
    """Draws tokens from ``softmax(linear(hidden, weight, bias) / temperature)`` without writing the logits.

    The logits are rounded to the weight's dtype, as ``F.linear`` does; what follows is float32: softcap, then bias of
    any shape but ``[V]``, then mask, then temperature. Exact group-Gumbel sampling after arXiv 2603.15854.

    Args:
        hidden: ``[..., D]``, bfloat16, float16 or float32.
        weight: ``[V, D]``, same dtype and device, any strides.
        bias: ``[V]`` (the linear's own) or broadcastable to ``[..., V]`` (added to the logits).
        temperature: a number > 0, or a tensor: 0-d, or one temperature a row, ``[...]`` or ``[..., 1]``. The values of
            a CPU tensor are checked, save in compiled code; those of a GPU tensor are not, since that would wait for
            the GPU: a row whose temperature is not positive gets some token in ``[0, V)``.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        mask: bool, broadcastable to ``[..., V]``; True entries are never drawn.
        seed: int64, 0-d, or ``[...]`` for a seed a row. The same seed gives the same tokens; with a seed a row, a row's
            tokens do not depend on its place in the batch.
        generator: where the seed is drawn from when ``seed`` is not given; default: the device's default generator.
        num_samples: draws per row, independent, with replacement.

    Returns:
        int64 token ids: ``[...]``, or ``[..., num_samples]`` when ``num_samples`` is given. A row whose logits are all
        ``-inf`` gives token 0; a row with a NaN gives the first NaN's id.

    Raises:
        ValueError, TypeError: an argument of wrong shape, dtype, device or value; the message names it.
    """
    program, operands = _processing(hidden, weight, bias, softcap, mask)
    program.divide(temperature)
    if num_samples is not None and (
        isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1
    ):
        raise ValueError(f"num_samples must be a positive int or None, not {num_samples!r}")
    if seed is None:
        seed = _draw_seed(hidden.device, generator)
    elif generator is not None:
        raise ValueError("pass seed or generator, not both")
    elif not isinstance(seed, Tensor):
        raise TypeError(f"seed must be an int64 tensor, not {type(seed).__name__}; write seed=torch.tensor(...)")
    elif seed.device != hidden.device:
        raise ValueError(f"seed is on {seed.device}, but hidden is on {hidden.device}")
    elif seed.dim() > 0:
        seed = _per_row("seed", seed, hidden).reshape(-1)
    tokens = torch.ops.flashsampling.sample(
        program.rows, weight.detach(), seed, operands, str(program), num_samples or 1
    )
    return tokens.reshape((*hidden.shape[:-1], *(() if num_samples is None else (num_samples,))))


def linear_argmax(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    softcap: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """The token with the largest logit, the lowest id among equals, without writing the logits.

    Arguments and errors as for `linear_sample`. Returns int64 ids of shape ``hidden.shape[:-1]``; a row with a NaN
    logit gives the first NaN's id, as ``argmax`` does.
    """
    program, operands = _processing(hidden, weight, bias, softcap, mask)
    tokens = torch.ops.flashsampling.argmax(program.rows, weight.detach(), operands, str(program))
    return tokens.reshape(hidden.shape[:-1])


class _Processing:
    """The epilogue program of a plain call, under construction."""

    def __init__(self, hidden: Tensor, weight: Tensor):
        ops.check_matrices(hidden, weight)
        for name, x in (("hidden", hidden), ("weight", weight)):
            _check_strided(name, x)
        self.hidden, self.vocab = hidden, weight.shape[0]
        self.rows = hidden.detach().reshape(-1, hidden.shape[-1])
        self.operands: list[Tensor] = []
        self.steps: list[str] = []
        self.last = "acc"

    def __str__(self) -> str:
        return "; ".join(f"x{i} = {step}" for i, step in enumerate(self.steps))

    def step(self, op: str, *args: Any) -> None:
        self.steps.append(f"{op}({', '.join(str(a) for a in args)})")
        self.last = f"x{len(self.steps) - 1}"

    def round_to(self, dtype: torch.dtype) -> None:
        short = {torch.bfloat16: "bf16", torch.float16: "f16"}.get(dtype)
        if short:
            self.step("round", self.last, short)

    def operand(self, x: Tensor) -> str:
        self.operands.append(x.detach())
        return f"a{len(self.operands) - 1}"

    def over_vocab(self, name: str, x: Tensor) -> str:
        """``x``, broadcastable to the logits ``[..., V]``, as an operand broadcastable to ``[B, V]``."""
        logits = (*self.hidden.shape[:-1], self.vocab)
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(x).__name__}")
        if x.device != self.hidden.device:
            raise ValueError(f"{name} is on {x.device}, but hidden is on {self.hidden.device}")
        _check_strided(name, x)
        if not _broadcasts(x.shape, logits):
            raise ValueError(f"{name} of shape {tuple(x.shape)} does not broadcast to the logits {logits}")
        if x.dim() <= 1:
            return self.operand(x)
        return self.operand(x.expand(*logits[:-1], x.shape[-1]).reshape(-1, x.shape[-1]))

    def divide(self, temperature: float | Tensor) -> None:
        if isinstance(temperature, Tensor):
            if temperature.dtype is torch.bool or temperature.is_complex():
                raise TypeError(f"temperature must be a real tensor, not {temperature.dtype}")
            _check_strided("temperature", temperature)
            if temperature.device.type == "cpu" and not torch.compiler.is_compiling():  # to look would break the graph
                good = (temperature > 0) & temperature.isfinite()
                if not bool(good.all()):
                    raise _bad_temperature(temperature[~good].flatten()[0].item())
            if temperature.dim() > 0:
                if temperature.device != self.hidden.device:
                    raise ValueError(f"temperature is on {temperature.device}, but hidden is on {self.hidden.device}")
                temperature = _per_row("temperature", temperature, self.hidden).reshape(-1, 1)
            # A 0-d CPU tensor serves as a number for logits on any device.
            divisor = self.operand(temperature.to(self.hidden.device))
            logits = self.last
            # Below, logits divided in float32 would overflow; at this temperature the draw is the argmax already.
            self.step("maximum", divisor, COLDEST)
            self.step("div", logits, self.last)
            return
        number = _finite_number("temperature", temperature, "a number or a tensor")
        if number is None:
            raise _bad_temperature(temperature)
        if number != 1:
            self.step("div", self.last, max(number, COLDEST))


def _processing(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, mask: Tensor | None
) -> tuple[_Processing, list[Tensor]]:
    program = _Processing(hidden, weight)
    if isinstance(bias, Tensor) and (bias.dtype is torch.bool or bias.is_complex()):
        raise TypeError(f"bias has dtype {bias.dtype}; it must be a real number type")
    is_linears_own = isinstance(bias, Tensor) and tuple(bias.shape) == (weight.shape[0],)
    if is_linears_own:
        program.step("add", program.last, program.over_vocab("bias", bias))
    program.round_to(weight.dtype)
    if softcap is not None:
        number = _finite_number("softcap", softcap, "a number")
        if number is None:
            raise ValueError(f"softcap must be a finite number > 0, not {softcap}")
        program.step("div", program.last, number)
        program.step("tanh", program.last)
        program.step("mul", program.last, number)
    if bias is not None and not is_linears_own:
        program.step("add", program.last, program.over_vocab("bias", bias))
    if mask is not None:
        name = program.over_vocab("mask", mask)
        if mask.dtype is not torch.bool:
            raise TypeError(f"mask must be a bool tensor (True: never drawn), not {mask.dtype}")
        program.step("where", name, "-inf", program.last)
    return program, program.operands


COLDEST = 1e-30


def _finite_number(name: str, number: float, kind: str) -> float | None:
    """``number`` as a float, or None unless it is positive and finite in float32."""
    if isinstance(number, bool) or not isinstance(number, Real):
        raise TypeError(f"{name} must be {kind}, not {number!r}")
    return float(number) if 0 < number <= torch.finfo(torch.float32).max else None


def _bad_temperature(value: float) -> ValueError:
    return ValueError(f"temperature must be a finite number > 0, not {value}; use linear_argmax for greedy decoding")


def _check_strided(name: str, x: Tensor) -> None:
    if x.layout is not torch.strided or x.is_meta:
        raise TypeError(f"{name} must be a dense tensor with data, not {x.layout} on {x.device}")


def _per_row(name: str, x: Tensor, hidden: Tensor) -> Tensor:
    rows = tuple(hidden.shape[:-1])
    if tuple(x.shape) not in (rows, (*rows, 1)):
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be 0-d or one value a row, {rows}")
    return x.reshape(rows)


def _broadcasts(shape: torch.Size, to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))


def _draw_seed(device: torch.device, generator: torch.Generator | None) -> Tensor:
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, not {type(generator).__name__}")
    where = device if generator is None else generator.device
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=where, generator=generator).to(device)
