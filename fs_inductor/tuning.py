"""``max_autotune``: at compile time, measure which tile of the fused kernel is fastest for each call in a graph."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._python_dispatch import _disable_current_modes

from .traffic import hint_of

log = logging.getLogger(__name__)

_DEVICES = ("cuda",)
# By op: where its arguments have the operands and the program; a seed stands before those of a draw.
_PLACES = {
    "flashsampling::sample": (3, 4),
    "flashsampling::sample_and_argmax": (3, 4),
    "flashsampling::sample_sharded": (3, 4),
    "flashsampling::argmax": (2, 3),
    "flashsampling::argmax_sharded": (2, 3),
}


def tune_calls(graph: Graph) -> None:
    """Choose the tiles of all our calls on CUDA devices. What cannot be measured keeps its tile of the table."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return
    for node in graph.nodes:
        name = getattr(getattr(node.target, "_schema", None), "name", "")
        if name not in _PLACES or node.args[0].meta["val"].device.type not in _DEVICES:
            continue
        try:
            # The graph's tensors are fake; those to measure with must not be.
            with _disable_current_modes(), torch.no_grad():
                _tune(node, *_PLACES[name])
        except Exception:
            log.warning("the tile of %s could not be tuned", node, exc_info=True)


def _tune(node: Node, operands_at: int, program_at: int) -> None:
    from .kernels import autotune, gemm_sample
    from .kernels.epilogue import Program, operand_kinds

    hidden, weight = _like(node.args[0]), _like(node.args[1])
    if weight.shape[0] == 0 or hidden.shape[0] == 0:
        return
    # Those of a sharded call may span the whole vocabulary.
    operands = [x[..., : weight.shape[0]] if x.dim() else x for x in map(_like, node.args[operands_at])]
    program = node.args[program_at]
    kinds, _ = operand_kinds(operands, hidden.shape[0], weight.shape[0])
    programs = [Program.parse(text) for text in node.args[program_at : program_at + 2] if isinstance(text, str)]
    used = [kind for n, kind in enumerate(kinds) if any(one.uses(n) for one in programs)]
    one_draw = len(programs) == 1 and (operands_at == 2 or node.args[program_at + 1 : program_at + 2] in ((), (1,)))
    sharded = "sharded" in node.target._schema.name
    seed = torch.zeros((), dtype=torch.int64, device=hidden.device)
    for simple in {one_draw, one_draw and not sharded}:  # ranks agree inside the kernel, or behind it
        case = gemm_sample.case_of(hidden, weight, used, simple)
        if operands_at == 2:
            autotune.tune(case, lambda tile: gemm_sample.argmax(hidden, weight, operands, program, config=tile))
        else:
            autotune.tune(case, lambda tile: gemm_sample.sample(hidden, weight, seed, operands, program, config=tile))


def _like(node: Node) -> torch.Tensor:
    """A tensor of the node's shape, strides and dtype, whatever its values; dynamic sizes as in this call."""
    value = node.meta["val"]
    sizes, strides = ([_size(n) for n in ns] for ns in (value.shape, value.stride()))
    tensor = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
    # Zeros would run faster than any real product.
    return tensor.normal_() if value.is_floating_point() else tensor.zero_()


def _size(size: Any) -> int:
    hint = hint_of(size)
    if hint is None:
        raise ValueError(f"the size {size} is known at run time only")
    return hint
