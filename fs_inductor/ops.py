"""The registered ops: schemas, fake implementations, argument checks, and dispatch to the two implementations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)

_library = torch.library.Library("flashsampling", "DEF")
_tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_library.define(
    "sample(Tensor hidden, Tensor weight, Tensor seed, Tensor[] operands, str program, int num_samples=1) -> Tensor",
    tags=_tags,
)
_library.define(
    "sample_and_argmax(Tensor hidden, Tensor weight, Tensor seed, Tensor[] operands, str program, str greedy_program, "
    "int num_samples=1) -> (Tensor, Tensor)",
    tags=_tags,
)
_library.define("argmax(Tensor hidden, Tensor weight, Tensor[] operands, str program) -> Tensor", tags=_tags)


def sample(
    hidden: Tensor, weight: Tensor, seed: Tensor, operands: Sequence[Tensor], program: str, num_samples: int = 1
) -> Tensor:
    """``torch.ops.flashsampling.sample``: draws from ``softmax(program(hidden @ weight.T))``, row by row.

    hidden ``[B, D]`` and weight ``[V, D]``: bfloat16, float16 or float32, one dtype, one device, any strides.
    seed: int64, 0-d or ``[B]``, same device. operands: tensors broadcastable to ``[B, V]``, same device.
    program: an epilogue program (see `kernels/epilogue.py`). Returns int64 ``[B, num_samples]``.

    Raises:
        ValueError, TypeError: an argument of wrong rank, size, dtype, device or value.
    """
    _check(hidden, weight, operands, program)
    _check_sampling(seed, hidden, num_samples)
    return _implementation(hidden).sample(hidden, weight, seed, list(operands), program, num_samples)


def sample_and_argmax(
    hidden: Tensor,
    weight: Tensor,
    seed: Tensor,
    operands: Sequence[Tensor],
    program: str,
    greedy_program: str,
    num_samples: int = 1,
) -> tuple[Tensor, Tensor]:
    """``torch.ops.flashsampling.sample_and_argmax``: `sample` of one program and `argmax` of another, over one product.

    Both programs read from the same ``operands``. Returns int64 ``[B, num_samples]`` and ``[B]``.
    """
    _check(hidden, weight, operands, program, greedy_program)
    _check_sampling(seed, hidden, num_samples)
    args = (hidden, weight, seed, list(operands), program, greedy_program, num_samples)
    return _implementation(hidden).sample_and_argmax(*args)


def argmax(hidden: Tensor, weight: Tensor, operands: Sequence[Tensor], program: str) -> Tensor:
    """``torch.ops.flashsampling.argmax``: the id of the largest ``program(hidden @ weight.T)``, lowest of equals.

    Arguments and errors as for `sample`. Returns int64 ``[B]``.
    """
    _check(hidden, weight, operands, program)
    return _implementation(hidden).argmax(hidden, weight, list(operands), program)


def _fake_sample(hidden, weight, seed, operands, program, num_samples=1):
    # A lone meta tensor among real ones ends up here.
    if seed.device != hidden.device:
        raise ValueError(f"seed is on {seed.device}, but hidden is on {hidden.device}")
    _fake_argmax(hidden, weight, operands, program)
    return hidden.new_empty((hidden.shape[0], num_samples), dtype=torch.int64)


def _fake_sample_and_argmax(hidden, weight, seed, operands, program, greedy_program, num_samples=1):
    return _fake_sample(hidden, weight, seed, operands, program, num_samples), _fake_argmax(
        hidden, weight, operands, ""
    )


def _fake_argmax(hidden, weight, operands, program):
    for name, x in (("weight", weight), *((f"operands[{i}]", x) for i, x in enumerate(operands))):
        if x.device != hidden.device:
            raise ValueError(f"{name} is on {x.device}, but hidden is on {hidden.device}")
    return hidden.new_empty((hidden.shape[0],), dtype=torch.int64)


for _name, _function, _fake in (
    ("sample", sample, _fake_sample),
    ("sample_and_argmax", sample_and_argmax, _fake_sample_and_argmax),
    ("argmax", argmax, _fake_argmax),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _function, _key)
    torch.library.register_fake(f"flashsampling::{_name}", _fake, lib=_library)


def _implementation(hidden: Tensor):
    if hidden.is_cuda:
        from .kernels import gemm_sample

        return gemm_sample
    from .kernels import reference

    return reference


# -- checks -------------------------------------------------------------------------------------------------------


def check_matrices(hidden: Tensor, weight: Tensor) -> None:
    """Raises ValueError or TypeError unless ``hidden`` is ``[..., D]`` and ``weight`` ``[V, D]``, of one kind."""
    for name, x in (("hidden", hidden), ("weight", weight)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(x).__name__}")
        if x.is_nested:
            raise TypeError(f"{name} is a nested tensor; it must be dense: pass its values(), one row a token")
        if x.dtype not in FLOATS:
            raise TypeError(f"{name} has dtype {x.dtype}; it must be bfloat16, float16 or float32")
    if hidden.dim() < 1:
        raise ValueError("hidden is 0-d; it must have shape [..., D]")
    if weight.dim() != 2:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; it must be [V, D]")
    if hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"hidden has {hidden.shape[-1]} features, but weight has {weight.shape[1]}: both must be D")
    if weight.shape[1] < 1:
        raise ValueError("hidden and weight have no features: D must be at least 1")
    if hidden.dtype != weight.dtype:
        raise TypeError(f"hidden is {hidden.dtype}, but weight is {weight.dtype}; cast one of them")
    if hidden.device != weight.device:
        raise ValueError(f"hidden is on {hidden.device}, but weight is on {weight.device}; move one of them")
    if weight.shape[0] < 1:
        raise ValueError("weight has no rows: there is no token to draw")


def _check(hidden: Tensor, weight: Tensor, operands: Sequence[Tensor], *programs: str) -> None:
    from .kernels.epilogue import Program

    check_matrices(hidden, weight)
    if hidden.dim() != 2:
        raise ValueError(f"hidden has shape {tuple(hidden.shape)}; it must be [B, D]")
    wanted = max(Program.parse(program).num_operands for program in programs)
    if wanted != len(operands):
        raise ValueError(f"the program reads {wanted} operands, but {len(operands)} were passed")
    rows, vocab = hidden.shape[0], weight.shape[0]
    for i, x in enumerate(operands):
        if x.device != hidden.device:
            raise ValueError(f"operands[{i}] is on {x.device}, but hidden is on {hidden.device}")
        if x.is_complex():
            raise TypeError(f"operands[{i}] has dtype {x.dtype}; it must be real or bool")
        sizes = (1, 1, *x.shape)[-2:]
        if x.dim() > 2 or sizes[0] not in (1, rows) or sizes[1] not in (1, vocab):
            raise ValueError(
                f"operands[{i}] of shape {tuple(x.shape)} does not broadcast to [B, V] = [{rows}, {vocab}]"
            )


def _check_sampling(seed: Tensor, hidden: Tensor, num_samples: int) -> None:
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, not {num_samples}")
    if seed.dtype is not torch.int64:
        raise TypeError(f"seed has dtype {seed.dtype}; it must be int64")
    if seed.device != hidden.device:
        raise ValueError(f"seed is on {seed.device}, but hidden is on {hidden.device}")
    if tuple(seed.shape) not in ((), (hidden.shape[0],)):
        raise ValueError(f"seed has shape {tuple(seed.shape)}; it must be 0-d or [B] = [{hidden.shape[0]}]")
